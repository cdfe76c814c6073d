//! Tensors: of safetensors files, opened with care for their contents may be anybody's, and on the device.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tilewise::reference::Precision;
use tilewise::{
    Attention, AttentionOutput, BackwardBindings, BackwardInputs, Bindings, DType, Engine, Gradients, Inputs, Mask,
    Plan, Tensor, wgpu,
};

use crate::measure;

/// No header is longer than safetensors' own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The bytes of a file.
#[derive(Debug)]
pub(crate) struct TensorFile {
    bytes: Vec<u8>,
}

/// The tensors of a file.
#[derive(Debug)]
pub(crate) struct Tensors<'a> {
    tensors: SafeTensors<'a>,
    metadata: BTreeMap<String, String>,
    /// Names that are treated as if they weren't there.
    ignored: Vec<String>,
}

impl TensorFile {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => anyhow!("no such file"),
            _ => error.into(),
        })?;
        // A device or a pipe may never end.
        ensure!(metadata.is_file(), "not a regular file");
        Ok(Self { bytes: std::fs::read(path)? })
    }

    pub(crate) fn tensors(&self) -> Result<Tensors<'_>> {
        let metadata = self.check_header()?;
        let tensors =
            SafeTensors::deserialize(&self.bytes).map_err(|error| anyhow!("not a sound safetensors file: {error}"))?;
        Ok(Tensors { tensors, metadata, ignored: Vec::new() })
    }

    /// Checks the header for what is worth a better message, and for offsets that the parser's sums could overflow on.
    fn check_header(&self) -> Result<BTreeMap<String, String>> {
        let file_bytes = self.bytes.len() as u64;
        let Some((length, rest)) = self.bytes.split_first_chunk::<8>() else {
            bail!("not a safetensors file, or truncated: {file_bytes} bytes");
        };
        let header_bytes = u64::from_le_bytes(*length);
        ensure!(
            header_bytes <= MAX_HEADER_BYTES,
            "not a safetensors file: it begins with a header length of {header_bytes}"
        );
        let header = usize::try_from(header_bytes).ok().and_then(|length| rest.get(..length));
        let Some(header) = header else {
            bail!("truncated: a header of {header_bytes} bytes in a file of {file_bytes}");
        };
        let header: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(header).map_err(|error| anyhow!("not a safetensors file: its header: {error}"))?;
        let data_bytes = file_bytes - 8 - header_bytes;
        let mut metadata = BTreeMap::new();
        for (name, value) in &header {
            if name == "__metadata__" {
                metadata = serde_json::from_value(value.clone()).context("__metadata__ of the header")?;
                continue;
            }
            for offset in value["data_offsets"].as_array().into_iter().flatten() {
                let offset = offset.as_u64().with_context(|| format!("data_offsets of {name}: {offset}"))?;
                ensure!(
                    offset <= data_bytes,
                    "truncated: tensor {name} ends at byte {offset} of {data_bytes} bytes of data"
                );
            }
        }
        Ok(metadata)
    }
}

impl<'a> Tensors<'a> {
    pub(crate) fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// As if the file didn't hold these, which it has to.
    pub(crate) fn ignore(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            self.get(name)?;
        }
        self.ignored.extend_from_slice(names);
        Ok(())
    }

    fn is_ignored(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored == name)
    }

    /// The names, sorted.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut names = self.tensors.names();
        names.retain(|name| !self.is_ignored(name));
        names.sort_unstable();
        names
    }

    /// A tensor, if the file holds it.
    pub(crate) fn find(&self, name: &str) -> Option<TensorView<'a>> {
        if self.is_ignored(name) { None } else { self.tensors.tensor(name).ok() }
    }

    /// A tensor, or an error that tells what there is.
    pub(crate) fn get(&self, name: &str) -> Result<TensorView<'a>> {
        self.find(name).with_context(|| format!("no tensor {name}; the file holds: {}", self.names().join(", ")))
    }
}

/// The name of a dtype as manifests write it.
pub(crate) fn dtype_name(dtype: Dtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// Elements of a type that the engine takes.
#[derive(Debug)]
pub(crate) enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// The elements of a tensor's bytes.
pub(crate) fn elements<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&chunk| decode(chunk)).collect()
}

impl Numbers {
    pub(crate) fn of(name: &str, view: &TensorView<'_>) -> Result<Self> {
        match view.dtype() {
            Dtype::F32 => Ok(Self::F32(elements(view.data(), f32::from_le_bytes))),
            Dtype::F16 => Ok(Self::F16(elements(view.data(), f16::from_le_bytes))),
            Dtype::BF16 => Ok(Self::Bf16(elements(view.data(), bf16::from_le_bytes))),
            other => bail!("{name} is {other:?}; accepted: F32, F16, BF16"),
        }
    }

    pub(crate) fn upload(&self, engine: &Engine, shape: &[usize]) -> tilewise::Result<Tensor> {
        match self {
            Self::F32(numbers) => engine.upload(numbers, shape),
            Self::F16(numbers) => engine.upload(numbers, shape),
            Self::Bf16(numbers) => engine.upload(numbers, shape),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// The same numbers in another type, rounded to nearest.
    pub(crate) fn stored(self, dtype: DType) -> Self {
        if self.dtype() == dtype {
            return self;
        }
        let numbers = self.into_f32();
        match dtype {
            DType::F16 => Self::F16(numbers.into_iter().map(f16::from_f32).collect()),
            DType::Bf16 => Self::Bf16(numbers.into_iter().map(bf16::from_f32).collect()),
            DType::F32 | DType::U32 => Self::F32(numbers),
        }
    }

    /// Widened; exact.
    pub(crate) fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(numbers) => numbers,
            Self::F16(numbers) => numbers.into_iter().map(f16::to_f32).collect(),
            Self::Bf16(numbers) => numbers.into_iter().map(bf16::to_f32).collect(),
        }
    }
}

/// The reference's name for a type of floating-point numbers.
pub(crate) fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
        DType::F32 | DType::U32 => Precision::F32,
    }
}

/// The elements of a result to compare with.
pub(crate) fn expected(name: &str, view: &TensorView<'_>) -> Result<Vec<f64>> {
    if view.dtype() == Dtype::F64 {
        return Ok(elements(view.data(), f64::from_le_bytes));
    }
    Ok(Numbers::of(name, view)?.into_f32().into_iter().map(f64::from).collect())
}

/// What a call reads, on the device: owns what [`Inputs`] lends.
#[derive(Debug)]
pub(crate) struct DeviceInputs {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) mask: Option<Mask>,
    pub(crate) ranges: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) mod_data: Option<Tensor>,
}

impl DeviceInputs {
    pub(crate) fn new([q, k, v]: [Tensor; 3]) -> Self {
        Self { q, k, v, bias: None, mask: None, ranges: None, sinks: None, mod_data: None }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        let Self { q, k, v, bias, mask, ranges, sinks, mod_data } = self;
        Inputs {
            q,
            k,
            v,
            bias: bias.as_ref(),
            mask: mask.as_ref(),
            ranges: ranges.as_ref(),
            sinks: sinks.as_ref(),
            mod_data: mod_data.as_ref(),
        }
    }
}

fn fill_with_nans<'a>(engine: &Engine, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
    for tensor in tensors {
        // All bits set are a NaN in each of the types. A buffer has room for a whole last word, and is written by words.
        let nans = vec![0xFF; (tensor.dtype().bytes() * tensor.elems()).next_multiple_of(4)];
        measure::caught(engine.device(), || engine.queue().write_buffer(tensor.raw_buffer(), 0, &nans))?;
    }
    Ok(())
}

/// The same for the gradients of a call.
pub(crate) fn gradients_over_nans(
    engine: &Engine,
    inputs: &BackwardInputs<'_>,
    options: &Attention,
) -> Result<Gradients> {
    let problem = inputs.inputs.problem(&options.clone().output_dtype(inputs.o.dtype()))?;
    let plan = engine.plan_backward(&problem)?;
    let gradients = engine.alloc_gradients(&plan)?;
    let Gradients { dq, dk, dv, dbias, dsinks } = &gradients;
    fill_with_nans(engine, [dq, dk, dv].into_iter().chain(dbias).chain(dsinks))?;
    let workspace = engine.alloc_backward_workspace(&plan)?;
    let bindings = BackwardBindings { inputs: *inputs, gradients: &gradients, workspace: workspace.as_ref() };
    let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    plan.record(&mut encoder, &bindings)?;
    engine.queue().submit([encoder.finish()]);
    engine.wait()?;
    Ok(gradients)
}

/// Runs a plan into outputs that were NaN before: an element that a kernel leaves out then shows.
pub(crate) fn run_over_nans(engine: &Engine, plan: &Plan, inputs: Inputs<'_>) -> Result<AttentionOutput> {
    let outputs = engine.alloc_output(plan)?;
    fill_with_nans(engine, [&outputs.o, &outputs.lse])?;
    let workspace = engine.alloc_workspace(plan)?;
    let bindings = Bindings { inputs, o: &outputs.o, lse: &outputs.lse, workspace: workspace.as_ref() };
    engine.run(plan, &bindings, |_| ControlFlow::Continue(()))?;
    Ok(outputs)
}
