//! The gradients: against finite differences, what has no part in them, and sizes of zero.

use tilewise::Error;
use tilewise::reference::{
    Align, Broadcast, Case, Gradients, MaskMod, ScoreMod, attention_backward, attention_backward_packed, compare,
};

use super::{assert_close, attention, gradients, one_head, random};

const NAN: f32 = f32::NAN;
const NONE: f32 = f32::NEG_INFINITY;

/// What the gradients are of.
fn loss(case: &Case<'_>, grad_o: &[f32], grad_lse: &[f32]) -> f64 {
    let output = attention(case);
    let sum = |x: &[f64], grad: &[f32]| -> f64 {
        x.iter().zip(grad).filter(|(x, _)| x.is_finite()).map(|(x, grad)| x * f64::from(*grad)).sum()
    };
    sum(&output.o, grad_o) + sum(&output.lse, grad_lse)
}

/// Fails unless each gradient is the slope of the loss along each element of its input, by central differences of fourth order.
///
/// Inputs are multiples of 2^-8 below 4, so that they hold the steps exactly. One of −∞ stays so, and has the slope 0.
fn assert_slopes(what: &str, case: &Case<'_>, grad_o: &[f32], grad_lse: &[f32]) {
    const STEP: f32 = 1.0 / 512.0;
    let Gradients { dq, dk, dv, dbias, dsinks, .. } = attention_backward(case, grad_o, Some(grad_lse)).unwrap();
    let bias = case.bias.map_or(&[][..], |bias| bias.data);
    let mut inputs = [case.q, case.k, case.v, bias, case.sinks.unwrap_or_default()].map(<[f32]>::to_vec);
    let got = [dq, dk, dv, dbias.unwrap_or_default(), dsinks.unwrap_or_default()];
    for (n, name) in ["dq", "dk", "dv", "dbias", "dsinks"].into_iter().enumerate() {
        let mut slopes = Vec::new();
        for at in 0..inputs[n].len() {
            let mut difference = |step: f32| {
                let x = inputs[n][at];
                let [up, down] = [x + step, x - step].map(|moved| {
                    inputs[n][at] = moved;
                    let [q, k, v, bias, sinks] = &inputs;
                    let bias = case.bias.map(|full| Broadcast { data: bias, ..full });
                    loss(&Case { q, k, v, bias, sinks: case.sinks.map(|_| &sinks[..]), ..*case }, grad_o, grad_lse)
                });
                inputs[n][at] = x;
                (up - down) / f64::from(2.0 * step)
            };
            slopes.push((4.0 * difference(STEP) - difference(2.0 * STEP)) / 3.0);
        }
        let comparison = compare(&got[n], &slopes, 1e-9);
        assert!(comparison.passed(), "{what}, {name}: {comparison}");
    }
}

fn bend(s: f64, b: usize, h: usize, i: usize, j: usize) -> f64 {
    s + 0.5 * (s + bend_phase(b, h, i, j)).sin()
}

fn bend_derivative(s: f64, b: usize, h: usize, i: usize, j: usize) -> f64 {
    1.0 + 0.5 * (s + bend_phase(b, h, i, j)).cos()
}

fn bend_phase(b: usize, h: usize, i: usize, j: usize) -> f64 {
    (b + 2 * h + 3 * i + 5 * j) as f64
}

fn checkered(b: usize, h: usize, i: usize, j: usize) -> bool {
    (b + h + i + j).is_multiple_of(2)
}

type Set = fn(Case<'static>) -> Case<'static>;

/// Every option, for 2 batch entries, 2 query heads, 3 rows and 4 keys.
const OPTIONS: [(&str, Set); 18] = [
    ("softmax_scale", |case| Case { softmax_scale: Some(-0.75), ..case }),
    ("causal", |case| Case { causal: true, ..case }),
    ("top-left", |case| Case { align: Align::TopLeft, ..case }),
    ("window_left", |case| Case { window_left: Some(1), ..case }),
    ("window_right", |case| Case { window_right: Some(0), ..case }),
    ("softcap", |case| Case { softcap: Some(0.75), ..case }),
    ("score_mod", |case| Case {
        score_mod: Some(ScoreMod(&bend)),
        score_mod_derivative: Some(ScoreMod(&bend_derivative)),
        ..case
    }),
    ("alibi_slopes", |case| Case { alibi_slopes: Some(&[0.5, 0.25]), ..case }),
    ("alibi_slopes of each entry", |case| Case { alibi_slopes: Some(&[0.5, 0.25, 1.0, 0.125]), ..case }),
    ("bias", |case| Case {
        bias: Some(Broadcast { data: &[0.5, 0.0, -1.0, 0.25, 1.0, -0.5, 0.0, 0.75], shape: [1, 2, 1, 4] }),
        ..case
    }),
    ("bias of each row", |case| Case {
        bias: Some(Broadcast { data: &[0.5, -0.25, 1.0, NONE, 0.0, -0.5], shape: [2, 1, 3, 1] }),
        ..case
    }),
    ("bias with -inf", |case| Case {
        bias: Some(Broadcast {
            data: &[0.5, NONE, -1.0, 0.25, NONE, NONE, NONE, NONE, 0.0, 0.25, 0.5, NONE],
            shape: [1, 1, 3, 4],
        }),
        ..case
    }),
    ("mask", |case| Case {
        mask: Some(Broadcast { data: &[true, false, true, true, false, true, true, true], shape: [2, 1, 1, 4] }),
        ..case
    }),
    ("mask_mod", |case| Case { mask_mod: Some(MaskMod(&checkered)), ..case }),
    ("sinks", |case| Case { sinks: Some(&[0.5, -1.0]), ..case }),
    ("sinks with -inf", |case| Case { sinks: Some(&[NONE, 0.25]), ..case }),
    ("kv_lens", |case| Case { kv_lens: Some(&[2, 4]), ..case }),
    ("q_lens", |case| Case { q_lens: Some(&[3, 1]), ..case }),
];

/// Every option alone and every two together.
#[test]
fn slopes_of_all_options_in_pairs() {
    let (q, k, v) = (random(1, 24).iter().map(|x| 2.0 * x).collect::<Vec<_>>(), random(2, 16), random(3, 24));
    let (grad_o, grad_lse) = (random(4, 36), random(5, 12));
    let shape = Case { batch: 2, q_heads: 2, kv_heads: 1, q_len: 3, kv_len: 4, ..Case::default() };
    let shape = Case { head_dim: 2, value_dim: 3, ..shape };
    for (n, (one, set_one)) in OPTIONS.into_iter().enumerate() {
        for (other, set_other) in OPTIONS.into_iter().skip(n) {
            let case = Case { q: &q, k: &k, v: &v, ..set_other(set_one(shape)) };
            assert_slopes(&format!("{one} and {other}"), &case, &grad_o, &grad_lse);
        }
    }
}

/// Heads in groups of three, and each with a KV head of its own: the same dq, and the sums of dk and dv (field case H3).
#[test]
fn grouped_heads_sum() {
    let (q, k, v, grad_o) = (random(1, 6 * 5 * 4), random(2, 2 * 7 * 4), random(3, 2 * 7 * 3), random(4, 6 * 5 * 3));
    let shape = Case { batch: 1, q_heads: 6, kv_heads: 2, q_len: 5, kv_len: 7, ..Case::default() };
    let case = Case { head_dim: 4, value_dim: 3, causal: true, q: &q, k: &k, v: &v, ..shape };
    let repeat = |x: &[f32]| x.chunks(x.len() / 2).flat_map(|head| head.repeat(3)).collect::<Vec<_>>();
    let grouped = gradients(&case, &grad_o);
    let expanded = gradients(&Case { kv_heads: 6, k: &repeat(&k), v: &repeat(&v), ..case }, &grad_o);
    assert_eq!(grouped.dq, expanded.dq);
    for (grouped, expanded) in [(&grouped.dk, &expanded.dk), (&grouped.dv, &expanded.dv)] {
        let len = grouped.len() / 2;
        let of_head = |head: usize, at: usize| (0..3).map(|n| expanded[(3 * head + n) * len + at]).sum::<f64>();
        let sums: Vec<f64> = (0..2 * len).map(|at| of_head(at / len, at % len)).collect();
        assert_close(grouped, &sums, 1e-14);
    }
}

/// The gradient of a bias has the bias's shape, and is that of the full bias summed (field case H6).
#[test]
fn broadcast_biases_sum() {
    let full_shape = [2, 3, 4, 5];
    let (q, k, v, grad_o) = (random(1, 48), random(2, 60), random(3, 60), random(4, 48));
    let shape = Case { batch: 2, q_heads: 3, kv_heads: 3, q_len: 4, kv_len: 5, ..Case::default() };
    let case = Case { head_dim: 2, value_dim: 2, causal: true, q: &q, k: &k, v: &v, ..shape };
    for axes in 0..16 {
        let stored: [usize; 4] = core::array::from_fn(|axis| if axes >> axis & 1 == 1 { full_shape[axis] } else { 1 });
        let data = random(5, stored.iter().product());
        // Where each element of the full bias is stored.
        let places: Vec<usize> = (0..120)
            .map(|n| {
                let position = [n / 60, n / 20 % 3, n / 5 % 4, n % 5];
                stored.into_iter().zip(position).fold(0, |at, (size, x)| at * size + x % size)
            })
            .collect();
        let bias = |data, shape| gradients(&Case { bias: Some(Broadcast { data, shape }), ..case }, &grad_o);
        let (small, full) =
            (bias(&data, stored), bias(&places.iter().map(|&at| data[at]).collect::<Vec<_>>(), full_shape));
        assert_eq!((&small.dq, &small.dk, &small.dv), (&full.dq, &full.dk, &full.dv), "{stored:?}");
        let mut sums = vec![0.0; data.len()];
        places.iter().zip(full.dbias.unwrap()).for_each(|(&at, dbias)| sums[at] += dbias);
        assert_close(&small.dbias.unwrap(), &sums, 1e-14);
        assert!(sums.iter().any(|sum| sum.abs() > 1e-3) || stored[3] == 1, "{stored:?}: all 0");
    }
}

/// Scores of ±100 are at the cap, where nothing passes; those of ±0.5 have the cap's slope (field case H7).
#[test]
fn softcap_saturates() {
    let options = Case { softcap: Some(1.0), causal: true, align: Align::TopLeft, ..Case::default() };
    let (q, v, grad_o) = ([1.0, 1.0, -1.0], [1.0, -2.0, 0.5, NAN], [1.0, -0.5, 0.25]);
    let case = |k| {
        let Case { softcap, causal, align, .. } = options;
        Case { softcap, causal, align, ..one_head(&q, k, &v) }
    };
    let far = gradients(&case(&[100.0, -100.0, 100.0, NAN]), &grad_o);
    assert_eq!((far.dq, far.dk), (vec![0.0; 3], vec![0.0; 4]));
    assert!(far.dv[..3].iter().all(|dv| dv.is_finite() && *dv != 0.0) && far.dv[3] == 0.0, "{:?}", far.dv);

    let near = gradients(&case(&[0.5, -0.5, 0.5, NAN]), &grad_o);
    assert!(near.dk[..3].iter().all(|dk| dk.abs() > 0.01) && near.dk[3] == 0.0, "{:?}", near.dk);
    let (k, v) = ([0.5, -0.5, 0.5, 0.0], [1.0, -2.0, 0.5, 0.0]);
    assert_slopes("softcap", &Case { v: &v, ..case(&k) }, &grad_o, &[0.0; 3]);
}

/// A row with nothing to attend to hands on nothing, not even a NaN. With a sink its lse is the sink, which has the gradient of that.
#[test]
fn empty_rows() {
    let (q, k, v) = (random(1, 5), random(2, 2), random(3, 2));
    let case = Case { causal: true, ..one_head(&q, &k, &v) };
    let clean = attention_backward(&case, &[0.0, 0.0, 0.0, 1.0, 2.0], Some(&[0.0, 0.0, 0.0, 3.0, 4.0])).unwrap();
    assert_eq!(clean.dq[..3], [0.0; 3]);
    assert!(clean.dq[4] != 0.0 && clean.dk[1] != 0.0);
    let empty = attention_backward(&case, &[NAN, NAN, 7.0, 1.0, 2.0], Some(&[NAN, 5.0, 6.0, 3.0, 4.0])).unwrap();
    assert_eq!(empty, clean);

    let case = Case { sinks: Some(&[0.5]), ..case };
    let of_rows = |rows: [f32; 5]| attention_backward(&case, &[NAN, NAN, 7.0, 0.0, 0.0], Some(&rows)).unwrap();
    let with_sink = of_rows([2.0, 3.0, 5.0, 0.0, 0.0]);
    assert_eq!((&with_sink.dq, &with_sink.dk, &with_sink.dv), (&vec![0.0; 5], &vec![0.0; 2], &vec![0.0; 2]));
    assert_eq!(with_sink.dsinks, Some(vec![10.0]));
}

/// A score mod may give every key of a row the score −∞: then its lse isn't finite, and the gradient of that counts for nothing.
#[test]
fn rows_without_a_finite_score() {
    let score_mod = |s, _, _, i, _| if i == 1 { f64::NEG_INFINITY } else { s };
    let derivative = |_, _, _, _, _| 1.0;
    let (q, k, v) = (random(1, 2), random(2, 3), random(3, 3));
    let case = Case { score_mod: Some(ScoreMod(&score_mod)), ..one_head(&q, &k, &v) };
    let case = Case { score_mod_derivative: Some(ScoreMod(&derivative)), ..case };
    let got = attention_backward(&case, &[0.0, 1.0], Some(&[0.0, NAN])).unwrap();
    assert_eq!((got.dq, got.dk, got.dv), (vec![0.0; 2], vec![0.0; 3], vec![0.0; 3]));
}

/// NaN and infinities at masked keys, past the lengths, and in padding rows have no effect on any gradient.
#[test]
fn what_is_not_visible_has_no_effect() {
    let (q, k, v, grad_o, grad_lse) = (random(1, 6), random(2, 10), random(3, 10), random(4, 6), random(5, 6));
    let mask = Broadcast { data: &[true, true, false, true, true], shape: [1, 1, 1, 5] };
    let bias = [0.0, 0.5, 0.0, NONE, 0.0];
    let shape = Case { batch: 2, q_len: 3, kv_len: 5, ..one_head(&q, &k, &v) };
    let case = Case {
        mask: Some(mask),
        bias: Some(Broadcast { data: &bias, shape: [1, 1, 1, 5] }),
        sinks: Some(&[0.25]),
        q_lens: Some(&[2, 3]),
        kv_lens: Some(&[5, 4]),
        ..shape
    };
    let clean = attention_backward(&case, &grad_o, Some(&grad_lse)).unwrap();
    for dx in [&clean.dk, &clean.dv] {
        let zero: Vec<bool> = dx.iter().map(|dx| *dx == 0.0).collect();
        assert_eq!(zero, [false, false, true, true, false, false, false, true, true, true]);
    }
    assert_eq!(clean.dq.iter().map(|dq| *dq == 0.0).collect::<Vec<_>>(), [false, false, true, false, false, false]);
    assert_eq!(clean.dbias.as_ref().unwrap()[2..4], [0.0, 0.0]);
    for poison in [NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
        let (mut q, mut k, mut v, mut bias) = (q.clone(), k.clone(), v.clone(), bias);
        let (mut grad_o, mut grad_lse) = (grad_o.clone(), grad_lse.clone());
        for j in [2, 3, 7, 8, 9] {
            (k[j], v[j]) = (poison, poison);
        }
        (q[2], grad_o[2], grad_lse[2], bias[2]) = (poison, poison, poison, poison);
        let bias = Some(Broadcast { data: &bias, shape: [1, 1, 1, 5] });
        let poisoned = Case { q: &q, k: &k, v: &v, bias, ..case };
        assert_eq!(attention_backward(&poisoned, &grad_o, Some(&grad_lse)).unwrap(), clean, "{poison}");
    }
}

/// A NaN in the gradient of a row shows in that row's dq and in the keys that it sees; one in a value, in the rows that see it.
#[test]
fn visible_nan_shows_where_it_leads() {
    let (q, k, v, mut grad_o) = (random(1, 4), random(2, 4), random(3, 4), random(4, 4));
    let case = Case { causal: true, ..one_head(&q, &k, &v) };
    let is_nan = |x: &[f64]| x.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
    let mut nan_v = v.clone();
    nan_v[2] = NAN;
    let of_value = gradients(&Case { v: &nan_v, ..case }, &grad_o);
    assert_eq!(is_nan(&of_value.dq), [false, false, true, true]);
    assert_eq!(is_nan(&of_value.dk), [true; 4]); // each key has a row that sees the value
    assert_eq!(is_nan(&of_value.dv), [false; 4]);

    let sinks = Some(&[NONE][..]);
    grad_o[1] = NAN;
    let of_row = gradients(&Case { sinks, ..case }, &grad_o);
    assert_eq!(is_nan(&of_row.dq), [false, true, false, false]);
    assert_eq!(is_nan(&of_row.dk), [true, true, false, false]);
    assert_eq!(is_nan(&of_row.dv), [true, true, false, false]);
    assert_eq!(of_row.dsinks, Some(vec![0.0])); // there is no sink
}

#[test]
fn sizes_of_zero() {
    let none = Case { batch: 1, q_heads: 2, kv_heads: 1, q_len: 2, head_dim: 3, value_dim: 2, ..Case::default() };
    let no_keys = Case { q: &[1.0; 12], sinks: Some(&[1.0, NONE]), ..none };
    let got = attention_backward(&no_keys, &[1.0; 8], Some(&[1.0, 2.0, 4.0, 8.0])).unwrap();
    assert_eq!((got.dq, got.dk, got.dv), (vec![0.0; 12], vec![], vec![]));
    assert_eq!((got.dsinks, got.dbias), (Some(vec![3.0, 0.0]), None));

    let bias = Broadcast { data: &[0.5], shape: [1; 4] };
    let no_queries = Case { q_len: 0, kv_len: 1, k: &[1.0; 3], v: &[1.0; 2], bias: Some(bias), ..none };
    let got = gradients(&no_queries, &[]);
    assert_eq!((got.dq, got.dk, got.dv, got.dbias), (vec![], vec![0.0; 3], vec![0.0; 2], Some(vec![0.0])));

    let no_entries = Case { batch: 0, kv_len: 7, bias: Some(bias), sinks: Some(&[1.0; 2]), ..none };
    let got = gradients(&no_entries, &[]);
    assert_eq!((got.dq, got.dk, got.dv), (vec![], vec![], vec![]));
    assert_eq!((got.dbias, got.dsinks), (Some(vec![0.0]), Some(vec![0.0; 2])));

    let no_values = Case { value_dim: 0, q: &[1.0; 12], kv_len: 2, k: &[1.0; 6], ..none };
    let got = attention_backward(&no_values, &[], Some(&[1.0; 4])).unwrap();
    assert_close(&got.dq, &[1.0 / 3.0_f64.sqrt(); 12], 1e-15);
    assert!(got.dv.is_empty() && got.tolerance.dq_mag.is_finite());

    let got = attention_backward_packed(&Case { q_len: 0, batch: 0, ..none }, &[0], &[0], &[], None).unwrap();
    assert_eq!(got, Gradients::default());
}

/// Big enough for all cores; a KV head alone is computed by one. The bits are the same, as they are in each run, and an entry of the batch
/// has the gradients that it has alone.
#[test]
fn bits_do_not_depend_on_the_rest() {
    let (len, dim) = (64, 16);
    let (q, k, v) = (random(1, 8 * len * dim), random(2, 4 * len * dim), random(3, 4 * len * dim));
    let (grad_o, grad_lse, bias) = (random(4, 8 * len * dim), random(5, 8 * len), random(6, len * len));
    let shape = Case { batch: 2, q_heads: 4, kv_heads: 2, q_len: len, kv_len: len, ..Case::default() };
    let case = Case {
        head_dim: dim,
        value_dim: dim,
        causal: true,
        q: &q,
        k: &k,
        v: &v,
        bias: Some(Broadcast { data: &bias, shape: [1, 1, len, len] }),
        ..shape
    };
    let whole = attention_backward(&case, &grad_o, Some(&grad_lse)).unwrap();
    assert_eq!(attention_backward(&case, &grad_o, Some(&grad_lse)).unwrap(), whole);
    let mut dbias = vec![0.0; len * len];
    for n in 0..4 {
        let (one, two) = (n * len * dim..(n + 1) * len * dim, 2 * n * len * dim..2 * (n + 1) * len * dim);
        let alone = Case { batch: 1, q_heads: 2, kv_heads: 1, ..case };
        let alone = Case { q: &q[two.clone()], k: &k[one.clone()], v: &v[one.clone()], ..alone };
        let grad_lse = &grad_lse[2 * n * len..2 * (n + 1) * len];
        let alone = attention_backward(&alone, &grad_o[two.clone()], Some(grad_lse)).unwrap();
        assert_eq!((&alone.dq[..], &alone.dk[..]), (&whole.dq[two], &whole.dk[one.clone()]));
        assert_eq!(alone.dv, whole.dv[one]);
        dbias.iter_mut().zip(alone.dbias.unwrap()).for_each(|(sum, dbias)| *sum += dbias);
    }
    assert_close(&whole.dbias.unwrap(), &dbias, 1e-13);

    let no_lse = attention_backward(&case, &grad_o, None).unwrap();
    assert_eq!(attention_backward(&case, &grad_o, Some(&vec![0.0; 8 * len])).unwrap(), no_lse);
    assert_ne!(no_lse.dq, whole.dq);
}

/// Sequences of different lengths: packed, and one by one with heads outermost.
#[test]
fn packed_sequences_one_by_one() {
    let lens: [(usize, usize); 4] = [(3, 5), (0, 2), (2, 0), (4, 1)];
    let (q, k, v) = (random(1, 9 * 2 * 4), random(2, 8 * 4), random(3, 8 * 3));
    let (grad_o, grad_lse, slopes) = (random(4, 9 * 2 * 3), random(5, 2 * 9), random(6, 8));
    let shape = Case { batch: 4, q_heads: 2, kv_heads: 1, q_len: 9, kv_len: 8, head_dim: 4, ..Case::default() };
    let case = Case {
        value_dim: 3,
        causal: true,
        align: Align::TopLeft,
        alibi_slopes: Some(&slopes),
        score_mod: Some(ScoreMod(&bend)),
        score_mod_derivative: Some(ScoreMod(&bend_derivative)),
        sinks: Some(&[0.5, 0.25]),
        ..shape
    };
    let packed = Case { q: &q, k: &k, v: &v, ..case };
    let packed =
        attention_backward_packed(&packed, &[0, 3, 3, 5, 9], &[0, 5, 7, 7, 8], &grad_o, Some(&grad_lse)).unwrap();
    let heads_first = |x: &[f32], dim: usize| -> Vec<f32> {
        let head = |h: usize| x.chunks(2 * dim).flat_map(move |row| &row[h * dim..(h + 1) * dim]);
        head(0).chain(head(1)).copied().collect()
    };
    let (mut q_start, mut kv_start, mut dsinks, mut dsinks_mag) = (0, 0, [0.0; 2], 0.0);
    for (n, (q_len, kv_len)) in lens.into_iter().enumerate() {
        let (q_end, kv_end) = (q_start + q_len, kv_start + kv_len);
        let score_mod = |s, _, h, i, j| bend(s, n, h, i, j);
        let derivative = |s, _, h, i, j| bend_derivative(s, n, h, i, j);
        let one = Case {
            batch: 1,
            q_len,
            kv_len,
            q: &heads_first(&q[q_start * 8..q_end * 8], 4),
            k: &k[kv_start * 4..kv_end * 4],
            v: &v[kv_start * 3..kv_end * 3],
            alibi_slopes: Some(&slopes[n * 2..][..2]),
            score_mod: Some(ScoreMod(&score_mod)),
            score_mod_derivative: Some(ScoreMod(&derivative)),
            ..case
        };
        let lse = [&grad_lse[q_start..q_end], &grad_lse[9 + q_start..9 + q_end]].concat();
        let one = attention_backward(&one, &heads_first(&grad_o[q_start * 6..q_end * 6], 3), Some(&lse)).unwrap();
        for i in 0..q_len {
            for h in 0..2 {
                assert_eq!(packed.dq[((q_start + i) * 2 + h) * 4..][..4], one.dq[(h * q_len + i) * 4..][..4]);
            }
        }
        assert_eq!(packed.dk[kv_start * 4..kv_end * 4], one.dk);
        assert_eq!(packed.dv[kv_start * 3..kv_end * 3], one.dv);
        dsinks.iter_mut().zip(one.dsinks.unwrap()).for_each(|(sum, dsink)| *sum += dsink);
        dsinks_mag += one.tolerance.dsinks_mag;
        assert!(one.tolerance.dq_mag <= packed.tolerance.dq_mag);
        (q_start, kv_start) = (q_end, kv_end);
    }
    assert_close(&packed.dsinks.unwrap(), &dsinks, 1e-15);
    assert!(packed.tolerance.dsinks_mag > 0.5 * dsinks_mag && packed.tolerance.dsinks_mag <= 1.000_001 * dsinks_mag);
}

#[test]
fn refuses_what_has_no_gradient() {
    let case = one_head(&[0.0; 4], &[0.0; 5], &[0.0; 5]);
    #[track_caller]
    fn refused<T: core::fmt::Debug>(result: Result<T, Error>, words: &str) {
        assert!(matches!(&result, Err(Error::Invalid(message)) if message.contains(words)), "{result:?}");
    }
    refused(attention_backward(&case, &[0.0; 5], None), "grad_o has 5 elements, accepted: 4");
    refused(attention_backward(&case, &[0.0; 4], Some(&[0.0; 3])), "grad_lse has 3 elements, accepted: 4");
    refused(attention_backward(&Case { head_dim: 0, ..case }, &[0.0; 4], None), "head_dim = 0");
    let mod_alone = Case { score_mod: Some(ScoreMod(&bend)), ..case };
    refused(attention_backward(&mod_alone, &[0.0; 4], None), "score_mod");
    let derivative_alone = Case { score_mod_derivative: Some(ScoreMod(&bend)), ..case };
    refused(attention_backward(&derivative_alone, &[0.0; 4], None), "score_mod_derivative");

    let packed =
        |case: &Case<'_>, grad_o: &[f32], grad_lse| attention_backward_packed(case, &[0, 4], &[0, 5], grad_o, grad_lse);
    assert!(packed(&case, &[0.0; 4], None).is_ok());
    refused(packed(&case, &[0.0; 5], None), "grad_o has 5");
    refused(packed(&case, &[0.0; 4], Some(&[0.0; 3])), "grad_lse has 3");
    refused(packed(&mod_alone, &[0.0; 4], None), "score_mod");
    refused(packed(&Case { kv_lens: Some(&[1]), ..case }, &[0.0; 4], None), "kv_lens");
}
