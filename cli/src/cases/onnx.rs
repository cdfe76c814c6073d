//! Cases of the format `onnx-attention-cases/1`: ONNX's own node tests.

mod call;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use tilewise::Dims;

use self::call::Call;
use super::{Compared, Descriptions, Runner, check_tensors, compare_no_nan, refuse, undescribed};
use crate::tensors::{Tensors, expected};
use crate::verify::{Dtype, VerifyArgs};

#[derive(Debug, Deserialize)]
struct Entry {
    op: String,
    file: String,
    dtype: String,
    layout: Option<String>,
    attrs: BTreeMap<String, Value>,
    inputs: Descriptions,
    outputs: Descriptions,
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
    check_tensors(&tensors, &entry.inputs, &entry.outputs)?;
    refuse(&entry.reasons_against(&tensors))?;

    let call = Call::new(&entry, &tensors)?;
    let y = tensors.get("y")?;
    let shape = entry.stored(call.dims());
    ensure!(y.shape() == shape, "y is {:?}; accepted: {shape:?}, by the inputs", y.shape());

    let device = call.upload(runner.engine)?;
    let o = runner.attention(&device, &call.options()?)?.o;
    let got = if entry.is_3d() { o.permute(&[0, 2, 1, 3])?.read()? } else { o.read()? };
    let mut compared =
        BTreeMap::from([("y".to_string(), compare_no_nan(&got, &expected("y", &y)?, entry.tolerance(&call)?))]);
    // The past with the new keys behind it: a copy, of which every bit is right.
    for (name, tensor) in [("present_key", &device.k), ("present_value", &device.v)] {
        if entry.outputs.contains_key(name) {
            let present = tensors.get(name)?;
            ensure!(
                present.shape() == tensor.shape(),
                "{name} is {:?}; accepted: {:?}, by the inputs",
                present.shape(),
                tensor.shape()
            );
            compared.insert(name.to_string(), compare_no_nan(&tensor.read()?, &expected(name, &present)?, 0.0));
        }
    }
    Ok(compared)
}

impl Entry {
    fn is_3d(&self) -> bool {
        self.layout.as_deref() == Some("3d_b_s_hd")
    }

    /// An attribute, unless it isn't given.
    fn attr(&self, name: &str) -> Option<&Value> {
        self.attrs.get(name).filter(|value| !value.is_null())
    }

    fn int(&self, name: &str) -> Result<Option<i64>> {
        let int = |value: &Value| value.as_i64().with_context(|| format!("{name} {value}; accepted: an integer"));
        self.attr(name).map(int).transpose()
    }

    fn float(&self, name: &str) -> Result<Option<f64>> {
        let float = |value: &Value| value.as_f64().with_context(|| format!("{name} {value}; accepted: a number"));
        self.attr(name).map(float).transpose()
    }

    /// What the case needs that this program hasn't or doesn't know.
    fn reasons_against(&self, tensors: &Tensors<'_>) -> Vec<String> {
        if !matches!(self.op.as_str(), "Attention" | "FlexAttention") {
            return vec![format!("operator {} isn't attention", self.op)];
        }
        let mut reasons = undescribed(tensors, &self.inputs, &self.outputs);
        if !matches!(self.dtype.as_str(), "f32" | "f16" | "bf16") {
            reasons.push(format!("storage in {} isn't built", self.dtype));
        }
        if !matches!(self.layout.as_deref(), Some("4d_b_h_s_d" | "3d_b_s_hd")) {
            reasons.push(format!("layout {} isn't known", self.layout.as_deref().unwrap_or("null")));
        }
        for name in self.inputs.keys() {
            match name.as_str() {
                "q" | "k" | "v" | "attn_mask" | "past_key" | "past_value" | "nonpad_kv_seqlen" => {}
                other => reasons.push(format!("input {other} isn't known")),
            }
        }
        for name in self.outputs.keys() {
            match name.as_str() {
                "y" | "present_key" | "present_value" => {}
                "qk_matmul_output" => reasons.push(
                    "output qk_matmul_output is the score matrix, which tiled attention never stores".to_string(),
                ),
                other => reasons.push(format!("output {other} isn't known")),
            }
        }
        for (name, value) in self.attrs.iter().filter(|(_, value)| !value.is_null()) {
            match name.as_str() {
                // Checked where they are taken; or of no consequence without the output that they are for.
                "scale"
                | "scale_effective"
                | "is_causal"
                | "q_num_heads"
                | "kv_num_heads"
                | "softcap"
                | "left_window_size"
                | "right_window_size"
                | "qk_matmul_output_mode" => {}
                // The softmax is in f32, which is all that the shorter types ask for.
                "softmax_precision" if ["f32", "f16", "bf16"].iter().any(|name| value == name) => {}
                "softmax_precision" => reasons.push(format!("softmax_precision {value} isn't built")),
                "score_mod" if call::knows_score_mod(value) => {}
                "prob_mod" => reasons.push(format!("prob_mod {value}: nothing can change weights after the softmax")),
                _ => reasons.push(format!("attribute {name} {value} isn't known")),
            }
        }
        reasons
    }

    /// How a result of these sizes is stored.
    fn stored(&self, dims: Dims) -> Vec<usize> {
        let Dims { batch, q_heads, q_len, value_dim, .. } = dims;
        if self.is_3d() {
            vec![batch, q_len, q_heads.saturating_mul(value_dim)]
        } else {
            vec![batch, q_heads, q_len, value_dim]
        }
    }

    /// How far y may be off. In f32 ONNX's own relative 1e-3 would let wrong kernels pass: what an honest engine keeps to is far less.
    /// Its outputs in f16 and bf16 have every intermediate rounded to the type, and are themselves off by half of this.
    fn tolerance(&self, call: &Call) -> Result<f64> {
        match self.dtype.as_str() {
            "f16" => Ok(1e-3),
            "bf16" => Ok(1e-2),
            _ => Ok(call.tolerance()? + self.f64_max_abs_diff.get("y").copied().unwrap_or_default()),
        }
    }
}
