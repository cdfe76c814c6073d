//! `flash_fwd`: tiled attention, forward. One pass over keys and values, the scores in registers.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

use super::{Strides, slice_that_fits};

/// What is baked into the text: how the tile is cut. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) tx: u32,
    pub(crate) ty: u32,
    pub(crate) row_vecs: u32,
    pub(crate) key_vecs: u32,
    pub(crate) col_vecs: u32,
    pub(crate) slice_d: u32,
    pub(crate) slice_kv: u32,
}

impl Default for Variant {
    fn default() -> Self {
        Self { tx: 8, ty: 16, row_vecs: 1, key_vecs: 1, col_vecs: 1, slice_d: 16, slice_kv: 16 }
    }
}

/// The widest `o` row of any variant.
pub(crate) const MAX_VALUE_DIM: u32 = 512;

impl Variant {
    /// The variant of a thread grid and a score tile for the given dims, with slices that keep within `workgroup_bytes`.
    /// None where the tile alone passes it.
    pub(crate) fn for_dims(
        [tx, ty]: [u32; 2],
        [row_vecs, key_vecs]: [u32; 2],
        head_dim: u32,
        value_dim: u32,
        workgroup_bytes: u32,
    ) -> Option<Self> {
        // Few distinct widths keep the number of pipelines down; the columns past value_dim are zeros.
        let col_vecs = [1, 2, 3, 4, 6, 8, 12, 16].into_iter().find(|vecs| 4 * tx * vecs >= value_dim)?;
        let tile = Self { tx, ty, row_vecs, key_vecs, col_vecs, slice_d: 0, slice_kv: 0 };
        let budget = workgroup_bytes.checked_sub(tile.p_bytes())?;
        let slice_d = slice_that_fits(head_dim, 16 * (tile.q_stride() + tile.k_stride()), budget);
        let slice_kv = slice_that_fits(tile.block_kv(), 16 * tile.v_stride(), budget);
        let variant = Self { slice_d, slice_kv, ..tile };
        (variant.workgroup_bytes() <= workgroup_bytes).then_some(variant)
    }

    /// Query rows of a workgroup.
    pub(crate) fn block_q(&self) -> u32 {
        4 * self.ty * self.row_vecs
    }

    /// Keys of a tile.
    pub(crate) fn block_kv(&self) -> u32 {
        4 * self.tx * self.key_vecs
    }

    fn q_stride(&self) -> u32 {
        self.ty * self.row_vecs + 1
    }

    fn k_stride(&self) -> u32 {
        self.tx * self.key_vecs + 1
    }

    fn v_stride(&self) -> u32 {
        self.tx * self.col_vecs
    }

    fn p_bytes(&self) -> u32 {
        16 * self.block_kv() * self.ty * self.row_vecs
    }

    /// Bytes of workgroup memory: the header's Budget.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        let stage = (self.slice_d * (self.q_stride() + self.k_stride())).max(self.slice_kv * self.v_stride());
        16 * stage + self.p_bytes()
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        Kernel {
            recipe: Recipe::new("flash_fwd")
                .spec("TX", self.tx)
                .spec("TY", self.ty)
                .spec("ROW_VECS", self.row_vecs)
                .spec("KEY_VECS", self.key_vecs)
                .spec("COL_VECS", self.col_vecs)
                .spec("SLICE_D", self.slice_d)
                .spec("SLICE_KV", self.slice_kv)
                .slot("qkv", "f32"),
            workgroup_size: [self.tx, self.ty, 1],
            workgroup_bytes: self.workgroup_bytes(),
            params_bytes: size_of::<Params>() as u32,
            storage: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite, Access::ReadWrite],
            features: wgpu::Features::empty(),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) q: Strides,
    pub(crate) k: Strides,
    pub(crate) v: Strides,
    pub(crate) out: Strides,
    pub(crate) lse: Strides,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) head_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) q_heads: u32,
    pub(crate) group_size: u32,
    pub(crate) q_blocks: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) diagonal: i32,
    pub(crate) scale: f32,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
