//! Engines that tests hand on to each other, inputs amid NaN, outputs amid guard words, and the one way to check a problem.

use std::io::Write;
use std::sync::{Mutex, OnceLock};

use half::{bf16, f16};
use tilewise::reference::{self, Case, Output, Precision};
use tilewise::{
    Align, Attention, Bindings, DType, DeviceFacts, Dims, Engine, EngineOptions, Error, GpuError, Inputs, LimitsChoice,
    Path, Plan, Problem, Tensor, TuningChoice, wgpu,
};

/// Opens a device of its own, or says why there is none.
pub(crate) fn open(limits: LimitsChoice) -> Option<Engine> {
    match Engine::open(&EngineOptions { limits, tuning: TuningChoice::None, ..EngineOptions::default() }) {
        Ok(engine) => Some(engine),
        Err(Error::Gpu(GpuError::NoAdapter(reason))) => {
            let adapters: Vec<_> = Engine::adapters().iter().map(wgpu::Adapter::get_info).collect();
            let message = format!("NO GPU ADAPTER: {reason}; there are: {adapters:?}");
            assert_ne!(std::env::var("REQUIRE_GPU").as_deref(), Ok("1"), "{message}");
            // Past the capture of passing tests' output.
            let _ = writeln!(std::io::stderr(), "\n{message}\nTHIS TEST DID NOTHING (REQUIRE_GPU=1 makes it fail)\n");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// An engine on a device that the test makes with the given limits, as an app would.
pub(crate) fn with_limits(limits: wgpu::Limits) -> Option<Engine> {
    // Whether there is one at all, and the complaint where there is none.
    with_default_limits()?;
    let options = wgpu::RequestAdapterOptions::default();
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let (device, queue) = pollster::block_on(async {
        let adapter = instance.request_adapter(&options).await.unwrap();
        adapter.request_device(&descriptor).await.unwrap()
    });
    Some(Engine::with_device(device, queue))
}

/// Both engines of this test. Empty without an adapter.
pub(crate) fn engines() -> Vec<&'static Engine> {
    [with_adapter_limits(), with_default_limits()].into_iter().flatten().collect()
}

/// The engine that has everything the adapter has.
pub(crate) fn with_adapter_limits() -> Option<&'static Engine> {
    LENT.with(|lent| lent.0.with_adapter_limits.get_or_init(|| open(LimitsChoice::Adapter)).as_ref())
}

/// The engine that has wgpu's default limits and no optional feature.
pub(crate) fn with_default_limits() -> Option<&'static Engine> {
    LENT.with(|lent| lent.0.with_default_limits.get_or_init(|| open(LimitsChoice::Default)).as_ref())
}

/// The engines that one test at a time has, handed on to the next with the pipelines that they have. Tests that run beside each other
/// have engines of their own: a driver like lavapipe compiles one pipeline of a device at a time, and that is what tests wait for.
#[derive(Default)]
struct Engines {
    with_adapter_limits: OnceLock<Option<Engine>>,
    with_default_limits: OnceLock<Option<Engine>>,
}

/// What the thread of a test has until it ends.
struct Lent(&'static Engines);

static FREE: Mutex<Vec<&'static Engines>> = Mutex::new(Vec::new());

thread_local! {
    static LENT: Lent = {
        let free = FREE.lock().unwrap().pop();
        Lent(free.unwrap_or_else(|| Box::leak(Box::default())))
    };
}

impl Drop for Lent {
    fn drop(&mut self) {
        FREE.lock().unwrap().push(self.0);
    }
}

/// Numbers in [-range, range) that a seed fixes (`SplitMix64`), each used to its last bit.
pub(crate) fn random(seed: u64, range: f32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bits = u32::try_from((x ^ (x >> 31)) >> 40).unwrap();
        range * (f64::from(bits) / f64::from(1 << 23) - 1.0) as f32
    };
    (0..len).map(|_| next()).collect()
}

/// A problem whose data follow from a seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) dims: Dims,
    /// None: every query sees every key.
    pub(crate) causal: Option<Align>,
    pub(crate) scale: Option<f32>,
    /// Queries and keys are within ± this.
    pub(crate) range: f32,
    pub(crate) seed: u64,
}

/// Host copies of q, k and v, dense.
#[derive(Debug, Clone)]
pub(crate) struct Data {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// The three kinds of mask that there are.
pub(crate) const MASKS: [Option<Align>; 3] = [None, Some(Align::BottomRight), Some(Align::TopLeft)];

/// One head, one batch entry.
pub(crate) fn one_head(q_len: usize, kv_len: usize, head_dim: usize, value_dim: usize) -> Dims {
    Dims { q_len, kv_len, value_dim, ..Dims::square(1, 1, 1, head_dim) }
}

impl Setup {
    pub(crate) fn new(dims: Dims, causal: Option<Align>) -> Self {
        Self { dims, causal, scale: None, range: 1.0, seed: 1 }
    }

    pub(crate) fn options(&self) -> Attention {
        let options = self.causal.map_or(Attention::full(), |align| Attention::causal().align(align));
        self.scale.map_or(options.clone(), |scale| options.softmax_scale(scale))
    }

    pub(crate) fn problem(&self) -> Problem {
        Problem::new(self.dims, self.options()).unwrap()
    }

    pub(crate) fn data(&self) -> Data {
        let Self { dims, range, seed, .. } = *self;
        Data {
            q: random(3 * seed, range, dims.q_elems()),
            k: random(3 * seed + 1, range, dims.k_elems()),
            v: random(3 * seed + 2, 1.0, dims.v_elems()),
        }
    }

    pub(crate) fn reference(&self, data: &Data) -> Output {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.dims;
        let align = match self.causal {
            Some(Align::TopLeft) => reference::Align::TopLeft,
            _ => reference::Align::BottomRight,
        };
        reference::attention(&Case {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q: &data.q,
            k: &data.k,
            v: &data.v,
            softmax_scale: self.scale.map(f64::from),
            causal: self.causal.is_some(),
            align,
            ..Case::default()
        })
        .unwrap()
    }

    /// Checks random data by every plan on both engines.
    #[track_caller]
    pub(crate) fn check(&self) {
        let data = self.data();
        let expected = self.reference(&data);
        for engine in engines() {
            self.check_on(engine, &data, &expected);
        }
    }

    #[track_caller]
    pub(crate) fn check_on(&self, engine: &Engine, data: &Data, expected: &Output) {
        let inputs = Tensors::amid_nan(engine, &self.dims, data);
        for plan in plans(engine, &self.problem()) {
            assert_matches(&inputs.run(engine, &plan), expected, &format!("{self:?} {:?}", plan.kernels()));
        }
    }
}

/// What came back: o and lse.
pub(crate) type Results = (Vec<f32>, Vec<f32>);

#[track_caller]
pub(crate) fn assert_matches((o, lse): &Results, expected: &Output, what: &str) {
    let tolerance = expected.tolerance;
    let comparison = reference::compare(o, &expected.o, tolerance.o(Precision::F32));
    assert!(comparison.passed(), "o of {what}: {comparison}");
    let comparison = reference::compare(lse, &expected.lse, tolerance.lse());
    assert!(comparison.passed(), "lse of {what}: {comparison}");
}

/// Fails unless every element is within `tolerance`, and infinite or NaN where it should be.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    let comparison = reference::compare(got, expected, tolerance);
    assert!(comparison.passed(), "{what}: {comparison}");
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Every way that this device has to compute a problem: the tiles meant for software devices and those meant for GPUs, whichever it
/// is, and naive with either kind of product.
pub(crate) fn plans(engine: &Engine, problem: &Problem) -> Vec<Plan> {
    let mut plans = tiled_plans(engine, problem);
    for facts in kinds(engine) {
        add(&mut plans, Plan::new(problem, &facts, Path::Naive).unwrap());
    }
    assert!(plans.len() >= 4, "{plans:?}");
    plans
}

/// Those of them that are tiled.
pub(crate) fn tiled_plans(engine: &Engine, problem: &Problem) -> Vec<Plan> {
    let mut plans = Vec::new();
    for facts in kinds(engine) {
        for plan in Plan::candidates(problem, &facts).unwrap() {
            add(&mut plans, plan);
        }
    }
    plans
}

/// Two of them, that of a software device's choice and the smallest meant for a GPU: what options do differs little between tiles, and
/// every kernel takes its time to compile.
pub(crate) fn two_tiled_plans(engine: &Engine, problem: &Problem) -> Vec<Plan> {
    let mut plans = tiled_plans(engine, problem);
    plans.drain(1..plans.len() - 1);
    plans
}

/// The device as a software device and as a GPU.
fn kinds(engine: &Engine) -> [DeviceFacts; 2] {
    [wgpu::DeviceType::Cpu, wgpu::DeviceType::Other].map(|device_type| DeviceFacts { device_type, ..engine.facts() })
}

fn add(plans: &mut Vec<Plan>, plan: Plan) {
    if plans.iter().all(|known| known.kernels() != plan.kernels()) {
        plans.push(plan);
    }
}

/// Whether a plan is one of the naive path.
pub(crate) fn is_naive(plan: &Plan) -> bool {
    plan.kernels().len() > 1
}

/// A dense tensor with NaN before and after it in its buffer, at an element that no device aligns bindings to.
pub(crate) fn amid_nan(engine: &Engine, data: &[f32], shape: &[usize]) -> Tensor {
    amid_nan_in(DType::F32, engine, data, shape)
}

/// The same of numbers stored in a type, rounded.
pub(crate) fn amid_nan_in(dtype: DType, engine: &Engine, data: &[f32], shape: &[usize]) -> Tensor {
    const BEFORE: usize = 37;
    let mut padded = vec![f32::NAN; BEFORE + data.len() + 29];
    padded[BEFORE..BEFORE + data.len()].copy_from_slice(data);
    let whole = upload_in(dtype, engine, &padded);
    engine.borrow(whole.raw_buffer().clone(), dtype, BEFORE, shape).unwrap()
}

/// One row of numbers stored in a type, rounded.
pub(crate) fn upload_in(dtype: DType, engine: &Engine, data: &[f32]) -> Tensor {
    let shape = [data.len()];
    match dtype {
        DType::F16 => engine.upload(&data.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), shape).unwrap(),
        DType::Bf16 => engine.upload(&data.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), shape).unwrap(),
        _ => engine.upload(data, shape).unwrap(),
    }
}

/// q, k and v on a device.
pub(crate) struct Tensors {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

impl Tensors {
    pub(crate) fn amid_nan(engine: &Engine, dims: &Dims, data: &Data) -> Self {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *dims;
        Self {
            q: amid_nan(engine, &data.q, &[batch, q_heads, q_len, head_dim]),
            k: amid_nan(engine, &data.k, &[batch, kv_heads, kv_len, head_dim]),
            v: amid_nan(engine, &data.v, &[batch, kv_heads, kv_len, value_dim]),
        }
    }

    /// Records a plan into an encoder of the test's own, with outputs amid guard words, and reads everything back.
    #[track_caller]
    pub(crate) fn run(&self, engine: &Engine, plan: &Plan) -> Results {
        let Dims { batch, q_heads, q_len, value_dim, .. } = plan.problem().dims();
        let o = Guarded::new(engine, &[batch, q_heads, q_len, value_dim]);
        let lse = Guarded::new(engine, &[batch, q_heads, q_len]);
        self.run_into(engine, plan, &o.tensor, &lse.tensor);
        (o.read(), lse.read())
    }

    #[track_caller]
    pub(crate) fn run_into(&self, engine: &Engine, plan: &Plan, o: &Tensor, lse: &Tensor) {
        let workspace = engine.alloc_workspace(plan).unwrap();
        if let Some(workspace) = &workspace {
            let nan = vec![f32::NAN; workspace.elems()];
            engine.queue().write_buffer(workspace.raw_buffer(), 0, &bytes(&nan));
        }
        let bindings =
            Bindings { inputs: Inputs::new(&self.q, &self.k, &self.v), o, lse, workspace: workspace.as_ref() };
        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        plan.record(&mut encoder, &bindings).unwrap();
        engine.queue().submit([encoder.finish()]);
    }
}

fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

/// An output full of NaN, so that what isn't written shows, between guard words, so that what is written outside shows too.
pub(crate) struct Guarded {
    pub(crate) tensor: Tensor,
    whole: Tensor,
}

/// A number that no result is, and that every type can hold.
const GUARD: f32 = -24_576.0;
/// Odd, so that the first and last element of a type of two bytes share their word with a guard.
const BEFORE: usize = 131;
const AFTER: usize = 67;

impl Guarded {
    /// A dense tensor.
    pub(crate) fn new(engine: &Engine, shape: &[usize]) -> Self {
        Self::stored(DType::F32, engine, shape)
    }

    /// A dense tensor of a type.
    pub(crate) fn stored(dtype: DType, engine: &Engine, shape: &[usize]) -> Self {
        let elems: usize = shape.iter().product();
        let mut contents = vec![GUARD; BEFORE + elems + AFTER + elems % 2];
        contents[BEFORE..BEFORE + elems].fill(f32::NAN);
        let whole = upload_in(dtype, engine, &contents);
        let buffer = whole.raw_buffer().clone();
        Self { tensor: engine.borrow(buffer, dtype, BEFORE, shape).unwrap(), whole }
    }

    /// The elements in the order they lie, once the guard words are found as they were.
    #[track_caller]
    pub(crate) fn read(&self) -> Vec<f32> {
        let mut all = self.whole.read().unwrap();
        let after = all.split_off(BEFORE + self.tensor.shape().iter().product::<usize>());
        let elems = all.split_off(BEFORE);
        for (place, guard) in (0..).zip(&all).chain((BEFORE + elems.len()..).zip(&after)) {
            assert_eq!(guard.to_bits(), GUARD.to_bits(), "{guard} was written {place} elements into the buffer");
        }
        elems
    }
}
