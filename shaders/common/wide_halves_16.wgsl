// Text `wide`: a tensor of 16-bit numbers, sixteen at a time from a multiple of sixteen on, four to a word of 64 bits. The text `pair` makes f32s of 32.
const WIDE_WIDTH: u32 = 16u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<vec4<u64>>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    let words = wide[index / WIDE_WIDTH];
    let w0 = wide_pair(u32(words.x & 0xfffffffflu));
    let w1 = wide_pair(u32(words.x >> 32u));
    let w2 = wide_pair(u32(words.y & 0xfffffffflu));
    let w3 = wide_pair(u32(words.y >> 32u));
    let w4 = wide_pair(u32(words.z & 0xfffffffflu));
    let w5 = wide_pair(u32(words.z >> 32u));
    let w6 = wide_pair(u32(words.w & 0xfffffffflu));
    let w7 = wide_pair(u32(words.w >> 32u));
    return array<f32, WIDE_WIDTH>(
        w0.x, w0.y, w1.x, w1.y, w2.x, w2.y, w3.x, w3.y,
        w4.x, w4.y, w5.x, w5.y, w6.x, w6.y, w7.x, w7.y,
    );
}
