//! What a file holds: q, k, v, and whatever else attention takes.

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tilewise::reference::Precision;
use tilewise::{Attention, DType, Dims, Engine, Path, Problem, Storage, Tensor};

use super::RunArgs;
use super::layout::{Layout, LayoutArg, SWAPPED, dims, heads_first, packed_dims, packed_shape, shape};
use super::names::{self, BIASES, CU_SEQLENS_KV, CU_SEQLENS_Q, MASKS};
use crate::args::Options;
use crate::output;
use crate::tensors::{self, DeviceInputs, Numbers, Tensors};

/// What the file holds.
pub(super) struct Input {
    /// Of q, k and v: (batch, heads, length, dim), or (tokens, heads, dim).
    pub(super) shapes: [Vec<usize>; 3],
    /// Of o and lse, o in the order of the file's axes.
    pub(super) result_shapes: [Vec<usize>; 2],
    qkv: [Numbers; 3],
    mask: Option<MaskInput>,
    bias: Option<BiasInput>,
    ranges: Option<RangesInput>,
    sinks: Option<Vec<f32>>,
    /// What it holds beside them and was used, by name.
    pub(super) others: Vec<String>,
    /// What it holds and was not: on request, or as it changes nothing.
    pub(super) ignored: Vec<String>,
    /// The order of sizes in the header.
    pub(super) axes: Layout,
    /// Whether there are more heads than positions, as if the other order were meant.
    pub(super) looks_swapped: bool,
    pub(super) o: Option<Expected>,
    pub(super) lse: Option<Expected>,
}

/// A result to compare with.
pub(super) struct Expected {
    pub(super) numbers: Vec<f64>,
    /// Unit roundoff of the type it is stored in.
    pub(super) rounding: f64,
}

impl Expected {
    fn of(name: &str, view: &TensorView<'_>) -> Result<Self> {
        let precision = match view.dtype() {
            Dtype::F16 => Precision::F16,
            Dtype::BF16 => Precision::Bf16,
            _ => Precision::F32,
        };
        Ok(Self { numbers: tensors::expected(name, view)?, rounding: precision.unit_roundoff() })
    }
}

/// What broadcasts to (batch, heads, queries, keys).
struct Broadcast<T> {
    /// What the file calls it.
    name: &'static str,
    /// Its shape there.
    given: Vec<usize>,
    shape: [usize; 4],
    elements: T,
}

type MaskInput = Broadcast<Vec<bool>>;
type BiasInput = Broadcast<Numbers>;
/// Of keys for each row, two numbers on the last axis.
type RangesInput = Broadcast<Vec<u32>>;

/// The axes that a mask and a bias broadcast to.
const SCORES: &str = "(batch, q_heads, q_len, kv_len), each its size or 1";
const RANGES: &str = "(batch, q_heads, q_len, 2), the first two their size or 1";

impl<T> Broadcast<T> {
    /// Of some of the axes: the last.
    fn of(
        &(name, ref view): &Named<'_>,
        axes: &str,
        elements: impl Fn(&str, &TensorView<'_>) -> Result<T>,
    ) -> Result<Self> {
        let given = view.shape().to_vec();
        let mut shape = [1; 4];
        let Some(start) = shape.len().checked_sub(given.len()) else {
            bail!("{name} is {given:?}; accepted: up to four axes, {axes}");
        };
        shape[start..].copy_from_slice(&given);
        Ok(Self { name, given, shape, elements: elements(name, view)? })
    }
}

/// Takes what is needed from the file, and checks that it fits together.
pub(super) fn open(args: &RunArgs, tensors: &Tensors<'_>) -> Result<(Problem, Input)> {
    let views = [("q", tensors.get("q")?), ("k", tensors.get("k")?), ("v", tensors.get("v")?)];
    let mut ignored = args.ignore.clone();
    ignored.extend(names::check(tensors)?.into_iter().map(str::to_string));
    let mut others = Vec::new();
    let options = Options { scale: scale(args, tensors)?, ..args.attention.options }.attention();
    let packed = cu_seqlens(tensors, &mut others)?;
    ensure!(
        packed.is_none() || (args.layout == LayoutArg::Auto && args.axes.is_none()),
        "--layout or --axes with a packed batch; accepted: none, as it is (tokens, heads, dim)"
    );
    let [q, k, v] = &views;
    let (axes, dims, shapes) = match &packed {
        None => {
            let axes = args.axes.unwrap_or_default();
            let shapes = [shape(q.0, &q.1, axes)?, shape(k.0, &k.1, axes)?, shape(v.0, &v.1, axes)?];
            (axes, dims(&shapes, axes)?, shapes.map(|shape| heads_first(shape, axes).to_vec()))
        }
        Some([cu_seqlens_q, _]) => {
            let shapes = [packed_shape(q.0, &q.1)?, packed_shape(k.0, &k.1)?, packed_shape(v.0, &v.1)?];
            (Layout::Thd, packed_dims(&shapes, cu_seqlens_q.len().saturating_sub(1))?, shapes)
        }
    };
    let options = match packed {
        None => lens_and_slopes(options, tensors, &dims, &mut others)?,
        Some([q, kv]) => lens_and_slopes(options, tensors, &dims, &mut others)?.packed(q, kv),
    };

    let stored = match (args.attention.dtype, args.attention.path()?) {
        (Some(dtype), _) => Some(dtype.stored()),
        (None, Some(Path::Naive)) => Some(DType::F32),
        (None, _) => None,
    };
    let number = |(name, view): &(&str, TensorView<'_>)| -> Result<Numbers> {
        let numbers = Numbers::of(name, view)?;
        Ok(match stored {
            Some(dtype) => numbers.stored(dtype),
            None => numbers,
        })
    };
    let qkv = [number(q)?, number(k)?, number(v)?];
    let [q_dtype, k_dtype, v_dtype] = qkv.each_ref().map(Numbers::dtype);
    // Unless a type was asked for o is told and written in f32, whatever the inputs are stored in.
    let storage = Storage { q: q_dtype, k: k_dtype, v: v_dtype, o: stored.unwrap_or_default() };
    let mut problem = Problem::new(dims, options)?.storage(storage)?;

    let (mask, bias) = masks(tensors)?;
    if let Some(Broadcast { name, given, shape, .. }) = &mask {
        problem = problem.mask(*shape).with_context(|| format!("{name} is {given:?}"))?;
        others.push(as_what(name, "mask"));
    }
    if let Some(Broadcast { name, given, shape, elements }) = &bias {
        problem = problem.bias(elements.dtype(), *shape).with_context(|| format!("{name} is {given:?}"))?;
        others.push(as_what(name, "bias"));
    }
    let ranges = ranges(tensors)?;
    if let Some(Broadcast { name, given, shape: [batch, heads, rows, _], .. }) = &ranges {
        problem = problem.ranges([*batch, *heads, *rows]).with_context(|| format!("{name} is {given:?}"))?;
        others.push(name.to_string());
    }
    let sinks = sinks(tensors, &dims)?;
    if sinks.is_some() {
        problem = problem.sinks();
        others.push("sinks".to_string());
    }
    warn_of_metadata(args, tensors, mask.is_some() || bias.is_some());

    let Dims { batch, q_heads, kv_heads, q_len, kv_len, value_dim, .. } = dims;
    let result_shapes = if axes == Layout::Thd {
        [vec![q_len, q_heads, value_dim], vec![q_heads, q_len]]
    } else {
        // There and back it is the same exchange.
        [heads_first([batch, q_heads, q_len, value_dim], axes).to_vec(), vec![batch, q_heads, q_len]]
    };
    let without_batch = axes != Layout::Thd && batch == 1;
    let result = |name: &str, shape: &[usize]| match tensors.find(name) {
        None => Ok(None),
        // The axis of a batch of 1 may be left out, as with q.
        Some(view) if view.shape() == shape || (without_batch && view.shape() == &shape[1..]) => {
            Expected::of(name, &view).map(Some)
        }
        Some(view) => {
            // That of the other order: lse has its axes in one only.
            let swapped = axes != Layout::Thd && name == "lse" && *view.shape() == [batch, q_len, q_heads];
            let hint = if swapped { format!("; --axes {} fits it", axes.other().name()) } else { String::new() };
            bail!("{name} is {:?}; accepted: {shape:?}, by the shapes of q, k and v{hint}", view.shape())
        }
    };
    let [o, lse] = [result("o", &result_shapes[0])?, result("lse", &result_shapes[1])?];
    let looks_swapped = axes != Layout::Thd && kv_heads > kv_len && q_heads > q_len && kv_len > 0;
    let input =
        Input { shapes, result_shapes, qkv, mask, bias, ranges, sinks, others, ignored, axes, looks_swapped, o, lse };
    Ok((problem, input))
}

/// The scale that was asked for, or else the file's own.
fn scale(args: &RunArgs, tensors: &Tensors<'_>) -> Result<Option<f32>> {
    let asked_for = args.attention.options.scale;
    let (None, Some(text)) = (asked_for, tensors.metadata("scale")) else { return Ok(asked_for) };
    let scale = text.trim().parse();
    scale.map(Some).with_context(|| format!("its metadata says scale: {text:?}, no number; --scale overrides it"))
}

/// Where the sequences of a packed batch start and end, of q and of k and v, if it is one.
fn cu_seqlens(tensors: &Tensors<'_>, others: &mut Vec<String>) -> Result<Option<[Vec<u32>; 2]>> {
    let q = one_of(tensors, &CU_SEQLENS_Q)?;
    let kv = one_of(tensors, &CU_SEQLENS_KV)?;
    let (Some((q_name, q)), Some((kv_name, kv))) = (&q, &kv) else {
        if let Some((name, _)) = q.or(kv) {
            bail!("it holds {name} alone; accepted: cu_seqlens_q and cu_seqlens_kv, or cu_seqlens for both");
        }
        return Ok(None);
    };
    others.push((*q_name).to_string());
    if q_name != kv_name {
        others.push((*kv_name).to_string());
    }
    Ok(Some([lengths(q_name, q)?, lengths(kv_name, kv)?]))
}

fn lens_and_slopes(
    mut options: Attention,
    tensors: &Tensors<'_>,
    dims: &Dims,
    others: &mut Vec<String>,
) -> Result<Attention> {
    if let Some(view) = tensors.find("q_lens") {
        options = options.q_lens(lengths("q_lens", &view)?);
        others.push("q_lens".to_string());
    }
    if let Some(view) = tensors.find("kv_lens") {
        options = options.kv_lens(lengths("kv_lens", &view)?);
        others.push("kv_lens".to_string());
    }
    if let Some(view) = tensors.find("alibi_slopes") {
        let Dims { batch, q_heads, .. } = *dims;
        let accepted = view.shape() == [q_heads] || view.shape() == [batch, q_heads];
        ensure!(
            accepted,
            "alibi_slopes is {:?}; accepted: (q_heads) or (batch, q_heads) = [{batch}, {q_heads}]",
            view.shape()
        );
        options = options.alibi(Numbers::of("alibi_slopes", &view)?.into_f32());
        others.push("alibi_slopes".to_string());
    }
    Ok(options)
}

fn ranges(tensors: &Tensors<'_>) -> Result<Option<RangesInput>> {
    let Some(named) = one_of(tensors, &["ranges"])? else { return Ok(None) };
    let ranges = Broadcast::of(&named, RANGES, unsigned)?;
    ensure!(ranges.shape[3] == 2, "ranges is {:?}; accepted: {RANGES}", ranges.given);
    Ok(Some(ranges))
}

fn sinks(tensors: &Tensors<'_>, dims: &Dims) -> Result<Option<Vec<f32>>> {
    let Some(view) = tensors.find("sinks") else { return Ok(None) };
    ensure!(view.shape() == [dims.q_heads], "sinks is {:?}; accepted: (q_heads) = [{}]", view.shape(), dims.q_heads);
    Ok(Some(Numbers::of("sinks", &view)?.into_f32()))
}

/// A tensor under one of its names.
type Named<'a> = (&'static str, TensorView<'a>);

/// The tensor under whichever of these names the file has.
fn one_of<'a>(tensors: &Tensors<'a>, names: &[&'static str]) -> Result<Option<Named<'a>>> {
    only(names.iter().filter_map(|&name| Some((name, tensors.find(name)?))))
}

fn only<'a>(mut named: impl Iterator<Item = Named<'a>>) -> Result<Option<Named<'a>>> {
    let first = named.next();
    if let (Some((one, _)), Some((other, _))) = (&first, named.next()) {
        bail!("it holds {one} and {other}, which say the same; accepted: one of them");
    }
    Ok(first)
}

/// The boolean mask and the bias, whatever their names.
fn masks(tensors: &Tensors<'_>) -> Result<(Option<MaskInput>, Option<BiasInput>)> {
    let held = |names: &[&'static str]| -> Vec<Named<'_>> {
        names.iter().filter_map(|&name| Some((name, tensors.find(name)?))).collect()
    };
    let is_float = |(_, view): &Named<'_>| matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64);
    let (floats, masks): (Vec<_>, Vec<_>) = held(&MASKS).into_iter().partition(is_float);
    for (name, view) in &floats {
        let numbers = Numbers::of(name, view)?.into_f32();
        // A mask that was saved as numbers: taken for a bias it would hide nothing.
        ensure!(
            !numbers.contains(&1.0) || numbers.iter().any(|&x| x != 0.0 && x != 1.0),
            "{name} is {:?} of nothing but 0 and 1; accepted: BOOL or integers for a mask, and for a bias like this the name bias",
            view.dtype()
        );
    }
    let mask = only(masks.into_iter())?.map(|mask| Broadcast::of(&mask, SCORES, booleans));
    let bias = only(floats.into_iter().chain(held(&BIASES)))?.map(|bias| Broadcast::of(&bias, SCORES, Numbers::of));
    Ok((mask.transpose()?, bias.transpose()?))
}

/// A name, and what its tensor was taken for if that is something else.
fn as_what(name: &str, what: &str) -> String {
    if name == what { name.to_string() } else { format!("{what} ({name})") }
}

fn integers(name: &str, view: &TensorView<'_>) -> Result<Vec<i128>> {
    fn decoded<const N: usize, T: Into<i128>>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<i128> {
        bytes.as_chunks().0.iter().map(|&chunk| decode(chunk).into()).collect()
    }
    let data = view.data();
    Ok(match view.dtype() {
        Dtype::BOOL | Dtype::U8 => decoded(data, u8::from_le_bytes),
        Dtype::I8 => decoded(data, i8::from_le_bytes),
        Dtype::I16 => decoded(data, i16::from_le_bytes),
        Dtype::U16 => decoded(data, u16::from_le_bytes),
        Dtype::I32 => decoded(data, i32::from_le_bytes),
        Dtype::U32 => decoded(data, u32::from_le_bytes),
        Dtype::I64 => decoded(data, i64::from_le_bytes),
        Dtype::U64 => decoded(data, u64::from_le_bytes),
        other => bail!("{name} is {other:?}; accepted: integers"),
    })
}

/// Lengths or places, on one axis.
fn lengths(name: &str, view: &TensorView<'_>) -> Result<Vec<u32>> {
    ensure!(view.shape().len() == 1, "{name} is {:?}; accepted: one axis", view.shape());
    unsigned(name, view)
}

fn unsigned(name: &str, view: &TensorView<'_>) -> Result<Vec<u32>> {
    let number = |x: i128| u32::try_from(x).with_context(|| format!("{name} holds {x}; accepted: 0 to {}", u32::MAX));
    integers(name, view)?.into_iter().map(number).collect()
}

/// True where the query may attend.
fn booleans(name: &str, view: &TensorView<'_>) -> Result<Vec<bool>> {
    let boolean = |x: i128| match x {
        0 => Ok(false),
        1 => Ok(true),
        other => bail!("{name} holds {other}; accepted: 0 and 1, which is where the query may attend"),
    };
    integers(name, view)?.into_iter().map(boolean).collect()
}

fn warn_of_metadata(args: &RunArgs, tensors: &Tensors<'_>, masked: bool) {
    let says = tensors.metadata("mask").filter(|mask| !matches!(*mask, "" | "none" | "full"));
    let Some(says) = says.filter(|_| !args.attention.options.causal) else { return };
    if says == "causal" || !masked {
        let hint = if says == "causal" { "; --causal applies it" } else { "" };
        let (file, says) = (args.file.display(), output::printable(says));
        eprintln!("note: {file}: its metadata says mask: {says}, which isn't applied{hint}");
    }
}

impl Input {
    pub(super) fn upload(&self, engine: &Engine, layout: Layout) -> Result<DeviceInputs> {
        let upload = |index: usize| -> tilewise::Result<Tensor> {
            let shape = &self.shapes[index];
            match layout {
                Layout::Bhsd | Layout::Thd => self.qkv[index].upload(engine, shape),
                Layout::Bshd => self.qkv[index].upload(engine, &SWAPPED.map(|axis| shape[axis]))?.permute(&SWAPPED),
            }
        };
        let mut inputs = DeviceInputs::new([upload(0)?, upload(1)?, upload(2)?]);
        if let Some(mask) = &self.mask {
            inputs.mask = Some(engine.upload_mask(&mask.elements, mask.shape)?);
        }
        if let Some(bias) = &self.bias {
            inputs.bias = Some(bias.elements.upload(engine, &bias.shape)?);
        }
        if let Some(ranges) = &self.ranges {
            inputs.ranges = Some(engine.upload(&ranges.elements, ranges.shape)?);
        }
        if let Some(sinks) = &self.sinks {
            inputs.sinks = Some(engine.upload(sinks, [sinks.len()])?);
        }
        Ok(inputs)
    }
}
