// Text `stored`: a tensor of f32.
@group(0) @binding(STORED_BINDING) var<storage, read> stored: array<f32>;

fn stored_at(index: u32) -> f32 {
    return stored[index];
}
