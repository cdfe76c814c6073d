//! Kernel files and recipes in, WGSL text out.
//!
//! A kernel is an ordinary WGSL file that any WGSL tool can read. Before it goes to the device it's specialised **as
//! text**: naga can't size a function-local array by an `override`, WGSL has no generics and no includes, and drivers
//! only keep an array in registers when every index is a literal. All of that can be said with four kinds of comment,
//! worked off in this order:
//!
//! 1. `// @include NAME`, on a line of its own, becomes the text of `common/NAME.wgsl`.
//! 2. `// @include SLOT = DEFAULT` becomes `common/SLOT_ALTERNATIVE.wgsl`: the alternative that the recipe names for
//!    this slot, or else the default. Without ` = DEFAULT` the recipe decides, or else it's a plain include.
//!    `// @include NAME as SLOT = DEFAULT` takes `common/NAME_ALTERNATIVE.wgsl` and calls what the file calls `NAME` or `NAME_..`
//!    by the slot's name, so that several tensors can each have their own copy. A slot may also be filled with a user's text.
//! 3. `// @spec`, behind `const NAME: TYPE = VALUE;` or `alias NAME = TYPE;` at module scope: the recipe may replace
//!    what is right of the `=`. Words after `@spec` describe the constant.
//! 4. `// @unroll`, on the line before a `for`: the body is repeated, each time in a block of its own and with the
//!    counter as a literal.
//!
//! ```wgsl
//! const ROWS: u32 = 2u; // @spec rows that a lane owns
//! alias Elem = f32; // @spec
//! // @include load = f32
//!
//! fn scale_rows(acc: ptr<function, array<Elem, ROWS>>) {
//!     // @unroll
//!     for (var row = 0u; row < ROWS; row++) {
//!         acc[row] *= load(row);
//!     }
//! }
//! ```
//!
//! `Recipe::new("name").spec("ROWS", 4u32).slot("load", "f16").source()` turns that into text with `ROWS` = `4u`, the
//! functions of `common/load_f16.wgsl`, and four blocks `{ acc[0u] *= load(0u); }` to `{ acc[3u] *= load(3u); }`.
//!
//! The loop after `@unroll` has its header on one line: `for (var i = START; i < BOUND; i += STEP) {`; also `<=`,
//! `i++`, `i = i + STEP` and `var i: u32`. START, BOUND and STEP consist of integer literals, module-scope constants
//! (each declared on one line), counters of enclosing unrolled loops, `+ - * / % << >>`, parentheses, `min` and `max`.
//! The body can't assign to the counter, and can't `break` out of the loop or `continue` it.
//!
//! Any comment that begins with `@` is a directive, so that a misspelt one is an error and not a comment. A name that
//! is unknown, unused or there twice is an error too; a file is included once at most. Errors name the file and line,
//! and `Expanded::origin` does the same for a line of the result. Nothing here parses WGSL: text that carries no
//! directive passes through unchanged, valid or not.

mod eval;
mod include;
mod library;
mod line;
mod recipe;
mod spec;
#[cfg(test)]
mod tests;
mod unroll;

pub(crate) use library::Library;
pub(crate) use line::{Expanded, words};
pub(crate) use recipe::Recipe;

// What the tests look at besides; lift the `cfg` from what the library comes to need.
#[cfg(test)]
pub(crate) use {
    inspect::{includes, module_consts, spec_defaults},
    recipe::Value,
};

/// What a contract test asks of a text, be it a file of the library or the output of [`Recipe::source`].
#[cfg(test)]
mod inspect {
    use super::{eval::Consts, line, spec};
    use crate::Result;
    use std::collections::BTreeMap;

    /// The `@spec` declarations of a text, as name and what is right of the `=`, as written.
    pub(crate) fn spec_defaults(text: &str) -> Result<BTreeMap<String, String>> {
        let lines = line::scan("text", text);
        let specs = spec::find(&lines)?.into_iter();
        Ok(specs.map(|(index, found)| (found.name.to_owned(), lines[index].code[found.value].to_owned())).collect())
    }

    /// The files and slots that a text includes by itself, in its order.
    pub(crate) fn includes(text: &str) -> Vec<String> {
        let names = line::scan("text", text).into_iter().filter_map(|line| match line.directive {
            Some(line::Directive::Include { name, .. }) => Some(name),
            _ => None,
        });
        names.collect()
    }

    /// The values of the module-scope `u32` and `i32` constants of a text. One that needs more than the evaluator knows
    /// is left out.
    pub(crate) fn module_consts(text: &str) -> BTreeMap<String, i64> {
        Consts::of(&line::scan("text", text)).known().map(|(name, int)| (name.to_owned(), int.value())).collect()
    }
}
