//! The kernels of matrix products, seen as one: the same tensors and uniform, each cut in its own way.

use crate::gpu::Kernel;

use super::{Strides, matmul, matmul_broadcast};

/// One of the kernels, with what is baked into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// `matmul`: tiles in workgroup memory.
    Workgroup(matmul::Variant),
    /// `matmul_broadcast`: tiles in registers, B handed round a subgroup.
    Broadcast(matmul_broadcast::Variant),
}

impl Variant {
    /// Rows of C that a workgroup makes.
    pub(crate) fn block_m(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_m(),
            Self::Broadcast(variant) => variant.block_m(),
        }
    }

    /// Columns of C that a workgroup makes.
    pub(crate) fn block_n(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.block_n(),
            Self::Broadcast(variant) => variant.block_n(),
        }
    }

    /// What it goes through of k at once.
    pub(crate) fn slice_k(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.slice_k,
            Self::Broadcast(variant) => variant.slice_k,
        }
    }

    /// Loop iterations of an invocation for one slice of k, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_slice(&self) -> u32 {
        match self {
            Self::Workgroup(variant) => variant.iterations_of_slice(),
            Self::Broadcast(variant) => variant.iterations_of_slice(),
        }
    }

    /// The same for a dispatch over later k, which adds to what c holds.
    pub(crate) fn adding(self) -> Self {
        match self {
            Self::Workgroup(_) => self, // it sees that by itself
            Self::Broadcast(variant) => Self::Broadcast(matmul_broadcast::Variant { adds: true, ..variant }),
        }
    }

    /// The same for a and b that lie so, each with whether it has no elements.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 2]) -> Self {
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
