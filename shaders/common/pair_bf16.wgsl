// Text `pair`: two neighbours of a tensor of bf16, the even one in the lower half of the word. A bf16 is the upper half of an f32.
fn pair(word: u32) -> vec2<f32> {
    return vec2(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
