// Slot params: what the host tells a dispatch, in the commands themselves, on devices that have room for it there.
var<immediate> params: Params;
