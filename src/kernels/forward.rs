//! The kernels of tiled attention, forward, seen as one: the same tensors, options and uniform, each cut in its own way.

use core::fmt;

use crate::gpu::Kernel;

use super::flash_fwd::Options;
use super::{Strides, flash_fwd, flash_fwd_broadcast};

/// One of the kernels, with what is baked into it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// `flash_fwd`: tiles in workgroup memory.
    Workgroup(flash_fwd::Variant),
    /// `flash_fwd_broadcast`: tiles in registers, handed round a subgroup.
    Broadcast(flash_fwd_broadcast::Variant),
}

/// What tuning chooses among: which kernel, and how it's cut, whatever the dims and options of the call. Its text is what tuning files say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    Workgroup { threads: [u32; 2], vecs: [u32; 2] },
    Broadcast { rows: u32 },
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workgroup { threads: [x, y], vecs: [rows, keys] } => {
                write!(f, "flash_fwd threads {x}x{y} vecs {rows}x{keys}")
            }
            Self::Broadcast { rows } => write!(f, "flash_fwd_broadcast rows {rows}"),
        }
    }
}

impl Variant {
    pub(crate) fn tile(&self) -> Tile {
        match *self {
            Self::Workgroup(flash_fwd::Variant { tx, ty, row_vecs, key_vecs, .. }) => {
                Tile::Workgroup { threads: [tx, ty], vecs: [row_vecs, key_vecs] }
            }
            Self::Broadcast(flash_fwd_broadcast::Variant { rows, .. }) => Tile::Broadcast { rows },
        }
    }

    pub(crate) fn options_mut(&mut self) -> &mut Options {
        match self {
            Self::Workgroup(variant) => &mut variant.options,
            Self::Broadcast(variant) => &mut variant.options,
        }
    }

    /// Invocations of a workgroup.
    pub(crate) fn threads(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.tx * variant.ty,
            Self::Broadcast(variant) => variant.lanes,
        }
    }

    /// Query rows of a workgroup.
    pub(crate) fn block_q(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_q(),
            Self::Broadcast(variant) => variant.block_q(),
        }
    }

    /// Keys of a tile.
    pub(crate) fn block_kv(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_kv(),
            Self::Broadcast(variant) => variant.block_kv(),
        }
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self, head_dim: u32) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.iterations_of_tile(head_dim),
            Self::Broadcast(variant) => variant.iterations_of_tile(),
        }
    }

    /// The same for at most so many keys, all of which one dispatch goes through, or else several.
    pub(crate) fn for_keys(self, kv_len: usize, passes: bool) -> Self {
        match self {
            Self::Workgroup(variant) => Self::Workgroup(variant.for_keys(kv_len, passes)),
            Self::Broadcast(_) => self,
        }
    }

    /// Whether it can resume where another dispatch of it ended.
    pub(crate) fn has_passes(&self) -> bool {
        matches!(self, Self::Workgroup(_))
    }

    /// The same for q, k and v that lie so, each with whether it has no elements.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 3]) -> Self {
        match self {
            Self::Workgroup(_) => self,
            Self::Broadcast(variant) => Self::Broadcast(variant.aligned(tensors)),
        }
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        match self {
            Self::Workgroup(variant) => variant.kernel(),
            Self::Broadcast(variant) => variant.kernel(),
        }
    }
}
