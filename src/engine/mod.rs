//! The engine: uploads, plans, records, runs, reads back.

mod backward;
mod inputs;
mod steps;

use core::ops::ControlFlow;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use backward::{BackwardBindings, BackwardInputs, Gradients};
pub use inputs::{AttentionOutput, Bindings, Inputs, Mask, MaskElement};

use crate::error::{Error, Result};
use crate::gpu::{self, Element, EngineOptions, Gpu, Kernel, MemoryUse, Purpose, Tensor};
use crate::kernels::{matmul, product};
use crate::plan::{self, BackwardPlan, DeviceFacts, Path, Plan};
use crate::problem::{Attention, DType, Problem, ScoreMod};
use crate::tuning::{Choices, Tuning, TuningChoice};

use steps::{Product, Step, Work, as_matrices, merge_step, softmax_step, to_i32};

/// A device with kernels on it. Cheap to clone; clones share the device, its pipelines and its memory count.
///
/// Calls may come from several threads.
#[derive(Debug, Clone)]
pub struct Engine {
    gpu: Arc<Gpu>,
    choices: Arc<Choices>,
    /// Those whose derivative was found to be one.
    checked_mods: Arc<Mutex<HashSet<ScoreMod>>>,
}

/// FLOPs that go into one submission when nobody waits between them: about half a second on a device of 100 GFLOP/s, well
/// within the two seconds that some systems give a submission.
const SUBMISSION_FLOPS: u64 = 50_000_000_000;

/// How long [`Engine::run`] aims to make one submission.
const RUN_SUBMISSION: Duration = Duration::from_millis(250);

/// The fewest workgroups that [`Engine::run`] submits: enough that each core of a software device has some. On a software device a
/// submission may then take longer than aimed at; no watchdog looks there.
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
    /// [`crate::GpuError::NoAdapter`] where none fits; [`Error::Invalid`] for a tuning file that was asked for and isn't one.
    pub fn open(options: &EngineOptions) -> Result<Self> {
        pollster::block_on(Self::open_async(options))
    }

    /// Opens an adapter.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub async fn open_async(options: &EngineOptions) -> Result<Self> {
        let tuning = match &options.tuning {
            TuningChoice::None => Tuning::default(),
            TuningChoice::File(path) => Tuning::load(path)?,
            TuningChoice::Cache => Tuning::cache_path().and_then(|path| Tuning::load(&path).ok()).unwrap_or_default(),
        };
        Ok(Self { gpu: Arc::new(Gpu::open(options).await?), choices: Arc::default(), checked_mods: Arc::default() }
            .with_tuning(&tuning))
    }

    /// An engine on a device of the caller's, with whatever limits and features it was made with, and no tuning.
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        Self { gpu: Arc::new(Gpu::with_device(device, queue)), choices: Arc::default(), checked_mods: Arc::default() }
    }

    /// The same engine, planning by the choices that `tuning` has for its device.
    #[must_use]
    pub fn with_tuning(self, tuning: &Tuning) -> Self {
        Self { choices: tuning.choices(&self.describe_adapter()), ..self }
    }

    /// Has kernels that are compiled from now on looked up in, and added to, a cache of the caller's. Drivers mostly keep one of their
    /// own; this is for those that don't, and for an app that ships one. The device needs [`wgpu::Features::PIPELINE_CACHE`], and making
    /// a cache from bytes is `unsafe` in wgpu, which is why it's the caller's.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is one already.
    pub fn set_pipeline_cache(&self, cache: wgpu::PipelineCache) -> Result<()> {
        let set = self.gpu.pipeline_cache.set(cache);
        set.map_err(|_| Error::invalid("a second pipeline cache; accepted: one for an engine and its clones"))
    }

    /// Compiles a plan's kernels, as for dense tensors in buffers of their own, so that the first call doesn't wait for it.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses one.
    pub fn warm_up(&self, plan: &Plan) -> Result<()> {
        self.compile(&plan.needed_kernels())
    }

    /// The same for the kernels of gradients.
    ///
    /// # Errors
    /// As [`Engine::warm_up`].
    pub fn warm_up_backward(&self, plan: &BackwardPlan) -> Result<()> {
        self.compile(&plan.needed_kernels())
    }

    fn compile(&self, kernels: &[Kernel]) -> Result<()> {
        kernels.iter().try_for_each(|kernel| self.gpu.pipeline(kernel).map(drop))
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
            min_subgroup_size: self.gpu.info.subgroup_min_size,
            choices: Arc::clone(&self.choices),
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

    /// Copies a boolean mask to the device, packed to bits: true, or a byte that isn't 0, where the query may attend.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn upload_mask<T: MaskElement>(&self, data: &[T], shape: [usize; 4]) -> Result<Mask> {
        Mask::upload(&self.gpu, data, shape)
    }

    /// A dense tensor of undefined contents, for outputs.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc(&self, dtype: DType, shape: impl AsRef<[usize]>) -> Result<Tensor> {
        Tensor::alloc(&self.gpu, "tilewise.output", dtype, shape.as_ref(), Purpose::Output)
    }

    /// Scratch memory for a plan.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_workspace(&self, plan: &Plan) -> Result<Option<Tensor>> {
        self.alloc_scratch(plan.workspace_bytes())
    }

    /// Scratch memory for a plan of gradients.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_backward_workspace(&self, plan: &BackwardPlan) -> Result<Option<Tensor>> {
        self.alloc_scratch(plan.workspace_bytes())
    }

    fn alloc_scratch(&self, bytes: u64) -> Result<Option<Tensor>> {
        let elems = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        if elems == 0 {
            return Ok(None);
        }
        Tensor::alloc(&self.gpu, "tilewise.workspace", DType::F32, &[elems], Purpose::Workspace).map(Some)
    }

    /// A dense tensor on a buffer of the caller's, from the given element on. The buffer must be of this engine's device and
    /// have the usage `STORAGE`, and `COPY_SRC` to be read back, and a size that is a multiple of 4 bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor doesn't fit the buffer or the buffer's usage.
    pub fn borrow(
        &self,
        buffer: wgpu::Buffer,
        dtype: DType,
        offset_elems: usize,
        shape: impl AsRef<[usize]>,
    ) -> Result<Tensor> {
        Tensor::borrow(&self.gpu, buffer, dtype, offset_elems, shape.as_ref())
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
        self.attention_with(&Inputs::new(q, k, v), options)
    }

    /// Attention of q, k, v and whatever else there is: bias, mask, ranges, sinks, what mods read.
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn attention_with(&self, inputs: &Inputs<'_>, options: &Attention) -> Result<AttentionOutput> {
        self.attention_by(Path::Auto, inputs, options)
    }

    /// Attention by a path of the caller's choice: [`Path::Naive`] is there to be compared with.
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn attention_by(&self, path: Path, inputs: &Inputs<'_>, options: &Attention) -> Result<AttentionOutput> {
        let plan = self.plan_by(path, &inputs.problem(options)?)?;
        let output = self.alloc_output(&plan)?;
        let workspace = self.alloc_workspace(&plan)?;
        let AttentionOutput { o, lse } = &output;
        let work = Work::of(&self.gpu, &plan, &Bindings { inputs: *inputs, o, lse, workspace: workspace.as_ref() })?;
        self.submit(&work, plan.problem().flops(), "tilewise.attention")?;
        Ok(output)
    }

    /// Submits work of so many FLOPs in parts that no watchdog finds too long.
    fn submit(&self, work: &Work, flops: u64, label: &'static str) -> Result<()> {
        let share = flops / work.steps.len().max(1) as u64;
        let mut encoder = self.gpu.encoder(label)?;
        work.record_copies(&self.gpu, &mut encoder)?;
        for step in &work.steps {
            let submissions = share.div_ceil(SUBMISSION_FLOPS).clamp(1, step.blocks.max(1));
            for n in 0..submissions {
                let blocks = step.blocks * n / submissions..step.blocks * (n + 1) / submissions;
                step.record(&self.gpu, &mut encoder, blocks)?;
                let full = core::mem::replace(&mut encoder, self.gpu.encoder(label)?);
                self.gpu.submit(full)?;
            }
        }
        Ok(())
    }

    /// The gradients of attention, from what it read, what it gave, and the gradients of that: those of
    /// `Σ o · grad_o + Σ lse · grad_lse`, the second sum over the rows with a finite lse. Submits the work and returns at once.
    ///
    /// The scores are computed again, a tile at a time; nothing is added to by two workgroups, so that the same call gives the same bits.
    /// Besides the gradients it takes 8 bytes of memory a row of queries of each head. A row that saw no key has gradients of 0; a masked
    /// key has no effect, whatever is stored there.
    ///
    /// ```no_run
    /// use tilewise::{Attention, BackwardInputs, Engine, Inputs};
    /// # fn main() -> tilewise::Result<()> {
    /// # let engine = Engine::new()?;
    /// # let x = engine.upload(&vec![0.1f32; 4 * 100 * 64], [1, 4, 100, 64])?;
    /// # let (q, k, v, grad_o) = (&x, &x, &x, &x);
    /// let (inputs, options) = (Inputs::new(q, k, v), Attention::causal());
    /// let out = engine.attention_with(&inputs, &options)?;
    /// // grad_o, of the shape of out.o, is the loss's gradient with respect to it.
    /// let given = BackwardInputs { inputs, o: &out.o, lse: &out.lse, grad_o, grad_lse: None };
    /// let gradients = engine.attention_backward(&given, &options)?;
    /// let dq: Vec<f32> = gradients.dq.read()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::attention`], and as [`BackwardPlan::new`].
    pub fn attention_backward(&self, inputs: &BackwardInputs<'_>, options: &Attention) -> Result<Gradients> {
        let options = options.clone().output_dtype(inputs.o.dtype());
        let plan = self.plan_backward(&inputs.inputs.problem(&options)?)?;
        self.check_derivative(plan.problem(), inputs.inputs.mod_data)?;
        let gradients = self.alloc_gradients(&plan)?;
        let workspace = self.alloc_scratch(plan.workspace_bytes())?;
        let bindings = BackwardBindings { inputs: *inputs, gradients: &gradients, workspace: workspace.as_ref() };
        let work = backward::work_of(&self.gpu, &plan, &bindings)?;
        self.submit(&work, plan.flops(), "tilewise.attention_backward")?;
        Ok(gradients)
    }

    /// Plans the gradients of a problem for this device.
    ///
    /// # Errors
    /// As [`BackwardPlan::new`].
    pub fn plan_backward(&self, problem: &Problem) -> Result<BackwardPlan> {
        BackwardPlan::new(problem, &self.facts())
    }

    /// Compares the derivative of a problem's `score_mod` with differences of it, on the device, at scores within ±6. Blocks the first time
    /// that an engine meets a `score_mod`; after that it's known to be right. Without a `score_mod` all is well.
    ///
    /// # Errors
    /// [`Error::Invalid`] with a score at which it's wrong; [`Error::Gpu`].
    pub fn check_derivative(&self, problem: &Problem, mod_data: Option<&Tensor>) -> Result<()> {
        let Some(score_mod) = &problem.attention.score_mod else { return Ok(()) };
        let checked = || self.checked_mods.lock().unwrap_or_else(PoisonError::into_inner);
        if !checked().contains(score_mod) {
            backward::check_derivative(&self.gpu, problem, mod_data)?;
            checked().insert(score_mod.clone());
        }
        Ok(())
    }

    /// Tensors for the gradients of a plan, dense.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_gradients(&self, plan: &BackwardPlan) -> Result<Gradients> {
        backward::alloc_gradients(&self.gpu, plan.problem())
    }

    /// What attention over all keys gives, from its results `a` and `b` over two parts of them: keys that lie in several buffers, come in
    /// chunks, or belong to a prefix that several sequences share. A row that saw no key in one part (lse -inf) is the other's, bit for
    /// bit. o is stored as that of `a`; in f16 or bf16 each merge rounds it, so that many parts want f32
    /// ([`Attention::output_dtype`]).
    ///
    /// Positions are each call's own: a part that isn't the last needs its causal corner, window and ALiBi told by
    /// [`crate::Inputs::ranges`], a bias or a mask. Sinks belong to one part alone, else they count twice.
    ///
    /// ```no_run
    /// use tilewise::{Attention, Engine};
    /// # fn main() -> tilewise::Result<()> {
    /// let engine = Engine::new()?;
    /// # let (q, k, v) = (vec![0.1f32; 64], vec![0.1f32; 5000 * 64], vec![0.1f32; 5000 * 64]);
    /// let q = engine.upload(&q, [1, 1, 1, 64])?;
    /// // 5000 keys, a thousand at a time.
    /// let mut state = None;
    /// for (k, v) in k.chunks(1000 * 64).zip(v.chunks(1000 * 64)) {
    ///     let (k, v) = (engine.upload(k, [1, 1, 1000, 64])?, engine.upload(v, [1, 1, 1000, 64])?);
    ///     let part = engine.attention(&q, &k, &v, &Attention::full())?;
    ///     state = Some(match state {
    ///         None => part,
    ///         Some(state) => engine.merge(&state, &part)?,
    ///     });
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Causal: row `i` sees the keys `0..=i` of all, so `0..i + 1 - start` of the chunk that begins at key `start`.
    ///
    /// ```no_run
    /// # use tilewise::{Attention, Engine, Inputs};
    /// # fn main() -> tilewise::Result<()> {
    /// # let engine = Engine::new()?;
    /// # let (q, chunk_k, chunk_v) = (vec![0.1f32; 256 * 64], vec![0.1f32; 64 * 64], vec![0.1f32; 64 * 64]);
    /// let q = engine.upload(&q, [1, 1, 256, 64])?;
    /// let start = 128; // a chunk of 64 keys, of 256
    /// let (k, v) = (engine.upload(&chunk_k, [1, 1, 64, 64])?, engine.upload(&chunk_v, [1, 1, 64, 64])?);
    /// let ranges: Vec<u32> = (0..256u32).flat_map(|i| [0, (i + 1).saturating_sub(start).min(64)]).collect();
    /// let ranges = engine.upload(&ranges, [1, 1, 256, 2])?;
    /// let inputs = Inputs { ranges: Some(&ranges), ..Inputs::new(&q, &k, &v) };
    /// let part = engine.attention_with(&inputs, &Attention::full())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for states of different shapes or engines; else as [`Engine::attention`].
    pub fn merge(&self, a: &AttentionOutput, b: &AttentionOutput) -> Result<AttentionOutput> {
        for tensor in [&a.o, &a.lse, &b.o, &b.lse] {
            if !Arc::ptr_eq(tensor.gpu(), &self.gpu) {
                return Err(Error::invalid("a state of another engine; accepted: of this one"));
            }
        }
        let out =
            AttentionOutput { o: self.alloc(a.o.dtype(), a.o.shape())?, lse: self.alloc(DType::F32, a.lse.shape())? };
        self.submit_step(&merge_step(&self.gpu, a, b, &out)?)?;
        Ok(out)
    }

    /// Output tensors for a plan, dense.
    ///
    /// # Errors
    /// As [`Engine::upload`].
    pub fn alloc_output(&self, plan: &Plan) -> Result<AttentionOutput> {
        inputs::alloc_output(&self.gpu, plan)
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
        progress: impl FnMut(f64) -> ControlFlow<()>,
    ) -> Result<()> {
        self.run_work(&Work::of(&self.gpu, plan, bindings)?, progress)
    }

    /// Runs a plan of gradients to its end, as [`Engine::run`] does.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when `progress` breaks; else as [`BackwardPlan::record`] and [`Engine::attention_backward`].
    pub fn run_backward(
        &self,
        plan: &BackwardPlan,
        bindings: &BackwardBindings<'_>,
        progress: impl FnMut(f64) -> ControlFlow<()>,
    ) -> Result<()> {
        self.run_work(&backward::work_of(&self.gpu, plan, bindings)?, progress)
    }

    fn run_work(&self, work: &Work, mut progress: impl FnMut(f64) -> ControlFlow<()>) -> Result<()> {
        let mut encoder = self.gpu.encoder("tilewise.run")?;
        work.record_copies(&self.gpu, &mut encoder)?;
        self.gpu.submit(encoder)?;
        let steps = &work.steps;
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

    /// The kernel that [`Engine::matmul`] runs for a and b, or [`Engine::matmul_transposed`], with what is baked into it.
    ///
    /// # Errors
    /// As they have, of the shapes.
    pub fn matmul_kernel(&self, a: &Tensor, b: &Tensor, transposed: bool) -> Result<String> {
        let operand = if transposed { matmul::Operand::Columns } else { matmul::Operand::Rows };
        Ok(self.factors(a, b, operand)?.variant.kernel().recipe.label())
    }

    fn factors(&self, a: &Tensor, b: &Tensor, operand: matmul::Operand) -> Result<Factors> {
        let (a4, b4) = (as_matrices("a", a)?, as_matrices("b", b)?);
        let (m, inner_b, n) = match operand {
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
        let matrices = a4.shape()[0] * a4.shape()[1];
        let dims = [m, n, inner_b];
        let variant = plan::product_variant(operand, matmul::Reach::All, matrices, dims, &self.facts())?;
        Ok(Factors { a: a4, b: b4, dims, variant })
    }

    fn product(&self, a: &Tensor, b: &Tensor, operand: matmul::Operand) -> Result<Tensor> {
        let Factors { a: a4, b: b4, dims: [m, n, k], variant } = self.factors(a, b, operand)?;
        let mut shape = a.shape().to_vec();
        shape.truncate(shape.len() - 2);
        shape.extend([m, n]);
        let c = self.alloc(DType::F32, &shape)?;
        let c4 = as_matrices("c", &c)?;
        let product = Product { variant, tensors: [&a4, &b4, &c4], m, n, k, diagonal: 0, alpha: 1.0 };
        for step in product.steps(&self.gpu)? {
            self.submit_step(&step)?;
        }
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
        if !x.is_dense() || x.dtype() != DType::F32 {
            return Err(Error::invalid(format!(
                "x of {} with strides {:?}; accepted: a dense tensor of f32",
                x.dtype(),
                x.strides()
            )));
        }
        let (weights, lse) = (self.alloc(DType::F32, x.shape())?, self.alloc(DType::F32, leading)?);
        let bytes = 4 * x.elems() as u64;
        let mut encoder = self.gpu.encoder("tilewise.softmax_rows")?;
        self.gpu.scoped(|| {
            encoder.copy_buffer_to_buffer(x.raw_buffer(), 4 * x.offset() as u64, weights.raw_buffer(), 0, bytes);
        })?;
        self.gpu.submit(encoder)?;
        let variant = plan::softmax_rows_variant(columns, &self.facts())?;
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

    /// Frees the device memory that is only kept for later calls: uniforms, 16 KiB at most. Compiled kernels stay.
    pub fn trim(&self) {
        self.gpu.trim();
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

/// What a matrix product is of.
struct Factors {
    /// (outer, inner, rows, columns)
    a: Tensor,
    b: Tensor,
    /// m, n and k.
    dims: [usize; 3],
    variant: product::Variant,
}

impl Plan {
    /// Records the plan's dispatches into the caller's encoder. Submits nothing and waits for nothing. Allocates nothing on the device when
    /// the same call is recorded again; else, on devices whose immediates are too small for a kernel's parameters, a uniform of 240 bytes or
    /// less, of which the engine keeps the last 64; and where lengths or ALiBi slopes are given a buffer for them, which lives as long as
    /// the recorded commands. A kernel's first use compiles it ([`Engine::warm_up`]).
    ///
    /// ```no_run
    /// use tilewise::{Attention, Bindings, Dims, Engine, Inputs, Problem, wgpu};
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
    /// let inputs = Inputs::new(&x, &x, &x);
    /// plan.record(&mut encoder, &Bindings { inputs, o: &out.o, lse: &out.lse, workspace: workspace.as_ref() })?;
    /// engine.queue().submit([encoder.finish()]);
    /// let o = out.o.read()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if a tensor isn't of the problem's shape and type, has a last axis that isn't contiguous, or if an output
    /// overlaps an input or the other output (elsewhere in one buffer they may lie); [`Error::Unsupported`] if a view spans more than
    /// one binding.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, bindings: &Bindings<'_>) -> Result<()> {
        let gpu = bindings.inputs.q.gpu();
        Work::of(gpu, self, bindings)?.record(gpu, encoder)
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
