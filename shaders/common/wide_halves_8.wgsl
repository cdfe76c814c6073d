// Text `wide`: a tensor of 16-bit numbers, eight at a time from a multiple of eight on. The text `pair` makes f32s of a word.
const WIDE_WIDTH: u32 = 8u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<vec4<u32>>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    let words = wide[index / WIDE_WIDTH];
    let w0 = wide_pair(words.x);
    let w1 = wide_pair(words.y);
    let w2 = wide_pair(words.z);
    let w3 = wide_pair(words.w);
    return array<f32, WIDE_WIDTH>(w0.x, w0.y, w1.x, w1.y, w2.x, w2.y, w3.x, w3.y);
}
