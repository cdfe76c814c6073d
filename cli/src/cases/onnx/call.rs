//! What a node of ONNX asks for, in terms of attention here.

use anyhow::{Context, Result, ensure};
use safetensors::Dtype;
use serde_json::Value;
use tilewise::reference::{self, Broadcast, Case, Precision};
use tilewise::{Align, Attention, DType, Dims, Engine, Problem};

use super::super::check_shape;
use super::super::inputs::{booleans, four_axes, lengths};
use super::Entry;
use crate::tensors::{DeviceInputs, Numbers, Tensors};

/// A node's inputs and attributes, checked against each other.
#[derive(Debug)]
pub(super) struct Call {
    q: Input,
    k: Input,
    v: Input,
    dims: Dims,
    softmax_scale: Option<f64>,
    softcap: Option<f64>,
    score_mod: Option<ScoreMod>,
    bias: Option<(Vec<f32>, DType, [usize; 4])>,
    mask: Option<(Vec<bool>, [usize; 4])>,
    kv_lens: Option<Vec<u32>>,
    positions: Positions,
    causal: bool,
    window_left: Option<i64>,
    window_right: Option<i64>,
}

/// q, k or v on the host.
#[derive(Debug)]
struct Input {
    numbers: Vec<f32>,
    dtype: DType,
    /// The shape in the file: four axes, or three.
    stored: Vec<usize>,
    /// (batch, heads, length, dim)
    shape: [usize; 4],
}

/// The position of a node's first query among the keys: of causality and windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Positions {
    /// That of the first key.
    First,
    /// Behind so many keys of a past.
    After(usize),
    /// The last query is at the last key in use.
    Last,
}

/// The sub-graphs of `FlexAttention` that the manifest can name and that options don't cover.
#[derive(Debug, Clone, Copy)]
enum ScoreMod {
    Add(f32),
    AddQMinusK,
}

/// Whether a `score_mod` of a manifest is one that can be computed.
pub(super) fn knows_score_mod(value: &Value) -> bool {
    matches!(value["kind"].as_str(), Some("add_const" | "causal_top_left" | "softcap" | "add_q_minus_k"))
}

impl ScoreMod {
    fn wgsl(self) -> tilewise::Result<tilewise::ScoreMod> {
        let changed = match self {
            Self::Add(_) => "score + data_f32(0u)",
            Self::AddQMinusK => "score + f32(i32(q_idx) - i32(kv_idx))",
        };
        tilewise::ScoreMod::new(&format!(
            "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {{ return {changed}; }}"
        ))
    }

    fn apply(self, score: f64, q_index: usize, kv_index: usize) -> f64 {
        match self {
            Self::Add(number) => score + f64::from(number),
            Self::AddQMinusK => score + q_index as f64 - kv_index as f64,
        }
    }
}

impl Input {
    fn new(entry: &Entry, tensors: &Tensors<'_>, name: &str, heads: &str) -> Result<Self> {
        let view = tensors.get(name)?;
        let stored = view.shape().to_vec();
        let shape = match *stored {
            [batch, heads, len, dim] if !entry.is_3d() => [batch, heads, len, dim],
            [batch, len, width] if entry.is_3d() => {
                let count = entry.int(heads)?.and_then(|count| usize::try_from(count).ok()).filter(|&count| count > 0);
                let count = count.with_context(|| format!("a 3d case without a {heads} above 0"))?;
                ensure!(width % count == 0, "{name} is {stored:?}; accepted: a last axis of {count} heads");
                [batch, count, len, width / count]
            }
            _ => anyhow::bail!("{name} is {stored:?} in layout {:?}", entry.layout),
        };
        let numbers = Numbers::of(name, &view)?;
        let dtype = numbers.dtype();
        Ok(Self { numbers: numbers.into_f32(), dtype, stored, shape })
    }

    /// The numbers in the order (batch, heads, length, dim).
    fn by_heads(&self) -> Vec<f32> {
        if self.stored.len() == 4 {
            return self.numbers.clone();
        }
        let [batch, heads, len, dim] = self.shape;
        let rows =
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..len).map(move |s| (b * len + s) * heads + h)));
        rows.flat_map(|row| &self.numbers[row * dim..][..dim]).copied().collect()
    }

    /// The same behind a past of (batch, heads, past, dim).
    fn after(&self, past: &[f32], past_len: usize) -> Self {
        let [batch, heads, len, dim] = self.shape;
        let new = self.by_heads();
        let of = |numbers: &[f32], matrix: usize, len: usize| numbers[matrix * len * dim..][..len * dim].to_vec();
        let numbers =
            (0..batch * heads).flat_map(|matrix| [of(past, matrix, past_len), of(&new, matrix, len)].concat());
        let shape = [batch, heads, past_len + len, dim];
        Self { numbers: numbers.collect(), dtype: self.dtype, stored: shape.to_vec(), shape }
    }

    fn upload(&self, engine: &Engine) -> Result<tilewise::Tensor> {
        let tensor = Numbers::F32(self.numbers.clone()).stored(self.dtype).upload(engine, &self.stored)?;
        // The view tells where each element is.
        Ok(if self.stored.len() == 3 { tensor.heads(self.shape[1])? } else { tensor })
    }
}

/// A mask of `len` keys: ONNX lets it end earlier, and hides what lies behind its end.
fn padded<T: Copy>(mask: &[T], shape: [usize; 4], len: usize, hidden: T) -> (Vec<T>, [usize; 4]) {
    let [batch, heads, rows, keys] = shape;
    let row = |row: usize| mask[row * keys..][..keys].iter().copied().chain((keys..len).map(move |_| hidden));
    ((0..batch * heads * rows).flat_map(row).collect(), [batch, heads, rows, len.max(keys)])
}

impl Call {
    pub(super) fn new(entry: &Entry, tensors: &Tensors<'_>) -> Result<Self> {
        let q = Input::new(entry, tensors, "q", "q_num_heads")?;
        let k = Input::new(entry, tensors, "k", "kv_num_heads")?;
        let v = Input::new(entry, tensors, "v", "kv_num_heads")?;
        let ([batch, q_heads, q_len, head_dim], [_, kv_heads, new_len, _]) = (q.shape, k.shape);
        let value_dim = v.shape[3];
        ensure!(
            k.shape == [batch, kv_heads, new_len, head_dim] && v.shape == [batch, kv_heads, new_len, value_dim],
            "q {:?}, k {:?}, v {:?} don't fit together",
            q.shape,
            k.shape,
            v.shape
        );
        ensure!(q.dtype.name() == entry.dtype, "q is {}; accepted: {}, the case's dtype", q.dtype, entry.dtype);
        let has = |name: &str| entry.inputs.contains_key(name);
        let past_len = match (has("past_key"), has("past_value")) {
            (true, true) => {
                let past = tensors.get("past_key")?;
                Some(past.shape().get(2).copied().with_context(|| format!("past_key is {:?}", past.shape()))?)
            }
            (false, false) => None,
            _ => anyhow::bail!("past_key and past_value; accepted: both or none"),
        };
        ensure!(past_len.is_none() || !has("nonpad_kv_seqlen"), "nonpad_kv_seqlen beside a past; accepted: either");
        let kv_len = new_len.saturating_add(past_len.unwrap_or(0));
        let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        // Bounds every product of sizes below, of empty tensors too.
        Problem::new(dims, Attention::full())?;

        let of_past = |input: Input, name: &str| -> Result<Input> {
            let Some(past_len) = past_len else { return Ok(input) };
            check_shape(tensors, name, &[batch, kv_heads, past_len, input.shape[3]])?;
            let past = Numbers::of(name, &tensors.get(name)?)?;
            ensure!(past.dtype() == input.dtype, "{name} is {}; accepted: {}", past.dtype(), input.dtype);
            Ok(input.after(&past.into_f32(), past_len))
        };
        let (k, v) = (of_past(k, "past_key")?, of_past(v, "past_value")?);
        let kv_lens = if has("nonpad_kv_seqlen") {
            check_shape(tensors, "nonpad_kv_seqlen", &[batch])?;
            Some(lengths("nonpad_kv_seqlen", &tensors.get("nonpad_kv_seqlen")?)?)
        } else {
            None
        };
        let positions = match (past_len, &kv_lens) {
            (_, Some(_)) => Positions::Last,
            (Some(past_len), None) => Positions::After(past_len),
            (None, None) => Positions::First,
        };
        let window = |name: &str| -> Result<_> {
            let size = entry.int(name)?.unwrap_or(-1);
            ensure!(size >= -1, "{name} {size}; accepted: -1 or more");
            Ok((size >= 0).then_some(size))
        };
        let softcap = entry.float("softcap")?.filter(|&softcap| softcap != 0.0);
        ensure!(softcap.is_none_or(|softcap| softcap > 0.0), "softcap {softcap:?}; accepted: 0 or more");
        let scale = entry.float("scale_effective")?;
        let mut call = Self {
            q,
            k,
            v,
            dims,
            softmax_scale: if scale.is_some() { scale } else { entry.float("scale")? },
            softcap,
            score_mod: None,
            bias: None,
            mask: None,
            kv_lens,
            positions,
            causal: entry.int("is_causal")?.unwrap_or(0) != 0,
            window_left: window("left_window_size")?,
            window_right: window("right_window_size")?,
        };
        if has("attn_mask") {
            call.set_mask(tensors)?;
        }
        if let Some(score_mod) = entry.attr("score_mod") {
            call.set_score_mod(score_mod)?;
        }
        Ok(call)
    }

    fn set_mask(&mut self, tensors: &Tensors<'_>) -> Result<()> {
        let Dims { batch, q_heads, q_len, kv_len, .. } = self.dims;
        let view = tensors.get("attn_mask")?;
        let shape = four_axes("attn_mask", view.shape())?;
        let full = [batch, q_heads, q_len];
        ensure!(
            shape.iter().zip(full).all(|(&size, full)| size == 1 || size == full) && shape[3] <= kv_len.max(1),
            "attn_mask is {:?}; accepted: what broadcasts to (batch, q_heads, q_len, kv_len) = {:?}, the last axis or less",
            view.shape(),
            [batch, q_heads, q_len, kv_len]
        );
        let elems = shape[..3].iter().fold(kv_len, |elems, size| elems.saturating_mul(*size));
        ensure!(elems <= u32::MAX as usize, "attn_mask of {elems} elements; accepted: up to {}", u32::MAX);
        if view.dtype() == Dtype::BOOL {
            self.mask = Some(padded(&booleans("attn_mask", &view)?, shape, kv_len, false));
            return Ok(());
        }
        ensure!(
            matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16),
            "attn_mask is {:?}; accepted: BOOL, F32, F16, BF16",
            view.dtype()
        );
        let numbers = Numbers::of("attn_mask", &view)?;
        let dtype = numbers.dtype();
        let (bias, shape) = padded(&numbers.into_f32(), shape, kv_len, f32::NEG_INFINITY);
        self.bias = Some((bias, dtype, shape));
        Ok(())
    }

    fn set_score_mod(&mut self, score_mod: &Value) -> Result<()> {
        let number = || score_mod["value"].as_f64().with_context(|| format!("score_mod {score_mod} without a value"));
        match score_mod["kind"].as_str() {
            #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
            Some("add_const") => self.score_mod = Some(ScoreMod::Add(number()? as f32)),
            Some("add_q_minus_k") => self.score_mod = Some(ScoreMod::AddQMinusK),
            Some("causal_top_left") => self.causal = true,
            Some("softcap") => self.softcap = Some(number()?),
            _ => anyhow::bail!("score_mod {score_mod} isn't known"),
        }
        Ok(())
    }

    pub(super) fn dims(&self) -> Dims {
        self.dims
    }

    /// The first key that causality and windows let a row see, and the one past the last.
    fn reach(&self, b: usize, row: usize) -> [usize; 2] {
        let signed = |len: usize| i64::try_from(len).unwrap_or(i64::MAX);
        let Dims { q_len, kv_len, .. } = self.dims;
        let offset = match (self.positions, &self.kv_lens) {
            (Positions::Last, Some(lens)) => i64::from(lens[b]) - signed(q_len),
            (Positions::After(past_len), _) => signed(past_len),
            _ => 0,
        };
        let position = signed(row) + offset;
        let right = if self.causal { Some(0) } else { self.window_right };
        let start = self.window_left.map_or(0, |left| position.saturating_sub(left));
        let end = right.map_or(i64::MAX, |right| position.saturating_add(right).saturating_add(1));
        [start, end].map(|key| usize::try_from(key.max(0)).unwrap_or(usize::MAX).min(kv_len))
    }

    /// Whether positions behind a past aren't those of any corner, as the keys that are new aren't as many as the queries.
    fn is_between_corners(&self) -> bool {
        let Positions::After(past_len) = self.positions else { return false };
        self.dims.kv_len - past_len != self.dims.q_len
    }

    pub(super) fn options(&self) -> Result<Attention> {
        let mut options = Attention::full();
        if !self.is_between_corners() {
            let bound = |keys: i64| u32::try_from(keys).unwrap_or(u32::MAX);
            options = if self.causal { Attention::causal() } else { options };
            options = options.window(self.window_left.map(bound), self.window_right.map(bound));
            options = options.align(match self.positions {
                Positions::First => Align::TopLeft,
                Positions::After(_) | Positions::Last => Align::BottomRight,
            });
        }
        #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
        if let Some(scale) = self.softmax_scale {
            options = options.softmax_scale(scale as f32);
        }
        #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap as f32);
        }
        if let Some(score_mod) = self.score_mod {
            options = options.score_mod(score_mod.wgsl()?);
        }
        if let Some(lens) = &self.kv_lens {
            options = options.kv_lens(lens.clone());
        }
        Ok(options)
    }

    pub(super) fn upload(&self, engine: &Engine) -> Result<DeviceInputs> {
        let mut inputs = DeviceInputs::new([self.q.upload(engine)?, self.k.upload(engine)?, self.v.upload(engine)?]);
        if let Some((bias, dtype, shape)) = &self.bias {
            inputs.bias = Some(Numbers::F32(bias.clone()).stored(*dtype).upload(engine, shape)?);
        }
        if let Some((mask, shape)) = &self.mask {
            inputs.mask = Some(engine.upload_mask(mask, *shape)?);
        }
        if self.is_between_corners() {
            let rows = self.dims.q_len;
            let ends = (0..rows).flat_map(|row| self.reach(0, row)).map(u32::try_from);
            inputs.ranges = Some(engine.upload(&ends.collect::<Result<Vec<u32>, _>>()?, [1, 1, rows, 2])?);
        }
        if let Some(ScoreMod::Add(number)) = self.score_mod {
            inputs.mod_data = Some(engine.upload(&[number], [1])?);
        }
        Ok(inputs)
    }

    /// How far an honest engine that computes in f32 may be off.
    pub(super) fn tolerance(&self) -> Result<f64> {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.dims;
        let (q, k, v) = (self.q.by_heads(), self.k.by_heads(), self.v.by_heads());
        let reached = |b: usize, _: usize, row: usize, key: usize| {
            let [start, end] = self.reach(b, row);
            (start..end).contains(&key)
        };
        let changed = |score: f64, _: usize, _: usize, row: usize, key: usize| {
            self.score_mod.map_or(score, |score_mod| score_mod.apply(score, row, key))
        };
        let case = Case {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q: &q,
            k: &k,
            v: &v,
            softmax_scale: self.softmax_scale,
            softcap: self.softcap,
            score_mod: Some(reference::ScoreMod(&changed)),
            bias: self.bias.as_ref().map(|(data, _, shape)| Broadcast { data, shape: *shape }),
            mask: self.mask.as_ref().map(|(data, shape)| Broadcast { data, shape: *shape }),
            mask_mod: Some(reference::MaskMod(&reached)),
            kv_lens: self.kv_lens.as_deref(),
            ..Case::default()
        };
        Ok(reference::attention(&case)?.tolerance.o(Precision::F32))
    }
}
