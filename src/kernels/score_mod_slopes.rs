//! `score_mod_slopes`: a user's `score_mod` and what its derivative is said to be, for the host to compare.

use crate::gpu::{Access, Kernel};
use crate::problem::ScoreMod;
use crate::shader::Recipe;

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone)]
pub(crate) struct Variant {
    pub(crate) threads: u32,
    pub(crate) score_mod: Option<ScoreMod>,
    /// Whether it reads what mods read.
    pub(crate) mod_data: bool,
}

impl Default for Variant {
    fn default() -> Self {
        Self { threads: 64, score_mod: None, mod_data: false }
    }
}

/// Words of a sample.
pub(crate) const SAMPLE: usize = 6;

/// From one of a sample's scores to the next.
pub(crate) const STEP: f64 = 0.03125;

impl Variant {
    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let mut recipe = Recipe::new("score_mod_slopes").spec("THREADS", self.threads);
        let mut storage = vec![(1, Access::ReadWrite)];
        if let Some(score_mod) = &self.score_mod {
            recipe = recipe.text("score_mod", &score_mod.text.wgsl);
            if let Some(derivative) = &score_mod.derivative {
                recipe = recipe.text("score_mod_derivative", &derivative.wgsl);
            }
        }
        if self.mod_data {
            recipe = recipe.slot("extras", "words");
            storage.push((8, Access::Read));
        }
        Kernel {
            recipe,
            workgroup_size: [self.threads, 1, 1],
            workgroup_bytes: 0,
            params_bytes: size_of::<Params>() as u32,
            storage,
            features: wgpu::Features::empty(),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) out: u32,
    pub(crate) mod_data: u32,
    pub(crate) mod_words: u32,
    pub(crate) batch: u32,
    pub(crate) heads: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) samples: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) pad_0: u32,
    pub(crate) pad_1: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
