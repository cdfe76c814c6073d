//! [`Case`]: one attention problem with its data, what makes it valid, and which keys a row may attend to.

use core::fmt;

use crate::error::{Error, Result};

/// Which corner of the score matrix the causal diagonal and the windows are aligned to.
///
/// Query row `i` stands at key position `p = i + offset`. Causal masks for `q_len` 2, `kv_len` 5 and for `q_len` 5, `kv_len` 2:
///
/// ```text
///  BottomRight            TopLeft
///  1 1 1 1 0    0 0       1 0 0 0 0    1 0
///  1 1 1 1 1    0 0       1 1 0 0 0    1 1
///               0 0                    1 1
///               1 0                    1 1
///               1 1                    1 1
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Align {
    /// `offset = kv_len − q_len` (signed, per batch entry): the last query sees the last key. What a key/value cache wants.
    #[default]
    BottomRight,
    /// `offset = 0`: the first query stands at the first key.
    TopLeft,
}

/// A tensor that broadcasts to `(batch, q_heads, q_len, kv_len)`: each of the four sizes is the full one or 1. Dense, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Broadcast<'a, T> {
    /// The elements, as many as `shape` says.
    pub data: &'a [T],
    /// The stored sizes of `(batch, q_heads, q_len, kv_len)`.
    pub shape: [usize; 4],
}

impl<T: Copy> Broadcast<'_, T> {
    fn at(&self, position: [usize; 4]) -> T {
        let mut index = 0;
        for (size, position) in self.shape.into_iter().zip(position) {
            index = index * size + if size == 1 { 0 } else { position };
        }
        self.data[index]
    }

    fn validate(&self, name: &str, full: [usize; 4]) -> Result<()> {
        if self.shape.into_iter().zip(full).any(|(size, full)| size != 1 && size != full) {
            return Err(Error::invalid(format!(
                "{name} shape = {:?}, accepted: (batch, q_heads, q_len, kv_len) = {full:?} with any size replaced by 1",
                self.shape
            )));
        }
        expect_len(name, self.data.len(), &self.shape)
    }
}

/// A function `(s, b, h, i, j) -> s` applied to each score after the softcap, or the derivative of one: batch entry, query head, query
/// row, key.
#[derive(Clone, Copy)]
pub struct ScoreMod<'a>(pub &'a (dyn Fn(f64, usize, usize, usize, usize) -> f64 + Sync));

/// A function `(b, h, i, j) -> may attend`, beside the other masks: batch entry, query head, query row, key.
#[derive(Clone, Copy)]
pub struct MaskMod<'a>(pub &'a (dyn Fn(usize, usize, usize, usize) -> bool + Sync));

impl fmt::Debug for ScoreMod<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScoreMod(..)")
    }
}

impl fmt::Debug for MaskMod<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MaskMod(..)")
    }
}

/// One attention problem with its data. Give the shape and what is wanted; leave the rest to `..Case::default()`.
///
/// Tensors are `f32` slices because every storage type (`f32`, `f16`, `bf16`) widens to `f32` exactly: these are the very numbers that
/// the device holds, rounded to its storage type by the caller. All arithmetic is `f64`. Tensors are dense and row-major, the last axis
/// contiguous. Masks, causal, window and lengths combine by intersection; biases add.
#[derive(Debug, Clone, Copy, Default)]
pub struct Case<'a> {
    /// Number of batch entries. May be 0, as may `q_len`, `kv_len` and `value_dim`.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`. Query head `h` reads KV head `h / (q_heads / kv_heads)`.
    pub q_heads: usize,
    /// Key/value heads, at least 1.
    pub kv_heads: usize,
    /// Query rows per batch entry.
    pub q_len: usize,
    /// Keys per batch entry; the capacity, if `kv_lens` says that fewer are in use.
    pub kv_len: usize,
    /// Width of a query and a key, at least 1.
    pub head_dim: usize,
    /// Width of a value and of an output row.
    pub value_dim: usize,

    /// Queries, `(batch, q_heads, q_len, head_dim)`.
    pub q: &'a [f32],
    /// Keys, `(batch, kv_heads, kv_len, head_dim)`.
    pub k: &'a [f32],
    /// Values, `(batch, kv_heads, kv_len, value_dim)`.
    pub v: &'a [f32],

    /// What `⟨q, k⟩` is multiplied by. `None`: `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f64>,
    /// Whether key `j` is masked for `j > p`.
    pub causal: bool,
    /// What position `p` a query row has: for `causal`, the windows and ALiBi.
    pub align: Align,
    /// Keys with `j < p − window_left` are masked.
    pub window_left: Option<u32>,
    /// Keys with `j > p + window_right` are masked.
    pub window_right: Option<u32>,
    /// `s ← softcap · tanh(s / softcap)`; finite and above 0.
    pub softcap: Option<f64>,
    /// Any other change of a score, after the softcap.
    pub score_mod: Option<ScoreMod<'a>>,
    /// The derivative of `score_mod` by `s`, at the same `s`: for gradients only.
    pub score_mod_derivative: Option<ScoreMod<'a>>,
    /// `s ← s − slope · |p − j|`. One slope per head, `(q_heads)`, or per batch entry and head, `(batch, q_heads)`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `s ← s + bias`; a bias of −∞ masks the key.
    pub bias: Option<Broadcast<'a, f32>>,
    /// True where the query may attend.
    pub mask: Option<Broadcast<'a, bool>>,
    /// Any other mask.
    pub mask_mod: Option<MaskMod<'a>>,
    /// One score per query head, `(q_heads)`, that takes part in the softmax and has no value. −∞ means none.
    pub sinks: Option<&'a [f32]>,
    /// Keys in use per batch entry, `(batch)`, each at most `kv_len`.
    pub kv_lens: Option<&'a [u32]>,
    /// Query rows in use per batch entry, `(batch)`, each at most `q_len`. The rows past it are padding: `o = 0`, `lse = −∞`.
    pub q_lens: Option<&'a [u32]>,
}

impl Case<'_> {
    /// Whether the shapes and values fit together. Everything in this module that takes a case checks this first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the value received and the values accepted.
    pub fn validate(&self) -> Result<()> {
        let &Self { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self;
        if kv_heads == 0 || q_heads % kv_heads != 0 {
            return Err(Error::invalid(format!(
                "q_heads = {q_heads} with kv_heads = {kv_heads}, accepted: kv_heads of at least 1 and q_heads a multiple of it"
            )));
        }
        if head_dim == 0 {
            return Err(Error::invalid("head_dim = 0, accepted: 1 or more"));
        }
        expect_len("q", self.q.len(), &[batch, q_heads, q_len, head_dim])?;
        expect_len("k", self.k.len(), &[batch, kv_heads, kv_len, head_dim])?;
        expect_len("v", self.v.len(), &[batch, kv_heads, kv_len, value_dim])?;
        elements("o", &[batch, q_heads, q_len, value_dim])?;
        if let Some(scale) = self.softmax_scale.filter(|scale| !scale.is_finite()) {
            return Err(Error::invalid(format!("softmax_scale = {scale}, accepted: any finite number")));
        }
        if let Some(softcap) = self.softcap.filter(|&softcap| !(softcap > 0.0 && softcap.is_finite())) {
            return Err(Error::invalid(format!("softcap = {softcap}, accepted: a finite number above 0")));
        }
        if self.score_mod_derivative.is_some() && self.score_mod.is_none() {
            return Err(Error::invalid(
                "score_mod_derivative given without score_mod, accepted: both, or score_mod alone",
            ));
        }
        if let Some(slopes) = self.alibi_slopes.filter(|slopes| slopes.len() != q_heads) {
            expect_len("alibi_slopes", slopes.len(), &[batch, q_heads])?;
        }
        let full = [batch, q_heads, q_len, kv_len];
        self.bias.map_or(Ok(()), |bias| bias.validate("bias", full))?;
        self.mask.map_or(Ok(()), |mask| mask.validate("mask", full))?;
        self.sinks.map_or(Ok(()), |sinks| expect_len("sinks", sinks.len(), &[q_heads]))?;
        for (name, lens, capacity) in [("q_lens", self.q_lens, q_len), ("kv_lens", self.kv_lens, kv_len)] {
            let Some(lens) = lens else { continue };
            expect_len(name, lens.len(), &[batch])?;
            if let Some((b, len)) = lens.iter().enumerate().find(|&(_, &len)| len as usize > capacity) {
                return Err(Error::invalid(format!("{name}[{b}] = {len}, accepted: at most {capacity}")));
            }
        }
        Ok(())
    }

    /// How many rows there are: `batch · q_heads · q_len`.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.q_heads * self.q_len
    }

    pub(super) fn scale(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a head_dim past 2^53 doesn't fit in memory")]
        self.softmax_scale.unwrap_or_else(|| 1.0 / (self.head_dim as f64).sqrt())
    }

    pub(super) fn q_row(&self, b: usize, h: usize, i: usize) -> &[f32] {
        let start = ((b * self.q_heads + h) * self.q_len + i) * self.head_dim;
        &self.q[start..start + self.head_dim]
    }

    pub(super) fn k_row(&self, b: usize, h: usize, j: usize) -> &[f32] {
        let start = ((b * self.kv_heads + self.kv_head(h)) * self.kv_len + j) * self.head_dim;
        &self.k[start..start + self.head_dim]
    }

    pub(super) fn v_row(&self, b: usize, h: usize, j: usize) -> &[f32] {
        let start = ((b * self.kv_heads + self.kv_head(h)) * self.kv_len + j) * self.value_dim;
        &self.v[start..start + self.value_dim]
    }

    fn kv_head(&self, h: usize) -> usize {
        h / (self.q_heads / self.kv_heads)
    }

    pub(super) fn sink(&self, h: usize) -> f64 {
        self.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]))
    }

    /// `−slope · |p − j|`, if there are slopes.
    pub(super) fn alibi(&self, b: usize, h: usize, i: usize, j: usize) -> Option<f64> {
        let slopes = self.alibi_slopes?;
        let slope = if slopes.len() == self.q_heads { slopes[h] } else { slopes[b * self.q_heads + h] };
        #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^53")]
        let distance = self.position(b, i).abs_diff(signed(j)) as f64;
        Some(-f64::from(slope) * distance)
    }

    pub(super) fn bias(&self, b: usize, h: usize, i: usize, j: usize) -> Option<f64> {
        self.bias.map(|bias| f64::from(bias.at([b, h, i, j])))
    }

    /// The keys that a row may attend to, in order. Nothing of a key that isn't listed is ever read.
    pub(super) fn visible(&self, b: usize, h: usize, i: usize) -> impl Iterator<Item = usize> {
        let p = self.position(b, i);
        (0..self.kv_len_of(b)).filter(move |&key| {
            let j = signed(key);
            (!self.causal || j <= p)
                && self.window_left.is_none_or(|left| j >= p - i64::from(left))
                && self.window_right.is_none_or(|right| j <= p + i64::from(right))
                && self.mask.is_none_or(|mask| mask.at([b, h, i, key]))
                && self.bias.is_none_or(|bias| bias.at([b, h, i, key]) != f32::NEG_INFINITY)
                && self.mask_mod.is_none_or(|mask| mask.0(b, h, i, key))
        })
    }

    pub(super) fn q_len_of(&self, b: usize) -> usize {
        self.q_lens.map_or(self.q_len, |lens| lens[b] as usize)
    }

    fn kv_len_of(&self, b: usize) -> usize {
        self.kv_lens.map_or(self.kv_len, |lens| lens[b] as usize)
    }

    /// The position `p` of a query row on the axis of keys.
    fn position(&self, b: usize, i: usize) -> i64 {
        match self.align {
            Align::BottomRight => signed(i) + signed(self.kv_len_of(b)) - signed(self.q_len_of(b)),
            Align::TopLeft => signed(i),
        }
    }
}

#[expect(clippy::cast_possible_wrap, reason = "lengths of slices in memory are below 2^63")]
fn signed(length: usize) -> i64 {
    length as i64
}

/// The number of elements of a shape. Zero sizes are fine, sizes that together can't be held in memory are not.
pub(super) fn elements(name: &str, shape: &[usize]) -> Result<usize> {
    // Zeros count as 1 here, so that no product of some of the sizes can overflow either.
    let product = shape.iter().try_fold(8, |bytes: isize, &size| bytes.checked_mul(isize::try_from(size.max(1)).ok()?));
    if product.is_none() {
        return Err(Error::invalid(format!(
            "{name} of shape {shape:?}, accepted: sizes whose product is at most {}",
            isize::MAX / 8
        )));
    }
    Ok(shape.iter().product())
}

/// Checks that a slice of `len` elements has the shape `shape`.
pub(super) fn expect_len(name: &str, len: usize, shape: &[usize]) -> Result<()> {
    let expected = elements(name, shape)?;
    if len != expected {
        return Err(Error::invalid(format!("{name} has {len} elements, accepted: {expected} for the shape {shape:?}")));
    }
    Ok(())
}
