// Text `wide`: a tensor of f32, eight at a time from a multiple of eight on, two to a word of 64 bits.
const WIDE_WIDTH: u32 = 8u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<vec4<u64>>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    let words = wide[index / WIDE_WIDTH];
    return array<f32, WIDE_WIDTH>(
        bitcast<f32>(u32(words.x & 0xfffffffflu)),
        bitcast<f32>(u32(words.x >> 32u)),
        bitcast<f32>(u32(words.y & 0xfffffffflu)),
        bitcast<f32>(u32(words.y >> 32u)),
        bitcast<f32>(u32(words.z & 0xfffffffflu)),
        bitcast<f32>(u32(words.z >> 32u)),
        bitcast<f32>(u32(words.w & 0xfffffffflu)),
        bitcast<f32>(u32(words.w >> 32u)),
    );
}
