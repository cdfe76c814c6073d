//! Tests that need no GPU. So far: the CPU reference, which decides what is right for everything else, against numbers worked by hand,
//! direct formulas, finite differences, properties of attention, and the golden cases.

mod backward;
mod compare;
mod formulas;
mod golden;
mod hand_worked;
mod input;
mod layers;
mod low_precision;
mod matrix;
mod properties;

use tilewise::reference::{self, Case, Gradients, Output};

/// A case of one batch entry, one head, `head_dim` 1 and `value_dim` 1.
fn one_head<'a>(q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Case<'a> {
    let shape = Case { batch: 1, q_heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1, ..Case::default() };
    Case { q_len: q.len(), kv_len: k.len(), q, k, v, ..shape }
}

fn attention(case: &Case<'_>) -> Output {
    reference::attention(case).unwrap()
}

/// The gradients of `Σ o · grad_o`.
fn gradients(case: &Case<'_>, grad_o: &[f32]) -> Gradients {
    reference::attention_backward(case, grad_o, None).unwrap()
}

/// Fails with the comparison's message unless `got` is within `tolerance` of `expected`.
#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    let comparison = reference::compare(got, expected, tolerance);
    assert!(comparison.passed(), "{comparison}");
}

/// Numbers in [-1, 1) that a seed fixes (`SplitMix64`): multiples of 2^-8, so that f16 holds them too; bf16 only those below 1/2.
fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f32::from(u16::try_from((x ^ (x >> 31)) >> 55).unwrap()) / 256.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the purpose")]
fn single(x: f64) -> f32 {
    x as f32
}
