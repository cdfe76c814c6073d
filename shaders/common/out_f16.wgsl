// Text `out`: an output in f16, rounded to nearest, ties to even, in integers: drivers differ in how they round.
// @include out_halves

fn out_half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x477ff000u) {
        return sign | 0x7c00u; // 65520 and more
    }
    if (magnitude < 0x38800000u) {
        // Subnormal: units of 2^-24. Below half of one nothing is left.
        let shift = min(126u - (magnitude >> 23u), 25u);
        let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        let kept = mantissa >> shift;
        let rest = mantissa & ((1u << shift) - 1u);
        let middle = 1u << (shift - 1u);
        let up = rest > middle || (rest == middle && (kept & 1u) == 1u);
        return sign | (kept + select(0u, 1u, up));
    }
    return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13u) & 1u)) >> 13u);
}

fn out_at(index: u32) -> f32 {
    return unpack2x16float(atomicLoad(&out[index >> 1u]) >> (16u * (index & 1u))).x;
}
