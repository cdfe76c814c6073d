// Text `wide`: a tensor of 16-bit numbers, an element at a time, two to a word. The text `pair` makes f32s of a word.
const WIDE_WIDTH: u32 = 1u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<u32>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    return array<f32, WIDE_WIDTH>(wide_pair(wide[index / 2u] >> (16u * (index % 2u))).x);
}
