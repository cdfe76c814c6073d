//! `tilewise bench` on a problem small enough for a test.

use serde_json::json;

use super::support::{gpu, tilewise};

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
    let refused = row["naive"]["refused"].as_str().unwrap();
    assert!(refused.contains("storage other than f32, a window, a softcap"), "{refused}");
}
