//! `tilewise run`: attention of the q, k and v in a file.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::Serialize;
use tilewise::reference::{Comparison, compare};
use tilewise::{Bindings, DType, Dims, Engine, Inputs, Path, Plan, Problem, Purpose, Storage, Tensor};

use crate::args::{AttentionArgs, Common, Options};
use crate::measure::{self, Progress, bytes, seconds};
use crate::output::{self, OutFile};
use crate::tensors::{self, Numbers, TensorFile, Tensors};

/// Tensors that change what attention means. Refused by name until they are built: to ignore one would be a wrong answer.
const NOT_BUILT: [&str; 18] = [
    "mask",
    "attn_mask",
    "attention_mask",
    "bias",
    "attn_bias",
    "alibi_slopes",
    "sinks",
    "kv_lens",
    "q_lens",
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seqlens_kv",
    "block_table",
    "past_key",
    "past_value",
    "nonpad_kv_seqlen",
    "position_ids",
];

/// An error of more than this share of the largest |o| isn't rounding.
const MISSED: f64 = 1e-2;
/// An error of no more than this share is.
const REPRODUCED: f64 = 1e-4;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// File of tensors q, k and v: (batch, heads, length, dim), or (heads, length, dim) for batch 1; F32, F16 or BF16. The error
    /// is shown if it also holds o or lse. A `scale` in its metadata is used unless --scale is given
    file: PathBuf,
    #[command(flatten)]
    attention: AttentionArgs,
    /// In which order the file's bytes lie
    #[arg(long, value_enum, default_value_t)]
    layout: LayoutArg,
    /// Write o and lse to a safetensors file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// As the header says, unless the file's own o is reproduced in the order bshd and missed in the other
    #[default]
    Auto,
    /// As the header says: (batch, heads, length, dim)
    Bhsd,
    /// (batch, length, heads, dim), whatever order of axes the header gives: a transposed array saved without its copy
    Bshd,
}

/// In which order elements lie, their sizes being named (batch, heads, length, dim).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Layout {
    Bhsd,
    Bshd,
}

/// The order of axes that takes (batch, length, heads, dim) to (batch, heads, length, dim), and back.
const SWAPPED: [usize; 4] = [0, 2, 1, 3];

/// What the file holds.
struct Input {
    shapes: [[usize; 4]; 3],
    qkv: [Numbers; 3],
    o: Option<Vec<f64>>,
    lse: Option<Vec<f64>>,
}

/// One computation, in one layout. Its device memory is free again.
struct Done {
    layout: Layout,
    /// (batch, q_heads, q_len, value_dim)
    o_out: Vec<f32>,
    /// (batch, q_heads, q_len)
    lse_out: Vec<f32>,
    seconds: f64,
    bytes: Bytes,
    o: Option<Comparison>,
    lse: Option<Comparison>,
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

#[derive(Debug, Serialize)]
struct Report {
    adapter: String,
    driver: String,
    kernel: String,
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    causal: bool,
    scale: f32,
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
    let tensors = file.tensors().with_context(|| name.to_string())?;
    let (problem, input) = open(args, &tensors).with_context(|| name.to_string())?;

    let engine = common.engine()?;
    let plan = engine.plan_by(path, &problem)?;
    let progress = Progress::new();
    progress.stage("attention");
    let first = if args.layout == LayoutArg::Bshd { Layout::Bshd } else { Layout::Bhsd };
    let mut done = Done::compute(&engine, &plan, &input, first, &progress)?;
    let mut layout_note = None;
    if args.layout == LayoutArg::Auto && done.share_of_o(&input).is_some_and(|share| share > MISSED) {
        let other = Done::compute(&engine, &plan, &input, Layout::Bshd, &progress)?;
        if other.share_of_o(&input).is_some_and(|share| share <= REPRODUCED) {
            layout_note = Some(format!(
                "read as (batch, length, heads, dim) in memory: so the file's o is reproduced (max error {}), in the order of its \
                 header it is not ({}); --layout bhsd or bshd decides",
                output::figure(error_of(&other.o)),
                output::figure(error_of(&done.o)),
            ));
            done = other;
        }
    }
    drop(progress);

    if let Some(out) = &out {
        out.write(&done.safetensors(&problem)?)?;
    }
    if let Some(note) = &layout_note {
        eprintln!("note: {}: {}", output::printable(&name.to_string()), output::printable(note));
    }
    let report = Report::new(args, &engine, &plan, &input, &done, layout_note);
    if common.json { output::print_json(&report) } else { output::print(&report.text(args, &done)) }
}

fn error_of(comparison: &Option<Comparison>) -> f64 {
    comparison.as_ref().map_or(f64::NAN, |comparison| comparison.max_abs_err)
}

/// Takes what is needed from the file, and checks that it fits together.
fn open(args: &RunArgs, tensors: &Tensors<'_>) -> Result<(Problem, Input)> {
    let [q, k, v] = [tensors.get("q")?, tensors.get("k")?, tensors.get("v")?];
    let unbuilt: Vec<_> = tensors.names().into_iter().filter(|name| NOT_BUILT.contains(name)).collect();
    ensure!(
        unbuilt.is_empty(),
        "it holds {}: not built yet, and attention without is something else",
        unbuilt.join(", ")
    );
    let shapes = [shape("q", &q)?, shape("k", &k)?, shape("v", &v)?];
    let [[batch, q_heads, q_len, head_dim], [k_batch, kv_heads, kv_len, k_dim], [v_batch, v_heads, v_len, value_dim]] =
        shapes;
    ensure!(
        k_batch == batch && v_batch == batch && v_heads == kv_heads && v_len == kv_len && k_dim == head_dim,
        "q {:?}, k {:?}, v {:?} don't fit together; accepted: one batch; k and v of the same heads and length; q and k of the \
         same dim",
        shapes[0],
        shapes[1],
        shapes[2]
    );
    let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut qkv = [Numbers::of("q", &q)?, Numbers::of("k", &k)?, Numbers::of("v", &v)?];
    if args.attention.path()? == Some(Path::Naive) {
        qkv = qkv.map(|numbers| numbers.stored(DType::F32));
    }
    let [q_dtype, k_dtype, v_dtype] = qkv.each_ref().map(Numbers::dtype);
    // o is told and written in f32, whatever the inputs are stored in.
    let storage = Storage { q: q_dtype, k: k_dtype, v: v_dtype, o: DType::F32 };
    let problem = Problem::new(dims, Options { scale: scale(args, tensors)?, ..args.attention.options }.attention())?
        .storage(storage)?;

    let result = |name: &str, shape: &[usize]| match tensors.find(name) {
        None => Ok(None),
        // The axis of a batch of 1 may be left out, as with q.
        Some(view) if view.shape() == shape || (batch == 1 && view.shape() == &shape[1..]) => {
            tensors::expected(name, &view).map(Some)
        }
        Some(view) => bail!("{name} is {:?}; accepted: {shape:?}, by the shapes of q, k and v", view.shape()),
    };
    let o = result("o", &[batch, q_heads, q_len, value_dim])?;
    let lse = result("lse", &[batch, q_heads, q_len])?;
    if !args.attention.options.causal
        && let Some(mask) = tensors.metadata("mask").filter(|mask| !matches!(*mask, "" | "none" | "full"))
    {
        let hint = if mask == "causal" { "; --causal applies it" } else { "" };
        let (file, mask) = (args.file.display(), output::printable(mask));
        eprintln!("note: {file}: its metadata says mask: {mask}, which isn't applied{hint}");
    }
    Ok((problem, Input { shapes, qkv, o, lse }))
}

fn shape(name: &str, view: &TensorView<'_>) -> Result<[usize; 4]> {
    match *view.shape() {
        [batch, heads, len, dim] => Ok([batch, heads, len, dim]),
        [heads, len, dim] => Ok([1, heads, len, dim]),
        ref other => {
            bail!("{name} is {other:?}; accepted: (batch, heads, length, dim), or (heads, length, dim) for batch 1")
        }
    }
}

/// The scale that was asked for, or else the file's own.
fn scale(args: &RunArgs, tensors: &Tensors<'_>) -> Result<Option<f32>> {
    let (None, Some(text)) = (args.attention.options.scale, tensors.metadata("scale")) else {
        return Ok(args.attention.options.scale);
    };
    let scale = text.trim().parse();
    scale.map(Some).with_context(|| format!("its metadata says scale: {text:?}, no number; --scale overrides it"))
}

impl Input {
    fn upload(&self, engine: &Engine, layout: Layout) -> Result<[Tensor; 3]> {
        let upload = |index: usize| -> tilewise::Result<Tensor> {
            let shape = self.shapes[index];
            match layout {
                Layout::Bhsd => self.qkv[index].upload(engine, &shape),
                Layout::Bshd => self.qkv[index].upload(engine, &SWAPPED.map(|axis| shape[axis]))?.permute(&SWAPPED),
            }
        };
        Ok([upload(0)?, upload(1)?, upload(2)?])
    }
}

impl Done {
    fn compute(engine: &Engine, plan: &Plan, input: &Input, layout: Layout, progress: &Progress) -> Result<Self> {
        engine.wait()?;
        engine.reset_peak();
        let [q, k, v] = input.upload(engine, layout)?;
        let output = engine.alloc_output(plan)?;
        let workspace = engine.alloc_workspace(plan)?;
        let inputs = Inputs::new(&q, &k, &v);
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

        let (o_out, lse_out) = (output.o.read()?, output.lse.read()?);
        // No tolerance: these are figures to be told, not judged.
        let o = match &input.o {
            Some(expected) if layout == Layout::Bshd => {
                Some(compare(&output.o.permute(&SWAPPED)?.read()?, expected, f64::INFINITY))
            }
            expected => expected.as_ref().map(|expected| compare(&o_out, expected, f64::INFINITY)),
        };
        let lse = input.lse.as_ref().map(|expected| compare(&lse_out, expected, f64::INFINITY));
        Ok(Self { layout, o_out, lse_out, seconds, bytes, o, lse })
    }

    /// The error of o as a share of the largest element, if the file holds one.
    fn share_of_o(&self, input: &Input) -> Option<f64> {
        let largest = input.o.as_ref()?.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
        let error = self.o.as_ref()?.max_abs_err;
        Some(if error == 0.0 { 0.0 } else { error / largest })
    }

    /// o and lse as a file.
    fn safetensors(&self, problem: &Problem) -> Result<Vec<u8>> {
        let Dims { batch, q_heads, q_len, value_dim, .. } = problem.dims();
        let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let (o, lse) = (bytes(&self.o_out), bytes(&self.lse_out));
        let views = [
            ("o", TensorView::new(Dtype::F32, vec![batch, q_heads, q_len, value_dim], &o)?),
            ("lse", TensorView::new(Dtype::F32, vec![batch, q_heads, q_len], &lse)?),
        ];
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
        let naive = args.attention.path().ok().flatten() == Some(Path::Naive);
        let info = engine.adapter_info();
        let errors = [("max_abs_err", &done.o), ("max_abs_err_lse", &done.lse)];
        // Infinite, where an infinity or a NaN is missed, is null in JSON.
        let errors = errors.into_iter().filter_map(|(key, comparison)| {
            comparison.as_ref().map(|comparison| (key.to_string(), comparison.max_abs_err.into()))
        });
        Self {
            adapter: info.name.clone(),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
            kernel: plan.kernels().join(" + "),
            q: input.shapes[0],
            k: input.shapes[1],
            v: input.shapes[2],
            causal: args.attention.options.causal,
            scale: plan.problem().softmax_scale(),
            layout: done.layout,
            layout_note,
            flops: plan.problem().flops(),
            seconds: done.seconds,
            tiled_bytes: (!naive).then_some(done.bytes),
            naive_bytes: naive.then_some(done.bytes),
            errors: errors.collect(),
            out: args.out.clone(),
        }
    }

    fn text(&self, args: &RunArgs, done: &Done) -> String {
        let Bytes { inputs, outputs, workspace, peak } = done.bytes;
        let mut table = output::table(["", ""]);
        table.add_row(["adapter", &format!("{} ({})", self.adapter, self.driver)]);
        table.add_row(["kernel", &self.kernel]);
        table.add_row(["q, k, v", &format!("{:?}, {:?}, {:?}", self.q, self.k, self.v)]);
        table.add_row(["options", &format!("{}, scale {}", args.attention.options.words(), self.scale)]);
        let gflops = measure::digits(self.flops as f64 / 1e9 / self.seconds);
        table.add_row(["time", &format!("{} ({gflops} GFLOP/s)", seconds(self.seconds))]);
        table.add_row(["inputs, outputs", &format!("{}, {}", bytes(inputs), bytes(outputs))]);
        table.add_row(["workspace", &bytes(workspace)]);
        table.add_row(["peak", &bytes(peak)]);
        for (name, comparison) in [("o", &done.o), ("lse", &done.lse)] {
            if let Some(comparison) = comparison {
                let text = format!(
                    "{}, mean {}",
                    output::figure(comparison.max_abs_err),
                    output::figure(comparison.mean_abs_err)
                );
                table.add_row([&format!("max error of {name}"), &text]);
            }
        }
        if let Some(out) = &self.out {
            table.add_row(["written", &out.display().to_string()]);
        }
        format!("{table}\n")
    }
}
