//! The numbers that all benchmarks compute with.

/// Numbers of mean 0 and variance 1, evenly distributed, which a seed fixes (`SplitMix64`).
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * 3f32.sqrt()
    };
    (0..len).map(|_| next()).collect()
}
