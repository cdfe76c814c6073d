//! Packed batches: sequences of different lengths one after another, each computed by itself.

use core::ops::Range;

use super::attention::{Output, attention};
use super::backward::{Gradients, Sums, backward, check_derivative};
use super::case::{Case, MaskMod, ScoreMod, expect_len};
use crate::error::{Error, Result};

/// Attention of a packed batch of sequences of different lengths, each computed by itself.
///
/// Sequence `n` has the rows `cu_seqlens_q[n] .. cu_seqlens_q[n + 1]` of `q` and `cu_seqlens_kv[n] .. cu_seqlens_kv[n + 1]` of `k`
/// and `v`. `case` is read in the packed layout: `batch` is the number of sequences, `q_len` and `kv_len` are the totals, and
///
/// - `q` is `(total_q, q_heads, head_dim)`, `k` `(total_kv, kv_heads, head_dim)`, `v` `(total_kv, kv_heads, value_dim)`;
/// - the output's `o` is `(total_q, q_heads, value_dim)`, its `lse` `(q_heads, total_q)`;
/// - mods see the sequence as `b` and positions within it; `bias`, `mask`, `q_lens` and `kv_lens` have no packed form.
///
/// # Errors
///
/// [`Error::Invalid`] if the shapes don't fit together, if an option without a packed form is given, or if the boundaries don't start at
/// 0, rise, and end at the total.
pub fn attention_packed(case: &Case<'_>, cu_seqlens_q: &[u32], cu_seqlens_kv: &[u32]) -> Result<Output> {
    let &Case { q_heads, q_len: total_q, value_dim, .. } = case;
    let mut output = Output::default();
    for_each_sequence(case, cu_seqlens_q, cu_seqlens_kv, |sequence, _| {
        let one = attention(sequence)?;
        output.o.extend(swap(&one.o, [q_heads, sequence.q_len, value_dim]));
        output.lse.extend(swap(&one.lse, [q_heads, sequence.q_len, 1]));
        output.tolerance = output.tolerance.max(one.tolerance);
        Ok(())
    })?;
    output.lse = swap(&output.lse, [total_q, q_heads, 1]);
    Ok(output)
}

/// The gradients of a packed batch of sequences, each computed by itself: [`attention_backward`](super::attention_backward) of
/// [`attention_packed`].
///
/// `case` and the boundaries are those of [`attention_packed`], `grad_o` is `(total_q, q_heads, value_dim)`, `grad_lse`
/// `(q_heads, total_q)`. `dq`, `dk` and `dv` have the shapes of `q`, `k` and `v`; `dsinks` sums over the sequences.
///
/// # Errors
///
/// [`Error::Invalid`] for the reasons of [`attention_packed`], if a gradient doesn't have the shape of its output, or if there is a score
/// mod without its derivative.
pub fn attention_backward_packed(
    case: &Case<'_>,
    cu_seqlens_q: &[u32],
    cu_seqlens_kv: &[u32],
    grad_o: &[f32],
    grad_lse: Option<&[f32]>,
) -> Result<Gradients> {
    let &Case { q_heads, kv_heads, q_len: total_q, head_dim, value_dim, .. } = case;
    check_derivative(case)?;
    expect_len("grad_o", grad_o.len(), &[total_q, q_heads, value_dim])?;
    grad_lse.map_or(Ok(()), |grad_lse| expect_len("grad_lse", grad_lse.len(), &[q_heads, total_q]))?;
    let grad_lse = grad_lse.map(|grad_lse| swap(grad_lse, [q_heads, total_q, 1]));
    let mut sums = Sums::of_heads(q_heads);
    for_each_sequence(case, cu_seqlens_q, cu_seqlens_kv, |sequence, rows| {
        let &Case { q_len, kv_len, .. } = sequence;
        let grad_lse = grad_lse.as_ref().map(|grad_lse| heads_first(grad_lse, rows.clone(), q_heads, 1));
        let one = backward(sequence, &heads_first(grad_o, rows, q_heads, value_dim), grad_lse.as_deref())?;
        sums.dq.extend(swap(&one.dq, [q_heads, q_len, head_dim]));
        sums.dk.extend(swap(&one.dk, [kv_heads, kv_len, head_dim]));
        sums.dv.extend(swap(&one.dv, [kv_heads, kv_len, value_dim]));
        sums.add_shared(0, one.dsinks, one.forward);
        Ok(())
    })?;
    Ok(sums.finish(case))
}

/// Hands each sequence to `f` as a case of one batch entry, heads outermost, with its rows of `q`.
fn for_each_sequence(
    case: &Case<'_>,
    cu_seqlens_q: &[u32],
    cu_seqlens_kv: &[u32],
    mut f: impl FnMut(&Case<'_>, Range<usize>) -> Result<()>,
) -> Result<()> {
    let &Case { batch, q_heads, kv_heads, q_len: total_q, kv_len: total_kv, head_dim, value_dim, .. } = case;
    for (name, given) in [
        ("bias", case.bias.is_some()),
        ("mask", case.mask.is_some()),
        ("q_lens", case.q_lens.is_some()),
        ("kv_lens", case.kv_lens.is_some()),
    ] {
        if given {
            return Err(Error::invalid(format!("{name} given with a packed batch, accepted: none")));
        }
    }
    // The shapes of one long sequence, so that the lengths of all tensors are checked; then the boundaries and the slopes.
    Case { batch: 1, alibi_slopes: None, ..*case }.validate()?;
    check_boundaries("cu_seqlens_q", cu_seqlens_q, batch, total_q)?;
    check_boundaries("cu_seqlens_kv", cu_seqlens_kv, batch, total_kv)?;
    let per_sequence = |slopes: &&[f32]| slopes.len() != q_heads;
    if let Some(slopes) = case.alibi_slopes.filter(per_sequence) {
        expect_len("alibi_slopes", slopes.len(), &[batch, q_heads])?;
    }

    for n in 0..batch {
        let rows = cu_seqlens_q[n] as usize..cu_seqlens_q[n + 1] as usize;
        let keys = cu_seqlens_kv[n] as usize..cu_seqlens_kv[n + 1] as usize;
        let score_mod = case.score_mod.map(|f| move |s, _, h, i, j| f.0(s, n, h, i, j));
        let score_mod_derivative = case.score_mod_derivative.map(|f| move |s, _, h, i, j| f.0(s, n, h, i, j));
        let mask_mod = case.mask_mod.map(|f| move |_, h, i, j| f.0(n, h, i, j));
        let sequence = Case {
            batch: 1,
            q_len: rows.len(),
            kv_len: keys.len(),
            q: &heads_first(case.q, rows.clone(), q_heads, head_dim),
            k: &heads_first(case.k, keys.clone(), kv_heads, head_dim),
            v: &heads_first(case.v, keys, kv_heads, value_dim),
            alibi_slopes: case
                .alibi_slopes
                .map(|slopes| if slopes.len() == q_heads { slopes } else { &slopes[n * q_heads..(n + 1) * q_heads] }),
            score_mod: score_mod.as_ref().map(|f| ScoreMod(f)),
            score_mod_derivative: score_mod_derivative.as_ref().map(|f| ScoreMod(f)),
            mask_mod: mask_mod.as_ref().map(|f| MaskMod(f)),
            ..*case
        };
        f(&sequence, rows)?;
    }
    Ok(())
}

fn check_boundaries(name: &str, boundaries: &[u32], sequences: usize, total: usize) -> Result<()> {
    let ends = boundaries.first() == Some(&0) && boundaries.last().is_some_and(|&last| last as usize == total);
    if boundaries.len() != sequences + 1 || !ends || !boundaries.is_sorted() {
        return Err(Error::invalid(format!(
            "{name} = {boundaries:?}, accepted: {} numbers that start at 0, never fall, and end at {total}",
            sequences + 1
        )));
    }
    Ok(())
}

/// Some rows of a `(total, heads, dim)` tensor, as `(heads, rows, dim)`.
fn heads_first(x: &[f32], rows: Range<usize>, heads: usize, dim: usize) -> Vec<f32> {
    let shape = [rows.len(), heads, dim];
    swap(&x[rows.start * heads * dim..rows.end * heads * dim], shape)
}

/// `(outer, inner, dim)` to `(inner, outer, dim)`.
fn swap<T: Copy>(x: &[T], [outer, inner, dim]: [usize; 3]) -> Vec<T> {
    let row = |n: usize| &x[(n % outer * inner + n / outer) * dim..][..dim];
    (0..outer * inner).flat_map(row).copied().collect()
}
