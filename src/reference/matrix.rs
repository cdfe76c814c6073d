//! The parts that attention is made of: batched matrix products and the softmax of rows.

use super::case::{elements, expect_len};
use super::parallel;
use crate::error::Result;

/// A batched matrix product in `f64`.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// `(batch, m, n)`, row-major.
    pub c: Vec<f64>,
    /// The largest `Σ |a| |b|` behind one element. The same sum in arithmetic of unit roundoff `u`, added in any order, is off by at most
    /// `(k + 1) u mag` to first order (Higham 2002, §3.1).
    pub mag: f64,
}

/// `C = A · B` for each batch entry: `a` is `(batch, m, k)`, `b` is `(batch, k, n)`, `C` is `(batch, m, n)`, all row-major.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if a slice doesn't have the length of its shape.
pub fn matmul(batch: usize, [m, k, n]: [usize; 3], a: &[f32], b: &[f32]) -> Result<Product> {
    expect_len("b", b.len(), &[batch, k, n])?;
    let transposed: Vec<f32> = (0..b.len()).map(|x| b[x / (n * k) * n * k + x % k * n + x / k % n]).collect();
    matmul_transposed(batch, [m, k, n], a, &transposed)
}

/// `C = A · Bᵀ` for each batch entry: `a` is `(batch, m, k)`, `b` is `(batch, n, k)`, `C` is `(batch, m, n)`, all row-major.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if a slice doesn't have the length of its shape.
pub fn matmul_transposed(batch: usize, [m, k, n]: [usize; 3], a: &[f32], b: &[f32]) -> Result<Product> {
    expect_len("a", a.len(), &[batch, m, k])?;
    expect_len("b", b.len(), &[batch, n, k])?;
    if elements("c", &[batch, m, n])? == 0 {
        return Ok(Product { c: Vec::new(), mag: 0.0 });
    }
    let row = |r: usize| {
        let entry = r / m;
        let column = |j| dot(&a[r * k..][..k], &b[(entry * n + j) * k..][..k]);
        (0..n).map(column).collect::<Vec<_>>()
    };
    let work = batch.saturating_mul(m).saturating_mul(n).saturating_mul(k);
    let (c, mags): (Vec<_>, Vec<_>) = parallel::map(batch * m, work, row).into_iter().flatten().unzip();
    Ok(Product { c, mag: mags.into_iter().fold(0.0, f64::max) })
}

/// The softmax of rows, in `f64`.
#[derive(Debug, Clone, PartialEq)]
pub struct Softmax {
    /// `(rows, columns)`, row-major: `exp(x − lse)`. 0 in a row that is −∞ throughout.
    pub p: Vec<f64>,
    /// `(rows)`: `ln Σ exp(x)`. −∞ for a row that is −∞ throughout.
    pub lse: Vec<f64>,
}

/// The softmax of each row of `x`, `(rows, columns)`, row-major. An element of −∞ is masked: its weight is 0.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if `x` doesn't have `rows · columns` elements.
pub fn softmax_rows(rows: usize, columns: usize, x: &[f32]) -> Result<Softmax> {
    expect_len("x", x.len(), &[rows, columns])?;
    elements("lse", &[rows])?;
    let mut result = Softmax { p: Vec::with_capacity(x.len()), lse: Vec::with_capacity(rows) };
    for row in 0..rows {
        let x = &x[row * columns..(row + 1) * columns];
        let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let exps = x.iter().map(|&x| (f64::from(x) - shift).exp());
        let sum: f64 = exps.clone().sum();
        result.p.extend(exps.map(|e| if sum == 0.0 { 0.0 } else { e / sum }));
        result.lse.push(shift + sum.ln());
    }
    Ok(result)
}

/// `(Σ a b, Σ |a b|)`.
pub(super) fn dot<B: Copy + Into<f64>>(a: &[f32], b: &[B]) -> (f64, f64) {
    sums(a, b, f64::abs)
}

/// `(Σ a b, √ Σ (a b)²)`.
pub(super) fn dot_rss(a: &[f32], b: &[f32]) -> (f64, f64) {
    let (sum, squares) = sums(a, b, |term| term * term);
    (sum, squares.sqrt())
}

/// `(Σ a b, Σ size(a b))`. Eight interleaved sums, so that no addition waits for the one before.
fn sums<B: Copy + Into<f64>>(a: &[f32], b: &[B], size: impl Fn(f64) -> f64) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sum, mut sizes) = ([0.0; LANES], [0.0; LANES]);
    let mut add = |lane: usize, a: f32, b: B| {
        let term = f64::from(a) * b.into();
        sum[lane] += term;
        sizes[lane] += size(term);
    };
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (lane, (&a, &b)) in a.remainder().iter().zip(b.remainder()).enumerate() {
        add(lane, a, b);
    }
    for (a, b) in a.zip(b) {
        (0..LANES).for_each(|lane| add(lane, a[lane], b[lane]));
    }
    (sum.into_iter().sum(), sizes.into_iter().sum())
}
