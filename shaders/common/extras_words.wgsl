// Slot extras: the small tables of a call, one after the other in words: so that all of them together take one binding.
@group(0) @binding(8) var<storage, read> extras: array<u32>;

fn extra(at: u32) -> u32 {
    return extras[at];
}

// Of one pass nothing is kept.
fn store_extra(at: u32, word: u32) {
}
