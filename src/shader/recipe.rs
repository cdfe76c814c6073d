//! A kernel, and everything that is baked into its text.

use super::eval::{Int, IntType};
use super::include::include;
use super::library::Library;
use super::line::Expanded;
use super::{spec, unroll};
use crate::{Error, Result};
use core::fmt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything baked into one kernel's text. Two equal recipes give the same text, so this is what pipelines are cached
/// by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Recipe {
    stem: &'static str,
    specs: BTreeMap<&'static str, Value>,
    slots: BTreeMap<&'static str, Filling>,
    /// Whether tensors that are only read are bound as if they were written.
    read_write: bool,
    /// The first name that was set twice: an error once the text is asked for.
    repeated: Option<&'static str>,
}

impl Recipe {
    /// The kernel file `STEM.wgsl` as it stands.
    pub(crate) fn new(stem: &'static str) -> Self {
        Self { stem, specs: BTreeMap::new(), slots: BTreeMap::new(), read_write: false, repeated: None }
    }

    /// Replaces the value of `const NAME: TYPE = VALUE; // @spec`, or the type of `alias NAME = TYPE; // @spec`.
    pub(crate) fn spec(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        if self.specs.insert(name, value.into()).is_some() {
            self.repeated.get_or_insert(name);
        }
        self
    }

    /// Has `// @include SLOT` take `common/SLOT_ALTERNATIVE.wgsl`.
    pub(crate) fn slot(self, slot: &'static str, alternative: &'static str) -> Self {
        self.fill(slot, Filling::Alternative(alternative))
    }

    /// Has `// @include SLOT` take a text that isn't ours, as it stands: nothing in it is a directive.
    pub(crate) fn text(self, slot: &'static str, text: &Arc<str>) -> Self {
        self.fill(slot, Filling::Text(Arc::clone(text)))
    }

    /// Declares the tensors of `// @include NAME as SLOT` as read and written, though they are only read: one buffer can't be bound
    /// in both ways by one dispatch, so this is for inputs that lie in the buffer of an output.
    pub(crate) fn read_write(self) -> Self {
        Self { read_write: true, ..self }
    }

    fn fill(mut self, slot: &'static str, filling: Filling) -> Self {
        if self.slots.insert(slot, filling).is_some() {
            self.repeated.get_or_insert(slot);
        }
        self
    }

    pub(crate) fn stem(&self) -> &'static str {
        self.stem
    }

    /// A label for debuggers, such as `flash_fwd[BLOCK_Q=64,load=f32]`.
    pub(crate) fn label(&self) -> String {
        let specs = self.specs.iter().map(|(name, value)| format!("{name}={value}"));
        let choices: Vec<String> = specs.chain(self.slots.iter().map(|(slot, it)| format!("{slot}={it}"))).collect();
        let choices = if self.read_write { [choices, vec!["read_write".to_owned()]].concat() } else { choices };
        if choices.is_empty() { self.stem.to_owned() } else { format!("{}[{}]", self.stem, choices.join(",")) }
    }

    /// The text, from the embedded files.
    pub(crate) fn source(&self) -> Result<String> {
        Ok(self.expand(Library::EMBEDDED)?.text)
    }

    /// The text from the files of any library, with the origin of each line.
    pub(crate) fn expand(&self, library: Library) -> Result<Expanded> {
        let path = format!("{}.wgsl", self.stem);
        if let Some(name) = self.repeated {
            return Err(Error::invalid(format!("{path}: the recipe sets `{name}` twice")));
        }
        let file = library.file(&path).ok_or_else(|| {
            let paths = library.paths().collect::<Vec<_>>().join(", ");
            Error::invalid(format!("there is no {path} among the kernel files: {paths}"))
        })?;
        let mut lines = include(library, file, &self.slots, self.read_write)?;
        spec::apply(&mut lines, &path, &self.specs)?;
        Ok(Expanded::of(&unroll::unroll(&lines)?))
    }
}

/// What a slot is filled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Filling {
    /// `common/SLOT_ALTERNATIVE.wgsl`.
    Alternative(&'static str),
    /// A text of the user's.
    Text(Arc<str>),
}

impl fmt::Display for Filling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alternative(alternative) => alternative,
            Self::Text(_) => "user",
        })
    }
}

/// What a `// @spec` declaration is set to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    U32(u32),
    I32(i32),
    /// The bits of an `f32`, which itself has no `Eq`.
    F32(u32),
    Bool(bool),
    /// The name of a type, for an `alias`.
    Type(&'static str),
}

impl Value {
    /// The declared type that this value is for; `type` for an `alias`.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::Type(_) => "type",
        }
    }

    /// The value in WGSL, unless it's a float that isn't finite.
    pub(super) fn literal(self) -> Option<String> {
        match self {
            Self::U32(value) => Some(Int::new(value.into(), IntType::U32).ok()?.literal()),
            Self::I32(value) => Some(Int::new(value.into(), IntType::I32).ok()?.literal()),
            Self::F32(bits) => f32::from_bits(bits).is_finite().then(|| format!("{self}f")),
            Self::Bool(_) | Self::Type(_) => Some(self.to_string()),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U32(value) => write!(f, "{value}"),
            Self::I32(value) => write!(f, "{value}"),
            Self::F32(bits) => write!(f, "{:?}", f32::from_bits(*bits)),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Type(name) => f.write_str(name),
        }
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<f32> for Value {
    fn from(value: f32) -> Self {
        Self::F32(value.to_bits())
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<&'static str> for Value {
    fn from(type_name: &'static str) -> Self {
        Self::Type(type_name)
    }
}
