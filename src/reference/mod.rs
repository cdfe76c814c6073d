//! The CPU reference: attention in `f64`, shaped like the maths. It decides what is right for everything else.
//!
//! For each query row there are three passes, the three lines of the textbook:
//!
//! 1. **scores** of the keys that the row may attend to: `s_j = softmax_scale · ⟨q, k_j⟩`, then softcap, score mod, ALiBi, bias;
//! 2. **softmax**: `lse = ln Σ exp(s_j)`, `w_j = exp(s_j − lse)`;
//! 3. **weighted sum**: `o = Σ w_j v_j`.
//!
//! The gradients start from the same passes, and go back through them.
//!
//! A masked key is left out of the row's list in pass 1, so nothing stored there is ever read. Rows are independent and computed one at
//! a time: a row costs `O(kv_len · (head_dim + value_dim))` time and `O(kv_len)` memory, and no `n × n` buffer exists. Big inputs use
//! all cores; the result has the same bits for any number of threads.
//!
//! This module shares no arithmetic and no index helper with the rest of the library, and is itself tested against numbers worked by
//! hand, direct formulas, finite differences, and golden cases from two other implementations (`tests/cpu`).
//!
//! | what | where |
//! |---|---|
//! | one problem with its data | [`Case`] |
//! | `o` and `lse` of all rows, of some rows, of a packed batch | [`attention`], [`attention_rows`], [`attention_packed`] |
//! | the gradients of all tensors, of a packed batch | [`attention_backward`], [`attention_backward_packed`] |
//! | two results over some keys each, as one over all | [`merge`] |
//! | what the naive path is made of | [`matmul`], [`matmul_transposed`], [`softmax_rows`] |
//! | how far an honest `f32` engine may be off | [`Output::tolerance`], [`Tolerance`], [`GradientTolerance`] |
//! | how far a naive `f32`, `f16` or `bf16` implementation is off | [`low_precision`] |
//! | comparing a result with the reference | [`compare`], [`Comparison`] |
//!
//! ```
//! use tilewise::reference::{self, Case, Precision};
//!
//! // Two queries, five keys, causal, bottom-right: q = 0 makes all weights equal, so o is the mean of the visible v.
//! let (q, k, v) = ([0.0; 2], [0.0; 5], [1.0, 2.0, 3.0, 4.0, 5.0]);
//! let shape = Case { batch: 1, q_heads: 1, kv_heads: 1, q_len: 2, kv_len: 5, head_dim: 1, value_dim: 1, ..Case::default() };
//! let expected = reference::attention(&Case { q: &q, k: &k, v: &v, causal: true, ..shape })?;
//! assert_eq!(expected.o, [2.5, 3.0]);
//!
//! let got = [2.5_f32, 3.000_000_2];
//! let comparison = reference::compare(&got, &expected.o, expected.tolerance.o(Precision::F32));
//! assert!(comparison.passed(), "{comparison}");
//! # Ok::<(), tilewise::Error>(())
//! ```
//!
//! Sources: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (grouped queries); Press et al. 2022 (ALiBi); the softmax is the
//! max-subtracted one of any numerical text; Dao et al. 2022, appendix B (gradients).

mod attention;
mod backward;
mod case;
mod compare;
mod low_precision;
mod matrix;
mod merge;
mod packed;
mod parallel;
mod tolerance;

pub use attention::{Output, Row, attention, attention_rows};
pub use backward::{Gradients, attention_backward};
pub use case::{Align, Broadcast, Case, MaskMod, ScoreMod};
pub use compare::{Comparison, Mismatch, compare};
pub use low_precision::{LowPrecision, Precision, low_precision};
pub use matrix::{Product, Softmax, matmul, matmul_transposed, softmax_rows};
pub use merge::merge;
pub use packed::{attention_backward_packed, attention_packed};
pub use tolerance::{GradientTolerance, Tolerance};
