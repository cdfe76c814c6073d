//! Cases of the format `attention-golden/1`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use tilewise::{Align, Attention, Dims, Problem};

use super::{Compared, Described, Runner, check_shape, check_tensors, compare_no_nan, refuse};
use crate::tensors::{Numbers, Tensors, expected};
use crate::verify::{Dtype, Outputs, VerifyArgs};

#[derive(Debug, Deserialize)]
struct Entry {
    file: String,
    layout: String,
    dims: CaseDims,
    attrs: Attrs,
    inputs: BTreeMap<String, Described>,
    outputs: BTreeMap<String, Described>,
    compare: Vec<String>,
    tol: BTreeMap<String, BTreeMap<String, f64>>,
}

#[derive(Debug, Deserialize)]
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
    check_tensors(&tensors, entry.inputs.iter().chain(&entry.outputs))?;
    refuse(&entry.needs(runner.args)?)?;

    let problem = entry.problem(&tensors)?;
    let mut wanted = Vec::new();
    for name in entry.compared(runner.args) {
        let dtype = runner.args.dtype.name();
        let tolerance = entry.tol.get(dtype).and_then(|tolerances| tolerances.get(name));
        let tolerance = *tolerance.with_context(|| format!("the manifest has no tol of {name} for {dtype}"))?;
        wanted.push((name, expected(name, &tensors.get(name)?)?, tolerance));
    }
    let upload = |name: &str| -> Result<_> {
        let view = tensors.get(name)?;
        Ok(Numbers::of(name, &view)?.upload(runner.engine, view.shape())?)
    };
    let [o, lse] = runner.attention(&problem, &[upload("q")?, upload("k")?, upload("v")?])?;
    let compare = |(name, expected, tolerance): (&str, Vec<f64>, f64)| -> Result<_> {
        let got = if name == "lse" { lse.read()? } else { o.read()? };
        Ok((name.to_string(), compare_no_nan(&got, &expected, tolerance)))
    };
    wanted.into_iter().map(compare).collect()
}

impl Entry {
    /// The outputs to compare, of those asked for.
    fn compared(&self, args: &VerifyArgs) -> Vec<&str> {
        let forward = |name: &&str| args.outputs == Outputs::All || matches!(*name, "o" | "lse");
        self.compare.iter().map(String::as_str).filter(forward).collect()
    }

    /// What the case needs that isn't built.
    fn needs(&self, args: &VerifyArgs) -> Result<Vec<String>> {
        let mut needs = Vec::new();
        match self.layout.as_str() {
            "bhsd" => {}
            "thd" => needs.push("packed layout thd".to_string()),
            other => bail!("layout {other:?}; accepted: \"bhsd\", \"thd\""),
        }
        if args.dtype != Dtype::F32 {
            needs.push(format!("storage in {}", args.dtype.name()));
        }
        for name in self.inputs.keys() {
            match name.as_str() {
                // do and dlse matter to gradients only, which are seen by the outputs.
                "q" | "k" | "v" | "do" | "dlse" => {}
                // Part of the packed layout.
                "cu_seqlens_q" | "cu_seqlens_k" if self.layout == "thd" => {}
                other => needs.push(other.to_string()),
            }
        }
        let attrs = &self.attrs;
        let (left, right) = (attrs.window_left.unwrap_or(-1), attrs.window_right.unwrap_or(-1));
        if left >= 0 || right >= 0 {
            needs.push(format!("window ({left}, {right})"));
        }
        if let Some(softcap) = attrs.softcap.filter(|&softcap| softcap != 0.0) {
            ensure!(softcap > 0.0, "softcap {softcap}; accepted: 0 or more");
            needs.push(format!("softcap {softcap}"));
        }
        let off = |value: &Value| value.is_null() || value == false || value.as_f64() == Some(0.0);
        needs.extend(
            attrs.others.iter().filter(|(_, value)| !off(value)).map(|(name, value)| format!("{name} {value}")),
        );
        ensure!(!self.compare.is_empty(), "the manifest names no output to compare");
        let mut compared = self.compared(args);
        if compared.is_empty() {
            // Of the outputs asked for it has none: it is about the others.
            compared = self.compare.iter().map(String::as_str).collect();
        }
        compared.retain(|name| !matches!(*name, "o" | "lse"));
        if !compared.is_empty() {
            needs.push(format!("gradients ({})", compared.join(" ")));
        }
        Ok(needs)
    }

    fn problem(&self, tensors: &Tensors<'_>) -> Result<Problem> {
        let CaseDims { b, hq, hkv, sq, skv, d, dv } = self.dims;
        check_shape(tensors, "q", &[b, hq, sq, d])?;
        check_shape(tensors, "k", &[b, hkv, skv, d])?;
        check_shape(tensors, "v", &[b, hkv, skv, dv])?;
        for (name, shape) in [("o", &[b, hq, sq, dv][..]), ("lse", &[b, hq, sq])] {
            if self.compare.iter().any(|compared| compared == name) {
                check_shape(tensors, name, shape)?;
            }
        }
        let attrs = &self.attrs;
        let align = match attrs.align.as_deref() {
            None | Some("bottom_right") => Align::BottomRight,
            Some("top_left") => Align::TopLeft,
            Some(other) => bail!("align {other:?}; accepted: \"bottom_right\", \"top_left\""),
        };
        let options = if attrs.causal { Attention::causal() } else { Attention::full() };
        let options = options.align(align);
        let options = match attrs.scale {
            #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
            Some(scale) => options.softmax_scale(scale as f32),
            None => options,
        };
        let dims = Dims { batch: b, q_heads: hq, kv_heads: hkv, q_len: sq, kv_len: skv, head_dim: d, value_dim: dv };
        Ok(Problem::new(dims, options)?)
    }
}
