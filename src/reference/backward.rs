//! The gradients of attention, from the weights that the three passes of each row leave.

use core::ops::Range;

use super::attention::{Attended, Row, attend};
use super::case::{Case, expect_len};
use super::matrix::{dot, dot_rss};
use super::parallel;
use super::tolerance::{GradientTolerance, Tolerance};
use crate::error::{Error, Result};

/// The gradients of attention, in `f64`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gradients {
    /// With respect to `q`, in its shape: `(batch, q_heads, q_len, head_dim)`; `(total_q, q_heads, head_dim)` from
    /// [`attention_backward_packed`](super::attention_backward_packed).
    pub dq: Vec<f64>,
    /// With respect to `k`, in its shape: `(batch, kv_heads, kv_len, head_dim)`; `(total_kv, kv_heads, head_dim)` if packed.
    pub dk: Vec<f64>,
    /// With respect to `v`, in its shape: `(batch, kv_heads, kv_len, value_dim)`; `(total_kv, kv_heads, value_dim)` if packed.
    pub dv: Vec<f64>,
    /// With respect to the bias, in its own (broadcast) shape, if there is one. 0 for a bias of −∞.
    pub dbias: Option<Vec<f64>>,
    /// With respect to the sinks, `(q_heads)`, if there are any. 0 for a sink of −∞.
    pub dsinks: Option<Vec<f64>>,
    /// How far an engine that computes in `f32` may be off.
    pub tolerance: GradientTolerance,
}

/// The gradients of `Σ o · grad_o + Σ lse · grad_lse` (the second sum over the finite `lse`), where `o` and `lse` are those of
/// [`attention`](super::attention): `grad_o`, the `do` below, is `(batch, q_heads, q_len, value_dim)`; `grad_lse`, the `dlse` below, is
/// `(batch, q_heads, q_len)`, and zeros if it isn't given.
///
/// For each row `i` and the keys `j` that it may attend to, with `w_j = exp(s_j − lse)` and `slope_j` the derivative of softcap and score
/// mod (Dao et al. 2022, appendix B.2 and B.4, and what the options add to it):
///
/// ```text
/// dP_j = ⟨do, v_j⟩          delta = ⟨do, o⟩          dS_j = w_j (dP_j − delta + dlse)
/// dq_i  = softmax_scale Σ_j slope_j dS_j k_j         dk_j += softmax_scale slope_j dS_j q_i          dv_j += w_j do
/// dbias[b,h,i,j] += dS_j                             dsinks[h] += exp(sink[h] − lse) (dlse − delta)
/// ```
///
/// `dk` and `dv` of a KV head sum over its query heads, `dbias` over the axes along which the bias broadcasts. Nothing passes through a
/// masked key or a padding row, whatever is stored there. A row with nothing to attend to and a sink has `lse = sink[h]`, so that its
/// `grad_lse` goes to the sink, and no other gradient passes through it. Sums are added in the order of rows and keys.
///
/// A KV head's query heads, and a row of the bias, are computed by one thread. A bias costs a second run over the scores. Beside the
/// result there are magnitudes for the tolerance, as large again, and `O(kv_len)` for each thread.
///
/// # Errors
///
/// [`Error::Invalid`] if the case isn't [valid](Case::validate), if a gradient doesn't have the shape of its output, or if there is a
/// score mod without its derivative.
pub fn attention_backward(case: &Case<'_>, grad_o: &[f32], grad_lse: Option<&[f32]>) -> Result<Gradients> {
    Ok(backward(case, grad_o, grad_lse)?.finish(case))
}

/// The sums behind [`Gradients`], in the same shapes.
#[derive(Default)]
pub(super) struct Sums {
    pub(super) dq: Vec<Sum>,
    pub(super) dk: Vec<Sum>,
    pub(super) dv: Vec<Sum>,
    dbias: Vec<Sum>,
    /// One for each query head, whether or not it has a sink.
    pub(super) dsinks: Vec<Sum>,
    /// The tolerance of the forward pass.
    pub(super) forward: Tolerance,
}

/// A sum, and the sum of its terms' magnitudes.
#[derive(Clone, Copy, Default)]
pub(super) struct Sum {
    value: f64,
    mag: f64,
}

impl Sum {
    fn add(&mut self, term: Self) {
        self.value += term.value;
        self.mag += term.mag;
    }

    fn times(self, factor: f64) -> Self {
        Self { value: self.value * factor, mag: self.mag * factor.abs() }
    }
}

impl Sums {
    /// Of no rows yet.
    pub(super) fn of_heads(q_heads: usize) -> Self {
        Self { dsinks: vec![Sum::default(); q_heads], ..Self::default() }
    }

    /// Adds what is shared with other rows: the sinks of the heads from `head` on, and the tolerance.
    pub(super) fn add_shared(&mut self, head: usize, dsinks: Vec<Sum>, forward: Tolerance) {
        self.dsinks[head..].iter_mut().zip(dsinks).for_each(|(sum, term)| sum.add(term));
        self.forward = self.forward.max(forward);
    }

    pub(super) fn finish(self, case: &Case<'_>) -> Gradients {
        let split = |sums: Vec<Sum>| {
            let mag = sums.iter().map(|sum| sum.mag).fold(0.0, f64::max);
            (sums.into_iter().map(|sum| sum.value).collect::<Vec<_>>(), mag)
        };
        let (dq, dq_mag) = split(self.dq);
        let (dk, dk_mag) = split(self.dk);
        let (dv, dv_mag) = split(self.dv);
        let (dbias, dbias_mag) = split(self.dbias);
        let (dsinks, dsinks_mag) = split(self.dsinks);
        Gradients {
            dq,
            dk,
            dv,
            dbias: case.bias.map(|_| dbias),
            dsinks: case.sinks.map(|_| dsinks),
            tolerance: GradientTolerance { forward: self.forward, dq_mag, dk_mag, dv_mag, dbias_mag, dsinks_mag },
        }
    }
}

/// That a score mod comes with its derivative.
pub(super) fn check_derivative(case: &Case<'_>) -> Result<()> {
    if case.score_mod.is_some() && case.score_mod_derivative.is_none() {
        return Err(Error::invalid("gradients of a score_mod without score_mod_derivative, accepted: both"));
    }
    Ok(())
}

/// [`attention_backward`], before its sums are finished.
pub(super) fn backward(case: &Case<'_>, grad_o: &[f32], grad_lse: Option<&[f32]>) -> Result<Sums> {
    case.validate()?;
    check_derivative(case)?;
    let &Case { batch, q_heads, kv_heads, q_len, kv_len, .. } = case;
    expect_len("grad_o", grad_o.len(), &[batch, q_heads, q_len, case.value_dim])?;
    grad_lse.map_or(Ok(()), |grad_lse| expect_len("grad_lse", grad_lse.len(), &[batch, q_heads, q_len]))?;

    let problem = Problem { case, grad_o, grad_lse };
    let mut sums = Sums { dbias: problem.dbias(), ..Sums::of_heads(q_heads) };
    let work = case.rows().saturating_mul(kv_len).saturating_mul(case.head_dim + case.value_dim).saturating_mul(3);
    let groups = parallel::map(batch * kv_heads, work, |n| problem.group(n / kv_heads, n % kv_heads));
    for (n, group) in groups.into_iter().enumerate() {
        sums.dq.extend(group.dq);
        sums.dk.extend(group.dk);
        sums.dv.extend(group.dv);
        sums.add_shared(n % kv_heads * (q_heads / kv_heads), group.dsinks, group.forward);
    }
    Ok(sums)
}

/// What the gradients follow from.
struct Problem<'a> {
    case: &'a Case<'a>,
    grad_o: &'a [f32],
    grad_lse: Option<&'a [f32]>,
}

/// What passes through the softmax of one row.
struct RowGradient {
    row: Attended,
    /// With respect to the score of each key of the row.
    ds: Vec<Sum>,
    dsink: Sum,
}

impl Problem<'_> {
    fn grad_o_row(&self, row: Row) -> &[f32] {
        &self.grad_o[self.row_index(row) * self.case.value_dim..][..self.case.value_dim]
    }

    fn row_index(&self, Row { batch, head, row }: Row) -> usize {
        (batch * self.case.q_heads + head) * self.case.q_len + row
    }

    /// The gradients that one KV head's query heads share, or have for themselves.
    fn group(&self, b: usize, kv_head: usize) -> Sums {
        let &Case { q_len, kv_len, head_dim, value_dim, .. } = self.case;
        let group_size = self.case.q_heads / self.case.kv_heads;
        let mut sums = Sums {
            dq: vec![Sum::default(); group_size * q_len * head_dim],
            dk: vec![Sum::default(); kv_len * head_dim],
            dv: vec![Sum::default(); kv_len * value_dim],
            ..Sums::of_heads(group_size)
        };
        for n in 0..group_size {
            let h = kv_head * group_size + n;
            for i in 0..self.case.q_len_of(b) {
                let at = Row { batch: b, head: h, row: i };
                let RowGradient { row, ds, dsink } = self.through_softmax(at);
                let dq = &mut sums.dq[(n * q_len + i) * head_dim..][..head_dim];
                for (key, ds) in row.keys.iter().zip(ds) {
                    let ds = ds.times(self.case.scale() * key.slope);
                    let weight = Sum { value: key.weight, mag: key.weight };
                    add(dq, ds, self.case.k_row(b, h, key.j));
                    add(&mut sums.dk[key.j * head_dim..][..head_dim], ds, self.case.q_row(b, h, i));
                    add(&mut sums.dv[key.j * value_dim..][..value_dim], weight, self.grad_o_row(at));
                }
                sums.dsinks[n].add(dsink);
                sums.forward = sums.forward.max(row.tolerance);
            }
        }
        sums
    }

    /// `dS` of each key, and the same of the sink, whose `dP` is 0.
    fn through_softmax(&self, at: Row) -> RowGradient {
        let row = attend(self.case, at);
        let dlse = match self.grad_lse {
            Some(grad_lse) if row.lse.is_finite() => f64::from(grad_lse[self.row_index(at)]),
            _ => 0.0,
        };
        let delta = self.delta(&row, at);
        let ds = |weight: f64, dp: Sum| {
            let (value, mag) = (dp.value - delta.value + dlse, dp.mag + delta.mag + dlse.abs());
            Sum { value, mag }.times(weight)
        };
        let dp = |j| {
            let (value, rss) = dot_rss(self.grad_o_row(at), self.case.v_row(at.batch, at.head, j));
            Sum { value, mag: value.abs() + rss }
        };
        let keys = row.keys.iter().map(|key| ds(key.weight, dp(key.j))).collect();
        let dsink = match self.case.sink(at.head) {
            f64::NEG_INFINITY => Sum::default(), // none, whatever the rest is
            sink => ds((sink - row.lse).exp(), Sum::default()),
        };
        RowGradient { row, ds: keys, dsink }
    }

    /// `⟨do, o⟩`.
    fn delta(&self, row: &Attended, at: Row) -> Sum {
        if row.keys.is_empty() {
            return Sum::default(); // o is 0 and stays so: even a NaN in do is nothing to a sink
        }
        let (value, _) = dot(self.grad_o_row(at), &row.o);
        let (_, mag) = dot(self.grad_o_row(at), &row.mag);
        #[expect(clippy::cast_precision_loss, reason = "a value_dim past 2^53 doesn't fit in memory")]
        let value_dim = self.case.value_dim.max(1) as f64;
        Sum { value, mag: value.abs() + mag / value_dim.sqrt() }
    }

    /// The gradient of the bias, one of its rows (of `kv_len` elements, or 1) after another, each by itself: it sums over other rows of
    /// scores than a KV head does, and to keep `dS` of them all would take a score matrix. So they are computed again.
    fn dbias(&self) -> Vec<Sum> {
        let case = self.case;
        let Some(bias) = case.bias else { return Vec::new() };
        let [batch, heads, rows, keys] = bias.shape;
        let stored_row = |n: usize| {
            let mut sums = vec![Sum::default(); keys];
            for b in read_by(n / rows / heads, batch, case.batch) {
                for h in read_by(n / rows % heads, heads, case.q_heads) {
                    for i in read_by(n % rows, rows, case.q_len) {
                        let RowGradient { row, ds, .. } = self.through_softmax(Row { batch: b, head: h, row: i });
                        for (key, ds) in row.keys.iter().zip(ds) {
                            sums[if keys == 1 { 0 } else { key.j }].add(ds);
                        }
                    }
                }
            }
            sums
        };
        let work = case.rows().saturating_mul(case.kv_len).saturating_mul(case.head_dim + 2 * case.value_dim);
        parallel::map(batch * heads * rows, work, stored_row).into_iter().flatten().collect()
    }
}

/// Which positions along an axis of `full` read the stored position `at` of a tensor that has `stored` there.
fn read_by(at: usize, stored: usize, full: usize) -> Range<usize> {
    if stored == 1 { 0..full } else { at..at + 1 }
}

/// `sums += factor · x`.
fn add(sums: &mut [Sum], factor: Sum, x: &[f32]) {
    sums.iter_mut().zip(x).for_each(|(sum, &x)| sum.add(factor.times(f64::from(x))));
}
