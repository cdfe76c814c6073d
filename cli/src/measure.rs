//! Measuring: wall and CPU time, medians, the process's memory; and input that is the same everywhere.

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

/// What a piece of work took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elapsed {
    /// Wall clock.
    pub(crate) seconds: f64,
    /// CPU time of the process, user and system, over the number of cores: what the work would take on an idle machine if it
    /// kept all cores busy. None where it can't be had or says nothing about the device.
    pub(crate) cpu_seconds: Option<f64>,
}

impl Elapsed {
    /// Of several runs: each clock's median.
    pub(crate) fn median(runs: &[Self]) -> Self {
        let cpu: Vec<_> = runs.iter().filter_map(|run| run.cpu_seconds).collect();
        Self {
            seconds: median(runs.iter().map(|run| run.seconds)),
            cpu_seconds: (!cpu.is_empty()).then(|| median(cpu)),
        }
    }
}

/// The middle of some numbers, NaN of none.
pub(crate) fn median(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = numbers.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Two clocks started together.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    wall: Instant,
    cpu: Option<ProcessTime>,
}

impl Stopwatch {
    /// `software`: whether the device is the CPU, whose time then says more than the wall clock on a busy machine.
    pub(crate) fn start(software: bool) -> Self {
        let cpu = if software { ProcessTime::try_now().ok() } else { None };
        Self { wall: Instant::now(), cpu }
    }

    pub(crate) fn stop(&self) -> Elapsed {
        let seconds = self.wall.elapsed().as_secs_f64();
        let cpu = self.cpu.as_ref().and_then(|start| start.try_elapsed().ok());
        Elapsed { seconds, cpu_seconds: cpu.map(|cpu| cpu.as_secs_f64() / cores() as f64) }
    }
}

/// Cores that a software device can use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether the device computes on the CPU, in the host's memory.
pub(crate) fn is_software(engine: &tilewise::Engine) -> bool {
    engine.adapter_info().device_type == wgpu::DeviceType::Cpu
}

/// Watches how much memory the process holds: on a software device that is where the device's memory is. Linux only.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    at_start: u64,
}

impl ProcessMemory {
    /// Makes the present the new peak. None where the system can't tell.
    pub(crate) fn watch() -> Option<Self> {
        // "5" resets the peak (proc(5)); the file exists on Linux only.
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Self { at_start: status_bytes("VmRSS:")? })
    }

    /// The most that the process has held since, and by how much that is more than it held then.
    pub(crate) fn peak(&self) -> Option<(u64, u64)> {
        let peak = status_bytes("VmHWM:")?;
        Some((peak, peak.saturating_sub(self.at_start)))
    }
}

fn status_bytes(key: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Numbers of mean 0 and variance 1, the same for the same seed.
pub(crate) fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    // splitmix64 (Steele, Lea, Flood 2014): 53 bits of it as a number in (0, 1].
    let mut uniform = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON / 4.0
    };
    let mut numbers = Vec::with_capacity(count + 1);
    while numbers.len() < count {
        // Box and Muller 1958: two at a time.
        let radius = (-2.0 * uniform().ln()).sqrt();
        let (sin, cos) = (core::f64::consts::TAU * uniform()).sin_cos();
        #[expect(clippy::cast_possible_truncation, reason = "the kernels compute in f32")]
        numbers.extend([(radius * cos) as f32, (radius * sin) as f32]);
    }
    numbers.truncate(count);
    numbers
}

/// Runs wgpu calls with their errors caught: an uncaught one would end the program with a panic.
pub(crate) fn caught<T>(device: &wgpu::Device, calls: impl FnOnce() -> T) -> anyhow::Result<T> {
    let filters = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
    let scopes = filters.map(|filter| device.push_error_scope(filter));
    let value = calls();
    let mut first = None;
    for scope in scopes.into_iter().rev() {
        first = first.or(pollster::block_on(scope.pop()));
    }
    first.map_or(Ok(value), |error| Err(error.into()))
}

/// What long work is at: a bar on the terminal, with the time left, or now and then a line where stderr isn't one.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    lines: Option<Lines>,
}

/// When to write which line.
#[derive(Debug)]
struct Lines {
    stage: RefCell<String>,
    next: Cell<Instant>,
}

impl Lines {
    /// Work shorter than this needs no line.
    const FIRST: Duration = Duration::from_secs(1);
    const INTERVAL: Duration = Duration::from_secs(10);

    fn new(now: Instant) -> Self {
        Self { stage: RefCell::default(), next: Cell::new(now + Self::FIRST) }
    }

    /// The line, if it is time for one.
    fn due(&self, now: Instant, part: Option<f64>) -> Option<String> {
        if now < self.next.get() {
            return None;
        }
        self.next.set(now + Self::INTERVAL);
        let part = part.map(|part| format!(", {:.0}% done", 100.0 * part)).unwrap_or_default();
        Some(format!("{}{part}", self.stage.borrow()))
    }
}

impl Progress {
    const PARTS: u64 = 10_000;

    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(Self::PARTS);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{bar:40}] {percent:>3}%, {eta} left") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        let lines = (!io::stderr().is_terminal()).then(|| Lines::new(Instant::now()));
        Self { bar, lines }
    }

    /// Begins a piece of work.
    pub(crate) fn stage(&self, name: impl Into<String>) {
        self.begin(name.into());
        self.line(None);
    }

    /// Likewise, so far into the whole.
    pub(crate) fn stage_at(&self, part: f64, name: impl Into<String>) {
        self.begin(name.into());
        self.done(part);
    }

    fn begin(&self, name: String) {
        if let Some(lines) = &self.lines {
            lines.stage.replace(name.clone());
        }
        self.bar.reset();
        self.bar.set_message(name);
    }

    /// The part that is done, from 0 to 1.
    pub(crate) fn done(&self, part: f64) {
        let part = part.clamp(0.0, 1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        self.bar.set_position((part * Self::PARTS as f64) as u64);
        self.line(Some(part));
    }

    fn line(&self, part: Option<f64>) {
        if let Some(line) = self.lines.as_ref().and_then(|lines| lines.due(Instant::now(), part)) {
            eprintln!("{}", output::printable(&line));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Bytes for people: `64 GiB`, `2.25 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if scaled < 1024.0 {
            break;
        }
        scaled /= 1024.0;
        unit = next;
    }
    format!("{} {unit}", digits(scaled))
}

/// Seconds for people: `1.50 ms`, `12.3 s`, `4 min 10 s`.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds < 1e-3 {
        format!("{} us", digits(seconds * 1e6))
    } else if seconds < 1.0 {
        format!("{} ms", digits(seconds * 1e3))
    } else if seconds < 100.0 {
        format!("{} s", digits(seconds))
    } else {
        format!("{:.0} min {:.0} s", (seconds / 60.0).floor(), seconds % 60.0)
    }
}

/// Three significant digits, without zeros that say nothing.
pub(crate) fn digits(number: f64) -> String {
    let text = match number.abs() {
        x if x >= 100.0 => return format!("{number:.0}"),
        x if x >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median([]).is_nan());
    }

    #[test]
    fn figures_for_people() {
        assert_eq!(bytes(64 << 30), "64 GiB");
        assert_eq!(bytes(128 << 20), "128 MiB");
        assert_eq!(bytes(2304), "2.25 KiB");
        assert_eq!(bytes(17), "17 B");
        assert_eq!(seconds(0.0015), "1.5 ms");
        assert_eq!(seconds(250.2), "4 min 10 s");
        assert_eq!(digits(0.0), "0");
    }

    #[test]
    fn lines_come_now_and_then() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let lines = Lines::new(start);
        lines.stage.replace("checking".to_string());
        assert_eq!(lines.due(start, None), None);
        assert_eq!(lines.due(at(2), None), Some("checking".to_string()));
        assert_eq!(lines.due(at(11), Some(0.5)), None);
        assert_eq!(lines.due(at(12), Some(0.5)), Some("checking, 50% done".to_string()));
        assert_eq!(lines.due(at(13), Some(0.6)), None);
    }

    #[test]
    fn normal_numbers_are_normal() {
        let numbers = normal(1, 20_001);
        let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 20_001.0;
        let variance = numbers.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 20_001.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        assert_eq!(numbers, normal(1, 20_001));
        assert_ne!(numbers, normal(2, 20_001));
        assert!(numbers.iter().all(|x| x.is_finite()));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_shows_what_was_held() {
        let watch = ProcessMemory::watch().expect("/proc");
        let held = vec![1u8; 64 << 20];
        drop(std::hint::black_box(held));
        let (peak, growth) = watch.peak().expect("/proc");
        // Other tests run in the same process and may free memory meanwhile.
        assert!(growth >= 32 << 20 && peak >= growth, "{peak} {growth}");
    }
}
