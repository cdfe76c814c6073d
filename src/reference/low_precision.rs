//! The yardstick: naive attention in a low precision.

use super::case::Case;
use super::parallel;
use crate::error::Result;

/// A floating-point type that tensors are stored in, or that arithmetic is rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE 754 binary32: 24 bits of precision.
    F32,
    /// IEEE 754 binary16: 11 bits, up to 65504.
    F16,
    /// bfloat16: 8 bits, the range of `f32`.
    Bf16,
}

impl Precision {
    /// Bits of precision, and the smallest and largest exponent of a normal number.
    fn parameters(self) -> (i32, i32, i32) {
        match self {
            Self::F32 => (24, -126, 127),
            Self::F16 => (11, -14, 15),
            Self::Bf16 => (8, -126, 127),
        }
    }

    /// The largest relative error of rounding a number in the normal range: `2⁻²⁴`, `2⁻¹¹`, `2⁻⁸`.
    #[must_use]
    pub fn unit_roundoff(self) -> f64 {
        let (bits, ..) = self.parameters();
        2.0_f64.powi(-bits)
    }

    /// The nearest number of this type, ties to even; infinite if it is too large, subnormal if it is that small.
    ///
    /// It rounds once. (`half` 2.7 looks only at the upper half of an `f64`, and by way of `f32` would be rounding twice.)
    #[must_use]
    pub fn round(self, x: f64) -> f64 {
        let (bits, min, max) = self.parameters();
        if x == 0.0 || !x.is_finite() {
            return x;
        }
        let last_place = 2.0_f64.powi(exponent(x).max(min) - bits + 1);
        let rounded = (x / last_place).round_ties_even() * last_place;
        if exponent(rounded) > max { f64::INFINITY.copysign(x) } else { rounded }
    }
}

/// `floor(log2 |x|)` of a normal number; −1023 of a subnormal one and 0.
fn exponent(x: f64) -> i32 {
    let biased = u16::try_from(x.abs().to_bits() >> 52).unwrap_or(u16::MAX);
    i32::from(biased) - 1023
}

/// What [`low_precision`] computes. Every element is a number of the given precision.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LowPrecision {
    /// `(batch, q_heads, q_len, value_dim)`.
    pub o: Vec<f64>,
    /// `(batch, q_heads, q_len)`.
    pub lse: Vec<f64>,
}

/// Attention as a naive program in one precision computes it: the same definition as [`attention`](super::attention), with the inputs
/// and the result of every step (scores, scaled, capped and biased scores, exponentials, their sum, weights, output) rounded to
/// `precision`. Sums within a step are accumulated in `f32`, as matrix libraries do.
///
/// It is the yardstick of kernels that compute in their storage type, after the rule of the flash-attention tests: with errors against
/// the `f64` reference, `max err(kernel) ≤ 2 · max err(low precision) + floor`. Don't use that rule for `f32`: CPU `exp` is far better
/// than what WGSL promises, so an honest kernel breaks it; see [`Tolerance`](super::Tolerance). Where the yardstick itself overflows
/// (`f16` scores past 65504) its error is infinite or NaN, and it says nothing.
///
/// Like the reference, it works row by row and uses all cores for big inputs.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if the case isn't [valid](Case::validate).
pub fn low_precision(case: &Case<'_>, precision: Precision) -> Result<LowPrecision> {
    case.validate()?;
    let rounded = |x: &[f32]| -> Vec<f32> { x.iter().map(|&x| single(precision.round(f64::from(x)))).collect() };
    let case = &Case { q: &rounded(case.q), k: &rounded(case.k), v: &rounded(case.v), ..*case };
    let &Case { q_heads, q_len, kv_len, head_dim, value_dim, .. } = case;
    let row = |n: usize| attend(case, precision, n / q_len / q_heads, n / q_len % q_heads, n % q_len);
    let work = case.rows().saturating_mul(kv_len).saturating_mul(head_dim + value_dim);
    let mut output = LowPrecision::default();
    for (o, lse) in parallel::map(case.rows(), work, row) {
        output.o.extend(o);
        output.lse.push(lse);
    }
    Ok(output)
}

/// `o` and `lse` of one row.
fn attend(case: &Case<'_>, precision: Precision, b: usize, h: usize, i: usize) -> (Vec<f64>, f64) {
    if i >= case.q_len_of(b) {
        return (vec![0.0; case.value_dim], f64::NEG_INFINITY);
    }
    let round = |x: f64| precision.round(x);
    let keys: Vec<usize> = case.visible(b, h, i).collect();

    let score = |&j: &usize| {
        let products = case.q_row(b, h, i).iter().zip(case.k_row(b, h, j)).map(|(q, k)| q * k);
        let mut s = round(f64::from(products.sum::<f32>()));
        s = round(s * case.scale());
        if let Some(softcap) = case.softcap {
            s = round(softcap * round(round(s / softcap).tanh()));
        }
        if let Some(score_mod) = case.score_mod {
            s = round(score_mod.0(s, b, h, i, j));
        }
        if let Some(alibi) = case.alibi(b, h, i, j) {
            s = round(s + round(alibi));
        }
        if let Some(bias) = case.bias(b, h, i, j) {
            s = round(s + round(bias));
        }
        s
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();

    let sink = round(case.sink(h));
    let max = scores.iter().copied().fold(sink, f64::max);
    let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
    let exp = |s: f64| round(round(s - shift).exp());
    let exps: Vec<f64> = scores.iter().map(|&s| exp(s)).collect();
    let sum = round(f64::from(exps.iter().fold(single(exp(sink)), |sum, &e| sum + single(e))));
    let weight = |e: &f64| if sum == 0.0 { 0.0 } else { single(round(e / sum)) };
    let weights: Vec<f32> = exps.iter().map(weight).collect();

    let mut o = vec![0.0_f32; case.value_dim];
    for (&j, w) in keys.iter().zip(weights) {
        o.iter_mut().zip(case.v_row(b, h, j)).for_each(|(o, v)| *o += w * v);
    }
    (o.into_iter().map(|o| round(f64::from(o))).collect(), round(shift + round(sum.ln())))
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the purpose")]
fn single(x: f64) -> f32 {
    x as f32
}
