//! The yardstick, and rounding to the storage types.

use half::{bf16, f16};
use tilewise::reference::{Precision, compare, low_precision};

use super::golden::Golden;
use super::single;

const ALL: [(&str, Precision); 3] = [("f32", Precision::F32), ("f16", Precision::F16), ("bf16", Precision::Bf16)];

#[test]
fn rounds_to_the_nearest() {
    // Every finite number of the type, and the numbers around the middle between it and the next.
    type Value = fn(u16) -> f64;
    let types: [(Precision, Value); 2] = [
        (Precision::F16, |bits| f16::from_bits(bits).to_f64()),
        (Precision::Bf16, |bits| bf16::from_bits(bits).to_f64()),
    ];
    for (precision, value) in types {
        for bits in (0..u16::MAX).take_while(|&bits| value(bits + 1).is_finite()) {
            let (low, high) = (value(bits), value(bits + 1));
            let middle = f64::midpoint(low, high);
            assert_eq!(precision.round(low), low);
            assert_eq!(precision.round(middle.next_down()), low);
            assert_eq!(precision.round(middle.next_up()), high);
            assert_eq!(precision.round(-middle), -(if bits % 2 == 0 { low } else { high }));
        }
    }
    assert_eq!(Precision::F16.round(65520.0), f64::INFINITY);
    assert_eq!(Precision::Bf16.round(-f64::from(f32::MAX)), f64::NEG_INFINITY);
    for x in [0.1, -1e-40, 1e-46, 3.4e38, 3.5e38, f64::MIN_POSITIVE / 2.0, -0.0] {
        assert_eq!(Precision::F32.round(x).to_bits(), f64::from(single(x)).to_bits());
    }
    assert!(ALL.iter().all(|(_, precision)| precision.round(f64::NAN).is_nan()));
    let roundoffs = ALL.map(|(_, precision)| precision.unit_roundoff());
    assert_eq!(roundoffs, [24, 11, 8].map(|bits| 0.5_f64.powi(bits)));
}

/// The yardstick's error is of the size that the golden set's own naive implementation has; in f32 it is within the tolerance.
#[test]
fn errors_are_those_of_a_naive_implementation() {
    for golden in Golden::all().into_iter().filter(|golden| !golden.is_packed()) {
        let exact = golden.reference();
        for (dtype, precision) in ALL {
            let Some(baseline) = golden.entry["baseline_max_abs_err"][dtype]["o"].as_f64() else { continue };
            let low = golden.with(|case, _| low_precision(case, precision)).unwrap();
            let error = compare(&low.o, &exact.o, 0.0).max_abs_err;
            let rounding = precision.unit_roundoff() * golden.entry["max_abs"]["o"].as_f64().unwrap();
            let alike = error <= 3.0 * baseline + rounding && baseline <= 3.0 * error + rounding;
            assert!(alike, "{} {dtype}: {error:.3e}, baseline {baseline:.3e}", golden.name());
            if precision == Precision::F32 {
                let tolerance = exact.tolerance;
                assert!(error <= tolerance.o(precision), "{} {dtype}: {error:.3e}, {tolerance:?}", golden.name());
                let comparison = compare(&low.lse, &exact.lse, tolerance.lse());
                assert!(comparison.passed(), "{} lse: {comparison}", golden.name());
            }
        }
    }
}
