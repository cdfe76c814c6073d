//! What the error of a result says: whether the file's o came out.

use serde::Serialize;

/// An error of more than this share of the largest |o| isn't rounding.
const MISSED: f64 = 1e-2;
/// An error of no more than this share is, in f32.
const REPRODUCED: f64 = 1e-4;
/// Likewise in a type of less precision, in units of its rounding: scores are sums of rounded numbers, and in an exponent.
const REPRODUCED_ROUNDINGS: f64 = 16.0;

/// Whether the file's o came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// But for rounding.
    Reproduced,
    /// More than rounding, of what is the same otherwise.
    Close,
    /// Something else was computed.
    Missed,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    /// The error as a share of the largest |o|.
    pub(super) share: f64,
    pub(super) verdict: Verdict,
}

impl Judged {
    /// `rounding`: of the coarser type that either o is stored in.
    pub(super) fn new(max_abs_err: f64, expected: &[f64], rounding: f64) -> Self {
        let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0, |max: f64, x| max.max(x.abs()));
        let share = if max_abs_err == 0.0 { 0.0 } else { max_abs_err / largest };
        let verdict = if share <= REPRODUCED.max(REPRODUCED_ROUNDINGS * rounding) {
            Verdict::Reproduced
        } else if share <= MISSED {
            Verdict::Close
        } else {
            Verdict::Missed
        };
        Self { share, verdict }
    }
}

impl Verdict {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::Close => "close, but more than rounding",
            Self::Missed => "MISSED, something else was computed",
        }
    }
}

#[cfg(test)]
mod tests {
    use tilewise::reference::Precision;

    use super::*;

    #[test]
    fn verdicts() {
        let o = [0.5, -2.0, f64::NEG_INFINITY];
        let judged = |error: f64, stored: Precision| Judged::new(error, &o, stored.unit_roundoff());
        let verdict = |error: f64, stored| judged(error, stored).verdict;
        assert_eq!(judged(1e-3, Precision::F32).share, 5e-4);
        assert_eq!(verdict(1e-4, Precision::F32), Verdict::Reproduced);
        assert_eq!(verdict(1e-3, Precision::F32), Verdict::Close);
        assert_eq!(verdict(1e-3, Precision::F16), Verdict::Reproduced);
        assert_eq!(verdict(3e-2, Precision::F16), Verdict::Missed);
        assert_eq!(verdict(3e-2, Precision::Bf16), Verdict::Reproduced);
        assert_eq!(verdict(f64::INFINITY, Precision::F32), Verdict::Missed);
        let zeros = |error: f64| Judged::new(error, &[0.0], 0.0).verdict;
        assert_eq!((zeros(0.0), zeros(1e-30)), (Verdict::Reproduced, Verdict::Missed));
    }
}
