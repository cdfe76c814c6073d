//! `tilewise run` on real and small files.

use serde_json::Value;

use super::support::{data, gpu, numbers, program, ran, safetensors_of, tensor, text, tilewise};

/// The file of real activations: its header says (batch, heads, seq, dim), its q, k, v and o lie in (batch, seq, heads, dim).
const REAL: &str = "qkv/smollm2_ecclesiastes_layer15.safetensors";

fn run_json(file: &str, args: &[&str]) -> Value {
    let ran = ran(program().args(["run", file, "--json"]).args(args));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.json()
}

fn error(json: &Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or_else(|| panic!("no {key} in {json}"))
}

#[test]
fn real_activations() {
    if !gpu() {
        return;
    }
    let file = data(REAL);
    let json = run_json(text(&file), &["--causal"]);
    assert!(error(&json, "max_abs_err") <= 2e-5 && error(&json, "max_abs_err_lse") <= 2e-5, "{json}");
    assert!(json["adapter"].is_string() && json["seconds"].as_f64().unwrap() > 0.0, "{json}");
    assert!(json["kernel"].as_str().unwrap().starts_with("flash_fwd"), "{json}");
    assert_eq!((&json["layout"], json["layout_note"].is_string()), (&Value::from("bshd"), true));
    assert_eq!(json["scale"], 0.125);
    let bytes = |key: &str| json["tiled_bytes"][key].as_u64().unwrap();
    assert_eq!(bytes("inputs"), 2 * 1024 * 64 * (9 + 3 + 3), "stored as in the file, f16");
    assert_eq!(bytes("outputs"), 4 * 1024 * 9 * (64 + 1));
    assert!(bytes("workspace") < 1 << 20);
    assert!(bytes("peak") >= bytes("inputs") + bytes("outputs") + bytes("workspace"));
    assert!(bytes("peak") < bytes("inputs") + bytes("outputs") + bytes("workspace") + 4096, "both layouts counted");
}

#[test]
fn the_layout_asked_for_is_kept() {
    if !gpu() {
        return;
    }
    let file = data(REAL);
    let json = run_json(text(&file), &["--causal", "--layout", "bshd"]);
    assert!(error(&json, "max_abs_err") <= 2e-5, "{json}");
    assert!(json["layout_note"].is_null());
    let json = run_json(text(&file), &["--causal", "--layout", "bhsd"]);
    assert!(error(&json, "max_abs_err") > 1e-2, "{json}");
    assert_eq!(json["layout"], "bhsd");
    // A wrong mask is no reason to try another order: neither reproduces o.
    let ran = tilewise(["run", text(&file), "--json"]);
    assert_eq!(ran.json()["layout"], "bhsd");
    assert!(ran.stderr.contains("mask: causal") && ran.stderr.contains("--causal applies it"), "{ran:?}");
}

#[test]
fn naive_agrees() {
    if !gpu() {
        return;
    }
    let file = data(REAL);
    let json = run_json(text(&file), &["--causal", "--path", "naive", "--layout", "bshd"]);
    assert!(error(&json, "max_abs_err") <= 2e-5, "{json}");
    assert!(json["tiled_bytes"].is_null());
    assert_eq!(json["naive_bytes"]["workspace"], 4 * 9 * 1024 * 1024);
}

#[test]
fn a_file_in_the_order_of_its_header() {
    if !gpu() {
        return;
    }
    let file = data("golden/cases/gqa_d96_s65.safetensors");
    let json = run_json(text(&file), &[]);
    assert!(error(&json, "max_abs_err") <= 1e-5, "{json}");
    assert_eq!(json["layout"], "bhsd");
    assert!(json["layout_note"].is_null());
}

#[test]
fn out_holds_o_and_lse() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    // q = 0: every weight is equal, so o is the mean of the visible v; three axes are batch 1.
    let q = ("q", vec![1, 2, 4], vec![0.0; 8]);
    let v = ("v", vec![1, 5, 1], vec![1.0, 2.0, 3.0, 4.0, 5.0]);
    std::fs::write(&input, safetensors_of(&[q, numbers("k", &[1, 5, 4]), v])).unwrap();
    for (args, expected) in
        [(&["--causal"][..], [2.5, 3.0]), (&["--causal", "--align", "top-left"], [1.0, 1.5]), (&[], [3.0; 2])]
    {
        let json = run_json(text(&input), &[args, &["--out", text(&out)]].concat());
        assert!(json["max_abs_err"].is_null(), "there is no o in the file");
        let file = std::fs::read(&out).unwrap();
        let (shape, o) = tensor(&file, "o");
        assert_eq!(shape, [1, 1, 2, 1]);
        assert!(o.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-6), "{o:?}");
        assert_eq!(tensor(&file, "lse").0, [1, 1, 2]);
    }
    // Nothing else is left in the folder.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn zero_lengths() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let tensors = [numbers("q", &[1, 2, 3, 8]), numbers("k", &[1, 2, 0, 8]), numbers("v", &[1, 2, 0, 4])];
    std::fs::write(&input, safetensors_of(&tensors)).unwrap();
    let ran = tilewise(["run", text(&input), "--out", text(&out)]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let file = std::fs::read(&out).unwrap();
    assert_eq!(tensor(&file, "o"), (vec![1, 2, 3, 4], vec![0.0; 24]));
    assert_eq!(tensor(&file, "lse"), (vec![1, 2, 3], vec![f32::NEG_INFINITY; 6]));
}
