//! `verify --cases` on folders made here: numbers worked by hand, and what may be wrong with a folder.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use super::cases::{report, verified};
use super::support::{gpu, program, ran};

/// A case: its entry in the manifest, but for the tensors, and the tensors of its file.
struct Made {
    entry: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<f64>)>,
    /// Tensors that the manifest says nothing of.
    hidden: Vec<String>,
}

impl Made {
    fn set(&mut self, name: &str, dtype: Dtype, shape: &[usize], numbers: &[f64]) {
        self.tensors.insert(name.to_string(), (dtype, shape.to_vec(), numbers.to_vec()));
    }

    /// The entry with its tensors described.
    fn described(&self, file: &str, outputs: &[&str]) -> Value {
        let (mut inputs, mut results) = (Map::new(), Map::new());
        for (name, (dtype, shape, _)) in &self.tensors {
            if self.hidden.contains(name) {
                continue;
            }
            let kind = if outputs.contains(&name.as_str()) { &mut results } else { &mut inputs };
            kind.insert(name.clone(), json!({"dtype": format!("{dtype:?}").to_lowercase(), "shape": shape}));
        }
        let mut entry = self.entry.clone();
        entry["file"] = json!(file);
        (entry["inputs"], entry["outputs"]) = (inputs.into(), results.into());
        entry
    }

    fn file(&self) -> Vec<u8> {
        let bytes = self.tensors.iter().map(|(name, (dtype, shape, numbers))| {
            (name, *dtype, shape, numbers.iter().flat_map(|&x| encoded(x, *dtype)).collect::<Vec<_>>())
        });
        let bytes: Vec<_> = bytes.collect();
        let views = bytes.iter().map(|(name, dtype, shape, bytes)| {
            (name.as_str(), TensorView::new(*dtype, shape.to_vec(), bytes).expect("sizes that fit"))
        });
        safetensors::serialize(views, None).expect("a file")
    }
}

fn encoded(x: f64, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => (x as f32).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::I32 => (x as i32).to_le_bytes().to_vec(),
        Dtype::I64 => (x as i64).to_le_bytes().to_vec(),
        Dtype::BOOL => vec![u8::from(x != 0.0)],
        other => panic!("{other:?}"),
    }
}

/// Writes the cases and runs them with more arguments: the cases of the report.
fn run(format: &str, outputs: &[&str], cases: &[Made], more: &[&str]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let entries = cases.iter().enumerate().map(|(index, case)| {
        let file = format!("{index}.safetensors");
        std::fs::write(folder.path().join(&file), case.file()).unwrap();
        let mut entry = case.described(&file, outputs);
        entry["name"] = json!(file);
        entry
    });
    let manifest = json!({"format": format, "cases": entries.collect::<Vec<_>>()});
    std::fs::write(folder.path().join("manifest.json"), manifest.to_string()).unwrap();
    let of = |folder: &Path| match more {
        [] => verified(folder),
        more => ran(program().args(["verify", "--outputs", "forward", "--json", "--cases"]).arg(folder).args(more)),
    };
    report(&of(folder.path()))["cases"].as_array().unwrap().clone()
}

fn run_golden(cases: &[Made], more: &[&str]) -> Vec<Value> {
    run("attention-golden/1", &["o", "lse", "dq", "p"], cases, more)
}

fn run_onnx(cases: &[Made]) -> Vec<Value> {
    run("onnx-attention-cases/1", &["y", "present_key", "present_value", "p"], cases, &[])
}

/// Each case ends so, and its message tells of this.
fn assert_ends(cases: &[Value], status: &str, messages: &[&str]) {
    assert_eq!(cases.len(), messages.len());
    for (case, message) in cases.iter().zip(messages) {
        assert_eq!(case["status"], status, "{case}");
        assert!(case["message"].as_str().unwrap_or_default().contains(message), "not {message}: {case}");
    }
}

/// q = 0, so that o is the mean of the visible v and lse the logarithm of their count: 2 queries, causal, v = 1..5 by "causal, q_len <
/// kv_len" of the definition's numbers.
fn golden(change: impl FnOnce(&mut Made)) -> Made {
    let tolerances = json!({"o": 1e-5, "lse": 1e-5});
    let mut made = Made {
        entry: json!({
            "layout": "bhsd",
            "dims": {"b": 1, "hq": 1, "hkv": 1, "sq": 2, "skv": 5, "d": 2, "dv": 1},
            "attrs": {"causal": true, "align": "bottom_right", "window_left": -1, "window_right": -1, "softcap": 0.0},
            "compare": ["o", "lse"],
            "inputs_exact_in": ["f32", "f16", "bf16"],
            "tol": {"f32": tolerances, "f16": {"o": 2e-3, "lse": 1e-5}, "bf16": {"o": 2e-2, "lse": 1e-5}},
        }),
        tensors: BTreeMap::new(),
        hidden: Vec::new(),
    };
    made.set("q", Dtype::F32, &[1, 1, 2, 2], &[0.0; 4]);
    made.set("k", Dtype::F32, &[1, 1, 5, 2], &[0.5; 10]);
    made.set("v", Dtype::F32, &[1, 1, 5, 1], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    made.set("o", Dtype::F32, &[1, 1, 2, 1], &[2.5, 3.0]);
    made.set("lse", Dtype::F32, &[1, 1, 2], &[4_f64.ln(), 5_f64.ln()]);
    change(&mut made);
    made
}

/// The same packed: two sequences of one query each, of 2 and of 3 keys.
fn packed(change: impl FnOnce(&mut Made)) -> Made {
    golden(|case| {
        case.entry["layout"] = json!("thd");
        case.entry["dims"]["b"] = json!(2);
        case.set("q", Dtype::F32, &[2, 1, 2], &[0.0; 4]);
        case.set("k", Dtype::F32, &[5, 1, 2], &[0.5; 10]);
        case.set("v", Dtype::F32, &[5, 1, 1], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        case.set("o", Dtype::F32, &[2, 1, 1], &[1.5, 4.0]);
        case.set("lse", Dtype::F32, &[1, 2], &[2_f64.ln(), 3_f64.ln()]);
        case.set("cu_seqlens_q", Dtype::I32, &[3], &[0.0, 1.0, 2.0]);
        case.set("cu_seqlens_k", Dtype::I64, &[3], &[0.0, 2.0, 5.0]);
        change(case);
    })
}

/// The case without a causal mask, and with what comes out then.
fn full(case: &mut Made, o: [f64; 2], lse: [f64; 2]) {
    case.entry["attrs"]["causal"] = json!(false);
    case.set("o", Dtype::F32, &[1, 1, 2, 1], &o);
    case.set("lse", Dtype::F32, &[1, 1, 2], &lse);
}

#[test]
fn golden_numbers_worked_by_hand() {
    if !gpu() {
        return;
    }
    let far = 1_u64 << 40;
    let cases = [
        golden(|_| {}),
        packed(|_| {}),
        // A window that no length comes near.
        golden(|case| {
            (case.entry["attrs"]["window_left"], case.entry["attrs"]["window_right"]) = (json!(far), json!(far))
        }),
        // A mask of one axis: the keys.
        golden(|case| {
            case.set("mask", Dtype::BOOL, &[5], &[0.0, 1.0, 0.0, 0.0, 1.0]);
            full(case, [3.5, 3.5], [2_f64.ln(); 2]);
        }),
        // Rows in use: the second query is padding, the first the last in use.
        golden(|case| {
            case.set("q_lens", Dtype::I32, &[1], &[1.0]);
            case.set("kv_lens", Dtype::I64, &[1], &[3.0]);
            case.set("o", Dtype::F32, &[1, 1, 2, 1], &[2.0, 0.0]);
            case.set("lse", Dtype::F32, &[1, 1, 2], &[3_f64.ln(), f64::NEG_INFINITY]);
        }),
        // A bias that no short type holds, so it stays in f32: in bf16 lse would be off by 5e-5.
        golden(|case| {
            let hidden = f64::NEG_INFINITY;
            case.set("bias", Dtype::F32, &[1, 5], &[0.0, 0.1, hidden, hidden, hidden]);
            let sum = 1.0 + 0.1_f64.exp();
            full(case, [2.0 - 1.0 / sum; 2], [sum.ln(); 2]);
        }),
        // Sinks, and slopes of 0, of a packed batch.
        packed(|case| {
            case.set("sinks", Dtype::F32, &[1], &[2_f64.ln()]);
            case.set("alibi_slopes", Dtype::F32, &[2, 1], &[0.0, 0.0]);
            case.set("o", Dtype::F32, &[2, 1, 1], &[3.0 / 4.0, 12.0 / 5.0]);
            case.set("lse", Dtype::F32, &[1, 2], &[4_f64.ln(), 5_f64.ln()]);
        }),
        // Only lse; and an attribute that is off.
        golden(|case| {
            case.entry["compare"] = json!(["lse"]);
            case.entry["attrs"]["dropout"] = json!(0.0);
        }),
    ];
    for dtype in ["f32", "f16", "bf16"] {
        let report = run_golden(&cases, &["--dtype", dtype]);
        assert_eq!(report.len(), cases.len());
        assert!(report.iter().all(|case| case["status"] == "pass"), "{dtype}: {report:?}");
    }
}

#[test]
fn golden_wrong_numbers_fail() {
    if !gpu() {
        return;
    }
    let cases = [
        golden(|case| case.set("o", Dtype::F32, &[1, 1, 2, 1], &[2.5, 3.001])),
        golden(|case| case.set("lse", Dtype::F32, &[1, 1, 2], &[4_f64.ln(), f64::NEG_INFINITY])),
        golden(|case| case.set("o", Dtype::F32, &[1, 1, 2, 1], &[f64::NAN, 3.0])),
        // A row without keys is 0, whatever the tolerance. This one's lse says so, wrongly.
        golden(|case| {
            case.entry["compare"] = json!(["o"]);
            case.entry["tol"]["f32"]["o"] = json!(100.0);
            case.set("lse", Dtype::F32, &[1, 1, 2], &[f64::NEG_INFINITY, 5_f64.ln()]);
        }),
        packed(|case| case.set("cu_seqlens_k", Dtype::I32, &[3], &[0.0, 3.0, 5.0])),
        packed(|case| case.set("o", Dtype::F32, &[2, 1, 1], &[1.5, 4.5])),
    ];
    assert_ends(&run_golden(&cases, &[]), "fail", &["o: ", "lse: ", "o: ", "o: ", "lse: ", "o: "]);
}

#[test]
fn golden_what_is_not_known_is_refused_by_name() {
    if !gpu() {
        return;
    }
    let cases = [
        golden(|case| case.entry["attrs"]["temperature"] = json!(2.0)),
        golden(|case| case.set("page_table", Dtype::I32, &[1], &[0.0])),
        golden(|case| {
            case.set("mask", Dtype::BOOL, &[1, 1, 2, 5], &[1.0; 10]);
            case.hidden.push("mask".to_string());
        }),
        golden(|case| case.set("cu_seqlens_q", Dtype::I32, &[2], &[0.0, 2.0])),
        packed(|case| case.set("mask", Dtype::BOOL, &[1, 1, 2, 5], &[1.0; 10])),
        golden(|case| {
            case.set("p", Dtype::F32, &[1], &[0.0]);
            case.entry["compare"] = json!(["o", "p"]);
        }),
        golden(|case| {
            case.set("dq", Dtype::F32, &[1, 1, 2, 2], &[0.0; 4]);
            case.entry["compare"] = json!(["dq"]);
        }),
    ];
    let names = ["temperature", "page_table", "mask", "cu_seqlens_q", "mask", "output p", "gradients without do"];
    assert_ends(&run_golden(&cases, &[]), "refused", &names);
}

#[test]
fn golden_malformed_cases_are_errors_that_say_what_is_accepted() {
    if !gpu() {
        return;
    }
    let with = |name: &'static str, dtype: Dtype, shape: &'static [usize], numbers: &'static [f64]| {
        golden(move |case| case.set(name, dtype, shape, numbers))
    };
    let bounds = |name: &'static str, numbers: [f64; 3]| packed(move |case| case.set(name, Dtype::I32, &[3], &numbers));
    let attr = |name: &'static str, value: Value| golden(move |case| case.entry["attrs"][name] = value);
    let cases = [
        (with("q", Dtype::F32, &[1, 2, 1, 2], &[0.0; 4]), "q is [1, 2, 1, 2]; accepted: [1, 1, 2, 2]"),
        (with("v", Dtype::F32, &[1, 1, 4, 1], &[0.0; 4]), "v is [1, 1, 4, 1]; accepted: [1, 1, 5, 1]"),
        (with("o", Dtype::F32, &[2], &[0.0; 2]), "o is [2]; accepted: [1, 1, 2, 1]"),
        (with("k", Dtype::I32, &[1, 1, 5, 2], &[0.0; 10]), "k is I32; accepted: F32"),
        (with("mask", Dtype::BOOL, &[1, 1, 5, 2], &[1.0; 10]), "mask of shape [1, 1, 5, 2]; accepted:"),
        (with("mask", Dtype::F32, &[1, 1, 2, 5], &[1.0; 10]), "mask is F32; accepted: BOOL"),
        (with("mask", Dtype::BOOL, &[1, 1, 1, 1, 5], &[1.0; 5]), "accepted: up to four axes"),
        (with("bias", Dtype::F32, &[1, 1, 2, 4], &[1.0; 8]), "bias of shape [1, 1, 2, 4]; accepted:"),
        (with("sinks", Dtype::F32, &[2], &[0.0; 2]), "sinks is [2]; accepted: [1]"),
        (with("alibi_slopes", Dtype::F32, &[2], &[0.0; 2]), "alibi_slopes is [2]; accepted: [1], [1, 1]"),
        (with("alibi_slopes", Dtype::F32, &[1], &[f64::NAN]), "slope of NaN"),
        (with("kv_lens", Dtype::I32, &[1], &[6.0]), "kv_lens[0] = 6; accepted: up to 5"),
        (with("kv_lens", Dtype::I32, &[1], &[-1.0]), "kv_lens[0] = -1; accepted: 0 to"),
        (with("kv_lens", Dtype::F32, &[1], &[3.0]), "kv_lens is F32; accepted: I32"),
        (with("q_lens", Dtype::I32, &[2], &[1.0, 1.0]), "q_lens is [2]; accepted: [1]"),
        (bounds("cu_seqlens_k", [0.0, 5.0, 2.0]), "cu_seqlens_kv = [0, 5, 2]; accepted:"),
        (bounds("cu_seqlens_q", [0.0, 1.0, 3.0]), "cu_seqlens_q = [0, 1, 3]; accepted:"),
        (bounds("cu_seqlens_q", [0.0, -1.0, 2.0]), "cu_seqlens_q[1] = -1; accepted:"),
        (packed(|case| _ = case.tensors.remove("cu_seqlens_k")), "no tensor cu_seqlens_k"),
        (packed(|case| case.entry["dims"]["b"] = json!(3)), "cu_seqlens_q is [3]; accepted: [4]"),
        (packed(|case| case.entry["dims"]["b"] = json!(u64::MAX)), "cu_seqlens_q is [3]; accepted: "),
        (attr("softcap", json!(-1.0)), "softcap -1; accepted: 0 or more"),
        (attr("softcap", json!(1e300)), "softcap = inf; accepted: a finite number"),
        (attr("align", json!("middle")), "align \"middle\"; accepted: \"bottom_right\", \"top_left\""),
        (attr("window_left", json!("wide")), "invalid type: string \"wide\""),
        (golden(|case| case.entry["compare"] = json!([])), "no output to compare"),
    ];
    let (cases, messages): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    assert_ends(&run_golden(&cases, &[]), "error", &messages);
    // That the type holds the inputs is the manifest's word.
    let inexact = [golden(|case| case.set("k", Dtype::F32, &[1, 1, 5, 2], &[0.1; 10]))];
    assert_ends(&run_golden(&inexact, &["--dtype", "f16"]), "error", &["k has numbers that f16 doesn't hold"]);
}

/// A node with a past of 2 keys and 3 new ones for 2 queries; q = 0. Its first query is behind the past, so that causal ones see 3 and 4
/// keys, not 4 and 5.
fn onnx(change: impl FnOnce(&mut Made)) -> Made {
    let mut made = Made {
        entry: json!({
            "op": "Attention",
            "dtype": "f32",
            "layout": "4d_b_h_s_d",
            "attrs": {"is_causal": 1, "softcap": 0.0, "left_window_size": -1, "scale": null},
        }),
        tensors: BTreeMap::new(),
        hidden: Vec::new(),
    };
    made.set("q", Dtype::F32, &[1, 1, 2, 2], &[0.0; 4]);
    made.set("k", Dtype::F32, &[1, 1, 3, 2], &[0.5; 6]);
    made.set("v", Dtype::F32, &[1, 1, 3, 1], &[3.0, 4.0, 5.0]);
    made.set("past_key", Dtype::F32, &[1, 1, 2, 2], &[0.25; 4]);
    made.set("past_value", Dtype::F32, &[1, 1, 2, 1], &[1.0, 2.0]);
    made.set("y", Dtype::F32, &[1, 1, 2, 1], &[2.0, 2.5]);
    made.set("present_value", Dtype::F32, &[1, 1, 5, 1], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    change(&mut made);
    made
}

/// The node without a past, and with what comes out of it then: causal, the first query at the first key.
fn without_past(case: &mut Made, y: [f64; 2]) {
    for name in ["past_key", "past_value", "present_value"] {
        case.tensors.remove(name);
    }
    case.set("y", Dtype::F32, &[1, 1, 2, 1], &y);
}

#[test]
fn onnx_numbers_worked_by_hand() {
    if !gpu() {
        return;
    }
    let cases = [
        onnx(|_| {}),
        // The window reaches back into the past: 2..=3 and 3..=4, without the causal mask.
        onnx(|case| {
            case.entry["attrs"] = json!({"left_window_size": 0, "right_window_size": 1});
            case.set("y", Dtype::F32, &[1, 1, 2, 1], &[3.5, 4.5]);
        }),
        onnx(|case| {
            case.entry["attrs"]["left_window_size"] = json!(1);
            case.set("y", Dtype::F32, &[1, 1, 2, 1], &[2.5, 3.5]);
        }),
        onnx(|case| without_past(case, [3.0, 3.5])),
        onnx(|case| {
            without_past(case, [0.0, 3.0]);
            case.set("nonpad_kv_seqlen", Dtype::I64, &[1], &[1.0]);
        }),
        // What lies behind the mask's end is hidden: of one key too, which isn't broadcast.
        onnx(|case| {
            case.set("attn_mask", Dtype::BOOL, &[3], &[0.0, 1.0, 1.0]);
            case.set("y", Dtype::F32, &[1, 1, 2, 1], &[2.5, 2.5]);
        }),
        onnx(|case| {
            case.set("attn_mask", Dtype::F16, &[2, 1], &[0.0, f64::NEG_INFINITY]);
            case.set("y", Dtype::F32, &[1, 1, 2, 1], &[1.0, 0.0]);
        }),
        onnx(|case| {
            case.entry["op"] = json!("FlexAttention");
            case.entry["attrs"] = json!({"score_mod": {"kind": "add_q_minus_k"}});
            let sum = 1.0 + (-1_f64).exp() + (-2_f64).exp();
            let y = (3.0 + 4.0 * (-1_f64).exp() + 5.0 * (-2_f64).exp()) / sum;
            without_past(case, [y, y]);
        }),
    ];
    let report = run_onnx(&cases);
    assert_eq!(report.len(), cases.len());
    assert!(report.iter().all(|case| case["status"] == "pass"), "{report:?}");
    assert!(report[0]["errors"]["present_value"] == 0.0, "{report:?}");
}

#[test]
fn onnx_wrong_numbers_fail() {
    if !gpu() {
        return;
    }
    let cases = [
        onnx(|case| case.set("y", Dtype::F32, &[1, 1, 2, 1], &[2.0, 2.5001])),
        // By the bottom-right corner, which isn't where ONNX puts the queries.
        onnx(|case| case.set("y", Dtype::F32, &[1, 1, 2, 1], &[2.5, 3.0])),
        onnx(|case| case.set("present_value", Dtype::F32, &[1, 1, 5, 1], &[1.0, 2.0, 3.0, 4.0, 5.000_001])),
    ];
    assert_ends(&run_onnx(&cases), "fail", &["y: ", "y: ", "present_value: "]);
}

#[test]
fn onnx_what_is_not_known_is_refused_by_name() {
    if !gpu() {
        return;
    }
    let attr = |name: &'static str, value: Value| onnx(move |case| case.entry["attrs"][name] = value);
    let cases = [
        (attr("temperature", json!(2.0)), "temperature"),
        (attr("score_mod", json!({"kind": "reverse"})), "score_mod"),
        (attr("softmax_precision", json!("f64")), "softmax_precision"),
        (onnx(|case| case.entry["op"] = json!("Gelu")), "operator Gelu isn't attention"),
        (onnx(|case| case.entry["layout"] = Value::Null), "layout null"),
        (onnx(|case| case.entry["dtype"] = json!("f64")), "storage in f64"),
        (onnx(|case| case.set("head_sink", Dtype::F32, &[1], &[0.0])), "head_sink"),
        (onnx(|case| case.set("p", Dtype::F32, &[1], &[0.0])), "output p"),
        (onnx(|case| case.hidden.push("past_key".to_string())), "past_key"),
    ];
    let (cases, messages): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    assert_ends(&run_onnx(&cases), "refused", &messages);
}

#[test]
fn onnx_malformed_cases_are_errors() {
    if !gpu() {
        return;
    }
    let with = |name: &'static str, dtype: Dtype, shape: &'static [usize], numbers: &'static [f64]| {
        onnx(move |case| case.set(name, dtype, shape, numbers))
    };
    let attr = |name: &'static str, value: Value| onnx(move |case| case.entry["attrs"][name] = value);
    let cases = [
        (with("k", Dtype::F32, &[1, 1, 2, 2], &[0.0; 4]), "don't fit together"),
        (with("q", Dtype::F32, &[1, 2, 2], &[0.0; 4]), "q is [1, 2, 2]"),
        (with("q", Dtype::F16, &[1, 1, 2, 2], &[0.0; 4]), "q is f16; accepted: f32"),
        (with("y", Dtype::F32, &[1, 2, 1], &[0.0; 2]), "y is [1, 2, 1]; accepted: [1, 1, 2, 1]"),
        (with("past_key", Dtype::F32, &[1, 1, 1, 2], &[0.0; 2]), "past_value is [1, 1, 2, 1]; accepted: [1, 1, 1, 1]"),
        (with("past_key", Dtype::F16, &[1, 1, 2, 2], &[0.0; 4]), "past_key is f16; accepted: f32"),
        (with("past_key", Dtype::F32, &[4], &[0.0; 4]), "past_key is [4]"),
        (onnx(|case| _ = case.tensors.remove("past_value")), "past_key and past_value"),
        (with("present_value", Dtype::F32, &[1, 1, 3, 1], &[3.0, 4.0, 5.0]), "present_value is [1, 1, 3, 1]"),
        (with("nonpad_kv_seqlen", Dtype::I64, &[1], &[3.0]), "beside a past"),
        (with("attn_mask", Dtype::BOOL, &[6], &[1.0; 6]), "attn_mask is [6]; accepted:"),
        (with("attn_mask", Dtype::BOOL, &[3, 5], &[1.0; 15]), "attn_mask is [3, 5]; accepted:"),
        (with("attn_mask", Dtype::I64, &[2, 5], &[1.0; 10]), "attn_mask is I64; accepted: BOOL"),
        (attr("left_window_size", json!(-2)), "left_window_size -2; accepted: -1 or more"),
        (attr("is_causal", json!("yes")), "is_causal \"yes\"; accepted: an integer"),
        (attr("softcap", json!(-1.0)), "accepted: 0 or more"),
        (attr("score_mod", json!({"kind": "add_const"})), "without a value"),
        (
            onnx(|case| {
                without_past(case, [3.0, 3.5]);
                case.set("nonpad_kv_seqlen", Dtype::I64, &[1], &[4.0]);
            }),
            "kv_lens[0] = 4; accepted: up to 3",
        ),
        (
            onnx(|case| {
                without_past(case, [3.0, 3.5]);
                case.set("nonpad_kv_seqlen", Dtype::I64, &[1], &[-1.0]);
            }),
            "nonpad_kv_seqlen[0] = -1; accepted: 0 to",
        ),
        // Sizes whose products can't be counted, of tensors without elements.
        (with("past_key", Dtype::F32, &[1, 1, 1 << 62, 0], &[]), "accepted"),
        (with("q", Dtype::F32, &[1 << 62, 1, 2, 0], &[]), "fit together"),
    ];
    let (cases, messages): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    assert_ends(&run_onnx(&cases), "error", &messages);
}
