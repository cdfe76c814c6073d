// Text `pair`: two neighbours of a tensor of f16, the even one in the lower half of the word.
fn pair(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}
