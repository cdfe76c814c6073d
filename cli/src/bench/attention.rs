//! Measuring attention: tiled and naive on the same inputs.

use core::ops::ControlFlow;

use anyhow::Result;
use tilewise::{AttentionOutput, Bindings, Engine, Error, GpuError, Inputs, Path, Plan, Problem, Tensor};

use super::check::{self, Checked, HostInputs, HostOutput};
use super::row::{Measured, Memory, MemoryWatch, Outcome, Row, Spec};
use super::{Bench, NOT_ASKED_FOR, Paths};
use crate::measure::{self, Elapsed, Stopwatch, caught};
use crate::tensors::Numbers;

/// From here on one run is enough.
const LONG_SECONDS: f64 = 10.0;

/// From here on a run is cut into short submissions: systems take a GPU from whoever keeps it for seconds. A software device
/// has no such watchdog, and loses time whenever its cores wait for the last of them.
const ONE_SUBMISSION_SECONDS: f64 = 1.0;

/// The inputs, on the device and on the host.
pub(super) struct Data<'a> {
    pub(super) spec: &'a Spec,
    pub(super) problem: Problem,
    pub(super) host: HostInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl<'a> Data<'a> {
    pub(super) fn new(engine: &Engine, spec: &'a Spec, problem: Problem) -> Result<Self> {
        let dims = problem.dims();
        let qkv = check::random(&problem);
        let upload = |data: &Numbers, heads, len, dim| data.upload(engine, &[dims.batch, heads, len, dim]);
        Ok(Self {
            spec,
            problem,
            q: upload(&qkv[0], dims.q_heads, dims.q_len, dims.head_dim)?,
            k: upload(&qkv[1], dims.kv_heads, dims.kv_len, dims.head_dim)?,
            v: upload(&qkv[2], dims.kv_heads, dims.kv_len, dims.value_dim)?,
            host: HostInputs::of(qkv),
        })
    }

    pub(super) fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.q, &self.k, &self.v)
    }

    /// With outputs for a plan.
    pub(super) fn bindings<'b>(&'b self, output: &'b AttentionOutput, workspace: Option<&'b Tensor>) -> Bindings<'b> {
        Bindings { inputs: self.inputs(), o: &output.o, lse: &output.lse, workspace }
    }
}

/// A path that ran: its result, right as far as the reference has seen, and its figures.
struct Ran {
    output: HostOutput,
    checked: Checked,
    runs: Vec<Elapsed>,
    memory: Memory,
    kernel: String,
}

pub(super) fn measure(bench: &Bench<'_>, spec: &Spec) -> Result<Row> {
    let problem = spec.problem()?;
    let dims = problem.dims();
    // What can't run is refused before gigabytes of inputs are made for it.
    let tiled_plan = match bench.paths {
        Paths::Naive => None,
        _ => Some(bench.engine.plan(&problem)?),
    };
    let naive_plan = match bench.paths {
        Paths::Tiled => Err(NOT_ASKED_FOR.to_string()),
        _ => naive_plan(bench.engine, &problem)?,
    };
    if let (None, Err(refused)) = (&tiled_plan, &naive_plan) {
        let (flops, refused) = (problem.flops(), refused.clone());
        let naive = Some(Outcome::Refused { refused });
        return Ok(Row { spec: *spec, flops, tiled: None, naive, max_abs_diff: 0.0, compared: "nothing ran".into() });
    }
    bench.progress.stage(format!("{}: making inputs", spec.lengths()));
    let data = Data::new(bench.engine, spec, problem)?;

    let tiled = tiled_plan.map(|plan| run(bench, &data, &plan, Path::Auto, None)).transpose()?;
    let naive = match naive_plan {
        Ok(plan) => naive(bench, &data, &plan, tiled.as_ref())?,
        Err(refused) => Err(refused),
    };

    let to_reference = |ran: &Ran| format!("with the f64 reference, {} rows", ran.checked.rows);
    let (max_abs_diff, compared) = match (&tiled, &naive) {
        (Some(tiled), Ok(naive)) => {
            let compared = format!("tiled with naive, all {} rows", dims.rows());
            (
                check::against_each_other(&data.problem, &data.host, &tiled.output, &naive.output, &tiled.checked)?,
                compared,
            )
        }
        (Some(ran), Err(_)) | (None, Ok(ran)) => (ran.checked.max_abs_err, to_reference(ran)),
        (None, Err(_)) => (0.0, "nothing ran".to_string()),
    };
    let flops = data.problem.flops();
    let measured = |ran: Ran| Measured::new(bench, flops, &ran.runs, ran.memory, ran.kernel, &ran.checked);
    Ok(Row {
        spec: *spec,
        flops,
        tiled: tiled.map(measured),
        naive: Some(match naive {
            Ok(ran) => Outcome::Measured(Box::new(measured(ran))),
            Err(refused) => Outcome::Refused { refused },
        }),
        max_abs_diff,
        compared,
    })
}

/// The naive plan, or why there is none: it has no such option, or the score matrix is more than the device holds.
pub(super) fn naive_plan(engine: &Engine, problem: &Problem) -> Result<Result<Plan, String>> {
    match engine.plan_by(Path::Naive, problem) {
        Ok(plan) => Ok(Ok(plan)),
        Err(Error::Unsupported { what, needed, available }) if needed == problem.score_bytes() => {
            let holder = match what.as_str() {
                what if what.contains("binding") => "one binding holds",
                what if what.contains("buffer") => "one buffer holds",
                _ => "u32 indexes",
            };
            let [scores, available] = [needed, available].map(measure::bytes);
            Ok(Err(format!("needs {scores} of scores, {holder} {available}")))
        }
        Err(Error::Invalid(reason)) => Ok(Err(reason)),
        Err(error) => Err(error.into()),
    }
}

/// The naive path, unless the device has too little memory for it.
fn naive(bench: &Bench<'_>, data: &Data<'_>, plan: &Plan, tiled: Option<&Ran>) -> Result<Result<Ran, String>> {
    match run(bench, data, plan, Path::Naive, tiled) {
        Ok(ran) => Ok(Ok(ran)),
        Err(error) => match error.downcast_ref() {
            Some(Error::Gpu(GpuError::OutOfMemory(_))) => {
                let scores = measure::bytes(data.problem.score_bytes());
                Ok(Err(format!("needs {scores} of scores, which the device couldn't allocate")))
            }
            _ => Err(error),
        },
    }
}

/// Runs a plan: once to see its memory and to check it, then for its time. `other`: a result to compare with besides.
fn run(bench: &Bench<'_>, data: &Data<'_>, plan: &Plan, path: Path, other: Option<&Ran>) -> Result<Ran> {
    let Data { spec, problem, host, .. } = data;
    let Bench { engine, progress, .. } = *bench;
    let name = if path == Path::Naive { "naive" } else { "tiled" };
    let title = format!("{}: {name} attention", spec.lengths());

    engine.warm_up(plan)?;
    let watch = MemoryWatch::start(bench)?;
    let output = engine.alloc_output(plan)?;
    let workspace = engine.alloc_workspace(plan)?;
    let bindings = data.bindings(&output, workspace.as_ref());

    progress.stage(&title);
    let first = run_in_parts(bench, plan, &bindings)?;
    let memory = watch.stop(output.o.raw_buffer().size());

    progress.stage(format!("{title}, checking"));
    let result = HostOutput::read(&output)?;
    let checked = check::against_reference(spec, problem, host, &result)?;
    if let Some(other) = other {
        check::against_each_other(problem, host, &other.output, &result, &checked)?;
    }

    let one_submission = if bench.software { LONG_SECONDS } else { ONE_SUBMISSION_SECONDS };
    let runs = repeat(bench, &title, first, || {
        if first.seconds < one_submission {
            run_at_once(engine, bench.software, |encoder| plan.record(encoder, &bindings))
        } else {
            run_in_parts(bench, plan, &bindings)
        }
    })?;
    Ok(Ran { output: result, checked, runs, memory, kernel: plan.kernels().join(" + ") })
}

/// Runs it as often as was asked for, or for about two seconds: at least 3 times, at most 20. `first`, which came before, is a run of its own
/// where it took long.
pub(super) fn repeat(
    bench: &Bench<'_>,
    title: &str,
    first: Elapsed,
    mut run: impl FnMut() -> Result<Elapsed>,
) -> Result<Vec<Elapsed>> {
    if bench.reps.is_none() && first.seconds > LONG_SECONDS {
        return Ok(vec![first]);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let enough = bench.reps.unwrap_or((2.0 / first.seconds.max(1e-6)).clamp(3.0, 20.0) as usize);
    (1..=enough)
        .map(|n| {
            bench.progress.stage(format!("{title}, run {n} of {enough}"));
            let elapsed = run()?;
            bench.progress.done(n as f64 / enough as f64);
            Ok(elapsed)
        })
        .collect()
}

/// As one submission, from recording to completion.
pub(super) fn run_at_once(
    engine: &Engine,
    software: bool,
    record: impl FnOnce(&mut wgpu::CommandEncoder) -> tilewise::Result<()>,
) -> Result<Elapsed> {
    let device = engine.device();
    let watch = Stopwatch::start(software);
    let mut encoder = caught(device, || device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default()))?;
    record(&mut encoder)?;
    caught(device, || engine.queue().submit([encoder.finish()]))?;
    engine.wait()?;
    Ok(watch.stop())
}

/// In submissions of a fraction of a second, with the progress bar moving.
fn run_in_parts(bench: &Bench<'_>, plan: &Plan, bindings: &Bindings<'_>) -> Result<Elapsed> {
    let watch = Stopwatch::start(bench.software);
    bench.engine.run(plan, bindings, |part| {
        bench.progress.done(part);
        ControlFlow::Continue(())
    })?;
    Ok(watch.stop())
}
