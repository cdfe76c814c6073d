//! [`Attention`]: how scores are made and which keys a query may see.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::dims::{Align, DType};

/// A user's WGSL that changes scores: see [`Attention::score_mod`]. Checked when it is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ScoreMod {
    pub(crate) text: Arc<ModText>,
    /// For gradients.
    pub(crate) derivative: Option<Arc<ModText>>,
}

/// A user's WGSL that hides keys: see [`Attention::mask_mod`]. Checked when it is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MaskMod(pub(crate) Arc<ModText>);

/// What is known of a user's WGSL since it was checked.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct ModText {
    pub(crate) wgsl: Arc<str>,
    /// Names that it declares outside functions, its own function's left out.
    pub(crate) declares: BTreeSet<String>,
    /// All its words.
    pub(crate) says: BTreeSet<String>,
    /// Whether it may run for long: llvmpipe counts a mod's loops as the kernel's.
    pub(crate) has_loops: bool,
}

/// How scores are made and which keys a query may see.
///
/// Options combine: masks by intersection, whatever adds to a score by addition, in the order
///
/// ```text
/// s = softmax_scale · ⟨q, k⟩;  softcap;  score_mod;  ALiBi;  bias
/// ```
///
/// Tensors (bias, boolean mask, ranges, sinks, what mods read) come with the call: see [`crate::Inputs`].
///
/// ```
/// use tilewise::{Align, Attention};
/// let mistral = Attention::causal().window(Some(4095), None);
/// let gemma = Attention::causal().softcap(50.0).softmax_scale(0.0625);
/// let bloom = Attention::causal().alibi(tilewise::alibi_slopes(12));
/// let cached = Attention::causal().kv_lens([37, 5, 128]).align(Align::BottomRight);
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Attention {
    pub(crate) causal: bool,
    pub(crate) align: Align,
    pub(crate) softmax_scale: Option<f32>,
    pub(crate) window_left: Option<u32>,
    pub(crate) window_right: Option<u32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi_slopes: Option<Arc<[f32]>>,
    pub(crate) score_mod: Option<ScoreMod>,
    pub(crate) mask_mod: Option<MaskMod>,
    pub(crate) q_lens: Option<Arc<[u32]>>,
    pub(crate) kv_lens: Option<Arc<[u32]>>,
    pub(crate) packed: Option<[Arc<[u32]>; 2]>,
    pub(crate) output_dtype: Option<DType>,
}

impl Attention {
    /// Every query sees every key; the scale is 1/√`head_dim`.
    pub fn full() -> Self {
        Self::default()
    }

    /// Query at position `p` sees keys `0..=p` (the look-ahead mask), aligned bottom-right. See [`Align`].
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// Sets the corner that positions are counted from: for causality, windows and ALiBi.
    #[must_use]
    pub fn align(self, align: Align) -> Self {
        Self { align, ..self }
    }

    /// Multiplies q·k by `scale` instead of 1/√`head_dim`. 0 is a scale like any other; NaN and infinities are refused.
    #[must_use]
    pub fn softmax_scale(self, scale: f32) -> Self {
        Self { softmax_scale: Some(scale), ..self }
    }

    /// A sliding window: a query at position `p` sees the keys `p - left ..= p + right`, both ends included; `None` is no bound. A model
    /// whose window counts the token itself, "the last 4096 tokens", has `left` 4095. Beside [`Attention::causal`], `right` has no effect.
    #[must_use]
    pub fn window(self, left: Option<u32>, right: Option<u32>) -> Self {
        Self { window_left: left, window_right: right, ..self }
    }

    /// Caps scores: `s ← softcap · tanh(s / softcap)`, after the scale and before all else (Gemma 2). Finite and above 0.
    #[must_use]
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// ALiBi: `s ← s - slope · |p - j|` for a query at position `p` and key `j` (Press et al. 2021). One slope a query head,
    /// (`q_heads`), or one a batch entry and head, (`batch`, `q_heads`). [`alibi_slopes`] has the paper's.
    #[must_use]
    pub fn alibi(self, slopes: impl Into<Arc<[f32]>>) -> Self {
        Self { alibi_slopes: Some(slopes.into()), ..self }
    }

    /// Any other change of scores, after the softcap: the WGSL of a function `score_mod`.
    #[must_use]
    pub fn score_mod(self, score_mod: ScoreMod) -> Self {
        Self { score_mod: Some(score_mod), ..self }
    }

    /// Any other mask, beside all the rest: the WGSL of a function `mask_mod`.
    #[must_use]
    pub fn mask_mod(self, mask_mod: MaskMod) -> Self {
        Self { mask_mod: Some(mask_mod), ..self }
    }

    /// Keys in use of each batch entry, at most `kv_len`, which is the capacity then. What lies behind them has no effect, and
    /// bottom-right positions count from each entry's own length.
    #[must_use]
    pub fn kv_lens(self, lens: impl Into<Arc<[u32]>>) -> Self {
        Self { kv_lens: Some(lens.into()), ..self }
    }

    /// Query rows in use of each batch entry, at most `q_len`. The rows behind them are padding: o = 0, lse = -inf.
    #[must_use]
    pub fn q_lens(self, lens: impl Into<Arc<[u32]>>) -> Self {
        Self { q_lens: Some(lens.into()), ..self }
    }

    /// A packed batch: sequences of different lengths one after the other, without padding. Sequence `n` has the rows
    /// `cu_seqlens_q[n] .. cu_seqlens_q[n + 1]` of q and `cu_seqlens_kv[n] .. cu_seqlens_kv[n + 1]` of k and v. Both start at 0, never
    /// fall, and end at the totals, which are the `q_len` and `kv_len` of [`crate::Dims`]; its `batch` is the number of sequences.
    ///
    /// q is (`total_q`, `q_heads`, `head_dim`), k (`total_kv`, `kv_heads`, `head_dim`), v and o likewise; lse is (`q_heads`, `total_q`).
    /// Mods see the sequence as `b` and rows and keys within it.
    ///
    /// ```no_run
    /// use tilewise::{Attention, Engine};
    /// # fn main() -> tilewise::Result<()> {
    /// let engine = Engine::new()?;
    /// // Sequences of 3, 0 and 5 tokens, 4 heads of 64, each causal by itself.
    /// let x = engine.upload(&vec![0.1f32; 8 * 4 * 64], [8, 4, 64])?;
    /// let cu_seqlens = [0, 3, 3, 8];
    /// let out = engine.attention(&x, &x, &x, &Attention::causal().packed(cu_seqlens, cu_seqlens))?;
    /// assert_eq!(out.o.shape(), [8, 4, 64]);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn packed(self, cu_seqlens_q: impl Into<Arc<[u32]>>, cu_seqlens_kv: impl Into<Arc<[u32]>>) -> Self {
        Self { packed: Some([cu_seqlens_q.into(), cu_seqlens_kv.into()]), ..self }
    }

    /// How [`crate::Engine::attention`] stores o. Without it as q is stored.
    #[must_use]
    pub fn output_dtype(self, dtype: DType) -> Self {
        Self { output_dtype: Some(dtype), ..self }
    }

    /// Whether the look-ahead mask is on.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The corner that positions are counted from.
    pub fn alignment(&self) -> Align {
        self.align
    }

    /// Whether the batch is packed.
    pub fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// How far a query sees to the left and right of its position; None is no bound. Causality is a bound of 0 on the right.
    pub(crate) fn reach(&self) -> [Option<u32>; 2] {
        let right = if self.causal { Some(0) } else { self.window_right };
        [self.window_left, right]
    }
}

/// The slopes of ALiBi for a number of heads, after the reference implementation of Press et al. 2021: a geometric sequence from
/// 2^(-8/n) for n heads, a power of two; else those of the power of two below, and every other one of the power above.
///
/// ```
/// assert_eq!(tilewise::alibi_slopes(2), [0.0625, 0.00390625]);
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let geometric = |count: usize| (1..=count).map(move |n| 2.0_f64.powf(-8.0 * n as f64 / count as f64));
    let below = if heads == 0 { 0 } else { 1 << heads.ilog2() };
    let rest = geometric(2 * below).step_by(2).take(heads - below);
    #[expect(clippy::cast_possible_truncation, reason = "slopes are f32")]
    geometric(below).chain(rest).map(|slope| slope as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// E5 of the field cases.
    #[test]
    fn e5_slopes_of_any_number_of_heads() {
        let powers = |exponents: &[f32]| exponents.iter().map(|it| 2.0_f32.powf(*it)).collect::<Vec<_>>();
        let eight = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0];
        assert_eq!(alibi_slopes(8), powers(&eight));
        assert_eq!(alibi_slopes(6), powers(&[-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]));
        assert_eq!(alibi_slopes(12), powers(&[&eight[..], &[-0.5, -1.5, -2.5, -3.5]].concat()));
        assert_eq!(alibi_slopes(1), powers(&[-8.0]));
        assert!(alibi_slopes(0).is_empty());
    }
}
