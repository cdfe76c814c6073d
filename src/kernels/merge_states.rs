//! `merge_states`: attention over all keys, of two results over some of them each.

use crate::gpu::{Access, Kernel};
use crate::problem::DType;
use crate::shader::Recipe;

use super::{Stored, Strides};

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) threads: u32,
    pub(crate) a: Stored,
    pub(crate) b: Stored,
    pub(crate) out: DType,
}

impl Default for Variant {
    fn default() -> Self {
        Self { threads: 64, a: Stored::F32, b: Stored::F32, out: DType::F32 }
    }
}

impl Variant {
    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let (read, write) = (Access::Read, Access::ReadWrite);
        Kernel {
            recipe: Recipe::new("merge_states")
                .spec("THREADS", self.threads)
                .slot("a", self.a.alternative())
                .slot("b", self.b.alternative())
                .slot("out", self.out.name()),
            workgroup_size: [self.threads, 1, 1],
            workgroup_bytes: 0,
            params_bytes: size_of::<Params>() as u32,
            storage: vec![(1, read), (2, read), (3, read), (4, write), (5, write), (6, read)],
            features: Stored::features([self.a, self.b]),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) a: Strides,
    pub(crate) b: Strides,
    pub(crate) out: Strides,
    pub(crate) lse_a: Strides,
    pub(crate) lse_b: Strides,
    pub(crate) lse: Strides,
    pub(crate) heads: u32,
    pub(crate) rows: u32,
    pub(crate) dim: u32,
    pub(crate) row_vecs: u32,
    pub(crate) items: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
