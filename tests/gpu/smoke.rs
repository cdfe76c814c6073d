//! A little of everything, mostly on default limits, for drivers that are slow: each test of this file takes a moment on any of them.
//!
//! Few pipelines are compiled: the planner's choice only, and dims that share variants.

use tilewise::{Align, Attention, DType, Dims, Engine, Path, Plan, Storage, wgpu};

use super::backward;
use super::call::{Call, Layout, Lens};
use super::support::{
    Setup, Tensors, assert_close, assert_matches, one_head, random, with_adapter_limits, with_default_limits,
};

/// The planner's choice against the reference.
#[track_caller]
fn check(setup: &Setup, path: Path) {
    let Some(engine) = with_default_limits() else { return };
    let data = setup.data();
    let plan = engine.plan_by(path, &setup.problem()).unwrap();
    let results = Tensors::amid_nan(engine, &setup.dims, &data).run(engine, &plan);
    assert_matches(&results, &setup.reference(&data), &format!("{setup:?} {:?}", plan.kernels()));
}

fn product(engine: &Engine, b_shape: [usize; 2], multiply: impl Fn(&[f32], &[f32]) -> (Vec<f32>, Vec<f64>, f64)) {
    let (a, b) = (random(1, 1.0, 17 * 19), random(2, 1.0, b_shape[0] * b_shape[1]));
    let (got, expected, mag) = multiply(&a, &b);
    assert_close(&got, &expected, 21.0 * f64::from(f32::EPSILON) * mag, &engine.describe_adapter());
}

#[test]
fn matmul() {
    let Some(engine) = with_default_limits() else { return };
    product(engine, [19, 33], |a, b| {
        let c = engine.matmul(&engine.upload(a, [17, 19]).unwrap(), &engine.upload(b, [19, 33]).unwrap()).unwrap();
        let expected = tilewise::reference::matmul(1, [17, 19, 33], a, b).unwrap();
        (c.read().unwrap(), expected.c, expected.mag)
    });
}

#[test]
fn matmul_transposed() {
    let Some(engine) = with_default_limits() else { return };
    product(engine, [33, 19], |a, b| {
        let (a_gpu, b_gpu) = (engine.upload(a, [17, 19]).unwrap(), engine.upload(b, [33, 19]).unwrap());
        let c = engine.matmul_transposed(&a_gpu, &b_gpu).unwrap();
        let expected = tilewise::reference::matmul_transposed(1, [17, 19, 33], a, b).unwrap();
        (c.read().unwrap(), expected.c, expected.mag)
    });
}

/// What a device has beyond the defaults: the kernels that hand numbers round a subgroup, where there are subgroups.
#[test]
fn with_all_features() {
    let Some(engine) = with_adapter_limits() else { return };
    let setup = Setup::new(Dims::square(1, 2, 70, 64), Some(Align::BottomRight));
    let data = setup.data();
    let plans = Plan::candidates(&setup.problem(), &engine.facts()).unwrap();
    let of_subgroups = plans.iter().find(|plan| plan.tile().unwrap().starts_with("flash_fwd_broadcast"));
    let facts = engine.facts();
    assert_eq!(
        of_subgroups.is_some(),
        facts.features.contains(wgpu::Features::SUBGROUP) && facts.min_subgroup_size >= 4
    );
    for plan in [of_subgroups, plans.first()].into_iter().flatten() {
        let results = Tensors::amid_nan(engine, &setup.dims, &data).run(engine, plan);
        assert_matches(&results, &setup.reference(&data), &format!("{:?}", plan.kernels()));
    }

    let [m, k, n] = [130, 264, 257];
    let (a, b) = (random(1, 1.0, m * k), random(2, 1.0, k * n));
    let c = engine.matmul(&engine.upload(&a, [m, k]).unwrap(), &engine.upload(&b, [k, n]).unwrap()).unwrap();
    let expected = tilewise::reference::matmul(1, [m, k, n], &a, &b).unwrap();
    let tolerance = (k + 1) as f64 * f64::from(f32::EPSILON) / 2.0 * expected.mag;
    assert_close(&c.read().unwrap(), &expected.c, tolerance, &engine.describe_adapter());
}

#[test]
fn softmax_rows() {
    let Some(engine) = with_default_limits() else { return };
    let x = random(3, 4.0, 3 * 70);
    let (p, lse) = engine.softmax_rows(&engine.upload(&x, [3, 70]).unwrap()).unwrap();
    let expected = tilewise::reference::softmax_rows(3, 70, &x).unwrap();
    assert_close(&p.read().unwrap(), &expected.p, 1e-5, "weights");
    assert_close(&lse.read().unwrap(), &expected.lse, 1e-5, "lse");
}

#[test]
fn naive() {
    check(&Setup::new(one_head(17, 33, 20, 20), None), Path::Naive);
}

#[test]
fn naive_causal() {
    check(&Setup::new(one_head(17, 33, 20, 20), Some(Align::BottomRight)), Path::Naive);
}

#[test]
fn head_dim_20() {
    check(&Setup::new(one_head(17, 33, 20, 20), None), Path::Auto);
}

#[test]
fn head_dim_64() {
    check(&Setup::new(one_head(9, 70, 64, 64), None), Path::Auto);
}

#[test]
fn head_dim_128_with_narrower_values() {
    check(&Setup::new(one_head(5, 40, 128, 64), None), Path::Auto);
}

#[test]
fn causal_bottom_right() {
    check(&Setup::new(one_head(33, 70, 20, 20), Some(Align::BottomRight)), Path::Auto);
}

#[test]
fn causal_top_left() {
    check(&Setup::new(one_head(33, 70, 20, 20), Some(Align::TopLeft)), Path::Auto);
}

#[test]
fn rows_that_see_nothing() {
    check(&Setup::new(one_head(33, 17, 20, 20), Some(Align::BottomRight)), Path::Auto);
    check(&Setup::new(one_head(3, 0, 20, 20), None), Path::Auto);
}

#[test]
fn grouped_queries() {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(7, 17, 20, 20) };
    check(&Setup::new(dims, Some(Align::BottomRight)), Path::Auto);
}

#[test]
fn bits_repeat() {
    let Some(engine) = with_default_limits() else { return };
    let setup = Setup::new(one_head(33, 70, 20, 20), None);
    let inputs = Tensors::amid_nan(engine, &setup.dims, &setup.data());
    let run = || engine.attention(&inputs.q, &inputs.k, &inputs.v, &Attention::full()).unwrap().o.read().unwrap();
    let first = run();
    for _ in 0..5 {
        assert_eq!(run(), first);
    }
}

/// A NaN that a row sees shows in its o and its lse, tiled and naive, and in no other row: some drivers' exp and log swallow it.
#[test]
fn nan_shows_in_its_row() {
    let Some(engine) = with_default_limits() else { return };
    let setup = Setup::new(one_head(17, 33, 20, 20), Some(Align::BottomRight));
    let mut data = setup.data();
    data.k[20 * 20] = f32::NAN; // rows 4 and up see key 20
    for path in [Path::Auto, Path::Naive] {
        let plan = engine.plan_by(path, &setup.problem()).unwrap();
        let (o, lse) = Tensors::amid_nan(engine, &setup.dims, &data).run(engine, &plan);
        assert!(o.iter().enumerate().all(|(at, o)| o.is_nan() == (at / 20 >= 4)), "o by {path:?}");
        assert!(lse.iter().enumerate().all(|(row, lse)| lse.is_nan() == (row >= 4)), "lse by {path:?}: {lse:?}");
    }
}

/// The planner's choice for a call with options against the reference.
#[track_caller]
fn check_call(call: &Call) {
    let Some(engine) = with_default_limits() else { return };
    let data = call.data();
    let uploaded = call.upload(engine, &data);
    let plan = engine.plan(&uploaded.problem(&call.options())).unwrap();
    call.assert_matches(&call.run(engine, &plan, &uploaded), &call.reference(&data), &format!("{:?}", plan.kernels()));
}

/// Every option at once, on two bytes an element.
#[test]
fn options_in_f16() {
    let dims = Dims { batch: 2, q_heads: 2, ..one_head(19, 37, 12, 9) };
    check_call(&Call {
        causal: true,
        window: [Some(20), None],
        softcap: Some(2.0),
        alibi: Some(vec![0.1, 0.2]),
        score_mod: true,
        mask_mod: true,
        bias: Some((DType::F16, [2, 1, 19, 37])),
        mask: Some([1, 2, 1, 37]),
        ranges: Some([1, 1, 19]),
        sinks: Some(vec![0.5, 1.0]),
        lens: Lens::Both,
        storage: Storage::all(DType::F16),
        ..Call::new(dims)
    });
}

/// One option alone: compilers differ in what they make of each.
#[test]
fn a_bias() {
    let call = Call::new(one_head(19, 37, 12, 9));
    check_call(&Call { bias: Some((DType::F32, [1, 1, 19, 37])), ..call });
}

#[test]
fn a_mask() {
    let call = Call::new(one_head(19, 37, 12, 9));
    check_call(&Call { mask: Some([1, 1, 19, 37]), ..call });
}

#[test]
fn a_score_mod() {
    check_call(&Call { score_mod: true, ..Call::new(one_head(19, 37, 12, 9)) });
}

#[test]
fn a_packed_batch_in_bf16() {
    let dims = Dims { batch: 3, q_heads: 2, ..one_head(50, 70, 12, 9) };
    let storage = Storage::all(DType::Bf16);
    check_call(&Call { causal: true, lens: Lens::Packed, storage, layout: Layout::Swapped, ..Call::new(dims) });
}

/// The gradients of a call by the planner's choice against the reference.
#[track_caller]
fn check_gradients(engine: Option<&Engine>, call: &Call) {
    let Some(engine) = engine else { return };
    let data = call.data();
    let plan = engine.plan_backward(&call.upload(engine, &data).problem(&call.options())).unwrap();
    backward::check_on(call, engine, &plan, &data);
}

#[test]
fn gradients() {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(33, 70, 20, 12) };
    check_gradients(with_default_limits(), &Call { causal: true, ..Call::new(dims) });
}

#[test]
fn gradients_with_options_in_f16() {
    let dims = Dims { batch: 2, q_heads: 2, ..one_head(19, 37, 12, 9) };
    let call = Call {
        softcap: Some(2.0),
        bias: Some((DType::F16, [2, 1, 1, 37])),
        sinks: Some(vec![0.5, 1.0]),
        lens: Lens::Both,
        storage: Storage::all(DType::F16),
        ..Call::new(dims)
    };
    check_gradients(with_default_limits(), &call);
}

/// Long for a software device.
#[test]
fn gradients_with_all_features() {
    let dims = Dims { q_heads: 8, kv_heads: 4, ..one_head(260, 300, 20, 20) };
    check_gradients(with_adapter_limits(), &Call { causal: true, ..Call::new(dims) });
}

#[test]
fn merging() {
    let Some(engine) = with_default_limits() else { return };
    let call = Call::new(one_head(5, 33, 12, 9));
    let data = call.data();
    let part = engine.attention_with(&call.upload(engine, &data).inputs(), &call.options()).unwrap();
    let merged = engine.merge(&part, &part).unwrap();
    let lse = merged.lse.read().unwrap().iter().map(|x| x - core::f32::consts::LN_2).collect();
    call.assert_matches(&(merged.o.read().unwrap(), lse), &call.reference(&data), "merged");
}
