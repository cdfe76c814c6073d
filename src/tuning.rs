//! What was measured fastest, kept in a file that people can read, and ship.

use core::fmt;
use core::str::FromStr;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::problem::{Dims, Problem, Storage};

/// The first line of a file that is one.
const FORMAT: &str = "tilewise tuning 1";

/// A file is read whole: one that is longer than this isn't a tuning file.
const MAX_BYTES: u64 = 1 << 20;

/// Which variants were measured fastest, on which devices, for which calls.
///
/// `tilewise tune` measures and saves; [`crate::Engine::open`] loads what lies in [`Tuning::cache_path`], unless
/// [`crate::EngineOptions::tuning`] says otherwise. The library never measures by itself. Only speed depends on it: whichever variant runs,
/// results stay within the tolerances, though their last bits may differ.
///
/// A choice holds for calls with the same types, `head_dim` and `value_dim`, and with `batch * q_heads`, `q_len` and `kv_len` between the
/// same powers of two as where it was measured, whatever their masks and options.
///
/// The text is lines: `tilewise tuning 1`; then `device NAME`, as [`crate::Engine::describe_adapter`] says it to the line's end, and under it
/// `CALLS = VARIANT`, each with a `#` and what was measured behind it. A variant that the library doesn't know (any more) is no error, and
/// not chosen.
///
/// ```
/// let text = "tilewise tuning 1
/// device llvmpipe (LLVM 15.0.6, 256 bits) (Cpu, Vulkan, llvmpipe Mesa 22.3.6)
/// forward f32 f32 f32 f32 head_dim 64 value_dim 64 heads 4 q_len 2048 kv_len 2048 = flash_fwd_broadcast rows 4 # 96 ms
/// ";
/// let tuning: tilewise::Tuning = text.parse()?;
/// assert_eq!(tuning.to_string(), text);
/// # Ok::<(), tilewise::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tuning {
    devices: BTreeMap<String, Arc<Choices>>,
}

/// The choices of one device: a part of its [`crate::DeviceFacts`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices {
    /// By the calls that it's for.
    of_calls: BTreeMap<String, Chosen>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Chosen {
    tile: String,
    note: String,
}

/// Which choices an engine takes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum TuningChoice {
    /// Those that `tilewise tune` left on this machine, if it did; what can't be read is as if it weren't there.
    #[default]
    Cache,
    /// None: the planner's own order.
    None,
    /// Those of a file, which must be there and be one. It may hold several devices; of one that it doesn't know nothing is taken.
    File(PathBuf),
}

/// Calls that are alike.
fn calls_like(problem: &Problem) -> String {
    let Storage { q, k, v, o } = problem.storage;
    let Dims { batch, q_heads, head_dim, value_dim, .. } = problem.dims;
    let (q_len, kv_len) = problem.longest();
    let [heads, q_len, kv_len] = [batch.saturating_mul(q_heads), q_len, kv_len]
        .map(|size| size.checked_next_power_of_two().unwrap_or(usize::MAX));
    format!(
        "forward {q} {k} {v} {o} head_dim {head_dim} value_dim {value_dim} heads {heads} q_len {q_len} kv_len {kv_len}"
    )
}

impl Choices {
    /// The tile that was measured fastest for calls like this one.
    pub(crate) fn forward(&self, problem: &Problem) -> Option<&str> {
        if self.of_calls.is_empty() {
            return None;
        }
        Some(&self.of_calls.get(&calls_like(problem))?.tile)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.of_calls.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.of_calls.is_empty()
    }
}

impl Tuning {
    /// Where `tilewise tune` saves, and engines look: `tilewise/tuning.txt` in the platform's folder for caches. None where there is no
    /// such folder.
    pub fn cache_path() -> Option<PathBuf> {
        Some(dirs::cache_dir()?.join("tilewise").join("tuning.txt"))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it can't be read, or isn't a tuning file or not even a regular file, with its name and the line.
    pub fn load(path: &Path) -> Result<Self> {
        let named = |error: String| Error::invalid(format!("{}: {error}", path.display()));
        let unreadable = |error: std::io::Error| named(error.to_string());
        // Before it's opened: a pipe would be waited for.
        if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(named("not a regular file; accepted: a tuning file".to_string()));
        }
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable)?;
        // Whatever length it's said to have: the files of /proc say 0.
        let bytes = file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if bytes as u64 > MAX_BYTES {
            return Err(named(format!("over {MAX_BYTES} bytes; accepted: a tuning file, of at most so many")));
        }
        text.parse().map_err(|error| match error {
            Error::Invalid(message) => named(message),
            error => error,
        })
    }

    /// The choices for a device, by the name that [`crate::Engine::describe_adapter`] gives it.
    pub fn choices(&self, device: &str) -> Arc<Choices> {
        self.devices.get(&one_line(device)).cloned().unwrap_or_default()
    }

    /// Keeps a kernel and tile as the choice for calls like a problem, in place of what there was.
    pub(crate) fn insert(&mut self, device: &str, problem: &Problem, tile: &str, note: &str) {
        let device = self.devices.entry(one_line(device)).or_default();
        let chosen = Chosen { tile: one_line(tile), note: one_line(note) };
        Arc::make_mut(device).of_calls.insert(calls_like(problem), chosen);
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FORMAT}")?;
        for (device, choices) in &self.devices {
            writeln!(f, "device {device}")?;
            for (calls, Chosen { tile, note }) in &choices.of_calls {
                let note = if note.is_empty() { String::new() } else { format!(" # {note}") };
                writeln!(f, "{calls} = {tile}{note}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Tuning {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // Some editors begin a file with a byte order mark.
        let mut lines = (1..).zip(text.trim_start_matches('\u{feff}').lines());
        if lines.next().is_none_or(|(_, line)| line.trim() != FORMAT) {
            return Err(Error::invalid(format!("not a tuning file; accepted: {FORMAT:?} as the first line")));
        }
        let mut tuning = Self::default();
        let mut device = None;
        for (number, line) in lines {
            // A name may have a # in it.
            if let Some(name) = line.trim().strip_prefix("device ") {
                device = Some(tuning.devices.entry(one_line(name)).or_default());
                continue;
            }
            let (line, note) = line.split_once('#').unwrap_or((line, ""));
            if line.trim().is_empty() {
                continue;
            }
            let (Some(device), Some((calls, tile))) = (&mut device, line.split_once('=')) else {
                let line = line.trim();
                let accepted = "accepted: `device NAME`, and after that `CALLS = VARIANT`";
                return Err(Error::invalid(format!("line {number}: {line:?}; {accepted}")));
            };
            let chosen = Chosen { tile: one_line(tile), note: one_line(note) };
            Arc::make_mut(device).of_calls.insert(one_line(calls), chosen);
        }
        Ok(tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{self, DeviceFacts, Plan};
    use crate::problem::Attention;

    fn problem(heads: usize, len: usize) -> Problem {
        Problem::new(Dims::square(1, heads, len, 64), Attention::causal()).unwrap()
    }

    #[test]
    fn a_choice_is_kept_for_calls_alike() {
        let facts = DeviceFacts::default();
        let candidates = Plan::candidates(&problem(4, 2000), &facts).unwrap();
        assert!(candidates.len() > 1);
        let (preferred, slowest) = (candidates.first().unwrap(), candidates.last().unwrap());
        let mut tuning = Tuning::default();
        tuning.choose("some  device", slowest, "2 ms;\n3 ms").unwrap();
        let tuning: Tuning = tuning.to_string().parse().unwrap();
        let facts = DeviceFacts { choices: tuning.choices("some device"), ..facts };
        let plan = |heads, len| Plan::new(&problem(heads, len), &facts, plan::Path::Auto).unwrap();
        for (heads, len) in [(4, 2000), (3, 2048), (4, 1025)] {
            let plan = plan(heads, len);
            assert_eq!(plan.tile(), slowest.tile());
            assert!(plan.explain().contains("measured fastest"), "{plan}");
        }
        for (heads, len) in [(5, 2000), (2, 2000), (4, 2049), (4, 1024)] {
            assert_eq!(plan(heads, len).tile(), preferred.tile());
        }
        let elsewhere = DeviceFacts { choices: tuning.choices("another device"), ..facts.clone() };
        assert_eq!(Plan::new(&problem(4, 2000), &elsewhere, plan::Path::Auto).unwrap().tile(), preferred.tile());
    }

    /// Drivers name devices as they like, and some tell nothing of themselves.
    #[test]
    fn a_device_is_found_by_any_name() {
        let plan = Plan::candidates(&problem(4, 2000), &DeviceFacts::default()).unwrap().pop().unwrap();
        for name in ["GPU #1", "GPU (IntegratedGpu, Metal,  )", " x\ty ", "device x", "a = b # c"] {
            let mut tuning = Tuning::default();
            tuning.choose(name, &plan, "2 ms").unwrap();
            let reread: Tuning = tuning.to_string().parse().unwrap();
            assert_eq!(reread, tuning);
            assert_eq!(reread.choices(name).len(), 1, "{name}");
        }
    }

    #[test]
    fn what_is_no_file_is_not_waited_for() {
        let error = |path: &str| Tuning::load(Path::new(path)).unwrap_err().to_string();
        assert!(error("/dev/zero").contains("not a regular file") || cfg!(not(unix)));
        assert!(error(".").contains("not a regular file"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.txt");
        std::fs::write(&path, format!("{FORMAT}\n{}", "#".repeat(1 << 20))).unwrap();
        assert!(Tuning::load(&path).unwrap_err().to_string().contains("over 1048576 bytes"));
        std::fs::write(&path, format!("\u{feff}{FORMAT}\ndevice x\n")).unwrap();
        assert_eq!(Tuning::load(&path).map(|tuning| tuning.devices.len()), Ok(1));
    }

    #[test]
    fn the_first_candidate_is_what_is_planned_untuned() {
        let software = DeviceFacts {
            device_type: wgpu::DeviceType::Cpu,
            features: wgpu::Features::SUBGROUP,
            min_subgroup_size: 8,
            limits: wgpu::Limits { max_compute_workgroup_storage_size: 32_768, ..wgpu::Limits::default() },
            ..DeviceFacts::default()
        };
        for facts in [DeviceFacts::default(), software] {
            for value_dim in [1, 64, 192, 193, 256, 512] {
                for (q_len, kv_len) in [(1, 8), (1, 4096), (9, 4096), (2000, 2000)] {
                    let dims = Dims { q_len, kv_len, value_dim, ..Dims::square(1, 2, 1, 64) };
                    let problem = Problem::new(dims, Attention::full()).unwrap();
                    let candidates = Plan::candidates(&problem, &facts).unwrap();
                    assert_eq!(candidates[0], Plan::new(&problem, &facts, plan::Path::Auto).unwrap(), "{dims:?}");
                    let tiles: Vec<_> = candidates.iter().map(Plan::tile).collect();
                    assert!((1..tiles.len()).all(|at| !tiles[..at].contains(&tiles[at])), "{tiles:?}");
                }
            }
        }
    }

    /// A file of another version, or of a device whose limits have changed.
    #[test]
    fn a_choice_that_there_is_not_is_not_taken() {
        let calls = calls_like(&problem(4, 2000));
        let text = format!("{FORMAT}\ndevice x\n{calls} = flash_fwd_of_tomorrow tiles 9\n");
        let facts = DeviceFacts { choices: text.parse::<Tuning>().unwrap().choices("x"), ..DeviceFacts::default() };
        let plan = Plan::new(&problem(4, 2000), &facts, plan::Path::Auto).unwrap();
        let without = Plan::new(&problem(4, 2000), &DeviceFacts::default(), plan::Path::Auto).unwrap();
        assert_eq!(plan.tile(), without.tile());
        assert!(plan.explain().contains("can't do this one"), "{plan}");
    }

    #[test]
    fn what_is_no_tuning_file_is_refused_with_its_line() {
        let error = |text: &str| text.parse::<Tuning>().unwrap_err().to_string();
        for text in ["", "tilewise tuning 2\n", "{}", "\u{0}\u{1}"] {
            assert!(error(text).contains("not a tuning file"), "{text:?}");
        }
        assert!(error("tilewise tuning 1\n\nforward = x\n").contains("line 3"));
        assert!(error("tilewise tuning 1\ndevice x\nforward x\n").contains("line 3"));
        assert_eq!("tilewise tuning 1\n# a remark\n\n".parse(), Ok(Tuning::default()));
    }
}
