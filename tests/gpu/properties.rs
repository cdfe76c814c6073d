//! Any sizes and options, shrunk to the smallest that fails: the reference's result, by every plan.

use proptest::prelude::*;
use tilewise::{Align, Dims};

use super::support::{Data, MASKS, Setup, Tensors, assert_close, engines, plans};

fn setups() -> impl Strategy<Value = Setup> {
    let heads = (0..3usize, 1..4usize, 1..4usize);
    let lengths = (0..80usize, 0..100usize);
    let widths = (1..40usize, 1..40usize);
    let scale = prop::option::weighted(0.3, -2.0..2.0f32);
    let range = prop_oneof![Just(1.0f32), Just(8.0)];
    (heads, lengths, widths, 0..3usize, scale, range, 0..1000u64).prop_map(
        |((batch, kv_heads, group_size), (q_len, kv_len), (head_dim, value_dim), mask, scale, range, seed)| Setup {
            dims: Dims { batch, q_heads: kv_heads * group_size, kv_heads, q_len, kv_len, head_dim, value_dim },
            causal: MASKS[mask],
            scale,
            range,
            seed,
        },
    )
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 300, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn any_problem_is_computed_right(setup in setups()) {
        setup.check();
    }
}

proptest! {
    #![proptest_config(config(16))]

    /// The weights of a row sum to 1, unless it sees nothing.
    #[test]
    fn values_of_one_give_one(setup in setups()) {
        let data = setup.data();
        let data = Data { v: vec![1.0; data.v.len()], ..data };
        for engine in engines() {
            let inputs = Tensors::amid_nan(engine, &setup.dims, &data);
            for plan in plans(engine, &setup.problem()) {
                let (o, lse) = inputs.run(engine, &plan);
                for (o, lse) in o.chunks(setup.dims.value_dim).zip(lse) {
                    let expected = if lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
                    assert_close(o, &vec![expected; o.len()], 2e-6, &format!("{:?}", plan.kernels()));
                }
            }
        }
    }

    /// With a mask, the last row sees what it sees without one, when the last query sees the last key.
    #[test]
    fn the_last_row_sees_everything(setup in setups()) {
        let full = Setup { causal: None, ..setup };
        let causal = Setup { causal: Some(Align::BottomRight), ..setup };
        let Dims { q_len, value_dim, .. } = setup.dims;
        let data = setup.data();
        let tolerance = full.reference(&data).tolerance;
        for engine in engines() {
            let inputs = Tensors::amid_nan(engine, &setup.dims, &data);
            for (full, causal) in plans(engine, &full.problem()).iter().zip(plans(engine, &causal.problem())) {
                let (one, other) = (inputs.run(engine, full), inputs.run(engine, &causal));
                let last = |o: &[f32]| o.chunks(value_dim).skip(q_len.max(1) - 1).step_by(q_len.max(1)).flatten().copied().collect::<Vec<_>>();
                let expected: Vec<f64> = last(&one.0).into_iter().map(f64::from).collect();
                let tolerance = 2.0 * tolerance.o(tilewise::reference::Precision::F32);
                assert_close(&last(&other.0), &expected, tolerance, &format!("{:?}", causal.kernels()));
            }
        }
    }
}
