//! Sizes, storage types, and the corner that positions are counted from.

use core::fmt;

use crate::error::{Error, Result};

/// How the elements of a tensor are stored. Whatever it is, kernels compute in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DType {
    /// IEEE 754 binary32.
    #[default]
    F32,
    /// IEEE 754 binary16: 11 bits of precision, up to 65504. Where a device hasn't the type, kernels read two to a word.
    F16,
    /// bfloat16: 8 bits of precision, the range of f32. Read two to a word.
    Bf16,
    /// Unsigned integers: ranges, and what mods read.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name as flags, files and reports write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
        }
    }

    /// Whether the elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        self != Self::U32
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

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
pub(crate) const MAX_LEN: usize = (1 << 30) - 1;

/// Counts of a description that wasn't checked yet must not overflow either.
pub(super) fn product<const N: usize>(sizes: [usize; N]) -> usize {
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

    pub(super) fn validate(&self) -> Result<()> {
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

impl Align {
    /// The position of the first query.
    pub(crate) fn offset(self, q_len: i128, kv_len: i128) -> i128 {
        match self {
            Self::BottomRight => kv_len - q_len,
            Self::TopLeft => 0,
        }
    }
}
