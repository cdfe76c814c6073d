//! `tilewise verify --cases`: a folder of cases, each with its inputs and the outputs to reproduce.
//!
//! The folder may be anybody's. A case that makes no sense is an error of its own, and no number in a manifest is taken for more
//! than the tensors of its file bear out.

mod golden;
mod inputs;
mod onnx;

use core::fmt;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tilewise::reference::{Comparison, compare};
use tilewise::{Attention, AttentionOutput, Engine};

use crate::args::Common;
use crate::measure::Progress;
use crate::output::{self, printable};
use crate::tensors::{DeviceInputs, TensorFile, Tensors, dtype_name, run_over_nans};
use crate::verify::VerifyArgs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Pass,
    Fail,
    Refused,
    Error,
}

#[derive(Debug, Serialize)]
struct CaseReport {
    name: String,
    status: Status,
    dtype: String,
    /// Largest error of each output compared; null where an infinity or a NaN is out of place.
    errors: BTreeMap<String, f64>,
    message: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    adapter: String,
    cases: Vec<CaseReport>,
    passed: usize,
    failed: usize,
    refused: usize,
    errored: usize,
}

/// What a case needs and this program hasn't: no failure.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// Ends a case as refused if there is any reason to.
fn refuse(reasons: &[String]) -> Result<()> {
    if reasons.is_empty() { Ok(()) } else { Err(Refused(reasons.join("; ")).into()) }
}

/// The comparisons of a case, by output.
type Compared = BTreeMap<String, Comparison>;

/// What all cases run with.
struct Runner<'a> {
    engine: &'a Engine,
    folder: &'a Path,
    args: &'a VerifyArgs,
}

/// The kinds of folder, by the manifest's `format`.
#[derive(Debug, Clone, Copy)]
enum Format {
    Golden,
    Onnx,
}

impl Format {
    fn of(manifest: &Value) -> Result<Self> {
        match manifest["format"].as_str() {
            Some("attention-golden/1") => Ok(Self::Golden),
            Some("onnx-attention-cases/1") => Ok(Self::Onnx),
            _ => bail!("format {}; accepted: \"attention-golden/1\", \"onnx-attention-cases/1\"", manifest["format"]),
        }
    }

    /// The type that a case would be run in; None to leave it out.
    fn dtype(self, case: &Value, args: &VerifyArgs) -> Option<String> {
        match self {
            Self::Golden => golden::dtype(case, args),
            Self::Onnx => onnx::dtype(case, args),
        }
    }

    fn check(self, runner: &Runner<'_>, case: &Value) -> Result<Compared> {
        match self {
            Self::Golden => golden::check(runner, case),
            Self::Onnx => onnx::check(runner, case),
        }
    }
}

/// Runs a folder of cases; whether none failed or errored.
pub(crate) fn run(folder: &Path, args: &VerifyArgs, common: &Common) -> Result<bool> {
    let path = folder.join("manifest.json");
    let manifest = read_manifest(&path).with_context(|| path.display().to_string())?;
    let format = Format::of(&manifest).with_context(|| path.display().to_string())?;
    let Some(cases) = manifest["cases"].as_array() else { bail!("{}: no list of cases", path.display()) };
    let name = |index: usize, case: &Value| {
        case["name"].as_str().map_or_else(|| format!("case {} of the manifest", index + 1), str::to_string)
    };
    let named = cases.iter().enumerate().map(|(index, case)| (name(index, case), case));
    let chosen: Vec<_> = named.filter(|(name, _)| args.only.as_ref().is_none_or(|only| name.contains(only))).collect();
    if let Some(only) = args.only.as_ref().filter(|_| chosen.is_empty()) {
        bail!("--only {only}: no case of {} has a name like that", path.display());
    }

    let engine = common.engine()?;
    let runner = Runner { engine: &engine, folder, args };
    let progress = Progress::new();
    let mut reports = Vec::new();
    for (index, (name, case)) in chosen.iter().enumerate() {
        let Some(dtype) = format.dtype(case, args) else { continue };
        progress.stage_at(index as f64 / chosen.len() as f64, name.clone());
        reports.push(CaseReport::new(name.clone(), dtype, format.check(&runner, case)));
    }
    drop(progress);

    let count = |status: Status| reports.iter().filter(|case| case.status == status).count();
    let report = Report {
        adapter: engine.adapter_info().name.clone(),
        passed: count(Status::Pass),
        failed: count(Status::Fail),
        refused: count(Status::Refused),
        errored: count(Status::Error),
        cases: reports,
    };
    if common.json {
        output::print_json(&report)?
    } else {
        output::print(&report.text())?
    }
    Ok(report.failed + report.errored == 0)
}

fn read_manifest(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path)?;
    Ok(serde_json::from_slice(&bytes)?)
}

impl CaseReport {
    fn new(name: String, dtype: String, checked: Result<Compared>) -> Self {
        let mut errors = BTreeMap::new();
        let (status, message) = match checked {
            Ok(compared) => {
                let wrong = compared.iter().filter(|(_, comparison)| !comparison.passed());
                let wrong: Vec<_> = wrong.map(|(output, comparison)| format!("{output}: {comparison}")).collect();
                errors = compared.into_iter().map(|(output, comparison)| (output, comparison.max_abs_err)).collect();
                if wrong.is_empty() { (Status::Pass, None) } else { (Status::Fail, Some(wrong.join("; "))) }
            }
            Err(error) => {
                let unsupported = matches!(error.downcast_ref(), Some(tilewise::Error::Unsupported { .. }));
                let refused = unsupported || error.is::<Refused>();
                (if refused { Status::Refused } else { Status::Error }, Some(output::error_text(&error)))
            }
        };
        Self { name, status, dtype, errors, message }
    }
}

impl Report {
    /// Cases that a line names; JSON has them all.
    const NAMES: usize = 3;

    fn text(&self) -> String {
        let mut text = self.refusals();
        for CaseReport { name, status, message, .. } in &self.cases {
            let status = match status {
                Status::Pass | Status::Refused => continue,
                Status::Fail => "FAIL",
                Status::Error => "ERROR",
            };
            text += &format!("{status:<8} {}: {}\n", printable(name), printable(first_line(message.as_deref())));
        }
        let Self { passed, failed, refused, errored, .. } = self;
        text += &format!("{passed} passed, {failed} failed, {refused} refused, {errored} errored\n");
        text
    }

    /// A line for each reason that cases were refused for: there may be many of one.
    fn refusals(&self) -> String {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for case in self.cases.iter().filter(|case| case.status == Status::Refused) {
            let reason = first_line(case.message.as_deref());
            match reasons.iter_mut().find(|(other, _)| *other == reason) {
                Some((_, names)) => names.push(&case.name),
                None => reasons.push((reason, vec![&case.name])),
            }
        }
        let line = |(reason, names): (&str, Vec<&str>)| {
            let few = names.iter().take(Self::NAMES).copied().collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(Self::NAMES);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("refused  {}: {}{more}\n", printable(reason), printable(&few))
        };
        reasons.into_iter().map(line).collect()
    }
}

/// A line for each case: JSON has the rest.
fn first_line(message: Option<&str>) -> &str {
    message.and_then(|message| message.lines().next()).unwrap_or_default()
}

/// A tensor as a manifest describes it.
#[derive(Debug, Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<usize>,
}

type Descriptions = BTreeMap<String, Described>;

/// Whether a file holds the tensors that the manifest says, as it says.
fn check_tensors(tensors: &Tensors<'_>, inputs: &Descriptions, outputs: &Descriptions) -> Result<()> {
    for (name, Described { dtype, shape }) in inputs.iter().chain(outputs) {
        let view = tensors.get(name)?;
        let (held_dtype, held) = (dtype_name(view.dtype()), view.shape());
        ensure!(
            *dtype == held_dtype && shape == held,
            "{name} is {held_dtype} {held:?} in the file, {dtype} {shape:?} in the manifest"
        );
    }
    Ok(())
}

/// What the file holds beside the tensors that the manifest describes: nobody knows what it would change.
fn undescribed(tensors: &Tensors<'_>, inputs: &Descriptions, outputs: &Descriptions) -> Vec<String> {
    let names = tensors.names().into_iter().filter(|&name| !inputs.contains_key(name) && !outputs.contains_key(name));
    names.map(|name| format!("tensor {name}, which the manifest doesn't describe")).collect()
}

/// Whether a tensor is of the shape that others ask for.
fn check_shape(tensors: &Tensors<'_>, name: &str, shape: &[usize]) -> Result<()> {
    let held = tensors.get(name)?;
    ensure!(held.shape() == shape, "{name} is {:?}; accepted: {shape:?}, by the case's dims", held.shape());
    Ok(())
}

impl Runner<'_> {
    /// Opens a case's file, which must be inside the folder.
    fn open(&self, file: &str) -> Result<TensorFile> {
        let relative = PathBuf::from(file);
        let inside = relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        ensure!(inside, "file {file:?}; accepted: a path within the folder of cases");
        TensorFile::read(&self.folder.join(relative)).with_context(|| file.to_string())
    }

    /// Attention into outputs that were NaN before.
    fn attention(&self, inputs: &DeviceInputs, options: &Attention) -> Result<AttentionOutput> {
        let inputs = inputs.inputs();
        let plan = self.engine.plan(&inputs.problem(options)?)?;
        run_over_nans(self.engine, &plan, inputs)
    }
}

/// Compares; a NaN is wrong even where one is expected.
fn compare_no_nan(got: &[f32], expected: &[f64], tolerance: f64) -> Comparison {
    let mut comparison = compare(got, expected, tolerance);
    let nans = got.iter().filter(|x| x.is_nan()).count();
    if nans > 0 {
        comparison.max_abs_err = f64::INFINITY;
        comparison.mismatches = comparison.mismatches.max(nans);
    }
    comparison
}
