//! `tilewise walkthrough`: attention's small numbers, step by step, each computed on the GPU and held against what it must be.

use anyhow::{Result, ensure};
use serde::Serialize;
use tilewise::reference::{self, Case};
use tilewise::{Attention, Dims, Engine, Error, Inputs, Path, Problem, Purpose, Tensor};

use crate::args::Common;
use crate::measure::{self, bytes};
use crate::output;

/// A number that the device gave, and what it must be.
#[derive(Debug, Serialize)]
struct Check {
    what: String,
    got: f64,
    expected: f64,
    tolerance: f64,
    passed: bool,
}

/// One step: what is said, and the numbers it rests on.
#[derive(Debug, Serialize)]
struct Step {
    title: &'static str,
    text: Vec<String>,
    checks: Vec<Check>,
}

#[derive(Debug, Serialize)]
struct Report {
    adapter: String,
    steps: Vec<Step>,
    passed: bool,
}

pub(crate) fn run(common: &Common) -> Result<()> {
    let engine = common.engine()?;
    let steps = vec![
        dots(&engine)?,
        softmax(&engine)?,
        mix(&engine)?,
        together(&engine)?,
        look_ahead(&engine)?,
        saturation(&engine)?,
        memory(&engine)?,
    ];
    let wrong: Vec<_> = steps.iter().flat_map(|step| &step.checks).filter(|check| !check.passed).collect();
    let wrong: Vec<_> = wrong
        .iter()
        .map(|check| format!("{} is {}, expected {} +- {}", check.what, check.got, check.expected, check.tolerance))
        .collect();
    let report = Report { adapter: engine.describe_adapter(), passed: wrong.is_empty(), steps };
    if common.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.text())?;
    }
    ensure!(wrong.is_empty(), "this device computes other numbers: {}", wrong.join("; "));
    Ok(())
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!("Every number below was computed on {}.\n", self.adapter);
        for (number, step) in (1..).zip(&self.steps) {
            text += &format!("\n{number}. {}\n", step.title);
            for line in &step.text {
                text += &format!("   {line}\n");
            }
        }
        let checks: usize = self.steps.iter().map(|step| step.checks.len()).sum();
        text + &format!("\n{checks} numbers checked.\n")
    }
}

impl Step {
    fn new(title: &'static str) -> Self {
        Self { title, text: Vec::new(), checks: Vec::new() }
    }

    fn say(&mut self, line: impl Into<String>) {
        self.text.push(line.into());
    }

    /// Keeps a number with what it must be, and gives it back to be printed.
    fn check(&mut self, what: impl Into<String>, got: impl Into<f64>, expected: f64, tolerance: f64) -> f64 {
        let got = got.into();
        // NaN is within nothing.
        let passed = (got - expected).abs() <= tolerance;
        self.checks.push(Check { what: what.into(), got, expected, tolerance, passed });
        got
    }

    fn check_all(&mut self, what: &str, got: &[f32], expected: &[f64], tolerance: f64) -> Result<()> {
        ensure!(got.len() == expected.len(), "{what}: {} numbers, expected {}", got.len(), expected.len());
        for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            self.check(format!("{what}[{index}]"), got, expected, tolerance);
        }
        Ok(())
    }
}

/// Rows of numbers, `digits` after the point.
fn list(numbers: &[f32], digits: usize) -> String {
    let numbers: Vec<_> = numbers.iter().map(|x| format!("{x:.digits$}")).collect();
    format!("[{}]", numbers.join(", "))
}

fn identity(n: usize) -> Vec<f32> {
    (0..n * n).map(|i| if i % (n + 1) == 0 { 1.0 } else { 0.0 }).collect()
}

/// The scores that q and k of one head give: attention whose v is the identity returns its own
/// weights.
fn weights(engine: &Engine, q: &Tensor, k: &Tensor, options: &Attention) -> Result<Vec<f32>> {
    let keys = k.shape()[2];
    let v = engine.upload(&identity(keys), [1, 1, keys, keys])?;
    Ok(engine.attention(q, k, &v, options)?.o.read()?)
}

fn dots(engine: &Engine) -> Result<Step> {
    let mut step = Step::new("A score is a dot product of a query and a key");
    let q = engine.upload(&[2.0f32, 0.0], [1, 2])?;
    let k = engine.upload(&[1.0f32, 2.0, 2.0, 1.0], [2, 2])?;
    let scores = engine.matmul_transposed(&q, &k)?.read()?;
    step.check_all("q1 . k", &scores, &[2.0, 4.0], 0.0)?;
    step.say("q1 = [2, 0], k2 = [1, 2], k3 = [2, 1]");
    step.say(format!("q1 . k2 = {}, q1 . k3 = {}: token 1 looks more at token 3", scores[0], scores[1]));
    Ok(step)
}

const SCORES: [f32; 3] = [4.0, 2.0, 0.5];

fn softmax(engine: &Engine) -> Result<Step> {
    let mut step = Step::new("Softmax turns scores into weights that sum to 1");
    let (weights, lse) = engine.softmax_rows(&engine.upload(&SCORES, [1, 3])?)?;
    let (weights, lse) = (weights.read()?, lse.read()?);
    // A fourth score of 0 has the exponential 1: the others' weights over its weight are their exponentials.
    let beside_zero = engine.softmax_rows(&engine.upload(&[4.0f32, 2.0, 0.5, 0.0], [1, 4])?)?.0.read()?;
    let exps: Vec<f32> = beside_zero[..3].iter().map(|weight| weight / beside_zero[3]).collect();

    let exact = SCORES.map(|score| f64::from(score).exp());
    let sum: f64 = exact.iter().sum();
    for ((score, &exp), exact) in SCORES.iter().zip(&exps).zip(exact) {
        step.check(format!("e^{score}"), exp, exact, 1e-5 * exact);
    }
    step.check_all("weight", &weights, &exact.map(|exp| exp / sum), 1e-6)?;
    step.check("the weights' sum", weights.iter().sum::<f32>(), 1.0, 1e-6);
    step.check("lse", lse[0], sum.ln(), 1e-5);
    step.say(format!("scores        {}", list(&SCORES, 1)));
    step.say(format!("exponentials  {}", list(&exps, 2)));
    step.say(format!("weights       {}, ln of the sum {:.4}", list(&weights, 3), lse[0]));
    step.say(
        "The article that these numbers are from prints the weights 0.84, 0.11, 0.05 for them, which don't follow",
    );
    step.say(format!(
        "from them: {:.2} / ({:.2} + {:.2} + {:.2}) is {:.3}.",
        exps[0], exps[0], exps[1], exps[2], weights[0]
    ));
    Ok(step)
}

fn mix(engine: &Engine) -> Result<Step> {
    let mut step = Step::new("The output is the values, mixed by the weights");
    let weights = engine.upload(&[0.8f32, 0.2], [1, 2])?;
    let v = engine.upload(&[10.0f32, 10.0, 0.0, 0.0], [2, 2])?;
    let o = engine.matmul(&weights, &v)?.read()?;
    step.check_all("o", &o, &[8.0, 8.0], 1e-5)?;
    step.say(format!("0.8 x [10, 10] + 0.2 x [0, 0] = {}", list(&o, 1)));
    Ok(step)
}

fn together(engine: &Engine) -> Result<Step> {
    let mut step = Step::new("Tiled attention does all three at once");
    // Keys and values that are the identity: the scores are q itself, and the output is the weights.
    let q = engine.upload(&SCORES, [1, 1, 1, 3])?;
    let k = engine.upload(&identity(3), [1, 1, 3, 3])?;
    let o = weights(engine, &q, &k, &Attention::full().softmax_scale(1.0))?;
    let sum: f64 = SCORES.iter().map(|&score| f64::from(score).exp()).sum();
    step.check_all("tiled weight", &o, &SCORES.map(|score| f64::from(score).exp() / sum), 1e-6)?;
    step.say(format!("q = {}, K and V the identity, scale 1: o = {}", list(&SCORES, 1), list(&o, 3)));
    step.say("the same weights, from one kernel that keeps no score");
    Ok(step)
}

fn look_ahead(engine: &Engine) -> Result<Step> {
    const LEN: usize = 4;
    let mut step = Step::new("The look-ahead mask: a token sees itself and what came before");
    let q_host = [2.0f32, 0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 2.0];
    let k_host = [1.0f32, 0.0, 1.0, 2.0, 2.0, 1.0, 0.0, 1.0];
    let shape = [1, 1, LEN, 2];
    let (q, k) = (engine.upload(&q_host, shape)?, engine.upload(&k_host, shape)?);
    let zero = engine.upload(&[0.0f32; 2 * LEN], shape)?;
    // Without a query all visible keys weigh the same: what weighs nothing is masked.
    let even = weights(engine, &zero, &k, &Attention::causal())?;
    let masked = weights(engine, &q, &k, &Attention::causal())?;

    let v = identity(LEN);
    let case = Case {
        batch: 1,
        q_heads: 1,
        kv_heads: 1,
        q_len: LEN,
        kv_len: LEN,
        head_dim: 2,
        value_dim: LEN,
        ..Case::default()
    };
    let expected = reference::attention(&Case { q: &q_host, k: &k_host, v: &v, causal: true, ..case })?;
    step.say("mask (1: may look)    weights with it           q, k of two numbers a token, scale 1/sqrt(2)");
    for row in 0..LEN {
        let range = row * LEN..(row + 1) * LEN;
        let share = |column: usize| if column <= row { 1.0 / (row as f64 + 1.0) } else { 0.0 };
        let even_row: Vec<_> = (0..LEN).map(share).collect();
        step.check_all(&format!("row {row} without scores: weight"), &even[range.clone()], &even_row, 1e-6)?;
        step.check_all(&format!("row {row}: weight"), &masked[range.clone()], &expected.o[range.clone()], 1e-6)?;
        step.check(format!("row {row}: sum"), masked[range.clone()].iter().sum::<f32>(), 1.0, 1e-6);
        for column in row + 1..LEN {
            step.check(format!("row {row}, masked key {column}"), masked[row * LEN + column], 0.0, 0.0);
        }
        let mask: Vec<_> = even[range.clone()].iter().map(|&weight| if weight > 0.0 { "1" } else { "0" }).collect();
        step.say(format!("{:22}{}", mask.join(" "), list(&masked[range], 3)));
    }
    Ok(step)
}

/// Mean largest weight and mean entropy (in nats) of rows of weights.
fn sharpness(weights: impl Iterator<Item = f64>, columns: usize) -> (f64, f64) {
    let weights: Vec<_> = weights.collect();
    let rows = weights.len() as f64 / columns as f64;
    let (mut largest, mut entropy) = (0.0, 0.0);
    for row in weights.chunks(columns) {
        largest += row.iter().copied().fold(0.0, f64::max) / rows;
        entropy -= row.iter().filter(|&&w| w > 0.0).map(|w| w * w.ln()).sum::<f64>() / rows;
    }
    (largest, entropy)
}

fn saturation(engine: &Engine) -> Result<Step> {
    const LEN: usize = 64;
    let mut step =
        Step::new("Why scores are divided by sqrt(head_dim): otherwise softmax saturates as heads grow wider");
    // The log-sum-exp of scores of 0 is the entropy of equal weights.
    let zeros = engine.upload(&[0.0f32; LEN], [1, 1, LEN, 1])?;
    let even = engine.attention(&zeros, &zeros, &zeros, &Attention::full())?.lse.read()?[0];
    let even = step.check("entropy of an even spread", even, (LEN as f64).ln(), 1e-5);
    step.say(format!(
        "{LEN} random queries and keys of variance 1; an even spread has the entropy ln {LEN} = {even:.2}"
    ));
    step.say("            scale 1                     scale 1/sqrt(head_dim)");
    step.say("head_dim    largest weight   entropy    largest weight   entropy");
    let v = identity(LEN);
    let (mut first, mut last) = ((0.0, 0.0), (0.0, 0.0));
    for head_dim in [4, 16, 64, 256, 1024] {
        let (q_host, k_host) = (measure::normal(4, LEN * head_dim), measure::normal(5, LEN * head_dim));
        let shape = [1, 1, LEN, head_dim];
        let (q, k) = (engine.upload(&q_host, shape)?, engine.upload(&k_host, shape)?);
        let mut line = format!("{head_dim:8}");
        let mut both = Vec::new();
        for scale in [Some(1.0), None] {
            let options = scale.map_or(Attention::full(), |scale| Attention::full().softmax_scale(scale));
            let got = weights(engine, &q, &k, &options)?;
            let case = Case {
                batch: 1,
                q_heads: 1,
                kv_heads: 1,
                q_len: LEN,
                kv_len: LEN,
                head_dim,
                value_dim: LEN,
                ..Case::default()
            };
            let scale = scale.map(f64::from);
            let case = Case { q: &q_host, k: &k_host, v: &v, softmax_scale: scale, ..case };
            let expected = reference::attention(&case)?;
            let of_device = sharpness(got.iter().map(|&w| f64::from(w)), LEN);
            let exact = sharpness(expected.o.iter().copied(), LEN);
            let name = format!("head_dim {head_dim}, scale {}", if scale.is_some() { "1" } else { "1/sqrt" });
            // Scores of head_dim 1024 without a scale are near 100: their exponentials are good to five digits.
            let largest = step.check(format!("{name}: largest weight"), of_device.0, exact.0, 1e-4);
            let entropy = step.check(format!("{name}: entropy"), of_device.1, exact.1, 1e-3);
            line += &format!("    {largest:14.3}   {entropy:7.2}");
            both.push(largest);
        }
        step.say(line);
        last = (both[0], both[1]);
        if head_dim == 4 {
            first = last;
        }
    }
    step.say(format!(
        "Unscaled, a query ends up looking at one key ({:.2} -> {:.2}), where softmax has no gradient left; scaled, its",
        first.0, last.0
    ));
    step.say(format!("sharpness doesn't depend on the width ({:.2} -> {:.2}).", first.1, last.1));
    step.check("unscaled: largest weight at 1024 (near 1)", last.0, 1.0, 0.2);
    step.check("scaled: largest weight at 1024 (as at 4)", last.1, first.1, 0.15);
    Ok(step)
}

fn memory(engine: &Engine) -> Result<Step> {
    const LEN: usize = 4096;
    const DIM: usize = 64;
    const SCORES: u64 = 67_108_864;
    let mut step = Step::new("The score matrix of 4096 tokens, and attention without it");
    let problem = Problem::new(Dims::square(1, 1, LEN, DIM), Attention::full())?;
    let tensor = |seed| engine.upload(&measure::normal(seed, LEN * DIM), [1, 1, LEN, DIM]);
    let (q, k, v) = (tensor(6)?, tensor(7)?, tensor(8)?);

    engine.wait()?;
    engine.reset_peak();
    let output = engine.attention(&q, &k, &v, problem.attention())?;
    engine.wait()?;
    let used = engine.memory(); // before the result's way back adds a buffer
    let tiled = output.o.read()?;
    drop(output);
    step.say(format!(
        "tiled: a peak of {} on the device ({} q, k, v; {} o and lse; {} workspace)",
        bytes(used.peak_bytes()),
        bytes(used.peak_bytes_for(Purpose::Input)),
        bytes(used.peak_bytes_for(Purpose::Output)),
        bytes(used.peak_bytes_for(Purpose::Workspace)),
    ));
    // Anything below the matrix shows that there was none.
    step.check("tiled: peak bytes (below half a score matrix)", used.peak_bytes() as f64, 0.0, SCORES as f64 / 2.0);
    step.check(
        "tiled: bytes of workspace (below 1 MiB)",
        used.peak_bytes_for(Purpose::Workspace) as f64,
        0.0,
        f64::from(1 << 20),
    );

    engine.reset_peak();
    match engine.attention_by(Path::Naive, &Inputs::new(&q, &k, &v), problem.attention()) {
        Ok(output) => {
            let naive = output.o.read()?;
            let used = engine.memory();
            let scores = used.peak_bytes_for(Purpose::Workspace);
            step.check("naive: bytes of scores", scores as f64, SCORES as f64, 0.0);
            let differences = tiled.iter().zip(&naive).map(|(a, b)| f64::from((a - b).abs()));
            let largest = step.check(
                "tiled and naive: largest difference",
                // Unlike f64::max, this lets a NaN through.
                differences.fold(0.0, |largest, x| if x > largest || x.is_nan() { x } else { largest }),
                0.0,
                1e-5,
            );
            step.say(format!(
                "naive: a peak of {}, of which {scores} bytes are 4096 x 4096 scores of 4 bytes",
                bytes(used.peak_bytes())
            ));
            step.say(format!("largest difference between the two results: {largest:.1e}"));
        }
        Err(error @ Error::Unsupported { .. }) => {
            step.say(format!("naive: refused ({error})"));
        }
        Err(error) => return Err(error.into()),
    }
    step.check("bytes of scores by the problem's own count", problem.score_bytes() as f64, SCORES as f64, 0.0);
    Ok(step)
}
