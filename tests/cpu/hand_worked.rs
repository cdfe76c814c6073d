//! The numbers worked by hand. Where q = 0 all weights are equal, so o is the mean of the
//! visible v and lse the logarithm of their number.

use core::f64::consts::LN_2;

use tilewise::reference::{Align, Broadcast, Case, attention_backward, matmul_transposed, softmax_rows};

use super::{assert_close, attention, gradients, one_head, random};

const NONE: f64 = f64::NEG_INFINITY;

fn ln(x: f64) -> f64 {
    x.ln()
}

#[test]
fn scores_of_the_article() {
    let dots = matmul_transposed(1, [1, 2, 2], &[2.0, 0.0], &[1.0, 2.0, 2.0, 1.0]).unwrap();
    assert_eq!(dots.c, [2.0, 4.0]);
}

#[test]
fn softmax_of_the_article() {
    // The article's table prints 0.84, 0.11, 0.05, which doesn't follow from its own exponentials 54.6, 7.39, 1.65.
    let softmax = softmax_rows(1, 3, &[4.0, 2.0, 0.5]).unwrap();
    assert_close(&softmax.p, &[0.857_977, 0.116_115, 0.025_909], 5e-7);

    let identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    let case = one_head(&[1.0], &[4.0, 2.0, 0.5], &identity);
    assert_close(&attention(&Case { value_dim: 3, ..case }).o, &softmax.p, 1e-15);
}

#[test]
fn mix_of_the_article() {
    let k = [4.0_f32.ln(), 0.0]; // weights 0.8 and 0.2
    let case = one_head(&[1.0], &k, &[10.0, 10.0, 0.0, 0.0]);
    assert_close(&attention(&Case { value_dim: 2, ..case }).o, &[8.0, 8.0], 1e-6);
}

#[test]
fn causal_with_fewer_queries_than_keys() {
    let v = [1.0, 2.0, 3.0, 4.0, 5.0];
    let case = Case { causal: true, ..one_head(&[0.0; 2], &[0.0; 5], &v) };
    let bottom_right = attention(&case);
    assert_close(&bottom_right.o, &[2.5, 3.0], 1e-15);
    assert_close(&bottom_right.lse, &[ln(4.0), ln(5.0)], 1e-15);
    let top_left = attention(&Case { align: Align::TopLeft, ..case });
    assert_close(&top_left.o, &[1.0, 1.5], 1e-15);
    assert_close(&top_left.lse, &[0.0, LN_2], 1e-15);
}

#[test]
fn causal_with_more_queries_than_keys() {
    let output = attention(&Case { causal: true, ..one_head(&[0.0; 5], &[0.0; 2], &[10.0, 20.0]) });
    assert_eq!(output.o, [0.0, 0.0, 0.0, 10.0, 15.0]);
    assert_eq!(output.lse, [NONE, NONE, NONE, 0.0, LN_2]);
}

#[test]
fn lengths_per_batch_entry() {
    let v = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let shape = Case { batch: 2, q_len: 2, kv_len: 6, ..one_head(&[0.0; 4], &[0.0; 12], &v) };
    let output = attention(&Case { causal: true, kv_lens: Some(&[5, 3]), ..shape });
    assert_close(&output.o, &[2.5, 3.0, 1.5, 2.0], 1e-15);
}

#[test]
fn query_lengths_per_batch_entry() {
    // One query of two in use: it is the last one, and sees all five keys; the other is padding.
    let v = [1.0, 2.0, 3.0, 4.0, 5.0];
    let output = attention(&Case { causal: true, q_lens: Some(&[1]), ..one_head(&[0.0; 2], &[0.0; 5], &v) });
    assert_close(&output.o, &[3.0, 0.0], 1e-15);
    assert_close(&output.lse, &[ln(5.0), NONE], 1e-15);
}

#[test]
fn windows() {
    let v = [1.0, 2.0, 3.0, 4.0, 5.0];
    let case = Case { window_right: Some(0), ..one_head(&[0.0; 5], &[0.0; 5], &v) };
    assert_close(&attention(&Case { window_left: Some(1), ..case }).o, &[1.0, 1.5, 2.5, 3.5, 4.5], 1e-15);
    assert_close(&attention(&Case { window_left: Some(0), ..case }).o, &[1.0, 2.0, 3.0, 4.0, 5.0], 1e-15);
}

#[test]
fn causal_and_a_key_mask() {
    let mask = Broadcast { data: &[false, true, true], shape: [1, 1, 1, 3] };
    let case = Case { causal: true, ..one_head(&[0.0; 3], &[0.0; 3], &[1.0, 2.0, 4.0]) };
    assert_close(&attention(&Case { mask: Some(mask), ..case }).o, &[0.0, 2.0, 3.0], 1e-15);
    // The same as a bias.
    let bias = Broadcast { data: &[f32::NEG_INFINITY, 0.0, 0.0], shape: [1, 1, 1, 3] };
    assert_close(&attention(&Case { bias: Some(bias), ..case }).o, &[0.0, 2.0, 3.0], 1e-15);
}

#[test]
fn scales() {
    let (q, k) = ([2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let shape =
        Case { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 2, head_dim: 4, value_dim: 1, ..Case::default() };
    let case = Case { q: &q, k: &k, v: &[1.0, 0.0], ..shape };
    for (softmax_scale, expected) in [(None, 0.880_797), (Some(1.0), 0.982_014), (Some(0.0), 0.5)] {
        assert_close(&attention(&Case { softmax_scale, ..case }).o, &[expected], 5e-7);
    }
}

#[test]
fn groups_of_query_heads() {
    let shape = Case { q_heads: 6, kv_heads: 2, q_len: 1, kv_len: 1, ..one_head(&[0.0; 6], &[0.0; 2], &[1.0, 2.0]) };
    assert_eq!(attention(&shape).o, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
}

#[test]
fn softcap() {
    let options = Case { softcap: Some(1.0), softmax_scale: Some(1.0), ..Case::default() };
    let case = Case { q_len: 1, kv_len: 2, batch: 1, q_heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1, ..options };
    let two = attention(&Case { q: &[100.0], k: &[1.0, -1.0], v: &[1.0, 0.0], ..case });
    assert_close(&two.o, &[0.880_797], 5e-7);
    // A masked key has no effect: its score isn't capped back to -1.
    let mask = Broadcast { data: &[true, true, false], shape: [1, 1, 1, 3] };
    let three = Case { kv_len: 3, q: &[100.0], k: &[1.0, -1.0, 1.0], v: &[1.0, 0.0, 1000.0], mask: Some(mask), ..case };
    assert_eq!(attention(&three).o, two.o);
}

#[test]
fn sinks() {
    let sinks = [0.0, 2.0_f32.ln()];
    let case = one_head(&[0.0; 2], &[0.0; 4], &[1.0; 4]);
    let case = Case { q_heads: 2, kv_heads: 2, q_len: 1, kv_len: 2, ..case };
    let output = attention(&Case { sinks: Some(&sinks), ..case });
    assert_close(&output.o, &[2.0 / 3.0, 0.5], 1e-7);
    assert_close(&output.lse, &[ln(3.0), ln(4.0)], 1e-7);
    // A sink of -inf is none.
    assert_eq!(attention(&Case { sinks: Some(&[f32::NEG_INFINITY; 2]), ..case }), attention(&case));
}

#[test]
fn a_sink_and_nothing_to_attend_to() {
    let case = Case { kv_lens: Some(&[0]), ..one_head(&[0.0], &[0.0], &[7.0]) };
    let output = attention(&Case { sinks: Some(&[3.0]), ..case });
    assert_eq!((output.o, output.lse), (vec![0.0], vec![3.0]));
}

#[test]
fn big_scores() {
    let (q, k) = ([30.0; 128], [30.0; 256]); // dot product 115200, past the largest f16
    let shape = Case { head_dim: 128, q_len: 1, kv_len: 2, ..one_head(&q, &k, &[1.0, 3.0]) };
    let output = attention(&shape);
    assert_close(&output.o, &[2.0], 1e-15);
    assert_close(&output.lse, &[115_200.0 / 128.0_f64.sqrt() + LN_2], 1e-11);
}

#[test]
fn rising_scores() {
    let rising: Vec<f32> = (0..96_u8).map(f32::from).collect();
    let falling: Vec<f32> = rising.iter().rev().copied().collect();
    for scores in [&rising, &falling] {
        let output = attention(&one_head(&[1.0], scores, scores));
        assert_close(&output.o, &[94.418_02], 5e-6);
        assert_close(&output.lse, &[95.458_7], 5e-5);
    }
    let higher: Vec<f32> = rising.iter().map(|x| x + 1000.0).collect();
    assert_close(&attention(&one_head(&[1.0], &higher, &rising)).lse, &[1_095.458_7], 5e-5);
}

#[test]
fn alibi() {
    // Row 1 of 2 stands at position 2 of 3: distances 2, 1, 0. Row 0: 1, 0, 1. Slope ln 2 halves the weight with each step.
    let slope = 2.0_f32.ln();
    let case = Case { alibi_slopes: Some(&[slope]), ..one_head(&[0.0; 2], &[0.0; 3], &[1.0, 2.0, 4.0]) };
    let output = attention(&case);
    assert_close(&output.o, &[(0.5 + 2.0 + 2.0) / 2.0, (0.25 + 1.0 + 4.0) / 1.75], 1e-7);
    assert_close(&output.lse, &[ln(2.0), ln(1.75)], 1e-7);
    // Top-left: row 0 at position 0, row 1 at position 1.
    let output = attention(&Case { align: Align::TopLeft, ..case });
    assert_close(&output.o, &[(1.0 + 1.0 + 1.0) / 1.75, (0.5 + 2.0 + 2.0) / 2.0], 1e-7);
}

/// One key has the weight 1 whatever its score (field case H1).
#[test]
fn one_key_backward() {
    let (q, k, v) = (random(1, 16), random(2, 16), random(3, 16));
    let shape = Case { q_len: 1, kv_len: 1, head_dim: 16, value_dim: 16, ..one_head(&q, &k, &v) };
    let gradients = gradients(&shape, &[1.0; 16]);
    assert_eq!(gradients.dq, [0.0; 16]);
    assert_eq!(gradients.dk, [0.0; 16]);
    assert_eq!(gradients.dv, [1.0; 16]);
}

/// dv of a KV head sums over its query heads (field case H3).
#[test]
fn grouped_heads_backward() {
    let case = Case { q_heads: 4, q_len: 1, ..one_head(&[1.0, -2.0, 0.5, 3.0], &[0.7], &[5.0]) };
    let gradients = gradients(&case, &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(gradients.dv, [10.0]);
    assert_eq!((gradients.dq, gradients.dk), (vec![0.0; 4], vec![0.0]));
}

/// Two keys of the same weight: o = (v0 + v1) / 2, and do/ds0 = (v0 - v1) / 4 = -do/ds1.
#[test]
fn two_keys_backward() {
    let case = Case { softmax_scale: Some(0.5), ..one_head(&[0.0], &[1.0, 3.0], &[10.0, 20.0]) };
    let gradients = gradients(&case, &[2.0]);
    assert_eq!(gradients.dv, [1.0, 1.0]);
    assert_eq!(gradients.dq, [0.5 * 2.0 * (-2.5 + 2.5 * 3.0)]);
    assert_eq!(gradients.dk, [0.0, 0.0]);
}

/// q = 0, one key of value 4 and a sink of 0: both have the weight 1/2, o = 2, dlse/ds = dlse/dsink = 1/2, and
/// do/ds = 4 (1/2 - 1/4) = 1 = -do/dsink.
#[test]
fn a_sink_backward() {
    let case = Case { sinks: Some(&[0.0]), ..one_head(&[0.0], &[1.0], &[4.0]) };
    let gradients = attention_backward(&case, &[3.0], Some(&[10.0])).unwrap();
    assert_eq!(gradients.dsinks, Some(vec![10.0 * 0.5 - 3.0 * 1.0]));
    assert_eq!(gradients.dq, [3.0 * 1.0 + 10.0 * 0.5]);
    assert_eq!(gradients.dv, [1.5]);
}
