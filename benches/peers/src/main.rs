//! tilewise's attention beside that of other Rust crates on wgpu: the same inputs, in one process, on one adapter, in turns.
//!
//! ```sh
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --csv FILE
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --gradients --tokens 512 --csv FILE
//! ```
//!
//! For each problem every peer computes once, for its first result and the seconds that it takes to get there (compilers, autotuning). That
//! result is compared, all of it, with tilewise's CPU reference in f64; what is wrong isn't timed. Then all of them run in turns,
//! A B C A B C, so that whatever else the machine does falls on each alike, and the median counts. A run is one call of the crate's plain
//! interface with its inputs on the device, from the call to the device's completion. The CPU time of a run is the process's, user and
//! system, over the number of cores: on a software device it is steadier than the wall clock where the machine has other work.

mod burn;
mod ferrotensor;
mod ours;
#[path = "../../random.rs"]
mod random;
mod report;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use clap::Parser;
use cpu_time::ProcessTime;
use tilewise::reference::{self, Case, Gradients};
use tilewise::{Attention, Dims, Problem};

use random::random;
use report::{Report, Row, Status};

/// Compare tilewise's attention with that of other Rust crates on wgpu.
#[derive(Debug, Parser)]
struct Args {
    /// Lengths of queries and keys
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1024,2048")]
    tokens: Vec<usize>,
    /// Timed runs of each, in turns
    #[arg(long, value_name = "N", default_value_t = 7)]
    runs: usize,
    /// Compute gradients too: a run is attention, then those of q, k and v for a gradient of its output
    #[arg(long)]
    gradients: bool,
    /// Write the rows as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

const HEADS: usize = 4;
const HEAD_DIM: usize = 64;

/// A difference from the reference that rounding to f32 doesn't explain: outputs are at most a few units large, and the mean of many keys'
/// values mostly well under one.
const WRONG: f64 = 1e-3;

/// An implementation of attention, f32.
trait Peer {
    /// As the report calls it.
    fn name(&self) -> &'static str;

    /// The package whose version counts.
    fn package(&self) -> &'static str;

    /// The name of the adapter that it runs on.
    fn adapter(&self) -> String;

    /// Puts the inputs on the device.
    fn upload(&mut self, inputs: &Inputs) -> Result<()>;

    /// Computes, and waits for the device.
    fn run(&mut self) -> Result<()>;

    /// The last run's result on the host, (heads, tokens, `head_dim`): the output, or the gradients of q, k and v one after the other.
    fn read(&mut self) -> Result<Vec<f32>>;
}

/// One problem: q, k and v are (heads, tokens, `head_dim`).
struct Inputs {
    tokens: usize,
    causal: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// The gradient of the output, where those of the inputs are computed too.
    grad_o: Option<Vec<f32>>,
}

impl Inputs {
    fn new(tokens: usize, causal: bool, gradients: bool) -> Self {
        let [q, k, v, grad_o] = [1, 2, 3, 4].map(|seed| random(seed, HEADS * tokens * HEAD_DIM));
        Self { tokens, causal, q, k, v, grad_o: gradients.then_some(grad_o) }
    }

    /// Of what is needed: two products forward, five more for gradients.
    fn flops(&self) -> tilewise::Result<u64> {
        let forward = self.problem()?.flops();
        Ok(if self.grad_o.is_some() { forward * 7 / 2 } else { forward })
    }

    fn problem(&self) -> tilewise::Result<Problem> {
        let options = if self.causal { Attention::causal() } else { Attention::full() };
        Problem::new(Dims::square(1, HEADS, self.tokens, HEAD_DIM), options)
    }

    fn reference(&self) -> tilewise::Result<Vec<f64>> {
        let case = Case {
            batch: 1,
            q_heads: HEADS,
            kv_heads: HEADS,
            q_len: self.tokens,
            kv_len: self.tokens,
            head_dim: HEAD_DIM,
            value_dim: HEAD_DIM,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            causal: self.causal,
            ..Case::default()
        };
        let Some(grad_o) = &self.grad_o else { return Ok(reference::attention(&case)?.o) };
        let Gradients { dq, dk, dv, .. } = reference::attention_backward(&case, grad_o, None)?;
        Ok([dq, dk, dv].concat())
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.runs >= 1, "--runs 0; accepted: 1 or more");
    let ours = ours::Tilewise::new()?;
    let device = ours.describe();
    let adapter = ours.adapter();
    // The first is tilewise, which all are compared with.
    let mut peers: Vec<Box<dyn Peer>> = vec![Box::new(ours)];
    // wgpu 30 and 0.19 panic, rather than return errors, where they find nothing to run on.
    for open in [burn::open, ferrotensor::open] {
        match caught(open) {
            Ok(peer) => peers.push(peer),
            Err(error) => eprintln!("left out, as it opens no device: {error:#}"),
        }
    }
    for peer in &peers {
        eprintln!("{} {} on {}", peer.name(), report::version(peer.package()), peer.adapter());
    }
    // What one measures on another device says nothing.
    peers.retain(|peer| {
        let same = peer.adapter() == adapter;
        if !same {
            eprintln!("{} is left out: it chose another adapter; VK_DRIVER_FILES can leave one only", peer.name());
        }
        same
    });

    let mut rows = Vec::new();
    for &tokens in &args.tokens {
        for causal in [false, true] {
            rows.extend(measure(&mut peers, &Inputs::new(tokens, causal, args.gradients), args.runs)?);
        }
    }
    let report = Report { device, gradients: args.gradients, rows };
    print!("{}", report.table());
    if let Some(path) = &args.csv {
        std::fs::write(path, report.csv())?;
    }
    Ok(())
}

fn measure(peers: &mut [Box<dyn Peer>], inputs: &Inputs, runs: usize) -> Result<Vec<Row>> {
    let (expected, flops) = (inputs.reference()?, inputs.flops()?);
    let cores = std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
    let mut rows = Vec::new();
    for peer in &mut *peers {
        eprint!("{} tokens{}: {}", inputs.tokens, if inputs.causal { ", causal" } else { "" }, peer.name());
        let row = first_result(peer.as_mut(), inputs, flops, &expected);
        eprintln!(", {:?}, first result after {:.1} s", row.status, row.first_result_seconds);
        rows.push(row);
    }
    for _ in 0..runs {
        for (peer, row) in peers.iter_mut().zip(&mut rows) {
            if row.status != Status::Right {
                continue;
            }
            let (start, cpu) = (Instant::now(), ProcessTime::now());
            match caught(|| peer.run()) {
                Ok(()) => {
                    row.seconds.push(start.elapsed().as_secs_f64());
                    row.cpu_seconds.push(cpu.elapsed().as_secs_f64() / cores);
                }
                Err(error) => row.status = Status::Failed(format!("{error:#}")),
            }
        }
    }
    Ok(rows)
}

/// Computes once and compares with the reference.
fn first_result(peer: &mut dyn Peer, inputs: &Inputs, flops: u64, expected: &[f64]) -> Row {
    let mut row = Row {
        name: peer.name(),
        package: peer.package(),
        tokens: inputs.tokens,
        causal: inputs.causal,
        flops,
        status: Status::Right,
        max_abs_diff: f64::NAN,
        first_result_seconds: f64::NAN,
        seconds: Vec::new(),
        cpu_seconds: Vec::new(),
    };
    let result = caught(|| {
        peer.upload(inputs)?;
        let start = Instant::now();
        peer.run()?;
        let result = peer.read()?;
        Ok((result, start.elapsed()))
    });
    match result {
        Ok((result, took)) => {
            let compared = reference::compare(&result, expected, WRONG);
            row.max_abs_diff = compared.max_abs_err;
            row.first_result_seconds = took.as_secs_f64();
            if !compared.passed() {
                row.status = Status::Wrong;
            }
        }
        Err(error) => row.status = Status::Failed(format!("{error:#}")),
    }
    row
}

/// Runs code of others, a panic of which is an error.
fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(anyhow!("it panicked: {}", text.unwrap_or("no message")))
    })
}
