//! What to compute: shapes, options, their validation, and the counts of FLOPs and bytes that follow. No GPU in sight.
//!
//! A [`Problem`] is all that a plan is made from. It holds no tensors and no addresses.

use crate::error::{Error, Result};

/// The sizes of one attention call.
///
/// | tensor | shape |
/// |---|---|
/// | q | (batch, q_heads, q_len, head_dim) |
/// | k | (batch, kv_heads, kv_len, head_dim) |
/// | v | (batch, kv_heads, kv_len, value_dim) |
/// | o | (batch, q_heads, q_len, value_dim) |
/// | lse | (batch, q_heads, q_len) |
///
/// `batch`, `q_len` and `kv_len` may be 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key/value heads: `q_heads` for plain multi-head attention, 1 for multi-query, between them for grouped-query.
    /// Query head `h` reads key/value head `h / group_size`.
    pub kv_heads: usize,
    /// Query rows.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Width of a query and of a key.
    pub head_dim: usize,
    /// Width of a value and of an output row.
    pub value_dim: usize,
}

/// Positions are compared as i32, and a query's is its index plus up to `kv_len`.
const MAX_LEN: usize = (1 << 30) - 1;

/// Counts of a description that wasn't checked yet must not overflow either.
fn product<const N: usize>(sizes: [usize; N]) -> usize {
    sizes.into_iter().fold(1, usize::saturating_mul)
}

impl Dims {
    /// Plain multi-head self-attention: as many keys as queries, one key/value head a query head, `value_dim = head_dim`.
    pub fn square(batch: usize, heads: usize, len: usize, head_dim: usize) -> Self {
        Self { batch, q_heads: heads, kv_heads: heads, q_len: len, kv_len: len, head_dim, value_dim: head_dim }
    }

    /// Query heads that share a key/value head.
    pub fn group_size(&self) -> usize {
        self.q_heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Query rows over all heads and batch entries.
    pub fn rows(&self) -> usize {
        product([self.batch, self.q_heads, self.q_len])
    }

    /// Elements of q.
    pub fn q_elems(&self) -> usize {
        product([self.rows(), self.head_dim])
    }

    /// Elements of k.
    pub fn k_elems(&self) -> usize {
        product([self.batch, self.kv_heads, self.kv_len, self.head_dim])
    }

    /// Elements of v.
    pub fn v_elems(&self) -> usize {
        product([self.batch, self.kv_heads, self.kv_len, self.value_dim])
    }

    /// Elements of o.
    pub fn o_elems(&self) -> usize {
        product([self.rows(), self.value_dim])
    }

    /// Elements of the score matrices that tiled attention never stores: batch × q_heads × q_len × kv_len.
    pub fn score_elems(&self) -> usize {
        product([self.rows(), self.kv_len])
    }

    fn validate(&self) -> Result<()> {
        let Self { q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        if kv_heads == 0 || q_heads == 0 || q_heads % kv_heads != 0 {
            return Err(Error::invalid(format!(
                "q_heads = {q_heads}, kv_heads = {kv_heads}; accepted: both at least 1, q_heads a multiple of kv_heads"
            )));
        }
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 {
                return Err(Error::invalid(format!("{name} = 0; accepted: 1 or more")));
            }
        }
        // Every kernel indexes elements in u32.
        for (name, sizes) in [
            ("q", [self.batch, q_heads, self.q_len, head_dim]),
            ("k", [self.batch, kv_heads, self.kv_len, head_dim]),
            ("v", [self.batch, kv_heads, self.kv_len, value_dim]),
            ("o", [self.batch, q_heads, self.q_len, value_dim]),
        ] {
            // A size beside a 0 is bounded too: strides and tiles are made of it.
            if product(sizes.map(|size| size.max(1))) > u32::MAX as usize {
                return Err(Error::invalid(format!(
                    "{name} of shape {sizes:?} has too many elements; accepted: up to {}",
                    u32::MAX
                )));
            }
        }
        for (name, len) in [("q_len", self.q_len), ("kv_len", self.kv_len)] {
            if len > MAX_LEN {
                return Err(Error::invalid(format!("{name} = {len}; accepted: up to {MAX_LEN}")));
            }
        }
        Ok(())
    }
}

/// Which corner of the score matrix the causal diagonal runs into when `q_len != kv_len`.
///
/// ```text
///  q_len 2, kv_len 5:   BottomRight  1 1 1 1 0      TopLeft  1 0 0 0 0
///                                    1 1 1 1 1               1 1 0 0 0
///
///  q_len 5, kv_len 2:   BottomRight  0 0            TopLeft  1 0
///                                    0 0                     1 1
///                                    0 0                     1 1
///                                    1 0                     1 1
///                                    1 1                     1 1
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Align {
    /// The last query sees the last key: query `i` stands at position `i + kv_len - q_len`. What decoding with a cache needs.
    #[default]
    BottomRight,
    /// The first query sees the first key: query `i` stands at position `i`.
    TopLeft,
}

/// How scores are made and which keys a query may see.
///
/// ```
/// use tilewise::{Align, Attention};
/// let options = Attention::causal().align(Align::TopLeft).softmax_scale(0.125);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Attention {
    causal: bool,
    align: Align,
    softmax_scale: Option<f32>,
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

    /// Sets the corner that positions are counted from.
    #[must_use]
    pub fn align(mut self, align: Align) -> Self {
        self.align = align;
        self
    }

    /// Multiplies q·k by `scale` instead of 1/√`head_dim`. 0 is a scale like any other; NaN and infinities are refused.
    #[must_use]
    pub fn softmax_scale(mut self, scale: f32) -> Self {
        self.softmax_scale = Some(scale);
        self
    }

    /// Whether the look-ahead mask is on.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The corner that positions are counted from.
    pub fn alignment(&self) -> Align {
        self.align
    }
}

/// One attention call, described completely: what a plan is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    // Not public: only what `new` has checked may reach a kernel.
    pub(crate) dims: Dims,
    pub(crate) attention: Attention,
}

impl Problem {
    /// Checks and returns the description.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the value received and the values accepted.
    pub fn new(dims: Dims, attention: Attention) -> Result<Self> {
        dims.validate()?;
        if let Some(scale) = attention.softmax_scale
            && !scale.is_finite()
        {
            return Err(Error::invalid(format!("softmax_scale = {scale}; accepted: a finite number")));
        }
        Ok(Self { dims, attention })
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// The options.
    pub fn attention(&self) -> Attention {
        self.attention
    }

    /// The factor of q·k: the one asked for, or 1/√`head_dim`.
    #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
    pub fn softmax_scale(&self) -> f32 {
        self.attention.softmax_scale.unwrap_or_else(|| (1.0 / (self.dims.head_dim as f64).sqrt()) as f32)
    }

    /// What is added to a query's index to get its position: `kv_len - q_len` or 0.
    pub fn position_offset(&self) -> i64 {
        match self.attention.align {
            Align::BottomRight => self.dims.kv_len as i64 - self.dims.q_len as i64,
            Align::TopLeft => 0,
        }
    }

    /// Pairs (query, key) that are visible, over all heads and batch entries.
    pub fn visible_pairs(&self) -> u64 {
        let Dims { q_len, kv_len, .. } = self.dims;
        let (q_len, kv_len) = (q_len as i128, kv_len as i128);
        let pairs = if self.attention.causal {
            // Row i sees clamp(i + offset + 1, 0, kv_len) keys; the sum over i in closed form.
            let offset = i128::from(self.position_offset());
            let first = (-offset).clamp(0, q_len); // first row that sees a key
            let full = (kv_len - offset - 1).clamp(first, q_len); // first row that sees all of them
            let rising = full - first;
            rising * (first + offset + 1) + rising * (rising - 1) / 2 + (q_len - full) * kv_len
        } else {
            q_len * kv_len
        };
        u64::try_from(pairs).unwrap_or(0).saturating_mul(product([self.dims.batch, self.dims.q_heads]) as u64)
    }

    /// Floating-point operations of the two products over visible pairs, 2 · (`head_dim` + `value_dim`) a pair: the work that any
    /// kernel must do. Softmax is not counted, as is usual.
    pub fn flops(&self) -> u64 {
        self.visible_pairs().saturating_mul(2 * (self.dims.head_dim as u64 + self.dims.value_dim as u64))
    }

    /// Bytes of q, k and v as the engine stores them.
    pub fn input_bytes(&self) -> u64 {
        4 * [self.dims.q_elems(), self.dims.k_elems(), self.dims.v_elems()]
            .map(|elems| elems as u64)
            .iter()
            .sum::<u64>()
    }

    /// Bytes of o and lse.
    pub fn output_bytes(&self) -> u64 {
        4 * (self.dims.o_elems() as u64 + self.dims.rows() as u64)
    }

    /// Bytes of the f32 score matrices that a naive implementation keeps.
    pub fn score_bytes(&self) -> u64 {
        (self.dims.score_elems() as u64).saturating_mul(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(q_len: usize, kv_len: usize) -> Dims {
        Dims { batch: 2, q_heads: 6, kv_heads: 2, q_len, kv_len, head_dim: 8, value_dim: 5 }
    }

    #[test]
    fn visible_pairs_equal_a_count() {
        for q_len in 0..9 {
            for kv_len in 0..9 {
                for align in [Align::BottomRight, Align::TopLeft] {
                    let problem = Problem::new(dims(q_len, kv_len), Attention::causal().align(align)).unwrap();
                    let offset = problem.position_offset();
                    let count = (0..q_len as i64)
                        .flat_map(|i| (0..kv_len as i64).map(move |j| (i, j)))
                        .filter(|&(i, j)| j <= i + offset)
                        .count();
                    assert_eq!(problem.visible_pairs(), 12 * count as u64, "{q_len} {kv_len} {align:?}");
                }
            }
        }
    }

    #[test]
    fn the_article_score_matrix_is_64_mib() {
        let problem = Problem::new(Dims::square(1, 1, 4096, 64), Attention::full()).unwrap();
        assert_eq!(problem.score_bytes(), 67_108_864);
    }

    #[test]
    fn bad_requests_name_both_figures() {
        let refused = |dims: Dims, attention: Attention| Problem::new(dims, attention).unwrap_err().to_string();
        let bad_heads = Dims { q_heads: 7, kv_heads: 3, ..dims(4, 4) };
        let text = refused(bad_heads, Attention::full());
        assert!(text.contains("q_heads = 7") && text.contains("kv_heads = 3"), "{text}");
        assert!(refused(Dims { kv_heads: 0, ..dims(4, 4) }, Attention::full()).contains("kv_heads = 0"));
        assert!(refused(Dims { head_dim: 0, ..dims(4, 4) }, Attention::full()).contains("head_dim = 0"));
        assert!(refused(dims(4, 4), Attention::full().softmax_scale(f32::NAN)).contains("NaN"));
        assert!(refused(dims(4, 4), Attention::full().softmax_scale(f32::INFINITY)).contains("inf"));
        assert!(refused(dims(usize::MAX / 2, 4), Attention::full()).contains("too many elements"));
        let empty = Dims { batch: 0, head_dim: usize::MAX, ..dims(4, 4) };
        assert!(refused(empty, Attention::full()).contains("too many elements"));
    }

    #[test]
    fn default_scale_uses_the_true_head_dim() {
        let problem = Problem::new(Dims { head_dim: 5, ..dims(1, 1) }, Attention::full()).unwrap();
        assert!((problem.softmax_scale() - 0.447_213_6).abs() < 1e-7);
        let zero = Problem::new(dims(1, 1), Attention::full().softmax_scale(0.0)).unwrap();
        assert_eq!(zero.softmax_scale(), 0.0);
    }
}
