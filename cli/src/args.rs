//! The command line, as far as several commands share it.

use core::fmt;
use core::str::FromStr;
use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::{Arg, Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use tilewise::{
    AdapterChoice, Attention, DType, Engine, EngineOptions, Error, GpuError, LimitsChoice, Path, TuningChoice,
    reference,
};

use crate::bench::{BenchArgs, TuneArgs};
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
    /// Measure which variant of tiled attention is the fastest for each kind of call, and save it where the library looks
    Tune(Box<TuneArgs>),
    /// Compute attention's small numbers step by step on the GPU
    Walkthrough,
}

impl Command {
    /// `bench` with nothing but its defaults.
    pub(crate) fn default_bench() -> Result<Self> {
        Cli::try_parse_from(["tilewise", "bench"])?.command.context("bench has no defaults")
    }
}

/// What the flags of every command stand under in their help.
const DEVICE: &str = "Device and output";

/// What every command takes.
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
    /// File with the choices of `tune`, or `none` to go without [default: where `tune` saves by itself]
    #[arg(long, global = true, value_name = "FILE|none", help_heading = DEVICE)]
    tuning: Option<PathBuf>,
}

/// What to do where there is no adapter at all.
const NO_DRIVER: &str = "this machine has no driver for one: on Linux scripts/vulkan.sh in tilewise's repository installs a \
                         software one, which `tilewise info` then lists; `tilewise plan` needs none";

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
        let of_adapter = matches!(self.tuning(), TuningChoice::File(_));
        of_adapter || self.adapter.is_some() || self.no_subgroups || self.limits == Some(Limits::Adapter)
    }

    fn tuning(&self) -> TuningChoice {
        match &self.tuning {
            None => TuningChoice::Cache,
            Some(path) if path.as_os_str() == "none" => TuningChoice::None,
            Some(path) => TuningChoice::File(path.clone()),
        }
    }

    /// Opens the adapter that was asked for.
    pub(crate) fn engine(&self) -> Result<Engine> {
        self.engine_tuned_by(self.tuning())
    }

    /// Whether a flag speaks of choices of variants.
    pub(crate) fn is_tuned(&self) -> bool {
        self.tuning.is_some()
    }

    /// The same with other choices of variants.
    pub(crate) fn engine_tuned_by(&self, tuning: TuningChoice) -> Result<Engine> {
        let limits = match self.limits {
            None | Some(Limits::Adapter) => LimitsChoice::Adapter,
            Some(Limits::Default) => LimitsChoice::Default,
        };
        let (adapter, no_subgroups) = (self.choice(), self.no_subgroups);
        let options = EngineOptions { adapter, limits, no_subgroups, tuning, ..Default::default() };
        Engine::open(&options).map_err(|error| match error {
            Error::Gpu(error @ GpuError::NoAdapter(_)) if Engine::adapters().is_empty() => {
                anyhow!("{error}; {NO_DRIVER}")
            }
            Error::Gpu(error @ GpuError::NoAdapter(_)) => anyhow!("{error}; `tilewise info` numbers them"),
            error => error.into(),
        })
    }
}

/// Which corner positions are counted from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Align {
    /// The first query sees the first key.
    TopLeft,
    /// The last query sees the last key.
    #[default]
    BottomRight,
}

impl Align {
    /// As the reference calls it.
    pub(crate) fn of_reference(self) -> reference::Align {
        match self {
            Self::TopLeft => reference::Align::TopLeft,
            Self::BottomRight => reference::Align::BottomRight,
        }
    }
}

/// How tensors are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    #[default]
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// As flags, manifests and reports write it.
    pub(crate) fn name(self) -> &'static str {
        self.stored().name()
    }

    /// As the engine calls it.
    pub(crate) fn stored(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::Bf16,
        }
    }
}

/// How far a query sees to the left and to the right of its position; None is no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Window(pub(crate) [Option<u32>; 2]);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bound = |text: &str| match text.trim() {
            "" | "none" | "-1" => Some(None),
            number => number.parse().ok().map(Some),
        };
        let bounds = text.split_once(',').and_then(|(left, right)| Some([bound(left)?, bound(right)?]));
        bounds.map(Self).ok_or_else(|| "accepted: L,R, each a number of keys, or none or -1 for no bound".to_string())
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [left, right] = self.0.map(|bound| bound.map_or_else(|| "none".to_string(), |bound| bound.to_string()));
        write!(f, "{left},{right}")
    }
}

/// How scores are made and which keys a query sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Args, Serialize)]
pub(crate) struct Options {
    /// Apply the look-ahead mask: a query sees no later key
    #[arg(long)]
    pub(crate) causal: bool,
    /// The corner that positions are counted from, of --causal, --window and ALiBi, where there are more or fewer keys than queries
    #[arg(long, value_enum, default_value_t)]
    pub(crate) align: Align,
    /// Sliding window: how many keys a query sees to the left and to the right of its own. `255,0`: its own and the 255 before;
    /// `none` or `-1` is no bound
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub(crate) window: Option<Window>,
    /// Factor of the dot products [default: 1/sqrt(head dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f32>,
    /// Cap the scores: X tanh(score / X)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f32>,
}

impl Options {
    /// As the engine calls them.
    pub(crate) fn attention(&self) -> Attention {
        let mut options = if self.causal { Attention::causal() } else { Attention::full() };
        options = options.align(match self.align {
            Align::TopLeft => tilewise::Align::TopLeft,
            Align::BottomRight => tilewise::Align::BottomRight,
        });
        if let Some(Window([left, right])) = self.window {
            options = options.window(left, right);
        }
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        options
    }

    /// In words: the scale and the defaults left out.
    pub(crate) fn words(&self) -> String {
        let mut words = Vec::new();
        if self.causal {
            words.push("causal".to_string());
        }
        words.extend(self.window.map(|window| format!("window {window}")));
        if words.is_empty() {
            words.push("full attention".to_string());
        }
        if self.align == Align::TopLeft {
            words.push("top-left".to_string());
        }
        words.extend(self.softcap.map(|softcap| format!("softcap {softcap}")));
        words.join(", ")
    }
}

/// What attention is asked for, and how.
#[derive(Debug, Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    pub(crate) options: Options,
    /// Type that q, k, v and o are stored in on the device; all is computed in f32 [default: f32; `run` keeps q, k and v in the
    /// file's types]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// How to compute it [default: auto; `plan` and `bench` show both]
    #[arg(long, value_parser = PathParser)]
    path: Option<PathArg>,
}

/// A path as flags name it.
#[derive(Debug, Clone, ValueEnum)]
enum PathArg {
    /// Tiled: no score matrix in device memory
    Auto,
    /// Three passes over score matrices in device memory, for comparison
    Naive,
    /// The name of one that is to come.
    #[value(skip)]
    NotBuilt(String),
}

/// Paths by name: those that aren't built yet are no slips of the pen, and told apart from them.
#[derive(Debug, Clone)]
struct PathParser;

impl TypedValueParser for PathParser {
    type Value = PathArg;

    fn parse_ref(&self, command: &clap::Command, arg: Option<&Arg>, value: &OsStr) -> Result<PathArg, clap::Error> {
        match value.to_str() {
            Some(name) if name == "decode" || name.starts_with("split:") => Ok(PathArg::NotBuilt(name.to_string())),
            _ => EnumValueParser::new().parse_ref(command, arg, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(PathArg::value_variants().iter().filter_map(PathArg::to_possible_value)))
    }
}

impl AttentionArgs {
    /// The path asked for, if one was.
    pub(crate) fn path(&self) -> Result<Option<Path>> {
        match &self.path {
            None => Ok(None),
            Some(PathArg::Auto) => Ok(Some(Path::Auto)),
            Some(PathArg::Naive) => Ok(Some(Path::Naive)),
            Some(PathArg::NotBuilt(name)) => bail!("--path {name} isn't built yet; accepted: auto, naive"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows() {
        let bounds = |text: &str| text.parse::<Window>().map(|window| window.0);
        assert_eq!(bounds("255,0"), Ok([Some(255), Some(0)]));
        assert_eq!(bounds("4, 4294967295"), Ok([Some(4), Some(u32::MAX)]));
        for none in ["none,7", "-1,7", ",7", " , 7"] {
            assert_eq!(bounds(none), Ok([None, Some(7)]), "{none}");
        }
        assert_eq!(bounds(","), Ok([None, None]));
        for bad in ["x", "255", "", "1,2,3", "1,-2", "1,x", "0.5,0", "4294967296,0", "1;2"] {
            assert!(bounds(bad).unwrap_err().contains("accepted: L,R"), "{bad}");
        }
    }

    #[test]
    fn options_in_words() {
        let window = |text: &str| Some(text.parse().unwrap());
        let causal = Options { causal: true, ..Options::default() };
        assert_eq!(Options::default().words(), "full attention");
        assert_eq!(Options { align: Align::TopLeft, ..causal }.words(), "causal, top-left");
        let all = Options { window: window("255,0"), softcap: Some(50.0), ..causal };
        assert_eq!(all.words(), "causal, window 255,0, softcap 50");
        let open = Options { window: window("-1,3"), align: Align::TopLeft, ..Options::default() };
        assert_eq!(open.words(), "window none,3, top-left");
        assert_eq!(Options { softcap: Some(0.5), ..Options::default() }.words(), "full attention, softcap 0.5");
    }
}
