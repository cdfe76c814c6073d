//! `flash_bwd_dsinks`: the gradient of each head's sink.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) threads: u32,
}

impl Default for Variant {
    fn default() -> Self {
        Self { threads: 64 }
    }
}

impl Variant {
    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        Kernel {
            recipe: Recipe::new("flash_bwd_dsinks").spec("THREADS", self.threads).slot("extras", "words"),
            workgroup_size: [self.threads, 1, 1],
            workgroup_bytes: 4 * self.threads,
            params_bytes: size_of::<Params>() as u32,
            storage: vec![(1, Access::ReadWrite), (8, Access::Read)],
            features: wgpu::Features::empty(),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) out: u32,
    pub(crate) heads: u32,
    pub(crate) rows: u32,
    pub(crate) batch: u32,
    pub(crate) sinks: u32,
    pub(crate) states: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
