// Slot matmul_reach: every row of A takes all of k.

// How far a row reads along k.
fn reach(row: u32) -> u32 {
    return params.k;
}

// sum + a * b, in each component as far as its row reaches.
fn multiply_add(a: vec4<f32>, b: vec4<f32>, sum: vec4<f32>, k: u32, reaches: vec4<u32>) -> vec4<f32> {
    return fma(a, b, sum);
}
