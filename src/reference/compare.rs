//! The one way to compare a result with the reference.

use core::fmt;

/// How many mismatches a [`Comparison`] keeps for its message.
const KEPT: usize = 5;

/// An element that differs by more than the tolerance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mismatch {
    /// Index into both slices.
    pub index: usize,
    /// The element under test.
    pub got: f64,
    /// The reference.
    pub expected: f64,
}

/// The outcome of [`compare`]. `Display` puts it into a few lines, for a failing test or for the program.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Length of the slice under test.
    pub got_len: usize,
    /// Length of the reference.
    pub expected_len: usize,
    /// The tolerance given.
    pub tolerance: f64,
    /// The largest `|got − expected|`: 0 where both are NaN or the same infinity, infinite where only one is, or if the lengths differ.
    pub max_abs_err: f64,
    /// The mean of the same; 0 for empty slices.
    pub mean_abs_err: f64,
    /// Where `max_abs_err` is found first; `None` for empty slices and if the lengths differ.
    pub worst: Option<Mismatch>,
    /// How many elements differ by more than the tolerance.
    pub mismatches: usize,
    /// The first five of them.
    pub first: Vec<Mismatch>,
}

impl Comparison {
    /// Whether the lengths are the same and no element differs by more than the tolerance.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.got_len == self.expected_len && self.mismatches == 0
    }
}

/// Compares `got` with `expected`, element by element, absolutely.
///
/// NaN matches NaN only, and an infinity the infinity of the same sign only: nothing else makes up for them, whatever the tolerance, and
/// they can't hide in a maximum. A length that differs fails. A tolerance of NaN or below 0 lets no difference pass.
///
/// The slices are of `f32`, `f64`, `f16` or `bf16`, each its own.
pub fn compare<G, E>(got: &[G], expected: &[E], tolerance: f64) -> Comparison
where
    G: Copy + Into<f64>,
    E: Copy + Into<f64>,
{
    let mut comparison = Comparison {
        got_len: got.len(),
        expected_len: expected.len(),
        tolerance,
        max_abs_err: 0.0,
        mean_abs_err: 0.0,
        worst: None,
        mismatches: 0,
        first: Vec::new(),
    };
    if got.len() != expected.len() {
        (comparison.max_abs_err, comparison.mean_abs_err) = (f64::INFINITY, f64::INFINITY);
        return comparison;
    }
    let mut sum = 0.0;
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let pair = Mismatch { index, got: got.into(), expected: expected.into() };
        let error = error(pair.got, pair.expected);
        sum += error;
        if comparison.worst.is_none() || error > comparison.max_abs_err {
            (comparison.max_abs_err, comparison.worst) = (error, Some(pair));
        }
        if error > 0.0 && !(error.is_finite() && error <= tolerance) {
            comparison.mismatches += 1;
            if comparison.first.len() < KEPT {
                comparison.first.push(pair);
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a count for a mean")]
    let count = got.len().max(1) as f64;
    comparison.mean_abs_err = sum / count;
    comparison
}

fn error(got: f64, expected: f64) -> f64 {
    if got == expected || (got.is_nan() && expected.is_nan()) {
        0.0
    } else if got.is_finite() && expected.is_finite() {
        (got - expected).abs()
    } else {
        f64::INFINITY
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.got_len != self.expected_len {
            return write!(f, "{} elements where {} are expected", self.got_len, self.expected_len);
        }
        let Self { max_abs_err: max, mean_abs_err: mean, tolerance, mismatches, got_len, .. } = self;
        write!(f, "max |error| {max:.3e}")?;
        if let Some(worst) = self.worst {
            write!(f, " at {}", worst.index)?;
        }
        write!(f, ", mean {mean:.3e}, tolerance {tolerance:.3e}, {mismatches} of {got_len} beyond it")?;
        for Mismatch { index, got, expected } in &self.first {
            write!(f, "\n  [{index}] {got:e}, expected {expected:e}")?;
        }
        Ok(())
    }
}
