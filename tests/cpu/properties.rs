//! Properties that hold for any input.

use proptest::prelude::*;
use tilewise::reference::{Align, Broadcast, Case, attention_backward};

use super::{assert_close, attention, random};

/// Sizes and options; the data come from the seed. `(batch, kv_heads, group_size, q_len, kv_len, head_dim, value_dim)`.
#[derive(Debug, Clone)]
struct Setup {
    sizes: (usize, usize, usize, usize, usize, usize, usize),
    causal: bool,
    align: Align,
    window: (Option<u32>, Option<u32>),
    softcap: Option<f64>,
    seed: u64,
}

fn setups() -> impl Strategy<Value = Setup> {
    let sizes = (1..3_usize, 1..3_usize, 1..4_usize, 1..9_usize, 1..20_usize, 1..9_usize, 1..9_usize);
    let align = prop_oneof![Just(Align::BottomRight), Just(Align::TopLeft)];
    let window = (prop::option::of(0..9_u32), prop::option::of(0..9_u32));
    let softcap = prop::option::of(0.5..20.0);
    (sizes, any::<bool>(), align, window, softcap, any::<u64>())
        .prop_map(|(sizes, causal, align, window, softcap, seed)| Setup { sizes, causal, align, window, softcap, seed })
}

struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Setup {
    fn data(&self) -> Data {
        let (batch, kv_heads, group_size, q_len, kv_len, head_dim, value_dim) = self.sizes;
        let q = random(self.seed, batch * kv_heads * group_size * q_len * head_dim).iter().map(|x| 8.0 * x).collect();
        let k = random(self.seed ^ 1, batch * kv_heads * kv_len * head_dim);
        Data { q, k, v: random(self.seed ^ 2, batch * kv_heads * kv_len * value_dim) }
    }

    fn case<'a>(&self, data: &'a Data) -> Case<'a> {
        let (batch, kv_heads, group_size, q_len, kv_len, head_dim, value_dim) = self.sizes;
        Case {
            batch,
            q_heads: kv_heads * group_size,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q: &data.q,
            k: &data.k,
            v: &data.v,
            causal: self.causal,
            align: self.align,
            window_left: self.window.0,
            window_right: self.window.1,
            softcap: self.softcap,
            ..Case::default()
        }
    }
}

/// Rows of `dim` elements in another order.
fn permute(x: &[f32], dim: usize, order: impl Fn(usize) -> usize) -> Vec<f32> {
    (0..x.len() / dim).flat_map(|row| &x[order(row) * dim..][..dim]).copied().collect()
}

proptest! {
    #[test]
    fn values_of_one_give_one(setup in setups()) {
        let data = setup.data();
        let output = attention(&Case { v: &vec![1.0; data.v.len()], ..setup.case(&data) });
        for (o, lse) in output.o.chunks(setup.sizes.6).zip(&output.lse) {
            let expected = if *lse == f64::NEG_INFINITY { 0.0 } else { 1.0 };
            assert_close(o, &vec![expected; o.len()], 1e-14);
        }
    }

    #[test]
    fn outputs_lie_between_the_values(setup in setups()) {
        let data = setup.data();
        let output = attention(&setup.case(&data));
        let largest = data.v.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
        prop_assert!(output.o.iter().all(|o| o.abs() <= f64::from(largest) + 1e-14));
        prop_assert!(output.tolerance.mag <= f64::from(largest) + 1e-14);
    }

    #[test]
    fn the_order_of_keys_is_nothing(setup in setups(), turn in 0..20_usize) {
        let setup = Setup { causal: false, window: (None, None), ..setup };
        let data = setup.data();
        let (.., kv_len, head_dim, value_dim) = setup.sizes;
        let order = |row| row / kv_len * kv_len + (row + turn) % kv_len;
        let turned = Data {
            q: data.q.clone(),
            k: permute(&data.k, head_dim, order),
            v: permute(&data.v, value_dim, order),
        };
        let (one, other) = (attention(&setup.case(&data)), attention(&setup.case(&turned)));
        assert_close(&one.o, &other.o, 1e-14);
        assert_close(&one.lse, &other.lse, 1e-13);
    }

    #[test]
    fn a_constant_added_to_the_scores_shifts_lse_only(setup in setups(), shift in -500..500_i16) {
        let data = setup.data();
        let case = setup.case(&data);
        let bias = Broadcast { data: &[f32::from(shift)], shape: [1; 4] };
        let (one, other) = (attention(&case), attention(&Case { bias: Some(bias), ..case }));
        assert_close(&one.o, &other.o, 1e-12);
        let shifted: Vec<f64> = one.lse.iter().map(|lse| lse + f64::from(shift)).collect();
        assert_close(&other.lse, &shifted, 1e-12);
    }

    #[test]
    fn grouped_heads_are_repeated_heads(setup in setups()) {
        let data = setup.data();
        let case = setup.case(&data);
        let (_, _, group_size, _, kv_len, head_dim, value_dim) = setup.sizes;
        let k = permute(&data.k.repeat(group_size), kv_len * head_dim, |row| row / group_size);
        let v = permute(&data.v.repeat(group_size), kv_len * value_dim, |row| row / group_size);
        prop_assert_eq!(attention(&case), attention(&Case { kv_heads: case.q_heads, k: &k, v: &v, ..case }));
    }

    #[test]
    fn keys_past_the_length_are_not_read(setup in setups(), used in 0..20_u32) {
        let (batch, kv_heads, _, _, kv_len, head_dim, value_dim) = setup.sizes;
        let capacity = u32::try_from(kv_len).unwrap();
        let lens: Vec<u32> = (used..).take(batch).map(|used| used % (capacity + 1)).collect();
        let data = setup.data();
        let mut poisoned = setup.data();
        let unused = |row: &usize| row % kv_len >= lens[row / kv_len / kv_heads] as usize;
        for row in (0..batch * kv_heads * kv_len).filter(unused) {
            poisoned.k[row * head_dim..][..head_dim].fill(f32::NAN);
            poisoned.v[row * value_dim..][..value_dim].fill(f32::INFINITY);
        }
        let one = attention(&Case { kv_lens: Some(&lens), ..setup.case(&data) });
        prop_assert_eq!(one, attention(&Case { kv_lens: Some(&lens), ..setup.case(&poisoned) }));
    }

    /// Two halves of the keys, merged by their log-sum-exps, are the whole: what splitting relies on.
    #[test]
    fn halves_merge(setup in setups(), split in 0..20_u32) {
        let data = setup.data();
        let case = setup.case(&data);
        let low: Vec<bool> = (0..case.kv_len).map(|j| j < split as usize).collect();
        let high: Vec<bool> = low.iter().map(|low| !low).collect();
        let half = |data| attention(&Case { mask: Some(Broadcast { data, shape: [1, 1, 1, case.kv_len] }), ..case });
        let (whole, low, high) = (attention(&case), half(&low), half(&high));
        for n in 0..whole.lse.len() {
            if whole.lse[n] == f64::NEG_INFINITY {
                continue;
            }
            let (a, b) = ((low.lse[n] - whole.lse[n]).exp(), (high.lse[n] - whole.lse[n]).exp());
            prop_assert!((a + b - 1.0).abs() < 1e-13);
            for c in n * case.value_dim..(n + 1) * case.value_dim {
                prop_assert!((a * low.o[c] + b * high.o[c] - whole.o[c]).abs() < 1e-13);
            }
        }
    }

    /// o is linear in v; q and k enter by their products alone; a constant added to the scores of a row shifts its lse alone.
    #[test]
    fn gradients_fit_together(setup in setups()) {
        let data = setup.data();
        let case = setup.case(&data);
        let shape = [case.batch, case.q_heads, case.q_len, case.kv_len];
        let bias = random(setup.seed ^ 3, shape.iter().product());
        let case = Case { bias: Some(Broadcast { data: &bias, shape }), ..case };
        let output = attention(&case);
        let (grad_o, grad_lse) = (random(setup.seed ^ 4, output.o.len()), random(setup.seed ^ 5, output.lse.len()));
        let gradients = attention_backward(&case, &grad_o, Some(&grad_lse)).unwrap();
        let inner = |a: &[f64], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
        assert_close(&[inner(&gradients.dv, &data.v)], &[inner(&output.o, &grad_o)], 1e-12);
        assert_close(&[inner(&gradients.dq, &data.q)], &[inner(&gradients.dk, &data.k)], 1e-11);
        let dbias = gradients.dbias.unwrap_or_default();
        for ((row, lse), grad_lse) in dbias.chunks(case.kv_len).zip(&output.lse).zip(grad_lse) {
            let expected = if lse.is_finite() { f64::from(grad_lse) } else { 0.0 };
            assert_close(&[row.iter().sum()], &[expected], 1e-13);
        }
    }
}
