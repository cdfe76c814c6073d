//! What went wrong for others, by the number of its report in the collection of field cases: the smallest input that shows the fault.
//! Those that are a module's whole contract are there: A1's rows, C1, I3, J2, K2, K4, K5, L5.

use core::f64::consts::LN_2;

use tilewise::{Align, Attention, DType, Dims, Error, Inputs, LimitsChoice, Path, Problem, wgpu};

use super::support::{
    Data, MASKS, Results, Setup, Tensors, amid_nan, assert_close, bits, engines, one_head, open, plans, random,
    with_limits,
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
