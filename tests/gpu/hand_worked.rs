//! The numbers that semantics.md works by hand, as far as they concern what is built, by every plan. Where q = 0 all weights are equal,
//! so o is the mean of the visible v and lse the logarithm of their number.

use core::f64::consts::LN_2;

use tilewise::{Align, Dims};

use super::support::{Data, Setup, Tensors, assert_close, engines, one_head, plans};

const NONE: f64 = f64::NEG_INFINITY;

/// What o and, where it is given, lse have to be.
struct Expected<'a> {
    o: &'a [f64],
    lse: Option<&'a [f64]>,
    tolerance: f64,
}

#[track_caller]
fn check(setup: Setup, q: &[f32], k: &[f32], v: &[f32], expected: &Expected<'_>) {
    let data = Data { q: q.to_vec(), k: k.to_vec(), v: v.to_vec() };
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &data);
        for plan in plans(engine, &setup.problem()) {
            let (o, lse) = inputs.run(engine, &plan);
            let what = format!("{setup:?} {:?}", plan.kernels());
            assert_close(&o, expected.o, expected.tolerance, &what);
            if let Some(expected_lse) = expected.lse {
                assert_close(&lse, expected_lse, expected.tolerance, &what);
            }
        }
    }
}

#[test]
fn scores_of_the_article() {
    for engine in engines() {
        let q = engine.upload(&[2.0f32, 0.0], [1, 2]).unwrap();
        let k = engine.upload(&[1.0f32, 2.0, 2.0, 1.0], [2, 2]).unwrap();
        assert_eq!(engine.matmul_transposed(&q, &k).unwrap().read().unwrap(), [2.0, 4.0]);
    }
}

#[test]
fn softmax_of_the_article() {
    // The article's table prints 0.84, 0.11, 0.05, which doesn't follow from its own exponentials 54.6, 7.39, 1.65.
    let weights = [0.857_977, 0.116_115, 0.025_909];
    for engine in engines() {
        let (p, lse) = engine.softmax_rows(&engine.upload(&[4.0f32, 2.0, 0.5], [1, 3]).unwrap()).unwrap();
        assert_close(&p.read().unwrap(), &weights, 1e-6, "softmax_rows");
        assert_close(&lse.read().unwrap(), &[(4f64.exp() + 2f64.exp() + 0.5f64.exp()).ln()], 1e-6, "lse");
    }
    let identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    let expected = Expected { o: &weights, lse: None, tolerance: 1e-6 };
    check(Setup::new(one_head(1, 3, 1, 3), None), &[1.0], &[4.0, 2.0, 0.5], &identity, &expected);
}

#[test]
fn mix_of_the_article() {
    // Weights 0.8 and 0.2.
    let expected = Expected { o: &[8.0, 8.0], lse: None, tolerance: 1e-5 };
    check(Setup::new(one_head(1, 2, 1, 2), None), &[1.0], &[4.0f32.ln(), 0.0], &[10.0, 10.0, 0.0, 0.0], &expected);
}

#[test]
fn causal_with_fewer_queries_than_keys() {
    let dims = one_head(2, 5, 1, 1);
    let v = [1.0, 2.0, 3.0, 4.0, 5.0];
    let lse = [4f64.ln(), 5f64.ln()];
    let expected = Expected { o: &[2.5, 3.0], lse: Some(&lse), tolerance: 1e-6 };
    check(Setup::new(dims, Some(Align::BottomRight)), &[0.0; 2], &[0.0; 5], &v, &expected);
    let expected = Expected { o: &[1.0, 1.5], lse: Some(&[0.0, LN_2]), tolerance: 1e-6 };
    check(Setup::new(dims, Some(Align::TopLeft)), &[0.0; 2], &[0.0; 5], &v, &expected);
}

#[test]
fn causal_with_more_queries_than_keys() {
    let expected =
        Expected { o: &[0.0, 0.0, 0.0, 10.0, 15.0], lse: Some(&[NONE, NONE, NONE, 0.0, LN_2]), tolerance: 1e-6 };
    check(Setup::new(one_head(5, 2, 1, 1), Some(Align::BottomRight)), &[0.0; 5], &[0.0; 2], &[10.0, 20.0], &expected);
}

#[test]
fn scales() {
    let (q, k) = ([2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    for (scale, expected) in [(None, 0.880_797), (Some(1.0), 0.982_014), (Some(0.0), 0.5)] {
        let setup = Setup { scale, ..Setup::new(one_head(1, 2, 4, 1), None) };
        check(setup, &q, &k, &[1.0, 0.0], &Expected { o: &[expected], lse: None, tolerance: 1e-6 });
    }
}

#[test]
fn groups() {
    let dims = Dims { q_heads: 6, kv_heads: 2, ..one_head(1, 1, 1, 1) };
    let expected = Expected { o: &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0], lse: Some(&[0.0; 6]), tolerance: 0.0 };
    check(Setup::new(dims, None), &[0.0; 6], &[0.0; 2], &[1.0, 2.0], &expected);
}

#[test]
fn big_scores() {
    // The dot product, 115200, is past the largest f16.
    let lse = [115_200.0 / 128f64.sqrt() + LN_2];
    let expected = Expected { o: &[2.0], lse: Some(&lse), tolerance: 2e-3 };
    check(Setup::new(one_head(1, 2, 128, 1), None), &[30.0; 128], &[30.0; 256], &[1.0, 3.0], &expected);
}

#[test]
fn rising_scores() {
    let rising: Vec<f32> = (0..96u8).map(f32::from).collect();
    let falling: Vec<f32> = rising.iter().rev().copied().collect();
    let setup = Setup { scale: Some(1.0), ..Setup::new(one_head(1, 96, 1, 1), None) };
    let expected = Expected { o: &[94.418_02], lse: Some(&[95.458_7]), tolerance: 6e-5 };
    for scores in [&rising, &falling] {
        check(setup, &[1.0], scores, scores, &expected);
    }
    let higher: Vec<f32> = rising.iter().map(|x| x + 1000.0).collect();
    let expected = Expected { o: &[94.418_02], lse: Some(&[1_095.458_7]), tolerance: 2e-4 };
    check(setup, &[1.0], &higher, &rising, &expected);
}

/// No finite score, however low, counts as masked, and none is clamped.
#[test]
fn very_low_scores_are_scores() {
    for score in [-1e30, -3e38, f32::MIN] {
        let expected = Expected { o: &[2.0], lse: Some(&[f64::from(score)]), tolerance: 0.0 };
        let setup = Setup { scale: Some(1.0), ..Setup::new(one_head(1, 2, 1, 1), None) };
        check(setup, &[1.0], &[score, score], &[1.0, 3.0], &expected);
        // With a mask, and keys hidden from the first row.
        let expected = Expected { o: &[1.0, 2.0, 2.0], lse: Some(&[f64::from(score); 3]), tolerance: 0.0 };
        let setup = Setup { causal: Some(Align::TopLeft), dims: one_head(3, 2, 1, 1), ..setup };
        check(setup, &[1.0; 3], &[score, score], &[1.0, 3.0], &expected);
    }
}

/// 4096 tokens, f32 scores, one head.
#[test]
fn memory_of_the_article() {
    for engine in engines() {
        let problem = Setup::new(Dims::square(1, 1, 4096, 64), None).problem();
        for plan in plans(engine, &problem) {
            let expected = if plan.kernels().len() > 1 { 67_108_864 } else { 0 };
            assert_eq!((plan.naive_bytes(), plan.workspace_bytes()), (67_108_864, expected));
        }
    }
}
