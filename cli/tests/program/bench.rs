//! `tilewise bench` on a problem small enough for a test.

use serde_json::json;

use super::support::{gpu, tilewise};

/// Told at once, not after the roofline's measurement: that is what takes long, and writes lines where no terminal is.
#[test]
fn rows_that_are_all_refused_are_an_error() {
    if !gpu() {
        return;
    }
    for (args, reason) in [
        (["bench", "--plot=same.svg", "--csv=same.svg"], "--plot and --csv name one file"),
        (["bench", "--q-len=8", "--plot=some.png"], "--plot draws SVG"),
        (["bench", "--path=naive", "--q-len=131072,262144"], "the first: needs 64 GiB of scores, u32 indexes 16 GiB"),
        (["bench", "--path=naive", "--window=1,0"], "the first: the naive path with a window"),
        (["bench", "--path=naive", "--kind=matmul"], "the first: a matrix product has no naive path"),
        (["bench", "--value-dim=600", "--json"], "value_dim (of any tiled kernel): 600 needed, 512 available"),
    ] {
        let ran = tilewise(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        assert!(ran.error().contains(reason) && !ran.stderr.contains("measuring"), "{ran:?}");
    }
}

#[test]
fn a_row_in_f16_with_a_window_and_a_softcap() {
    if !gpu() {
        return;
    }
    let ran = tilewise([
        "bench",
        "--q-len=70",
        "--kv-len=33",
        "--head-dim=24",
        "--value-dim=20",
        "--window=9,3",
        "--softcap=5",
        "--dtype=f16",
        "--reps=1",
        "--json",
    ]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let json = ran.json();
    let row = &json["rows"][0];
    assert_eq!((&row["dtype"], &row["window"], &row["softcap"]), (&"f16".into(), &json!([9, 3]), &json!(5.0)));
    let tiled = &row["tiled"];
    // In another type than that of the measurement the check of an o in f16 would fail.
    let [max_abs_err, tolerance] = ["max_abs_err", "tolerance"].map(|key| tiled[key].as_f64().unwrap());
    assert!(max_abs_err <= tolerance && (1e-5..1e-2).contains(&tolerance), "{row}");
    assert!(tiled["kernel"].as_str().unwrap().contains("out=f16"), "{row}");
    assert!(ran.stderr.contains("measuring this machine's multiply-add rate, "), "{ran:?}");
    assert_eq!(row["compared"], "with the f64 reference, 16 rows");
    let refused = row["naive"]["refused"].as_str().unwrap();
    assert!(refused.contains("storage other than f32, a window, a softcap"), "{refused}");
}
