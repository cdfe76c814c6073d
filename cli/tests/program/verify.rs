//! `tilewise verify` and `info` on this device.

use super::support::{gpu, tilewise};

#[test]
fn this_device_is_right() {
    if !gpu() {
        return;
    }
    for limits in ["adapter", "default"] {
        let ran = tilewise(["verify", "--json", "--limits", limits]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let json = ran.json();
        let kernels = json["kernels"].as_array().unwrap();
        assert!(kernels.len() > 10 && kernels.iter().all(|row| row["status"] == "pass"), "{json}");
        for stem in ["flash_fwd", "gradients", "naive", "matmul", "softmax_rows"] {
            assert!(kernels.iter().any(|row| row["kernel"].as_str().unwrap().starts_with(stem)), "{stem}");
        }
        for options in ["f16 k and v", "mask", "packed", "window", "score_mod, mask_mod", "all", "all, packed"] {
            assert!(kernels.iter().any(|row| row["options"] == options), "{options}");
        }
        assert_eq!(json["failed"], 0);
    }
}

#[test]
fn info_tells_the_adapter_and_its_kernels() {
    if !gpu() {
        return;
    }
    let json = tilewise(["info", "--json"]).json();
    assert!(json["adapters"].as_array().unwrap().iter().any(|adapter| adapter["name"] == json["adapter"]));
    let kernels = json["kernels"].as_array().unwrap();
    assert_eq!(kernels.iter().map(|kernel| &kernel["head_dim"]).collect::<Vec<_>>(), [64, 80, 128, 256, 512]);
    assert!(kernels.iter().all(|kernel| kernel["kernels"][0].as_str().unwrap().starts_with("flash_fwd")), "{json}");
    let text = tilewise(["info"]).stdout;
    assert!(text.contains(json["adapter"].as_str().unwrap()) && text.contains("head_dim 512"), "{text}");

    let limited = tilewise(["info", "--json", "--limits", "default"]).json();
    assert_eq!(limited["limits"]["workgroup_storage_bytes"], 16384);
    assert_eq!(limited["features"].as_array().unwrap().len(), 0);
    let plain = tilewise(["info", "--json", "--no-subgroups"]).json();
    assert!(plain["features"].as_array().unwrap().iter().all(|feature| feature != "SUBGROUP"));
}
