//! Cases of the format `onnx-attention-cases/1`: ONNX's own node tests.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use tilewise::reference::{self, Case, Precision};
use tilewise::{Align, Attention, Dims, Problem, Tensor};

use super::{Compared, Described, Runner, check_tensors, compare_no_nan, refuse};
use crate::tensors::{Numbers, Tensors, expected};
use crate::verify::{Dtype, VerifyArgs};

#[derive(Debug, Deserialize)]
struct Entry {
    op: String,
    file: String,
    dtype: String,
    layout: Option<String>,
    attrs: BTreeMap<String, Value>,
    inputs: BTreeMap<String, Described>,
    outputs: BTreeMap<String, Described>,
    /// How far ONNX's own stored output is from the exact one.
    #[serde(default)]
    f64_max_abs_diff: BTreeMap<String, f64>,
}

/// A case's type is its own. Only when another than f32 is asked for are the rest left out.
pub(super) fn dtype(case: &Value, args: &VerifyArgs) -> Option<String> {
    let own = case["dtype"].as_str().unwrap_or_default();
    (args.dtype == Dtype::F32 || own == args.dtype.name()).then(|| own.to_string())
}

pub(super) fn check(runner: &Runner<'_>, case: &Value) -> Result<Compared> {
    let entry = Entry::deserialize(case).context("the case's entry in the manifest")?;
    let file = runner.open(&entry.file)?;
    let tensors = file.tensors().with_context(|| entry.file.clone())?;
    check_tensors(&tensors, entry.inputs.iter().chain(&entry.outputs))?;
    refuse(&entry.needs())?;

    let inputs = [
        entry.input(&tensors, "q", "q_num_heads")?,
        entry.input(&tensors, "k", "kv_num_heads")?,
        entry.input(&tensors, "v", "kv_num_heads")?,
    ];
    let problem = entry.problem(&inputs)?;
    let y = tensors.get("y")?;
    let result_shape =
        entry.stored(&[problem.dims().batch, problem.dims().q_heads, problem.dims().q_len, problem.dims().value_dim]);
    ensure!(y.shape() == result_shape, "y is {:?}; accepted: {result_shape:?}, by the inputs", y.shape());

    let upload = |input: &Input| -> Result<Tensor> {
        let tensor = runner.engine.upload(&input.numbers, &input.stored)?;
        Ok(if entry.is_3d() { tensor.heads(input.shape[1])? } else { tensor })
    };
    let [q, k, v] = &inputs;
    let device = [upload(q)?, upload(k)?, upload(v)?];
    let [o, _] = runner.attention(&problem, &device)?;
    let got = if entry.is_3d() { o.permute(&[0, 2, 1, 3])?.read()? } else { o.read()? };
    // The views tell where each element is: read back, they are dense in the reference's order.
    let [q, k, v] = &device;
    let tolerance = tolerance(&problem, &q.read()?, &k.read()?, &v.read()?)?;
    let tolerance = tolerance + entry.f64_max_abs_diff.get("y").copied().unwrap_or_default();
    Ok(BTreeMap::from([("y".to_string(), compare_no_nan(&got, &expected("y", &y)?, tolerance))]))
}

/// An input as stored and as attention sees it.
struct Input {
    numbers: Vec<f32>,
    stored: Vec<usize>,
    /// (batch, heads, length, dim)
    shape: [usize; 4],
}

/// ONNX's own relative 1e-3 would let wrong kernels pass: what an honest f32 engine keeps to is far less.
fn tolerance(problem: &Problem, q: &[f32], k: &[f32], v: &[f32]) -> Result<f64> {
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = problem.dims();
    let case = Case {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
        q,
        k,
        v,
        softmax_scale: Some(problem.softmax_scale().into()),
        causal: problem.attention().is_causal(),
        align: reference::Align::TopLeft,
        ..Case::default()
    };
    Ok(reference::attention(&case)?.tolerance.o(Precision::F32))
}

impl Entry {
    fn is_3d(&self) -> bool {
        self.layout.as_deref() == Some("3d_b_s_hd")
    }

    fn int(&self, name: &str) -> Option<i64> {
        self.attrs.get(name)?.as_i64()
    }

    /// What the case needs that isn't built.
    fn needs(&self) -> Vec<String> {
        let mut needs = Vec::new();
        // FlexAttention without its mods is attention.
        if !matches!(self.op.as_str(), "Attention" | "FlexAttention") {
            needs.push(format!("operator {}", self.op));
            return needs;
        }
        if self.dtype != "f32" {
            needs.push(format!("storage in {}", self.dtype));
        }
        if !matches!(self.layout.as_deref(), Some("4d_b_h_s_d" | "3d_b_s_hd")) {
            needs.push(format!("layout {}", self.layout.as_deref().unwrap_or("null")));
        }
        needs.extend(self.inputs.keys().filter(|name| !matches!(name.as_str(), "q" | "k" | "v")).cloned());
        needs.extend(self.outputs.keys().filter(|name| *name != "y").map(|name| format!("output {name}")));
        for (name, value) in &self.attrs {
            let needed = match name.as_str() {
                // Taken as they are; or of no consequence without the output that they are for.
                "scale"
                | "scale_effective"
                | "is_causal"
                | "q_num_heads"
                | "kv_num_heads"
                | "qk_matmul_output_mode" => false,
                "softcap" => value.as_f64() != Some(0.0) && !value.is_null(),
                "left_window_size" | "right_window_size" => value.as_i64() != Some(-1) && !value.is_null(),
                // The softmax is always in f32.
                "softmax_precision" => value != "f32" && !value.is_null(),
                _ => !value.is_null(),
            };
            if needed {
                needs.push(format!("{name} {value}"));
            }
        }
        needs
    }

    fn input(&self, tensors: &Tensors<'_>, name: &str, heads: &str) -> Result<Input> {
        let view = tensors.get(name)?;
        let stored = view.shape().to_vec();
        let shape = match *stored {
            [batch, heads, len, dim] if !self.is_3d() => [batch, heads, len, dim],
            [batch, len, width] if self.is_3d() => {
                let count = self.int(heads).and_then(|count| usize::try_from(count).ok()).filter(|&count| count > 0);
                let count = count.with_context(|| format!("a 3d case without a {heads} above 0"))?;
                ensure!(width % count == 0, "{name} is {stored:?}; accepted: a last axis of {count} heads");
                [batch, count, len, width / count]
            }
            _ => anyhow::bail!("{name} is {stored:?} in layout {:?}", self.layout),
        };
        Ok(Input { numbers: Numbers::of(name, &view)?.into_f32(), stored, shape })
    }

    /// How a result of this shape, (batch, heads, length, dim), is stored.
    fn stored(&self, &[batch, heads, len, dim]: &[usize; 4]) -> Vec<usize> {
        if self.is_3d() { vec![batch, len, heads.saturating_mul(dim)] } else { vec![batch, heads, len, dim] }
    }

    fn problem(&self, [q, k, v]: &[Input; 3]) -> Result<Problem> {
        let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q.shape, k.shape);
        let value_dim = v.shape[3];
        ensure!(
            k.shape == [batch, kv_heads, kv_len, head_dim] && v.shape == [batch, kv_heads, kv_len, value_dim],
            "q {:?}, k {:?}, v {:?} don't fit together",
            q.shape,
            k.shape,
            v.shape
        );
        // Without a past the first query stands at the first key.
        let options = if self.int("is_causal").unwrap_or(0) != 0 { Attention::causal() } else { Attention::full() };
        let options = options.align(Align::TopLeft);
        let scale = ["scale_effective", "scale"].into_iter().find_map(|name| self.attrs.get(name)?.as_f64());
        let options = match scale {
            #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
            Some(scale) => options.softmax_scale(scale as f32),
            None => options,
        };
        let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        Ok(Problem::new(dims, options)?)
    }
}
