//! `softmax_rows`: softmax of every row of a matrix, in place, and the logarithm of its sum.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) threads: u32,
}

impl Default for Variant {
    fn default() -> Self {
        Self { threads: 256 }
    }
}

impl Variant {
    /// Bytes of workgroup memory: the header's Budget.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        4 * self.threads
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        Kernel {
            recipe: Recipe::new("softmax_rows").spec("THREADS", self.threads),
            workgroup_size: [self.threads, 1, 1],
            workgroup_bytes: self.workgroup_bytes(),
            params_bytes: size_of::<Params>() as u32,
            storage: vec![(1, Access::ReadWrite), (2, Access::ReadWrite)],
            features: wgpu::Features::empty(),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) x_offset: u32,
    pub(crate) lse_offset: u32,
    pub(crate) columns: u32,
    pub(crate) rows_per_matrix: u32,
    pub(crate) diagonal: i32,
    pub(crate) first_row: u32,
    pub(crate) end_row: u32,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
