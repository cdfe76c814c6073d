// Text `out`: an output in bf16, rounded to nearest, ties to even.
// @include out_halves

fn out_half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, is_nan);
}

fn out_at(index: u32) -> f32 {
    return bitcast<f32>((atomicLoad(&out[index >> 1u]) >> (16u * (index & 1u))) << 16u);
}
