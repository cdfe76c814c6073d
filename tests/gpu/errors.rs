//! A request that has no meaning, or that the device can't serve, is an error that names what was received and what is accepted. Nothing
//! is allocated or dispatched for it, and the engine is as usable afterwards.

use tilewise::{
    Attention, AttentionOutput, Bindings, DType, Dims, Engine, Error, Inputs, LimitsChoice, Path, Plan, Problem,
    ScoreMod, Tensor, wgpu,
};

use super::support::{Setup, bits, engines, one_head, open, random, with_limits};

/// Fails unless the error is the caller's and its message has all the words.
#[track_caller]
fn assert_invalid<T>(result: tilewise::Result<T>, words: &[&str]) {
    match result.map(|_| ()) {
        Err(Error::Invalid(message)) => {
            for word in words {
                assert!(message.contains(word), "no {word:?} in {message:?}");
            }
            assert!(message.contains("accepted"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Fails unless the error is the device's, with these figures.
#[track_caller]
fn assert_unsupported<T>(result: tilewise::Result<T>, word: &str, figures: (u64, u64)) {
    match result.map(|_| ()) {
        Err(Error::Unsupported { what, needed, available }) => {
            assert!(what.contains(word), "no {word:?} in {what:?}");
            assert_eq!((needed, available), figures, "{what}");
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_usable(engine: &Engine) {
    let setup = Setup::new(one_head(3, 5, 4, 4), None);
    let data = setup.data();
    setup.check_on(engine, &data, &setup.reference(&data));
}

fn attention(engine: &Engine, shapes: [&[usize]; 3], options: &Attention) -> tilewise::Result<AttentionOutput> {
    let [q, k, v] = shapes.map(|shape| engine.alloc(DType::F32, shape).unwrap());
    engine.attention(&q, &k, &v, options)
}

#[test]
fn shapes_that_do_not_fit_together() {
    let full = Attention::full();
    for engine in engines() {
        let refused = |q: &[usize], k: &[usize], v: &[usize], words: &[&str]| {
            assert_invalid(attention(engine, [q, k, v], &full), words)
        };
        refused(&[1, 7, 4, 8], &[1, 3, 4, 8], &[1, 3, 4, 8], &["q_heads = 7", "kv_heads = 3"]);
        refused(&[1, 2, 4, 8], &[1, 0, 4, 8], &[1, 0, 4, 8], &["kv_heads = 0"]);
        refused(&[1, 0, 4, 8], &[1, 1, 4, 8], &[1, 1, 4, 8], &["q_heads = 0"]);
        refused(&[2, 1, 4, 8], &[1, 1, 4, 8], &[1, 1, 4, 8], &["[2, 1, 4, 8]", "[1, 1, 4, 8]"]);
        refused(&[1, 1, 4, 8], &[1, 1, 4, 8], &[2, 1, 4, 8], &["[2, 1, 4, 8]"]);
        refused(&[1, 2, 4, 8], &[1, 2, 4, 8], &[1, 1, 4, 8], &["[1, 1, 4, 8]"]);
        refused(&[1, 1, 4, 8], &[1, 1, 5, 8], &[1, 1, 4, 8], &["[1, 1, 5, 8]"]);
        refused(&[1, 1, 4, 8], &[1, 1, 4, 9], &[1, 1, 4, 8], &["[1, 1, 4, 9]"]);
        refused(&[1, 4, 8], &[1, 1, 4, 8], &[1, 1, 4, 8], &["[1, 4, 8]", "four axes"]);
        refused(&[1, 1, 4, 0], &[1, 1, 4, 0], &[1, 1, 4, 8], &["head_dim = 0"]);
        refused(&[1, 1, 4, 8], &[1, 1, 4, 8], &[1, 1, 4, 0], &["value_dim = 0"]);
        assert_usable(engine);
    }
}

#[test]
fn scales_that_are_no_numbers() {
    let shape: &[usize] = &[1, 1, 2, 2];
    for engine in engines() {
        for (scale, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
            let options = Attention::full().softmax_scale(scale);
            assert_invalid(attention(engine, [shape; 3], &options), &["softmax_scale", text]);
        }
        assert_usable(engine);
    }
}

/// What a recorded plan may be given: (problem, tensors of it).
fn bound(engine: &Engine, path: Path) -> (Plan, [Tensor; 5], Option<Tensor>) {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(3, 5, 8, 6) };
    let plan = engine.plan_by(path, &Problem::new(dims, Attention::full()).unwrap()).unwrap();
    let shapes: [&[usize]; 5] = [&[2, 4, 3, 8], &[2, 2, 5, 8], &[2, 2, 5, 6], &[2, 4, 3, 6], &[2, 4, 3]];
    let workspace = engine.alloc_workspace(&plan).unwrap();
    (plan, shapes.map(|shape| engine.alloc(DType::F32, shape).unwrap()), workspace)
}

fn record(engine: &Engine, plan: &Plan, tensors: &[Tensor; 5], workspace: Option<&Tensor>) -> tilewise::Result<()> {
    let [q, k, v, o, lse] = tensors;
    let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    plan.record(&mut encoder, &Bindings { inputs: Inputs::new(q, k, v), o, lse, workspace })
}

#[test]
fn tensors_that_are_not_the_plans() {
    for engine in engines() {
        for path in [Path::Auto, Path::Naive] {
            let (plan, tensors, workspace) = bound(engine, path);
            record(engine, &plan, &tensors, workspace.as_ref()).unwrap();
            for (at, name) in ["q", "k", "v", "o", "lse"].into_iter().enumerate() {
                let mut other = tensors.clone();
                other[at] = engine.alloc(DType::F32, [2, 4, 3, 7]).unwrap();
                let shape = format!("{:?}", tensors[at].shape());
                let words = [&format!("{name} of f32 and shape [2, 4, 3, 7]"), shape.as_str()];
                assert_invalid(record(engine, &plan, &other, workspace.as_ref()), &words);
            }
            assert_usable(engine);
        }
    }
}

/// Outputs over an input, over each other, or in the scratch memory.
#[test]
fn outputs_where_other_tensors_lie() {
    for engine in engines() {
        let beside = |tensor: &Tensor, at: usize, shape: &[usize]| {
            engine.borrow(tensor.raw_buffer().clone(), DType::F32, at, shape).unwrap()
        };
        let shared = engine.alloc(DType::F32, [400]).unwrap();
        for path in [Path::Auto, Path::Naive] {
            let (plan, tensors, workspace) = bound(engine, path);
            let refused = |case: &[Tensor; 5], workspace: Option<&Tensor>, word: &str| {
                assert_invalid(record(engine, &plan, case, workspace), &[word]);
            };
            // q is as large as o is: an output over the whole of it, or over its end.
            let mut case = tensors.clone();
            case[3] = beside(&tensors[0], 0, &[2, 4, 3, 6]);
            refused(&case, workspace.as_ref(), "o overlaps q");
            case[3] = tensors[3].clone();
            case[4] = beside(&tensors[0], 100, &[2, 4, 3]);
            refused(&case, workspace.as_ref(), "lse overlaps q");
            case[3] = beside(&shared, 0, &[2, 4, 3, 6]);
            case[4] = beside(&shared, 143, &[2, 4, 3]);
            refused(&case, workspace.as_ref(), "lse overlaps o");
            refused(&tensors, Some(&tensors[3]), "workspace overlaps o");
        }
        // Naive attention binds inputs to be read alone.
        let (plan, mut case, workspace) = bound(engine, Path::Naive);
        case[2] = beside(&shared, 0, &[2, 2, 5, 6]);
        case[3] = beside(&shared, 200, &[2, 4, 3, 6]);
        assert_invalid(record(engine, &plan, &case, workspace.as_ref()), &["in the buffer of an input, naive"]);
        assert_usable(engine);
    }
}

/// One buffer for everything, as apps with an arena of their own have: what matters is that nothing overlaps.
#[test]
fn outputs_in_the_buffer_of_the_inputs() {
    for engine in engines() {
        let (plan, tensors, _) = bound(engine, Path::Auto);
        let lens = tensors.each_ref().map(Tensor::elems);
        let starts = [0, 1, 2, 3, 4].map(|at| 3 + lens[..at].iter().sum::<usize>());
        let contents = random(5, 1.0, starts[4] + lens[4] + 9);
        let arena = engine.upload(&contents, [contents.len()]).unwrap();
        let place =
            |at: usize| engine.borrow(arena.raw_buffer().clone(), DType::F32, starts[at], tensors[at].shape()).unwrap();
        let within = [0, 1, 2, 3, 4].map(place);
        let apart = [0, 1, 2]
            .map(|at| engine.upload(&contents[starts[at]..starts[at] + lens[at]], tensors[at].shape()).unwrap());
        let expected = engine.attention(&apart[0], &apart[1], &apart[2], &Attention::full()).unwrap();

        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let [q, k, v, o, lse] = &within;
        plan.record(&mut encoder, &Bindings { inputs: Inputs::new(q, k, v), o, lse, workspace: None }).unwrap();
        engine.queue().submit([encoder.finish()]);
        assert_eq!(bits(&o.read().unwrap()), bits(&expected.o.read().unwrap()));
        assert_eq!(bits(&lse.read().unwrap()), bits(&expected.lse.read().unwrap()));
        // All else is as it was.
        let after = arena.read().unwrap();
        assert_eq!(bits(&after[..starts[3]]), bits(&contents[..starts[3]]));
        assert_eq!(bits(&after[starts[4] + lens[4]..]), bits(&contents[starts[4] + lens[4]..]));
    }
}

#[test]
fn workspace_that_is_missing_or_small() {
    for engine in engines() {
        let (plan, tensors, workspace) = bound(engine, Path::Naive);
        assert_invalid(record(engine, &plan, &tensors, None), &["workspace", "480"]);
        let small = workspace.unwrap().slice(0, 0..119).unwrap();
        assert_invalid(record(engine, &plan, &tensors, Some(&small)), &["119", "120"]);
        assert_usable(engine);
    }
}

/// A workspace anywhere in a buffer of the caller's: its tables lie in it and nowhere else.
#[test]
fn workspaces_within_a_buffer() {
    for engine in engines() {
        let x = engine.upload(&random(7, 1.0, 60), [2, 2, 5, 3]).unwrap();
        let sinks = engine.upload(&[1.0f32, 0.5], [2]).unwrap();
        let inputs = Inputs { sinks: Some(&sinks), ..Inputs::new(&x, &x, &x) };
        let options = Attention::causal().alibi([0.5, 0.25]).kv_lens([4, 5]);
        let expected = engine.attention_with(&inputs, &options).unwrap();
        let plan = engine.plan(&inputs.problem(&options).unwrap()).unwrap();
        let words = plan.workspace_bytes() as usize / 4;
        for start in [0, 1, 64, 100] {
            let whole = engine.upload(&vec![5.0f32; 300], [300]).unwrap();
            let workspace = whole.slice(0, start..start + words).unwrap();
            let out = engine.alloc_output(&plan).unwrap();
            let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let bindings = Bindings { inputs, o: &out.o, lse: &out.lse, workspace: Some(&workspace) };
            plan.record(&mut encoder, &bindings).unwrap();
            engine.queue().submit([encoder.finish()]);
            assert_eq!(bits(&out.o.read().unwrap()), bits(&expected.o.read().unwrap()), "{start}");
            let after = whole.read().unwrap();
            assert!(after[..start].iter().chain(&after[start + words..]).all(|&x| x == 5.0), "{start}");
        }
        let buffer = engine.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 1024,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let fixed = engine.borrow(buffer, DType::F32, 0, [256]).unwrap();
        let out = engine.alloc_output(&plan).unwrap();
        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let bindings = Bindings { inputs, o: &out.o, lse: &out.lse, workspace: Some(&fixed) };
        assert_invalid(plan.record(&mut encoder, &bindings), &["workspace", "COPY_DST"]);
        assert_usable(engine);
    }
}

/// An empty table is none; a table that nobody reads is a mistake.
#[test]
fn mod_data_that_is_empty_or_unread() {
    for engine in engines() {
        let x = engine.upload(&[0.5f32; 12], [1, 1, 3, 4]).unwrap();
        let (none, some) = (engine.upload::<f32>(&[], [0]).unwrap(), engine.upload(&[1.0f32], [1]).unwrap());
        let score_mod =
            "fn score_mod(s: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 { return s + data_f32(0u); }";
        let options = Attention::full().score_mod(ScoreMod::new(score_mod).unwrap());
        let inputs = Inputs { mod_data: Some(&none), ..Inputs::new(&x, &x, &x) };
        let plain = engine.attention(&x, &x, &x, &Attention::full()).unwrap().lse.read().unwrap();
        assert_eq!(engine.attention_with(&inputs, &options).unwrap().lse.read().unwrap(), plain);
        for path in [Path::Auto, Path::Naive] {
            let inputs = Inputs { mod_data: Some(&some), ..inputs };
            assert_invalid(engine.attention_by(path, &inputs, &Attention::full()), &["mod_data without a mod"]);
        }
        assert_usable(engine);
    }
}

#[test]
fn tensors_of_another_engine() {
    let Some(other) = open(LimitsChoice::Default) else { return };
    for engine in engines() {
        for at in 0..5 {
            let (plan, mut tensors, _) = bound(engine, Path::Auto);
            tensors[at] = other.alloc(DType::F32, tensors[at].shape()).unwrap();
            assert_invalid(record(engine, &plan, &tensors, None), &["different engines"]);
        }
        assert_usable(engine);
    }
    assert_usable(&other);
}

#[test]
fn data_and_views_that_do_not_fit() {
    for engine in engines() {
        assert_invalid(engine.upload(&[0.0f32; 5], [2, 3]), &["5 elements", "[2, 3]", "6"]);
        assert_invalid(engine.upload(&[0.0f32; 5], [usize::MAX, 3]), &["18446744073709551615"]);
        let x = engine.upload(&[0.0f32; 24], [2, 3, 4]).unwrap();
        assert_invalid(x.permute(&[0, 1]), &["[0, 1]"]);
        assert_invalid(x.permute(&[0, 1, 1]), &["[0, 1, 1]"]);
        assert_invalid(x.slice(3, 0..1), &["axis 3"]);
        assert_invalid(x.slice(1, 2..4), &["2..4", "0..3"]);
        assert_invalid(x.unflatten(1, 2), &["size 3", "2 parts"]);
        assert_invalid(x.unflatten(1, 0), &["0 parts"]);
        assert_invalid(x.unflatten(0, 2).unwrap().heads(2), &["[2, 1, 3, 4]"]);
        let buffer = || x.raw_buffer().clone();
        assert_invalid(engine.borrow(buffer(), DType::F32, 1, [24]), &["[24]", "element 1", "24 f32"]);
        assert_invalid(engine.borrow(buffer(), DType::F32, usize::MAX, [24]), &["[24]"]);
        let descriptor = wgpu::BufferDescriptor {
            label: None,
            size: 64,
            usage: wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        };
        assert_invalid(
            engine.borrow(engine.device().create_buffer(&descriptor), DType::F32, 0, [4]),
            &["COPY_DST", "STORAGE"],
        );
        assert_usable(engine);
    }
}

#[test]
fn huge_sizes_beside_a_zero() {
    for engine in engines() {
        for shape in [[0, usize::MAX, usize::MAX], [0, 2, usize::MAX], [usize::MAX, 2, 0]] {
            assert_invalid(engine.upload::<f32>(&[], shape), &["elements"]);
        }
        assert_usable(engine);
    }
}

#[test]
fn products_and_rows_that_do_not_fit() {
    for engine in engines() {
        let t = |shape: &[usize]| engine.alloc(DType::F32, shape).unwrap();
        assert_invalid(engine.matmul(&t(&[2, 3]), &t(&[4, 5])), &["[2, 3]", "[4, 5]"]);
        assert_invalid(engine.matmul_transposed(&t(&[2, 3]), &t(&[3, 4])), &["[2, 3]", "[3, 4]"]);
        assert_invalid(engine.matmul(&t(&[2, 2, 3]), &t(&[3, 5])), &["[2, 2, 3]", "[3, 5]"]);
        assert_invalid(engine.matmul(&t(&[2, 2, 3]), &t(&[3, 3, 5])), &["[2, 2, 3]", "[3, 3, 5]"]);
        assert_invalid(engine.matmul(&t(&[3]), &t(&[3, 5])), &["[3]"]);
        assert_invalid(engine.matmul(&t(&[1, 1, 1, 2, 3]), &t(&[1, 1, 1, 3, 2])), &["two to four axes"]);
        assert_invalid(engine.softmax_rows(&t(&[])), &["axes"]);
        assert_invalid(engine.softmax_rows(&t(&[4, 5]).permute(&[1, 0]).unwrap()), &["strides"]);
        assert_usable(engine);
    }
}

#[test]
fn values_wider_than_any_kernel() {
    for engine in engines() {
        let (q, v) =
            (engine.alloc(DType::F32, [1, 1, 2, 4]).unwrap(), engine.alloc(DType::F32, [1, 1, 2, 513]).unwrap());
        assert_unsupported(engine.attention(&q, &q, &v, &Attention::full()), "value_dim", (513, 512));
        // Naive has no such limit.
        engine.attention_by(Path::Naive, &Inputs::new(&q, &q, &v), &Attention::full()).unwrap();
        assert_usable(engine);
    }
}

/// On a device of its own, whose count nobody else changes.
#[test]
fn sizes_over_the_devices_limits() {
    let Some(engine) = open(LimitsChoice::Default) else { return };
    // One more row than 128 MiB hold: planned, never allocated.
    let dims = Dims { q_heads: 33, kv_heads: 33, ..Dims::square(1, 1, 8192, 128) };
    let problem = Problem::new(dims, Attention::causal()).unwrap();
    assert_unsupported(engine.plan(&problem), "one storage binding (q)", (138_412_032, 134_217_728));
    // The scores of a naive run of 8192 tokens.
    let problem = Problem::new(Dims::square(1, 1, 8192, 16), Attention::full()).unwrap();
    let naive = engine.plan_by(Path::Naive, &problem);
    assert_unsupported(naive, "naive scores", (268_435_456, 134_217_728));
    assert!(engine.plan(&problem).is_ok(), "tiled needs no scores");
    // A buffer that is larger than any may be.
    let elems = (268_435_456 / 4) + 4;
    assert_unsupported(engine.alloc(DType::F32, [elems]), "one buffer", (268_435_472, 268_435_456));
    assert_eq!((engine.memory().live_bytes(), engine.memory().peak_bytes()), (0, 0));
    assert_usable(&engine);
}

/// A view that fits a buffer but no binding, on a device with little of either.
#[test]
fn views_over_one_binding() {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 1 << 20, ..wgpu::Limits::default() };
    let Some(engine) = with_limits(limits) else { return };
    let q = engine.alloc(DType::F32, [1, 1, 1, 64]).unwrap();
    let k = engine.alloc(DType::F32, [1, 1, 8192, 64]).unwrap();
    assert_unsupported(engine.attention(&q, &k, &k, &Attention::full()), "binding (k)", (2 << 20, 1 << 20));
    // Each batch entry is far from the next: a small tensor that spans much.
    let wide = engine.alloc(DType::F32, [2, 8192, 64]).unwrap().slice(1, 0..4).unwrap().heads(1).unwrap();
    let error = engine.attention(&wide, &wide, &wide, &Attention::full());
    assert!(matches!(error, Err(Error::Unsupported { available: 1_048_576, .. })), "{error:?}");
    // Half of it fits.
    let half = k.slice(2, 0..4096).unwrap();
    engine.attention(&q, &half, &half, &Attention::full()).unwrap().o.read().unwrap();
    assert_usable(&engine);
}
