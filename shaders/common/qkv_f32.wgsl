// Slot qkv: the inputs q, k and v, and how one element of each is read as f32.
@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;

fn q_at(index: u32) -> f32 {
    return q[index];
}

fn k_at(index: u32) -> f32 {
    return k[index];
}

fn v_at(index: u32) -> f32 {
    return v[index];
}
