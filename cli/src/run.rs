//! `tilewise run`: attention of the q, k and v in a file.

mod input;
mod layout;
mod names;
mod verdict;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Args;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::Serialize;
use tilewise::reference::{Comparison, compare};
use tilewise::{Bindings, DType, Engine, Path, Plan, Problem, Purpose};

use crate::args::{Align, AttentionArgs, Common, Window};
use crate::measure::{self, Progress, bytes, seconds};
use crate::output::{self, OutFile};
use crate::tensors::{TensorFile, precision};
use input::Input;
use layout::{Layout, LayoutArg};
use verdict::{Judged, Verdict};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Safetensors file of `q`, `k` and `v`, and of masks, biases and the like, whose names --help lists
    #[arg(long_help = names::HELP)]
    file: PathBuf,
    /// Leave these tensors of the file out, as if it didn't hold them
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    ignore: Vec<String>,
    #[command(flatten)]
    attention: AttentionArgs,
    /// What the four sizes are that the file's header gives of q, k, v and o [default: bhsd]
    #[arg(long, value_enum)]
    axes: Option<Layout>,
    /// In which order the file's numbers lie, if it isn't that of --axes
    #[arg(long, value_enum, default_value_t)]
    layout: LayoutArg,
    /// Write o, with the axes of q, and lse to a safetensors file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// One computation, in one layout. Its device memory is free again.
struct Done {
    layout: Layout,
    /// In the order of the file's axes.
    o_out: Vec<f32>,
    /// (batch, q_heads, q_len), or (q_heads, tokens)
    lse_out: Vec<f32>,
    seconds: f64,
    bytes: Bytes,
    o: Option<Comparison>,
    lse: Option<Comparison>,
    /// What the error of o means.
    judged: Option<Judged>,
}

/// Bytes of device memory at the peak of the run, as the engine counted them.
#[derive(Debug, Clone, Copy, Serialize)]
struct Bytes {
    inputs: u64,
    outputs: u64,
    workspace: u64,
    /// With the uniforms.
    peak: u64,
}

/// How each tensor is stored on the device.
#[derive(Debug, Serialize)]
struct Types {
    q: &'static str,
    k: &'static str,
    v: &'static str,
    o: &'static str,
}

#[derive(Debug, Serialize)]
struct Report {
    adapter: String,
    driver: String,
    kernel: String,
    q: Vec<usize>,
    k: Vec<usize>,
    v: Vec<usize>,
    dtype: Types,
    causal: bool,
    align: Align,
    window: Option<Window>,
    scale: f32,
    softcap: Option<f32>,
    /// What the file holds beside q, k and v and was used.
    others: Vec<String>,
    /// What it holds and was not used.
    ignored: Vec<String>,
    /// Of the file's header. The shapes above are (batch, heads, length, dim) whatever it is.
    axes: Layout,
    /// Of the file's numbers.
    layout: Layout,
    #[serde(skip_serializing_if = "Option::is_none")]
    layout_note: Option<String>,
    flops: u64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tiled_bytes: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    naive_bytes: Option<Bytes>,
    #[serde(flatten)]
    errors: serde_json::Map<String, serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &RunArgs, common: &Common) -> Result<()> {
    let path = args.attention.path()?.unwrap_or_default();
    let out = args.out.as_deref().map(OutFile::check).transpose()?;
    let name = args.file.display();
    let file = TensorFile::read(&args.file).with_context(|| name.to_string())?;
    let mut tensors = file.tensors().with_context(|| name.to_string())?;
    tensors.ignore(&args.ignore).with_context(|| format!("{name}: --ignore"))?;
    let (problem, input) = input::open(args, &tensors).with_context(|| name.to_string())?;

    let engine = common.engine()?;
    let plan = engine.plan_by(path, &problem)?;
    let progress = Progress::new();
    progress.stage("attention");
    let first = match args.layout {
        LayoutArg::Auto => input.axes,
        LayoutArg::Bhsd => Layout::Bhsd,
        LayoutArg::Bshd => Layout::Bshd,
    };
    let mut done = Done::compute(&engine, &plan, &input, first, &progress)?;
    let mut layout_note = None;
    let missed = done.judged.is_some_and(|judged| judged.verdict == Verdict::Missed);
    if args.layout == LayoutArg::Auto && first != Layout::Thd && missed {
        let other = Done::compute(&engine, &plan, &input, first.other(), &progress)?;
        if other.is_reproduced() {
            layout_note = Some(format!(
                "read as {} in memory: so the file's o is reproduced (max error {}), in the order of its header it is not ({}); \
                 --layout bhsd or bshd decides",
                first.other().axes(),
                output::figure(error_of(&other.o)),
                output::figure(error_of(&done.o)),
            ));
            done = other;
        }
    }
    drop(progress);

    if let Some(out) = &out {
        out.write(&done.safetensors(&problem, &input)?)?;
    }
    if let Some(note) = &layout_note {
        eprintln!("note: {}: {}", output::printable(&name.to_string()), output::printable(note));
    }
    if args.axes.is_none() && input.looks_swapped && !done.is_reproduced() {
        let (name, [q, ..]) = (output::printable(&name.to_string()), &input.shapes);
        eprintln!(
            "note: {name}: read as {}, q has {} heads of length {}; --axes bshd reads {}",
            input.axes.axes(),
            q[1],
            q[2],
            input.axes.other().axes()
        );
    }
    let report = Report::new(args, &engine, &plan, &input, &done, layout_note);
    if common.json { output::print_json(&report) } else { output::print(&report.text(args, &done)) }
}

fn error_of(comparison: &Option<Comparison>) -> f64 {
    comparison.as_ref().map_or(f64::NAN, |comparison| comparison.max_abs_err)
}

impl Done {
    fn compute(engine: &Engine, plan: &Plan, input: &Input, layout: Layout, progress: &Progress) -> Result<Self> {
        engine.wait()?;
        engine.reset_peak();
        let uploaded = input.upload(engine, layout)?;
        let output = engine.alloc_output(plan)?;
        let workspace = engine.alloc_workspace(plan)?;
        let inputs = uploaded.inputs();
        let bindings = Bindings { inputs, o: &output.o, lse: &output.lse, workspace: workspace.as_ref() };
        // Compiles the kernels: done once, and no part of what a call takes.
        let mut encoder =
            measure::caught(engine.device(), || engine.device().create_command_encoder(&Default::default()))?;
        plan.record(&mut encoder, &bindings)?;
        drop(encoder);

        let start = Instant::now();
        engine.run(plan, &bindings, |part| {
            progress.done(part);
            ControlFlow::Continue(())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        let memory = engine.memory();
        let bytes = Bytes {
            inputs: memory.peak_bytes_for(Purpose::Input),
            outputs: memory.peak_bytes_for(Purpose::Output),
            workspace: memory.peak_bytes_for(Purpose::Workspace),
            peak: memory.peak_bytes(),
        };

        let (o_out, lse_out) = (layout::read(&output.o, input.axes)?, output.lse.read()?);
        // No tolerance: the errors are figures to be told.
        let (mut o, mut judged) = (None, None);
        if let Some(expected) = &input.o {
            let comparison = compare(&layout::read(&output.o, layout)?, &expected.numbers, f64::INFINITY);
            let rounding = precision(plan.problem().stored().o).unit_roundoff().max(expected.rounding);
            judged = Some(Judged::new(comparison.max_abs_err, &expected.numbers, rounding));
            o = Some(comparison);
        }
        let lse = input.lse.as_ref().map(|expected| compare(&lse_out, &expected.numbers, f64::INFINITY));
        Ok(Self { layout, o_out, lse_out, seconds, bytes, o, lse, judged })
    }

    fn is_reproduced(&self) -> bool {
        self.judged.is_some_and(|judged| judged.verdict == Verdict::Reproduced)
    }

    /// o, in its own type, and lse as a file.
    fn safetensors(&self, problem: &Problem, input: &Input) -> Result<Vec<u8>> {
        fn bytes<const N: usize>(numbers: &[f32], encode: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
            numbers.iter().flat_map(|&x| encode(x)).collect()
        }
        let (dtype, o) = match problem.stored().o {
            DType::F16 => (Dtype::F16, bytes(&self.o_out, |x| f16::from_f32(x).to_le_bytes())),
            DType::Bf16 => (Dtype::BF16, bytes(&self.o_out, |x| bf16::from_f32(x).to_le_bytes())),
            DType::F32 | DType::U32 => (Dtype::F32, bytes(&self.o_out, f32::to_le_bytes)),
        };
        let lse = bytes(&self.lse_out, f32::to_le_bytes);
        let [o_shape, lse_shape] = input.result_shapes.clone();
        let views =
            [("o", TensorView::new(dtype, o_shape, &o)?), ("lse", TensorView::new(Dtype::F32, lse_shape, &lse)?)];
        Ok(safetensors::serialize(views, None::<HashMap<String, String>>)?)
    }
}

impl Report {
    fn new(
        args: &RunArgs,
        engine: &Engine,
        plan: &Plan,
        input: &Input,
        done: &Done,
        layout_note: Option<String>,
    ) -> Self {
        let (options, stored, [q, k, v]) = (args.attention.options, plan.problem().stored(), &input.shapes);
        let naive = args.attention.path().ok().flatten() == Some(Path::Naive);
        let info = engine.adapter_info();
        let errors = [("max_abs_err", &done.o), ("max_abs_err_lse", &done.lse)];
        // Infinite, where an infinity or a NaN is missed, is null in JSON.
        let mut errors: serde_json::Map<_, _> = errors
            .into_iter()
            .filter_map(|(key, comparison)| Some((key.to_string(), comparison.as_ref()?.max_abs_err.into())))
            .collect();
        if let Some(Judged { share, verdict }) = done.judged {
            errors.insert("max_abs_err_share".to_string(), share.into());
            errors.insert("verdict".to_string(), serde_json::json!(verdict));
        }
        Self {
            adapter: info.name.clone(),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
            kernel: plan.kernels().join(" + "),
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            dtype: Types { q: stored.q.name(), k: stored.k.name(), v: stored.v.name(), o: stored.o.name() },
            causal: options.causal,
            align: options.align,
            window: options.window,
            scale: plan.problem().softmax_scale(),
            softcap: options.softcap,
            others: input.others.clone(),
            ignored: input.ignored.clone(),
            axes: input.axes,
            layout: done.layout,
            layout_note,
            flops: plan.problem().flops(),
            seconds: done.seconds,
            tiled_bytes: (!naive).then_some(done.bytes),
            naive_bytes: naive.then_some(done.bytes),
            errors,
            out: args.out.clone(),
        }
    }

    fn text(&self, args: &RunArgs, done: &Done) -> String {
        let Bytes { inputs, outputs, workspace, peak } = done.bytes;
        let mut table = output::table(["", ""]);
        table.add_row(["adapter", &format!("{} ({})", self.adapter, self.driver)]);
        table.add_row(["kernel", &self.kernel]);
        // Of whatever axes the file's are.
        let axes = if self.layout == Layout::Thd { self.layout } else { Layout::Bhsd };
        table.add_row(["q, k, v", &format!("{:?}, {:?}, {:?}: {}", self.q, self.k, self.v, axes.axes())]);
        let Types { q, k, v, o } = self.dtype;
        table.add_row(["stored in", &format!("{q}, {k}, {v}; o in {o}")]);
        let mut options = vec![args.attention.options.words()];
        options.extend(self.others.iter().cloned());
        options.push(format!("scale {}", self.scale));
        table.add_row(["options", &options.join(", ")]);
        if !self.ignored.is_empty() {
            table.add_row(["ignored", &self.ignored.join(", ")]);
        }
        let gflops = measure::digits(self.flops as f64 / 1e9 / self.seconds);
        table.add_row(["time", &format!("{} ({gflops} GFLOP/s)", seconds(self.seconds))]);
        table.add_row(["inputs, outputs", &format!("{}, {}", bytes(inputs), bytes(outputs))]);
        table.add_row(["workspace", &bytes(workspace)]);
        table.add_row(["peak", &bytes(peak)]);
        for (name, comparison) in [("o", &done.o), ("lse", &done.lse)] {
            if let Some(comparison) = comparison {
                let [max, mean] = [comparison.max_abs_err, comparison.mean_abs_err].map(output::figure);
                let text = match done.judged.filter(|_| name == "o") {
                    Some(Judged { share, verdict }) => {
                        let share = output::figure(share);
                        format!("{max} ({share} of the largest in o), mean {mean}: {}", verdict.words())
                    }
                    None => format!("{max}, mean {mean}"),
                };
                table.add_row([&format!("max error of {name}"), &text]);
            }
        }
        if let Some(out) = &self.out {
            table.add_row(["written", &out.display().to_string()]);
        }
        format!("{table}\n")
    }
}
