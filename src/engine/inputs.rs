//! What a call reads and writes.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::{Gpu, Purpose, Tensor};
use crate::plan::Plan;
use crate::problem::{Attention, DType, Dims, Problem, Storage};

/// A boolean mask on the device, **true where the query may attend** (the polarity of ONNX and of `PyTorch`'s
/// `scaled_dot_product_attention`), one bit a key. Shape `(batch|1, q_heads|1, q_len|1, kv_len|1)`, read broadcast, never expanded.
///
/// Made by [`crate::Engine::upload_mask`].
#[derive(Debug, Clone)]
pub struct Mask {
    /// `(batch, heads, rows, words)`
    pub(super) words: Tensor,
    pub(super) shape: [usize; 4],
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for bool {}
    impl Sealed for u8 {}
}

/// What a mask can be uploaded from: booleans, or bytes that aren't 0.
pub trait MaskElement: Copy + sealed::Sealed {
    /// Whether the query may attend.
    fn attends(self) -> bool;
}

impl MaskElement for bool {
    fn attends(self) -> bool {
        self
    }
}

impl MaskElement for u8 {
    fn attends(self) -> bool {
        self != 0
    }
}

impl Mask {
    pub(super) fn upload<T: MaskElement>(gpu: &Arc<Gpu>, data: &[T], shape: [usize; 4]) -> Result<Self> {
        let [batch, heads, rows, keys] = shape;
        let elems = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if elems != Some(data.len()) {
            return Err(Error::invalid(format!(
                "{} elements for a mask of shape {shape:?}; accepted: {}",
                data.len(),
                elems.map_or("fewer".to_owned(), |elems| elems.to_string())
            )));
        }
        let row_words = |row: &[T]| -> Vec<u32> {
            let word = |bits: &[T]| (0..).zip(bits).map(|(at, bit)| u32::from(bit.attends()) << at).sum();
            row.chunks(32).map(word).collect()
        };
        let words: Vec<u32> = data.chunks(keys.max(1)).flat_map(row_words).collect();
        let words = Tensor::upload(gpu, "tilewise.mask", &words, &[batch, heads, rows, keys.div_ceil(32)])?;
        Ok(Self { words, shape })
    }

    /// `(batch|1, q_heads|1, q_len|1, kv_len|1)`
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }
}

/// What a call reads. Only q, k and v have to be there.
///
/// ```no_run
/// use tilewise::{Attention, Engine, Inputs};
/// # fn main() -> tilewise::Result<()> {
/// let engine = Engine::new()?;
/// let x = engine.upload(&vec![0.1f32; 2 * 4 * 10 * 64], [2, 4, 10, 64])?;
/// // Padding: the second entry has 7 keys. Of any size but 1 there must be all.
/// let keep: Vec<bool> = (0..20).map(|n| n < 17).collect();
/// let mask = engine.upload_mask(&keep, [2, 1, 1, 10])?;
/// let bias = engine.upload(&vec![0.5f32; 4 * 10 * 10], [1, 4, 10, 10])?;
/// let inputs = Inputs { mask: Some(&mask), bias: Some(&bias), ..Inputs::new(&x, &x, &x) };
/// let out = engine.attention_with(&inputs, &Attention::causal())?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries: `(batch, q_heads, q_len, head_dim)`; of a packed batch `(total_q, q_heads, head_dim)`.
    pub q: &'a Tensor,
    /// Keys: `(batch, kv_heads, kv_len, head_dim)`, or `(total_kv, kv_heads, head_dim)`.
    pub k: &'a Tensor,
    /// Values: `(batch, kv_heads, kv_len, value_dim)`, or `(total_kv, kv_heads, value_dim)`.
    pub v: &'a Tensor,
    /// Added to the scores, in f32, f16 or bf16; -inf hides the key: `(batch|1, q_heads|1, q_len|1, kv_len|1)`, read broadcast, never
    /// expanded.
    pub bias: Option<&'a Tensor>,
    /// True where the query may attend, of the same shape.
    pub mask: Option<&'a Mask>,
    /// For each row the first key it may see and the one past the last, u32, dense: `(batch|1, q_heads|1, q_len, 2)`. Ends past the
    /// last key mean the last; a row whose end isn't above its first sees none. Documents packed
    /// into one sequence, prefixes, any mask that is an interval in each row, without n×n memory. Of a packed batch `(1, q_heads|1,
    /// total_q, 2)`, counted within the sequence.
    pub ranges: Option<&'a Tensor>,
    /// Attention sinks, f32, dense: `(q_heads)`: a score for each head that takes part in the softmax and has no value. -inf is none.
    pub sinks: Option<&'a Tensor>,
    /// What `score_mod` and `mask_mod` read, f32 or u32, dense.
    pub mod_data: Option<&'a Tensor>,
}

impl<'a> Inputs<'a> {
    /// q, k, v and nothing else.
    pub fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        Self { q, k, v, bias: None, mask: None, ranges: None, sinks: None, mod_data: None }
    }

    /// The problem that these tensors and options make, o being stored as the options say, or else as q is.
    ///
    /// # Errors
    /// [`Error::Invalid`] for shapes, types and options that don't fit together.
    pub fn problem(&self, options: &Attention) -> Result<Problem> {
        let Self { q, k, v, .. } = *self;
        let dims = if options.is_packed() { self.packed_dims(options)? } else { self.dims()? };
        let o = options.output_dtype.unwrap_or(q.dtype());
        let storage = Storage { q: q.dtype(), k: k.dtype(), v: v.dtype(), o };
        let mut problem = Problem::new(dims, options.clone())?.storage(storage)?;
        if let Some(bias) = self.bias {
            problem = problem.bias(bias.dtype(), of_axes("bias", bias)?)?;
        }
        if let Some(mask) = self.mask {
            problem = problem.mask(mask.shape)?;
        }
        if let Some(ranges) = self.ranges {
            let [batch, heads, rows, ends] = of_axes("ranges", ranges)?;
            if ends != 2 || ranges.dtype() != DType::U32 {
                return Err(Error::invalid(format!(
                    "ranges of {} and shape {:?}; accepted: u32, the last axis 2",
                    ranges.dtype(),
                    ranges.shape()
                )));
            }
            problem = problem.ranges([batch, heads, rows])?;
        }
        if let Some(sinks) = self.sinks {
            if sinks.shape() != [dims.q_heads] || sinks.dtype() != DType::F32 {
                return Err(Error::invalid(format!(
                    "sinks of {} and shape {:?}; accepted: f32, [{}]",
                    sinks.dtype(),
                    sinks.shape(),
                    dims.q_heads
                )));
            }
            problem = problem.sinks();
        }
        if let Some(data) = self.mod_data {
            if data.dtype().bytes() != 4 {
                return Err(Error::invalid(format!("mod_data in {}; accepted: f32, u32", data.dtype())));
            }
            problem = problem.mod_data(data.elems())?;
        }
        Ok(problem)
    }

    fn shapes(&self) -> String {
        format!("q {:?}, k {:?}, v {:?}", self.q.shape(), self.k.shape(), self.v.shape())
    }

    fn dims(&self) -> Result<Dims> {
        let (
            &[batch, q_heads, q_len, head_dim],
            &[k_batch, kv_heads, kv_len, k_dim],
            &[v_batch, v_heads, v_len, value_dim],
        ) = (self.q.shape(), self.k.shape(), self.v.shape())
        else {
            return Err(Error::invalid(format!(
                "{}; accepted: four axes each, (batch, heads, length, dim); three for a packed batch",
                self.shapes()
            )));
        };
        if k_batch != batch || v_batch != batch || v_heads != kv_heads || v_len != kv_len || k_dim != head_dim {
            return Err(Error::invalid(format!(
                "{}; accepted: one batch; k and v of the same heads and length; q and k of the same dim",
                self.shapes()
            )));
        }
        Ok(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim })
    }

    fn packed_dims(&self, options: &Attention) -> Result<Dims> {
        let (&[q_len, q_heads, head_dim], &[kv_len, kv_heads, k_dim], &[v_len, v_heads, value_dim]) =
            (self.q.shape(), self.k.shape(), self.v.shape())
        else {
            return Err(Error::invalid(format!(
                "{}; accepted: three axes each for a packed batch, (tokens, heads, dim)",
                self.shapes()
            )));
        };
        if v_heads != kv_heads || v_len != kv_len || k_dim != head_dim {
            return Err(Error::invalid(format!(
                "{}; accepted: k and v of the same tokens and heads; q and k of the same dim",
                self.shapes()
            )));
        }
        let batch = options.packed.as_ref().map_or(0, |[q, _]| q.len().saturating_sub(1));
        Ok(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim })
    }

    /// Everything that is read, by name.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        let Self { q, k, v, bias, mask, ranges, sinks, mod_data } = *self;
        let optional = [
            ("bias", bias),
            ("mask", mask.map(|mask| &mask.words)),
            ("ranges", ranges),
            ("sinks", sinks),
            ("mod_data", mod_data),
        ];
        let optional = optional.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
        [("q", q), ("k", k), ("v", v)].into_iter().chain(optional)
    }
}

fn of_axes(name: &str, tensor: &Tensor) -> Result<[usize; 4]> {
    <[usize; 4]>::try_from(tensor.shape())
        .map_err(|_| Error::invalid(format!("{name} of shape {:?}; accepted: four axes", tensor.shape())))
}

/// What attention gives: a state that [`crate::Engine::merge`] can merge with that of other keys.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The weighted values: `(batch, q_heads, q_len, value_dim)`; of a packed batch `(total_q, q_heads, value_dim)`.
    pub o: Tensor,
    /// The natural logarithm of each row's sum of e^score, its sink included, f32: `(batch, q_heads, q_len)`, or `(q_heads, total_q)`. For
    /// a row that sees no key -inf, or the sink.
    pub lse: Tensor,
}

/// The tensors of one call.
///
/// Outputs may lie in the buffer of an input, where they overlap nothing. In a browser they want buffers of their own all the same: WebGPU
/// refuses written bindings that overlap, and bindings begin at multiples of 256 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Bindings<'a> {
    /// What is read.
    pub inputs: Inputs<'a>,
    /// Where the output goes: of the shape of [`AttentionOutput::o`], in any strides with a contiguous last axis.
    pub o: &'a Tensor,
    /// Where the log-sum-exp goes: likewise of that of [`AttentionOutput::lse`].
    pub lse: &'a Tensor,
    /// At least [`Plan::workspace_bytes`] of scratch memory, dense. None where that is 0.
    pub workspace: Option<&'a Tensor>,
}

/// How the tensors of a call lie to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Outputs are in buffers of their own.
    Apart,
    /// An output is in the buffer of an input, elsewhere in it.
    OneBuffer,
}

impl Bindings<'_> {
    /// Whether the tensors are what the plan says, on one device, and no output where it would be read or overwritten.
    pub(super) fn check(&self, gpu: &Arc<Gpu>, plan: &Plan) -> Result<Sharing> {
        let Self { inputs, o, lse, workspace } = *self;
        let problem = plan.problem();
        check_tensors(problem, &inputs, o, lse)?;
        let written = [Some(("o", o)), Some(("lse", lse)), workspace.map(|tensor| ("workspace", tensor))];
        let written: Vec<_> = written.into_iter().flatten().collect();
        let mut sharing = Sharing::Apart;
        for (name, other_name) in in_one_buffer(gpu, &inputs.tensors().collect::<Vec<_>>(), &written, "outputs")? {
            // One dispatch can't bind a buffer both to be read and to be written; tensors that are read alone are bound as if
            // they were written then. Tables and scratch memory are never.
            if name == "workspace" || other_name == "mask" {
                return Err(not_a_buffer_of_its_own(name, other_name));
            }
            // Outputs are written anyway.
            if !["o", "lse"].contains(&other_name) {
                sharing = Sharing::OneBuffer;
            }
        }
        Ok(sharing)
    }
}

/// A tensor of a call, by its name.
pub(super) type Named<'a> = (&'static str, &'a Tensor);

/// Those that are written, each with another of the call whose buffer it lies in. Refuses what overlaps, or lies on other devices. `what`
/// the written ones are, in the plural.
pub(super) fn in_one_buffer(
    gpu: &Arc<Gpu>,
    read: &[Named<'_>],
    written: &[Named<'_>],
    what: &str,
) -> Result<Vec<(&'static str, &'static str)>> {
    let mut shared = Vec::new();
    for (index, &(name, output)) in written.iter().enumerate() {
        for &(other_name, other) in read.iter().chain(&written[..index]) {
            if !Arc::ptr_eq(output.gpu(), gpu) || !Arc::ptr_eq(other.gpu(), gpu) {
                return Err(Error::invalid(format!("{name} and {other_name} of different engines; accepted: of one")));
            }
            if output.overlaps(other) {
                return Err(Error::invalid(format!(
                    "{name} overlaps {other_name}; accepted: {what} apart from all else"
                )));
            }
            if output.shares_buffer(other) {
                shared.push((name, other_name));
            }
        }
    }
    Ok(shared)
}

pub(super) fn not_a_buffer_of_its_own(name: &str, other_name: &str) -> Error {
    Error::invalid(format!("{name} lies in the buffer of {other_name}; accepted: a buffer of its own"))
}

/// A tensor that isn't of the type and shape it should be.
pub(super) fn wrong_tensor(name: &str, tensor: &Tensor, dtype: DType, shape: &[usize]) -> Error {
    Error::invalid(format!("{name} of {} and shape {:?}; accepted: {dtype}, {shape:?}", tensor.dtype(), tensor.shape()))
}

/// Whether the tensors of a forward call are what a problem says.
pub(super) fn check_tensors(problem: &Problem, inputs: &Inputs<'_>, o: &Tensor, lse: &Tensor) -> Result<()> {
    let Storage { q: q_dtype, k: k_dtype, v: v_dtype, o: o_dtype } = problem.storage;
    let expected = [q_dtype, k_dtype, v_dtype, o_dtype, DType::F32].into_iter().zip(problem.shapes());
    let given = [("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("o", o), ("lse", lse)];
    for ((name, tensor), (dtype, shape)) in given.into_iter().zip(expected) {
        if tensor.shape() != shape || tensor.dtype() != dtype {
            return Err(wrong_tensor(name, tensor, dtype, &shape));
        }
    }
    let options = Attention { output_dtype: Some(o_dtype), ..problem.attention.clone() };
    let described = inputs.problem(&options)?;
    if (described.bias, described.mask, described.ranges, described.sinks, described.mod_words)
        != (problem.bias, problem.mask, problem.ranges, problem.sinks, problem.mod_words)
    {
        return Err(Error::invalid("other optional inputs than those of the planned problem; accepted: the same"));
    }
    Ok(())
}

/// A dense tensor of undefined contents, for an output.
pub(super) fn alloc_output(gpu: &Arc<Gpu>, plan: &Plan) -> Result<AttentionOutput> {
    let [.., o_shape, lse_shape] = plan.problem().shapes();
    let o = Tensor::alloc(gpu, "tilewise.output", plan.problem().storage.o, &o_shape, Purpose::Output)?;
    let lse = Tensor::alloc(gpu, "tilewise.lse", DType::F32, &lse_shape, Purpose::Output)?;
    Ok(AttentionOutput { o, lse })
}
