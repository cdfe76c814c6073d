//! Attention in three passes per row: scores, softmax, weighted sum.

use super::case::Case;
use super::matrix::dot;
use super::parallel;
use super::tolerance::{NEGLIGIBLE, Tolerance};
use crate::error::{Error, Result};

/// One query row: whose output and log-sum-exp [`attention_rows`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Batch entry, below `batch`.
    pub batch: usize,
    /// Query head, below `q_heads`.
    pub head: usize,
    /// Query row within the batch entry, below `q_len`.
    pub row: usize,
}

/// The result of attention, in `f64`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    /// `(batch, q_heads, q_len, value_dim)`; `(rows, value_dim)` from [`attention_rows`]; `(total_q, q_heads, value_dim)` from
    /// [`attention_packed`](super::attention_packed). 0 in a row with nothing to attend to.
    pub o: Vec<f64>,
    /// The natural logarithm of the softmax's denominator, `(batch, q_heads, q_len)`; `(rows)` from [`attention_rows`];
    /// `(q_heads, total_q)` from [`attention_packed`](super::attention_packed). −∞ (or the sink) in a row with nothing to attend to.
    pub lse: Vec<f64>,
    /// How far an engine that computes in `f32` may be off.
    pub tolerance: Tolerance,
}

/// Attention of every row of a case.
///
/// With `g = h / (q_heads / kv_heads)`, the position `p` of row `i` (see [`Align`](super::Align)), and the keys `j` that it may attend to:
///
/// ```text
/// s_j = softmax_scale ⟨q[b,h,i], k[b,g,j]⟩;  s_j ← softcap tanh(s_j / softcap);  s_j ← score_mod(s_j) − slope |p − j| + bias[b,h,i,j]
/// lse = ln( Σ exp(s_j) + exp(sink[h]) )          o = Σ exp(s_j − lse) v[b,g,j]
/// ```
///
/// A NaN that a row can see shows in that row's result, and in no other. What is stored at a masked key has no effect.
///
/// # Errors
///
/// [`Error::Invalid`] if the case isn't [valid](Case::validate).
pub fn attention(case: &Case<'_>) -> Result<Output> {
    case.validate()?;
    let row = |n: usize| Row {
        batch: n / case.q_len / case.q_heads,
        head: n / case.q_len % case.q_heads,
        row: n % case.q_len,
    };
    Ok(compute(case, case.rows(), row))
}

/// Attention of the given rows only: for checking a few rows of a problem that is too long to compute whole.
///
/// The tolerance covers these rows. The bits are those that [`attention`] gives for the same rows.
///
/// # Errors
///
/// [`Error::Invalid`] if the case isn't [valid](Case::validate) or has no such row.
pub fn attention_rows(case: &Case<'_>, rows: &[Row]) -> Result<Output> {
    case.validate()?;
    let &Case { batch, q_heads, q_len, .. } = case;
    if let Some(row) = rows.iter().find(|row| row.batch >= batch || row.head >= q_heads || row.row >= q_len) {
        return Err(Error::invalid(format!(
            "{row:?}, accepted: batch below {batch}, head below {q_heads}, row below {q_len}"
        )));
    }
    Ok(compute(case, rows.len(), |n| rows[n]))
}

fn compute(case: &Case<'_>, count: usize, row: impl Fn(usize) -> Row + Sync) -> Output {
    let work = count.saturating_mul(case.kv_len).saturating_mul(case.head_dim + case.value_dim);
    let mut output = Output::default();
    // Without its keys: all of them together would be a score matrix.
    let row = |n| {
        let Attended { o, lse, tolerance, .. } = attend(case, row(n));
        (o, lse, tolerance)
    };
    for (o, lse, tolerance) in parallel::map(count, work, row) {
        output.o.extend(o);
        output.lse.push(lse);
        output.tolerance = output.tolerance.max(tolerance);
    }
    output
}

/// A key that a row attends to.
pub(super) struct Key {
    pub(super) j: usize,
    score: f64,
    /// The derivative of the score by `softmax_scale ⟨q, k⟩`: the slope of the softcap times that of the score mod.
    pub(super) slope: f64,
    /// The largest number that went into the score, for the tolerance.
    exponent: f64,
    pub(super) weight: f64,
}

/// One row after the three passes.
pub(super) struct Attended {
    pub(super) keys: Vec<Key>,
    pub(super) o: Vec<f64>,
    /// `Σ w |v|` behind each element of `o`.
    pub(super) mag: Vec<f64>,
    pub(super) lse: f64,
    pub(super) tolerance: Tolerance,
}

/// The three passes of one row.
pub(super) fn attend(case: &Case<'_>, row: Row) -> Attended {
    if row.row >= case.q_len_of(row.batch) {
        let o = vec![0.0; case.value_dim];
        let (mag, lse, tolerance) = (o.clone(), f64::NEG_INFINITY, Tolerance::default());
        return Attended { keys: Vec::new(), o, mag, lse, tolerance };
    }
    let mut keys = scores(case, row);
    let lse = softmax(&mut keys, case.sink(row.head));
    let (o, mag) = weighted_sum(case, row, &keys);

    let mattering = keys.iter().filter(|key| key.weight > NEGLIGIBLE).map(|key| key.exponent);
    let exponent = mattering.fold(Tolerance::of_exponent(lse), f64::max);
    let tolerance = Tolerance { mag: mag.iter().copied().fold(0.0, f64::max), exponent, keys: keys.len() };
    Attended { keys, o, mag, lse, tolerance }
}

/// Pass 1: the score of each key that the row may attend to.
fn scores(case: &Case<'_>, Row { batch: b, head: h, row: i }: Row) -> Vec<Key> {
    let scale = case.scale();
    let q = case.q_row(b, h, i);
    let key = |j| {
        let (sum, mag) = dot(q, case.k_row(b, h, j));
        let (mut s, mut mag, mut slope) = (scale * sum, scale.abs() * mag, 1.0);
        if let Some(softcap) = case.softcap {
            let t = (s / softcap).tanh();
            s = softcap * t;
            slope = 1.0 - t * t;
            mag *= slope; // what becomes of an error of the dot product
        }
        if let Some(derivative) = case.score_mod_derivative {
            slope *= derivative.0(s, b, h, i, j);
        }
        if let Some(score_mod) = case.score_mod {
            s = score_mod.0(s, b, h, i, j);
        }
        let alibi = case.alibi(b, h, i, j).unwrap_or(0.0);
        let bias = case.bias(b, h, i, j).unwrap_or(0.0);
        let score = s + alibi + bias;
        let exponent = [mag, alibi, bias, score].into_iter().map(Tolerance::of_exponent).fold(0.0, f64::max);
        Key { j, score, slope, exponent, weight: 0.0 }
    };
    case.visible(b, h, i).map(key).collect()
}

/// Pass 2: the weight of each key, and the log-sum-exp. A sink takes part in the sum but has no value to weigh.
fn softmax(keys: &mut [Key], sink: f64) -> f64 {
    // Subtracting the maximum changes nothing in the maths and keeps exp in range. `f64::max` skips NaN; the sum doesn't.
    let max = keys.iter().map(|key| key.score).fold(sink, f64::max);
    let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
    let mut sum = (sink - shift).exp();
    for key in &mut *keys {
        key.weight = (key.score - shift).exp();
        sum += key.weight;
    }
    // A sum of 0: no sink, and no key or none with a score above -inf. The weights are 0, the log-sum-exp is -inf.
    if sum != 0.0 {
        keys.iter_mut().for_each(|key| key.weight /= sum);
    }
    shift + sum.ln()
}

/// Pass 3: `Σ w v` and `Σ w |v|`.
fn weighted_sum(case: &Case<'_>, Row { batch: b, head: h, .. }: Row, keys: &[Key]) -> (Vec<f64>, Vec<f64>) {
    let mut o = vec![0.0; case.value_dim];
    let mut mag = vec![0.0; case.value_dim];
    for key in keys {
        for ((o, mag), &v) in o.iter_mut().zip(&mut mag).zip(case.v_row(b, h, key.j)) {
            let term = key.weight * f64::from(v);
            *o += term;
            *mag += term.abs();
        }
    }
    (o, mag)
}
