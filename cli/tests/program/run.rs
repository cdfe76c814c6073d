//! `tilewise run` on real and small files.

use serde_json::Value;

use super::support::{
    Numbers, Stored, data, gpu, numbers, program, ran, safetensors_of, safetensors_of_any, tensor, text, tilewise,
};

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

/// Files of another implementation, the options in flags and in tensors beside q, k and v.
#[test]
fn golden_files_with_options() {
    if !gpu() {
        return;
    }
    for (name, flags, others) in [
        ("window_l7_r5_s65", "--window 7,5", &[][..]),
        ("window_left_only_q33_k65", "--window 10,-1", &[]),
        ("softcap_2_causal_gqa", "--causal --softcap 2", &[]),
        ("bias_neginf", "", &["bias"]),
        ("mask_11qk_full_rows", "", &["mask"]),
        ("alibi_per_batch_topleft", "--align top-left", &["alibi_slopes"]),
        ("sinks_gqa_causal_window", "--causal --window 15,none", &["sinks"]),
        ("decode_kv_lens_nan", "--causal", &["kv_lens"]),
        ("varlen_gqa_causal_q_ne_k", "--causal", &["cu_seqlens_q", "cu_seqlens_k"]),
        ("varlen_window_topleft", "--window 5,9 --align top-left", &["cu_seqlens_q", "cu_seqlens_k"]),
    ] {
        let file = data(&format!("golden/cases/{name}.safetensors"));
        let flags: Vec<_> = flags.split_whitespace().collect();
        let json = run_json(text(&file), &flags);
        assert!(error(&json, "max_abs_err") <= 1e-5 && error(&json, "max_abs_err_lse") <= 1e-5, "{name}: {json}");
        assert_eq!(json["others"], serde_json::json!(others), "{name}");
    }
}

/// Every number of this file is one in all three types: the only rounding is that of o.
#[test]
fn the_type_asked_for_is_that_of_the_output_too() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let file = data("golden/cases/gqa_d96_s65.safetensors");
    for (dtype, stored, roundoff) in [
        ("f32", safetensors::Dtype::F32, 0.0),
        ("f16", safetensors::Dtype::F16, 2.0_f64.powi(-11)),
        ("bf16", safetensors::Dtype::BF16, 2.0_f64.powi(-8)),
    ] {
        let json = run_json(text(&file), &["--dtype", dtype, "--out", text(&out)]);
        let max_abs_err = error(&json, "max_abs_err");
        assert!(max_abs_err <= 1e-5 + 2.0 * roundoff && max_abs_err >= roundoff / 16.0, "{json}");
        assert!(error(&json, "max_abs_err_lse") <= 1e-5, "{json}");
        assert_eq!(json["dtype"], serde_json::json!({ "q": dtype, "k": dtype, "v": dtype, "o": dtype }));
        let bytes = std::fs::read(&out).unwrap();
        let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(written.tensor("o").unwrap().dtype(), stored);
        assert_eq!(written.tensor("lse").unwrap().dtype(), safetensors::Dtype::F32);
    }
    // The order of a file's bytes is found in types of less precision too.
    let json = run_json(text(&data(REAL)), &["--causal", "--dtype", "bf16"]);
    assert_eq!(json["layout"], "bshd", "{json}");
}

/// A computation of q = 0 by hand: o is the mean of the values that a row sees.
fn means(tensors: &[Stored], flags: &[&str], expected: &[f32]) {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    std::fs::write(&input, safetensors_of_any(tensors)).unwrap();
    let json = run_json(text(&input), &[flags, &["--out", text(&out)]].concat());
    let (_, o) = tensor(&std::fs::read(&out).unwrap(), "o");
    let close = o.len() == expected.len() && o.iter().zip(expected).all(|(o, expected)| (o - expected).abs() < 1e-6);
    assert!(close, "{o:?}, expected {expected:?}: {json}");
}

/// Of a dim of 4 for q and k, 1 for v.
fn qkv(q: &[usize], k: &[usize], v: &[f32]) -> [Stored; 3] {
    let wide = |shape: &[usize]| [shape, &[4]].concat();
    let zeros = vec![0.0; wide(q).iter().product()];
    let (_, k_shape, k_numbers) = numbers("k", &wide(k));
    [("q", wide(q), zeros), ("k", k_shape, k_numbers), ("v", [k, &[1]].concat(), v.to_vec())].map(Stored::f32)
}

#[test]
fn options_worked_by_hand() {
    if !gpu() {
        return;
    }
    let three = qkv(&[1, 3], &[1, 3], &[1.0, 2.0, 4.0]);
    let with = |other: Stored| [&three[..], &[other]].concat();
    // Causal and key 0 hidden: by any name, of any number of axes.
    for mask in [
        Stored::bool("mask", &[3], &[0, 1, 1]),
        Stored::i32("attention_mask", &[1, 3], &[0, 1, 1]),
        Stored::bool("attn_mask", &[3, 3], &[0, 1, 1, 0, 1, 1, 0, 1, 1]),
        Stored::f32(("attn_mask", vec![1, 1, 1, 3], vec![f32::NEG_INFINITY, 0.0, 0.0])),
        Stored::f32(("attn_bias", vec![3], vec![f32::NEG_INFINITY, 2.0, 2.0])),
    ] {
        means(&with(mask), &["--causal"], &[0.0, 2.0, 3.0]);
    }
    means(&with(Stored::i32("q_lens", &[1], &[2])), &[], &[7.0 / 3.0, 7.0 / 3.0, 0.0]);

    means(&with(Stored::i32("ranges", &[3, 2], &[0, 1, 1, 9, 2, 2])), &[], &[1.0, 3.0, 0.0]);

    let five = qkv(&[1, 5], &[1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    means(&five, &["--window", "1,0"], &[1.0, 1.5, 2.5, 3.5, 4.5]);
    means(&five, &["--window", "0,0", "--dtype", "f32"], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    means(&five, &["--window", "4294967295,-1"], &[3.0; 5]);
    let sequences = Stored::i32("cu_seqlens", &[3], &[0, 2, 5]);
    let packed = qkv(&[5, 1], &[5, 1], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    means(&[&packed[..], &[sequences]].concat(), &["--causal"], &[1.0, 1.5, 3.0, 3.5, 4.0]);

    let values: Vec<f32> = (1..=6_u8).chain(1..=6).map(f32::from).collect();
    let cached = qkv(&[2, 1, 2], &[2, 1, 6], &values);
    let lens = Stored::i32("kv_lens", &[2], &[5, 3]);
    means(&[&cached[..], &[lens]].concat(), &["--causal"], &[2.5, 3.0, 1.5, 2.0]);
    let heads = qkv(&[2, 1], &[2, 2], &[1.0; 4]);
    let sinks = Stored::f32(("sinks", vec![2], vec![0.0, std::f32::consts::LN_2]));
    means(&[&heads[..], &[sinks]].concat(), &[], &[2.0 / 3.0, 0.5]);
}

#[test]
fn options_are_told() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.safetensors");
    let tensors = qkv(&[1, 3], &[1, 3], &[1.0, 2.0, 4.0]);
    let mask = Stored::bool("attn_mask", &[3], &[0, 1, 1]);
    std::fs::write(&input, safetensors_of_any(&[&tensors[..], &[mask]].concat())).unwrap();
    let flags = ["--causal", "--window", "2,0", "--softcap", "30"];
    let told = ran(program().args(["run", text(&input)]).args(flags));
    let options = "causal, window 2,0, softcap 30, mask (attn_mask), scale 0.5";
    assert!(told.stdout.contains(options) && told.stdout.contains("f32, f32, f32; o in f32"), "{told:?}");
    let json = run_json(text(&input), &flags);
    assert_eq!((&json["window"], &json["softcap"]), (&serde_json::json!([2, 0]), &30.0.into()));
    assert_eq!(json["others"], serde_json::json!(["mask (attn_mask)"]));
}

/// The tensor with its second and third axes exchanged, of its shape and its numbers.
fn swapped((name, shape, numbers): &Numbers) -> Numbers {
    let [batch, a, b, dim] = shape[..] else { panic!("{shape:?}") };
    let rows = (0..batch).flat_map(|n| (0..b).flat_map(move |j| (0..a).map(move |i| (n * a + i) * b + j)));
    let moved = rows.flat_map(|row| numbers[row * dim..][..dim].iter().copied());
    (name, vec![batch, b, a, dim], moved.collect())
}

#[test]
fn files_of_the_other_order_of_axes() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let computed = |tensors: &[Numbers], flags: &[&str]| {
        std::fs::write(&input, safetensors_of(tensors)).unwrap();
        let json = run_json(text(&input), &[flags, &["--causal", "--out", text(&out)]].concat());
        let file = std::fs::read(&out).unwrap();
        (json, tensor(&file, "o"), tensor(&file, "lse"))
    };
    let qkv = [numbers("q", &[2, 4, 7, 8]), numbers("k", &[2, 2, 9, 8]), numbers("v", &[2, 2, 9, 5])];
    let (json, (o_shape, o), (lse_shape, lse)) = computed(&qkv, &[]);
    assert_eq!((&json["axes"], &json["layout"]), (&"bhsd".into(), &"bhsd".into()));
    let o = ("o", o_shape, o);

    // Its o and lse are accepted as expected ones: o in the file's order, lse always by heads.
    let mut other = qkv.each_ref().map(swapped).to_vec();
    other.extend([swapped(&o), ("lse", lse_shape.clone(), lse.clone())]);
    let (json, written, lse_written) = computed(&other, &["--axes", "bshd"]);
    assert_eq!((&json["axes"], &json["layout"]), (&"bshd".into(), &"bshd".into()));
    assert_eq!(json["q"], serde_json::json!([2, 4, 7, 8]), "(batch, heads, length, dim)");
    assert_eq!((error(&json, "max_abs_err"), error(&json, "max_abs_err_lse")), (0.0, 0.0));
    let (_, shape, moved) = swapped(&o);
    assert_eq!((written, lse_written), ((shape, moved), (lse_shape, lse)));

    // Its numbers by heads, whatever the header says: found by its o, or said.
    let mut odd: Vec<_> =
        qkv.iter().chain([&o]).map(|tensor| (tensor.0, swapped(tensor).1, tensor.2.clone())).collect();
    let (json, ..) = computed(&odd, &["--axes", "bshd"]);
    assert_eq!((&json["layout"], &json["verdict"]), (&"bhsd".into(), &"reproduced".into()));
    odd.pop();
    let (_, written, _) = computed(&odd, &["--axes", "bshd", "--layout", "bhsd"]);
    assert_eq!(written.1, swapped(&o).2);

    // More heads than positions: a note, unless the order is said.
    let many = ["q", "k", "v"].map(|name| numbers(name, &[1, 9, 2, 8]));
    std::fs::write(&input, safetensors_of(&many)).unwrap();
    let noted = tilewise(["run", text(&input)]);
    assert!(noted.stderr.contains("q has 9 heads of length 2; --axes bshd reads"), "{noted:?}");
    let silent = tilewise(["run", text(&input), "--axes", "bhsd"]);
    assert!(!silent.stderr.contains("note: "), "{silent:?}");
}

#[test]
fn the_error_gets_a_verdict() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.safetensors");
    let tensors = qkv(&[1, 3], &[1, 3], &[1.0, 2.0, 4.0]);
    for (o, verdict, words) in [
        (7.0 / 3.0, "reproduced", "of the largest in o), mean"),
        (7.01 / 3.0, "close", "close, but more than rounding"),
        (2.0, "missed", "MISSED, something else was computed"),
    ] {
        let o = Stored::f32(("o", vec![1, 3, 1], vec![o; 3]));
        std::fs::write(&input, safetensors_of_any(&[&tensors[..], &[o]].concat())).unwrap();
        let json = run_json(text(&input), &[]);
        assert_eq!(json["verdict"], verdict, "{json}");
        assert!(error(&json, "max_abs_err_share") <= error(&json, "max_abs_err"), "{json}");
        let told = tilewise(["run", text(&input)]).stdout;
        assert!(told.contains(words), "{told}");
    }
    std::fs::write(&input, safetensors_of_any(&tensors)).unwrap();
    let json = run_json(text(&input), &[]);
    assert!(json["verdict"].is_null() && json["max_abs_err_share"].is_null(), "{json}");
}

#[test]
fn what_is_not_used_is_told() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.safetensors");
    let tensors = qkv(&[1, 3], &[1, 3], &[1.0, 2.0, 4.0]);
    let others = [
        Stored::bool("mask", &[3], &[0, 1, 1]),
        Stored::f32(numbers("key_padding_mask", &[3])),
        Stored::f32(numbers("dq", &[1])),
        Stored::f32(numbers("y", &[1])),
        Stored::f32(("o", vec![1, 3, 1], vec![7.0 / 3.0; 3])),
    ];
    std::fs::write(&input, safetensors_of_any(&[&tensors[..], &others].concat())).unwrap();
    let flags = ["--ignore", "key_padding_mask,mask"];
    let json = run_json(text(&input), &flags);
    assert_eq!(json["ignored"], serde_json::json!(["key_padding_mask", "mask", "dq", "y"]));
    assert_eq!(json["others"], serde_json::json!([]));
    assert!(error(&json, "max_abs_err") < 1e-6, "the mask was not applied: {json}");
    let told = ran(program().args(["run", text(&input)]).args(flags)).stdout;
    let line = told.lines().find(|line| line.contains("| ignored"));
    assert!(line.is_some_and(|line| line.contains("key_padding_mask, mask, dq, y")), "{told}");
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
