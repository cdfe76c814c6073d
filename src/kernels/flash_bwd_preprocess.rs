//! `flash_bwd_preprocess`: lse and delta of each row, for the other backward kernels.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

use super::{Stored, Strides};

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) threads: u32,
    pub(crate) o: Stored,
    pub(crate) grad_o: Stored,
    pub(crate) grad_lse: bool,
}

impl Default for Variant {
    fn default() -> Self {
        Self { threads: 64, o: Stored::F32, grad_o: Stored::F32, grad_lse: false }
    }
}

impl Variant {
    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let (read, write) = (Access::Read, Access::ReadWrite);
        let mut recipe = Recipe::new("flash_bwd_preprocess")
            .spec("THREADS", self.threads)
            .slot("o", self.o.alternative())
            .slot("grad_o", self.grad_o.alternative())
            .slot("extras", "state");
        let mut storage = vec![(1, read), (2, read), (3, read), (8, write)];
        if self.grad_lse {
            recipe = recipe.spec("GRAD_LSE", true).slot("grad_lse", "f32");
            storage.insert(3, (4, read));
        }
        Kernel {
            recipe,
            workgroup_size: [self.threads, 1, 1],
            workgroup_bytes: 0,
            params_bytes: size_of::<Params>() as u32,
            storage,
            features: Stored::features([self.o, self.grad_o]),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) o: Strides,
    pub(crate) grad_o: Strides,
    pub(crate) lse: Strides,
    pub(crate) grad_lse: Strides,
    pub(crate) heads: u32,
    pub(crate) rows: u32,
    pub(crate) dim: u32,
    pub(crate) items: u32,
    pub(crate) states: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
