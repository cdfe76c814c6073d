// Slot matmul_reach: row m of A takes k <= m + diagonal, as causal attention weights do.

// How far a row reads along k.
fn reach(row: u32) -> u32 {
    return u32(clamp(i32(row) + params.diagonal + 1, 0, i32(params.k)));
}

// sum + a * b, in each component as far as its row reaches.
fn multiply_add(a: vec4<f32>, b: vec4<f32>, sum: vec4<f32>, k: u32, reaches: vec4<u32>) -> vec4<f32> {
    return select(sum, fma(a, b, sum), vec4(k) < reaches);
}
