//! Integer constant expressions, as much as loop bounds need.
//!
//! Values have WGSL's types: a literal without suffix fits both, `u32` and `i32` don't mix, and a result outside its
//! type is an error (where WGSL would let an `u32` wrap).

use super::line::{Line, is_word_char};
use super::spec::declarations;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IntType {
    /// WGSL's `AbstractInt`: a literal without suffix, and what is computed from such.
    Untyped,
    I32,
    U32,
}

impl IntType {
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "u32" => Ok(Self::U32),
            "i32" => Ok(Self::I32),
            _ => Err(format!("type `{name}`, accepted: u32, i32")),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Int {
    value: i64,
    int_type: IntType,
}

impl Int {
    pub(super) fn new(value: i64, int_type: IntType) -> Result<Self, String> {
        let (fits, name) = match int_type {
            IntType::Untyped => (true, ""),
            IntType::I32 => (i32::try_from(value).is_ok(), "i32"),
            IntType::U32 => (u32::try_from(value).is_ok(), "u32"),
        };
        if fits { Ok(Self { value, int_type }) } else { Err(format!("{value} doesn't fit in {name}")) }
    }

    pub(super) fn value(self) -> i64 {
        self.value
    }

    pub(super) fn int_type(self) -> IntType {
        self.int_type
    }

    /// The same value as the given type, which can't be a change from `u32` to `i32` or back.
    pub(super) fn converted(self, int_type: IntType) -> Result<Self, String> {
        Self::new(self.value, common_type(self.int_type, int_type)?)
    }

    /// A literal that means this value anywhere an expression may stand.
    pub(super) fn literal(self) -> String {
        let suffix = match self.int_type {
            IntType::Untyped => "",
            IntType::I32 => "i",
            IntType::U32 => "u",
        };
        match self.value {
            value if value == i64::from(i32::MIN) => format!("(-{}{suffix} - 1{suffix})", i32::MAX),
            value if value < 0 => format!("({value}{suffix})"),
            value => format!("{value}{suffix}"),
        }
    }
}

pub(super) fn common_type(a: IntType, b: IntType) -> Result<IntType, String> {
    match (a, b) {
        (IntType::Untyped, other) | (other, IntType::Untyped) => Ok(other),
        (a, b) if a == b => Ok(a),
        _ => Err("u32 and i32 are mixed".to_owned()),
    }
}

/// The integer constants of a module, evaluated.
#[derive(Debug, Default)]
pub(super) struct Consts {
    known: BTreeMap<String, Int>,
    /// Why the other constants have no value.
    unknown: BTreeMap<String, String>,
}

impl Consts {
    /// A constant may refer to later ones, so this goes round until nothing new comes out.
    pub(super) fn of(lines: &[Line]) -> Self {
        let mut consts = Self::default();
        let mut pending = declarations(lines);
        pending.retain(|(_, declaration)| !declaration.is_alias);
        loop {
            let before = pending.len();
            pending.retain(|(index, declaration)| {
                let int_type = declaration.type_name.map_or(Ok(IntType::Untyped), IntType::parse);
                let value = consts.eval(&lines[*index].code[declaration.value.clone()]);
                match int_type.and_then(|int_type| value?.converted(int_type)) {
                    Ok(int) => drop(consts.known.insert(declaration.name.to_owned(), int)),
                    Err(why) => drop(consts.unknown.insert(declaration.name.to_owned(), why)),
                }
                !consts.known.contains_key(declaration.name)
            });
            if pending.len() == before {
                return consts;
            }
        }
    }

    #[cfg(test)]
    pub(super) fn known(&self) -> impl Iterator<Item = (&str, Int)> {
        self.known.iter().map(|(name, int)| (name.as_str(), *int))
    }

    pub(super) fn eval(&self, expression: &str) -> Result<Int, String> {
        let mut parser = Parser { rest: expression, consts: self, depth: 0 };
        let value = parser.binary(0).and_then(|int| match parser.rest.trim() {
            "" => Ok(int),
            rest => Err(format!("`{rest}` isn't understood")),
        });
        value.map_err(|message| format!("in `{}`: {message}", expression.trim()))
    }
}

/// The binary operators, loosest first.
const LEVELS: [&[&str]; 3] = [&["<<", ">>"], &["+", "-"], &["*", "/", "%"]];
/// How deep parentheses and signs may nest.
const MAX_DEPTH: u32 = 64;

struct Parser<'a> {
    rest: &'a str,
    consts: &'a Consts,
    depth: u32,
}

impl<'a> Parser<'a> {
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) { Ok(()) } else { Err(format!("`{token}` expected before `{}`", self.rest.trim())) }
    }

    fn word(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let (word, rest) = rest.split_at(rest.find(|c| !is_word_char(c)).unwrap_or(rest.len()));
        self.rest = rest;
        word
    }

    fn binary(&mut self, level: usize) -> Result<Int, String> {
        let Some(operators) = LEVELS.get(level) else { return self.operand() };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().find(|operator| self.take(operator)) {
            left = apply(operator, left, self.binary(level + 1)?)?;
        }
        Ok(left)
    }

    fn operand(&mut self) -> Result<Int, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("nested deeper than {MAX_DEPTH}"));
        }
        let int = if self.take("-") {
            let int = self.operand()?;
            apply("-", Int::new(0, int.int_type)?, int)?
        } else if self.take("(") {
            let int = self.binary(0)?;
            self.expect(")")?;
            int
        } else {
            match self.word() {
                "" => return Err(format!("a value expected before `{}`", self.rest.trim())),
                name @ ("min" | "max") => {
                    self.expect("(")?;
                    let left = self.binary(0)?;
                    self.expect(",")?;
                    let right = self.binary(0)?;
                    self.expect(")")?;
                    apply(name, left, right)?
                }
                word if word.starts_with(|c: char| c.is_ascii_digit()) => number(word)?,
                name => match (self.consts.known.get(name), self.consts.unknown.get(name)) {
                    (Some(int), _) => *int,
                    (None, Some(why)) => return Err(format!("`{name}` can't be evaluated: {why}")),
                    (None, None) => return Err(format!("`{name}` is no module-scope integer constant")),
                },
            }
        };
        self.depth -= 1;
        Ok(int)
    }
}

fn number(word: &str) -> Result<Int, String> {
    let (digits, int_type) = match (word.strip_suffix('u'), word.strip_suffix('i')) {
        (Some(digits), _) => (digits, IntType::U32),
        (_, Some(digits)) => (digits, IntType::I32),
        _ => (word, IntType::Untyped),
    };
    let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(digits) => i64::from_str_radix(digits, 16),
        None => digits.parse(),
    };
    Int::new(value.map_err(|_| format!("`{word}` is no integer"))?, int_type)
}

fn apply(operator: &str, left: Int, right: Int) -> Result<Int, String> {
    let shifts = matches!(operator, "<<" | ">>");
    let int_type = if shifts { left.int_type } else { common_type(left.int_type, right.int_type)? };
    let (a, b) = (left.value, right.value);
    let value = match operator {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "/" => a.checked_div(b),
        "%" => a.checked_rem(b),
        "<<" if (0..32).contains(&b) => a.checked_mul(1 << b),
        ">>" if (0..32).contains(&b) => Some(a >> b),
        "min" => Some(a.min(b)),
        "max" => Some(a.max(b)),
        _ => None,
    };
    Int::new(value.ok_or_else(|| format!("{a} {operator} {b} has no value"))?, int_type)
}
