//! `cargo bench`: what the library's calls take on this machine's adapter. Each result is compared with the CPU reference before it is
//! timed, and no adapter is a failure.
//!
//! ```sh
//! cargo bench                                  # everything: a minute and a half on two cores of lavapipe
//! cargo bench -- forward/head_dim_64           # what has this in its name
//! cargo bench -- --save-baseline before        # then change something, and
//! cargo bench -- --baseline before             # see what it changed
//! cargo bench -- --test                        # every call once, checked: no figures
//! ```
//!
//! This is for whoever changes a kernel: a few shapes that stay the same, and a comparison with the last run. `tilewise bench` is for
//! any shape, with memory, naive attention and the machine's best beside it. An "element" of criterion's throughput is a floating-point
//! operation, so that its Gelem/s are GFLOP/s.

mod random;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use tilewise::half::f16;
use tilewise::reference::{self, Case, Comparison, Precision, Row};
use tilewise::{
    Attention, AttentionOutput, Bindings, DType, Dims, Engine, Inputs, Plan, Problem, Storage, Tensor, wgpu,
};

use random::random;

/// Rows, and of a matrix product columns too, that are compared with the reference.
const CHECKED: usize = 16;

fn main() -> Result<()> {
    let engine = Engine::new().context("cargo bench measures a GPU, or a software driver (scripts/vulkan.sh)")?;
    eprintln!("adapter: {}", engine.describe_adapter());
    // One call is long against the clock's resolution, and on a software device long altogether: ten are enough.
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(4))
        .without_plots()
        .configure_from_args();
    forward(&mut criterion, &engine);
    matmul(&mut criterion, &engine);
    plan_and_record(&mut criterion, &engine);
    criterion.final_summary();
    Ok(())
}

/// Attention, from recording to the device's completion, into buffers that are there already.
fn forward(criterion: &mut Criterion, engine: &Engine) {
    let mut group = criterion.benchmark_group("forward");
    group.sampling_mode(SamplingMode::Flat);
    let f32s = Storage::default();
    let f16_kv = Storage { k: DType::F16, v: DType::F16, ..f32s };
    let cases = [
        ("head_dim_64", Dims::square(1, 4, 1024, 64), Attention::full(), f32s),
        ("head_dim_64_causal", Dims::square(1, 4, 1024, 64), Attention::causal(), f32s),
        ("head_dim_64_f16_kv", Dims::square(1, 4, 1024, 64), Attention::full(), f16_kv),
        ("head_dim_80", Dims::square(1, 4, 512, 80), Attention::full(), f32s),
        ("head_dim_128", Dims::square(1, 4, 512, 128), Attention::full(), f32s),
        ("decode", decode_dims(), Attention::causal(), f32s),
    ];
    for (name, dims, attention, storage) in cases {
        let problem = problem(dims, attention, storage);
        bench(&mut group, name, problem.flops(), || {
            let forward = Forward::checked(engine, &problem)?;
            Ok(move || {
                let start = Instant::now();
                forward.run()?;
                Ok(start.elapsed())
            })
        });
    }
}

/// Matrix products of the library's own kernel; the output's allocation is part of the call.
fn matmul(criterion: &mut Criterion, engine: &Engine) {
    let mut group = criterion.benchmark_group("matmul");
    group.sampling_mode(SamplingMode::Flat);
    // A square one, and a projection of 1024 tokens by weights that lie as frameworks store them, an output a row.
    for (name, [m, k, n], transposed) in [("512", [512; 3], false), ("1024x768x768_transposed", [1024, 768, 768], true)]
    {
        bench(&mut group, name, 2 * (m * k * n) as u64, || {
            let b_shape = if transposed { [n, k] } else { [k, n] };
            let (a_host, b_host) = (random(1, m * k), random(2, k * n));
            let (a, b) = (engine.upload(&a_host, [m, k])?, engine.upload(&b_host, b_shape)?);
            let product = move || -> tilewise::Result<Tensor> {
                let c = if transposed { engine.matmul_transposed(&a, &b) } else { engine.matmul(&a, &b) }?;
                engine.wait()?;
                Ok(c)
            };
            check_product([m, k, n], &a_host, &b_host, transposed, &product()?.read()?)?;
            Ok(move || {
                let start = Instant::now();
                product()?;
                Ok(start.elapsed())
            })
        });
    }
}

/// What a call costs the host before anything is submitted, once the kernels are compiled: planning, and recording into an encoder.
/// wgpu checks commands only when the encoder is finished, hence the second of each pair.
fn plan_and_record(criterion: &mut Criterion, engine: &Engine) {
    let mut group = criterion.benchmark_group("plan_and_record");
    group.sample_size(50);
    let cases = [
        ("prefill", Dims::square(1, 4, 256, 64), false),
        ("prefill_and_finish", Dims::square(1, 4, 256, 64), true),
        ("decode", decode_dims(), false),
        ("decode_and_finish", decode_dims(), true),
    ];
    for (name, dims, finish) in cases {
        let problem = problem(dims, Attention::causal(), Storage::default());
        bench(&mut group, name, 0, || {
            let forward = Forward::checked(engine, &problem)?;
            let problem = &problem;
            Ok(move || {
                // What the last call left in the encoder that nobody submitted is freed here; wgpu keeps what a new buffer was filled from
                // until something is submitted.
                engine.queue().submit([]);
                engine.device().poll(wgpu::PollType::Poll)?;
                let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
                let start = Instant::now();
                engine.plan(problem)?.record(&mut encoder, &forward.bindings())?;
                let commands = finish.then(|| encoder.finish());
                let elapsed = start.elapsed();
                drop(commands);
                Ok(elapsed)
            })
        });
    }
}

/// Times the call that `prepare` makes, which says itself what it took. Nothing is prepared for a benchmark that the filter leaves out.
/// `flops`: 0 where there is no rate to give.
fn bench<Call: FnMut() -> Result<Duration>>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    flops: u64,
    prepare: impl Fn() -> Result<Call>,
) {
    // criterion takes no errors; a panic ends it, with a status that says so.
    let failed = |error| -> ! { panic!("{name}: {error:?}") };
    let mut call = None;
    let mut times = Vec::new();
    if flops > 0 {
        group.throughput(Throughput::Elements(flops));
    }
    group.bench_function(name, |bencher| {
        let call = call.get_or_insert_with(|| prepare().unwrap_or_else(|error| failed(error)));
        bencher.iter_custom(|iters| {
            let first = times.len();
            times.extend((0..iters).map(|_| call().unwrap_or_else(|error| failed(error))));
            times[first..].iter().sum()
        });
    });
    // criterion gives the mean; a busy machine spoils that one first.
    times.sort_unstable();
    if let Some(&median) = times.get(times.len() / 2) {
        let rate =
            if flops > 0 { format!(", {:.2} GFLOP/s", flops as f64 / median.as_nanos() as f64) } else { "".into() };
        println!("{:24}median: {median:.3?} of {} calls{rate}", "", times.len());
    }
}

/// One query row of eight heads, on two key/value heads with 4096 keys.
fn decode_dims() -> Dims {
    Dims { q_heads: 8, kv_heads: 2, q_len: 1, ..Dims::square(1, 8, 4096, 64) }
}

fn problem(dims: Dims, attention: Attention, storage: Storage) -> Problem {
    Problem::new(dims, attention).and_then(|problem| problem.storage(storage)).expect("the cases above are valid")
}

/// One attention call with all its buffers.
struct Forward<'a> {
    engine: &'a Engine,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: AttentionOutput,
    workspace: Option<Tensor>,
}

impl<'a> Forward<'a> {
    /// Runs the problem once, which compiles its kernels, and compares the result with the reference.
    fn checked(engine: &'a Engine, problem: &Problem) -> Result<Self> {
        let plan = engine.plan(problem)?;
        let (dims, stored) = (problem.dims(), problem.stored());
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = dims;
        // The host keeps the very numbers that the device gets, rounded.
        let upload = |dtype, seed, shape: [usize; 4]| -> Result<(Vec<f32>, Tensor)> {
            let numbers = random(seed, shape.iter().product());
            if dtype != DType::F16 {
                let tensor = engine.upload(&numbers, shape)?;
                return Ok((numbers, tensor));
            }
            let rounded: Vec<f16> = numbers.into_iter().map(f16::from_f32).collect();
            Ok((rounded.iter().map(|x| x.to_f32()).collect(), engine.upload(&rounded, shape)?))
        };
        let (q_host, q) = upload(stored.q, 1, [batch, q_heads, q_len, head_dim])?;
        let (k_host, k) = upload(stored.k, 2, [batch, kv_heads, kv_len, head_dim])?;
        let (v_host, v) = upload(stored.v, 3, [batch, kv_heads, kv_len, value_dim])?;
        let (output, workspace) = (engine.alloc_output(&plan)?, engine.alloc_workspace(&plan)?);
        let forward = Self { engine, plan, q, k, v, output, workspace };
        forward.run()?;

        let case = Case {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q: &q_host,
            k: &k_host,
            v: &v_host,
            causal: problem.attention().is_causal(),
            ..Case::default()
        };
        forward.check(&case)?;
        Ok(forward)
    }

    fn check(&self, case: &Case<'_>) -> Result<()> {
        let picked = spread(case.batch * case.q_heads * case.q_len);
        let row = |n: usize| Row {
            batch: n / case.q_len / case.q_heads,
            head: n / case.q_len % case.q_heads,
            row: n % case.q_len,
        };
        let expected = reference::attention_rows(case, &picked.iter().map(|&n| row(n)).collect::<Vec<_>>())?;
        let (all_o, all_lse) = (self.output.o.read()?, self.output.lse.read()?);
        let o: Vec<f32> =
            picked.iter().flat_map(|&n| &all_o[n * case.value_dim..][..case.value_dim]).copied().collect();
        let lse: Vec<f32> = picked.iter().map(|&n| all_lse[n]).collect();
        require("o", &reference::compare(&o, &expected.o, expected.tolerance.o(Precision::F32)))?;
        require("lse", &reference::compare(&lse, &expected.lse, expected.tolerance.lse()))
    }

    fn bindings(&self) -> Bindings<'_> {
        Bindings {
            inputs: Inputs::new(&self.q, &self.k, &self.v),
            o: &self.output.o,
            lse: &self.output.lse,
            workspace: self.workspace.as_ref(),
        }
    }

    fn run(&self) -> Result<()> {
        let mut encoder = self.engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        self.plan.record(&mut encoder, &self.bindings())?;
        self.engine.queue().submit([encoder.finish()]);
        Ok(self.engine.wait()?)
    }
}

/// Compares the elements where some rows and some columns meet.
fn check_product([m, k, n]: [usize; 3], a: &[f32], b: &[f32], transposed: bool, c: &[f32]) -> Result<()> {
    let (rows, columns) = (spread(m), spread(n));
    let a: Vec<f32> = rows.iter().flat_map(|&i| &a[i * k..][..k]).copied().collect();
    let b: Vec<f32> = columns
        .iter()
        .flat_map(|&j| (0..k).map(move |p| if transposed { b[j * k + p] } else { b[p * n + j] }))
        .collect();
    let expected = reference::matmul_transposed(1, [rows.len(), k, columns.len()], &a, &b)?;
    let got: Vec<f32> = rows.iter().flat_map(|&i| columns.iter().map(move |&j| c[i * n + j])).collect();
    let tolerance = (k as f64 + 1.0) * Precision::F32.unit_roundoff() * expected.mag;
    require("the product", &reference::compare(&got, &expected.c, tolerance))
}

fn require(what: &str, comparison: &Comparison) -> Result<()> {
    ensure!(comparison.passed(), "{what} is not the f64 reference's: {comparison}");
    Ok(())
}

/// Some numbers spread over `0..size`, its first and last among them.
fn spread(size: usize) -> Vec<usize> {
    let count = CHECKED.min(size);
    (0..count).map(|n| if count == 1 { size - 1 } else { n * (size - 1) / (count - 1) }).collect()
}
