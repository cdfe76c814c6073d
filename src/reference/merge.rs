//! Merging attention over some keys with attention over others.

use crate::error::{Error, Result};

/// The state that attention over two disjoint sets of keys has together, from those of either: o (rows, `value_dim`) and lse (rows)
/// of each.
///
/// ```text
/// lse = ln( exp(lse_a) + exp(lse_b) )          o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b
/// ```
///
/// A state of lse −∞ has no part in it, whatever its o; of two such the result is 0 and −∞.
///
/// # Errors
///
/// [`Error::Invalid`] if the lengths don't fit together.
pub fn merge(value_dim: usize, [o_a, o_b]: [&[f64]; 2], [lse_a, lse_b]: [&[f64]; 2]) -> Result<(Vec<f64>, Vec<f64>)> {
    let rows = lse_a.len();
    for (name, len, expected) in
        [("o_a", o_a.len(), rows * value_dim), ("o_b", o_b.len(), rows * value_dim), ("lse_b", lse_b.len(), rows)]
    {
        if len != expected {
            return Err(Error::invalid(format!("{name} of {len} elements, accepted: {expected}")));
        }
    }
    let (mut o, mut lse) = (Vec::with_capacity(o_a.len()), Vec::with_capacity(rows));
    for row in 0..rows {
        let states = [(o_a, lse_a[row]), (o_b, lse_b[row])];
        let present = states.into_iter().filter(|&(_, lse)| lse != f64::NEG_INFINITY);
        let largest = present.clone().map(|(_, lse)| lse).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = present.clone().map(|(_, lse)| (lse - largest).exp()).sum();
        for column in row * value_dim..(row + 1) * value_dim {
            let weighted = present.clone().map(|(o, lse)| (lse - largest).exp() * o[column]);
            o.push(if sum == 0.0 { 0.0 } else { weighted.sum::<f64>() / sum });
        }
        lse.push(largest + sum.ln());
    }
    Ok((o, lse))
}
