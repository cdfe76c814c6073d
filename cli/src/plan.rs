//! `tilewise plan`: what a problem costs, tiled and naive, and its gradients, without running it.

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use tilewise::{BackwardPlan, DeviceFacts, Dims, Error, Path, Plan, Problem, Storage};

use crate::args::{AttentionArgs, Common, Dtype, Window};
use crate::measure::bytes;
use crate::output;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Query rows
    #[arg(long, value_name = "N", default_value_t = 4096)]
    q_len: usize,
    /// Keys [default: as many as query rows]
    #[arg(long, value_name = "N")]
    kv_len: Option<usize>,
    /// Independent sequences
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Query heads
    #[arg(long, visible_alias = "q-heads", value_name = "N", default_value_t = 1)]
    heads: usize,
    /// Key/value heads, which query heads share in groups [default: as many as query heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Width of a query and of a key
    #[arg(long, value_name = "N", default_value_t = 64)]
    head_dim: usize,
    /// Width of a value [default: the head dim]
    #[arg(long, value_name = "N")]
    value_dim: Option<usize>,
    #[command(flatten)]
    attention: AttentionArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    /// What it is planned for.
    device: String,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    value_dim: usize,
    /// Of q, k, v and o.
    dtype: Dtype,
    causal: bool,
    window: Option<Window>,
    scale: f32,
    softcap: Option<f32>,
    flops: u64,
    visible_pairs: u64,
    input_bytes: u64,
    output_bytes: u64,
    /// What naive attention keeps besides inputs and outputs.
    naive_bytes: u64,
    /// Null where it wasn't asked for.
    tiled: Option<Way>,
    naive: Option<Way>,
    /// Of the tiled path. Its bytes are those of inputs, outputs, their gradients, lse's among them, and the workspace.
    gradients: Option<Way>,
}

/// One way to compute it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Way {
    Fits { fits: bool, workspace_bytes: u64, total_bytes: u64, kernels: Vec<String>, explain: String },
    DoesNotFit { fits: bool, reason: String, needed: u64, available: u64 },
    NotAvailable { fits: bool, reason: String },
}

impl Way {
    /// `asked_for`: whether the path was named, so that a problem it isn't there for is an error.
    fn new(problem: &Problem, facts: &DeviceFacts, path: Path, asked_for: bool) -> Result<Self> {
        match Plan::new(problem, facts, path) {
            Ok(plan) => Ok(Self::Fits {
                fits: true,
                workspace_bytes: plan.workspace_bytes(),
                total_bytes: problem
                    .input_bytes()
                    .saturating_add(problem.output_bytes())
                    .saturating_add(plan.workspace_bytes()),
                kernels: plan.kernels(),
                explain: explain(&plan, path),
            }),
            Err(Error::Unsupported { what, needed, available }) => {
                Ok(Self::DoesNotFit { fits: false, reason: what, needed, available })
            }
            Err(Error::Invalid(reason)) if path == Path::Naive && !asked_for => {
                Ok(Self::NotAvailable { fits: false, reason })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The gradients of the tiled path.
    fn gradients(problem: &Problem, facts: &DeviceFacts) -> Result<Self> {
        match BackwardPlan::new(problem, facts) {
            Ok(plan) => Ok(Self::Fits {
                fits: true,
                workspace_bytes: plan.workspace_bytes(),
                total_bytes: problem
                    .input_bytes()
                    .saturating_add(problem.output_bytes())
                    .saturating_mul(2)
                    .saturating_add(plan.workspace_bytes()),
                kernels: plan.kernels(),
                explain: without_workspace(&plan.explain()),
            }),
            Err(Error::Unsupported { what, needed, available }) => {
                Ok(Self::DoesNotFit { fits: false, reason: what, needed, available })
            }
            Err(error) => Err(error.into()),
        }
    }

    fn add_row(&self, name: &str, table: &mut comfy_table::Table) {
        match self {
            Self::Fits { workspace_bytes, total_bytes, .. } => {
                table.add_row([name, &bytes(*workspace_bytes), &bytes(*total_bytes), "fits"]);
            }
            Self::DoesNotFit { .. } | Self::NotAvailable { .. } => {
                table.add_row([name, "", "", &self.refusal().unwrap_or_default()]);
            }
        }
    }

    /// Why it can't be computed like this, if so.
    fn refusal(&self) -> Option<String> {
        match self {
            Self::Fits { .. } => None,
            Self::DoesNotFit { reason, needed, available, .. } => {
                let [needed, available] = output::amounts(reason, *needed, *available);
                Some(format!("does not fit: {reason}: needed {needed}, available {available}"))
            }
            Self::NotAvailable { reason, .. } => Some(format!("not available: {reason}")),
        }
    }

    fn explain(&self) -> Option<&str> {
        match self {
            Self::Fits { explain, .. } => Some(explain),
            Self::DoesNotFit { .. } | Self::NotAvailable { .. } => None,
        }
    }
}

/// What runs and why, without the bytes that the naive path would need: it may not be there for the problem at all.
pub(crate) fn explain(plan: &Plan, path: Path) -> String {
    match path {
        Path::Auto => without_workspace(&plan.explain()),
        Path::Naive => {
            let scores = bytes(plan.workspace_bytes());
            format!("{}\nthree passes, {scores} of scores in device memory", plan.kernels().join("\n"))
        }
    }
}

/// The bytes of the workspace stand elsewhere.
fn without_workspace(explain: &str) -> String {
    explain.lines().filter(|line| !line.starts_with("workspace ")).collect::<Vec<_>>().join("\n")
}

/// An error, besides what it prints, if the path asked for can't compute it; that is the tiled one unless another was named.
pub(crate) fn run(args: &PlanArgs, common: &Common) -> Result<()> {
    let path = args.attention.path()?;
    let dims = Dims {
        batch: args.batch,
        q_heads: args.heads,
        kv_heads: args.kv_heads.unwrap_or(args.heads),
        q_len: args.q_len,
        kv_len: args.kv_len.unwrap_or(args.q_len),
        head_dim: args.head_dim,
        value_dim: args.value_dim.unwrap_or(args.head_dim),
    };
    let (options, dtype) = (args.attention.options, args.attention.dtype.unwrap_or_default());
    let problem = Problem::new(dims, options.attention())?.storage(Storage::all(dtype.stored()))?;
    let (device, facts) = if common.wants_adapter() {
        let engine = common.engine()?;
        (engine.adapter_info().name.clone(), engine.facts())
    } else {
        ("any WebGPU device, at wgpu's default limits".to_string(), DeviceFacts::default())
    };
    let way = |of: Path| match path {
        None => Way::new(&problem, &facts, of, false).map(Some),
        Some(path) if path == of => Way::new(&problem, &facts, of, true).map(Some),
        Some(_) => Ok(None),
    };
    let report = Report {
        device,
        batch: dims.batch,
        heads: dims.q_heads,
        kv_heads: dims.kv_heads,
        q_len: dims.q_len,
        kv_len: dims.kv_len,
        head_dim: dims.head_dim,
        value_dim: dims.value_dim,
        dtype,
        causal: options.causal,
        window: options.window,
        scale: problem.softmax_scale(),
        softcap: options.softcap,
        flops: problem.flops(),
        visible_pairs: problem.visible_pairs(),
        input_bytes: problem.input_bytes(),
        output_bytes: problem.output_bytes(),
        naive_bytes: problem.score_bytes(),
        tiled: way(Path::Auto)?,
        naive: way(Path::Naive)?,
        gradients: (path != Some(Path::Naive)).then(|| Way::gradients(&problem, &facts)).transpose()?,
    };
    if common.json {
        output::print_json(&report)?
    } else {
        output::print(&report.text(&options.words()))?
    }
    let (name, way) = if path == Some(Path::Naive) { ("naive", &report.naive) } else { ("tiled", &report.tiled) };
    if let Some(refusal) = way.as_ref().and_then(Way::refusal) {
        let hint = if common.wants_adapter() { "" } else { "; --limits adapter plans for this machine's adapter" };
        bail!("{name} attention {refusal}{hint}");
    }
    Ok(())
}

impl Report {
    fn text(&self, options: &str) -> String {
        let Self { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, dtype, scale, .. } = self;
        let mut text = format!(
            "batch {batch}, heads {heads}, kv_heads {kv_heads}, q_len {q_len}, kv_len {kv_len}, head_dim {head_dim}, \
             value_dim {value_dim}, {options}, scale {scale}, {}\nPlanned for {}\n\n",
            dtype.name(),
            self.device
        );
        text += &format!(
            "work     {} over {} visible pairs\ninputs   {}\noutputs  {}\n\n",
            output::flops(self.flops),
            self.visible_pairs,
            bytes(self.input_bytes),
            bytes(self.output_bytes),
        );
        let mut table = output::table(["path", "workspace", "total", ""]);
        let ways = [("tiled", &self.tiled), ("naive", &self.naive), ("gradients", &self.gradients)];
        for (name, way) in ways {
            way.iter().for_each(|way| way.add_row(name, &mut table));
        }
        text += &format!("{table}\n");
        for (name, way) in ways {
            if let Some(explain) = way.as_ref().and_then(Way::explain) {
                text += &format!("\n{name}\n");
                for line in explain.lines() {
                    text += &format!("  {line}\n");
                }
            }
        }
        text
    }
}
