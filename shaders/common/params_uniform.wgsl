// Slot params: what the host tells a dispatch, in a uniform.
@group(0) @binding(0) var<uniform> params: Params;
