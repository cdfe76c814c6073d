//! `// @include`: files and slots.
//!
//! A text that several tensors need, each under its own name, is included once an instance: `// @include stored as k = f32` takes
//! `common/stored_f32.wgsl` and calls `k` what the file calls `stored`, `k_at` what it calls `stored_at`, `K_BINDING` what it calls
//! `STORED_BINDING`. The slot is `k` then.

use super::library::Library;
use super::line::{Directive, Line, Origin, scan};
use super::recipe::Filling;
use crate::{Error, Result};
use std::collections::BTreeMap;

type File = (&'static str, &'static str);

/// The lines of a file and of all that it includes.
pub(super) fn include(
    library: Library,
    file: File,
    slots: &BTreeMap<&'static str, Filling>,
    read_write: bool,
) -> Result<Vec<Line>> {
    let mut includer = Includer {
        library,
        slots,
        read_write,
        open: Vec::new(),
        instance: None,
        files: BTreeMap::new(),
        names: BTreeMap::new(),
        lines: Vec::new(),
    };
    includer.file(file)?;
    match slots.keys().find(|slot| !includer.names.contains_key(**slot)) {
        None => Ok(enables_first(includer.lines)),
        Some(slot) => {
            let names = includer.names.into_keys().collect::<Vec<_>>().join(", ");
            Err(Error::invalid(format!("{}: slot `{slot}` isn't among the includes: {names}", file.0)))
        }
    }
}

/// WGSL wants its `enable` directives before all else: each once.
fn enables_first(lines: Vec<Line>) -> Vec<Line> {
    let (mut enables, rest): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.code.starts_with("enable "));
    let mut seen = Vec::new();
    enables.retain(|line| {
        let new = !seen.contains(&line.code);
        seen.push(line.code.clone());
        new
    });
    enables.into_iter().chain(rest).collect()
}

const READ: &str = "var<storage, read>";
const READ_WRITE: &str = "var<storage, read_write>";

struct Includer<'a> {
    library: Library,
    slots: &'a BTreeMap<&'static str, Filling>,
    /// Whether instances are declared as read and written.
    read_write: bool,
    /// The paths of the files that are being read, outermost first.
    open: Vec<&'static str>,
    /// The instance that is being read.
    instance: Option<String>,
    /// What has been included so far, by path and by the directive's name, with the place of the directive.
    files: BTreeMap<(&'static str, Option<String>), Origin>,
    names: BTreeMap<String, Origin>,
    lines: Vec<Line>,
}

impl Includer<'_> {
    fn file(&mut self, (path, text): File) -> Result<()> {
        self.open.push(path);
        for line in scan(path, text) {
            match line.directive {
                Some(Directive::Include { name, instance, default }) => {
                    self.directive(line.origin, &name, instance, default.as_deref())?;
                }
                Some(Directive::Malformed(message)) => return Err(line.origin.error(message)),
                _ => self.lines.push(line),
            }
        }
        self.open.pop();
        Ok(())
    }

    fn directive(&mut self, origin: Origin, name: &str, instance: Option<String>, default: Option<&str>) -> Result<()> {
        let slot = instance.as_deref().unwrap_or(name);
        let filling = self.slots.get_key_value(slot);
        let start = self.lines.len();
        let known_as = self.instance.iter().map(String::as_str).chain([slot]).collect::<Vec<_>>().join(".");
        let same_name = self.names.insert(known_as, origin);
        let twice = |first: Option<Origin>| match first {
            Some(first) => Err(origin.error(format!("`{slot}` is included twice, the first time at {first}"))),
            None => Ok(()),
        };
        if let Some((&slot, Filling::Text(text))) = filling {
            twice(same_name)?;
            // Somebody else's text: no directive of it is one of ours.
            self.lines.extend(
                (1..)
                    .zip(text.lines())
                    .map(|(number, text)| Line::generated(Origin { file: slot, line: number }, &format!("{text}\n"))),
            );
            return Ok(());
        }
        let alternative = match filling {
            Some((_, Filling::Alternative(alternative))) => Some(*alternative),
            _ => default,
        };
        let file = self.resolve(name, slot, alternative).map_err(|message| origin.error(message))?;
        if self.open.contains(&file.0) {
            return Err(origin.error(format!("include cycle: {} -> {}", self.open.join(" -> "), file.0)));
        }
        // What an instance includes is the instance's own.
        let outer = self.instance.clone();
        self.instance = instance.clone().or(self.instance.take());
        twice(self.files.insert((file.0, self.instance.clone()), origin).or(same_name))?;
        self.file(file)?;
        self.instance = outer;
        if let Some(last) = self.lines.last_mut() {
            last.end_line();
        }
        if let Some(instance) = &instance {
            for line in &mut self.lines[start..] {
                line.rename(name, instance);
                if let Some(at) = line.code.find(READ).filter(|_| self.read_write) {
                    line.replace(at..at + READ.len(), READ_WRITE);
                }
            }
        }
        Ok(())
    }

    /// The file for a name.
    fn resolve(&self, name: &str, slot: &str, alternative: Option<&str>) -> Result<File, String> {
        let path = match alternative {
            Some(alternative) => format!("common/{name}_{alternative}.wgsl"),
            None => format!("common/{name}.wgsl"),
        };
        self.library.file(&path).ok_or_else(|| {
            let alternatives = self.library.alternatives(name).join(", ");
            match alternative {
                _ if alternatives.is_empty() => format!("there is no {path}"),
                Some(alternative) => format!("slot `{slot}` = `{alternative}`, supported: {alternatives}"),
                None => format!("slot `{slot}` has no default, so the recipe has to choose from: {alternatives}"),
            }
        })
    }
}
