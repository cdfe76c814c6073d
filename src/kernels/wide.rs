//! Reading tensors several elements at once: the texts `wide` and `pair`.

use crate::shader::Recipe;

use super::{Stored, Strides};

/// A way to read a tensor.
#[derive(Debug)]
pub(crate) struct Read {
    /// Elements that are read at once.
    pub(crate) width: u32,
    /// The alternative of the text `wide`.
    alternative: &'static str,
    /// Whether it takes words of 64 bits.
    pub(crate) takes_int64: bool,
}

const fn read(width: u32, alternative: &'static str, takes_int64: bool) -> Read {
    Read { width, alternative, takes_int64 }
}

/// The ways to read a type, the widest first; the last is an element at a time.
fn reads(stored: Stored) -> &'static [Read; 3] {
    const F32: [Read; 3] = [read(8, "f32_8", true), read(4, "f32_4", false), read(1, "f32_1", false)];
    const HALVES: [Read; 3] = [read(16, "halves_16", true), read(8, "halves_8", false), read(1, "halves_1", false)];
    match stored {
        Stored::F32 => &F32,
        Stored::F16 | Stored::F16Packed | Stored::Bf16 => &HALVES,
    }
}

/// The alternative of the text `pair` for a type.
fn pair(stored: Stored) -> &'static str {
    match stored {
        Stored::F32 => "none",
        Stored::F16 | Stored::F16Packed => "f16",
        Stored::Bf16 => "bf16",
    }
}

/// The most elements at once that `accepted` takes; one always does.
pub(crate) fn widest(stored: Stored, accepted: impl Fn(&Read) -> bool) -> u32 {
    reads(stored).iter().find(|read| accepted(read)).map_or(1, |read| read.width)
}

/// Whether every row of a tensor begins at a multiple of `width`. Of a tensor without elements the binding may be shorter than that.
pub(crate) fn is_aligned(width: u32, Strides { offset, outer, inner, row }: Strides, is_empty: bool) -> bool {
    !is_empty && [offset, outer, inner, row].into_iter().all(|it| it.is_multiple_of(width))
}

/// The recipe with the texts that read a tensor, in the slots of the given names, and what a device needs for them.
pub(crate) fn apply(
    recipe: Recipe,
    slot: &'static str,
    pair_slot: &'static str,
    stored: Stored,
    width: u32,
) -> (Recipe, wgpu::Features) {
    let reads @ [.., single] = reads(stored);
    let read = reads.iter().find(|read| read.width == width).unwrap_or(single);
    let features = if read.takes_int64 { wgpu::Features::SHADER_INT64 } else { wgpu::Features::empty() };
    (recipe.slot(slot, read.alternative).slot(pair_slot, pair(stored)), features)
}
