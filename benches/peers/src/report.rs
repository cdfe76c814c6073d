//! What was measured, as a table for people and as comma-separated values.

use std::fmt::Write;

use crate::{HEAD_DIM, HEADS};

/// How far a peer got.
#[derive(Debug, PartialEq)]
pub enum Status {
    Right,
    /// Its result isn't the reference's.
    Wrong,
    Failed(String),
}

/// A peer on a problem.
#[derive(Debug)]
pub struct Row {
    pub name: &'static str,
    pub package: &'static str,
    pub tokens: usize,
    pub causal: bool,
    pub flops: u64,
    pub status: Status,
    /// From the f64 reference, over the whole output.
    pub max_abs_diff: f64,
    /// From the first call to its result on the host.
    pub first_result_seconds: f64,
    /// Of each timed run.
    pub seconds: Vec<f64>,
    /// CPU time over the number of cores, of each timed run.
    pub cpu_seconds: Vec<f64>,
}

/// All rows.
#[derive(Debug)]
pub struct Report {
    /// The adapter with its driver.
    pub device: String,
    /// Whether a run is attention and its gradients.
    pub gradients: bool,
    pub rows: Vec<Row>,
}

/// The version of a package that this program is built with.
pub fn version(package: &str) -> &'static str {
    let lock = include_str!("../Cargo.lock");
    let after = lock.split_once(&format!("name = \"{package}\"\nversion = \""));
    after.and_then(|(_, rest)| rest.split('"').next()).unwrap_or("?")
}

impl Row {
    /// The median of wall-clock times; none of what isn't right.
    fn median_seconds(&self) -> Option<f64> {
        self.median(&self.seconds)
    }

    fn median_cpu_seconds(&self) -> Option<f64> {
        self.median(&self.cpu_seconds)
    }

    fn median(&self, times: &[f64]) -> Option<f64> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (n, right) = (sorted.len(), self.status == Status::Right);
        (right && n > 0).then(|| f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]))
    }

    fn gflops(&self) -> Option<f64> {
        Some(self.flops as f64 / self.median_seconds()? * 1e-9)
    }
}

impl Report {
    /// Its time over tilewise's for the same problem: above 1, tilewise is faster.
    fn ratio(&self, row: &Row) -> Option<f64> {
        let same = |ours: &&Row| ours.name == "tilewise" && (ours.tokens, ours.causal) == (row.tokens, row.causal);
        Some(row.median_seconds()? / self.rows.iter().find(same)?.median_seconds()?)
    }

    pub fn table(&self) -> String {
        let what = if self.gradients { ", with gradients" } else { "" };
        let mut text = format!("{}\nf32, {HEADS} heads, head_dim {HEAD_DIM}{what}\n\n", self.device);
        let header = [
            "peer",
            "version",
            "tokens",
            "causal",
            "first result",
            "max |diff|",
            "median",
            "CPU",
            "GFLOP/s",
            "x tilewise",
        ];
        let mut lines = vec![header.map(str::to_string)];
        for row in &self.rows {
            let or_status = |cell: Option<String>| {
                cell.unwrap_or_else(|| if row.status == Status::Wrong { "wrong" } else { "failed" }.to_string())
            };
            lines.push([
                row.name.to_string(),
                version(row.package).to_string(),
                row.tokens.to_string(),
                if row.causal { "yes" } else { "no" }.to_string(),
                format!("{:.2} s", row.first_result_seconds),
                format!("{:.1e}", row.max_abs_diff),
                or_status(row.median_seconds().map(|seconds| format!("{:.1} ms", seconds * 1e3))),
                or_status(row.median_cpu_seconds().map(|seconds| format!("{:.1} ms", seconds * 1e3))),
                or_status(row.gflops().map(|gflops| format!("{gflops:.2}"))),
                or_status(self.ratio(row).map(|ratio| format!("{ratio:.2}"))),
            ]);
        }
        let widths: [usize; 10] =
            std::array::from_fn(|column| lines.iter().map(|it| it[column].len()).max().unwrap_or(0));
        for line in lines {
            // The first two columns are text, the others numbers.
            let cells = line.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
                0 | 1 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            });
            let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        for row in &self.rows {
            if let Status::Failed(reason) = &row.status {
                let _ = writeln!(text, "\n{} at {} tokens: {reason}", row.name, row.tokens);
            }
        }
        text
    }

    pub fn csv(&self) -> String {
        let mut text =
            "device,peer,version,tokens,heads,head_dim,dtype,causal,status,max_abs_diff,first_result_s,runs,\
                        median_ms,min_ms,median_cpu_ms,gflops,times_tilewise,gradients\n"
                .to_string();
        let number = |x: Option<f64>, digits: usize| x.map_or(String::new(), |x| format!("{x:.digits$}"));
        for row in &self.rows {
            let status = match &row.status {
                Status::Right => "right",
                Status::Wrong => "wrong",
                Status::Failed(_) => "failed",
            };
            let min = row.median_seconds().map(|_| row.seconds.iter().copied().fold(f64::INFINITY, f64::min));
            let cells = [
                format!("\"{}\"", self.device.replace('"', "\"\"")),
                row.name.to_string(),
                version(row.package).to_string(),
                row.tokens.to_string(),
                HEADS.to_string(),
                HEAD_DIM.to_string(),
                "f32".to_string(),
                row.causal.to_string(),
                status.to_string(),
                format!("{:.2e}", row.max_abs_diff),
                format!("{:.3}", row.first_result_seconds),
                row.seconds.len().to_string(),
                number(row.median_seconds().map(|seconds| seconds * 1e3), 3),
                number(min.map(|seconds| seconds * 1e3), 3),
                number(row.median_cpu_seconds().map(|seconds| seconds * 1e3), 3),
                number(row.gflops(), 3),
                number(self.ratio(row), 3),
                self.gradients.to_string(),
            ];
            let _ = writeln!(text, "{}", cells.join(","));
        }
        text
    }
}
