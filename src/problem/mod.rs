//! What to compute: shapes, storage, options, their validation, and the counts of FLOPs and bytes that follow. No GPU in sight.
//!
//! A [`Problem`] is all that a plan is made from. It holds no tensors and no addresses.

mod attention;
mod dims;

pub(crate) use attention::ModText;
pub use attention::{Attention, MaskMod, ScoreMod, alibi_slopes};
pub use dims::{Align, DType, Dims};

pub(crate) use dims::MAX_LEN;
use dims::product;

use crate::error::{Error, Result};

/// How the tensors of a call are stored. lse is f32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Storage {
    /// Queries.
    pub q: DType,
    /// Keys.
    pub k: DType,
    /// Values.
    pub v: DType,
    /// The output.
    pub o: DType,
}

impl Storage {
    /// All of one type.
    pub fn all(dtype: DType) -> Self {
        Self { q: dtype, k: dtype, v: dtype, o: dtype }
    }
}

/// The sizes of a bias or mask: (batch|1, `q_heads`|1, `q_len`|1, `kv_len`|1), read broadcast.
pub(crate) type BroadcastShape = [usize; 4];

/// One attention call, described completely: what a plan is made from.
///
/// ```
/// use tilewise::{Attention, DType, Dims, Problem, Storage};
/// # fn main() -> tilewise::Result<()> {
/// // f16 keys and values under f32 queries, and a bias of one row a head.
/// let problem = Problem::new(Dims::square(2, 8, 1000, 64), Attention::causal())?
///     .storage(Storage { k: DType::F16, v: DType::F16, ..Storage::default() })?
///     .bias(DType::F32, [1, 8, 1, 1000])?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    // Not public: only what has been checked may reach a kernel.
    pub(crate) dims: Dims,
    pub(crate) attention: Attention,
    pub(crate) storage: Storage,
    pub(crate) bias: Option<(DType, BroadcastShape)>,
    pub(crate) mask: Option<BroadcastShape>,
    pub(crate) ranges: Option<[usize; 3]>,
    pub(crate) sinks: bool,
    pub(crate) mod_words: Option<usize>,
}

/// Of one batch entry, or one sequence of a packed batch: its first row and number of queries, and of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence {
    pub(crate) first_q: u32,
    pub(crate) q_len: u32,
    pub(crate) first_kv: u32,
    pub(crate) kv_len: u32,
}

impl Problem {
    /// Checks and returns the description, of tensors in f32.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the value received and the values accepted.
    pub fn new(dims: Dims, attention: Attention) -> Result<Self> {
        // A packed batch is stored as one entry of all rows.
        let stored = if attention.is_packed() { Dims { batch: 1, ..dims } } else { dims };
        stored.validate()?;
        let none = Self {
            dims,
            attention,
            storage: Storage::default(),
            bias: None,
            mask: None,
            ranges: None,
            sinks: false,
            mod_words: None,
        };
        none.validate_options()?;
        Ok(none)
    }

    /// The same with tensors stored in these types.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a type that isn't a floating-point one.
    pub fn storage(self, storage: Storage) -> Result<Self> {
        for (name, dtype) in [("q", storage.q), ("k", storage.k), ("v", storage.v), ("o", storage.o)] {
            check_float(name, dtype)?;
        }
        Ok(Self { storage, ..self })
    }

    /// The same with a bias: added to the scores, (batch|1, `q_heads`|1, `q_len`|1, `kv_len`|1). -inf hides the key.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape that doesn't broadcast, a type that isn't a floating-point one, or a packed batch.
    pub fn bias(self, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        check_float("bias", dtype)?;
        self.check_broadcast("bias", shape)?;
        Ok(Self { bias: Some((dtype, shape)), ..self })
    }

    /// The same with a boolean mask, true where the query may attend: (batch|1, `q_heads`|1, `q_len`|1, `kv_len`|1).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape that doesn't broadcast, or a packed batch.
    pub fn mask(self, shape: [usize; 4]) -> Result<Self> {
        self.check_broadcast("mask", shape)?;
        Ok(Self { mask: Some(shape), ..self })
    }

    /// The same with a range of keys for each row: (batch|1, `q_heads`|1, `q_len`, 2), its first key and the one past its last.
    /// `shape` is without the 2. For a packed batch the first is 1, the ranges are those of all its rows, and count within the sequence.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape that doesn't fit.
    pub fn ranges(self, shape: [usize; 3]) -> Result<Self> {
        let Dims { batch, q_heads, q_len, .. } = self.dims;
        let batch = if self.attention.is_packed() { 1 } else { batch };
        let fits = [(shape[0], batch), (shape[1], q_heads)].iter().all(|&(size, full)| size == 1 || size == full);
        if !fits || shape[2] != q_len {
            return Err(Error::invalid(format!(
                "ranges for {shape:?} rows; accepted: (batch, q_heads, q_len) = {:?}, the first two or 1",
                [batch, q_heads, q_len]
            )));
        }
        Ok(Self { ranges: Some(shape), ..self })
    }

    /// The same with attention sinks, (`q_heads`): a score for each head that takes part in the softmax and has no value. -inf is none.
    #[must_use]
    pub fn sinks(self) -> Self {
        Self { sinks: true, ..self }
    }

    /// The same with words that the mods read.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no mod to read them.
    pub fn mod_data(self, words: usize) -> Result<Self> {
        if self.attention.score_mod.is_none() && self.attention.mask_mod.is_none() {
            return Err(Error::invalid("mod_data without a mod; accepted: with a score_mod or a mask_mod"));
        }
        Ok(Self { mod_words: Some(words), ..self })
    }

    fn validate_options(&self) -> Result<()> {
        let Dims { batch, q_heads, q_len, kv_len, .. } = self.dims;
        let options = &self.attention;
        if let Some(scale) = options.softmax_scale.filter(|scale| !scale.is_finite()) {
            return Err(Error::invalid(format!("softmax_scale = {scale}; accepted: a finite number")));
        }
        if let Some(softcap) = options.softcap.filter(|&softcap| !(softcap > 0.0 && softcap.is_finite())) {
            return Err(Error::invalid(format!("softcap = {softcap}; accepted: a finite number above 0")));
        }
        if let Some(slopes) = &options.alibi_slopes {
            if slopes.len() != q_heads && slopes.len() != product([batch, q_heads]) {
                return Err(Error::invalid(format!(
                    "{} ALiBi slopes; accepted: q_heads = {q_heads}, or batch × q_heads = {}",
                    slopes.len(),
                    product([batch, q_heads])
                )));
            }
            if let Some(slope) = slopes.iter().find(|slope| !slope.is_finite()) {
                return Err(Error::invalid(format!("an ALiBi slope of {slope}; accepted: finite numbers")));
            }
        }
        for (name, lens, capacity) in [("q_lens", &options.q_lens, q_len), ("kv_lens", &options.kv_lens, kv_len)] {
            let Some(lens) = lens else { continue };
            if options.is_packed() {
                return Err(Error::invalid(format!("{name} of a packed batch; accepted: its cu_seqlens say it all")));
            }
            if lens.len() != batch {
                return Err(Error::invalid(format!("{name} of {} batch entries; accepted: {batch}", lens.len())));
            }
            if let Some((entry, len)) = lens.iter().enumerate().find(|&(_, &len)| len as usize > capacity) {
                return Err(Error::invalid(format!("{name}[{entry}] = {len}; accepted: up to {capacity}")));
            }
        }
        if let Some([q, kv]) = &options.packed {
            for (name, bounds, total) in [("cu_seqlens_q", q, q_len), ("cu_seqlens_kv", kv, kv_len)] {
                let ends = bounds.first() == Some(&0) && bounds.last().is_some_and(|&last| last as usize == total);
                if bounds.len() != batch.saturating_add(1) || !ends || !bounds.is_sorted() {
                    return Err(Error::invalid(format!(
                        "{name} = {}; accepted: {} numbers that start at 0, never fall, and end at {total}",
                        some_of(bounds),
                        batch.saturating_add(1)
                    )));
                }
            }
        }
        Ok(())
    }

    fn check_broadcast(&self, name: &str, shape: BroadcastShape) -> Result<()> {
        let Dims { batch, q_heads, q_len, kv_len, .. } = self.dims;
        if self.attention.is_packed() {
            return Err(Error::invalid(format!(
                "{name} with a packed batch; accepted: none (ranges and mods have a packed form)"
            )));
        }
        let full = [batch, q_heads, q_len, kv_len];
        if shape.into_iter().zip(full).any(|(size, full)| size != 1 && size != full) {
            return Err(Error::invalid(format!(
                "{name} of shape {shape:?}; accepted: (batch, q_heads, q_len, kv_len) = {full:?} with any size replaced by 1"
            )));
        }
        Ok(())
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// The options.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// How the tensors are stored.
    pub fn stored(&self) -> Storage {
        self.storage
    }

    /// What `q·k` is multiplied by.
    pub fn softmax_scale(&self) -> f32 {
        self.attention.softmax_scale.unwrap_or_else(|| {
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
            let scale = (1.0 / (self.dims.head_dim as f64).sqrt()) as f32;
            scale
        })
    }

    /// The shapes of q, k, v, o and lse.
    pub(crate) fn shapes(&self) -> [Vec<usize>; 5] {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.dims;
        if self.attention.is_packed() {
            return [
                vec![q_len, q_heads, head_dim],
                vec![kv_len, kv_heads, head_dim],
                vec![kv_len, kv_heads, value_dim],
                vec![q_len, q_heads, value_dim],
                vec![q_heads, q_len],
            ];
        }
        [
            vec![batch, q_heads, q_len, head_dim],
            vec![batch, kv_heads, kv_len, head_dim],
            vec![batch, kv_heads, kv_len, value_dim],
            vec![batch, q_heads, q_len, value_dim],
            vec![batch, q_heads, q_len],
        ]
    }

    /// Whether batch entries differ in length.
    pub(crate) fn has_sequences(&self) -> bool {
        let Attention { q_lens, kv_lens, packed, .. } = &self.attention;
        q_lens.is_some() || kv_lens.is_some() || packed.is_some()
    }

    /// What there is of each batch entry.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = Sequence> {
        let Dims { batch, q_len, kv_len, .. } = self.dims;
        let options = &self.attention;
        let size = |len: usize| u32::try_from(len).unwrap_or(u32::MAX); // validated to be far below
        (0..batch).map(move |entry| match &options.packed {
            Some([q, kv]) => Sequence {
                first_q: q[entry],
                q_len: q[entry + 1] - q[entry],
                first_kv: kv[entry],
                kv_len: kv[entry + 1] - kv[entry],
            },
            None => Sequence {
                first_q: 0,
                q_len: options.q_lens.as_ref().map_or(size(q_len), |lens| lens[entry]),
                first_kv: 0,
                kv_len: options.kv_lens.as_ref().map_or(size(kv_len), |lens| lens[entry]),
            },
        })
    }

    /// The most queries, and keys, of a batch entry.
    pub(crate) fn longest(&self) -> (usize, usize) {
        if !self.attention.is_packed() {
            return (self.dims.q_len, self.dims.kv_len);
        }
        let longest = |len: fn(&Sequence) -> u32| self.sequences().map(|it| len(&it)).max().unwrap_or(0) as usize;
        (longest(|it| it.q_len), longest(|it| it.kv_len))
    }

    /// Pairs of a query and a key that it sees by causality, window and lengths, over all heads and batch entries. What mask, bias,
    /// ranges and mods hide is not known here.
    pub fn visible_pairs(&self) -> u64 {
        let pairs: i128 = if self.has_sequences() {
            self.sequences().map(|it| self.pairs(it.q_len.into(), it.kv_len.into())).sum()
        } else {
            self.pairs(self.dims.q_len as i128, self.dims.kv_len as i128) * self.dims.batch as i128
        };
        u64::try_from(pairs.saturating_mul(self.dims.q_heads as i128)).unwrap_or(u64::MAX)
    }

    /// Visible pairs of one head.
    fn pairs(&self, q_len: i128, kv_len: i128) -> i128 {
        let offset = self.attention.align.offset(q_len, kv_len);
        // Σ clamp(i + start, 0, kv_len) over the rows, in closed form.
        let keys_before = |start: i128| {
            let first = (-start).clamp(0, q_len); // the first row that gets any
            let full = (kv_len - start).clamp(first, q_len); // the first row that gets all of them
            let rising = full - first;
            rising * (first + start) + rising * (rising - 1) / 2 + (q_len - full) * kv_len
        };
        let [left, right] = self.attention.reach();
        let end = right.map_or(q_len * kv_len, |right| keys_before(offset + i128::from(right) + 1));
        end - left.map_or(0, |left| keys_before(offset - i128::from(left)))
    }

    /// Floating-point operations of the two products over visible pairs, 2 · (`head_dim` + `value_dim`) a pair: the work that any
    /// kernel must do. Softmax is not counted, as is usual.
    pub fn flops(&self) -> u64 {
        self.visible_pairs().saturating_mul(2 * (self.dims.head_dim as u64 + self.dims.value_dim as u64))
    }

    /// Elements of q, k, v, o and lse.
    pub(crate) fn elems(&self) -> [u64; 5] {
        self.shapes().map(|shape| shape.into_iter().map(|size| size as u64).product())
    }

    /// Bytes of q, k and v.
    pub fn input_bytes(&self) -> u64 {
        let Storage { q, k, v, .. } = self.storage;
        self.elems().into_iter().zip([q, k, v]).map(|(elems, dtype)| elems * dtype.bytes() as u64).sum()
    }

    /// Bytes of o and lse.
    pub fn output_bytes(&self) -> u64 {
        let [.., o, lse] = self.elems();
        o * self.storage.o.bytes() as u64 + 4 * lse
    }

    /// Bytes of the f32 score matrices that a naive implementation keeps: of a packed batch those of each sequence by itself.
    pub fn score_bytes(&self) -> u64 {
        let scores = if self.attention.is_packed() {
            let of_heads =
                self.sequences().map(|it| u64::from(it.q_len) * u64::from(it.kv_len)).fold(0, u64::saturating_add);
            of_heads.saturating_mul(self.dims.q_heads as u64)
        } else {
            self.dims.score_elems() as u64
        };
        scores.saturating_mul(4)
    }
}

fn check_float(name: &str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} in {dtype}; accepted: f32, f16, bf16")))
}

/// A list, if it isn't long.
fn some_of(numbers: &[u32]) -> String {
    match numbers {
        [first, .., last] if numbers.len() > 12 => format!("{} numbers from {first} to {last}", numbers.len()),
        _ => format!("{numbers:?}"),
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
        let reaches = [None, Some(0), Some(1), Some(3), Some(20)];
        for (q_len, kv_len) in (0..9).flat_map(|q_len| (0..9).map(move |kv_len| (q_len, kv_len))) {
            for (left, right) in reaches.into_iter().flat_map(|left| reaches.map(|right| (left, right))) {
                for align in [Align::BottomRight, Align::TopLeft] {
                    let options = Attention::full().window(left, right).align(align);
                    let problem = Problem::new(dims(q_len, kv_len), options).unwrap();
                    let offset = if align == Align::BottomRight { kv_len as i64 - q_len as i64 } else { 0 };
                    let sees = |i: i64, j: i64| {
                        left.is_none_or(|left| j >= i + offset - i64::from(left))
                            && right.is_none_or(|right| j <= i + offset + i64::from(right))
                    };
                    let pairs = (0..q_len as i64).flat_map(|i| (0..kv_len as i64).map(move |j| (i, j)));
                    let count = pairs.filter(|&(i, j)| sees(i, j)).count();
                    assert_eq!(
                        problem.visible_pairs(),
                        12 * count as u64,
                        "{q_len} {kv_len} {left:?} {right:?} {align:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn visible_pairs_of_lengths_are_those_of_each() {
        let of = |dims: Dims, options: Attention| Problem::new(dims, options).unwrap().visible_pairs();
        let one = |q_len, kv_len| of(Dims { batch: 1, ..dims(q_len, kv_len) }, Attention::causal());
        let lens = Attention::causal().q_lens([3, 0]).kv_lens([5, 2]);
        assert_eq!(of(dims(4, 6), lens), one(3, 5) + one(0, 2));
        let packed = Attention::causal().packed([0, 3, 4], [0, 5, 6]);
        let problem = Problem::new(dims(4, 6), packed).unwrap();
        assert_eq!(problem.visible_pairs(), one(3, 5) + one(1, 1));
        assert_eq!(problem.score_bytes(), 4 * 6 * (15 + 1));
        assert_eq!(problem.elems(), [4 * 6 * 8, 6 * 2 * 8, 6 * 2 * 5, 4 * 6 * 5, 6 * 4]);
    }

    #[test]
    fn the_article_score_matrix_is_64_mib() {
        let problem = Problem::new(Dims::square(1, 1, 4096, 64), Attention::full()).unwrap();
        assert_eq!(problem.score_bytes(), 67_108_864);
    }

    #[test]
    fn bad_requests_name_both_figures() {
        let refused = |dims: Dims, attention: Attention| Problem::new(dims, attention).unwrap_err().to_string();
        let huge = Dims { batch: usize::MAX, ..dims(3, 3) };
        assert!(refused(huge, Attention::full().packed([0, 3], [0, 3])).contains("accepted"));
        let bad_heads = Dims { q_heads: 7, kv_heads: 3, ..dims(4, 4) };
        let text = refused(bad_heads, Attention::full());
        assert!(text.contains("q_heads = 7") && text.contains("kv_heads = 3"), "{text}");
        assert!(refused(Dims { kv_heads: 0, ..dims(4, 4) }, Attention::full()).contains("kv_heads = 0"));
        assert!(refused(Dims { head_dim: 0, ..dims(4, 4) }, Attention::full()).contains("head_dim = 0"));
        assert!(refused(dims(4, 4), Attention::full().softmax_scale(f32::NAN)).contains("NaN"));
        assert!(refused(dims(4, 4), Attention::full().softmax_scale(f32::INFINITY)).contains("inf"));
        assert!(refused(dims(usize::MAX / 2, 4), Attention::full()).contains("too many elements"));
        assert!(refused(dims(4, 4), Attention::full().softcap(0.0)).contains("softcap = 0"));
        assert!(refused(dims(4, 4), Attention::full().alibi([1.0])).contains("1 ALiBi slopes"));
        assert!(refused(dims(4, 4), Attention::full().kv_lens([4, 9])).contains("kv_lens[1] = 9; accepted: up to 4"));
        assert!(
            refused(dims(4, 4), Attention::full().packed([0, 3, 2], [0, 1, 4])).contains("cu_seqlens_q = [0, 3, 2]")
        );
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
