// Text `wide`: a tensor of f32, four at a time from a multiple of four on.
const WIDE_WIDTH: u32 = 4u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<vec4<f32>>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    let four = wide[index / WIDE_WIDTH];
    return array<f32, WIDE_WIDTH>(four.x, four.y, four.z, four.w);
}
