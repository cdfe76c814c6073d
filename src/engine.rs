//! The engine: uploads, plans, records, runs, reads back.

use core::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::gpu::{self, Element, EngineOptions, Gpu, Kernel, Launch, MemoryUse, Purpose, Tensor};
use crate::kernels::{Strides, flash_fwd, matmul, softmax_rows, to_u32};
use crate::plan::{self, DeviceFacts, Path, Plan, Route};
use crate::problem::{Attention, Dims, Problem};

/// A device with kernels on it. Cheap to clone; clones share the device, its pipelines and its memory count.
///
/// Calls may come from several threads.
#[derive(Debug, Clone)]
pub struct Engine {
    gpu: Arc<Gpu>,
}

/// What attention gives.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The weighted values: (batch, q_heads, q_len, value_dim).
    pub o: Tensor,
    /// The natural logarithm of each row's sum of e^score: (batch, q_heads, q_len). -inf for a row that sees no key.
    pub lse: Tensor,
}

/// The tensors of one call.
#[derive(Debug, Clone, Copy)]
pub struct Bindings<'a> {
    /// Queries: (batch, q_heads, q_len, head_dim).
    pub q: &'a Tensor,
    /// Keys: (batch, kv_heads, kv_len, head_dim).
    pub k: &'a Tensor,
    /// Values: (batch, kv_heads, kv_len, value_dim).
    pub v: &'a Tensor,
    /// Where the output goes: (batch, q_heads, q_len, value_dim), in a buffer that holds no input.
    pub o: &'a Tensor,
    /// Where the log-sum-exp goes: (batch, q_heads, q_len), likewise.
    pub lse: &'a Tensor,
    /// At least [`Plan::workspace_bytes`] of scratch memory, dense. None where that is 0.
    pub workspace: Option<&'a Tensor>,
}

/// One kernel's work: a number of blocks that don't depend on each other.
struct Step {
    kernel: Kernel,
    tensors: Vec<Tensor>,
    blocks: u64,
    /// The uniform for a range of the blocks.
    params: Box<dyn Fn(Range<u32>) -> Vec<u8>>,
}

impl Step {
    fn record(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, blocks: Range<u64>) -> Result<()> {
        let workgroups = blocks.end - blocks.start;
        let as_u32 = to_u32_block(blocks.start)?..to_u32_block(blocks.end)?;
        let params = (self.params)(as_u32);
        gpu.record(encoder, &Launch { kernel: &self.kernel, params: &params, tensors: &self.tensors, workgroups })
    }
}

fn to_u32_block(block: u64) -> Result<u32> {
    u32::try_from(block).map_err(|_| Error::unsupported("workgroups of one call", block, u32::MAX.into()))
}

/// FLOPs that go into one submission when nobody waits between them: about half a second on a device of 100 GFLOP/s, well
/// within the two seconds that some systems give a submission.
const SUBMISSION_FLOPS: u64 = 50_000_000_000;

/// How long [`Engine::run`] aims to make one submission.
const RUN_SUBMISSION: Duration = Duration::from_millis(250);

/// The fewest workgroups that [`Engine::run`] submits: enough that each core of a software device has some. On a software device a submission may then take longer than aimed at; no watchdog looks there.
const RUN_BLOCKS: u64 = 16;

impl Engine {
    /// Opens wgpu's default adapter with all its limits. Blocks; in a browser use [`Engine::open_async`].
    ///
    /// # Errors
    /// [`crate::GpuError::NoAdapter`] where there is none.
    pub fn new() -> Result<Self> {
        Self::open(&EngineOptions::default())
    }

    /// Opens an adapter. Blocks.
    ///
    /// # Errors
    /// [`crate::GpuError::NoAdapter`] where none fits.
    pub fn open(options: &EngineOptions) -> Result<Self> {
        pollster::block_on(Self::open_async(options))
    }

    /// Opens an adapter.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub async fn open_async(options: &EngineOptions) -> Result<Self> {
        Ok(Self { gpu: Arc::new(Gpu::open(options).await?) })
    }

    /// An engine on a device of the caller's, with whatever limits and features it was made with.
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        Self { gpu: Arc::new(Gpu::with_device(device, queue)) }
    }

    /// The adapters of this machine, in the order that [`crate::AdapterChoice::Index`] counts.
    pub fn adapters() -> Vec<wgpu::Adapter> {
        pollster::block_on(gpu::instance().enumerate_adapters(wgpu::Backends::all()))
    }

    /// The adapter's name, type, backend and driver in one line.
    pub fn describe_adapter(&self) -> String {
        gpu::describe(&self.gpu.info)
    }

    /// What wgpu tells of the adapter.
    pub fn adapter_info(&self) -> &wgpu::AdapterInfo {
        &self.gpu.info
    }

    /// What planning knows of the device.
    pub fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            limits: self.gpu.limits.clone(),
            features: self.gpu.features,
            device_type: self.gpu.info.device_type,
        }
    }

    /// The wgpu device.
    pub fn device(&self) -> &wgpu::Device {
        &self.gpu.device
    }

    /// The wgpu queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.gpu.queue
    }

    /// Copies a dense row-major array to the device.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `data` isn't as long as the shape says; [`Error::Unsupported`] over the device's buffer size;
    /// [`crate::GpuError::OutOfMemory`].
    pub fn upload<T: Element>(&self, data: &[T], shape: impl AsRef<[usize]>) -> Result<Tensor> {
        Tensor::upload(&self.gpu, "tilewise.input", data, shape.as_ref())
    }

    /// A dense tensor of undefined contents, for outputs.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc(&self, shape: impl AsRef<[usize]>) -> Result<Tensor> {
        Tensor::alloc(&self.gpu, "tilewise.output", shape.as_ref(), Purpose::Output)
    }

    /// Scratch memory for a plan.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_workspace(&self, plan: &Plan) -> Result<Option<Tensor>> {
        let elems = usize::try_from(plan.workspace_bytes() / 4).unwrap_or(usize::MAX);
        if elems == 0 {
            return Ok(None);
        }
        Tensor::alloc(&self.gpu, "tilewise.workspace", &[elems], Purpose::Workspace).map(Some)
    }

    /// A dense tensor on a buffer of the caller's, from the given element on. The buffer must be of this engine's device and
    /// have the usage `STORAGE`, and `COPY_SRC` to be read back.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor doesn't fit the buffer or the buffer's usage.
    pub fn borrow(&self, buffer: wgpu::Buffer, offset_elems: usize, shape: impl AsRef<[usize]>) -> Result<Tensor> {
        Tensor::borrow(&self.gpu, buffer, offset_elems, shape.as_ref())
    }

    /// Attention, tiled: the score matrix is never stored. Submits the work and returns at once; reading a result waits for it.
    ///
    /// Shapes: q (batch, q_heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim), v (batch, kv_heads, kv_len,
    /// value_dim), in any strides with a contiguous last axis.
    ///
    /// ```no_run
    /// use tilewise::{Attention, Engine};
    /// # fn main() -> tilewise::Result<()> {
    /// let engine = Engine::new()?;
    /// let (batch, heads, len, dim) = (1, 4, 1000, 64);
    /// let x = vec![0.5f32; batch * heads * len * dim];
    /// let (q, k, v) = (&x, &x, &x);
    /// let shape = [batch, heads, len, dim];
    /// let out = engine.attention(
    ///     &engine.upload(q, shape)?,
    ///     &engine.upload(k, shape)?,
    ///     &engine.upload(v, shape)?,
    ///     &Attention::causal(),
    /// )?;
    /// let o: Vec<f32> = out.o.read()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for shapes and options that don't fit together, [`Error::Unsupported`] for what this device can't do,
    /// [`Error::Gpu`] when it fails.
    pub fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, options: &Attention) -> Result<AttentionOutput> {
        self.attention_by(Path::Auto, q, k, v, options)
    }

    /// Attention by a path of the caller's choice: [`Path::Naive`] is there to be compared with.
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn attention_by(
        &self,
        path: Path,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &Attention,
    ) -> Result<AttentionOutput> {
        let plan = self.plan_by(path, &problem_of(q, k, v, options)?)?;
        let output = self.alloc_output(&plan)?;
        let workspace = self.alloc_workspace(&plan)?;
        let AttentionOutput { o, lse } = &output;
        let bindings = Bindings { q, k, v, o, lse, workspace: workspace.as_ref() };
        let steps = steps(&self.gpu, &plan, &bindings)?;
        let share = plan.problem().flops() / steps.len().max(1) as u64;
        for step in &steps {
            let submissions = share.div_ceil(SUBMISSION_FLOPS).clamp(1, step.blocks.max(1));
            for n in 0..submissions {
                let blocks = step.blocks * n / submissions..step.blocks * (n + 1) / submissions;
                let mut encoder = self.gpu.encoder("tilewise.attention")?;
                step.record(&self.gpu, &mut encoder, blocks)?;
                self.gpu.submit(encoder)?;
            }
        }
        Ok(output)
    }

    /// Output tensors for a plan, dense.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_output(&self, plan: &Plan) -> Result<AttentionOutput> {
        let Dims { batch, q_heads, q_len, value_dim, .. } = plan.problem().dims;
        let o = self.alloc([batch, q_heads, q_len, value_dim])?;
        let lse = Tensor::alloc(&self.gpu, "tilewise.lse", &[batch, q_heads, q_len], Purpose::Output)?;
        Ok(AttentionOutput { o, lse })
    }

    /// Plans a problem for this device.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, problem: &Problem) -> Result<Plan> {
        self.plan_by(Path::Auto, problem)
    }

    /// Plans a problem by a path of the caller's choice.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan_by(&self, path: Path, problem: &Problem) -> Result<Plan> {
        Plan::new(problem, &self.facts(), path)
    }

    /// Runs a plan to its end, in submissions of about a quarter of a second, and tells `progress` after each which part of
    /// the work is done, from 0 to 1. Blocks. How the work is cut has no effect on the result's bits.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when `progress` breaks; else as [`Plan::record`] and [`Engine::attention`].
    pub fn run(
        &self,
        plan: &Plan,
        bindings: &Bindings<'_>,
        mut progress: impl FnMut(f64) -> ControlFlow<()>,
    ) -> Result<()> {
        let steps = steps(&self.gpu, plan, bindings)?;
        for (index, step) in steps.iter().enumerate() {
            // A guess for the first submission, then what the last one took.
            let mut size = (step.blocks / 64).max(RUN_BLOCKS);
            let mut start = 0;
            while start < step.blocks {
                let end = (start + size).min(step.blocks);
                let began = Instant::now();
                let mut encoder = self.gpu.encoder("tilewise.run")?;
                step.record(&self.gpu, &mut encoder, start..end)?;
                self.gpu.submit(encoder)?;
                self.gpu.wait()?;
                let done = (index as f64 + end as f64 / step.blocks as f64) / steps.len() as f64;
                if progress(done).is_break() {
                    return Err(Error::Cancelled);
                }
                size = next_size(size, end - start, began.elapsed());
                start = end;
            }
        }
        Ok(())
    }

    /// A·B for a (.., m, k) and b (.., k, n) with the same leading axes, at most two: c (.., m, n).
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.product(a, b, matmul::Operand::Rows)
    }

    /// A·Bᵀ for a (.., m, k) and b (.., n, k) with the same leading axes, at most two: c (.., m, n).
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn matmul_transposed(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.product(a, b, matmul::Operand::Columns)
    }

    fn product(&self, a: &Tensor, b: &Tensor, operand: matmul::Operand) -> Result<Tensor> {
        let (a4, b4) = (as_matrices("a", a)?, as_matrices("b", b)?);
        let (rows, inner_b, columns) = match operand {
            matmul::Operand::Rows => (a4.shape()[2], b4.shape()[2], b4.shape()[3]),
            matmul::Operand::Columns => (a4.shape()[2], b4.shape()[3], b4.shape()[2]),
        };
        if a4.shape()[..2] != b4.shape()[..2] || a4.shape()[3] != inner_b || a.shape().len() != b.shape().len() {
            return Err(Error::invalid(format!(
                "a of shape {:?} and b of shape {:?}; accepted: equal leading axes and inner sizes",
                a.shape(),
                b.shape()
            )));
        }
        let mut shape = a.shape().to_vec();
        shape.truncate(shape.len() - 2);
        shape.extend([rows, columns]);
        let c = self.alloc(&shape)?;
        let variant = plan::matmul_variant(operand, matmul::Reach::All, inner_b, &self.facts())?;
        let c4 = as_matrices("c", &c)?;
        let product =
            Product { variant, tensors: [&a4, &b4, &c4], m: rows, n: columns, k: inner_b, diagonal: 0, alpha: 1.0 };
        self.submit_step(&product.step(&self.gpu)?)?;
        Ok(c)
    }

    /// Softmax along the last axis of a dense tensor, and each row's log-sum-exp (the shape less its last axis).
    ///
    /// # Errors
    /// [`Error::Invalid`] if `x` isn't dense; else as [`Engine::attention`].
    pub fn softmax_rows(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let Some((&columns, leading)) = x.shape().split_last() else {
            return Err(Error::invalid("a tensor without axes; accepted: one axis or more"));
        };
        if !x.is_dense() {
            return Err(Error::invalid(format!("x with strides {:?}; accepted: a dense tensor", x.strides())));
        }
        let (weights, lse) = (self.alloc(x.shape())?, self.alloc(leading)?);
        let bytes = 4 * x.elems() as u64;
        let mut encoder = self.gpu.encoder("tilewise.softmax_rows")?;
        self.gpu.scoped(|| {
            encoder.copy_buffer_to_buffer(x.raw_buffer(), 4 * x.offset() as u64, weights.raw_buffer(), 0, bytes);
        })?;
        self.gpu.submit(encoder)?;
        let variant = plan::softmax_rows_variant(&self.facts())?;
        let rows: usize = leading.iter().product();
        let diagonal = to_i32(columns as i64)?; // every row reaches every column
        self.submit_step(&softmax_step(&self.gpu, variant, &weights, &lse, [rows, 1, columns], diagonal)?)?;
        Ok((weights, lse))
    }

    fn submit_step(&self, step: &Step) -> Result<()> {
        let mut encoder = self.gpu.encoder("tilewise")?;
        step.record(&self.gpu, &mut encoder, 0..step.blocks)?;
        self.gpu.submit(encoder)
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the device is lost or doesn't finish within `wait_limit`.
    pub fn wait(&self) -> Result<()> {
        self.gpu.wait()
    }

    /// What the engine has allocated on the device, now and at most.
    pub fn memory(&self) -> MemoryUse {
        self.gpu.ledger.snapshot()
    }

    /// Makes the present the new peak.
    pub fn reset_peak(&self) {
        self.gpu.ledger.reset_peak();
    }

    /// What wgpu's own allocator says that the whole device holds, where it can tell: a check on [`Engine::memory`].
    pub fn allocator_report(&self) -> Option<wgpu::AllocatorReport> {
        self.gpu.device.generate_allocator_report()
    }
}

impl Plan {
    /// Records the plan's dispatches into the caller's encoder. Submits nothing and waits for nothing; allocates a uniform
    /// buffer of under 256 bytes a dispatch, which lives as long as the recorded commands. A kernel's first use compiles it.
    ///
    /// ```no_run
    /// use tilewise::{Attention, Bindings, Dims, Engine, Problem, wgpu};
    ///
    /// # fn main() -> tilewise::Result<()> {
    /// let engine = Engine::new()?; // or Engine::with_device(device, queue)
    /// let problem = Problem::new(Dims::square(1, 8, 1000, 64), Attention::causal())?;
    /// let plan = engine.plan(&problem)?;
    /// println!("{plan}");
    /// let x = engine.upload(&vec![0.1f32; 8 * 1000 * 64], [1, 8, 1000, 64])?;
    /// let (out, workspace) = (engine.alloc_output(&plan)?, engine.alloc_workspace(&plan)?);
    ///
    /// let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    /// let (q, k, v) = (&x, &x, &x);
    /// plan.record(&mut encoder, &Bindings { q, k, v, o: &out.o, lse: &out.lse, workspace: workspace.as_ref() })?;
    /// engine.queue().submit([encoder.finish()]);
    /// let o = out.o.read()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if a tensor isn't of the problem's shape, has a last axis that isn't contiguous, or if an output lies in
    /// the buffer of an input or of the other output; [`Error::Unsupported`] if a view spans more than one binding.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, bindings: &Bindings<'_>) -> Result<()> {
        let gpu = bindings.q.gpu();
        for step in steps(gpu, self, bindings)? {
            step.record(gpu, encoder, 0..step.blocks)?;
        }
        Ok(())
    }
}

/// The next submission's size, given how many blocks the last had and what it took.
fn next_size(size: u64, ran: u64, took: Duration) -> u64 {
    let wanted = RUN_SUBMISSION.as_secs_f64() / took.as_secs_f64().max(1e-6) * ran as f64;
    // Grow no more than twofold: the first submissions may have been dearer or cheaper than the rest.
    let grown = wanted.clamp(RUN_BLOCKS as f64, (2 * size.max(RUN_BLOCKS)) as f64);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to a small positive number")]
    let size = grown as u64;
    size
}

/// A tensor of two to four axes as (outer, inner, rows, columns).
fn as_matrices(name: &str, tensor: &Tensor) -> Result<Tensor> {
    let rank = tensor.shape().len();
    if !(2..=4).contains(&rank) {
        return Err(Error::invalid(format!("{name} of shape {:?}; accepted: two to four axes", tensor.shape())));
    }
    (rank..4).try_fold(tensor.clone(), |tensor, _| tensor.unflatten(0, 1))
}

fn to_i32(value: i64) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::invalid(format!("{value}; accepted: within {}..={}", i32::MIN, i32::MAX)))
}

/// The problem that three tensors and options make.
fn problem_of(q: &Tensor, k: &Tensor, v: &Tensor, options: &Attention) -> Result<Problem> {
    let shapes = || format!("q {:?}, k {:?}, v {:?}", q.shape(), k.shape(), v.shape());
    let (
        &[batch, q_heads, q_len, head_dim],
        &[k_batch, kv_heads, kv_len, k_dim],
        &[v_batch, v_heads, v_len, value_dim],
    ) = (q.shape(), k.shape(), v.shape())
    else {
        return Err(Error::invalid(format!("{}; accepted: four axes each, (batch, heads, length, dim)", shapes())));
    };
    if k_batch != batch || v_batch != batch || v_heads != kv_heads || v_len != kv_len || k_dim != head_dim {
        return Err(Error::invalid(format!(
            "{}; accepted: one batch; k and v of the same heads and length; q and k of the same dim",
            shapes()
        )));
    }
    Problem::new(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }, *options)
}

/// What row i of the scores sees: the keys j <= i + diagonal.
fn diagonal(problem: &Problem) -> Result<i32> {
    to_i32(if problem.attention.is_causal() { problem.position_offset() } else { problem.dims.kv_len as i64 })
}

fn steps(gpu: &Arc<Gpu>, plan: &Plan, bindings: &Bindings<'_>) -> Result<Vec<Step>> {
    let problem = plan.problem();
    check(gpu, problem, bindings)?;
    match *plan.route() {
        Route::Tiled(variant) => Ok(vec![flash_fwd_step(gpu, variant, problem, bindings)?]),
        Route::Naive { scores, softmax, values } => naive_steps(gpu, scores, softmax, values, problem, bindings),
    }
}

/// Whether the tensors are what the problem says, on one device, and no output where it would be read or overwritten.
fn check(gpu: &Arc<Gpu>, problem: &Problem, bindings: &Bindings<'_>) -> Result<()> {
    let Bindings { q, k, v, o, lse, workspace } = *bindings;
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = problem.dims;
    for (name, tensor, shape) in [
        ("q", q, &[batch, q_heads, q_len, head_dim][..]),
        ("k", k, &[batch, kv_heads, kv_len, head_dim]),
        ("v", v, &[batch, kv_heads, kv_len, value_dim]),
        ("o", o, &[batch, q_heads, q_len, value_dim]),
        ("lse", lse, &[batch, q_heads, q_len]),
    ] {
        if tensor.shape() != shape {
            return Err(Error::invalid(format!("{name} of shape {:?}; accepted: {shape:?}", tensor.shape())));
        }
    }
    let outputs = [Some(("o", o)), Some(("lse", lse)), workspace.map(|tensor| ("workspace", tensor))];
    let outputs: Vec<_> = outputs.into_iter().flatten().collect();
    for (index, (name, output)) in outputs.iter().enumerate() {
        let others = [("q", q), ("k", k), ("v", v)].into_iter().chain(outputs[..index].iter().copied());
        for (other_name, other) in others {
            if !Arc::ptr_eq(output.gpu(), gpu) || !Arc::ptr_eq(other.gpu(), gpu) {
                return Err(Error::invalid(format!("{name} and {other_name} of different engines; accepted: of one")));
            }
            if output.overlaps(other) {
                return Err(Error::invalid(format!(
                    "{name} overlaps {other_name}; accepted: outputs apart from all else"
                )));
            }
            // WebGPU refuses a buffer that one dispatch both reads and writes, wherever.
            if output.shares_buffer(other) {
                return Err(Error::invalid(format!(
                    "{name} lies in the buffer of {other_name}; accepted: outputs in buffers of their own"
                )));
            }
        }
    }
    Ok(())
}

/// Scores, softmax in place, values: each a pass over score matrices that lie in the workspace.
fn naive_steps(
    gpu: &Gpu,
    scores: matmul::Variant,
    softmax: softmax_rows::Variant,
    values: matmul::Variant,
    problem: &Problem,
    bindings: &Bindings<'_>,
) -> Result<Vec<Step>> {
    let Bindings { q, k, v, o, lse, workspace } = *bindings;
    let Dims { batch, q_heads, q_len, kv_len, head_dim, value_dim, .. } = problem.dims;
    if !lse.is_dense() {
        return Err(Error::invalid(format!("lse with strides {:?}; accepted: a dense tensor", lse.strides())));
    }
    let s = match workspace {
        Some(workspace) => workspace.reinterpret(&[batch, q_heads, q_len, kv_len])?,
        // Without scores there is nothing to keep: an empty view of any other tensor serves.
        None if problem.dims.score_elems() == 0 => q.reinterpret(&[batch, q_heads, q_len, kv_len])?,
        None => {
            return Err(Error::invalid(format!("no workspace; accepted: one of {} bytes", problem.score_bytes())));
        }
    };
    let diagonal = diagonal(problem)?;
    let product = |variant, tensors, n, k, alpha| Product { variant, tensors, m: q_len, n, k, diagonal, alpha };
    Ok(vec![
        product(scores, [q, k, &s], kv_len, head_dim, problem.softmax_scale()).step(gpu)?,
        softmax_step(gpu, softmax, &s, lse, [batch * q_heads, q_len, kv_len], diagonal)?,
        product(values, [&s, v, o], value_dim, kv_len, 1.0).step(gpu)?,
    ])
}

fn flash_fwd_step(gpu: &Gpu, variant: flash_fwd::Variant, problem: &Problem, bindings: &Bindings<'_>) -> Result<Step> {
    let Bindings { q, k, v, o, lse, .. } = *bindings;
    let dims = &problem.dims;
    let q_blocks = dims.q_len.div_ceil(variant.block_q() as usize);
    let params = flash_fwd::Params {
        q: Strides::of_matrices(gpu, "q", q)?,
        k: Strides::of_matrices(gpu, "k", k)?,
        v: Strides::of_matrices(gpu, "v", v)?,
        out: Strides::of_matrices(gpu, "o", o)?,
        lse: Strides::of_vectors(gpu, "lse", lse)?,
        q_len: to_u32(dims.q_len)?,
        kv_len: to_u32(dims.kv_len)?,
        head_dim: to_u32(dims.head_dim)?,
        value_dim: to_u32(dims.value_dim)?,
        q_heads: to_u32(dims.q_heads)?,
        group_size: to_u32(dims.group_size())?,
        q_blocks: to_u32(q_blocks)?,
        first_block: 0,
        end_block: 0,
        diagonal: diagonal(problem)?,
        scale: problem.softmax_scale(),
        pad: 0,
    };
    Ok(Step {
        kernel: variant.kernel(),
        tensors: [q, k, v, o, lse].map(Clone::clone).to_vec(),
        blocks: (q_blocks * dims.q_heads * dims.batch) as u64,
        params: Box::new(move |blocks| {
            let params = flash_fwd::Params { first_block: blocks.start, end_block: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}

/// A batch of matrix products, for its step.
struct Product<'a> {
    variant: matmul::Variant,
    /// a, b and c as (outer, inner, rows, columns).
    tensors: [&'a Tensor; 3],
    m: usize,
    n: usize,
    k: usize,
    diagonal: i32,
    alpha: f32,
}

impl Product<'_> {
    fn step(self, gpu: &Gpu) -> Result<Step> {
        let Self { variant, tensors: [a, b, c], m, n, k, diagonal, alpha } = self;
        let [outer, inner] = [a.shape()[0], a.shape()[1]];
        let m_blocks = m.div_ceil(variant.block_m() as usize);
        let n_blocks = n.div_ceil(variant.block_n() as usize);
        let params = matmul::Params {
            a: Strides::of_matrices(gpu, "a", a)?,
            b: Strides::of_matrices(gpu, "b", b)?,
            c: Strides::of_matrices(gpu, "c", c)?,
            m: to_u32(m)?,
            n: to_u32(n)?,
            k: to_u32(k)?,
            inner: to_u32(inner)?,
            group_size: to_u32(inner.checked_div(b.shape()[1]).unwrap_or(1))?,
            m_blocks: to_u32(m_blocks)?,
            n_blocks: to_u32(n_blocks)?,
            first_block: 0,
            end_block: 0,
            diagonal,
            alpha,
            pad: 0,
        };
        Ok(Step {
            kernel: variant.kernel(),
            tensors: [a, b, c].map(Clone::clone).to_vec(),
            blocks: (m_blocks * n_blocks * outer * inner) as u64,
            params: Box::new(move |blocks| {
                let params = matmul::Params { first_block: blocks.start, end_block: blocks.end, ..params };
                bytemuck::bytes_of(&params).to_vec()
            }),
        })
    }
}

/// Softmax in place over matrices of (matrices, rows of each, columns), row i reaching i + diagonal + 1 columns.
fn softmax_step(
    gpu: &Gpu,
    variant: softmax_rows::Variant,
    x: &Tensor,
    lse: &Tensor,
    [matrices, rows, columns]: [usize; 3],
    diagonal: i32,
) -> Result<Step> {
    let params = softmax_rows::Params {
        x_offset: x.window(&gpu.limits)?.first_elem,
        lse_offset: lse.window(&gpu.limits)?.first_elem,
        columns: to_u32(columns)?,
        rows_per_matrix: to_u32(rows)?,
        diagonal,
        first_row: 0,
        end_row: 0,
        pad: 0,
    };
    Ok(Step {
        kernel: variant.kernel(),
        tensors: vec![x.clone(), lse.clone()],
        blocks: (matrices * rows) as u64,
        params: Box::new(move |blocks| {
            let params = softmax_rows::Params { first_row: blocks.start, end_row: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}
