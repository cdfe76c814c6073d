// Text `out`: an output in f32.
@group(0) @binding(OUT_BINDING) var<storage, read_write> out: array<f32>;

fn out_at(index: u32) -> f32 {
    return out[index];
}

// Stores the first `count` of four neighbours.
fn out_store(first: u32, four: vec4<f32>, count: u32) {
    // @unroll
    for (var e = 0u; e < 4u; e++) {
        if (e < count) {
            out[first + e] = four[e];
        }
    }
}
