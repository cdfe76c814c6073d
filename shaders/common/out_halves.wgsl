// Text `out`: an output as 16-bit numbers, two to a word, the even one in the lower half. Rows of an odd width share words, and two
// invocations then write the halves of one: each clears and sets its own half alone, so that their order has no effect.
@group(0) @binding(OUT_BINDING) var<storage, read_write> out: array<atomic<u32>>;

fn out_store_word(word: u32, lower: u32, upper: u32, has_lower: bool, has_upper: bool) {
    if (has_lower && has_upper) {
        atomicStore(&out[word], lower | (upper << 16u));
    } else if (has_lower || has_upper) {
        atomicAnd(&out[word], select(0x0000ffffu, 0xffff0000u, has_lower));
        atomicOr(&out[word], select(upper << 16u, lower, has_lower));
    }
}

// Stores the first `count` of four neighbours.
fn out_store(first: u32, four: vec4<f32>, count: u32) {
    let x = vec4(out_half_bits(four.x), out_half_bits(four.y), out_half_bits(four.z), out_half_bits(four.w));
    let word = first >> 1u;
    if ((first & 1u) == 0u) {
        out_store_word(word, x.x, x.y, count > 0u, count > 1u);
        out_store_word(word + 1u, x.z, x.w, count > 2u, count > 3u);
    } else {
        out_store_word(word, 0u, x.x, false, count > 0u);
        out_store_word(word + 1u, x.y, x.z, count > 1u, count > 2u);
        out_store_word(word + 2u, x.w, 0u, count > 3u, false);
    }
}
