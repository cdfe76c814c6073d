//! The kernels: one file each, of the same stem as its text in `shaders/`.
//!
//! A kernel's module holds its variant (what is baked into the text), what a variant needs of the device, and the uniform it
//! reads. What to run and with which variant is the planner's business.

pub(crate) mod backward;
#[cfg(test)]
mod contract;
pub(crate) mod flash_bwd;
pub(crate) mod flash_bwd_broadcast;
pub(crate) mod flash_bwd_dsinks;
pub(crate) mod flash_bwd_preprocess;
pub(crate) mod flash_fwd;
pub(crate) mod flash_fwd_broadcast;
pub(crate) mod forward;
pub(crate) mod matmul;
pub(crate) mod matmul_broadcast;
pub(crate) mod merge_states;
pub(crate) mod mods;
pub(crate) mod product;
pub(crate) mod score_mod_slopes;
pub(crate) mod softmax_rows;
mod wide;

use core::ops::Range;

use crate::error::{Error, Result};
use crate::gpu::{Gpu, Tensor};
use crate::problem::DType;

/// How a kernel reads a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    F32,
    /// As the type that the device has.
    F16,
    /// Two to a word.
    F16Packed,
    /// Two to a word.
    Bf16,
}

impl Stored {
    /// How a device with these features reads a type. Integers are read as they are, by kernels that know of them.
    pub(crate) fn of(dtype: DType, features: wgpu::Features) -> Self {
        match dtype {
            DType::F32 | DType::U32 => Self::F32,
            DType::F16 if features.contains(wgpu::Features::SHADER_F16) => Self::F16,
            DType::F16 => Self::F16Packed,
            DType::Bf16 => Self::Bf16,
        }
    }

    /// What a device needs to read these.
    pub(crate) fn features(of: impl IntoIterator<Item = Self>) -> wgpu::Features {
        let native = of.into_iter().any(|stored| stored == Self::F16);
        if native { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() }
    }

    /// The alternative of the text `stored`.
    pub(crate) fn alternative(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::F16Packed => "f16_packed",
            Self::Bf16 => "bf16",
        }
    }
}

/// Where a tensor's matrices lie in the window that a kernel sees, in elements: `struct Strides` of the WGSL.
///
/// Element (outer, inner, row, column) is at `offset + outer*self.outer + inner*self.inner + row*self.row + column`. For
/// attention outer is the batch entry and inner the head.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Strides {
    pub(crate) offset: u32,
    pub(crate) outer: u32,
    pub(crate) inner: u32,
    pub(crate) row: u32,
}

impl Strides {
    /// Of a tensor (outer, inner, rows, columns) whose last axis is contiguous.
    pub(crate) fn of_matrices(gpu: &Gpu, name: &str, tensor: &Tensor) -> Result<Self> {
        let (&[outer, inner, row, column], &[.., columns]) = (tensor.strides(), tensor.shape()) else {
            return Err(Error::invalid(format!("{name} of shape {:?}; accepted: four axes", tensor.shape())));
        };
        if column != 1 && columns > 1 {
            return Err(Error::invalid(format!(
                "{name} with strides {:?}; accepted: a last axis that is contiguous (stride 1)",
                tensor.strides()
            )));
        }
        Self::new(gpu, tensor, [outer, inner, row])
    }

    /// Nothing: for a tensor that there isn't.
    pub(crate) const NONE: Self = Self { offset: 0, outer: 0, inner: 0, row: 0 };

    /// Of a tensor (outer, inner, rows): one number a row.
    pub(crate) fn of_vectors(gpu: &Gpu, name: &str, tensor: &Tensor) -> Result<Self> {
        match *tensor.strides() {
            [outer, inner, row] => Self::new(gpu, tensor, [outer, inner, row]),
            _ => Err(Error::invalid(format!("{name} of shape {:?}; accepted: three axes", tensor.shape()))),
        }
    }

    fn new(gpu: &Gpu, tensor: &Tensor, strides: [usize; 3]) -> Result<Self> {
        let offset = tensor.window(&gpu.limits)?.first_elem;
        // Strides of axes of size 1 or of an empty tensor may be anything: they are never multiplied by more than 0.
        let [outer, inner, row] = strides.map(|stride| u32::try_from(stride).unwrap_or(0));
        Ok(Self { offset, outer, inner, row })
    }
}

/// A bound that is none, as in the WGSL.
pub(crate) const UNBOUNDED: i32 = i32::MAX;

/// What every tiled kernel is told, first in its `struct Params`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct AttentionParams {
    pub(crate) q: Strides,
    pub(crate) k: Strides,
    pub(crate) v: Strides,
    pub(crate) bias: Strides,
    pub(crate) mask: Strides,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) head_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) q_heads: u32,
    pub(crate) group_size: u32,
    pub(crate) q_blocks: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) first_key: u32,
    pub(crate) end_key: u32,
    pub(crate) rows: u32,
    pub(crate) bottom_right: u32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) bias_key: u32,
    pub(crate) mask_key: u32,
    pub(crate) sequences: u32,
    pub(crate) slopes: u32,
    pub(crate) slopes_batch: u32,
    pub(crate) sinks: u32,
    pub(crate) ranges: u32,
    pub(crate) ranges_batch: u32,
    pub(crate) ranges_head: u32,
    pub(crate) mod_data: u32,
    pub(crate) mod_words: u32,
}

impl AttentionParams {
    /// The same for a range of the blocks.
    pub(crate) fn of_blocks(self, blocks: Range<u32>) -> Self {
        Self { first_block: blocks.start, end_block: blocks.end, ..self }
    }
}

/// A size that the host has checked to fit.
pub(crate) fn to_u32(size: usize) -> Result<u32> {
    u32::try_from(size).map_err(|_| Error::invalid(format!("size {size}; accepted: up to {}", u32::MAX)))
}

/// The biggest of 16, 8, 4, 2, 1 that fits `budget_bytes` at `bytes_each`, and isn't twice too big for `length`.
pub(crate) fn slice_that_fits(length: u32, bytes_each: u32, budget_bytes: u32) -> u32 {
    let mut slice = 16;
    while slice > 1 && (slice * bytes_each > budget_bytes || slice >= length.max(1).saturating_mul(2)) {
        slice /= 2;
    }
    slice
}
