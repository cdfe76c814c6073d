// Slot matmul_reach: every row of A takes all of k.

// How far a row reads along k.
fn reach(row: u32) -> u32 {
    return params.k;
}

// sum + a * b, as far as the row reaches.
fn multiply_add(a: f32, b: vec4<f32>, sum: vec4<f32>, row: u32, k: u32) -> vec4<f32> {
    return fma(vec4(a), b, sum);
}
