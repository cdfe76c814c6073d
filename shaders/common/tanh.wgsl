// tanh to a few units in the last place: WGSL's own may be off by 1e-5.

// Lambert's continued fraction near 0, where 1 - e^(-2|t|) would cancel; exp beyond.
fn accurate_tanh(t: vec4<f32>) -> vec4<f32> {
    let a = min(abs(t), vec4(16.0));
    let t2 = min(a * a, vec4(1.0));
    let near = t * (135135.0 + t2 * (17325.0 + t2 * (378.0 + t2))) / (135135.0 + t2 * (62370.0 + t2 * (3150.0 + t2 * 28.0)));
    let e = exp2(a * -2.8853900817779268);
    return select(near, sign(t) * ((1.0 - e) / (1.0 + e)), abs(t) > vec4(1.0)); // of a NaN the first, which is NaN
}
