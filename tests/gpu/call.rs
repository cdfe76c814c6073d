//! One attention call with any options at once: its data from a seed, the reference's answer, and the device's.

use std::sync::OnceLock;

use tilewise::reference::{self, Broadcast, Case, Output, Precision};
use tilewise::{
    Align, Attention, AttentionOutput, Bindings, DType, Dims, Engine, Inputs, Mask, MaskMod, Plan, Problem, ScoreMod,
    Storage, Tensor, wgpu,
};

use super::support::{Guarded, Results, amid_nan_in, engines, random, two_tiled_plans};

/// How long each batch entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lens {
    /// As long as the tensors.
    Full,
    /// Keys of its own number, one entry none at all.
    Kv,
    /// Queries too.
    Both,
    /// Sequences one after the other, empty ones among them.
    Packed,
}

/// In which order the axes of q, k, v and o lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As the shape says: (batch, heads, length, dim), or (tokens, heads, dim) of a packed batch.
    Dense,
    /// Heads and lengths the other way round.
    Swapped,
}

/// Options of one call. Of a packed batch the lengths of `dims` are totals.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) dims: Dims,
    pub(crate) causal: bool,
    pub(crate) align: Align,
    pub(crate) scale: Option<f32>,
    pub(crate) window: [Option<u32>; 2],
    pub(crate) softcap: Option<f32>,
    /// Slopes of the heads, or of each batch entry's.
    pub(crate) alibi: Option<Vec<f32>>,
    pub(crate) score_mod: bool,
    pub(crate) mask_mod: bool,
    pub(crate) bias: Option<(DType, [usize; 4])>,
    pub(crate) mask: Option<[usize; 4]>,
    pub(crate) ranges: Option<[usize; 3]>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) lens: Lens,
    pub(crate) storage: Storage,
    pub(crate) layout: Layout,
    pub(crate) seed: u64,
}

/// What a call reads, on the host.
#[derive(Debug, Clone, Default)]
pub(crate) struct HostData {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    pub(crate) mask: Vec<bool>,
    /// (first, end) of each row.
    pub(crate) ranges: Vec<u32>,
    /// A number for each head, then a modulus for `mask_mod`.
    pub(crate) mod_data: Vec<f32>,
}

const SCORE_MOD: &str = "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return 0.5 * score + data_f32(h) * f32((q_idx + 2u * kv_idx + 3u * b) % 5u);
}";
const DERIVATIVE: &str = "fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return 0.5;
}";
const MASK_MOD: &str = "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
    return (7u * q_idx + 3u * kv_idx + h + b) % MODULUS != 0u;
}
const MODULUS = 4u;";

fn mods() -> &'static (ScoreMod, MaskMod) {
    static MODS: OnceLock<(ScoreMod, MaskMod)> = OnceLock::new();
    MODS.get_or_init(|| {
        (ScoreMod::new(SCORE_MOD).unwrap().derivative(DERIVATIVE).unwrap(), MaskMod::new(MASK_MOD).unwrap())
    })
}

pub(crate) fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
        _ => Precision::F32,
    }
}

pub(crate) fn round(dtype: DType, x: Vec<f32>) -> Vec<f32> {
    x.into_iter().map(|x| precision(dtype).round(f64::from(x)) as f32).collect()
}

impl Call {
    pub(crate) fn new(dims: Dims) -> Self {
        Self {
            dims,
            causal: false,
            align: Align::BottomRight,
            scale: None,
            window: [None; 2],
            softcap: None,
            alibi: None,
            score_mod: false,
            mask_mod: false,
            bias: None,
            mask: None,
            ranges: None,
            sinks: None,
            lens: Lens::Full,
            storage: Storage::default(),
            layout: Layout::Dense,
            seed: 1,
        }
    }

    /// Lengths within `0..=total`, of which one is 0 and one all there is.
    pub(crate) fn lens_of(&self, total: usize) -> Vec<u32> {
        let batch = self.dims.batch;
        (0..batch).map(|n| if n == 1 { 0 } else { (total - (n * total / (batch + 1))) as u32 }).collect()
    }

    /// Boundaries of the sequences of a packed batch.
    pub(crate) fn boundaries(&self, total: usize) -> Vec<u32> {
        let batch = self.dims.batch;
        if batch == 0 {
            return vec![0];
        }
        // The second sequence is empty.
        let at = |n: usize| if n == 2 { total / batch } else { n * total / batch };
        let mut bounds: Vec<u32> = (0..=batch).map(|n| at(n) as u32).collect();
        if batch >= 2 {
            bounds[2] = if batch == 2 { total as u32 } else { bounds[1] };
        }
        bounds
    }

    pub(crate) fn options(&self) -> Attention {
        let mut options = if self.causal { Attention::causal() } else { Attention::full() };
        options = options.align(self.align).window(self.window[0], self.window[1]).output_dtype(self.storage.o);
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        if let Some(slopes) = &self.alibi {
            options = options.alibi(slopes.clone());
        }
        if self.score_mod {
            options = options.score_mod(mods().0.clone());
        }
        if self.mask_mod {
            options = options.mask_mod(mods().1.clone());
        }
        match self.lens {
            Lens::Full => options,
            Lens::Kv => options.kv_lens(self.lens_of(self.dims.kv_len)),
            Lens::Both => options.kv_lens(self.lens_of(self.dims.kv_len)).q_lens(self.lens_of(self.dims.q_len)),
            Lens::Packed => options.packed(self.boundaries(self.dims.q_len), self.boundaries(self.dims.kv_len)),
        }
    }

    /// How many entries q, k and v have memory for.
    fn entries(&self) -> usize {
        if self.lens == Lens::Packed { 1 } else { self.dims.batch }
    }

    pub(crate) fn data(&self) -> HostData {
        let Dims { q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.dims;
        let entries = self.entries();
        let numbers = |n: u64, dtype, elems| round(dtype, random(31 * self.seed + n, 1.0, elems));
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let bias = self.bias.map_or(Vec::new(), |(dtype, shape)| {
            let mut bias = numbers(4, dtype, count(&shape));
            bias.iter_mut().skip(3).step_by(11).for_each(|x| *x = f32::NEG_INFINITY);
            bias
        });
        let mask = self.mask.map_or(Vec::new(), |shape| {
            random(31 * self.seed + 5, 1.0, count(&shape)).iter().map(|&x| x > -0.6).collect()
        });
        let ranges = self.ranges.map_or(Vec::new(), |shape| {
            let ends = random(31 * self.seed + 6, 1.0, 2 * count(&shape));
            // Some are empty, some end before they begin or past the last key.
            let at = |x: f32| (((x + 1.0) * 0.75) * kv_len as f32) as u32;
            ends.chunks(2).flat_map(|ends| [at(ends[0]) / 2, at(ends[1])]).collect()
        });
        HostData {
            q: numbers(1, self.storage.q, count(&[entries, q_heads, q_len, head_dim])),
            k: numbers(2, self.storage.k, count(&[entries, kv_heads, kv_len, head_dim])),
            v: numbers(3, self.storage.v, count(&[entries, kv_heads, kv_len, value_dim])),
            bias,
            mask,
            ranges,
            mod_data: numbers(7, DType::F32, q_heads),
        }
    }

    /// The reference's answer: o in the order of the shape, lse (batch, heads, rows) or (heads, rows).
    pub(crate) fn reference(&self, data: &HostData) -> Output {
        let output = self.with_case(data, |case, packed| match packed {
            Some([q, kv]) => reference::attention_packed(case, q, kv),
            None => reference::attention(case),
        });
        output.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// The reference's gradients, in the orders of what they are of.
    pub(crate) fn reference_gradients(
        &self,
        data: &HostData,
        grad_o: &[f32],
        grad_lse: &[f32],
    ) -> reference::Gradients {
        let gradients = self.with_case(data, |case, packed| match packed {
            Some([q, kv]) => reference::attention_backward_packed(case, q, kv, grad_o, Some(grad_lse)),
            None => reference::attention_backward(case, grad_o, Some(grad_lse)),
        });
        gradients.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// The call as the reference takes it, and the boundaries of a packed batch.
    fn with_case<T>(&self, data: &HostData, of: impl FnOnce(&Case<'_>, Option<[&[u32]; 2]>) -> T) -> T {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.dims;
        let bounds = [self.boundaries(q_len), self.boundaries(kv_len)];
        let packed = self.lens == Lens::Packed;
        let score_mod = |s: f64, b: usize, h: usize, i: usize, j: usize| {
            0.5 * s + f64::from(data.mod_data[h]) * ((i + 2 * j + 3 * b) % 5) as f64
        };
        let ranges_shape = self.ranges.unwrap_or([1; 3]);
        let mask_mod = |b: usize, h: usize, i: usize, j: usize| {
            let by_mod = !self.mask_mod || !(7 * i + 3 * j + h + b).is_multiple_of(4);
            let (entry, row) = if packed { (0, bounds[0][b] as usize + i) } else { (b, i) };
            let at = |size: usize, n: usize| if size == 1 { 0 } else { n };
            let index = (at(ranges_shape[0], entry) * ranges_shape[1] + at(ranges_shape[1], h)) * ranges_shape[2] + row;
            let by_range = self.ranges.is_none()
                || (data.ranges[2 * index] as usize..data.ranges[2 * index + 1] as usize).contains(&j);
            by_mod && by_range
        };
        let (kv_lens, q_lens) = (self.lens_of(kv_len), self.lens_of(q_len));
        let case = Case {
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
            causal: self.causal,
            align: match self.align {
                Align::TopLeft => reference::Align::TopLeft,
                Align::BottomRight => reference::Align::BottomRight,
            },
            window_left: self.window[0],
            window_right: self.window[1],
            softcap: self.softcap.map(f64::from),
            score_mod: self.score_mod.then_some(reference::ScoreMod(&score_mod)),
            score_mod_derivative: self.score_mod.then_some(reference::ScoreMod(&|_, _, _, _, _| 0.5)),
            alibi_slopes: self.alibi.as_deref(),
            bias: self.bias.map(|(_, shape)| Broadcast { data: &data.bias, shape }),
            mask: self.mask.map(|shape| Broadcast { data: &data.mask, shape }),
            mask_mod: (self.mask_mod || self.ranges.is_some()).then_some(reference::MaskMod(&mask_mod)),
            sinks: self.sinks.as_deref(),
            kv_lens: matches!(self.lens, Lens::Kv | Lens::Both).then_some(&kv_lens),
            q_lens: (self.lens == Lens::Both).then_some(&q_lens),
        };
        of(&case, packed.then_some([&bounds[0], &bounds[1]]))
    }

    pub(crate) fn upload(&self, engine: &Engine, data: &HostData) -> Uploaded {
        let Dims { q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self.dims;
        let place =
            |dtype, data: &[f32], heads, len, dim| self.place(engine, dtype, data, &self.shape(heads, len, dim));
        // Tables are copied by the word.
        let table = |data: &[f32]| engine.upload(data, [data.len()]).unwrap();
        Uploaded {
            q: place(self.storage.q, &data.q, q_heads, q_len, head_dim),
            k: place(self.storage.k, &data.k, kv_heads, kv_len, head_dim),
            v: place(self.storage.v, &data.v, kv_heads, kv_len, value_dim),
            bias: self.bias.map(|(dtype, shape)| amid_nan_in(dtype, engine, &data.bias, &shape)),
            mask: self.mask.map(|shape| engine.upload_mask(&data.mask, shape).unwrap()),
            ranges: self.ranges.map(|[a, b, c]| engine.upload(&data.ranges, [a, b, c, 2]).unwrap()),
            sinks: self.sinks.as_ref().map(|sinks| table(sinks)),
            mod_data: self.score_mod.then(|| table(&data.mod_data)),
        }
    }

    /// Checks random data by two plans on both engines.
    #[track_caller]
    pub(crate) fn check(&self) {
        let data = self.data();
        let expected = self.reference(&data);
        for engine in engines() {
            self.check_on(engine, &data, &expected);
        }
    }

    /// Checks two plans of an engine.
    #[track_caller]
    pub(crate) fn check_on(&self, engine: &Engine, data: &HostData, expected: &Output) {
        let uploaded = self.upload(engine, data);
        let problem = uploaded.inputs().problem(&self.options()).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        for plan in two_tiled_plans(engine, &problem) {
            let results = self.run(engine, &plan, &uploaded);
            self.assert_matches(&results, expected, &format!("{:?}", plan.kernels()));
        }
    }

    #[track_caller]
    pub(crate) fn assert_matches(&self, (o, lse): &Results, expected: &Output, what: &str) {
        let tolerance = expected.tolerance;
        let comparison = reference::compare(o, &expected.o, tolerance.o(precision(self.storage.o)));
        assert!(comparison.passed(), "o of {self:?}, {what}: {comparison}");
        let comparison = reference::compare(lse, &expected.lse, tolerance.lse());
        assert!(comparison.passed(), "lse of {self:?}, {what}: {comparison}");
    }

    /// Records a plan into an encoder of the test's own, with outputs amid guard words; o in the order of its shape.
    #[track_caller]
    pub(crate) fn run(&self, engine: &Engine, plan: &Plan, uploaded: &Uploaded) -> Results {
        let Dims { batch, q_heads, q_len, value_dim, .. } = self.dims;
        let packed = self.lens == Lens::Packed;
        let lse_shape = if packed { vec![q_heads, q_len] } else { vec![batch, q_heads, q_len] };
        let o = Placed::new(self, engine, self.storage.o, &self.shape(q_heads, q_len, value_dim));
        let lse = Guarded::new(engine, &lse_shape);
        uploaded.run_into(engine, plan, &AttentionOutput { o: o.view.clone(), lse: lse.tensor.clone() });
        (o.read(), lse.read())
    }

    /// The shape of a tensor of so many heads.
    pub(crate) fn shape(&self, heads: usize, len: usize, dim: usize) -> Vec<usize> {
        if self.lens == Lens::Packed { vec![len, heads, dim] } else { vec![self.dims.batch, heads, len, dim] }
    }

    /// A tensor that is read, amid NaN.
    pub(crate) fn place(&self, engine: &Engine, dtype: DType, data: &[f32], shape: &[usize]) -> Tensor {
        match self.layout {
            Layout::Dense => amid_nan_in(dtype, engine, data, shape),
            Layout::Swapped => swapped(engine, dtype, data, shape),
        }
    }
}

/// An output of a call's layout, amid guard words.
pub(crate) struct Placed {
    guarded: Guarded,
    pub(crate) view: Tensor,
    /// As it lies, where that isn't its shape.
    swapped: Option<Vec<usize>>,
}

impl Placed {
    pub(crate) fn new(call: &Call, engine: &Engine, dtype: DType, shape: &[usize]) -> Self {
        let axes = swap(shape.len());
        let swapped = call.layout == Layout::Swapped;
        let stored: Vec<usize> = if swapped { axes.iter().map(|&axis| shape[axis]).collect() } else { shape.to_vec() };
        let guarded = Guarded::stored(dtype, engine, &stored);
        let view = if swapped { guarded.tensor.permute(&axes).unwrap() } else { guarded.tensor.clone() };
        Self { guarded, view, swapped: swapped.then_some(stored) }
    }

    /// Its elements in the order of its shape.
    #[track_caller]
    pub(crate) fn read(&self) -> Vec<f32> {
        let elements = self.guarded.read();
        self.swapped.as_ref().map_or_else(|| elements.clone(), |stored| transpose(&elements, stored))
    }
}

/// The axes with lengths and heads exchanged: before the last.
fn swap(rank: usize) -> Vec<usize> {
    let mut axes: Vec<usize> = (0..rank).collect();
    axes.swap(rank - 3, rank - 2);
    axes
}

/// A dense array with the two axes before the last exchanged.
fn transpose(data: &[f32], shape: &[usize]) -> Vec<f32> {
    let [.., a, b, dim] = *shape else { panic!("{shape:?}") };
    let mut out = Vec::with_capacity(data.len());
    for matrix in data.chunks((a * b * dim).max(1)) {
        for y in 0..b {
            for x in 0..a {
                out.extend_from_slice(&matrix[(x * b + y) * dim..][..dim]);
            }
        }
    }
    out
}

/// A tensor of this shape whose elements lie with those two axes exchanged.
fn swapped(engine: &Engine, dtype: DType, data: &[f32], shape: &[usize]) -> Tensor {
    let axes = swap(shape.len());
    let stored: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
    amid_nan_in(dtype, engine, &transpose(data, shape), &stored).permute(&axes).unwrap()
}

/// What a call reads, on a device.
pub(crate) struct Uploaded {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) mask: Option<Mask>,
    pub(crate) ranges: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) mod_data: Option<Tensor>,
}

impl Uploaded {
    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            bias: self.bias.as_ref(),
            mask: self.mask.as_ref(),
            ranges: self.ranges.as_ref(),
            sinks: self.sinks.as_ref(),
            mod_data: self.mod_data.as_ref(),
            ..Inputs::new(&self.q, &self.k, &self.v)
        }
    }

    pub(crate) fn problem(&self, options: &Attention) -> Problem {
        self.inputs().problem(options).unwrap()
    }

    #[track_caller]
    fn run_into(&self, engine: &Engine, plan: &Plan, output: &AttentionOutput) {
        let workspace = engine.alloc_workspace(plan).unwrap();
        let bindings =
            Bindings { inputs: self.inputs(), o: &output.o, lse: &output.lse, workspace: workspace.as_ref() };
        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        plan.record(&mut encoder, &bindings).unwrap();
        engine.queue().submit([encoder.finish()]);
    }
}
