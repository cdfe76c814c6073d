// Slot extras: no small tables.
fn extra(at: u32) -> u32 {
    return 0u;
}

// Of one pass nothing is kept.
fn store_extra(at: u32, word: u32) {
}
