//! Gradients against the reference: every option by itself on sizes that no tile divides, all pairs of them, the same bits every run, and
//! how much memory they take.

use core::ops::ControlFlow;

use tilewise::reference::{GradientTolerance, Precision, compare};
use tilewise::{
    Align, Attention, BackwardBindings, BackwardInputs, BackwardPlan, DType, DeviceFacts, Dims, Engine, Error,
    Gradients, Inputs, LimitsChoice, Problem, ScoreMod, Storage, Tensor, wgpu,
};

use super::call::{Call, HostData, Layout, Lens, Placed, precision, round};
use super::options::{BROADCAST, broadcast, chosen, covering_array};
use super::support::{Guarded, assert_close, bits, engines, one_head, open, random, upload_in};

/// The gradients of a call, in the orders of their shapes.
#[derive(Debug, PartialEq)]
struct Got {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    dbias: Option<Vec<f32>>,
    dsinks: Option<Vec<f32>>,
}

/// Each engine with a plan of its own kind: the one with all of the adapter as a software device, the one of default limits as a GPU. What
/// options do differs little between tiles, and every kernel takes its time to compile.
fn each_kind(call: &Call, data: &HostData) -> Vec<(&'static Engine, BackwardPlan)> {
    let kinds = [wgpu::DeviceType::Cpu, wgpu::DeviceType::Other];
    let planned = engines().into_iter().zip(kinds).map(|(engine, device_type)| {
        let problem = call.upload(engine, data).problem(&call.options());
        let facts = DeviceFacts { device_type, ..engine.facts() };
        (engine, BackwardPlan::new(&problem, &facts).unwrap_or_else(|error| panic!("{call:?}: {error}")))
    });
    planned.collect()
}

fn dims() -> Dims {
    Dims { batch: 3, q_heads: 4, kv_heads: 2, ..one_head(70, 91, 9, 6) }
}

fn call() -> Call {
    Call::new(dims())
}

/// The gradients of o and lse that a seed gives.
fn grads(call: &Call) -> (Vec<f32>, Vec<f32>) {
    let Dims { q_heads, q_len, value_dim, .. } = call.dims;
    let o: usize = call.shape(q_heads, q_len, value_dim).iter().product();
    let grad_o = round(call.storage.o, random(31 * call.seed + 8, 1.0, o));
    (grad_o, random(31 * call.seed + 9, 1.0, o / value_dim))
}

/// Runs a plan recorded into an encoder of the test's own, from the reference's o and lse, into outputs amid guard words. Kernels of forward
/// calls have tests of their own; compiling them too would take half as long again.
#[track_caller]
fn run(call: &Call, engine: &Engine, plan: &BackwardPlan, data: &HostData) -> Got {
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = call.dims;
    let uploaded = call.upload(engine, data);
    let inputs = uploaded.inputs();
    let output = call.reference(data);
    let [o, lse] = [output.o, output.lse].map(|x| x.into_iter().map(|x| x as f32).collect::<Vec<_>>());
    let (grad_o, grad_lse) = grads(call);
    let [o, grad_o] = [round(call.storage.o, o), grad_o]
        .map(|x| call.place(engine, call.storage.o, &x, &call.shape(q_heads, q_len, value_dim)));
    let lse_shape = if call.lens == Lens::Packed { vec![q_heads, q_len] } else { vec![batch, q_heads, q_len] };
    let [lse, grad_lse] = [lse, grad_lse].map(|x| engine.upload(&x, &lse_shape).unwrap());
    let place = |dtype, heads, len, dim| Placed::new(call, engine, dtype, &call.shape(heads, len, dim));
    let dq = place(call.storage.q, q_heads, q_len, head_dim);
    let dk = place(call.storage.k, kv_heads, kv_len, head_dim);
    let dv = place(call.storage.v, kv_heads, kv_len, value_dim);
    let dbias = call.bias.map(|(dtype, shape)| Guarded::stored(dtype, engine, &shape));
    let dsinks = call.sinks.as_ref().map(|sinks| Guarded::new(engine, &[sinks.len()]));
    let gradients = Gradients {
        dq: dq.view.clone(),
        dk: dk.view.clone(),
        dv: dv.view.clone(),
        dbias: dbias.as_ref().map(|it| it.tensor.clone()),
        dsinks: dsinks.as_ref().map(|it| it.tensor.clone()),
    };
    let given = BackwardInputs { inputs, o: &o, lse: &lse, grad_o: &grad_o, grad_lse: Some(&grad_lse) };
    let workspace = engine.alloc_backward_workspace(plan).unwrap();
    let bindings = BackwardBindings { inputs: given, gradients: &gradients, workspace: workspace.as_ref() };
    let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    plan.record(&mut encoder, &bindings).unwrap();
    engine.queue().submit([encoder.finish()]);
    Got {
        dq: dq.read(),
        dk: dk.read(),
        dv: dv.read(),
        dbias: dbias.map(|it| it.read()),
        dsinks: dsinks.map(|it| it.read()),
    }
}

#[track_caller]
pub(crate) fn check_on(call: &Call, engine: &Engine, plan: &BackwardPlan, data: &HostData) {
    let (grad_o, grad_lse) = grads(call);
    let expected = call.reference_gradients(data, &grad_o, &grad_lse);
    let got = run(call, engine, plan, data);
    let tolerance = expected.tolerance;
    let Storage { q, k, v, .. } = call.storage;
    // What an o stored in few bits says of delta is as good as that.
    let of = |tolerance: fn(&GradientTolerance, Precision) -> f64, it: &GradientTolerance, dtype: DType| {
        [dtype, call.storage.o].map(|dtype| tolerance(it, precision(dtype))).into_iter().fold(0.0, f64::max)
    };
    let bias_dtype = call.bias.map_or(DType::F32, |(dtype, _)| dtype);
    for (name, got, expected, tolerance) in [
        ("dq", Some(got.dq), Some(expected.dq), of(GradientTolerance::dq, &tolerance, q)),
        ("dk", Some(got.dk), Some(expected.dk), of(GradientTolerance::dk, &tolerance, k)),
        ("dv", Some(got.dv), Some(expected.dv), of(GradientTolerance::dv, &tolerance, v)),
        ("dbias", got.dbias, expected.dbias, of(GradientTolerance::dbias, &tolerance, bias_dtype)),
        ("dsinks", got.dsinks, expected.dsinks, of(GradientTolerance::dsinks, &tolerance, DType::F32)),
    ] {
        assert_eq!(got.is_some(), expected.is_some(), "{name}");
        let (Some(got), Some(expected)) = (got, expected) else { continue };
        let comparison = compare(&got, &expected, tolerance);
        assert!(comparison.passed(), "{name} of {call:?}, {:?}: {comparison}", plan.kernels());
    }
}

/// Checks random data on both engines.
#[track_caller]
fn check(call: &Call) {
    let data = call.data();
    for (engine, plan) in each_kind(call, &data) {
        check_on(call, engine, &plan, &data);
    }
}

#[test]
fn causality_and_windows() {
    for align in [Align::BottomRight, Align::TopLeft] {
        check(&Call { align, causal: true, ..call() });
        for window in [[Some(7), None], [None, Some(40)], [Some(33), Some(2)]] {
            check(&Call { align, window, ..call() });
        }
    }
    check(&Call { window: [Some(3), Some(3)], ..Call::new(one_head(200, 70, 8, 8)) });
}

/// Lengths at which tiles end, dims that no slice divides (field case H5).
#[test]
fn lengths_and_dims() {
    for len in [1, 17, 33, 65, 129] {
        for dim in [8, 63, 64] {
            check(&Call { causal: true, ..Call::new(one_head(len, len, dim, dim)) });
        }
    }
    check(&Call { causal: true, ..Call::new(one_head(1025, 1025, 8, 8)) });
    for (head_dim, value_dim) in [(128, 128), (5, 200), (512, 1), (300, 300)] {
        check(&Call::new(one_head(34, 66, head_dim, value_dim)));
    }
}

#[test]
fn masks_biases_and_ranges() {
    for (index, full) in BROADCAST.into_iter().enumerate() {
        check(&Call { mask: Some(broadcast(&dims(), full)), ..call() });
        let dtype = [DType::F32, DType::F16, DType::Bf16][index % 3];
        check(&Call { bias: Some((dtype, broadcast(&dims(), full))), seed: 1 + index as u64, ..call() });
    }
    let both = Call { mask: Some(broadcast(&dims(), [true; 4])), ..call() };
    check(&Call { bias: Some((DType::F32, broadcast(&dims(), [false, true, true, true]))), ..both });
    for shape in [[3, 4, 70], [1, 1, 70]] {
        check(&Call { ranges: Some(shape), ..call() });
    }
    check(&Call { mask_mod: true, ..call() });
}

/// Every shape that a bias may broadcast from, over several tiles of either axis (field case H6).
#[test]
fn biases_of_every_shape() {
    let dims = Dims { batch: 2, q_heads: 2, kv_heads: 1, ..one_head(70, 130, 4, 4) };
    for shape in 0..16u32 {
        let full = core::array::from_fn(|axis| shape & (1 << axis) != 0);
        check(&Call { bias: Some((DType::F32, broadcast(&dims, full))), lens: Lens::Both, ..Call::new(dims) });
    }
}

#[test]
fn lengths_of_batch_entries() {
    for lens in [Lens::Kv, Lens::Both, Lens::Packed] {
        check(&Call { lens, sinks: Some(vec![0.5, -1.0, 0.0, f32::NEG_INFINITY]), ..call() });
        check(&Call { lens, causal: true, align: Align::TopLeft, ..call() });
    }
    let long = Dims { batch: 3, q_heads: 2, kv_heads: 1, ..one_head(400, 500, 8, 8) };
    check(&Call { lens: Lens::Packed, causal: true, ..Call::new(long) });
    check(&Call { ranges: Some([1, 4, 70]), lens: Lens::Packed, causal: true, ..call() });
}

#[test]
fn scores_that_are_changed() {
    check(&Call { softcap: Some(0.7), scale: Some(1.5), ..call() });
    check(&Call { alibi: Some(tilewise::alibi_slopes(4)), ..call() });
    check(&Call { sinks: Some(vec![0.0, 3.5, -2.0, f32::NEG_INFINITY]), ..call() });
    check(&Call { score_mod: true, mask_mod: true, softcap: Some(1.5), ..call() });
}

#[test]
fn storage_types() {
    use DType::{Bf16, F16, F32};
    for dtype in [F16, Bf16] {
        for layout in [Layout::Dense, Layout::Swapped] {
            check(&Call { storage: Storage::all(dtype), layout, ..call() });
            // Every element count odd.
            let odd = Dims { batch: 1, q_heads: 3, kv_heads: 1, ..one_head(5, 7, 1, 3) };
            check(&Call { storage: Storage::all(dtype), layout, ..Call::new(odd) });
        }
    }
    check(&Call { storage: Storage { q: F16, k: F32, v: Bf16, o: F32 }, causal: true, ..call() });
}

/// Every pair of options.
#[test]
fn all_pairs() {
    for (n, row) in covering_array().into_iter().enumerate() {
        let call = chosen(row, n as u64);
        let data = call.data();
        // By turns one engine or the other, with what GPUs get.
        let Some(engine) = engines().into_iter().nth(n % 2) else { return };
        let facts = DeviceFacts { device_type: wgpu::DeviceType::Other, ..engine.facts() };
        let plan = BackwardPlan::new(&call.upload(engine, &data).problem(&call.options()), &facts).unwrap();
        check_on(&call, engine, &plan, &data);
    }
}

/// So long that a software device walks them in several passes.
#[test]
fn long() {
    for (q_len, kv_len) in [(3, 40_000), (40_000, 3)] {
        let call = Call { bias: Some((DType::F32, [1, 1, 1, 1])), ..Call::new(one_head(q_len, kv_len, 3, 5)) };
        let data = call.data();
        for engine in engines() {
            let problem = call.upload(engine, &data).problem(&call.options());
            check_on(&call, engine, &engine.plan_backward(&problem).unwrap(), &data);
        }
    }
    // Sixteen heads share the keys.
    let grouped = Call::new(Dims { q_heads: 16, ..one_head(5000, 2, 3, 5) });
    let data = grouped.data();
    for engine in engines() {
        let problem = grouped.upload(engine, &data).problem(&grouped.options());
        let plan = engine.plan_backward(&problem).unwrap();
        assert!(plan.explain().contains("passes") || engine.facts().device_type != wgpu::DeviceType::Cpu, "{plan}");
        check_on(&grouped, engine, &plan, &data);
    }
}

/// Calls that are long for a software device: what it has for them is handed round its subgroups.
fn long_calls() -> Vec<Call> {
    let dims = |q_len, kv_len, head_dim, value_dim| Dims {
        batch: 2,
        q_heads: 4,
        kv_heads: 2,
        ..one_head(q_len, kv_len, head_dim, value_dim)
    };
    let wide = || Call::new(dims(300, 400, 64, 64));
    let narrow = || Call::new(dims(600, 700, 16, 24));
    let odd = || Call { causal: true, ..Call::new(dims(517, 300, 35, 19)) };
    vec![
        wide(),
        Call { causal: true, ..wide() },
        Call { window: [Some(70), Some(9)], align: Align::TopLeft, ..wide() },
        // Narrower: a driver takes a third of the time to compile it.
        Call { lens: Lens::Both, scale: Some(0.3), ..narrow() },
        Call { lens: Lens::Packed, causal: true, sinks: Some(vec![0.5, -1.0, 0.0, f32::NEG_INFINITY]), ..narrow() },
        odd(),
        Call { storage: Storage::all(DType::F16), layout: Layout::Swapped, ..odd() },
        Call { storage: Storage { k: DType::Bf16, ..Storage::default() }, ..Call::new(dims(600, 300, 16, 48)) },
        // More than one part of tiles.
        Call::new(one_head(1100, 1300, 16, 48)),
    ]
}

/// The same with what changes scores and hides keys by tables and functions.
fn long_calls_with_options() -> Vec<Call> {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(700, 801, 12, 8) };
    let shape = |full| broadcast(&dims, full);
    let call = || Call::new(dims);
    let alibi = || Some(tilewise::alibi_slopes(4));
    vec![
        Call {
            softcap: Some(0.7),
            scale: Some(1.5),
            alibi: alibi(),
            bias: Some((DType::F16, shape([true, false, false, true]))),
            lens: Lens::Both,
            ..call()
        },
        Call {
            mask: Some(shape([true, false, false, true])),
            bias: Some((DType::F32, shape([false, true, true, true]))),
            causal: true,
            ..call()
        },
        Call {
            ranges: Some([1, 4, 700]),
            lens: Lens::Packed,
            alibi: alibi(),
            window: [Some(200), Some(100)],
            ..call()
        },
        Call {
            score_mod: true,
            mask_mod: true,
            mask: Some(shape([true, false, true, false])),
            sinks: Some(vec![0.5, -1.0, 0.0, f32::NEG_INFINITY]),
            ..call()
        },
    ]
}

#[test]
fn long_on_a_software_device() {
    for call in long_calls().into_iter().chain(long_calls_with_options()) {
        let data = call.data();
        if let Some((engine, plan)) = each_kind(&call, &data).into_iter().next() {
            let facts = engine.facts();
            let has_subgroups = facts.features.contains(wgpu::Features::SUBGROUP) && facts.min_subgroup_size >= 4;
            let kernels = plan.kernels();
            assert_eq!(kernels.iter().any(|it| it.starts_with("flash_bwd_broadcast")), has_subgroups, "{kernels:?}");
            check_on(&call, engine, &plan, &data);
        }
    }
}

/// Everything that a lane reads past what is seen is NaN, and the gradients are those without.
#[test]
fn poison_behind_masks_of_long_calls() {
    let [full, ..] = &long_calls()[..] else { return };
    poison(&Call { lens: Lens::Both, ..full.clone() });
    poison(&Call { causal: true, align: Align::TopLeft, ..full.clone() });
    let [by_bias, by_mask, ..] = &long_calls_with_options()[..] else { return };
    poison(by_bias);
    poison(by_mask);
}

#[test]
fn sizes_of_zero() {
    for dims in [one_head(0, 5, 4, 4), one_head(5, 0, 4, 4), Dims { batch: 0, ..one_head(5, 5, 4, 4) }] {
        let bias = Some((DType::F32, [1, 1, 1, 1]));
        check(&Call { bias, sinks: Some(vec![0.5]), ..Call::new(dims) });
    }
}

/// Nothing is added to by two workgroups (field case H4).
#[test]
fn the_same_bits_every_run() {
    let call =
        Call { causal: true, ..Call::new(Dims { batch: 2, q_heads: 2, kv_heads: 1, ..one_head(130, 130, 32, 32) }) };
    let bias = Some((DType::F32, [1, 2, 1, 130]));
    let call = Call { bias, sinks: Some(vec![0.5, 1.0]), ..call };
    let data = call.data();
    for engine in engines() {
        let plan = engine.plan_backward(&call.upload(engine, &data).problem(&call.options())).unwrap();
        let first = run(&call, engine, &plan, &data);
        for _ in 1..20 {
            let next = run(&call, engine, &plan, &data);
            let words = |got: &Got| {
                [&got.dq, &got.dk, &got.dv]
                    .into_iter()
                    .chain(&got.dbias)
                    .chain(&got.dsinks)
                    .map(|x| bits(x))
                    .collect::<Vec<_>>()
            };
            assert_eq!(words(&first), words(&next));
        }
    }
}

/// Cut into submissions of their own: the same bits, progress that goes up to 1, and an engine that still works when it's cancelled.
#[test]
fn in_parts() {
    for engine in engines() {
        let dims = Dims { batch: 2, q_heads: 24, kv_heads: 3, ..one_head(130, 100, 20, 20) };
        let upload =
            |seed, heads, len| engine.upload(&random(seed, 1.0, 2 * heads * len * 20), [2, heads, len, 20]).unwrap();
        let (q, k, v, grad_o) = (upload(1, 24, 130), upload(2, 3, 100), upload(3, 3, 100), upload(4, 24, 130));
        let inputs = Inputs::new(&q, &k, &v);
        let problem = Problem::new(dims, Attention::causal()).unwrap();
        let plan = engine.plan_backward(&problem).unwrap();
        engine.warm_up_backward(&plan).unwrap();
        let out = engine.attention_with(&inputs, &Attention::causal()).unwrap();
        let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o: &grad_o, grad_lse: None };
        let words = |gradients: &Gradients| {
            [&gradients.dq, &gradients.dk, &gradients.dv].map(|tensor| bits(&tensor.read().unwrap()))
        };
        let whole = words(&engine.attention_backward(&given, &Attention::causal()).unwrap());
        let gradients = engine.alloc_gradients(&plan).unwrap();
        let workspace = engine.alloc_backward_workspace(&plan).unwrap();
        let bindings = BackwardBindings { inputs: given, gradients: &gradients, workspace: workspace.as_ref() };
        let cancelled = engine.run_backward(&plan, &bindings, |_| ControlFlow::Break(()));
        assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
        let mut reports = vec![0.0];
        engine
            .run_backward(&plan, &bindings, |done| {
                reports.push(done);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(reports.is_sorted() && reports.last() == Some(&1.0) && reports.len() > 4, "{reports:?}");
        assert_eq!(words(&gradients), whole);
    }
}

/// A fused projection whose gradient is fused too: dq, dk and dv lie between each other in one buffer.
#[test]
fn of_a_fused_projection() {
    let (batch, len, heads, dim) = (2, 70, 3, 6);
    for engine in engines() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let stored = |seed, columns: usize| {
                let data = round(dtype, random(seed, 1.0, batch * len * columns));
                upload_in(dtype, engine, &data).unflatten(0, batch).unwrap().unflatten(1, len).unwrap()
            };
            let qkv = stored(1, 3 * heads * dim);
            let parts = |fused: &Tensor, range: [usize; 3]| {
                range.map(|n| fused.slice(2, n * heads * dim..(n + 1) * heads * dim).unwrap().heads(heads).unwrap())
            };
            let [q, k, v] = parts(&qkv, [0, 1, 2]);
            let (inputs, options) = (Inputs::new(&q, &k, &v), Attention::causal());
            let out = engine.attention_with(&inputs, &options).unwrap();
            let grad_o = stored(2, heads * dim).heads(heads).unwrap();
            let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o: &grad_o, grad_lse: None };
            let expected = engine.attention_backward(&given, &options).unwrap();

            let plan = engine.plan_backward(&inputs.problem(&options.output_dtype(dtype)).unwrap()).unwrap();
            let workspace = engine.alloc_backward_workspace(&plan).unwrap();
            let fused = engine.alloc(dtype, qkv.shape()).unwrap();
            let run = |[dq, dk, dv]: [Tensor; 3]| {
                let gradients = Gradients { dq, dk, dv, dbias: None, dsinks: None };
                let bindings = BackwardBindings { inputs: given, gradients: &gradients, workspace: workspace.as_ref() };
                engine.run_backward(&plan, &bindings, |_| ControlFlow::Continue(())).map(|()| gradients)
            };
            let got = run(parts(&fused, [0, 1, 2])).unwrap();
            for (name, got, expected) in
                [("dq", got.dq, expected.dq), ("dk", got.dk, expected.dk), ("dv", got.dv, expected.dv)]
            {
                assert_eq!(bits(&got.read().unwrap()), bits(&expected.read().unwrap()), "{name} in {dtype}");
            }
            let refused = run(parts(&fused, [0, 1, 1])).unwrap_err().to_string();
            assert!(refused.contains("dv overlaps dk"), "{refused}");
        }
    }
}

/// The gradients of a call by hand: `engine.attention_backward` of q, k, v and what comes back.
#[track_caller]
fn gradients(engine: &Engine, shapes: [[usize; 4]; 3], [q, k, v]: [&[f32]; 3], grad_o: &[f32]) -> [Vec<f32>; 3] {
    let [q, k, v] = [(q, shapes[0]), (k, shapes[1]), (v, shapes[2])].map(|(x, shape)| engine.upload(x, shape).unwrap());
    let (inputs, options) = (Inputs::new(&q, &k, &v), Attention::full());
    let out = engine.attention_with(&inputs, &options).unwrap();
    let grad_o = engine.upload(grad_o, out.o.shape()).unwrap();
    let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o: &grad_o, grad_lse: None };
    let Gradients { dq, dk, dv, dbias, dsinks } = engine.attention_backward(&given, &options).unwrap();
    assert!(dbias.is_none() && dsinks.is_none());
    [dq, dk, dv].map(|tensor| tensor.read().unwrap())
}

/// Field cases H1 and H3, and two keys with scores 0 and ln 3: weights 1/4 and 3/4.
#[test]
fn worked_by_hand() {
    for engine in engines() {
        let (q, k, v) = (random(1, 3.0, 16), random(2, 3.0, 16), random(3, 3.0, 16));
        let [dq, dk, dv] = gradients(engine, [[1, 1, 1, 16]; 3], [&q, &k, &v], &[1.0; 16]);
        assert_close(&dq, &[0.0; 16], 1e-6, "dq of one key");
        assert_close(&dk, &[0.0; 16], 1e-6, "dk of one key");
        assert_eq!(dv, [1.0; 16]);

        let shapes = [[1, 4, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]];
        let [_, _, dv] = gradients(engine, shapes, [&[0.1, 0.2, 0.3, 0.4], &[0.5], &[7.0]], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(dv, [10.0]);

        let shapes = [[1, 1, 1, 1], [1, 1, 2, 1], [1, 1, 2, 1]];
        let [dq, dk, dv] = gradients(engine, shapes, [&[3.0f32.ln()], &[0.0, 1.0], &[2.0, 10.0]], &[1.0]);
        // o = 8, dS = P (v - o) = (1/4 * -6, 3/4 * 2).
        assert_close(&dv, &[0.25, 0.75], 1e-6, "dv");
        assert_close(&dq, &[1.5], 1e-5, "dq");
        assert_close(&dk, &[-1.5 * 3f64.ln(), 1.5 * 3f64.ln()], 1e-5, "dk");
    }
}

/// What a query doesn't see has no part in its gradients, be it NaN; what no query sees has gradients of 0.
#[test]
fn poison_behind_masks() {
    for call in [
        Call { lens: Lens::Kv, ..call() },
        Call { lens: Lens::Both, ..call() },
        Call { causal: true, align: Align::TopLeft, ..call() },
        Call { mask: Some(broadcast(&dims(), [true, false, false, true])), ..call() },
        Call { bias: Some((DType::F32, broadcast(&dims(), [true, false, false, true]))), ..call() },
    ] {
        poison(&call);
    }
}

#[track_caller]
fn poison(call: &Call) {
    let clean = call.data();
    let mut poisoned = clean.clone();
    let Dims { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = call.dims;
    // Keys past the end of an entry that is shorter than the tensors, or past the last query, or hidden from all queries by a table.
    let is_hidden = |entry: usize, key: usize| {
        let len = match call.lens {
            Lens::Full if call.causal && call.align == Align::TopLeft => q_len,
            Lens::Full => kv_len,
            _ => call.lens_of(kv_len)[entry] as usize,
        };
        let is_of_keys = |shape| shape == [batch, 1, 1, kv_len];
        key >= len
            || call.mask.is_some_and(is_of_keys) && !clean.mask[entry * kv_len + key]
            || call.bias.is_some_and(|(_, shape)| is_of_keys(shape))
                && clean.bias[entry * kv_len + key] == f32::NEG_INFINITY
    };
    for entry in 0..batch {
        for head in 0..kv_heads {
            for key in (0..kv_len).filter(|&key| is_hidden(entry, key)) {
                let row = (entry * kv_heads + head) * kv_len + key;
                poisoned.k[row * head_dim..][..head_dim].fill(f32::NAN);
                poisoned.v[row * value_dim..][..value_dim].fill(f32::NAN);
            }
        }
    }
    assert!(poisoned.k.iter().any(|x| x.is_nan()), "{call:?}: nothing is hidden from all queries");
    for (engine, plan) in each_kind(call, &clean) {
        assert_eq!(run(call, engine, &plan, &clean), run(call, engine, &plan, &poisoned), "{call:?}");
    }
}

/// Extra memory is linear in the length, and that of grouped heads no more than of as many heads alone (field case H8). Counted on devices
/// of their own.
#[test]
fn memory_is_linear() {
    for engine in [LimitsChoice::Adapter, LimitsChoice::Default].into_iter().filter_map(open) {
        let peak = |q_heads: usize, kv_heads: usize, len: usize| {
            let dims = Dims { kv_heads, ..Dims::square(1, q_heads, len, 32) };
            let x = |elems| random(1, 1.0, elems);
            let q = engine.upload(&x(dims.q_elems()), [1, q_heads, len, 32]).unwrap();
            let k = engine.upload(&x(dims.k_elems()), [1, kv_heads, len, 32]).unwrap();
            let (inputs, options) = (Inputs::new(&q, &k, &k), Attention::causal());
            let out = engine.attention_with(&inputs, &options).unwrap();
            engine.wait().unwrap();
            engine.reset_peak();
            let before = engine.memory().live_bytes();
            let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o: &out.o, grad_lse: None };
            let gradients = engine.attention_backward(&given, &options).unwrap();
            let of_gradients =
                4 * [&gradients.dq, &gradients.dk, &gradients.dv].map(|it| it.elems() as u64).iter().sum::<u64>();
            engine.memory().peak_bytes() - before - of_gradients
        };
        let peaks = [256, 512, 1024].map(|len| peak(4, 4, len));
        for pair in peaks.windows(2) {
            assert!(pair[1] < 2 * pair[0] + 1024, "{peaks:?}");
        }
        assert!(peaks[0] <= 8 * 4 * 256 + 1024, "{peaks:?}");
        assert!(peak(8, 1, 512) <= peak(8, 8, 512) + 1024);
    }
}

#[test]
fn what_is_refused() {
    for engine in engines() {
        let x = engine.upload(&[0.5f32; 32], [1, 1, 4, 8]).unwrap();
        let (inputs, options) = (Inputs::new(&x, &x, &x), Attention::full());
        let out = engine.attention_with(&inputs, &options).unwrap();
        let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o: &out.o, grad_lse: None };
        let invalid = |given: &BackwardInputs<'_>, options: &Attention, said: &str| match engine
            .attention_backward(given, options)
        {
            Err(Error::Invalid(message)) => assert!(message.contains(said), "{message}"),
            other => panic!("{:?}", other.map(drop)),
        };
        let short = x.slice(2, 0..3).unwrap();
        invalid(&BackwardInputs { grad_o: &short, ..given }, &options, "grad_o of f32 and shape [1, 1, 3, 8]");
        invalid(&BackwardInputs { grad_lse: Some(&x), ..given }, &options, "grad_lse");
        invalid(&BackwardInputs { o: &short, ..given }, &options, "o of f32");
        let args = "score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32";
        let bent = |body: &str| ScoreMod::new(&format!("fn score_mod({args}) -> f32 {{ {body} }}")).unwrap();
        let derived = |body: &str, derivative: &str| {
            let derivative = format!("fn score_mod_derivative({args}) -> f32 {{ return {derivative}; }}");
            options.clone().score_mod(bent(body).derivative(&derivative).unwrap())
        };
        let square = "return score * abs(score) + f32(kv_idx);";
        invalid(&given, &options.clone().score_mod(bent(square)), "without its derivative");
        for wrong in ["abs(score)", "-2.0 * abs(score)", "2.0 * score", "0.0", "bitcast<f32>(0x7fc00000u + h)"] {
            invalid(&given, &derived(square, wrong), "where score_mod has a slope of");
        }
        engine.attention_backward(&given, &derived(square, "2.0 * abs(score)")).unwrap();
        // A kink, and keys that it hides.
        engine
            .attention_backward(&given, &derived("return max(score, 0.1 * score);", "select(0.1, 1.0, score > 0.0)"))
            .unwrap();
        let hides = "return select(3.0 * score, bitcast<f32>(0xff800000u + 0u * h), kv_idx == 2u);";
        engine.attention_backward(&given, &derived(hides, "3.0")).unwrap();

        let plan = engine.plan_backward(&inputs.problem(&options).unwrap()).unwrap();
        let gradients = engine.alloc_gradients(&plan).unwrap();
        let workspace = engine.alloc_backward_workspace(&plan).unwrap();
        let record = |gradients: &Gradients, said: &str| {
            let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let bindings = BackwardBindings { inputs: given, gradients, workspace: workspace.as_ref() };
            let message = plan.record(&mut encoder, &bindings).unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
        };
        record(&Gradients { dk: gradients.dq.clone(), ..gradients.clone() }, "dk overlaps dq");
        record(&Gradients { dk: x.clone(), ..gradients.clone() }, "dk overlaps q");
        record(&Gradients { dq: short.clone(), ..gradients.clone() }, "dq of f32");
        record(&Gradients { dbias: Some(x.clone()), ..gradients.clone() }, "dbias of what isn't there");

        let wide = Problem::new(one_head(2, 2, 513, 8), Attention::full()).unwrap();
        assert!(matches!(engine.plan_backward(&wide), Err(Error::Unsupported { available: 512, .. })));
    }
}
