//! What is accepted and refused, sizes of zero, and NaN.

use tilewise::Error;
use tilewise::reference::{self, Broadcast, Case, attention_packed};

use super::{assert_close, attention, one_head, random};

const NAN: f32 = f32::NAN;

#[track_caller]
fn refused(case: &Case<'_>, words: &[&str]) {
    let Err(Error::Invalid(message)) = reference::attention(case) else { panic!("accepted") };
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

#[test]
fn refuses_what_has_no_meaning() {
    let (q, k, v) = ([0.0; 4], [0.0; 5], [0.0; 5]);
    let case = one_head(&q, &k, &v);
    refused(&Case { kv_heads: 0, ..case }, &["kv_heads = 0"]);
    refused(&Case { q_heads: 3, kv_heads: 2, ..case }, &["q_heads = 3", "kv_heads = 2"]);
    refused(&Case { head_dim: 0, ..case }, &["head_dim = 0"]);
    refused(&Case { q_len: 5, ..case }, &["q has 4", "5"]);
    refused(&Case { kv_len: 4, ..case }, &["k has 5", "4"]);
    refused(&Case { value_dim: 2, ..case }, &["v has 5", "10"]);
    refused(&Case { batch: usize::MAX, ..case }, &["q of shape"]);
    refused(&Case { softmax_scale: Some(f64::NAN), ..case }, &["softmax_scale = NaN"]);
    refused(&Case { softmax_scale: Some(f64::INFINITY), ..case }, &["softmax_scale = inf"]);
    refused(&Case { softcap: Some(0.0), ..case }, &["softcap = 0"]);
    refused(&Case { softcap: Some(-1.0), ..case }, &["softcap = -1"]);
    refused(&Case { softcap: Some(f64::NAN), ..case }, &["softcap = NaN"]);
    refused(
        &Case { mask: Some(Broadcast { data: &[true; 20], shape: [1, 1, 5, 4] }), ..case },
        &["mask", "[1, 1, 5, 4]", "[1, 1, 4, 5]"],
    );
    refused(&Case { bias: Some(Broadcast { data: &[0.0; 4], shape: [1, 1, 1, 5] }), ..case }, &["bias has 4", "5"]);
    refused(&Case { alibi_slopes: Some(&[0.0; 2]), ..case }, &["alibi_slopes has 2"]);
    refused(&Case { sinks: Some(&[0.0; 2]), ..case }, &["sinks has 2"]);
    refused(&Case { kv_lens: Some(&[6]), ..case }, &["kv_lens[0] = 6", "5"]);
    refused(&Case { q_lens: Some(&[5]), ..case }, &["q_lens[0] = 5", "4"]);
    refused(&Case { kv_lens: Some(&[]), ..case }, &["kv_lens has 0"]);
}

#[test]
fn refuses_boundaries_that_are_none() {
    let (q, k, v) = ([0.0; 4], [0.0; 5], [0.0; 5]);
    let case = Case { batch: 2, ..one_head(&q, &k, &v) };
    assert!(attention_packed(&case, &[0, 1, 4], &[0, 5, 5]).is_ok());
    for bad in [&[0, 5, 4][..], &[1, 2, 4], &[0, 2, 3], &[0, 4], &[]] {
        assert!(matches!(attention_packed(&case, bad, &[0, 5, 5]), Err(Error::Invalid(_))), "{bad:?}");
    }
    let lens = Case { kv_lens: Some(&[1, 1]), ..case };
    assert!(matches!(attention_packed(&lens, &[0, 1, 4], &[0, 5, 5]), Err(Error::Invalid(_))));
}

#[test]
fn sizes_of_zero() {
    let none = Case { batch: 1, q_heads: 2, kv_heads: 1, q_len: 2, head_dim: 3, value_dim: 2, ..Case::default() };
    let no_keys = attention(&Case { q: &[1.0; 12], ..none });
    assert_eq!((no_keys.o, no_keys.lse), (vec![0.0; 8], vec![f64::NEG_INFINITY; 4]));
    let no_keys = attention(&Case { q: &[1.0; 12], sinks: Some(&[1.0, 2.0]), ..none });
    assert_eq!((no_keys.o, no_keys.lse), (vec![0.0; 8], vec![1.0, 1.0, 2.0, 2.0]));
    let no_queries = attention(&Case { q_len: 0, kv_len: 1, k: &[1.0; 3], v: &[1.0; 2], ..none });
    assert!(no_queries.o.is_empty() && no_queries.lse.is_empty());
    assert!(attention(&Case { batch: 0, kv_len: 7, ..none }).o.is_empty());
    let no_values = attention(&Case { value_dim: 0, q: &[0.0; 12], kv_len: 1, k: &[1.0; 3], ..none });
    assert_eq!((no_values.o, no_values.lse), (vec![], vec![0.0; 4]));
    assert!(attention_packed(&Case { q_len: 0, batch: 0, ..none }, &[0], &[0]).unwrap().o.is_empty());
}

#[test]
fn visible_nan_shows_in_its_row_only() {
    let (mut q, k, v) = (random(1, 4), random(2, 4), random(3, 4));
    let clean = attention(&Case { causal: true, ..one_head(&q, &k, &v) });
    q[1] = NAN;
    let output = attention(&Case { causal: true, ..one_head(&q, &k, &v) });
    for i in 0..4 {
        assert_eq!(output.o[i].is_nan(), i == 1);
        assert_eq!(output.lse[i].is_nan(), i == 1);
        assert!(i == 1 || output.o[i] == clean.o[i]);
    }
    // In a key or a value, every row that sees it has it: the last two of a causal four.
    let (mut nan_k, mut nan_v) = (k.clone(), v.clone());
    (nan_k[2], nan_v[2]) = (NAN, NAN);
    let q = random(1, 4);
    let output = attention(&Case { causal: true, ..one_head(&q, &nan_k, &v) });
    assert_eq!(output.lse.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [false, false, true, true]);
    let output = attention(&Case { causal: true, ..one_head(&q, &k, &nan_v) });
    assert_eq!(output.o.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [false, false, true, true]);
    assert_eq!(output.lse, clean.lse);
}

#[test]
fn masked_nan_and_infinity_have_no_effect() {
    let (q, k, v) = (random(1, 3), random(2, 5), random(3, 5));
    let mask = Broadcast { data: &[true, true, false, true, false], shape: [1, 1, 1, 5] };
    let bias_data = [0.0, 0.0, 0.0, f32::NEG_INFINITY, 0.0];
    let case = Case {
        mask: Some(mask),
        bias: Some(Broadcast { data: &bias_data, shape: [1, 1, 1, 5] }),
        ..one_head(&q, &k, &v)
    };
    let clean = attention(&case);
    for poison in [NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
        let (mut k, mut v, mut bias) = (k.clone(), v.clone(), bias_data);
        for j in [2, 3, 4] {
            (k[j], v[j]) = (poison, poison);
        }
        bias[2] = poison;
        let bias = Some(Broadcast { data: &bias, shape: [1, 1, 1, 5] });
        assert_eq!(attention(&Case { k: &k, v: &v, bias, ..case }), clean);
    }
}

/// No finite score, however low, loses to a masked key or counts as masked.
#[test]
fn very_low_scores_are_scores() {
    let bias = Broadcast { data: &[f32::MIN, f32::MIN, 0.0], shape: [1, 1, 1, 3] };
    let mask = Broadcast { data: &[true, true, false], shape: [1, 1, 1, 3] };
    let output =
        attention(&Case { bias: Some(bias), mask: Some(mask), ..one_head(&[0.0], &[0.0; 3], &[1.0, 3.0, 100.0]) });
    assert_close(&output.o, &[2.0], 0.0);
    assert_close(&output.lse, &[f64::from(f32::MIN)], 0.0);
}
