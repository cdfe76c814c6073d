//! Cases of the format `attention-golden/1`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use tilewise::reference::Comparison;
use tilewise::{Align, Attention, AttentionOutput, BackwardInputs, Gradients, Tensor};

use super::inputs::{booleans, four_axes, lengths, stored_exactly};
use super::{Compared, Descriptions, Runner, check_shape, check_tensors, compare_no_nan, refuse, undescribed};
use crate::tensors::{DeviceInputs, Numbers, Tensors, expected, gradients_over_nans};
use crate::verify::{Dtype, Outputs, VerifyArgs};

#[derive(Debug, Deserialize)]
struct Entry {
    file: String,
    layout: Layout,
    dims: CaseDims,
    attrs: Attrs,
    inputs: Descriptions,
    outputs: Descriptions,
    compare: Vec<String>,
    tol: BTreeMap<String, BTreeMap<String, f64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Layout {
    /// (batch, heads, length, dim).
    Bhsd,
    /// Packed: (tokens, heads, dim).
    Thd,
}

/// For the packed layout `b` is the number of sequences, `sq` and `skv` are the totals.
#[derive(Debug, Clone, Copy, Deserialize)]
struct CaseDims {
    b: usize,
    hq: usize,
    hkv: usize,
    sq: usize,
    skv: usize,
    d: usize,
    dv: usize,
}

#[derive(Debug, Deserialize)]
struct Attrs {
    scale: Option<f64>,
    #[serde(default)]
    causal: bool,
    align: Option<String>,
    /// Below 0: unbounded.
    window_left: Option<i64>,
    window_right: Option<i64>,
    /// 0: none.
    softcap: Option<f64>,
    /// What this program has never heard of.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The type to run a case in, unless its inputs can't be held in it.
pub(super) fn dtype(case: &Value, args: &VerifyArgs) -> Option<String> {
    let name = args.dtype.name();
    let exact = case["inputs_exact_in"].as_array();
    // A case without the list is malformed, which is to be told, not skipped.
    let held = exact.is_none_or(|dtypes| dtypes.iter().any(|dtype| dtype == name));
    (args.dtype == Dtype::F32 || held).then(|| name.to_string())
}

pub(super) fn check(runner: &Runner<'_>, case: &Value) -> Result<Compared> {
    let entry = Entry::deserialize(case).context("the case's entry in the manifest")?;
    let file = runner.open(&entry.file)?;
    let tensors = file.tensors().with_context(|| entry.file.clone())?;
    check_tensors(&tensors, &entry.inputs, &entry.outputs)?;
    ensure!(!entry.compare.is_empty(), "the manifest names no output to compare");
    refuse(&entry.reasons_against(runner.args, &tensors))?;
    entry.check_shapes(&tensors)?;

    let mut wanted = Vec::new();
    for name in entry.compared(runner.args) {
        let dtype = runner.args.dtype.name();
        let tolerance = entry.tol.get(dtype).and_then(|tolerances| tolerances.get(name));
        let tolerance = *tolerance.with_context(|| format!("the manifest has no tol of {name} for {dtype}"))?;
        wanted.push((name, expected(name, &tensors.get(name)?)?, tolerance));
    }
    let options = entry.options(&tensors)?;
    let inputs = entry.upload(runner, &tensors)?;
    let output = runner.attention(&inputs, &options)?;
    let gradients = if wanted.iter().any(|(name, ..)| is_gradient(name)) {
        Some(entry.gradients(runner, &tensors, &inputs, &output, &options)?)
    } else {
        None
    };
    let mut compared = Compared::new();
    for (name, expected, tolerance) in wanted {
        let got = of_name(name, &output, gradients.as_ref()).with_context(|| format!("there is no {name}"))?.read()?;
        let mut comparison = compare_no_nan(&got, &expected, tolerance);
        if name == "o" {
            entry.check_empty_rows(&tensors, &got, &mut comparison)?;
        }
        compared.insert(name.to_string(), comparison);
    }
    Ok(compared)
}

fn is_gradient(name: &str) -> bool {
    GRADIENTS.contains(&name)
}

const GRADIENTS: [&str; 5] = ["dq", "dk", "dv", "dbias", "dsinks"];

/// The result that a case calls so.
fn of_name<'a>(name: &str, output: &'a AttentionOutput, gradients: Option<&'a Gradients>) -> Option<&'a Tensor> {
    match (name, gradients) {
        ("o", _) => Some(&output.o),
        ("lse", _) => Some(&output.lse),
        ("dq", Some(gradients)) => Some(&gradients.dq),
        ("dk", Some(gradients)) => Some(&gradients.dk),
        ("dv", Some(gradients)) => Some(&gradients.dv),
        ("dbias", Some(gradients)) => gradients.dbias.as_ref(),
        ("dsinks", Some(gradients)) => gradients.dsinks.as_ref(),
        _ => None,
    }
}

/// A bound of a window: below 0 is none.
fn bound(keys: Option<i64>) -> Option<u32> {
    // No input is as long as the largest bound.
    keys.filter(|&keys| keys >= 0).map(|keys| u32::try_from(keys).unwrap_or(u32::MAX))
}

impl Entry {
    fn packed(&self) -> bool {
        self.layout == Layout::Thd
    }

    fn has(&self, input: &str) -> bool {
        self.inputs.contains_key(input)
    }

    /// The outputs to compare, of those asked for.
    fn compared(&self, args: &VerifyArgs) -> Vec<&str> {
        let outputs = || self.compare.iter().map(String::as_str);
        let forward: Vec<_> = outputs().filter(|name| !is_gradient(name)).collect();
        // Of the outputs asked for a case may have none: it is about the others.
        if args.outputs == Outputs::All || forward.is_empty() { outputs().collect() } else { forward }
    }

    /// What the case needs that isn't built or isn't known.
    fn reasons_against(&self, args: &VerifyArgs, tensors: &Tensors<'_>) -> Vec<String> {
        let mut reasons = undescribed(tensors, &self.inputs, &self.outputs);
        for name in self.inputs.keys() {
            let known = match name.as_str() {
                // do and dlse matter to gradients only.
                "q" | "k" | "v" | "do" | "dlse" | "sinks" | "alibi_slopes" => true,
                "bias" | "mask" | "kv_lens" | "q_lens" => !self.packed(),
                "cu_seqlens_q" | "cu_seqlens_k" => self.packed(),
                _ => false,
            };
            if !known {
                let layout = if self.packed() { "thd" } else { "bhsd" };
                reasons.push(format!("input {name} isn't known in layout {layout}"));
            }
        }
        let off = |value: &Value| value.is_null() || value == false || value.as_f64() == Some(0.0);
        let others = self.attrs.others.iter().filter(|(_, value)| !off(value));
        reasons.extend(others.map(|(name, value)| format!("attribute {name} {value} isn't known")));
        let compared = self.compared(args);
        let unknown = compared.iter().filter(|name| !matches!(**name, "o" | "lse") && !is_gradient(name));
        reasons.extend(unknown.map(|name| format!("output {name} isn't known")));
        let absent = |gradient: &str| compared.contains(&gradient) && !self.has(&gradient[1..]);
        reasons.extend(
            GRADIENTS.into_iter().filter(|name| absent(name)).map(|name| format!("{name} of what isn't there")),
        );
        if compared.iter().any(|name| is_gradient(name)) && !self.has("do") {
            reasons.push("gradients without do".to_string());
        }
        reasons
    }

    /// Whether the tensors are of the shapes that the case's dims say.
    fn check_shapes(&self, tensors: &Tensors<'_>) -> Result<()> {
        let CaseDims { b, hq, hkv, sq, skv, d, dv } = self.dims;
        let packed = self.packed();
        let of_heads = |heads, len, dim| if packed { vec![len, heads, dim] } else { vec![b, heads, len, dim] };
        check_shape(tensors, "q", &of_heads(hq, sq, d))?;
        check_shape(tensors, "k", &of_heads(hkv, skv, d))?;
        check_shape(tensors, "v", &of_heads(hkv, skv, dv))?;
        let lse = if packed { vec![hq, sq] } else { vec![b, hq, sq] };
        for (name, shape) in [("o", of_heads(hq, sq, dv)), ("lse", lse)] {
            if self.outputs.contains_key(name) || self.compare.iter().any(|compared| compared == name) {
                check_shape(tensors, name, &shape)?;
            }
        }
        let bounds = vec![b.saturating_add(1)];
        if packed {
            check_shape(tensors, "cu_seqlens_q", &bounds)?;
            check_shape(tensors, "cu_seqlens_k", &bounds)?;
        }
        for (name, shape) in [("sinks", hq), ("kv_lens", b), ("q_lens", b)] {
            if self.has(name) {
                check_shape(tensors, name, &[shape])?;
            }
        }
        if self.has("alibi_slopes") {
            let slopes = tensors.get("alibi_slopes")?;
            ensure!(
                *slopes.shape() == [hq] || *slopes.shape() == [b, hq],
                "alibi_slopes is {:?}; accepted: [{hq}], [{b}, {hq}], by the case's dims",
                slopes.shape()
            );
        }
        Ok(())
    }

    fn options(&self, tensors: &Tensors<'_>) -> Result<Attention> {
        let attrs = &self.attrs;
        let align = match attrs.align.as_deref() {
            None | Some("bottom_right") => Align::BottomRight,
            Some("top_left") => Align::TopLeft,
            Some(other) => bail!("align {other:?}; accepted: \"bottom_right\", \"top_left\""),
        };
        let options = if attrs.causal { Attention::causal() } else { Attention::full() };
        let mut options = options.align(align).window(bound(attrs.window_left), bound(attrs.window_right));
        #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
        if let Some(scale) = attrs.scale {
            options = options.softmax_scale(scale as f32);
        }
        #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
        if let Some(softcap) = attrs.softcap.filter(|&softcap| softcap != 0.0) {
            ensure!(softcap > 0.0, "softcap {softcap}; accepted: 0 or more");
            options = options.softcap(softcap as f32);
        }
        let lengths = |name: &str| lengths(name, &tensors.get(name)?);
        if self.has("alibi_slopes") {
            options = options.alibi(numbers(tensors, "alibi_slopes")?);
        }
        if self.has("kv_lens") {
            options = options.kv_lens(lengths("kv_lens")?);
        }
        if self.has("q_lens") {
            options = options.q_lens(lengths("q_lens")?);
        }
        if self.packed() {
            options = options.packed(lengths("cu_seqlens_q")?, lengths("cu_seqlens_k")?);
        }
        Ok(options)
    }

    /// The inputs on the device: q, k and v in the type to run in, a bias too if it stays what it is. All else is f32 always.
    fn upload(&self, runner: &Runner<'_>, tensors: &Tensors<'_>) -> Result<DeviceInputs> {
        let engine = runner.engine;
        let dtype = runner.args.dtype.stored();
        let stored = |name: &str| upload_stored(runner, tensors, name);
        let mut inputs = DeviceInputs::new([stored("q")?, stored("k")?, stored("v")?]);
        if self.has("bias") {
            let bias = numbers(tensors, "bias")?;
            let bias = stored_exactly(&bias, dtype).unwrap_or(Numbers::F32(bias));
            inputs.bias = Some(bias.upload(engine, &four_axes("bias", tensors.get("bias")?.shape())?)?);
        }
        if self.has("mask") {
            let mask = tensors.get("mask")?;
            inputs.mask = Some(engine.upload_mask(&booleans("mask", &mask)?, four_axes("mask", mask.shape())?)?);
        }
        if self.has("sinks") {
            inputs.sinks = Some(engine.upload(&numbers(tensors, "sinks")?, [self.dims.hq])?);
        }
        Ok(inputs)
    }

    fn gradients(
        &self,
        runner: &Runner<'_>,
        tensors: &Tensors<'_>,
        inputs: &DeviceInputs,
        output: &AttentionOutput,
        options: &Attention,
    ) -> Result<Gradients> {
        let grad_o = upload_stored(runner, tensors, "do")?;
        let grad_lse = if self.has("dlse") {
            Some(runner.engine.upload(&numbers(tensors, "dlse")?, output.lse.shape())?)
        } else {
            None
        };
        let AttentionOutput { o, lse } = output;
        let given = BackwardInputs { inputs: inputs.inputs(), o, lse, grad_o: &grad_o, grad_lse: grad_lse.as_ref() };
        gradients_over_nans(runner.engine, &given, options)
    }

    /// A row that sees no key is exactly 0 in o: no tolerance is for that. Those rows are known by their lse.
    fn check_empty_rows(&self, tensors: &Tensors<'_>, o: &[f32], comparison: &mut Comparison) -> Result<()> {
        if !self.outputs.contains_key("lse") {
            return Ok(());
        }
        let CaseDims { hq, sq, dv, .. } = self.dims;
        let lse = expected("lse", &tensors.get("lse")?)?;
        let empty = lse.iter().enumerate().filter(|&(_, &lse)| lse == f64::NEG_INFINITY);
        let row = |n: usize| if self.packed() { n % sq * hq + n / sq } else { n };
        let wrong = empty.flat_map(|(n, _)| &o[row(n) * dv..][..dv]).filter(|&&x| x != 0.0).count();
        comparison.mismatches = comparison.mismatches.max(wrong);
        Ok(())
    }
}

/// A tensor on the device, in the type that the case runs in.
fn upload_stored(runner: &Runner<'_>, tensors: &Tensors<'_>, name: &str) -> Result<Tensor> {
    let dtype = runner.args.dtype.stored();
    let stored = stored_exactly(&numbers(tensors, name)?, dtype).with_context(|| {
        format!("{name} has numbers that {dtype} doesn't hold, which the manifest lists in inputs_exact_in")
    })?;
    Ok(stored.upload(runner.engine, tensors.get(name)?.shape())?)
}

fn numbers(tensors: &Tensors<'_>, name: &str) -> Result<Vec<f32>> {
    Ok(Numbers::of(name, &tensors.get(name)?)?.into_f32())
}
