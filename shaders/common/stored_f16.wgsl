// Text `stored`: a tensor of f16, on devices that have the type.
enable f16;
@group(0) @binding(STORED_BINDING) var<storage, read> stored: array<f16>;

fn stored_at(index: u32) -> f32 {
    return f32(stored[index]);
}
