//! Whether a result is right. No time is reported of one that isn't.

use anyhow::{Result, bail, ensure};
use tilewise::reference::{self, Case, Row, Tolerance};
use tilewise::{AttentionOutput, Problem, Storage};

use super::row::Spec;
use crate::args::Align;
use crate::measure;
use crate::tensors::{Numbers, precision};

/// Rows that are compared with the f64 reference.
const ROWS: usize = 16;

/// What a check found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Checked {
    pub(super) max_abs_err: f64,
    pub(super) tolerance: f64,
    pub(super) rows: usize,
    /// What the tolerance is made of.
    parts: Tolerance,
}

impl Checked {
    pub(super) fn product(comparison: &reference::Comparison, rows: usize) -> Self {
        Self { max_abs_err: comparison.max_abs_err, tolerance: comparison.tolerance, rows, parts: Tolerance::default() }
    }
}

/// Rows and columns of a matrix product that are compared with the f64 reference.
pub(super) const PRODUCT_ROWS: usize = 8;

/// The host's copy of the inputs: the very numbers that the device has, whatever it stores them in.
pub(super) struct HostInputs {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

impl HostInputs {
    pub(super) fn of(qkv: [Numbers; 3]) -> Self {
        let [q, k, v] = qkv.map(Numbers::into_f32);
        Self { q, k, v }
    }
}

/// q, k and v for a problem, in the types it stores them in.
pub(super) fn random(problem: &Problem) -> [Numbers; 3] {
    let (dims, Storage { q, k, v, .. }) = (problem.dims(), problem.stored());
    let normal = |seed, elems, dtype| Numbers::F32(measure::normal(seed, elems)).stored(dtype);
    [normal(1, dims.q_elems(), q), normal(2, dims.k_elems(), k), normal(3, dims.v_elems(), v)]
}

/// The host's copy of a result.
pub(super) struct HostOutput {
    pub(super) o: Vec<f32>,
    lse: Vec<f32>,
}

impl HostOutput {
    pub(super) fn read(output: &AttentionOutput) -> tilewise::Result<Self> {
        Ok(Self { o: output.o.read()?, lse: output.lse.read()? })
    }
}

/// `count` numbers spread over `0..size`, its first and last among them.
pub(super) fn spread(size: usize, count: usize) -> Vec<usize> {
    let count = count.min(size);
    (0..count).map(|n| if count == 1 { size - 1 } else { n * (size - 1) / (count - 1) }).collect()
}

/// The reference's view of a problem.
pub(super) fn case<'a>(spec: &Spec, problem: &Problem, inputs: &'a HostInputs) -> Case<'a> {
    let (dims, options) = (&problem.dims(), &spec.options);
    let [window_left, window_right] = options.window.map_or([None; 2], |window| window.0);
    Case {
        batch: dims.batch,
        q_heads: dims.q_heads,
        kv_heads: dims.kv_heads,
        q_len: dims.q_len,
        kv_len: dims.kv_len,
        head_dim: dims.head_dim,
        value_dim: dims.value_dim,
        q: &inputs.q,
        k: &inputs.k,
        v: &inputs.v,
        softmax_scale: options.scale.map(f64::from),
        causal: options.causal,
        align: options.align.of_reference(),
        window_left,
        window_right,
        softcap: options.softcap.map(f64::from),
        ..Case::default()
    }
}

/// Compares some rows with the f64 reference, and looks for rows that were never written.
pub(super) fn against_reference(
    spec: &Spec,
    problem: &Problem,
    inputs: &HostInputs,
    output: &HostOutput,
) -> Result<Checked> {
    let dims = &problem.dims();
    let picked = spread(dims.rows(), ROWS);
    let rows: Vec<_> = picked
        .iter()
        .map(|&n| Row {
            batch: n / dims.q_len / dims.q_heads,
            head: n / dims.q_len % dims.q_heads,
            row: n % dims.q_len,
        })
        .collect();
    let expected = reference::attention_rows(&case(spec, problem, inputs), &rows)?;
    let o_row = |n: usize| &output.o[n * dims.value_dim..(n + 1) * dims.value_dim];
    let o: Vec<f32> = picked.iter().flat_map(|&n| o_row(n).iter().copied()).collect();
    let lse: Vec<f32> = picked.iter().map(|&n| output.lse[n]).collect();

    let compared = reference::compare(&o, &expected.o, expected.tolerance.o(precision(problem.stored().o)));
    ensure!(compared.passed(), "o of rows {picked:?} is not the f64 reference's: {compared}");
    let compared_lse = reference::compare(&lse, &expected.lse, expected.tolerance.lse());
    ensure!(compared_lse.passed(), "lse of rows {picked:?} is not the f64 reference's: {compared_lse}");

    // HostInputs are random: a row of zeros or without a sum is one that sees no key, or that a kernel has left out.
    let (q_len, kv_len) = (dims.q_len as i64, dims.kv_len as i64);
    let offset = if spec.options.align == Align::BottomRight { kv_len - q_len } else { 0 };
    let [left, right] = spec.options.window.map_or([None; 2], |window| window.0.map(|bound| bound.map(i64::from)));
    let right = if spec.options.causal { Some(0) } else { right };
    for n in 0..dims.rows() {
        let position = (n % dims.q_len) as i64 + offset;
        let first = left.map_or(0, |left| (position - left).max(0));
        let last = right.map_or(kv_len - 1, |right| (position + right).min(kv_len - 1));
        let sees = first <= last;
        let (lse, zero) = (output.lse[n], o_row(n).iter().all(|&x| x == 0.0));
        if sees {
            ensure!(lse.is_finite() && !zero, "row {n} was never written");
        } else {
            ensure!(lse == f32::NEG_INFINITY && zero, "row {n} sees no key, but has a result");
        }
    }
    Ok(Checked {
        max_abs_err: compared.max_abs_err,
        tolerance: compared.tolerance,
        rows: picked.len(),
        parts: expected.tolerance,
    })
}

/// Compares two results of the same inputs element by element. Each may be off by what the reference allows, its largest
/// value standing in for the magnitudes of the rows that the reference hasn't seen.
pub(super) fn against_each_other(
    problem: &Problem,
    inputs: &HostInputs,
    tiled: &HostOutput,
    naive: &HostOutput,
    checked: &Checked,
) -> Result<f64> {
    let mag = inputs.v.iter().map(|&v| f64::from(v.abs())).fold(0.0, f64::max);
    let tolerance = 2.0 * Tolerance { mag, ..checked.parts }.o(precision(problem.stored().o));
    let compared = reference::compare(&tiled.o, &naive.o, tolerance);
    if !compared.passed() {
        bail!("tiled and naive attention differ: {compared}");
    }
    Ok(compared.max_abs_err)
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;
    use crate::args::{Dtype, Options};

    const SPEC: Spec = Spec {
        q_len: 40,
        kv_len: 30,
        batch: 1,
        head_dim: 4,
        value_dim: 3,
        heads: 2,
        kv_heads: 1,
        options: Options { causal: true, align: Align::BottomRight, window: None, scale: None, softcap: None },
        dtype: Dtype::F32,
        kind: Kind::Forward,
    };

    /// A right result: the reference's, rounded.
    #[expect(clippy::cast_possible_truncation, reason = "what a device would store")]
    fn right(spec: &Spec) -> (Problem, HostInputs, HostOutput) {
        let problem = spec.problem().unwrap();
        let inputs = HostInputs::of(random(&problem));
        let exact = reference::attention(&case(spec, &problem, &inputs)).unwrap();
        let single = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
        let o = Numbers::F32(single(exact.o)).stored(spec.dtype.stored()).into_f32();
        (problem, inputs, HostOutput { o, lse: single(exact.lse) })
    }

    #[test]
    fn a_right_result_passes() {
        let (problem, inputs, output) = right(&SPEC);
        let checked = against_reference(&SPEC, &problem, &inputs, &output).unwrap();
        assert!(checked.max_abs_err < 1e-6 && checked.rows == ROWS);
        assert_eq!(against_each_other(&problem, &inputs, &output, &output, &checked).unwrap(), 0.0);
    }

    /// Windows of which some rows see no key, at either end, with and without the other options.
    #[test]
    fn right_results_of_every_option_pass() {
        for (q_len, kv_len) in [(40, 30), (30, 40), (20, 20), (7, 0)] {
            for window in ["3,0", "none,2", "0,none", "-1,-1", "4294967295,4294967295"] {
                for (causal, align, softcap, dtype) in [
                    (false, Align::BottomRight, None, Dtype::F32),
                    (true, Align::BottomRight, Some(2.0), Dtype::F16),
                    (false, Align::TopLeft, None, Dtype::Bf16),
                ] {
                    let window = Some(window.parse().unwrap());
                    let options = Options { causal, align, window, scale: Some(0.7), softcap };
                    let spec = Spec { q_len, kv_len, options, dtype, ..SPEC };
                    let (problem, inputs, mut output) = right(&spec);
                    let checked = against_reference(&spec, &problem, &inputs, &output);
                    let checked = checked.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                    assert!(checked.max_abs_err <= checked.tolerance, "{spec:?}");
                    // The other way round: a result in a row that sees none, and none in one that does.
                    if let Some(n) = output.lse.iter().position(|lse| lse.is_finite()) {
                        output.lse[n] = f32::NEG_INFINITY;
                        assert!(against_reference(&spec, &problem, &inputs, &output).is_err(), "{spec:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_tolerance_is_that_of_the_type() {
        let tolerance = |dtype: Dtype| {
            let spec = Spec { dtype, ..SPEC };
            let (problem, inputs, output) = right(&spec);
            against_reference(&spec, &problem, &inputs, &output).unwrap().tolerance
        };
        let [f32, f16, bf16] = [Dtype::F32, Dtype::F16, Dtype::Bf16].map(tolerance);
        assert!(100.0 * f32 < f16 && 4.0 * f16 < bf16, "{f32} {f16} {bf16}");
    }

    #[test]
    fn wrong_and_missing_rows_are_seen() {
        let spoil = |row: usize, x: f32| {
            let (problem, inputs, mut output) = right(&SPEC);
            let checked = against_reference(&SPEC, &problem, &inputs, &output).unwrap();
            let good = HostOutput { o: output.o.clone(), lse: output.lse.clone() };
            output.o[3 * row..3 * row + 3].fill(x);
            let by_reference =
                against_reference(&SPEC, &problem, &inputs, &output).map(|_| ()).map_err(|e| e.to_string());
            (by_reference, against_each_other(&problem, &inputs, &good, &output, &checked).is_err())
        };
        let picked = spread(80, ROWS);
        assert!(picked.contains(&79) && !picked.contains(&78));
        assert!(spoil(79, 0.5).0.unwrap_err().contains("f64 reference"));
        assert!(spoil(78, 0.0).0.unwrap_err().contains("never written"));
        assert!(spoil(78, f32::NAN).1);
        // The first 10 rows of a head see no key.
        assert!(spoil(2, 0.5).0.unwrap_err().contains("sees no key"));
    }

    #[test]
    fn spread_covers_both_ends() {
        assert_eq!(spread(5, 3), [0, 2, 4]);
        assert_eq!(spread(2, 16), [0, 1]);
        assert_eq!(spread(1, 16), [0]);
        assert!(spread(0, 16).is_empty());
    }
}
