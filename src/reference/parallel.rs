//! Using the cores for independent pieces of work.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// `[f(0), f(1), .. f(count − 1)]`, on all cores if `work` (in multiplications, roughly) is worth it.
///
/// Each piece is computed by one thread, alone, so the result doesn't depend on the number of threads.
pub(super) fn map<T: Send>(count: usize, work: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = if work < 1 << 20 { 1 } else { thread::available_parallelism().map_or(1, usize::from).min(count) };
    if threads <= 1 {
        return (0..count).map(f).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&n| n < count);
        core::iter::from_fn(take).map(|n| (n, f(n))).collect::<Vec<_>>()
    };
    let mut results = thread::scope(|scope| {
        // This thread works too, so a helper that can't be started only costs time.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, worker).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mut results = worker();
        for helper in helpers {
            match helper.join() {
                Ok(more) => results.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|&(n, _)| n);
    results.into_iter().map(|(_, result)| result).collect()
}
