//! `// @include`: files and slots.

use super::library::Library;
use super::line::{Directive, Line, Origin, scan};
use crate::{Error, Result};
use std::collections::BTreeMap;

type File = (&'static str, &'static str);

/// The lines of a file and of all that it includes.
pub(super) fn include(library: Library, file: File, slots: &BTreeMap<&'static str, &'static str>) -> Result<Vec<Line>> {
    let mut includer = Includer {
        library,
        slots,
        open: Vec::new(),
        files: BTreeMap::new(),
        names: BTreeMap::new(),
        lines: Vec::new(),
    };
    includer.file(file)?;
    match slots.keys().find(|slot| !includer.names.contains_key(**slot)) {
        None => Ok(includer.lines),
        Some(slot) => {
            let names = includer.names.into_keys().collect::<Vec<_>>().join(", ");
            Err(Error::invalid(format!("{}: slot `{slot}` isn't among the includes: {names}", file.0)))
        }
    }
}

struct Includer<'a> {
    library: Library,
    slots: &'a BTreeMap<&'static str, &'static str>,
    /// The paths of the files that are being read, outermost first.
    open: Vec<&'static str>,
    /// What has been included so far, by path and by the directive's name, with the place of the directive.
    files: BTreeMap<&'static str, Origin>,
    names: BTreeMap<String, Origin>,
    lines: Vec<Line>,
}

impl Includer<'_> {
    fn file(&mut self, (path, text): File) -> Result<()> {
        self.open.push(path);
        for line in scan(path, text) {
            match line.directive {
                Some(Directive::Include { name, default }) => self.directive(line.origin, name, default.as_deref())?,
                Some(Directive::Malformed(message)) => return Err(line.origin.error(message)),
                _ => self.lines.push(line),
            }
        }
        self.open.pop();
        Ok(())
    }

    fn directive(&mut self, origin: Origin, name: String, default: Option<&str>) -> Result<()> {
        let file = self.resolve(&name, default).map_err(|message| origin.error(message))?;
        if self.open.contains(&file.0) {
            return Err(origin.error(format!("include cycle: {} -> {}", self.open.join(" -> "), file.0)));
        }
        let same_name = self.names.insert(name.clone(), origin);
        if let Some(first) = self.files.insert(file.0, origin).or(same_name) {
            return Err(origin.error(format!("`{name}` is included twice, the first time at {first}")));
        }
        self.file(file)?;
        if let Some(last) = self.lines.last_mut() {
            last.end_line();
        }
        Ok(())
    }

    /// The file for a name. A text given by the user would be one more source here, with the slot's name for its path.
    fn resolve(&self, name: &str, default: Option<&str>) -> Result<File, String> {
        let alternative = self.slots.get(name).copied().or(default);
        let path = match alternative {
            Some(alternative) => format!("common/{name}_{alternative}.wgsl"),
            None => format!("common/{name}.wgsl"),
        };
        self.library.file(&path).ok_or_else(|| {
            let alternatives = self.library.alternatives(name).join(", ");
            match alternative {
                _ if alternatives.is_empty() => format!("there is no {path}"),
                Some(alternative) => format!("slot `{name}` = `{alternative}`, supported: {alternatives}"),
                None => format!("slot `{name}` has no default, so the recipe has to choose from: {alternatives}"),
            }
        })
    }
}
