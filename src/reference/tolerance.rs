//! How far an honest engine may be from the reference, from the numbers of the problem itself.

use super::Precision;

/// A key whose weight is no more than this doesn't matter for the tolerance.
pub(super) const NEGLIGIBLE: f64 = 1e-17;

/// A number that nobody means as a score: such biases (the lowest finite `f32`) are used as masks.
const ABSURD: f64 = 1e30;

/// How far the result of an engine may be from the reference, if it keeps scores, softmax and accumulators in `f32` whatever its storage
/// type. Max norm, absolute, one number per output tensor. The formula is that of the golden cases (`tests/data/golden`):
///
/// ```text
/// tol(o)   = 4 · 2⁻²⁴ · mag · (4 + S)  [+ 2 · u · mag  for storage in f16, u = 2⁻¹¹, or bf16, u = 2⁻⁸]
/// tol(lse) = 8 · 2⁻²⁴ · (4 + S)
/// ```
///
/// `mag` is what rounding errors scale with. `S` is there because an error of `2⁻²⁴ S` in a score is a relative error of that size in its
/// weight, and because WGSL's `exp` is only good to `3 + 2|x|` units in the last place. A naive CPU `f32` result sits well under it; an
/// engine that computes in `f16`, or drops a key, doesn't.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Tolerance {
    /// `mag`: the largest `Σ w |v|` behind one element of `o`.
    pub mag: f64,
    /// The largest number that enters the exponent of a key that matters (one with a weight above 10⁻¹⁷): `Σ |q k| · softmax_scale`
    /// (times the slope of the softcap), ALiBi term, bias, score, and `lse`; absolute values, those below 10³⁰.
    pub exponent: f64,
    /// The most keys that one row attends to.
    pub keys: usize,
}

impl Tolerance {
    /// `S = exponent + sqrt(keys) / 8`: the second term is for the sum over the keys.
    #[must_use]
    pub fn s(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 keys fit in memory")]
        let keys = self.keys as f64;
        self.exponent + keys.sqrt() / 8.0
    }

    /// The largest allowed error of an element of `o`, for tensors stored in `storage`.
    #[must_use]
    pub fn o(&self, storage: Precision) -> f64 {
        self.sum(self.mag, 2.0, storage)
    }

    /// The largest allowed error of a finite `lse`, which is stored in `f32` whatever the type of the rest.
    #[must_use]
    pub fn lse(&self) -> f64 {
        8.0 * Precision::F32.unit_roundoff() * (4.0 + self.s())
    }

    /// The tolerance of several results together.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            mag: self.mag.max(other.mag),
            exponent: self.exponent.max(other.exponent),
            keys: self.keys.max(other.keys),
        }
    }

    /// The largest allowed error of a sum whose terms have the magnitudes `mag` together, and `roundings` roundings to `storage`.
    fn sum(&self, mag: f64, roundings: f64, storage: Precision) -> f64 {
        let rounding = match storage {
            Precision::F32 => 0.0,
            Precision::F16 | Precision::Bf16 => roundings * storage.unit_roundoff() * mag,
        };
        4.0 * Precision::F32.unit_roundoff() * mag * (4.0 + self.s()) + rounding
    }

    /// What a number that enters an exponent counts for: NaN, infinite and absurd ones for nothing.
    pub(super) fn of_exponent(x: f64) -> f64 {
        if x.abs() < ABSURD { x.abs() } else { 0.0 }
    }
}

/// How far the gradients of an engine may be from the reference, if it keeps scores, softmax and accumulators in `f32` whatever its
/// storage type. Max norm, absolute, one number per gradient. The formula is that of the golden cases (`tests/data/golden`):
///
/// ```text
/// tol = 4 · 2⁻²⁴ · mag · (4 + S)  [+ c · u · mag  for storage in f16, u = 2⁻¹¹, or bf16, u = 2⁻⁸;  c = 2 for dv, 1 for the others]
/// ```
///
/// `S` is that of the [forward pass](Tolerance::s). `mag` is the largest sum of the magnitudes of the terms of one element: as in
/// [`attention_backward`](super::attention_backward), with absolute values and without differences. The rounding errors of a dot product
/// are of either sign, so they don't add up in it: `⟨do, v⟩` counts as its absolute value and `√ Σ (do v)²`, `⟨do, o⟩` as its absolute
/// value and `Σ |do| Σ w |v|`, the first sum over the columns, divided by `√ value_dim`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GradientTolerance {
    /// The tolerance of the forward pass.
    pub forward: Tolerance,
    /// `mag` of `dq`.
    pub dq_mag: f64,
    /// `mag` of `dk`.
    pub dk_mag: f64,
    /// `mag` of `dv`.
    pub dv_mag: f64,
    /// `mag` of `dbias`; 0 without a bias.
    pub dbias_mag: f64,
    /// `mag` of `dsinks`; 0 without sinks.
    pub dsinks_mag: f64,
}

impl GradientTolerance {
    /// The largest allowed error of an element of `dq`, for tensors stored in `storage`.
    #[must_use]
    pub fn dq(&self, storage: Precision) -> f64 {
        self.forward.sum(self.dq_mag, 1.0, storage)
    }

    /// The largest allowed error of an element of `dk`, for tensors stored in `storage`.
    #[must_use]
    pub fn dk(&self, storage: Precision) -> f64 {
        self.forward.sum(self.dk_mag, 1.0, storage)
    }

    /// The largest allowed error of an element of `dv`, for tensors stored in `storage`.
    #[must_use]
    pub fn dv(&self, storage: Precision) -> f64 {
        self.forward.sum(self.dv_mag, 2.0, storage)
    }

    /// The largest allowed error of an element of `dbias`, for tensors stored in `storage`.
    #[must_use]
    pub fn dbias(&self, storage: Precision) -> f64 {
        self.forward.sum(self.dbias_mag, 1.0, storage)
    }

    /// The largest allowed error of an element of `dsinks`, for tensors stored in `storage`.
    #[must_use]
    pub fn dsinks(&self, storage: Precision) -> f64 {
        self.forward.sum(self.dsinks_mag, 1.0, storage)
    }
}
