//! Measuring gradients.

use anyhow::{Result, ensure};
use tilewise::reference::{self, Comparison, GradientTolerance, Gradients as Expected, compare};
use tilewise::{AttentionOutput, BackwardBindings, BackwardInputs, Dims, Gradients, Problem, Storage};

use super::Bench;
use super::attention::{Data, repeat, run_at_once};
use super::check::{self, Checked};
use super::row::{Measured, MemoryWatch, Row, Spec};
use crate::measure;
use crate::tensors::{Numbers, precision};

/// Why there is nothing to measure on the naive path.
pub(super) const NO_NAIVE: &str = "gradients have no naive path";

/// Up to here all elements are compared with the f64 reference, which takes some seconds for so many FLOPs.
const REFERENCE_FLOPS: u64 = 1 << 34;

/// The host's copy of gradients.
struct HostGradients {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

pub(super) fn measure(bench: &Bench<'_>, spec: &Spec) -> Result<Row> {
    let Bench { engine, progress, .. } = *bench;
    let problem = spec.problem()?;
    let plan = engine.plan_backward(&problem)?;
    let title = format!("{}: gradients", spec.lengths());
    progress.stage(format!("{title}, making inputs"));
    let data = Data::new(engine, spec, problem)?;
    let inputs = data.inputs();
    let AttentionOutput { o, lse } =
        engine.attention_with(&inputs, &spec.options.attention().output_dtype(data.problem.stored().o))?;
    let grad_o_host = Numbers::F32(measure::normal(4, o.elems())).stored(o.dtype());
    let grad_o = grad_o_host.upload(engine, o.shape())?;
    let grad_o_host = grad_o_host.into_f32();
    let given = BackwardInputs { inputs, o: &o, lse: &lse, grad_o: &grad_o, grad_lse: None };

    progress.stage(&title);
    engine.warm_up_backward(&plan)?;
    let watch = MemoryWatch::start(bench)?;
    let gradients = engine.alloc_gradients(&plan)?;
    let workspace = engine.alloc_backward_workspace(&plan)?;
    let bindings = BackwardBindings { inputs: given, gradients: &gradients, workspace: workspace.as_ref() };
    let run = || run_at_once(engine, bench.software, |encoder| plan.record(encoder, &bindings));
    let first = run()?;
    let results = [&gradients.dq, &gradients.dk, &gradients.dv, &o, &lse];
    let memory = watch.stop(results.into_iter().map(|tensor| tensor.raw_buffer().size()).sum());

    progress.stage(format!("{title}, checking"));
    let got = read(&gradients)?;
    let (checked, compared) = check(spec, &data, &grad_o_host, &got, plan.flops())?;

    let runs = repeat(bench, &title, first, run)?;
    let kernels = plan.kernels().join(" + ");
    Ok(Row {
        spec: *spec,
        flops: plan.flops(),
        max_abs_diff: checked.max_abs_err,
        compared,
        tiled: Some(Measured::new(bench, plan.flops(), &runs, memory, kernels, &checked)),
        naive: None,
    })
}

fn read(Gradients { dq, dk, dv, .. }: &Gradients) -> tilewise::Result<HostGradients> {
    Ok(HostGradients { dq: dq.read()?, dk: dk.read()?, dv: dv.read()? })
}

/// Compares with the f64 reference; what is too much for that by what must hold between gradients.
fn check(spec: &Spec, data: &Data<'_>, grad_o: &[f32], got: &HostGradients, flops: u64) -> Result<(Checked, String)> {
    let problem = &data.problem;
    if flops > REFERENCE_FLOPS {
        let worst = check_sums(problem, &data.host, grad_o, got)?;
        return Ok((Checked::product(&worst, 0), "sums over the gradients with what they must be".to_string()));
    }
    let expected = reference::attention_backward(&check::case(spec, problem, &data.host), grad_o, None)?;
    let Expected { dq, dk, dv, tolerance, .. } = &expected;
    let Storage { q, k, v, .. } = problem.stored();
    let mut worst: Option<Comparison> = None;
    for (name, got, expected, dtype, tolerance_of) in [
        ("dq", &got.dq, dq, q, GradientTolerance::dq as fn(&GradientTolerance, _) -> f64),
        ("dk", &got.dk, dk, k, GradientTolerance::dk),
        ("dv", &got.dv, dv, v, GradientTolerance::dv),
    ] {
        let compared = compare(got, expected, tolerance_of(tolerance, precision(dtype)));
        ensure!(compared.passed(), "{name} is not the f64 reference's: {compared}");
        worst = worse(worst, compared);
    }
    let rows = problem.dims().rows();
    let worst = worst.ok_or_else(|| anyhow::anyhow!("no gradient"))?;
    Ok((Checked::product(&worst, rows), "with the f64 reference, all elements of dq, dk and dv".to_string()))
}

fn worse(worst: Option<Comparison>, compared: Comparison) -> Option<Comparison> {
    worst.into_iter().chain([compared]).max_by(|a, b| a.max_abs_err.total_cmp(&b.max_abs_err))
}

/// The weights of a row sum to 1, so that the rows of dv sum to those of the gradient of o; and a score's gradient meets q and k alike:
/// the sum of dq q is that of dk k.
fn check_sums(
    problem: &Problem,
    inputs: &check::HostInputs,
    grad_o: &[f32],
    got: &HostGradients,
) -> Result<Comparison> {
    let Dims { value_dim, kv_heads, kv_len, q_heads, q_len, .. } = problem.dims();
    let unit = precision(problem.stored().v).unit_roundoff();
    let mut worst: Option<Comparison> = None;
    // Of each key/value head in each batch entry.
    let of_group = grad_o.chunks(q_heads / kv_heads * q_len * value_dim);
    for (dv, grad_o) in got.dv.chunks(kv_len * value_dim).zip(of_group) {
        let sums = |rows: &[f32]| {
            let mut sums = vec![[0.0; 2]; value_dim];
            for row in rows.chunks(value_dim) {
                sums.iter_mut()
                    .zip(row)
                    .for_each(|(sum, &x)| *sum = [sum[0] + f64::from(x), sum[1] + f64::from(x.abs())]);
            }
            sums
        };
        let (got, expected) = (sums(dv), sums(grad_o));
        let magnitude = expected.iter().map(|sum| sum[1]).fold(0.0, f64::max);
        #[expect(clippy::cast_possible_truncation, reason = "compared far more coarsely than f32")]
        let got: Vec<f32> = got.iter().map(|sum| sum[0] as f32).collect();
        let expected: Vec<f64> = expected.iter().map(|sum| sum[0]).collect();
        let compared = compare(&got, &expected, (unit + 1e-5) * magnitude);
        ensure!(compared.passed(), "the sums of dv aren't those of the gradient of o: {compared}");
        worst = worse(worst, compared);
    }
    let dot = |a: &[f32], b: &[f32]| {
        let terms = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
        terms.fold([0.0, 0.0], |[sum, size], term| [sum + term, size + term.abs()])
    };
    let ([of_q, size_q], [of_k, size_k]) = (dot(&got.dq, &inputs.q), dot(&got.dk, &inputs.k));
    let tolerance = (precision(problem.stored().q).unit_roundoff() + 1e-5) * (size_q + size_k);
    ensure!(
        (of_q - of_k).abs() <= tolerance,
        "dq meets q with {of_q}, dk meets k with {of_k}, {tolerance} apart at most"
    );
    worst.ok_or_else(|| anyhow::anyhow!("nothing to compare"))
}
