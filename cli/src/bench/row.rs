//! One row of the bench: what was asked for, and what was measured.

use anyhow::{Result, ensure};
use serde::Serialize;
use tilewise::{Dims, Engine, MemoryUse, Problem, Purpose, Storage};

use super::{Bench, Kind, NOT_ASKED_FOR};
use crate::args::{Dtype, Options};
use crate::measure::{Elapsed, ProcessMemory};

/// What a row measures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spec {
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(super) batch: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    #[serde(flatten)]
    pub(super) options: Options,
    pub(super) dtype: Dtype,
    pub(super) kind: Kind,
}

impl Spec {
    pub(super) fn check(&self) -> Result<()> {
        match self.kind {
            Kind::Matmul => {
                ensure!(self.q_len == self.kv_len, "--kind matmul multiplies square matrices; accepted: --q-len alone");
                ensure!(
                    self.dtype == Dtype::F32 && self.options == Options::default(),
                    "--kind matmul with --dtype {}, or with a mask, --scale or --softcap; accepted: f32, and none of them",
                    self.dtype.name()
                );
                let elems = self.q_len.checked_mul(self.q_len);
                ensure!(
                    elems.is_some_and(|elems| (1..=u32::MAX as usize).contains(&elems)),
                    "--q-len {}; accepted: 1 to 65535 for --kind matmul",
                    self.q_len
                );
            }
            _ => drop(self.problem()?),
        }
        Ok(())
    }

    pub(super) fn problem(&self) -> tilewise::Result<Problem> {
        let &Self { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self;
        let dims = Dims { batch, q_heads: heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        Problem::new(dims, self.options.attention())?.storage(Storage::all(self.dtype.stored()))
    }

    /// All but the lengths, for people.
    pub(crate) fn shape(&self) -> String {
        if self.kind == Kind::Matmul {
            return format!("square matrix product, {}", self.dtype.name());
        }
        let mut shape = String::new();
        if self.batch != 1 {
            shape += &format!("batch {}, ", self.batch);
        }
        shape += &format!("heads {}, ", self.heads);
        if self.kv_heads != self.heads {
            shape += &format!("kv_heads {}, ", self.kv_heads);
        }
        shape += &format!("head_dim {}, ", self.head_dim);
        if self.value_dim != self.head_dim {
            shape += &format!("value_dim {}, ", self.value_dim);
        }
        shape += &format!("{}, ", self.options.words());
        if let Some(scale) = self.options.scale {
            shape += &format!("scale {scale}, ");
        }
        shape + self.dtype.name() + if self.kind == Kind::Backward { ", gradients" } else { "" }
    }

    /// The lengths, for people.
    pub(crate) fn lengths(&self) -> String {
        if self.q_len == self.kv_len { self.q_len.to_string() } else { format!("{}x{}", self.q_len, self.kv_len) }
    }
}

/// A row of the report.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) spec: Spec,
    /// Operations of the products over visible pairs: what every path has to do.
    pub(super) flops: u64,
    /// Null where it wasn't asked for.
    pub(crate) tiled: Option<Measured>,
    /// Null where there is no naive path.
    pub(crate) naive: Option<Outcome>,
    /// Between tiled and naive where both ran, else between what ran and the f64 reference on some rows.
    pub(super) max_abs_diff: f64,
    /// Which of these, and over what.
    pub(super) compared: String,
}

/// What became of a path.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    Measured(Box<Measured>),
    Refused { refused: String },
}

impl Row {
    /// Why there is no naive figure where one was asked for.
    pub(crate) fn refused(&self) -> Option<&str> {
        match &self.naive {
            Some(Outcome::Refused { refused }) if refused != NOT_ASKED_FOR => Some(refused),
            _ => None,
        }
    }

    pub(crate) fn naive_measured(&self) -> Option<&Measured> {
        match &self.naive {
            Some(Outcome::Measured(measured)) => Some(measured),
            _ => None,
        }
    }
}

/// The figures of one path.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    /// The median.
    pub(crate) seconds: f64,
    /// CPU time over cores, on software devices.
    pub(super) cpu_seconds: Option<f64>,
    pub(super) gflops: f64,
    /// Of the measured multiply-add rate.
    pub(super) fma_share: f64,
    /// The same, both by CPU time.
    pub(super) cpu_fma_share: Option<f64>,
    pub(super) reps: usize,
    pub(super) min_seconds: f64,
    pub(super) max_seconds: f64,
    #[serde(flatten)]
    pub(crate) memory: Memory,
    pub(super) kernel: String,
    /// From the f64 reference, on the rows that were checked.
    pub(super) max_abs_err: f64,
    /// What that error may be.
    pub(super) tolerance: f64,
    pub(super) checked_rows: usize,
}

impl Measured {
    pub(super) fn new(
        bench: &Bench<'_>,
        flops: u64,
        runs: &[Elapsed],
        memory: Memory,
        kernel: String,
        checked: &super::check::Checked,
    ) -> Self {
        let Elapsed { seconds, cpu_seconds } = Elapsed::median(runs);
        let gflop = flops as f64 / 1e9;
        let wall = || runs.iter().map(|run| run.seconds);
        Self {
            seconds,
            cpu_seconds,
            gflops: gflop / seconds,
            fma_share: gflop / seconds / bench.roofline.fma_gflops,
            cpu_fma_share: cpu_seconds
                .zip(bench.roofline.cpu_fma_gflops)
                .map(|(seconds, gflops)| gflop / seconds / gflops),
            reps: runs.len(),
            min_seconds: wall().fold(f64::INFINITY, f64::min),
            max_seconds: wall().fold(0.0, f64::max),
            memory,
            kernel,
            max_abs_err: checked.max_abs_err,
            tolerance: checked.tolerance,
            checked_rows: checked.rows,
        }
    }
}

/// Device memory of one run, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Memory {
    /// The most that the engine had allocated at one time.
    pub(crate) peak_bytes: u64,
    /// Of that, all but q, k, v and o: what the path costs beyond what goes in and comes out.
    pub(crate) extra_bytes: u64,
    /// Of that, scratch memory: the score matrix of the naive path.
    pub(super) workspace_bytes: u64,
    input_bytes: u64,
    output_bytes: u64,
    params_bytes: u64,
    /// What wgpu's allocator had handed out for the whole device after the run, its tensors still alive.
    pub(super) allocator_bytes: Option<u64>,
    /// The process's peak, and how much of it came since before the outputs were allocated: on software devices.
    process_peak_bytes: Option<u64>,
    pub(super) process_growth_bytes: Option<u64>,
}

/// Watches memory from before a run's outputs are allocated, its inputs being there.
pub(super) struct MemoryWatch<'a> {
    engine: &'a Engine,
    process: Option<ProcessMemory>,
}

impl<'a> MemoryWatch<'a> {
    pub(super) fn start(bench: &Bench<'a>) -> Result<Self> {
        // What earlier runs have dropped is freed by now, and what the engine has kept of them.
        bench.engine.wait()?;
        bench.engine.trim();
        bench.engine.reset_peak();
        let process = if bench.software { ProcessMemory::watch() } else { None };
        Ok(Self { engine: bench.engine, process })
    }

    /// To be called while the run's tensors are alive. `result_bytes`: what the buffer of the result proper holds.
    pub(super) fn stop(&self, result_bytes: u64) -> Memory {
        let memory: MemoryUse = self.engine.memory();
        let of = |purpose| memory.peak_bytes_for(purpose);
        let process = self.process.as_ref().and_then(ProcessMemory::peak);
        Memory {
            peak_bytes: memory.peak_bytes(),
            extra_bytes: memory.peak_bytes().saturating_sub(of(Purpose::Input) + result_bytes),
            workspace_bytes: of(Purpose::Workspace),
            input_bytes: of(Purpose::Input),
            output_bytes: of(Purpose::Output),
            params_bytes: of(Purpose::Params),
            allocator_bytes: self.engine.allocator_report().map(|report| report.total_allocated_bytes),
            process_peak_bytes: process.map(|(peak, _)| peak),
            process_growth_bytes: process.map(|(_, growth)| growth),
        }
    }
}
