//! Lines of text that know where they come from, what in them is a comment, and which directive they carry.

use crate::Error;
use core::fmt;
use core::ops::Range;

/// A line of a file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) file: &'static str,
    pub(crate) line: u32,
}

impl Origin {
    pub(super) fn error(self, message: impl fmt::Display) -> Error {
        Error::invalid(format!("{self}: {message}"))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A finished text, and where each of its lines comes from.
#[derive(Debug, Clone)]
pub(crate) struct Expanded {
    pub(crate) text: String,
    origins: Vec<Origin>,
}

impl Expanded {
    pub(super) fn of(lines: &[Line]) -> Self {
        let mut expanded = Self { text: String::new(), origins: Vec::new() };
        for line in lines.iter().filter(|line| !line.text.is_empty()) {
            if expanded.text.is_empty() || expanded.text.ends_with('\n') {
                expanded.origins.push(line.origin);
            }
            expanded.text.push_str(&line.text);
        }
        expanded
    }

    /// Where a line of the text, counted from 1 as naga does, comes from.
    pub(crate) fn origin(&self, line: usize) -> Option<Origin> {
        self.origins.get(line.checked_sub(1)?).copied()
    }
}

/// A line with its end, or a part of a line.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) origin: Origin,
    pub(super) text: String,
    /// The text with every comment blanked out, so that an offset into one is an offset into the other.
    pub(super) code: String,
    pub(super) directive: Option<Directive>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Directive {
    Include {
        /// What the slot, or the file, is called.
        name: String,
        /// The name that this inclusion goes by, for a text that is included several times.
        instance: Option<String>,
        default: Option<String>,
    },
    Spec,
    Unroll,
    /// What is wrong with it.
    Malformed(String),
}

impl Line {
    pub(super) fn generated(origin: Origin, text: &str) -> Self {
        Self { origin, text: text.to_owned(), code: text.to_owned(), directive: None }
    }

    /// Some of the line's bytes, without the directive.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        let (text, code) = (self.text[range.clone()].to_owned(), self.code[range].to_owned());
        Self { origin: self.origin, text, code, directive: None }
    }

    pub(super) fn replace(&mut self, range: Range<usize>, code: &str) {
        self.text.replace_range(range.clone(), code);
        self.code.replace_range(range, code);
    }

    /// Gives every word that is `from` or begins with `from_` the beginning `to`; likewise in capitals.
    pub(super) fn rename(&mut self, from: &str, to: &str) {
        let (from_const, to_const) = (from.to_uppercase(), to.to_uppercase());
        let begins = |word: &str, with: &str| {
            word.strip_prefix(with).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        let edits: Vec<(usize, usize, &str)> = tokens(&self.code)
            .filter_map(|(at, word)| {
                let pairs = [(from, to), (from_const.as_str(), to_const.as_str())];
                let (with, by) = pairs.into_iter().find(|(with, _)| begins(word, with))?;
                Some((at, with.len(), by))
            })
            .collect();
        for (at, len, by) in edits.into_iter().rev() {
            self.replace(at..at + len, by);
        }
    }

    pub(super) fn end_line(&mut self) {
        if !self.text.ends_with('\n') {
            self.text.push('\n');
            self.code.push('\n');
        }
    }
}

/// Splits a text into lines. Joined again, they're the same text.
pub(super) fn scan(file: &'static str, text: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut depth = 0_u32; // of block comments, which nest
    for (number, text) in (1..).zip(text.split_inclusive('\n')) {
        let mut code = String::with_capacity(text.len());
        let mut directive = None;
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            if depth == 0 && rest.starts_with("//") {
                directive = parse_directive(&rest[2..], code.trim().is_empty());
                blank(rest, &mut code);
                break;
            }
            let opens = rest.starts_with("/*");
            let closes = depth > 0 && rest.starts_with("*/");
            let (head, tail) = rest.split_at(if opens || closes { 2 } else { first.len_utf8() });
            if opens || depth > 0 {
                blank(head, &mut code)
            } else {
                code.push(first)
            }
            depth = depth + u32::from(opens) - u32::from(closes);
            rest = tail;
        }
        lines.push(Line { origin: Origin { file, line: number }, text: text.to_owned(), code, directive });
    }
    if let (Some(last), true) = (lines.last_mut(), depth > 0) {
        last.directive = Some(Directive::Malformed("a block comment is never closed".to_owned()));
    }
    lines
}

/// As many bytes of white space as the comment has, line end included.
fn blank(comment: &str, code: &mut String) {
    for char in comment.chars() {
        if char.is_whitespace() { code.push(char) } else { code.extend(core::iter::repeat_n(' ', char.len_utf8())) }
    }
}

/// Reads what follows `//`. `alone` is whether no code stands before it.
fn parse_directive(comment: &str, alone: bool) -> Option<Directive> {
    let directive = comment.trim().strip_prefix('@')?;
    let (word, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
    let malformed = |what: &str| Directive::Malformed(format!("`// @{directive}`: {what}"));
    Some(match word {
        "spec" if alone => malformed("the line declares nothing"),
        "spec" => Directive::Spec,
        "include" | "unroll" if !alone => malformed("has to stand on a line of its own"),
        "unroll" if rest.is_empty() => Directive::Unroll,
        "unroll" => malformed("nothing can follow `@unroll`"),
        "include" => {
            let (name, default) = match rest.split_once('=') {
                Some((name, default)) => (name.trim(), Some(default.trim())),
                None => (rest.trim(), None),
            };
            let (name, instance) = match name.split_once(" as ") {
                Some((name, instance)) => (name.trim(), Some(instance.trim())),
                None => (name, None),
            };
            if is_word(name) && instance.is_none_or(is_word) && default.is_none_or(is_word) {
                let [instance, default] = [instance, default].map(|word| word.map(str::to_owned));
                Directive::Include { name: name.to_owned(), instance, default }
            } else {
                malformed(
                    "expected `// @include NAME`, `// @include SLOT = DEFAULT` or `// @include NAME as SLOT = DEFAULT`",
                )
            }
        }
        _ => malformed("unknown directive; there are @include, @spec and @unroll"),
    })
}

/// The words (names, keywords, numbers) and other single characters of some code, with their offsets.
pub(super) fn tokens(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    core::iter::from_fn(move || {
        let rest = code[at..].trim_start();
        at = code.len() - rest.len();
        let first = rest.chars().next()?;
        let len = match rest.find(|c| !is_word_char(c)) {
            Some(0) => first.len_utf8(),
            Some(len) => len,
            None => rest.len(),
        };
        let start = at;
        at += len;
        Some((start, &rest[..len]))
    })
}

/// The words and other single characters of a text that aren't in its comments, with their lines.
pub(crate) fn words(file: &'static str, text: &str) -> impl Iterator<Item = (u32, String)> {
    let lines = scan(file, text).into_iter();
    lines.flat_map(|line| tokens(&line.code).map(|(_, word)| (line.origin.line, word.to_owned())).collect::<Vec<_>>())
}

pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_word_char)
}

pub(super) fn is_word_char(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}
