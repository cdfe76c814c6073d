//! The reference against the same maths written another way.

use tilewise::reference::{
    Align, Broadcast, Case, MaskMod, Row, ScoreMod, attention_packed, attention_rows, matmul, matmul_transposed,
    softmax_rows,
};

use super::{assert_close, attention, one_head, random, single};

/// Attention with everything in it that combines.
fn rich<'a>(q: &'a [f32], k: &'a [f32], v: &'a [f32], bias: &'a [f32], mask: &'a [bool]) -> Case<'a> {
    let shape =
        Case { batch: 2, q_heads: 4, kv_heads: 2, q_len: 7, kv_len: 11, head_dim: 5, value_dim: 3, ..Case::default() };
    Case {
        q,
        k,
        v,
        causal: true,
        window_left: Some(6),
        softcap: Some(0.7),
        alibi_slopes: Some(&[0.5, 0.25, 0.125, 0.0625]),
        bias: Some(Broadcast { data: bias, shape: [1, 4, 7, 11] }),
        mask: Some(Broadcast { data: mask, shape: [2, 1, 1, 11] }),
        sinks: Some(&[0.5, f32::NEG_INFINITY, -1.0, 2.0]),
        kv_lens: Some(&[9, 11]),
        ..shape
    }
}

/// The whole definition as one formula per element over a dense table of scores, without a maximum subtracted.
#[test]
fn a_dense_formula() {
    let (q, k, v, bias) = (random(1, 280), random(2, 220), random(3, 132), random(4, 308));
    let mask: Vec<bool> = random(5, 22).iter().map(|&x| x < 0.6).collect();
    let case = rich(&q, &k, &v, &bias, &mask);
    let output = attention(&case);
    let (mut o, mut lse) = (vec![], vec![]);
    for b in 0..2 {
        for h in 0..4 {
            for i in 0..7 {
                let kv_len = [9, 11][b];
                let score = |j: usize| {
                    let p = i as f64 + kv_len as f64 - 7.0;
                    let far = (p - j as f64).abs();
                    let keep = j < kv_len && j as f64 <= p && j as f64 >= p - 6.0 && mask[b * 11 + j];
                    let dot: f64 = (0..5)
                        .map(|c| f64::from(q[((b * 4 + h) * 7 + i) * 5 + c] * k[((b * 2 + h / 2) * 11 + j) * 5 + c]))
                        .sum();
                    let s = 0.7 * (dot / 5.0_f64.sqrt() / 0.7).tanh() - 0.5 / f64::from(1 << h) * far
                        + f64::from(bias[(h * 7 + i) * 11 + j]);
                    if keep { s.exp() } else { 0.0 }
                };
                let sink = [0.5_f64.exp(), 0.0, (-1.0_f64).exp(), 2.0_f64.exp()][h];
                let sum = (0..11).map(score).sum::<f64>() + sink;
                lse.push(sum.ln());
                for c in 0..3 {
                    let mix: f64 = (0..11).map(|j| score(j) * f64::from(v[((b * 2 + h / 2) * 11 + j) * 3 + c])).sum();
                    o.push(if mix == 0.0 { 0.0 } else { mix / sum });
                }
            }
        }
    }
    assert_close(&output.o, &o, 1e-14);
    assert_close(&output.lse, &lse, 1e-14);
}

/// Three steps on whole matrices, as a naive implementation does it: A·Bᵀ, softmax of rows, A·B, with f32 between the steps.
#[test]
fn matrices() {
    let (q, k, v) = (random(1, 2 * 9 * 8), random(2, 2 * 13 * 8), random(3, 2 * 13 * 4));
    let shape =
        Case { batch: 1, q_heads: 2, kv_heads: 2, q_len: 9, kv_len: 13, head_dim: 8, value_dim: 4, ..Case::default() };
    let output = attention(&Case { q: &q, k: &k, v: &v, ..shape });
    let scores = matmul_transposed(2, [9, 8, 13], &q, &k).unwrap().c;
    let scaled: Vec<f32> = scores.iter().map(|s| single(s / 8.0_f64.sqrt())).collect();
    let softmax = softmax_rows(18, 13, &scaled).unwrap();
    let weights: Vec<f32> = softmax.p.iter().map(|&p| single(p)).collect();
    assert_close(&softmax.lse, &output.lse, 1e-6);
    assert_close(&matmul(2, [9, 13, 4], &weights, &v).unwrap().c, &output.o, 1e-6);
}

/// ln(e^a + e^b) = b + ln(1 + e^(a - b)), added up key by key: the sum that an online softmax keeps.
#[test]
fn log_sum_exp_added_up_key_by_key() {
    let scores: Vec<f32> = random(7, 500).iter().map(|x| x * 300.0).collect();
    let lse = scores.iter().fold(f64::NEG_INFINITY, |lse, &s| {
        let (low, high) = (lse.min(f64::from(s)), lse.max(f64::from(s)));
        high + (low - high).exp().ln_1p()
    });
    assert_close(&attention(&one_head(&[1.0], &scores, &[0.0; 500])).lse, &[lse], 1e-12);
}

/// Mods are options written by hand.
#[test]
fn mods() {
    let (q, k, v) = (random(1, 280), random(2, 220), random(3, 132));
    let shape =
        Case { batch: 2, q_heads: 4, kv_heads: 2, q_len: 7, kv_len: 11, head_dim: 5, value_dim: 3, ..Case::default() };
    let case = Case { q: &q, k: &k, v: &v, ..shape };
    let slopes = [0.5, 0.25, 0.125, 1.0];
    let score_mod = |s, _, h: usize, i: usize, j: usize| s - f64::from(slopes[h]) * (i as f64 + 4.0 - j as f64).abs();
    let mask_mod = |_, _, i, j| j <= i + 4;
    let by_hand = Case { score_mod: Some(ScoreMod(&score_mod)), mask_mod: Some(MaskMod(&mask_mod)), ..case };
    let built_in = attention(&Case { alibi_slopes: Some(&slopes), causal: true, ..case });
    let by_hand = attention(&by_hand);
    assert_close(&by_hand.o, &built_in.o, 1e-15);
    assert_close(&by_hand.lse, &built_in.lse, 1e-15);
}

/// Sequences of different lengths: packed, and one by one with heads outermost.
#[test]
fn packed_sequences_one_by_one() {
    let lens: [(usize, usize); 4] = [(3, 5), (0, 2), (2, 0), (4, 1)];
    let (q, k, v) = (random(1, 9 * 2 * 4), random(2, 8 * 4), random(3, 8 * 3));
    let total =
        Case { batch: 4, q_heads: 2, kv_heads: 1, q_len: 9, kv_len: 8, head_dim: 4, value_dim: 3, ..Case::default() };
    let slopes = random(4, 8);
    let options = Case { causal: true, align: Align::TopLeft, alibi_slopes: Some(&slopes), ..total };
    let packed =
        attention_packed(&Case { q: &q, k: &k, v: &v, ..options }, &[0, 3, 3, 5, 9], &[0, 5, 7, 7, 8]).unwrap();
    let (mut q_start, mut kv_start) = (0, 0);
    for (n, (q_len, kv_len)) in lens.into_iter().enumerate() {
        for h in 0..2 {
            let q: Vec<f32> = (q_start..q_start + q_len).flat_map(|i| &q[(i * 2 + h) * 4..][..4]).copied().collect();
            let one = attention(&Case {
                batch: 1,
                q_heads: 1,
                q_len,
                kv_len,
                q: &q,
                k: &k[kv_start * 4..(kv_start + kv_len) * 4],
                v: &v[kv_start * 3..(kv_start + kv_len) * 3],
                alibi_slopes: Some(&slopes[n * 2 + h..][..1]),
                ..options
            });
            for i in 0..q_len {
                assert_eq!(packed.o[((q_start + i) * 2 + h) * 3..][..3], one.o[i * 3..][..3]);
                assert_eq!(packed.lse[h * 9 + q_start + i], one.lse[i]);
            }
        }
        (q_start, kv_start) = (q_start + q_len, kv_start + kv_len);
    }
}

/// Big enough for all cores; a single row is computed by one. The bits are the same.
#[test]
fn chosen_rows_have_the_same_bits() {
    let (len, dim) = (300, 16);
    let (q, k, v) = (random(1, 2 * len * dim), random(2, len * dim), random(3, len * dim));
    let shape = Case {
        batch: 1,
        q_heads: 2,
        kv_heads: 1,
        q_len: len,
        kv_len: len,
        head_dim: dim,
        value_dim: dim,
        ..Case::default()
    };
    let case = Case { q: &q, k: &k, v: &v, causal: true, ..shape };
    let whole = attention(&case);
    assert_eq!(whole, attention(&case));
    for (head, row) in [(0, 0), (1, 299), (0, 150), (1, 7)] {
        let some = attention_rows(&case, &[Row { batch: 0, head, row }]).unwrap();
        let n = head * len + row;
        assert_eq!(some.o, whole.o[n * dim..(n + 1) * dim]);
        assert_eq!(some.lse, [whole.lse[n]]);
    }
    assert!(attention_rows(&case, &[Row { batch: 0, head: 2, row: 0 }]).is_err());
}
