//! The command line, as far as several commands share it.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tilewise::{AdapterChoice, Attention, Engine, EngineOptions, LimitsChoice, Path};

use crate::bench::BenchArgs;
use crate::plan::PlanArgs;
use crate::run::RunArgs;
use crate::verify::VerifyArgs;

/// Transformer attention on any GPU, tiled: the score matrix never exists in GPU memory.
///
/// Without a command: the short bench, tiled against naive.
#[derive(Debug, Parser)]
#[command(name = "tilewise", version)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show adapters, limits, features, and which kernels this machine gets
    Info,
    /// Show FLOPs and bytes, tiled and naive, and whether it fits; needs no GPU
    Plan(PlanArgs),
    /// Compute attention of the q, k and v in a safetensors file
    Run(RunArgs),
    /// Check this device against the CPU reference, or a folder of cases
    Verify(VerifyArgs),
    /// Measure tiled against naive: time, share of the machine's best, memory
    Bench(Box<BenchArgs>),
    /// Compute attention's small numbers step by step on the GPU
    Walkthrough,
}

impl Command {
    /// `bench` with nothing but its defaults.
    pub(crate) fn default_bench() -> Result<Self> {
        Cli::try_parse_from(["tilewise", "bench"])?.command.context("bench has no defaults")
    }
}

/// What every command takes.
/// What the flags of every command stand under in their help.
const DEVICE: &str = "Device and output";

#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Adapter: its number in `info`, part of its name, or `hardware` for any that isn't the CPU [default: a fast one]
    #[arg(long, global = true, value_name = "NAME|INDEX", help_heading = DEVICE)]
    pub(crate) adapter: Option<String>,
    /// Print one JSON document instead of text for people
    #[arg(long, global = true, help_heading = DEVICE)]
    pub(crate) json: bool,
    /// Use all that the adapter has (the default), or only what every WebGPU device has
    #[arg(long, global = true, value_enum, help_heading = DEVICE)]
    limits: Option<Limits>,
    /// Leave subgroup operations out
    #[arg(long, global = true, help_heading = DEVICE)]
    no_subgroups: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Limits {
    /// Everything the adapter has.
    Adapter,
    /// wgpu's default limits, and no optional feature.
    Default,
}

impl Common {
    fn choice(&self) -> AdapterChoice {
        match self.adapter.as_deref() {
            None => AdapterChoice::Default,
            Some("hardware") => AdapterChoice::Hardware,
            Some(text) => match text.parse() {
                Ok(index) => AdapterChoice::Index(index),
                Err(_) => AdapterChoice::Named(text.to_string()),
            },
        }
    }

    /// Whether a flag speaks of an adapter: what needs no device takes one then.
    pub(crate) fn wants_adapter(&self) -> bool {
        self.adapter.is_some() || self.no_subgroups || self.limits == Some(Limits::Adapter)
    }

    /// Opens the adapter that was asked for.
    pub(crate) fn engine(&self) -> Result<Engine> {
        let limits = match self.limits {
            None | Some(Limits::Adapter) => LimitsChoice::Adapter,
            Some(Limits::Default) => LimitsChoice::Default,
        };
        let options =
            EngineOptions { adapter: self.choice(), limits, no_subgroups: self.no_subgroups, ..Default::default() };
        Ok(Engine::open(&options)?)
    }
}

/// Which corner the causal diagonal runs into.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Align {
    /// The first query sees the first key.
    TopLeft,
    /// The last query sees the last key.
    #[default]
    BottomRight,
}

/// The options of attention.
#[derive(Debug, Args)]
pub(crate) struct AttentionArgs {
    /// Apply the look-ahead mask: a query sees no later key
    #[arg(long)]
    pub(crate) causal: bool,
    /// Where the causal diagonal ends when there are more or fewer keys than queries
    #[arg(long, value_enum, default_value_t)]
    pub(crate) align: Align,
    /// Factor of the dot products [default: 1/sqrt(head dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f32>,
    /// How to compute it: `auto` (tiled) or `naive`, with the score matrix in device memory, for comparison
    #[arg(long)]
    path: Option<String>,
}

impl AttentionArgs {
    /// The options with `scale`, which may come from elsewhere.
    pub(crate) fn options(&self, scale: Option<f32>) -> Attention {
        let options = if self.causal { Attention::causal() } else { Attention::full() };
        let options = options.align(match self.align {
            Align::TopLeft => tilewise::Align::TopLeft,
            Align::BottomRight => tilewise::Align::BottomRight,
        });
        match scale {
            Some(scale) => options.softmax_scale(scale),
            None => options,
        }
    }

    /// The options in words, the defaults left out.
    pub(crate) fn words(&self) -> &'static str {
        match (self.causal, self.align) {
            (false, _) => "full attention",
            (true, Align::BottomRight) => "causal",
            (true, Align::TopLeft) => "causal, top-left",
        }
    }

    /// The path asked for, if one was.
    pub(crate) fn path(&self) -> Result<Option<Path>> {
        match self.path.as_deref() {
            None => Ok(None),
            Some("auto") => Ok(Some(Path::Auto)),
            Some("naive") => Ok(Some(Path::Naive)),
            Some(path) if path == "decode" || path.starts_with("split:") => {
                bail!("--path {path} isn't built yet; accepted: auto, naive")
            }
            Some(path) => bail!("--path {path}; accepted: auto, naive"),
        }
    }
}
