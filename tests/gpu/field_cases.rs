//! What went wrong for others, by the number of its report in the collection of field cases: the smallest input that shows the fault.
//! Those that are a module's whole contract are there: A1's rows, C1, I3, J2, K2, K4, K5, L5.

use core::f64::consts::LN_2;

use tilewise::{Align, Attention, DType, Dims, Error, Inputs, LimitsChoice, Path, Problem, Storage, reference, wgpu};

use super::call::{Call, HostData, Lens};
use super::support::{
    Data, MASKS, Results, Setup, Tensors, amid_nan, amid_nan_in, assert_close, bits, engines, one_head, open, plans,
    random, two_tiled_plans, upload_in, with_limits,
};

const NONE: f64 = f64::NEG_INFINITY;

/// Runs every plan on both engines.
fn run_all(setup: &Setup, data: &Data, check: impl Fn(&Results, &str)) {
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, data);
        for plan in plans(engine, &setup.problem()) {
            check(&inputs.run(engine, &plan), &format!("{:?}", plan.kernels()));
        }
    }
}

fn data(q: &[f32], k: &[f32], v: &[f32]) -> Data {
    Data { q: q.to_vec(), k: k.to_vec(), v: v.to_vec() }
}

/// A row that sees nothing is 0, -inf and no trouble to the others: causal, so the first of three rows on two keys.
#[test]
fn a1_a_row_without_keys_leaves_the_others_alone() {
    let setup = Setup::new(one_head(3, 2, 2, 2), Some(Align::BottomRight));
    let all = setup.data();
    let fewer = Setup::new(one_head(2, 2, 2, 2), Some(Align::BottomRight));
    let rest = Data { q: all.q[2..].to_vec(), ..all.clone() };
    for engine in engines() {
        let (all, rest) = (Tensors::amid_nan(engine, &setup.dims, &all), Tensors::amid_nan(engine, &fewer.dims, &rest));
        for (plan, other) in plans(engine, &setup.problem()).iter().zip(plans(engine, &fewer.problem())) {
            let (all, rest) = (all.run(engine, plan), rest.run(engine, &other));
            assert_eq!((&all.0[..2], all.1[0]), (&[0.0, 0.0][..], f32::NEG_INFINITY), "{:?}", plan.kernels());
            assert_eq!((bits(&all.0[2..]), bits(&all.1[1..])), (bits(&rest.0), bits(&rest.1)), "{:?}", plan.kernels());
        }
    }
}

#[test]
fn a6_more_queries_than_keys() {
    let setup = Setup::new(one_head(5, 2, 1, 1), Some(Align::BottomRight));
    run_all(&setup, &data(&[0.0; 5], &[0.0; 2], &[10.0, 20.0]), |(o, lse), what| {
        assert_eq!(o, &[0.0, 0.0, 0.0, 10.0, 15.0], "{what}");
        assert_close(lse, &[NONE, NONE, NONE, 0.0, LN_2], 1e-6, what);
    });
}

#[test]
fn a7_no_keys() {
    for causal in MASKS {
        let setup = Setup::new(Dims { q_heads: 2, kv_heads: 2, ..one_head(3, 0, 8, 8) }, causal);
        run_all(&setup, &setup.data(), |(o, lse), what| {
            assert_eq!((o.as_slice(), lse.as_slice()), (&[0.0; 48][..], &[f32::NEG_INFINITY; 6][..]), "{what}");
        });
        for engine in engines() {
            let (q, kv) =
                (engine.alloc(DType::F32, [1, 2, 3, 8]).unwrap(), engine.alloc(DType::F32, [1, 2, 0, 8]).unwrap());
            for path in [Path::Auto, Path::Naive] {
                let out = engine.attention_by(path, &Inputs::new(&q, &kv, &kv), &setup.options()).unwrap();
                assert_eq!(out.o.read().unwrap(), [0.0; 48]);
            }
        }
    }
}

#[test]
fn a8_no_batch_entries_and_no_queries() {
    for engine in engines() {
        for (q_shape, kv_shape) in [([0, 4, 8, 16], [0, 4, 8, 16]), ([1, 4, 0, 16], [1, 4, 8, 16])] {
            let (q, kv) = (engine.alloc(DType::F32, q_shape).unwrap(), engine.alloc(DType::F32, kv_shape).unwrap());
            for path in [Path::Auto, Path::Naive] {
                for options in [Attention::full(), Attention::causal()] {
                    let out = engine.attention_by(path, &Inputs::new(&q, &kv, &kv), &options).unwrap();
                    assert_eq!((out.o.shape(), out.lse.shape()), (&q_shape[..], &q_shape[..3]));
                    assert_eq!((out.o.read().unwrap().len(), out.lse.read().unwrap().len()), (0, 0));
                }
            }
        }
    }
}

/// Scores 0..95 rise at every tile, and e^95 overflows f32.
#[test]
fn b3_rising_scores() {
    let scores: Vec<f32> = (0..96u8).map(f32::from).collect();
    let setup = Setup { scale: Some(1.0), ..Setup::new(one_head(1, 96, 1, 1), None) };
    run_all(&setup, &data(&[1.0], &scores, &scores), |(o, lse), what| {
        assert_close(o, &[94.418_02], 2e-5, what);
        assert_close(lse, &[95.458_7], 6e-5, what);
    });
}

/// Scores over [-80, 0].
#[test]
fn b4_exponents_far_below_zero() {
    let k: Vec<f32> = random(9, 40.0, 200).iter().map(|x| x - 40.0).collect();
    let setup = Setup { scale: Some(1.0), ..Setup::new(one_head(1, 200, 1, 3), None) };
    let data = data(&[1.0], &k, &random(10, 1.0, 600));
    let expected = setup.reference(&data);
    run_all(&setup, &data, |results, what| super::support::assert_matches(results, &expected, what));
}

#[test]
fn c1_lengths_that_are_no_multiple_of_a_tile() {
    let lengths = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 192, 257, 1025];
    for (index, len) in lengths.into_iter().enumerate() {
        let kv_len = lengths[(3 * index + 1) % lengths.len()];
        Setup::new(one_head(len, kv_len, 16, 16), MASKS[index % 3]).check();
    }
}

#[test]
fn c2_head_dims_that_are_no_power_of_two() {
    for dim in [7, 20, 48, 63, 112] {
        Setup::new(Dims::square(1, 2, 33, dim), None).check();
    }
}

/// Two tiles of 256 or 512 wide rows are more than 16 KiB.
#[test]
fn c4_wide_heads_in_little_workgroup_memory() {
    for dim in [256, 512] {
        Setup::new(Dims::square(1, 1, 70, dim), None).check();
    }
}

/// Every head of a batch is what it is alone, to the bit.
#[test]
fn c8_every_head_is_computed() {
    let setup = Setup::new(Dims::square(2, 4, 16, 32), Some(Align::BottomRight));
    let all = setup.data();
    let single = Setup { dims: Dims::square(1, 1, 16, 32), ..setup };
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &all);
        for (plan, other) in plans(engine, &setup.problem()).iter().zip(plans(engine, &single.problem())) {
            let (o, lse) = inputs.run(engine, plan);
            for head in 0..8 {
                let part = |x: &[f32]| x[head * 512..(head + 1) * 512].to_vec();
                let one = Data { q: part(&all.q), k: part(&all.k), v: part(&all.v) };
                let one = Tensors::amid_nan(engine, &single.dims, &one).run(engine, &other);
                assert_eq!(bits(&one.0), bits(&part(&o)), "head {head} of {:?}", plan.kernels());
                assert_eq!(bits(&one.1), bits(&lse[head * 16..(head + 1) * 16]), "head {head} of {:?}", plan.kernels());
            }
        }
    }
}

#[test]
fn d1_both_corners_of_the_causal_mask() {
    let dims = one_head(2, 5, 1, 1);
    let data = data(&[0.0; 2], &[0.0; 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    for (align, expected) in [(Align::BottomRight, [2.5, 3.0]), (Align::TopLeft, [1.0, 1.5])] {
        let setup = Setup::new(dims, Some(align));
        run_all(&setup, &data, |(o, _), what| assert_close(o, &expected, 1e-6, what));
    }
    assert_eq!(Attention::causal().alignment(), Align::BottomRight, "the default");
}

#[test]
fn e1_query_heads_in_contiguous_groups() {
    for (q_heads, kv_heads) in [(6, 2), (28, 4), (12, 12), (8, 1)] {
        let setup = Setup::new(Dims { q_heads, kv_heads, ..one_head(1, 1, 1, 1) }, None);
        let v: Vec<f32> = (1..=kv_heads).map(|head| head as f32).collect();
        let expected: Vec<f64> = (0..q_heads).map(|head| (head / (q_heads / kv_heads) + 1) as f64).collect();
        run_all(&setup, &data(&vec![0.0; q_heads], &vec![0.0; kv_heads], &v), |(o, _), what| {
            assert_close(o, &expected, 0.0, what);
        });
    }
}

#[test]
fn e3_heads_that_do_not_divide() {
    for (q_heads, kv_heads) in [(3, 2), (33, 2), (4, 0), (2, 3)] {
        let dims = Dims { q_heads, kv_heads, ..Dims::square(1, 1, 2, 2) };
        let error = Problem::new(dims, Attention::full()).unwrap_err().to_string();
        assert!(error.contains(&format!("q_heads = {q_heads}, kv_heads = {kv_heads}")), "{error}");
    }
}

#[test]
fn e8_the_scale_is_the_callers() {
    let data = data(&[2.0, 0.0, 0.0, 0.0], &[2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], &[1.0, 0.0]);
    for (scale, expected) in [(None, 0.880_797), (Some(1.0), 0.982_014), (Some(0.0), 0.5)] {
        let setup = Setup { scale, ..Setup::new(one_head(1, 2, 4, 1), None) };
        run_all(&setup, &data, |(o, _), what| assert_close(o, &[expected], 1e-6, what));
    }
}

/// One buffer [B = 2, S = 5, 3, H = 3, D = 4] that holds q, k and v.
#[test]
fn f1_views_of_one_fused_buffer() {
    let setup = Setup::new(Dims::square(2, 3, 5, 4), None);
    let fused = random(7, 1.0, 2 * 5 * 3 * 3 * 4);
    let part = |which: usize| {
        let mut dense = Vec::new();
        for (b, h) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
            for s in 0..5 {
                let from = (((b * 5 + s) * 3 + which) * 3 + h) * 4;
                dense.extend_from_slice(&fused[from..from + 4]);
            }
        }
        dense
    };
    let data = Data { q: part(0), k: part(1), v: part(2) };
    for engine in engines() {
        let whole = amid_nan(engine, &fused, &[2, 5, 36]);
        let view = |which: usize| whole.slice(2, 12 * which..12 * (which + 1)).unwrap().heads(3).unwrap();
        let (views, dense) =
            (Tensors { q: view(0), k: view(1), v: view(2) }, Tensors::amid_nan(engine, &setup.dims, &data));
        for plan in plans(engine, &setup.problem()) {
            let (one, other) = (views.run(engine, &plan), dense.run(engine, &plan));
            assert_eq!((bits(&one.0), bits(&one.1)), (bits(&other.0), bits(&other.1)), "{:?}", plan.kernels());
        }
    }
}

/// K from element 3, V from element 65 of one buffer: no device binds there.
#[test]
fn f7_offsets_that_no_binding_may_have() {
    let setup = Setup::new(one_head(4, 7, 8, 4), None);
    let data = setup.data();
    let expected = setup.reference(&data);
    let mut pool = vec![f32::NAN; 100];
    pool[3..59].copy_from_slice(&data.k);
    pool[65..93].copy_from_slice(&data.v);
    for engine in engines() {
        let pool = engine.upload(&pool, [100]).unwrap();
        let at = |from, shape: [usize; 4]| engine.borrow(pool.raw_buffer().clone(), DType::F32, from, shape).unwrap();
        let q = amid_nan(engine, &data.q, &[1, 1, 4, 8]);
        let inputs = Tensors { q, k: at(3, [1, 1, 7, 8]), v: at(65, [1, 1, 7, 4]) };
        for plan in plans(engine, &setup.problem()) {
            super::support::assert_matches(&inputs.run(engine, &plan), &expected, &plan.explain());
        }
    }
}

/// The limit lowered to 1 MiB, a K of 2 MiB.
#[test]
fn i2_a_tensor_over_one_binding() {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 20, ..wgpu::Limits::default() };
    let Some(engine) = with_limits(limits) else { return };
    let problem = Setup::new(one_head(1, 8192, 64, 1), None).problem();
    let error = engine.plan(&problem).unwrap_err();
    assert!(matches!(error, Error::Unsupported { needed: 2_097_152, available: 1_048_576, .. }), "{error}");
}

/// No barrier between a tile's last reader and the next tile's writer would show sooner or later: 8 tiles, many runs.
#[test]
fn j2_tiles_are_not_overwritten_while_read() {
    let setup = Setup::new(one_head(64, 520, 64, 64), None);
    let data = setup.data();
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &data);
        let plan = engine.plan(&setup.problem()).unwrap();
        let first = inputs.run(engine, &plan);
        super::support::assert_matches(&first, &setup.reference(&data), &plan.explain());
        for _ in 0..50 {
            assert_eq!(bits(&inputs.run(engine, &plan).0), bits(&first.0));
        }
    }
}

#[test]
fn k5_a_score_matrix_over_the_limit() {
    let Some(engine) = open(LimitsChoice::Default) else { return };
    let x = engine.alloc(DType::F32, [1, 1, 8192, 2]).unwrap();
    let before = engine.memory();
    let error = engine.attention_by(Path::Naive, &Inputs::new(&x, &x, &x), &Attention::full()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { needed: 268_435_456, .. }), "{error}");
    assert_eq!(engine.memory(), before);
    let setup = Setup::new(one_head(3, 5, 4, 4), None);
    let data = setup.data();
    setup.check_on(&engine, &data, &setup.reference(&data));
}

/// A call's options by two tiled plans on both engines, on data of the test's.
fn run_call(call: &Call, data: &HostData, check: impl Fn(&Results, &str)) {
    for engine in engines() {
        let uploaded = call.upload(engine, data);
        for plan in two_tiled_plans(engine, &uploaded.problem(&call.options())) {
            check(&call.run(engine, &plan, &uploaded), &format!("{:?}", plan.kernels()));
        }
    }
}

/// The same, with q of zeros: o is the mean of the values that are seen.
fn means(call: &Call, v: &[f32], more: HostData, expected: &[f64]) {
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, .. } = call.dims;
    let q = vec![0.0; batch * q_heads * q_len * head_dim];
    let k = random(1, 1.0, batch * kv_heads * kv_len * head_dim);
    let data = HostData { q, k, v: v.to_vec(), ..more };
    run_call(call, &data, |(o, _), what| assert_close(o, expected, 1e-6, what));
}

/// A row that a mask leaves nothing, by a boolean or by a bias of -inf, with causality or without: 0 and -inf, and the other row has the
/// bits that it has alone.
#[test]
fn a1_a2_a_row_that_is_masked_throughout() {
    let (q, k) = (random(1, 1.0, 4), random(2, 1.0, 6));
    let data = HostData { q, k, v: vec![1.0, 1.0, 2.0, 2.0, 3.0, 3.0], ..HostData::default() };
    let alone = HostData { q: data.q[..2].to_vec(), ..data.clone() };
    let hidden = [vec![0.0; 3], vec![f32::NEG_INFINITY; 3]].concat();
    for causal in [false, true] {
        // Row 0 of two sees two of three keys, as that of one does when the corner is its own.
        let base = Call { causal, align: Align::TopLeft, ..Call::new(one_head(2, 3, 2, 2)) };
        let first = Call { dims: one_head(1, 3, 2, 2), ..base.clone() };
        for engine in engines() {
            let uploaded = first.upload(engine, &alone);
            let plans = two_tiled_plans(engine, &uploaded.problem(&first.options()));
            let expected = plans.iter().map(|plan| first.run(engine, plan, &uploaded)).collect::<Vec<_>>();
            let check = |call: &Call, data: &HostData| {
                let uploaded = call.upload(engine, data);
                let plans = two_tiled_plans(engine, &uploaded.problem(&call.options()));
                for (plan, expected) in plans.iter().zip(&expected) {
                    let (o, lse) = call.run(engine, plan, &uploaded);
                    assert_eq!((&o[2..], lse[1]), (&[0.0, 0.0][..], f32::NEG_INFINITY), "{:?}", plan.kernels());
                    assert_eq!(bits(&o[..2]), bits(&expected.0), "{:?}", plan.kernels());
                    assert_eq!(lse[0].to_bits(), expected.1[0].to_bits(), "{:?}", plan.kernels());
                }
            };
            let mask = HostData { mask: vec![true, true, true, false, false, false], ..data.clone() };
            check(&Call { mask: Some([1, 1, 2, 3]), ..base.clone() }, &mask);
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let bias = HostData { bias: hidden.clone(), ..data.clone() };
                check(&Call { bias: Some((dtype, [1, 1, 2, 3])), ..base.clone() }, &bias);
            }
        }
    }
    // The lowest number is no mask: all keys alike, however low.
    let lowest = HostData { bias: [vec![0.0; 3], vec![f32::MIN; 3]].concat(), ..data };
    let call = Call { bias: Some((DType::F32, [1, 1, 2, 3])), ..Call::new(one_head(2, 3, 2, 2)) };
    run_call(&call, &lowest, |(o, lse), what| {
        assert_close(&o[2..], &[2.0, 2.0], 1e-6, what);
        assert!(lse[1].is_finite() && lse[1] < -3.4e38, "{lse:?} {what}");
    });
}

/// The unused tail of a cache holds anything; so does a key that a mask hides.
#[test]
fn a9_poison_behind_the_length_and_under_the_mask() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let dims = Dims { batch: 2, ..one_head(3, 8, 4, 4) };
        let lens = [2_usize, 8];
        let base = Call { storage: Storage::all(dtype), causal: true, ..Call::new(dims) };
        let data = base.data();
        let poisoned = |value: f32| {
            let mut data = data.clone();
            for (x, tail) in [(&mut data.k, lens[0]), (&mut data.v, lens[0])] {
                x[4 * tail..32].fill(value);
            }
            data
        };
        let hidden = (0..16).map(|key| key >= 8 || key < lens[0]).collect::<Vec<_>>();
        let masked = Call { mask: Some([2, 1, 1, 8]), ..base.clone() };
        for engine in engines() {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let run = |data: &HostData| {
                    let uploaded = base.upload(engine, data);
                    let options = base.options().kv_lens(lens.map(|len| len as u32));
                    let plans = two_tiled_plans(engine, &uploaded.problem(&options));
                    plans.iter().map(|plan| base.run(engine, plan, &uploaded)).collect::<Vec<_>>()
                };
                assert_same(&run(&poisoned(value)), &run(&poisoned(0.0)));
                let run = |data: HostData| {
                    let data = HostData { mask: hidden.clone(), ..data };
                    let uploaded = masked.upload(engine, &data);
                    let plans = two_tiled_plans(engine, &uploaded.problem(&masked.options()));
                    plans.iter().map(|plan| masked.run(engine, plan, &uploaded)).collect::<Vec<_>>()
                };
                assert_same(&run(poisoned(value)), &run(poisoned(0.0)));
            }
        }
    }
}

#[track_caller]
fn assert_same(one: &[Results], other: &[Results]) {
    for ((o, lse), (other_o, other_lse)) in one.iter().zip(other) {
        assert!(o.iter().all(|x| x.is_finite()), "{o:?}");
        assert_eq!((bits(o), bits(lse)), (bits(other_o), bits(other_lse)));
    }
}

/// A dot product of 115200, beyond f16: scores are f32 whatever is stored.
#[test]
fn b1_scores_beyond_f16() {
    for dtype in [DType::F16, DType::Bf16] {
        let call = Call { storage: Storage::all(dtype), ..Call::new(one_head(1, 2, 128, 1)) };
        let data = HostData { q: vec![30.0; 128], k: vec![30.0; 256], v: vec![1.0, 3.0], ..HostData::default() };
        run_call(&call, &data, |(o, lse), what| {
            assert_eq!(o, &[2.0], "{what}");
            assert_close(lse, &[115_200.0 / 128.0_f64.sqrt() + LN_2], 0.01, what);
        });
    }
}

/// The corner is that of each entry's own length.
#[test]
fn d2_a_cache_with_lengths_of_each_entry() {
    let dims = Dims { batch: 2, ..one_head(2, 6, 1, 1) };
    let v = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].repeat(2);
    for engine in engines() {
        let q = engine.upload(&[0.0f32; 4], [2, 1, 2, 1]).unwrap();
        let kv = |x: &[f32]| engine.upload(x, [2, 1, 6, 1]).unwrap();
        let out = engine.attention(&q, &kv(&[0.5; 12]), &kv(&v), &Attention::causal().kv_lens([5, 3])).unwrap();
        assert_close(&out.o.read().unwrap(), &[2.5, 3.0, 1.5, 2.0], 1e-6, &format!("{dims:?}"));
    }
}

/// Both bounds of a window are inclusive.
#[test]
fn d4_windows_of_one_and_two_keys() {
    let v = [1.0, 2.0, 3.0, 4.0, 5.0];
    let call = |window| Call { window, ..Call::new(one_head(5, 5, 1, 1)) };
    means(&call([Some(1), Some(0)]), &v, HostData::default(), &[1.0, 1.5, 2.5, 3.5, 4.5]);
    means(&call([Some(0), Some(0)]), &v, HostData::default(), &[1.0, 2.0, 3.0, 4.0, 5.0]);
    means(&call([None, Some(0)]), &v, HostData::default(), &[1.0, 1.5, 2.0, 2.5, 3.0]);
    means(&call([Some(0), None]), &v, HostData::default(), &[3.0, 3.5, 4.0, 4.5, 5.0]);
}

/// Causality and a mask are both obeyed.
#[test]
fn d7_causal_and_a_mask() {
    let call = Call { causal: true, mask: Some([1, 1, 1, 3]), ..Call::new(one_head(3, 3, 1, 1)) };
    let mask = HostData { mask: vec![false, true, true], ..HostData::default() };
    means(&call, &[1.0, 2.0, 4.0], mask, &[0.0, 2.0, 3.0]);
}

/// True is where a query may attend, as bool and as a byte that isn't 0.
#[test]
fn d8_the_polarity_of_masks() {
    let call = Call { mask: Some([1, 1, 2, 2]), ..Call::new(one_head(2, 2, 1, 1)) };
    let mask = HostData { mask: vec![true, false, true, true], ..HostData::default() };
    means(&call, &[1.0, 3.0], mask, &[1.0, 2.0]);
    for engine in engines() {
        let (q, v) =
            (engine.upload(&[0.0f32; 2], [1, 1, 2, 1]).unwrap(), engine.upload(&[1.0f32, 3.0], [1, 1, 2, 1]).unwrap());
        let mask = engine.upload_mask(&[1u8, 0, 255, 2], [1, 1, 2, 2]).unwrap();
        let inputs = Inputs { mask: Some(&mask), ..Inputs::new(&q, &q, &v) };
        let out = engine.attention_with(&inputs, &Attention::full()).unwrap();
        assert_close(&out.o.read().unwrap(), &[1.0, 2.0], 1e-6, "bytes");
    }
}

/// Groups of heads with a mask that isn't square, and a row of -inf.
#[test]
fn e4_grouped_queries_with_a_causal_bias() {
    let dims = Dims { q_heads: 8, kv_heads: 2, ..one_head(8, 16, 64, 64) };
    let call = Call { bias: Some((DType::F32, [1, 1, 8, 16])), ..Call::new(dims) };
    let mut bias: Vec<f32> =
        (0..8 * 16).map(|at| if at % 16 <= at / 16 + 8 { 0.0 } else { f32::NEG_INFINITY }).collect();
    bias[3 * 16..4 * 16].fill(f32::NEG_INFINITY);
    let data = HostData { bias, ..call.data() };
    let expected = call.reference(&data);
    assert_eq!(expected.lse[3], NONE);
    run_call(&call, &data, |results, what| {
        call.assert_matches(results, &expected, what);
        assert_eq!(results.0[3 * 64..4 * 64], [0.0; 64]);
    });
}

/// A sink is its head's, whatever the row and however many passes; alone it is the lse.
#[test]
fn e6_sinks_of_heads() {
    let dims = Dims { q_heads: 2, kv_heads: 2, ..one_head(3, 2, 1, 1) };
    let call = Call { sinks: Some(vec![0.0, LN_2 as f32]), ..Call::new(dims) };
    let third = 2.0 / 3.0;
    means(&call, &[1.0; 4], HostData::default(), &[third, third, third, 0.5, 0.5, 0.5]);

    let call = Call { mask: Some([1, 1, 1, 2]), ..call };
    let data = HostData { mask: vec![false, false], ..call.data() };
    run_call(&call, &data, |(o, lse), what| {
        assert_eq!(o, &[0.0; 6], "{what}");
        assert_close(lse, &[0.0, 0.0, 0.0, LN_2, LN_2, LN_2], 1e-6, what);
    });
}

/// The cap comes after the scale and before the mask; 0 and less is no cap.
#[test]
fn e7_the_softcap() {
    let call = Call { softcap: Some(1.0), scale: Some(1.0), ..Call::new(one_head(1, 2, 1, 1)) };
    let data = HostData { q: vec![100.0], k: vec![1.0, -1.0], v: vec![1.0, 0.0], ..HostData::default() };
    run_call(&call, &data, |(o, _), what| assert_close(o, &[0.880_797], 1e-6, what));
    let masked = Call { dims: one_head(1, 3, 1, 1), mask: Some([1, 1, 1, 3]), ..call };
    let data = HostData {
        q: vec![100.0],
        k: vec![1.0, -1.0, 1.0],
        v: vec![1.0, 0.0, 1000.0],
        mask: vec![true, true, false],
        ..HostData::default()
    };
    run_call(&masked, &data, |(o, _), what| assert_close(o, &[0.880_797], 1e-6, what));
    for softcap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let refused = Problem::new(one_head(1, 1, 1, 1), Attention::full().softcap(softcap));
        assert!(refused.unwrap_err().to_string().contains("accepted"), "{softcap}");
    }
}

/// A bias of any broadcast shape is the one written out in full; so is a mask.
#[test]
fn f2_broadcast_is_the_full_tensor() {
    let dims = Dims { batch: 2, q_heads: 3, kv_heads: 3, ..one_head(4, 5, 4, 4) };
    let full = [2, 3, 4, 5];
    for shape in [[1, 1, 1, 5], [2, 1, 1, 5], [1, 3, 1, 1], [1, 1, 4, 5], [2, 3, 4, 5]] {
        let call = Call { bias: Some((DType::F32, shape)), mask: Some(shape), ..Call::new(dims) };
        let data = call.data();
        let index = |at: usize| {
            let place = [at / 60, at / 20 % 3, at / 5 % 4, at % 5];
            (0..4).fold(0, |index, axis| index * shape[axis] + if shape[axis] == 1 { 0 } else { place[axis] })
        };
        let written_out = HostData {
            bias: (0..120).map(|at| data.bias[index(at)]).collect(),
            mask: (0..120).map(|at| data.mask[index(at)]).collect(),
            ..data.clone()
        };
        let whole = Call { bias: Some((DType::F32, full)), mask: Some(full), ..call.clone() };
        for engine in engines() {
            let run = |call: &Call, data: &HostData| {
                let uploaded = call.upload(engine, data);
                let plans = two_tiled_plans(engine, &uploaded.problem(&call.options()));
                plans.iter().map(|plan| call.run(engine, plan, &uploaded)).collect::<Vec<_>>()
            };
            for (one, other) in run(&call, &data).iter().zip(run(&whole, &written_out)) {
                assert_eq!((bits(&one.0), bits(&one.1)), (bits(&other.0), bits(&other.1)), "{shape:?}");
            }
        }
    }
}

/// Masks, lengths and boundaries of another size than the call's.
#[test]
fn f2_f3_shapes_that_do_not_fit() {
    let plain = || Problem::new(one_head(4, 5, 4, 4), Attention::full()).unwrap();
    let with = |options: Attention| Problem::new(Dims { batch: 2, ..one_head(8, 8, 4, 4) }, options);
    let packed = |q: &[u32], kv: &[u32]| with(Attention::full().packed(q, kv));
    for (refused, words) in [
        (plain().bias(DType::F32, [1, 1, 5, 4]), ["[1, 1, 5, 4]", "[1, 1, 4, 5]"]),
        (plain().mask([1, 1, 4, 8]), ["[1, 1, 4, 8]", "[1, 1, 4, 5]"]),
        (plain().mask([1, 1, 1, 4]), ["[1, 1, 1, 4]", "[1, 1, 4, 5]"]),
        (plain().mask([2, 1, 4, 5]), ["[2, 1, 4, 5]", "[1, 1, 4, 5]"]),
        (plain().bias(DType::U32, [1; 4]), ["u32", "bf16"]),
        (plain().ranges([1, 1, 5]), ["[1, 1, 5]", "[1, 1, 4]"]),
        (with(Attention::full().kv_lens([9, 1])), ["kv_lens[0] = 9", "up to 8"]),
        (with(Attention::full().q_lens([1, 9])), ["q_lens[1] = 9", "up to 8"]),
        (with(Attention::full().kv_lens([1])), ["1 batch", "accepted: 2"]),
        (with(Attention::full().alibi([1.0; 3])), ["3 ALiBi", "accepted"]),
        (with(Attention::full().alibi([f32::NAN])), ["NaN", "finite"]),
        (packed(&[0, 5, 8], &[0, 5, 4]), ["[0, 5, 4]", "never fall"]),
        (packed(&[0, 9, 8], &[0, 5, 8]), ["[0, 9, 8]", "never fall"]),
        (packed(&[0, 5, 7], &[0, 5, 8]), ["[0, 5, 7]", "end at 8"]),
        (packed(&[1, 5, 8], &[0, 5, 8]), ["[1, 5, 8]", "start at 0"]),
        (packed(&[0, 8], &[0, 5, 8]), ["[0, 8]", "3 numbers"]),
        (packed(&[], &[]), ["[]", "3 numbers"]),
        (with(Attention::full().packed([0, 1, 8], [0, 1, 8]).kv_lens([1, 1])), ["kv_lens", "packed"]),
    ] {
        let message = refused.unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word) && message.contains("accepted"), "no {word:?} in {message:?}");
        }
    }
}

/// Odd counts of two-byte elements, and of keys in a mask: uploads and results are as long as asked for.
#[test]
fn f6_odd_counts() {
    for engine in engines() {
        for dtype in [DType::F16, DType::Bf16] {
            let call = Call { storage: Storage::all(dtype), ..Call::new(one_head(3, 3, 1, 1)) };
            let data = call.data();
            let v = upload_in(dtype, engine, &data.v);
            assert_eq!((v.elems(), v.read().unwrap()), (3, data.v.clone()));
            let shape = |x: &[f32]| amid_nan_in(dtype, engine, x, &[1, 1, 3, 1]);
            let out = engine.attention(&shape(&data.q), &shape(&data.k), &shape(&data.v), &call.options()).unwrap();
            let o = out.o.read().unwrap();
            assert_eq!((out.o.dtype(), o.len()), (dtype, 3));
            assert_close(&o, &call.reference(&data).o, 0.02, "o");
        }
        let (q, v) = (
            engine.upload(&[0.0f32], [1, 1, 1, 1]).unwrap(),
            engine.upload(&[1.0f32, 2.0, 4.0, 8.0, 16.0], [1, 1, 5, 1]).unwrap(),
        );
        let mask = engine.upload_mask(&[1u8, 0, 0, 0, 1], [1, 1, 1, 5]).unwrap();
        let inputs = Inputs { mask: Some(&mask), ..Inputs::new(&q, &v, &v) };
        assert_close(
            &engine.attention_with(&inputs, &Attention::full()).unwrap().o.read().unwrap(),
            &[8.5],
            1e-5,
            "mask",
        );
    }
}

/// Empty members of a packed batch, of queries, of keys, of both; and nothing but empty ones.
#[test]
fn g3_packed_batches_with_empty_members() {
    let (cu_q, cu_kv) = ([0, 0, 1, 1, 3], [0, 0, 3, 3, 8]);
    let dims = Dims { batch: 4, q_heads: 3, kv_heads: 1, ..one_head(3, 8, 4, 4) };
    let (q, k, v) = (random(1, 1.0, 36), random(2, 1.0, 32), random(3, 1.0, 32));
    let case = reference::Case {
        batch: 4,
        q_heads: 3,
        kv_heads: 1,
        q_len: 3,
        kv_len: 8,
        head_dim: 4,
        value_dim: 4,
        q: &q,
        k: &k,
        v: &v,
        causal: true,
        ..reference::Case::default()
    };
    let expected = reference::attention_packed(&case, &cu_q, &cu_kv).unwrap();
    for engine in engines() {
        let (q, k) = (engine.upload(&q, [3, 3, 4]).unwrap(), engine.upload(&k, [8, 1, 4]).unwrap());
        let v = engine.upload(&v, [8, 1, 4]).unwrap();
        let out = engine.attention(&q, &k, &v, &Attention::causal().packed(cu_q, cu_kv)).unwrap();
        assert_eq!((out.o.shape(), out.lse.shape()), (&[3, 3, 4][..], &[3, 3][..]));
        assert_close(&out.o.read().unwrap(), &expected.o, 1e-5, &format!("{dims:?}"));
        assert_close(&out.lse.read().unwrap(), &expected.lse, 1e-5, "lse");

        let none = |heads: usize| engine.alloc(DType::F32, [0, heads, 4]).unwrap();
        let empty = Attention::causal().packed([0; 5], [0; 5]);
        let out = engine.attention(&none(3), &none(1), &none(1), &empty).unwrap();
        assert_eq!((out.o.read().unwrap(), out.lse.read().unwrap()), (vec![], vec![]));
        // No sequence at all.
        let out = engine.attention(&none(3), &none(1), &none(1), &Attention::full().packed([0], [0])).unwrap();
        assert_eq!(out.o.read().unwrap(), []);
    }
}

/// All options at once take no more bindings than every device has, and f16 works on a device without the type.
#[test]
fn i4_i5_every_option_on_the_least_device() {
    let Some(engine) = with_limits(wgpu::Limits::default()) else { return };
    assert!(!engine.facts().features.contains(wgpu::Features::SHADER_F16));
    assert_eq!(engine.facts().limits.max_storage_buffers_per_shader_stage, 8);
    let dims = Dims { batch: 2, q_heads: 2, ..one_head(9, 11, 8, 8) };
    let call = Call {
        causal: true,
        window: [Some(6), None],
        softcap: Some(2.0),
        alibi: Some(vec![0.1, 0.2]),
        score_mod: true,
        mask_mod: true,
        bias: Some((DType::F16, [2, 2, 9, 11])),
        mask: Some([2, 2, 9, 11]),
        ranges: Some([2, 2, 9]),
        sinks: Some(vec![0.5, 1.0]),
        lens: Lens::Both,
        storage: Storage::all(DType::F16),
        ..Call::new(dims)
    };
    let data = call.data();
    call.check_on(&engine, &data, &call.reference(&data));
}
