//! `tilewise bench`: tiled attention against naive, in time and memory, each figure beside what this machine can do at best.

mod attention;
mod backward;
mod check;
mod growth;
mod product;
mod report;
mod row;
mod tune;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use tilewise::{Engine, Path};

use crate::args::{AttentionArgs, Common};
use crate::measure::{self, Progress};
use crate::output::{self, OutFile};
use crate::plot;
use crate::roofline::Roofline;
use growth::Growth;
pub(crate) use row::Measured;
use row::{Row, Spec};
pub(crate) use tune::{TuneArgs, run as tune};

/// Calls: every combination of the comma lists.
#[derive(Debug, Args)]
struct Shapes {
    /// Query rows [default: 512,1024,2048,4096,8192; for matmul 512,1024,2048; for `tune` 256 and 1024, and 1 by 4096 keys]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    q_len: Vec<usize>,
    /// Keys [default: as many as query rows]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    kv_len: Vec<usize>,
    /// Independent sequences
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Query heads [default: 1; for `tune` 8]
    #[arg(long, visible_alias = "q-heads", value_name = "N,..", value_delimiter = ',')]
    heads: Vec<usize>,
    /// Key/value heads, which query heads share in groups [default: as many as query heads]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    kv_heads: Vec<usize>,
    /// Width of a query and of a key [default: 64; for `tune` 64,128]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    head_dim: Vec<usize>,
    /// Width of a value [default: the head dim]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    value_dim: Vec<usize>,
    #[command(flatten)]
    attention: AttentionArgs,
}

/// What lists that weren't given stand for.
struct Defaults<'a> {
    /// Query rows and keys.
    lens: &'a [(usize, usize)],
    heads: usize,
    head_dims: &'a [usize],
}

/// Every combination of the comma lists is one row. Both paths are measured unless `--path` names one.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    shapes: Shapes,
    /// What to measure
    #[arg(long, value_enum, default_value_t)]
    kind: Kind,
    /// Timed runs of each figure, whose median counts [default: by their length, 3 to 20; 1 where one takes over 10 s]
    #[arg(long, value_name = "N")]
    reps: Option<usize>,
    /// Draw memory and time against length
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write the rows as a table of comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// Attention, forward
    #[default]
    Forward,
    /// Its gradients
    Backward,
    /// One query row against a long cache; not built yet
    Decode,
    /// Time to the first token; not built yet
    Ttft,
    /// The plain product of two square matrices
    Matmul,
}

impl Kind {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default()
    }
}

/// Which paths a row is measured on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Paths {
    Both,
    Tiled,
    Naive,
}

/// Why there is no naive figure when `--path auto` leaves it out.
const NOT_ASKED_FOR: &str = "not asked for";

/// What all rows are measured with.
struct Bench<'a> {
    engine: &'a Engine,
    roofline: &'a Roofline,
    paths: Paths,
    reps: Option<usize>,
    progress: &'a Progress,
    software: bool,
}

/// All that was measured: the JSON document.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) adapter: String,
    driver: String,
    /// Whether the device is the CPU.
    software: bool,
    cores: usize,
    version: &'static str,
    roofline: Roofline,
    pub(crate) rows: Vec<Row>,
    growth: Vec<Growth>,
    /// How each figure is measured.
    method: Vec<String>,
}

pub(crate) fn run(args: &BenchArgs, common: &Common) -> Result<()> {
    let specs = args.specs()?;
    let paths = args.paths()?;
    ensure!(args.reps != Some(0), "--reps 0; accepted: 1 or more");
    // Better now than after minutes of measuring.
    let out = |file: &Option<PathBuf>| file.as_deref().map(OutFile::check).transpose();
    let (plot, csv) = (out(&args.plot)?, out(&args.csv)?);
    ensure!(plot.is_none() || plot != csv, "--plot and --csv name one file; accepted: two");
    let is_svg = |path: &PathBuf| path.extension().is_none_or(|end| end.eq_ignore_ascii_case("svg"));
    ensure!(args.plot.as_ref().is_none_or(is_svg), "--plot draws SVG; accepted: a file whose name ends in .svg");
    let engine = common.engine()?;
    let software = measure::is_software(&engine);
    let info = engine.adapter_info();
    let (adapter, driver) = (info.name.clone(), format!("{} {}", info.driver, info.driver_info).trim().to_string());

    let described = |spec: &Spec| format!("q_len {}, kv_len {}, {}", spec.q_len, spec.kv_len, spec.shape());
    let refusals = specs.iter().map(|spec| refusal(&engine, spec, paths).with_context(|| described(spec)));
    let refusals: Vec<_> = refusals.collect::<Result<_>>()?;
    if let (Some(Some(reason)), true) = (refusals.first(), refusals.iter().all(Option::is_some)) {
        bail!("nothing to measure: every row is refused, the first: {reason}");
    }

    let progress = Progress::new();
    let roofline = Roofline::measure(&engine, &progress)?;
    let bench = Bench { engine: &engine, roofline: &roofline, paths, reps: args.reps, progress: &progress, software };
    let measured = specs.iter().map(|spec| {
        let row = match spec.kind {
            Kind::Matmul => product::measure(&bench, spec),
            Kind::Backward => backward::measure(&bench, spec),
            _ => attention::measure(&bench, spec),
        };
        row.with_context(|| described(spec))
    });
    let rows: Vec<Row> = measured.collect::<Result<_>>()?;
    drop(progress);

    let report = Report {
        adapter,
        driver,
        software,
        cores: measure::cores(),
        version: env!("CARGO_PKG_VERSION"),
        growth: Growth::of(&rows),
        method: report::method(args.kind, software),
        rows,
        roofline,
    };
    if let Some(file) = csv {
        file.write(report.csv().as_bytes())?;
    }
    if let Some(file) = plot {
        file.write(plot::svg(&report)?.as_bytes())?;
    }
    if common.json { output::print_json(&report) } else { output::print(&report.table()) }
}

/// Why nothing would run for a row, if so: to be told before minutes of measuring.
fn refusal(engine: &Engine, spec: &Spec, paths: Paths) -> Result<Option<String>> {
    let naive = paths == Paths::Naive;
    if spec.kind == Kind::Matmul {
        return Ok(naive.then(|| product::NO_NAIVE.to_string()));
    }
    let problem = spec.problem()?;
    if spec.kind == Kind::Backward {
        engine.plan_backward(&problem)?;
        return Ok(naive.then(|| backward::NO_NAIVE.to_string()));
    }
    if naive {
        return Ok(attention::naive_plan(engine, &problem)?.err());
    }
    engine.plan(&problem)?;
    Ok(None)
}

impl BenchArgs {
    fn paths(&self) -> Result<Paths> {
        Ok(match self.shapes.attention.path()? {
            None => Paths::Both,
            Some(Path::Auto) => Paths::Tiled,
            Some(Path::Naive) => Paths::Naive,
        })
    }

    /// Every combination of the lists.
    fn specs(&self) -> Result<Vec<Spec>> {
        if matches!(self.kind, Kind::Decode | Kind::Ttft) {
            bail!("--kind {} isn't built yet; accepted: forward, backward, matmul", self.kind.name());
        }
        let Shapes { heads, kv_heads, head_dim, value_dim, batch, .. } = &self.shapes;
        ensure!(
            self.kind != Kind::Matmul
                || *batch == [1] && [heads, kv_heads, head_dim, value_dim].into_iter().all(Vec::is_empty),
            "--kind matmul with --batch, --heads, --kv-heads, --head-dim or --value-dim; accepted: --q-len alone, the size \
             of a square matrix"
        );
        let lens = [512, 1024, 2048, 4096, 8192].map(|len| (len, len));
        let lens = if self.kind == Kind::Matmul { &lens[..3] } else { &lens };
        self.shapes.specs(self.kind, &Defaults { lens, heads: 1, head_dims: &[64] })
    }
}

impl Shapes {
    fn specs(&self, kind: Kind, defaults: &Defaults<'_>) -> Result<Vec<Spec>> {
        // An empty list means "as the other size", which is one combination.
        let or_same = |list: &[usize]| -> Vec<Option<usize>> {
            if list.is_empty() { vec![None] } else { list.iter().copied().map(Some).collect() }
        };
        let one_of = |list: &[usize], default: &[usize]| if list.is_empty() { default.to_vec() } else { list.to_vec() };
        let q_lens = self.q_len.iter().map(|&q_len| (q_len, q_len));
        let lens = if self.q_len.is_empty() { defaults.lens.to_vec() } else { q_lens.collect() };
        let mut specs = Vec::new();
        for &batch in &self.batch {
            for heads in one_of(&self.heads, &[defaults.heads]) {
                for kv_heads in or_same(&self.kv_heads) {
                    for head_dim in one_of(&self.head_dim, defaults.head_dims) {
                        for value_dim in or_same(&self.value_dim) {
                            for &(q_len, as_many) in &lens {
                                for kv_len in or_same(&self.kv_len) {
                                    specs.push(Spec {
                                        q_len,
                                        kv_len: kv_len.unwrap_or(as_many),
                                        batch,
                                        head_dim,
                                        value_dim: value_dim.unwrap_or(head_dim),
                                        heads,
                                        kv_heads: kv_heads.unwrap_or(heads),
                                        options: self.attention.options,
                                        dtype: self.attention.dtype.unwrap_or_default(),
                                        kind,
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
        // A size that is named twice is measured once.
        let mut distinct: Vec<Spec> = Vec::new();
        for spec in specs {
            spec.check()?;
            if !distinct.contains(&spec) {
                distinct.push(spec);
            }
        }
        Ok(distinct)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn specs(line: &str) -> Result<Vec<Spec>> {
        Cli::try_parse_from(core::iter::once("bench").chain(line.split_whitespace()))?.args.specs()
    }

    #[test]
    fn the_default_is_one_head_from_512_to_8192() {
        let specs = specs("").unwrap();
        let lens: Vec<_> = specs.iter().map(|spec| (spec.q_len, spec.kv_len)).collect();
        assert_eq!(lens, [512, 1024, 2048, 4096, 8192].map(|len| (len, len)));
        assert!(specs.iter().all(|spec| (spec.heads, spec.head_dim, spec.options.causal) == (1, 64, false)));
    }

    #[test]
    fn every_combination_of_the_lists_is_a_row() {
        let specs = specs("--q-len 5,6 --kv-len 7,8,9 --heads 2,4 --kv-heads 1,2 --value-dim 3 --causal").unwrap();
        assert_eq!(specs.len(), 24);
        assert_eq!(specs[0].shape(), "heads 2, kv_heads 1, head_dim 64, value_dim 3, causal, f32");
        assert_eq!(specs[0].lengths(), "5x7");
    }

    #[test]
    fn what_is_named_twice_is_one_row() {
        assert_eq!(specs("--q-len 64,64,32 --kv-len 64,64").unwrap().len(), 2);
    }

    #[test]
    fn options_and_dtype_are_in_every_row() {
        let specs = specs("--q-len 5,6 --window 3,-1 --softcap 20 --dtype bf16").unwrap();
        assert_eq!(specs[1].shape(), "heads 1, head_dim 64, window 3,none, softcap 20, bf16");
        let row = serde_json::to_value(specs[1]).unwrap();
        assert_eq!((&row["dtype"], &row["softcap"], &row["causal"]), (&"bf16".into(), &20.0.into(), &false.into()));
        assert_eq!(row["window"], serde_json::json!([3, null]));
        assert_eq!(specs[1].problem().unwrap().input_bytes(), 2 * 3 * 6 * 64);
    }

    #[test]
    fn what_makes_no_sense_or_is_not_built_is_refused() {
        let refused = |line: &str| specs(line).unwrap_err().to_string();
        assert!(refused("--kind decode").contains("decode isn't built yet"));
        assert!(refused("--heads 7 --kv-heads 3").contains("q_heads = 7"));
        assert!(refused("--scale NaN").contains("NaN"));
        assert!(refused("--kind matmul --q-len 4 --kv-len 5").contains("square"));
        assert!(refused("--kind matmul --dtype f16").contains("--dtype f16"));
        for ignored in ["--causal", "--align top-left", "--scale 2"] {
            assert!(refused(&format!("--kind matmul {ignored}")).contains("with a mask"), "{ignored}");
        }
        for ignored in ["--heads 2", "--head-dim 64", "--value-dim 8", "--kv-heads 1", "--batch 2"] {
            assert!(refused(&format!("--kind matmul {ignored}")).contains("--q-len alone"), "{ignored}");
        }
        assert!(refused("--softcap 0").contains("softcap = 0"));
        assert!(refused("--softcap -1").contains("softcap = -1"));
        assert!(refused("--window 255").contains("accepted: L,R"));
        assert!(refused("--dtype f8").contains("f32, f16, bf16"));
    }
}
