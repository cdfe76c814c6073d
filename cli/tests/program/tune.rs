//! `tilewise tune`: what is measured, saved, taken, and left alone.

use std::fs;

use serde_json::Value;

use super::support::{gpu, program, ran, text, tilewise};

/// The first line of the plan for one head of 200 tokens, and why it is that.
fn planned(tuning: &str) -> (String, String) {
    let plan = ["plan", "--limits=adapter", "--q-len=200", "--head-dim=32", "--json", "--tuning", tuning];
    let plan = tilewise(plan).json();
    let of = |value: &Value| value.as_str().unwrap().to_string();
    (of(&plan["tiled"]["kernels"][0]), of(&plan["tiled"]["explain"]))
}

#[test]
fn what_is_the_fastest_is_saved_and_taken() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuning.txt");
    let file = text(&path);
    let call = ["--q-len=200", "--head-dim=32", "--heads=1"];
    let tune = |more: &[&str]| ran(program().args(["tune", "--json"]).args(call).args(more));

    let dry = tune(&["--dry-run"]);
    assert_eq!((dry.code, path.exists()), (Some(0), false), "{dry:?}");
    assert_eq!(dry.json()["file"], Value::Null);

    let json = tune(&["--save", file]).json();
    let row = &json["rows"][0];
    let variants = row["variants"].as_array().unwrap();
    assert!(variants.len() > 1 && variants.iter().all(|it| it["wrong"].is_null()), "{json}");
    let times: Vec<_> = variants.iter().map(|it| it["seconds"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 0.0, "{times:?}");
    let chosen = row["chosen"].as_str().unwrap();
    assert_eq!(variants[0]["variant"], chosen);
    let saved = fs::read_to_string(&path).unwrap();
    assert!(saved.contains(&format!("kv_len 256 = {chosen} # 200, heads 1, head_dim 32")), "{saved}");

    // Whatever is chosen there is taken, be it what it may.
    for other in variants.iter().map(|it| it["variant"].as_str().unwrap()) {
        fs::write(&path, saved.replace(&format!("= {chosen} #"), &format!("= {other} #"))).unwrap();
        let (kernel, why) = planned(file);
        assert!(kernel.starts_with(other.split(' ').next().unwrap()), "{kernel} for {other}");
        assert!(why.contains("measured fastest"), "{why}");
    }
    assert!(!planned("none").1.contains("measured fastest"));

    // Other calls join the file.
    assert_eq!(ran(program().args(["tune", "--q-len=40", "--head-dim=8", "--heads=2", "--save", file])).code, Some(0));
    let both = fs::read_to_string(&path).unwrap();
    assert!(both.contains("head_dim 8 ") && both.contains("head_dim 32 "), "{both}");
    let info = tilewise(["info", "--json", "--tuning", file]).json();
    assert_eq!(info["tuned_calls"], 2);
}

#[test]
fn what_is_no_tuning_file_is_left_alone() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    fs::write(&path, "dear diary").unwrap();
    let refused = tilewise(["tune", "--q-len=8", "--heads=1", "--head-dim=8", "--save", text(&path)]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.error().contains("not a tuning file"), "{refused:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "dear diary");
    let refused = tilewise(["info", "--tuning", text(&path)]);
    assert!(refused.error().contains("notes.txt: not a tuning file"), "{refused:?}");
    let refused = tilewise(["tune", "--tuning=none"]);
    assert!(refused.error().contains("--tuning with tune"), "{refused:?}");
    // Calls alike are told by powers of two, among which there is no 0.
    let refused = tilewise(["tune", "--dry-run", "--q-len=0", "--kv-len=8"]);
    assert!(refused.error().contains("nothing to measure"), "{refused:?}");
    if cfg!(unix) {
        let refused = tilewise(["info", "--tuning=/dev/zero"]);
        assert!(refused.error().contains("not a regular file"), "{refused:?}");
    }
}
