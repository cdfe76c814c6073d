//! What needs no GPU.

use super::support::{program, ran, tilewise};

/// The program where wgpu finds nothing: the backend named isn't built in.
fn without_gpu<const N: usize>(args: [&str; N]) -> super::support::Ran {
    ran(program().args(args).env("WGPU_BACKEND", "gl").env("VK_DRIVER_FILES", "nothing"))
}

#[test]
fn plan_needs_no_gpu() {
    let json = without_gpu(["plan", "--q-len", "131072", "--causal", "--json"]).json();
    assert_eq!(json["naive_bytes"], 68_719_476_736_u64);
    assert_eq!(json["tiled"]["fits"], true);
    assert_eq!(json["tiled"]["workspace_bytes"], 0);
    assert_eq!(json["naive"]["fits"], false);
    assert_eq!(json["naive"]["needed"], 68_719_476_736_u64);
    let text = without_gpu(["plan", "--q-len", "131072", "--causal"]);
    assert_eq!(text.code, Some(0));
    assert!(text.stdout.contains("does not fit") && text.stdout.contains("needed 64 GiB"), "{text:?}");
}

#[test]
fn plan_counts_the_article_figures() {
    let json = without_gpu(["plan", "--q-len", "4096", "--json"]).json();
    assert_eq!(json["naive_bytes"], 67_108_864);
    assert_eq!(json["flops"], 4_u64 * 64 * 4096 * 4096);
    assert_eq!(json["input_bytes"], 3 * 4 * 64 * 4096);
    assert_eq!(json["naive"]["workspace_bytes"], 67_108_864);
    // lse and delta of each row; q, k, v, o and lse, and as much of gradients.
    assert_eq!(json["gradients"]["workspace_bytes"], 8 * 4096);
    assert_eq!(json["gradients"]["total_bytes"], 2 * (4 * 4 * 64 * 4096 + 4 * 4096) + 8 * 4096);
    let text = without_gpu(["plan"]).stdout;
    assert!(text.contains("| gradients | 32 KiB") && text.contains("flash_bwd_dkdv["), "{text}");
    let naive = without_gpu(["plan", "--path=naive"]).stdout;
    assert!(!naive.contains("gradients"), "{naive}");
    // More than gradients can do, which the forward call can.
    let wide = without_gpu(["plan", "--head-dim=513", "--value-dim=64"]);
    assert!(wide.code == Some(0) && wide.stdout.contains("needed 513, available 512"), "{wide:?}");
}

#[test]
fn plan_fails_if_what_was_asked_for_does_not_fit() {
    let naive = without_gpu(["plan", "--q-len=8192", "--path=naive"]);
    assert_eq!(naive.code, Some(1), "{naive:?}");
    assert!(naive.error().contains("naive attention does not fit: bytes in one storage binding (naive scores)"));
    assert!(naive.error().contains("needed 256 MiB, available 128 MiB; --limits adapter plans for"), "{naive:?}");
    let report = without_gpu(["plan", "--q-len=8192", "--path=naive", "--json"]);
    assert_eq!((report.code, &report.json()["naive"]["fits"]), (Some(1), &false.into()), "{report:?}");
    let wide = without_gpu(["plan", "--value-dim=600"]);
    assert_eq!(wide.code, Some(1), "{wide:?}");
    assert!(wide.error().contains("tiled attention does not fit: value_dim (of any tiled kernel): needed 600"));
    assert!(wide.stdout.contains("| naive     | 64 MiB"), "the report is whole: {wide:?}");
    let naive = without_gpu(["plan", "--value-dim=600", "--path=naive"]);
    assert_eq!(naive.code, Some(0), "{naive:?}");
}

#[test]
fn plan_tells_no_bytes_of_a_path_that_is_not_there() {
    let both = without_gpu(["plan"]).stdout;
    assert!(both.contains("three passes, 64 MiB of scores in device memory"), "{both}");
    assert!(!both.contains("asked for") && !both.contains("naive would need"), "{both}");
    assert!(both.contains("tiles of ") && both.matches("flash_fwd[").count() == 1, "{both}");
    let tiled = without_gpu(["plan", "--window=1,0", "--dtype=f16"]).stdout;
    assert!(!tiled.contains("naive would need"), "{tiled}");
}

#[test]
fn plan_takes_every_size() {
    let json = without_gpu([
        "plan",
        "--batch",
        "2",
        "--q-heads",
        "6",
        "--kv-heads",
        "3",
        "--q-len",
        "5",
        "--kv-len",
        "9",
        "--head-dim",
        "32",
        "--value-dim",
        "16",
        "--causal",
        "--align",
        "top-left",
        "--scale",
        "-0.5",
        "--path",
        "auto",
        "--json",
    ])
    .json();
    assert_eq!(json["visible_pairs"], 2 * 6 * (1 + 2 + 3 + 4 + 5));
    assert_eq!(json["scale"], -0.5);
    assert_eq!(json["output_bytes"], 4 * 2 * 6 * 5 * (16 + 1));
    assert!(json["naive"].is_null());
}

#[test]
fn plan_refuses_what_has_no_meaning() {
    for (args, error) in [
        (["plan", "--heads=7", "--kv-heads=3"], "q_heads = 7, kv_heads = 3"),
        (["plan", "--scale=NaN", "--causal"], "softmax_scale = NaN"),
        (["plan", "--head-dim=0", "--causal"], "head_dim = 0"),
        (["plan", "--softcap=0", "--causal"], "softcap = 0; accepted: a finite number above 0"),
        (["plan", "--path=split:4", "--causal"], "isn't built yet"),
    ] {
        let ran = without_gpu(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{args:?}");
        assert!(ran.error().contains(error), "{ran:?}");
    }
}

#[test]
fn plan_counts_windows_and_types() {
    let args = ["plan", "--q-len=5", "--causal", "--window=1,none", "--softcap=50", "--dtype=bf16", "--json"];
    let json = without_gpu(args).json();
    assert_eq!((&json["dtype"], &json["softcap"]), (&"bf16".into(), &50.0.into()));
    assert_eq!(json["window"], serde_json::json!([1, null]));
    assert_eq!(json["visible_pairs"], 1 + 2 + 2 + 2 + 2);
    assert_eq!(json["input_bytes"], 3 * 2 * 64 * 5);
    assert_eq!(json["output_bytes"], 2 * 64 * 5 + 4 * 5);
    assert_eq!(json["tiled"]["fits"], true);
    // There is no such naive path: said, unless it was asked for.
    assert_eq!(json["naive"]["fits"], false);
    let reason = json["naive"]["reason"].as_str().unwrap();
    assert!(reason.contains("storage other than f32, a window, a softcap"), "{reason}");
    let text = without_gpu(["plan", "--q-len=5", "--window=1,0", "--dtype=f16"]);
    assert_eq!(text.code, Some(0), "{text:?}");
    assert!(text.stdout.contains("window 1,0, scale 0.125, f16"), "{text:?}");
    assert!(text.stdout.contains("not available: the naive path with storage"), "{text:?}");
    let refused = without_gpu(["plan", "--window=1,0", "--path=naive"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""), "{refused:?}");
    assert!(refused.error().contains("the naive path with a window; accepted: causality"), "{refused:?}");

    let plain = without_gpu(["plan", "--json"]).json();
    assert_eq!(plain["dtype"], "f32");
    assert!(plain["window"].is_null() && plain["softcap"].is_null(), "{plain}");
}

/// A size beside a 0 makes no element, but strides, tiles and counts are made of it.
#[test]
fn plan_refuses_huge_sizes_beside_a_zero() {
    let max = usize::MAX.to_string();
    for args in [
        ["plan", "--batch", "0", "--head-dim", &max],
        ["plan", "--q-len", "0", "--batch", &max],
        ["plan", "--batch", "0", "--heads", &max],
        ["plan", "--kv-len", "0", "--head-dim", "3000000000"],
    ] {
        let ran = without_gpu(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{args:?}");
        assert!(ran.error().contains("too many elements"), "{ran:?}");
    }
    let widest = without_gpu(["plan", "--q-len=0", "--kv-len=0", "--head-dim=4294967295", "--value-dim=1"]);
    assert_eq!(widest.code, Some(0), "{widest:?}");
}

#[test]
fn no_device_is_one_clear_error() {
    for command in ["info", "verify", "walkthrough"] {
        let ran = without_gpu([command]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        assert!(ran.error().contains("no usable GPU adapter") && ran.error().contains("scripts/vulkan.sh"), "{ran:?}");
    }
}

#[test]
fn usage_errors_exit_with_2() {
    for args in [
        ["plan", "--q-len=many"],
        ["plan", "--window=x"],
        ["plan", "--window=255"],
        ["bench", "--window=1,-2"],
        ["plan", "--dtype=f8"],
        ["plan", "--path=quick"],
        ["nonsense", "--json"],
        ["verify", "--outputs=forward"],
        ["run", "--causal"],
    ] {
        let ran = without_gpu(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}");
    }
    let window = without_gpu(["plan", "--window=255"]);
    assert!(window.error().contains("--window <L,R>': accepted: L,R, each a number of keys"), "{window:?}");
}

#[test]
fn every_command_has_help() {
    let help = tilewise(["--help"]);
    assert_eq!(help.code, Some(0));
    for command in ["info", "plan", "run", "verify", "bench", "walkthrough"] {
        assert!(help.stdout.contains(command));
        let help = tilewise([command, "--help"]);
        assert_eq!(help.code, Some(0));
        assert!(help.stdout.contains("--adapter") && help.stdout.contains("--json"), "{command}");
    }
}
