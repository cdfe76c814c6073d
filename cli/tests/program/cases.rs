//! `tilewise verify --cases`: the repository's own folders, and made-up bad ones.

use std::path::Path;

use serde_json::{Value, json};

use super::support::{Ran, data, gpu, program, ran, text, tilewise};

const KEYS: [&str; 6] = ["adapter", "cases", "passed", "failed", "refused", "errored"];
const CASE_KEYS: [&str; 5] = ["name", "status", "dtype", "errors", "message"];

fn manifest(folder: &str) -> Vec<Value> {
    let bytes = std::fs::read(data(folder).join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&bytes).unwrap();
    manifest["cases"].as_array().unwrap().clone()
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn sorted<const N: usize>(mut names: [&str; N]) -> [&str; N] {
    names.sort_unstable();
    names
}

/// The report, its keys and counts checked.
pub(crate) fn report(ran: &Ran) -> Value {
    let report = ran.json();
    assert_eq!(keys(&report), sorted(KEYS));
    let cases = report["cases"].as_array().unwrap();
    assert!(cases.iter().all(|case| keys(case) == sorted(CASE_KEYS)), "{report}");
    for (count, status) in [("passed", "pass"), ("failed", "fail"), ("refused", "refused"), ("errored", "error")] {
        assert_eq!(report[count], cases.iter().filter(|case| case["status"] == status).count(), "{count}");
    }
    let right = report["failed"] == 0 && report["errored"] == 0;
    assert_eq!(ran.code, Some(i32::from(!right)));
    report
}

/// Runs the golden folder in a type: every case that the type holds passes, gradients too, and no other is listed.
fn golden(dtype: &str) {
    if !gpu() {
        return;
    }
    let folder = data("golden");
    let ran = tilewise(["verify", "--cases", text(&folder), "--dtype", dtype, "--json"]);
    let report = report(&ran);
    let manifest = manifest("golden");
    let exact = |case: &&Value| case["inputs_exact_in"].as_array().unwrap().iter().any(|name| name == dtype);
    let held: Vec<_> = manifest.iter().filter(exact).collect();
    assert!(held.len() > 40, "{}", held.len());
    assert_eq!(report["passed"], held.len(), "{report}");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), held.len());
    for (entry, case) in held.into_iter().zip(cases) {
        assert_eq!(entry["name"], case["name"], "in the manifest's order");
        assert_eq!((&case["dtype"], &case["status"]), (&json!(dtype), &json!("pass")), "{case}");
        assert_eq!(keys(&case["errors"]).len(), entry["compare"].as_array().unwrap().len(), "{case}");
    }
}

#[test]
fn golden_f32() {
    golden("f32");
}

#[test]
fn golden_f16() {
    golden("f16");
}

#[test]
fn golden_bf16() {
    golden("bf16");
}

#[test]
fn golden_forward_alone() {
    if !gpu() {
        return;
    }
    let args = ["--only", "gqa_d32_s65", "--outputs", "forward", "--json"];
    let ran = ran(program().args(["verify", "--cases", text(&data("golden"))]).args(args));
    assert_eq!(keys(&report(&ran)["cases"][0]["errors"]), ["lse", "o"]);
}

/// What an ONNX case needs that isn't there, by its entry in the manifest.
fn missing(entry: &Value) -> Option<&'static str> {
    match entry["op"].as_str().unwrap() {
        "Attention" => entry["outputs"].get("qk_matmul_output").map(|_| "qk_matmul_output"),
        "FlexAttention" if !entry["attrs"]["prob_mod"].is_null() => Some("prob_mod"),
        "FlexAttention" => (entry["dtype"] == "f64").then_some("storage in f64"),
        _ => Some("isn't attention"),
    }
}

#[test]
fn onnx() {
    if !gpu() {
        return;
    }
    let folder = data("onnx_attention");
    let report = report(&tilewise(["verify", "--cases", text(&folder), "--json"]));
    let manifest = manifest("onnx_attention");
    let refused = manifest.iter().filter(|entry| missing(entry).is_some()).count();
    assert!(refused < 35, "{refused}");
    assert_eq!(
        (&report["passed"], &report["refused"]),
        (&json!(manifest.len() - refused), &json!(refused)),
        "{report}"
    );
    for (entry, case) in manifest.iter().zip(report["cases"].as_array().unwrap()) {
        assert_eq!((&entry["name"], &entry["dtype"]), (&case["name"], &case["dtype"]));
        if let Some(missing) = missing(entry) {
            assert_eq!(case["status"], "refused", "{case}");
            assert!(case["message"].as_str().unwrap().contains(missing), "{case}");
        } else {
            assert_eq!(case["status"], "pass", "{case}");
            assert_eq!(keys(&case["errors"]), keys(&entry["outputs"]), "every output is compared");
        }
    }
}

#[test]
fn only_some_and_for_people() {
    if !gpu() {
        return;
    }
    let folder = data("golden");
    let named = |cases: &str, part: &str| {
        let names = manifest(cases).into_iter().filter(|case| case["name"].as_str().unwrap().contains(part));
        names.count()
    };
    let ran = tilewise(["verify", "--cases", text(&folder), "--outputs", "forward", "--only", "bias_1"]);
    assert_eq!(ran.stdout, format!("{} passed, 0 failed, 0 refused, 0 errored\n", named("golden", "bias_1")));
    let onnx = data("onnx_attention");
    let ran = tilewise(["verify", "--cases", text(&onnx), "--only", "rotary"]);
    let lines: Vec<_> = ran.stdout.lines().collect();
    let (summary, cases) = lines.split_last().unwrap();
    let refused = named("onnx_attention", "rotary");
    assert_eq!(*summary, format!("0 passed, 0 failed, {refused} refused, 0 errored"));
    // One line for all of one reason.
    let [line] = cases else { panic!("{ran:?}") };
    assert!(line.starts_with("refused  operator RotaryEmbedding isn't attention: test_rotary_embedding, "), "{ran:?}");
    assert!(line.ends_with(&format!(" and {} more", refused - 3)), "{ran:?}");
    let none = tilewise(["verify", "--cases", text(&folder), "--only", "no such case"]);
    assert_eq!((none.code, none.stdout.as_str()), (Some(1), ""));
}

/// A folder with the given entries and one sound case's file.
fn folder_of(entries: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let manifest = json!({"format": "attention-golden/1", "cases": entries});
    std::fs::write(folder.path().join("manifest.json"), manifest.to_string()).unwrap();
    let file = entry()["file"].as_str().unwrap().to_string();
    std::fs::create_dir(folder.path().join("cases")).unwrap();
    std::fs::copy(data("golden").join(&file), folder.path().join(&file)).unwrap();
    folder
}

/// A plain case's entry.
fn entry() -> Value {
    manifest("golden").into_iter().find(|case| case["name"] == "explicit_scale").unwrap()
}

/// The entry after a change.
fn changed(change: impl FnOnce(&mut Value)) -> Value {
    let mut entry = entry();
    change(&mut entry);
    entry
}

pub(crate) fn verified(folder: &Path) -> Ran {
    ran(program().args(["verify", "--outputs", "forward", "--json", "--cases"]).arg(folder))
}

#[test]
fn a_bad_case_does_not_stop_the_rest() {
    if !gpu() {
        return;
    }
    let bad = [
        changed(|case| case["file"] = json!("cases/nothing.safetensors")),
        changed(|case| case["file"] = json!("../cases/explicit_scale.safetensors")),
        changed(|case| case["file"] = json!("/etc/passwd")),
        changed(|case| case["dims"]["sq"] = json!(1_u64 << 40)),
        changed(|case| case["dims"]["b"] = json!(-1)),
        changed(|case| case["inputs"]["q"]["shape"] = json!([1, 1, 1_u64 << 62, 1_u64 << 62])),
        changed(|case| case["inputs"]["q"]["dtype"] = json!("f16")),
        changed(|case| case["layout"] = json!("sideways")),
        changed(|case| case["attrs"]["align"] = json!("middle")),
        changed(|case| case["attrs"]["scale"] = json!(1e300)),
        changed(|case| case["tol"] = json!({})),
        changed(|case| case["compare"] = json!([])),
        json!("not a case"),
        Value::Null,
        json!({}),
    ];
    let mut entries = bad.to_vec();
    entries.push(entry());
    let folder = folder_of(&json!(entries));
    // A file cut short, for a case of its own.
    let report = report(&verified(folder.path()));
    assert_eq!(report["errored"], bad.len(), "{report}");
    assert_eq!(report["passed"], 1, "{report}");
    let cases = report["cases"].as_array().unwrap();
    assert!(cases[..bad.len()].iter().all(|case| case["message"].as_str().is_some_and(|text| !text.is_empty())));

    let file = folder.path().join(entry()["file"].as_str().unwrap());
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let report = self::report(&verified(folder.path()));
    assert!(report["cases"][bad.len()]["message"].as_str().unwrap().contains("truncated"), "{report}");
}

#[test]
fn wrong_numbers_fail() {
    if !gpu() {
        return;
    }
    let entries = [
        entry(),
        changed(|case| case["attrs"]["scale"] = json!(0.123)),
        changed(|case| case["attrs"]["causal"] = json!(true)),
        changed(|case| case["tol"]["f32"]["lse"] = json!(-1.0)),
    ];
    let report = report(&verified(folder_of(&json!(entries)).path()));
    let statuses: Vec<_> = report["cases"].as_array().unwrap().iter().map(|case| &case["status"]).collect();
    assert_eq!(statuses, ["pass", "fail", "fail", "fail"], "{report}");
    assert!(report["cases"][1]["errors"]["o"].as_f64().unwrap() > 1e-3);
}

#[test]
fn an_unreadable_manifest_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |error: &str| {
        let ran = verified(folder.path());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        assert!(ran.error().contains("manifest.json") && ran.error().contains(error), "{ran:?}");
    };
    refused("");
    let write = |text: &str| std::fs::write(folder.path().join("manifest.json"), text).unwrap();
    write("{");
    refused("EOF");
    write(r#"{"format": "something/9", "cases": []}"#);
    refused("something/9");
    write(r#"{"format": "attention-golden/1"}"#);
    refused("no list of cases");
}
