// Text `wide`: a tensor of f16, an element at a time, two to a word, the even one in the lower half.
const WIDE_WIDTH: u32 = 1u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<u32>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    return array<f32, WIDE_WIDTH>(unpack2x16float(wide[index / 2u] >> (16u * (index % 2u))).x);
}
