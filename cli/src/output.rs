//! What commands print and write.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::measure;

/// Prints text to stdout. That nobody reads on (`tilewise info | head`) is no error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("writing to stdout"),
        _ => Ok(()),
    }
}

/// Prints the one JSON document of a command.
pub(crate) fn print_json(document: &impl Serialize) -> Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(document)?))
}

/// An empty table with a header.
pub(crate) fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header);
    table
}

/// An error figure for people: `3.28e-7`, `0.52`.
pub(crate) fn figure(x: f64) -> String {
    if x == 0.0 || (0.01..1e4).contains(&x) { measure::digits(x) } else { format!("{x:.2e}") }
}

/// Operations for people: `4.29 GFLOP`.
pub(crate) fn flops(count: u64) -> String {
    const UNITS: [&str; 5] = ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"];
    let mut scaled = count as f64;
    let mut unit = "FLOP";
    for next in UNITS {
        if scaled < 1000.0 {
            break;
        }
        scaled /= 1000.0;
        unit = next;
    }
    format!("{} {unit}", measure::digits(scaled))
}

/// An error and its causes, with sizes for people.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let text = |cause: &(dyn core::error::Error + 'static)| match cause.downcast_ref() {
        Some(tilewise::Error::Unsupported { what, needed, available }) => {
            let [needed, available] = amounts(what, *needed, *available);
            format!("this device can't do that: {what}: {needed} needed, {available} available")
        }
        _ => cause.to_string(),
    };
    error.chain().map(text).collect::<Vec<_>>().join(": ")
}

/// How much of something is needed and how much there is: in units for people if it is bytes and they tell the two apart.
pub(crate) fn amounts(what: &str, needed: u64, available: u64) -> [String; 2] {
    let [scaled_needed, scaled_available] = [needed, available].map(measure::bytes);
    if what.starts_with("bytes") && scaled_needed != scaled_available {
        [scaled_needed, scaled_available]
    } else {
        [needed, available].map(|count| count.to_string())
    }
}

/// A file to be written at the end of a run, checked before it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OutFile(PathBuf);

impl OutFile {
    /// Whether a file can be put there.
    pub(crate) fn check(path: &Path) -> Result<Self> {
        // Replace what a link points to, not the link; and never a device such as /dev/null.
        let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        if let Ok(metadata) = target.metadata() {
            ensure!(metadata.is_file(), "{} isn't a regular file", path.display());
        }
        ensure!(target.file_name().is_some(), "{} is no file name", path.display());
        let file = Self(target);
        let folder = folder(&file.0);
        ensure!(folder.is_dir(), "there is no folder {}", folder.display());
        let temporary = file.temporary();
        File::create_new(&temporary)
            .and_then(|_| std::fs::remove_file(&temporary))
            .with_context(|| format!("no file can be written in {}", folder.display()))?;
        Ok(file)
    }

    /// Writes the file whole or not at all: under another name first.
    pub(crate) fn write(&self, contents: &[u8]) -> Result<()> {
        let temporary = self.temporary();
        let written = File::create_new(&temporary)
            .and_then(|mut file| file.write_all(contents).and_then(|()| file.sync_all()))
            .and_then(|()| std::fs::rename(&temporary, &self.0));
        if let Err(error) = written {
            // Nothing to be done if that fails too; the first error is the one to tell.
            let _ = std::fs::remove_file(&temporary);
            bail!("writing {}: {error}", self.0.display());
        }
        Ok(())
    }

    /// Beside the file, by a short name: the file's own may be as long as the system allows.
    fn temporary(&self) -> PathBuf {
        folder(&self.0).join(format!(".tilewise.{}.tmp", std::process::id()))
    }
}

/// Text out of a file, fit for a terminal: without the control characters that could move its cursor or change its colours.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_errors_are_for_people() {
        let unsupported = |what: &str, needed, available| {
            let error = tilewise::Error::Unsupported { what: what.to_string(), needed, available };
            error_text(&anyhow::Error::from(error).context("file"))
        };
        let sizes = unsupported("bytes in one storage binding (q)", 268_435_456, 134_217_728);
        assert_eq!(
            sizes,
            "file: this device can't do that: bytes in one storage binding (q): 256 MiB needed, 128 MiB available"
        );
        assert!(
            unsupported("bytes in one buffer", 134_217_744, 134_217_728).contains("134217744 needed, 134217728 av")
        );
        assert!(unsupported("value_dim", 600, 512).contains("600 needed, 512 available"));
    }
}
