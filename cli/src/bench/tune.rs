//! `tilewise tune`: which variant is the fastest on this device, measured, and kept where the library looks for it.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde::Serialize;
use tilewise::{AttentionOutput, Engine, Plan, Tensor, Tuning, TuningChoice};

use super::attention::{Data, run_at_once};
use super::check::{self, HostOutput};
use super::row::Spec;
use super::{Defaults, Kind, Shapes};
use crate::args::Common;
use crate::measure::{self, Elapsed, Progress, median, seconds};
use crate::output::{self, OutFile};

/// Variants are measured in turns, so that all of them see the machine as it is.
const ROUNDS: usize = 7;

/// After the first round those that took this many times as long as the fastest are out.
const HOPELESS: f64 = 2.0;

/// Calls that are tuned where none are named: a short prompt, a long one, and one row over a long cache.
const DEFAULTS: Defaults<'static> =
    Defaults { lens: &[(256, 256), (1024, 1024), (1, 4096)], heads: 8, head_dims: &[64, 128] };

/// Each variant is compared with the f64 reference before it is timed, and can't be chosen if it is wrong. What was saved for other calls and
/// other devices stays in the file.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    shapes: Shapes,
    /// Where to save [default: where the library looks by itself, in the platform's folder for caches]
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Measure and print, and save nothing
    #[arg(long, conflicts_with = "save")]
    dry_run: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    /// Null where nothing was saved.
    file: Option<PathBuf>,
    rows: Vec<Row>,
}

/// What was found for some calls.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    spec: Spec,
    /// None where no variant was right.
    chosen: Option<String>,
    /// What the planner takes untuned.
    preferred: String,
    variants: Vec<Variant>,
}

#[derive(Debug, Serialize)]
struct Variant {
    variant: String,
    /// The median of its runs; of one run where that was hopeless. CPU time on a software device.
    seconds: Option<f64>,
    /// Why it can't be chosen.
    wrong: Option<String>,
}

pub(crate) fn run(args: &TuneArgs, common: &Common) -> Result<()> {
    ensure!(args.shapes.attention.path()?.is_none(), "--path with tune; accepted: none, only tiled kernels are tuned");
    ensure!(
        !common.is_tuned(),
        "--tuning with tune; accepted: none, it measures all variants, and --save names its file"
    );
    let specs = args.shapes.specs(Kind::Forward, &DEFAULTS)?;
    for spec in &specs {
        ensure!(
            spec.problem()?.flops() > 0,
            "q_len {}, kv_len {}, {}: nothing to measure; accepted: sizes of 1 or more",
            spec.q_len,
            spec.kv_len,
            spec.shape()
        );
    }
    let target = if args.dry_run { None } else { Some(target(args.save.as_ref())?) };
    // Better now than after minutes of measuring.
    let file = target.as_deref().map(OutFile::check).transpose()?;
    saved(target.as_ref())?;
    let engine = common.engine_tuned_by(TuningChoice::None)?;
    let device = engine.describe_adapter();
    let progress = Progress::new();
    let (mut rows, mut choices) = (Vec::new(), Vec::new());
    for spec in &specs {
        let (row, plan) = tune(&engine, spec, &progress)
            .with_context(|| format!("q_len {}, kv_len {}, {}", spec.q_len, spec.kv_len, spec.shape()))?;
        choices.extend(plan.map(|plan| (plan, row.note())));
        rows.push(row);
    }
    drop(progress);
    if let Some(file) = file {
        // As it is now: another `tune` may have saved meanwhile.
        let mut tuning = saved(target.as_ref())?;
        for (plan, note) in &choices {
            tuning.choose(&device, plan, note)?;
        }
        file.write(tuning.to_string().as_bytes())?;
    }
    let report = Report { device, file: target, rows };
    if common.json { output::print_json(&report) } else { output::print(&report.text()) }?;
    let wrong = report.rows.iter().flat_map(|row| &row.variants).filter(|variant| variant.wrong.is_some()).count();
    ensure!(wrong == 0, "{wrong} results were wrong; none of them was chosen");
    Ok(())
}

/// What is in the file already.
fn saved(target: Option<&PathBuf>) -> Result<Tuning> {
    match target {
        Some(path) if path.exists() => Ok(Tuning::load(path).context("what is saved there would be lost")?),
        _ => Ok(Tuning::default()),
    }
}

/// The file asked for, or the library's own, whose folder is made.
fn target(save: Option<&PathBuf>) -> Result<PathBuf> {
    if let Some(path) = save {
        return Ok(path.clone());
    }
    let path =
        Tuning::cache_path().ok_or_else(|| anyhow!("this platform has no folder for caches; name a --save FILE"))?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    Ok(path)
}

/// A variant that can run.
struct Candidate {
    plan: Plan,
    output: AttentionOutput,
    workspace: Option<Tensor>,
    runs: Vec<Elapsed>,
    wrong: Option<String>,
}

impl Candidate {
    /// On a software device the CPU's time, which says more on a busy machine.
    fn seconds(&self) -> Option<f64> {
        let taken = |run: &Elapsed| run.cpu_seconds.unwrap_or(run.seconds);
        (!self.runs.is_empty()).then(|| median(self.runs.iter().map(taken)))
    }

    fn tile(&self) -> String {
        self.plan.tile().unwrap_or_default()
    }
}

/// Measures all variants for one call; gives the plan that was fastest too.
fn tune(engine: &Engine, spec: &Spec, progress: &Progress) -> Result<(Row, Option<Plan>)> {
    let problem = spec.problem()?;
    let plans = Plan::candidates(&problem, &engine.facts())?;
    let title = format!("{}, {}", spec.lengths(), spec.shape());
    progress.stage(format!("{title}: making inputs"));
    let data = Data::new(engine, spec, problem)?;
    let count = plans.len();
    let mut candidates = Vec::new();
    for (index, plan) in plans.into_iter().enumerate() {
        progress.stage(format!("{title}: checking variant {} of {count}", index + 1));
        let (output, workspace) = (engine.alloc_output(&plan)?, engine.alloc_workspace(&plan)?);
        let mut candidate = Candidate { plan, output, workspace, runs: Vec::new(), wrong: None };
        // The first run compiles.
        run_once(engine, &data, &candidate)?;
        let result = HostOutput::read(&candidate.output)?;
        match check::against_reference(spec, &data.problem, &data.host, &result) {
            Ok(_) => candidate.runs.push(run_once(engine, &data, &candidate)?),
            Err(error) => candidate.wrong = Some(output::error_text(&error)),
        }
        candidates.push(candidate);
        progress.done((index + 1) as f64 / count as f64);
    }
    let fastest = candidates.iter().filter_map(Candidate::seconds).fold(f64::MAX, f64::min);
    let hopeless = HOPELESS * fastest;
    for round in 1..ROUNDS {
        progress.stage(format!("{title}: round {round} of {}", ROUNDS - 1));
        for candidate in &mut candidates {
            if candidate.seconds().is_some_and(|seconds| seconds <= hopeless) {
                let run = run_once(engine, &data, candidate)?;
                candidate.runs.push(run);
            }
        }
        progress.done((round + 1) as f64 / ROUNDS as f64);
    }
    let preferred = candidates.first().map(Candidate::tile).unwrap_or_default();
    // Stable: among equals the planner's order stands.
    candidates.sort_by(|a, b| a.seconds().unwrap_or(f64::MAX).total_cmp(&b.seconds().unwrap_or(f64::MAX)));
    let variants = candidates
        .iter()
        .map(|it| Variant { variant: it.tile(), seconds: it.seconds(), wrong: it.wrong.clone() })
        .collect();
    let chosen = candidates.into_iter().find(|candidate| candidate.wrong.is_none());
    let row = Row { spec: *spec, chosen: chosen.as_ref().map(Candidate::tile), preferred, variants };
    Ok((row, chosen.map(|candidate| candidate.plan)))
}

fn run_once(engine: &Engine, data: &Data<'_>, candidate: &Candidate) -> Result<Elapsed> {
    let Candidate { plan, output, workspace, .. } = candidate;
    let bindings = data.bindings(output, workspace.as_ref());
    run_at_once(engine, measure::is_software(engine), |encoder| plan.record(encoder, &bindings))
}

impl Row {
    /// What the file says behind the choice: its time, and the next one's.
    fn note(&self) -> String {
        let mut figures = self.variants.iter().filter_map(|it| Some((it, seconds(it.seconds?))));
        let fastest = figures.next().map_or_else(String::new, |(_, time)| time);
        let next = figures.next().map_or_else(String::new, |(it, time)| format!(", {} {time}", it.variant));
        format!("{}, {}: {fastest}{next}", self.spec.lengths(), self.spec.shape())
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!("{}\n", self.device);
        for row in &self.rows {
            let fastest = row.variants.iter().find_map(|variant| variant.seconds);
            let mut table = output::table(["variant", "time", "of the fastest", ""]);
            for Variant { variant, seconds: time, wrong } in &row.variants {
                let share = time.zip(fastest).map(|(time, fastest)| format!("{:.2}", time / fastest));
                let mut remarks = Vec::new();
                remarks.extend((row.chosen.as_ref() == Some(variant)).then(|| "chosen".to_string()));
                remarks.extend((row.preferred == *variant).then(|| "the planner's own choice".to_string()));
                remarks.extend(wrong.clone());
                let time = time.map(seconds).unwrap_or_default();
                table.add_row([variant, &time, &share.unwrap_or_default(), &remarks.join(", ")]);
            }
            text += &format!("\n{}, {}\n{table}\n", row.spec.lengths(), row.spec.shape());
        }
        match &self.file {
            Some(file) => text + &format!("\nSaved in {}\n", output::printable(&file.display().to_string())),
            None => text + "\nNothing was saved.\n",
        }
    }
}
