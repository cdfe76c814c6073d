//! What doubling the length does: tiled attention takes four times the time but only twice the memory.

use serde::Serialize;

use super::row::{Measured, Row};
use crate::measure::digits;

/// One doubling of q_len and kv_len, on one path.
#[derive(Debug, Serialize)]
pub(super) struct Growth {
    path: &'static str,
    from_q_len: usize,
    to_q_len: usize,
    pub(super) shape: String,
    time_ratio: f64,
    /// By CPU time, on software devices.
    cpu_time_ratio: Option<f64>,
    extra_bytes_ratio: f64,
}

impl Growth {
    /// Of every pair of rows of which one is twice as long as the other and otherwise the same.
    pub(super) fn of(rows: &[Row]) -> Vec<Self> {
        let mut all = Vec::new();
        for short in rows {
            let mut doubled = short.spec;
            doubled.q_len *= 2;
            doubled.kv_len *= 2;
            let Some(long) = rows.iter().find(|row| row.spec == doubled) else { continue };
            let pairs = [
                ("tiled", short.tiled.as_ref().zip(long.tiled.as_ref())),
                ("naive", short.naive_measured().zip(long.naive_measured())),
            ];
            for (path, pair) in pairs {
                all.extend(pair.map(|(from, to)| Self::between(path, short, long, from, to)));
            }
        }
        all
    }

    fn between(path: &'static str, short: &Row, long: &Row, from: &Measured, to: &Measured) -> Self {
        Self {
            path,
            from_q_len: short.spec.q_len,
            to_q_len: long.spec.q_len,
            shape: short.spec.shape(),
            time_ratio: to.seconds / from.seconds,
            cpu_time_ratio: from.cpu_seconds.zip(to.cpu_seconds).map(|(from, to)| to / from),
            extra_bytes_ratio: to.memory.extra_bytes as f64 / from.memory.extra_bytes as f64,
        }
    }

    pub(super) fn line(&self) -> String {
        let Self { path, from_q_len: from, to_q_len: to, .. } = self;
        let cpu = self.cpu_time_ratio.map(|ratio| format!(" (CPU {})", digits(ratio))).unwrap_or_default();
        format!(
            "{path} {from} -> {to}: time x {}{cpu}, extra memory x {}",
            digits(self.time_ratio),
            digits(self.extra_bytes_ratio)
        )
    }
}
