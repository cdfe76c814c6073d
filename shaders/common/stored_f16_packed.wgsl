// Text `stored`: a tensor of f16, two to a word, the even one in the lower half.
@group(0) @binding(STORED_BINDING) var<storage, read> stored: array<u32>;

fn stored_at(index: u32) -> f32 {
    return unpack2x16float(stored[index >> 1u] >> (16u * (index & 1u))).x;
}
