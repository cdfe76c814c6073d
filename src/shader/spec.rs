//! `// @spec`, and the module-scope declarations it stands behind.

use super::line::{Directive, Line, is_word};
use super::recipe::Value;
use crate::{Error, Result};
use core::ops::Range;
use std::collections::BTreeMap;

/// `const NAME: TYPE = VALUE;`, `const NAME = VALUE;` or `alias NAME = VALUE;`, alone on its line.
#[derive(Debug)]
pub(super) struct Declaration<'a> {
    pub(super) is_alias: bool,
    pub(super) name: &'a str,
    /// The type that a `const` states.
    pub(super) type_name: Option<&'a str>,
    /// Where in the line the value stands.
    pub(super) value: Range<usize>,
}

/// The declarations outside all braces, each with the index of its line.
pub(super) fn declarations(lines: &[Line]) -> Vec<(usize, Declaration<'_>)> {
    let mut depth = 0_usize;
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        if depth == 0 {
            found.extend(parse(&line.code).map(|declaration| (index, declaration)));
        }
        for char in line.code.chars() {
            match char {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
    }
    found
}

fn parse(code: &str) -> Option<Declaration<'_>> {
    let (statement, rest) = code.split_once(';')?;
    let (head, value) = statement.split_once('=')?;
    let (keyword, head) = head.trim_start().split_once(char::is_whitespace)?;
    let is_alias = keyword == "alias";
    let (name, type_name) = match head.split_once(':') {
        Some((name, type_name)) => (name.trim(), Some(type_name.trim())),
        None => (head.trim(), None),
    };
    let end = statement.trim_end().len();
    let start = statement.len() - value.trim_start().len();
    let sound = (is_alias && type_name.is_none()) || keyword == "const";
    (sound && is_word(name) && rest.trim().is_empty() && start < end).then_some(Declaration {
        is_alias,
        name,
        type_name,
        value: start..end,
    })
}

/// The declarations with `// @spec`, each with the index of its line.
pub(super) fn find(lines: &[Line]) -> Result<Vec<(usize, Declaration<'_>)>> {
    let mut at_line: BTreeMap<usize, Declaration<'_>> = declarations(lines).into_iter().collect();
    let mut first = BTreeMap::new();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate().filter(|(_, line)| line.directive == Some(Directive::Spec)) {
        let declaration =
            at_line.remove(&index).filter(|it| it.is_alias || it.type_name.is_some()).ok_or_else(|| {
                let accepted =
                    "`const NAME: TYPE = VALUE;` or `alias NAME = TYPE;`, at module scope and alone on the line";
                line.origin.error(format!("`// @spec` has to follow {accepted}"))
            })?;
        if let Some(first) = first.insert(declaration.name, line.origin) {
            return Err(line
                .origin
                .error(format!("`{}` is a spec twice, the first time at {first}", declaration.name)));
        }
        found.push((index, declaration));
    }
    Ok(found)
}

/// Writes the recipe's values into their declarations. `path` is the kernel's file.
pub(super) fn apply(lines: &mut [Line], path: &str, specs: &BTreeMap<&'static str, Value>) -> Result<()> {
    let found = find(lines)?;
    if let Some(name) = specs.keys().find(|name| !found.iter().any(|(_, it)| it.name == **name)) {
        let names = found.iter().map(|(_, it)| it.name).collect::<Vec<_>>().join(", ");
        return Err(Error::invalid(format!("{path}: `{name}` isn't among the specs: {names}")));
    }
    let mut edits = Vec::new();
    for (index, declaration) in found {
        let Some(value) = specs.get(declaration.name) else { continue };
        let accepted = if declaration.is_alias { "type" } else { declaration.type_name.unwrap_or_default() };
        let name = declaration.name;
        let literal = if value.kind() == accepted {
            value.literal().ok_or_else(|| format!("`{name}` = {value}, which no literal can express"))
        } else {
            Err(format!("`{name}` = {value} is of kind {}, accepted: {accepted}", value.kind()))
        };
        edits.push((index, declaration.value, literal.map_err(|message| lines[index].origin.error(message))?));
    }
    for (index, range, literal) in edits {
        lines[index].replace(range, &literal);
    }
    Ok(())
}
