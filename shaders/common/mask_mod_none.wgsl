// Slot mask_mod: no mask of the user's.
fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
    return true;
}
