//! Every kernel variant that this device can get, against the CPU reference.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Serialize;
use tilewise::reference::{self, Comparison, Precision, Tolerance, compare};
use tilewise::{Align, Attention, Dims, Engine};

use super::options::{GROUPS, Group, NO_OPTIONS, Ran, stem};
use crate::args::{Common, Dtype};
use crate::measure::{Progress, normal};
use crate::output;

/// Widths of keys and values: an odd few, those that models have, and the widest.
const WIDTHS: [(usize, usize); 10] =
    [(1, 1), (3, 3), (40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (512, 512), (64, 20), (24, 96)];

/// Those of them that gradients are checked at without options.
const GRADIENT_WIDTHS: [(usize, usize); 3] = [(3, 3), (128, 128), (64, 20)];

/// Batch, query heads, KV heads, query rows, keys: as many, fewer and more queries than keys, lengths that are no multiple of
/// any tile, grouped heads, one row, no key, no row.
const SIZES: [[usize; 5]; 7] = [
    [1, 2, 2, 64, 64],
    [2, 4, 2, 33, 70],
    [1, 3, 1, 65, 31],
    [1, 2, 1, 1, 100],
    [1, 6, 3, 17, 17],
    [1, 2, 1, 5, 0],
    [1, 1, 1, 0, 9],
];

/// Batch, m, k, n of products; the last are big enough for what software devices have for those, rows of any width and of whole multiples.
const PRODUCTS: [[usize; 4]; 7] = [
    [1, 64, 64, 64],
    [2, 33, 65, 17],
    [1, 1, 100, 1],
    [3, 70, 7, 130],
    [1, 5, 0, 3],
    [2, 130, 257, 259],
    [1, 200, 264, 200],
];

/// Rows and columns for softmax.
const ROWS: [[usize; 2]; 5] = [[64, 64], [3, 1], [5, 1000], [17, 63], [2, 257]];

/// What became of the cases of one kernel.
#[derive(Debug, Clone, Default, Serialize)]
struct Outcome {
    cases: usize,
    failed: usize,
    /// The largest error as a share of its tolerance; null in JSON where an infinity or a NaN is out of place.
    worst: f64,
    /// The first failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

#[derive(Debug, Serialize)]
struct Row {
    kernel: String,
    /// What the cases have beside q, k and v in one type, causality and scale.
    options: &'static str,
    status: &'static str,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Serialize)]
struct Report {
    adapter: String,
    driver: String,
    kernels: Vec<Row>,
    /// Cases, over all kernels.
    passed: usize,
    failed: usize,
}

/// Results by options and kernel.
#[derive(Debug, Default)]
struct Outcomes(BTreeMap<(&'static str, String), Outcome>);

impl Outcomes {
    /// Notes a case: its comparisons, or the error that it ended with.
    fn add(
        &mut self,
        options: &'static str,
        kernel: String,
        case: &str,
        result: Result<Vec<(&'static str, Comparison)>>,
    ) {
        let outcome = self.0.entry((options, kernel)).or_default();
        outcome.cases += 1;
        let mut message = None;
        match result {
            Ok(comparisons) => {
                for (name, comparison) in comparisons {
                    let share =
                        if comparison.max_abs_err == 0.0 { 0.0 } else { comparison.max_abs_err / comparison.tolerance };
                    outcome.worst = outcome.worst.max(share);
                    if !comparison.passed() {
                        message.get_or_insert_with(|| format!("{case}: {name}: {comparison}"));
                    }
                }
            }
            Err(error) => {
                outcome.worst = f64::INFINITY;
                message = Some(format!("{case}: {}", output::error_text(&error)));
            }
        }
        if let Some(message) = message {
            outcome.failed += 1;
            outcome.message.get_or_insert(message);
        }
    }
}

/// Checks the device; whether all is right.
pub(super) fn run(dtype: Dtype, common: &Common) -> Result<bool> {
    let engine = common.engine()?;
    let progress = Progress::new();
    let mut outcomes = Outcomes::default();
    let plain = Group::plain(dtype.stored());
    let problems = problems();
    let steps = problems.len() + GROUPS.len();
    for (index, problem) in problems.into_iter().enumerate() {
        progress.stage_at(index as f64 / steps as f64, format!("kernels for head_dim {}", problem.0.head_dim));
        attention(&engine, &plain, problem, &mut outcomes)?;
    }
    // A call that is long for a software device, which has kernels of its own for those.
    let long = Dims { batch: 1, q_heads: 4, kv_heads: 2, q_len: 333, kv_len: 413, head_dim: 64, value_dim: 64 };
    let Ran { kernel, result } = plain.check_gradients(&engine, long, Attention::causal())?;
    outcomes.add(NO_OPTIONS, kernel, &describe(&long, &Attention::causal()), result);
    for (index, group) in GROUPS.iter().enumerate() {
        let part = (steps - GROUPS.len() + index) as f64 / steps as f64;
        progress.stage_at(part, format!("options: {}", group.name));
        for problem in Group::problems() {
            attention(&engine, group, problem, &mut outcomes)?;
        }
    }
    progress.stage("matmul and softmax_rows");
    products(&engine, &mut outcomes)?;
    softmax(&engine, &mut outcomes)?;
    drop(progress);

    let info = engine.adapter_info();
    let rows = outcomes.0.into_iter().map(|((options, kernel), outcome)| Row {
        kernel,
        options,
        status: if outcome.failed == 0 { "pass" } else { "fail" },
        outcome,
    });
    let rows: Vec<_> = rows.collect();
    let failed = rows.iter().map(|row| row.outcome.failed).sum();
    let report = Report {
        adapter: info.name.clone(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        passed: rows.iter().map(|row| row.outcome.cases).sum::<usize>() - failed,
        failed,
        kernels: rows,
    };
    if common.json {
        output::print_json(&report)?
    } else {
        output::print(&report.text())?
    }
    Ok(failed == 0)
}

fn problems() -> Vec<(Dims, Attention)> {
    let attentions = |q_len: usize, kv_len: usize| {
        let mut options = vec![Attention::full(), Attention::causal()];
        if q_len != kv_len {
            options.push(Attention::causal().align(Align::TopLeft));
        }
        options
    };
    let mut problems = Vec::new();
    for (head_dim, value_dim) in WIDTHS {
        for [batch, q_heads, kv_heads, q_len, kv_len] in SIZES {
            let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
            for options in attentions(q_len, kv_len) {
                // One scale that isn't the default, in passing.
                let options = if batch == 2 { options.softmax_scale(0.3) } else { options };
                problems.push((dims, options));
            }
        }
    }
    problems
}

fn describe(dims: &Dims, attention: &Attention) -> String {
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = dims;
    let mask = match (attention.is_causal(), attention.alignment()) {
        (false, _) => "full",
        (true, Align::BottomRight) => "causal",
        (true, Align::TopLeft) => "causal top-left",
    };
    format!("q ({batch}, {q_heads}, {q_len}, {head_dim}), v ({batch}, {kv_heads}, {kv_len}, {value_dim}), {mask}")
}

/// All plans for a problem of a group against the reference.
fn attention(
    engine: &Engine,
    group: &Group,
    (dims, attention): (Dims, Attention),
    outcomes: &mut Outcomes,
) -> Result<()> {
    let case = describe(&dims, &attention);
    for Ran { kernel, result } in group.check(engine, dims, attention.clone()).with_context(|| case.clone())? {
        outcomes.add(group.name, kernel, &case, result);
    }
    if group.name != NO_OPTIONS || GRADIENT_WIDTHS.contains(&(dims.head_dim, dims.value_dim)) {
        let Ran { kernel, result } = group.check_gradients(engine, dims, attention).with_context(|| case.clone())?;
        outcomes.add(group.name, kernel, &case, result);
    }
    Ok(())
}

fn products(engine: &Engine, outcomes: &mut Outcomes) -> Result<()> {
    for [batch, m, k, n] in PRODUCTS {
        let (a_host, b_host) = (normal(4, batch * m * k), normal(5, batch * k * n));
        let a = engine.upload(&a_host, [batch, m, k])?;
        // Standard model: a sum of k products is off by (k + 1) u mag at most, in whatever order.
        let tolerance = |mag: f64| (k + 1) as f64 * Precision::F32.unit_roundoff() * mag;
        let case = format!("({batch}, {m}, {k}) by ({batch}, {k}, {n})");
        for (transposed, name) in [(false, "A·B"), (true, "A·Bᵀ")] {
            let b = engine.upload(&b_host, if transposed { [batch, n, k] } else { [batch, k, n] })?;
            let result = || -> Result<_> {
                let (c, expected) = if transposed {
                    let expected = reference::matmul_transposed(batch, [m, k, n], &a_host, &b_host)?;
                    (engine.matmul_transposed(&a, &b)?, expected)
                } else {
                    (engine.matmul(&a, &b)?, reference::matmul(batch, [m, k, n], &a_host, &b_host)?)
                };
                Ok(vec![("c", compare(&c.read()?, &expected.c, tolerance(expected.mag)))])
            };
            let kernel = format!("{}, {name}", stem(&engine.matmul_kernel(&a, &b, transposed)?));
            outcomes.add(NO_OPTIONS, kernel, &case, result());
        }
    }
    Ok(())
}

fn softmax(engine: &Engine, outcomes: &mut Outcomes) -> Result<()> {
    for [rows, columns] in ROWS {
        let mut x = normal(6, rows * columns);
        x.iter_mut().for_each(|x| *x *= 4.0);
        // A masked element, and a row of nothing else.
        x[0] = f32::NEG_INFINITY;
        x[(rows - 1) * columns..].fill(f32::NEG_INFINITY);
        let result = || -> Result<_> {
            let (weights, lse) = engine.softmax_rows(&engine.upload(&x, [rows, columns])?)?;
            let expected = reference::softmax_rows(rows, columns, &x)?;
            let finite = x.iter().copied().filter(|x| x.is_finite()).fold(0.0, |max: f32, x| max.max(x.abs()));
            let tolerance = Tolerance { mag: 1.0, exponent: finite.into(), keys: columns };
            Ok(vec![
                ("weights", compare(&weights.read()?, &expected.p, tolerance.o(Precision::F32))),
                ("lse", compare(&lse.read()?, &expected.lse, tolerance.lse())),
            ])
        };
        outcomes.add(NO_OPTIONS, "softmax_rows".to_string(), &format!("({rows}, {columns})"), result());
    }
    Ok(())
}

impl Report {
    fn text(&self) -> String {
        let mut table = output::table(["options", "kernel", "cases", "worst error, of tolerance", ""]);
        for Row { kernel, options, status, outcome } in &self.kernels {
            let worst = format!("{:.1}%", 100.0 * outcome.worst);
            table.add_row([*options, kernel, &outcome.cases.to_string(), &worst, status]);
        }
        let mut text = format!("{} ({})\n\n{table}\n\n", self.adapter, self.driver);
        for row in &self.kernels {
            if let Some(message) = &row.outcome.message {
                text += &format!("{}, {}: {message}\n", row.options, row.kernel);
            }
        }
        text + &format!("{} passed, {} failed\n", self.passed, self.failed)
    }
}
