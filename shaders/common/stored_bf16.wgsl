// Text `stored`: a tensor of bf16, two to a word, the even one in the lower half. A bf16 is the upper half of an f32.
@group(0) @binding(STORED_BINDING) var<storage, read> stored: array<u32>;

fn stored_at(index: u32) -> f32 {
    return bitcast<f32>((stored[index >> 1u] >> (16u * (index & 1u))) << 16u);
}
