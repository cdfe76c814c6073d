//! The tiled kernels of gradients, seen as one: the same tensors, options and uniform, each cut in its own way.

use crate::gpu::Kernel;
use crate::problem::{DType, Dims, Problem};

use super::flash_bwd::Makes;
use super::{Strides, flash_bwd, flash_bwd_broadcast};

/// One of the kernels, with what is baked into it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// `flash_bwd_dq`, `flash_bwd_dkdv` or `flash_bwd_dbias`: tiles in workgroup memory.
    Workgroup(flash_bwd::Variant),
    /// `flash_bwd_broadcast`: tiles in registers, handed round a subgroup.
    Broadcast(flash_bwd_broadcast::Variant),
}

impl Variant {
    /// Which gradients it makes.
    pub(crate) fn makes(&self) -> Makes {
        match self {
            Self::Workgroup(variant) => variant.makes,
            Self::Broadcast(variant) => variant.makes,
        }
    }

    /// Invocations of a workgroup.
    pub(crate) fn threads(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.threads(),
            Self::Broadcast(variant) => variant.lanes,
        }
    }

    /// Rows that a workgroup owns: of queries, or of keys.
    pub(crate) fn block_own(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_own(),
            Self::Broadcast(variant) => variant.block_own(),
        }
    }

    /// Rows of the other kind in a tile.
    pub(crate) fn block_other(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_other(),
            Self::Broadcast(variant) => variant.block_other(),
        }
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self, dims: [u32; 2]) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.iterations_of_tile(dims),
            Self::Broadcast(variant) => variant.iterations_of_tile(),
        }
    }

    /// The same that walks in several dispatches, each adding to what is there. None where it can't.
    pub(crate) fn with_passes(self) -> Option<Self> {
        let has_passes = self.makes().dtypes().all(|dtype| dtype == DType::F32);
        match self {
            Self::Workgroup(variant) if has_passes => {
                Some(Self::Workgroup(flash_bwd::Variant { passes: true, ..variant }))
            }
            _ => None,
        }
    }

    /// The same for q, k, v and the gradient of o that lie so, each with whether it has no elements.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 4]) -> Self {
        match self {
            Self::Workgroup(_) => self,
            Self::Broadcast(variant) => Self::Broadcast(variant.aligned(tensors)),
        }
    }

    /// How many tiles a workgroup walks at most.
    pub(crate) fn walked_tiles(&self, problem: &Problem) -> usize {
        let (q_len, kv_len) = problem.longest();
        match self.makes() {
            Makes::Dq(_) => kv_len.div_ceil(self.block_other() as usize),
            // As many a head as the longest could have, which a packed batch doesn't.
            Makes::DkDv(..) => {
                problem.dims.group_size().saturating_mul(problem.dims.q_len.div_ceil(self.block_other() as usize))
            }
            Makes::Dbias(_) => {
                let Dims { batch, q_heads, .. } = problem.dims;
                let (_, shape) = problem.bias.unwrap_or((DType::F32, [1; 4]));
                let rows = q_len.div_ceil(self.block_own() as usize);
                let keys = kv_len.div_ceil(self.block_other() as usize);
                let walked = [batch, q_heads, rows, keys].into_iter().zip(shape).filter(|&(_, size)| size == 1);
                walked.fold(1, |product, (size, _)| product.saturating_mul(size))
            }
        }
    }

    /// Workgroups.
    pub(crate) fn blocks(&self, problem: &Problem) -> usize {
        let (q_len, kv_len) = problem.longest();
        let Dims { batch, q_heads, kv_heads, .. } = problem.dims;
        match self.makes() {
            Makes::Dq(_) => batch * q_heads * q_len.div_ceil(self.block_own() as usize),
            Makes::DkDv(..) => batch * kv_heads * kv_len.div_ceil(self.block_own() as usize),
            Makes::Dbias(_) => {
                let (_, [batch, heads, rows, keys]) = problem.bias.unwrap_or((DType::F32, [0; 4]));
                batch * heads * rows.div_ceil(self.block_own() as usize) * keys.div_ceil(self.block_other() as usize)
            }
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
