//! The comparison helper (field case L2: helpers that let NaN through).

use tilewise::reference::compare;

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

fn passes(got: &[f64], expected: &[f64], tolerance: f64) -> bool {
    let comparison = compare(got, expected, tolerance);
    // A caller that only looks at the maximum gets the same answer.
    assert_eq!(comparison.passed(), comparison.max_abs_err <= tolerance.max(0.0), "{comparison}");
    comparison.passed()
}

#[test]
fn nan_fails_unless_expected_there() {
    for tolerance in [0.0, 1e300, INF] {
        assert!(!compare(&[NAN], &[1.0], tolerance).passed());
        assert!(!compare(&[1.0], &[NAN], tolerance).passed());
        assert!(!compare(&[0.0, NAN], &[NAN, 0.0], tolerance).passed());
        assert!(compare(&[NAN, 0.0], &[NAN, 0.0], tolerance).passed());
    }
}

#[test]
fn infinities_match_in_sign_and_place() {
    assert!(passes(&[INF, -INF, 1.0], &[INF, -INF, 1.0], 0.0));
    assert!(!passes(&[INF], &[-INF], 1.0));
    assert!(!passes(&[INF], &[1.0], 1.0));
    assert!(!passes(&[1.0], &[-INF], 1.0));
    assert!(!compare(&[1.0], &[-INF], INF).passed());
    assert!(!passes(&[NAN], &[INF], 1.0));
}

#[test]
fn lengths_must_match() {
    assert!(!compare(&[1.0], &[1.0, 2.0], INF).passed());
    assert!(!compare::<f64, f64>(&[], &[1.0], INF).passed());
    assert!(compare::<f64, f64>(&[], &[], 0.0).passed());
    assert_eq!(compare(&[1.0], &[1.0, 2.0], INF).max_abs_err, INF);
    assert_eq!(compare(&[1.0], &[1.0, 2.0], INF).to_string(), "1 elements where 2 are expected");
}

#[test]
fn the_tolerance_is_inclusive() {
    assert!(passes(&[1.5], &[1.0], 0.5));
    assert!(!passes(&[1.5], &[1.0], 0.25));
    assert!(!compare(&[1.5], &[1.0], NAN).passed());
    assert!(!compare(&[1.5], &[1.0], -1.0).passed());
    assert!(compare(&[-0.0], &[0.0], 0.0).passed());
}

#[test]
fn figures_and_message() {
    let got = [1.0_f32, 2.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0];
    let expected = [1.0_f64, 2.0, 3.0, 8.0, 4.0, 5.0, 6.0, 7.0];
    let comparison = compare(&got, &expected, 0.25);
    assert_eq!((comparison.max_abs_err, comparison.mean_abs_err), (4.0, 8.5 / 8.0));
    assert_eq!(comparison.worst.map(|worst| worst.index), Some(3));
    assert_eq!(comparison.mismatches, 6);
    assert_eq!(comparison.first.iter().map(|pair| pair.index).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    let message = comparison.to_string();
    assert_eq!(message.lines().count(), 6);
    assert!(
        message.starts_with("max |error| 4.000e0 at 3, mean 1.062e0, tolerance 2.500e-1, 6 of 8 beyond it\n"),
        "{message}"
    );
    assert!(message.contains("[2] 3.5e0, expected 3e0"), "{message}");
}
