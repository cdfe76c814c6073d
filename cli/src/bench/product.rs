//! Measuring the plain matrix product of the library, on square matrices.

use anyhow::{Result, ensure};
use tilewise::reference;

use super::Bench;
use super::attention::repeat;
use super::check::{Checked, PRODUCT_ROWS, spread};
use super::row::{Measured, MemoryWatch, Row, Spec};
use crate::measure::{self, Stopwatch};

/// Why there is nothing to measure on the naive path.
pub(super) const NO_NAIVE: &str = "a matrix product has no naive path";

pub(super) fn measure(bench: &Bench<'_>, spec: &Spec) -> Result<Row> {
    let Bench { engine, progress, .. } = *bench;
    let n = spec.q_len;
    let flops = (n as u64).saturating_pow(3).saturating_mul(2);
    progress.stage(format!("{n}: making matrices"));
    let (a_host, b_host) = (measure::normal(1, n * n), measure::normal(2, n * n));
    let (a, b) = (engine.upload(&a_host, [n, n])?, engine.upload(&b_host, [n, n])?);

    let title = format!("{n}: matrix product");
    progress.stage(&title);
    // The first call waits for the driver's compiler.
    engine.matmul(&a, &b)?;
    engine.wait()?;
    let memory = MemoryWatch::start(bench)?;
    let timed = || -> Result<_> {
        let watch = Stopwatch::start(bench.software);
        let c = engine.matmul(&a, &b)?;
        engine.wait()?;
        Ok((watch.stop(), c))
    };
    let (first, c) = timed()?;
    let memory = memory.stop(c.raw_buffer().size());
    let checked = check(n, &a_host, &b_host, &c.read()?)?;
    drop(c);

    let runs = repeat(bench, &title, first, || Ok(timed()?.0))?;
    Ok(Row {
        spec: *spec,
        flops,
        max_abs_diff: checked.max_abs_err,
        compared: format!("with the f64 reference, {0}x{0} elements", checked.rows),
        tiled: Some(Measured::new(bench, flops, &runs, memory, engine.matmul_kernel(&a, &b, false)?, &checked)),
        naive: None,
    })
}

/// Compares the elements where some rows and some columns meet.
fn check(n: usize, a: &[f32], b: &[f32], c: &[f32]) -> Result<Checked> {
    let picked = spread(n, PRODUCT_ROWS);
    let rows: Vec<f32> = picked.iter().flat_map(|&i| a[i * n..(i + 1) * n].iter().copied()).collect();
    let columns: Vec<f32> = picked.iter().flat_map(|&j| (0..n).map(move |k| b[k * n + j])).collect();
    let expected = reference::matmul_transposed(1, [picked.len(), n, picked.len()], &rows, &columns)?;
    let got: Vec<f32> = picked.iter().flat_map(|&i| picked.iter().map(move |&j| c[i * n + j])).collect();
    let tolerance = (n as f64 + 1.0) * reference::Precision::F32.unit_roundoff() * expected.mag;
    let compared = reference::compare(&got, &expected.c, tolerance);
    ensure!(compared.passed(), "the product is not the f64 reference's: {compared}");
    Ok(Checked::product(&compared, picked.len()))
}
