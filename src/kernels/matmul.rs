//! `matmul`: a batch of matrix products, A·B or A·Bᵀ, tiled in registers and workgroup memory.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

use super::{Strides, slice_that_fits};

/// How B lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    /// (k, n): the product is A·B.
    Rows,
    /// (n, k): the product is A·Bᵀ.
    Columns,
}

impl Operand {
    /// The alternative of the text `matmul_b`.
    pub(super) fn alternative(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Columns => "columns",
        }
    }
}

/// How far the rows of A go along k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reach {
    /// All the way.
    All,
    /// Row m up to k = m + diagonal: causal attention weights.
    Causal,
}

impl Reach {
    /// The alternative of the text `matmul_reach`.
    pub(super) fn alternative(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Causal => "causal",
        }
    }
}

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) tx: u32,
    pub(crate) ty: u32,
    pub(crate) row_vecs: u32,
    pub(crate) col_vecs: u32,
    pub(crate) slice_k: u32,
    pub(crate) b: Operand,
    pub(crate) reach: Reach,
}

impl Default for Variant {
    fn default() -> Self {
        let (b, reach) = (Operand::Rows, Reach::All);
        Self { tx: 16, ty: 16, row_vecs: 1, col_vecs: 1, slice_k: 16, b, reach }
    }
}

impl Variant {
    /// The variant of a thread grid and a tile, with a slice of k that keeps within `workgroup_bytes`.
    pub(crate) fn for_dims(
        [tx, ty]: [u32; 2],
        [row_vecs, col_vecs]: [u32; 2],
        k: u32,
        workgroup_bytes: u32,
    ) -> Option<Self> {
        let tile = Self { tx, ty, row_vecs, col_vecs, slice_k: 0, ..Self::default() };
        let slice_k = slice_that_fits(k, 16 * (tile.a_stride() + tile.b_stride()), workgroup_bytes);
        let variant = Self { slice_k, ..tile };
        (variant.workgroup_bytes() <= workgroup_bytes).then_some(variant)
    }

    /// Rows of C that a workgroup makes.
    pub(crate) fn block_m(&self) -> u32 {
        4 * self.ty * self.row_vecs
    }

    /// Columns of C that a workgroup makes.
    pub(crate) fn block_n(&self) -> u32 {
        4 * self.tx * self.col_vecs
    }

    fn a_stride(&self) -> u32 {
        self.ty * self.row_vecs + 1
    }

    fn b_stride(&self) -> u32 {
        self.tx * self.col_vecs + 1
    }

    /// Bytes of workgroup memory: the header's Budget.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        16 * self.slice_k * (self.a_stride() + self.b_stride())
    }

    /// Loop iterations of an invocation for one slice of k, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_slice(&self) -> u32 {
        let threads = self.tx * self.ty;
        let items = |count: u32| count.div_ceil(threads) + 1;
        items(self.slice_k * self.ty * self.row_vecs) + items(self.slice_k * self.tx * self.col_vecs) + self.slice_k + 2
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        Kernel {
            recipe: Recipe::new("matmul")
                .spec("TX", self.tx)
                .spec("TY", self.ty)
                .spec("ROW_VECS", self.row_vecs)
                .spec("COL_VECS", self.col_vecs)
                .spec("SLICE_K", self.slice_k)
                .slot("matmul_b", self.b.alternative())
                .slot("matmul_reach", self.reach.alternative()),
            workgroup_size: [self.tx, self.ty, 1],
            workgroup_bytes: self.workgroup_bytes(),
            params_bytes: size_of::<Params>() as u32,
            storage: vec![(1, Access::Read), (2, Access::Read), (3, Access::ReadWrite)],
            features: wgpu::Features::empty(),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) a: Strides,
    pub(crate) b: Strides,
    pub(crate) c: Strides,
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) inner: u32,
    pub(crate) group_size: u32,
    pub(crate) m_blocks: u32,
    pub(crate) n_blocks: u32,
    pub(crate) first_block: u32,
    pub(crate) end_block: u32,
    pub(crate) diagonal: i32,
    pub(crate) alpha: f32,
    pub(crate) first_k: u32,
    pub(crate) end_k: u32,
    /// 0, which no compiler knows.
    pub(crate) zero: u32,
    pub(crate) pad_0: u32,
    pub(crate) pad_1: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
