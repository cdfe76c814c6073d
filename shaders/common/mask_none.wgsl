// Slot mask: no boolean mask.
fn mask_word(at: u32) -> u32 {
    return 0xffffffffu;
}
