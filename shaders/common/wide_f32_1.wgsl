// Text `wide`: a tensor of f32, an element at a time.
const WIDE_WIDTH: u32 = 1u;
@group(0) @binding(WIDE_BINDING) var<storage, read> wide: array<f32>;

fn wide_read(index: u32) -> array<f32, WIDE_WIDTH> {
    return array<f32, WIDE_WIDTH>(wide[index]);
}
