//! The same input gives the same bits: on every run, however the work is cut into submissions, and next to other work.

use core::ops::ControlFlow;

use tilewise::{Align, Bindings, Dims, Engine, Error, Inputs, Path, wgpu};

use super::support::{Guarded, Results, Setup, Tensors, bits, engines, one_head, plans};

fn to_bits(results: &Results) -> (Vec<u32>, Vec<u32>) {
    (bits(&results.0), bits(&results.1))
}

/// Many tiles and blocks, so that a missing barrier has its chances.
#[test]
fn a_hundred_runs() {
    let setup = Setup::new(Dims { q_heads: 4, kv_heads: 2, ..one_head(70, 260, 20, 20) }, Some(Align::BottomRight));
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &setup.data());
        for path in [Path::Auto, Path::Naive] {
            let plan = engine.plan_by(path, &setup.problem()).unwrap();
            let first = to_bits(&inputs.run(engine, &plan));
            for run in 1..100 {
                assert_eq!(to_bits(&inputs.run(engine, &plan)), first, "run {run} of {:?}", plan.kernels());
            }
        }
    }
}

#[test]
fn ten_runs_of_every_plan() {
    let setup = Setup::new(Dims { q_heads: 2, ..one_head(129, 257, 20, 20) }, None);
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &setup.data());
        for plan in plans(engine, &setup.problem()) {
            let first = to_bits(&inputs.run(engine, &plan));
            for run in 1..10 {
                assert_eq!(to_bits(&inputs.run(engine, &plan)), first, "run {run} of {:?}", plan.kernels());
            }
        }
    }
}

/// Runs a plan in short submissions and gives each report of progress.
fn run(
    engine: &Engine,
    inputs: &Tensors,
    setup: &Setup,
    path: Path,
    stop_after: usize,
) -> (Results, Vec<f64>, tilewise::Result<()>) {
    let Tensors { q, k, v } = inputs;
    let plan = engine.plan_by(path, &setup.problem()).unwrap();
    let Dims { batch, q_heads, q_len, value_dim, .. } = setup.dims;
    let (o, lse) =
        (Guarded::new(engine, &[batch, q_heads, q_len, value_dim]), Guarded::new(engine, &[batch, q_heads, q_len]));
    let workspace = engine.alloc_workspace(&plan).unwrap();
    let bindings =
        Bindings { inputs: Inputs::new(q, k, v), o: &o.tensor, lse: &lse.tensor, workspace: workspace.as_ref() };
    let mut reports = Vec::new();
    let outcome = engine.run(&plan, &bindings, |done| {
        reports.push(done);
        if reports.len() == stop_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    ((o.read(), lse.read()), reports, outcome)
}

fn long_setup() -> Setup {
    Setup::new(Dims { batch: 2, q_heads: 24, kv_heads: 3, ..one_head(330, 300, 20, 20) }, Some(Align::BottomRight))
}

#[test]
fn in_parts() {
    let setup = long_setup();
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &setup.data());
        for path in [Path::Auto, Path::Naive] {
            let whole =
                engine.attention_by(path, &Inputs::new(&inputs.q, &inputs.k, &inputs.v), &setup.options()).unwrap();
            let whole = (whole.o.read().unwrap(), whole.lse.read().unwrap());
            let (parts, reports, outcome) = run(engine, &inputs, &setup, path, usize::MAX);
            assert_eq!(outcome, Ok(()));
            assert_eq!(to_bits(&parts), to_bits(&whole), "{path:?}");
            assert!(reports.len() > 3, "{reports:?}");
            assert!(reports.is_sorted() && reports.last() == Some(&1.0) && reports[0] > 0.0, "{reports:?}");
        }
    }
}

#[test]
fn cancelled_and_again() {
    let setup = long_setup();
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &setup.data());
        for path in [Path::Auto, Path::Naive] {
            let (part, reports, outcome) = run(engine, &inputs, &setup, path, 2);
            assert_eq!((outcome, reports.len()), (Err(Error::Cancelled), 2));
            assert!(part.0.iter().any(|o| o.is_nan()), "{path:?}: everything was done all the same");
            let (whole, ..) = run(engine, &inputs, &setup, path, usize::MAX);
            assert!(whole.0.iter().chain(&whole.1).all(|x| !x.is_nan()), "{path:?}");
        }
    }
}

/// Several threads on one engine, each with a problem of its own.
#[test]
fn from_several_threads() {
    for engine in engines() {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                scope.spawn(move || {
                    let setup = Setup { seed, ..Setup::new(one_head(40 + seed as usize, 70, 20, 20), None) };
                    let data = setup.data();
                    let expected = setup.reference(&data);
                    (0..5).for_each(|_| setup.check_on(engine, &data, &expected));
                });
            }
        });
    }
}

/// Plans recorded one after the other into one encoder, the second on the first's output.
#[test]
fn recorded_into_one_encoder() {
    let setup = Setup::new(Dims::square(1, 2, 33, 20), None);
    for engine in engines() {
        let Tensors { q, k, v } = &Tensors::amid_nan(engine, &setup.dims, &setup.data());
        let plan = engine.plan(&setup.problem()).unwrap();
        let [first, second] = [(); 2].map(|()| engine.alloc_output(&plan).unwrap());
        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let bindings = Bindings { inputs: Inputs::new(q, k, v), o: &first.o, lse: &first.lse, workspace: None };
        plan.record(&mut encoder, &bindings).unwrap();
        plan.record(
            &mut encoder,
            &Bindings { inputs: Inputs::new(&first.o, k, v), o: &second.o, lse: &second.lse, ..bindings },
        )
        .unwrap();
        engine.queue().submit([encoder.finish()]);
        let one = engine.attention(q, k, v, &setup.options()).unwrap();
        let two = engine.attention(&one.o, k, v, &setup.options()).unwrap();
        assert_eq!(bits(&second.o.read().unwrap()), bits(&two.o.read().unwrap()));
    }
}
