// Slot mask: a boolean mask, 32 keys to a word, the first in the lowest bit; 1 where the query may attend.
@group(0) @binding(7) var<storage, read> mask: array<u32>;

fn mask_word(at: u32) -> u32 {
    return mask[at];
}
