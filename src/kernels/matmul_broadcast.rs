//! `matmul_broadcast`: a batch of matrix products, tiled in registers, B handed round a subgroup.

use crate::gpu::{Access, Kernel};
use crate::shader::Recipe;

use super::matmul::{Operand, Params, Reach};
use super::{Stored, Strides, wide};

/// What is baked into the text. See the kernel's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) lanes: u32,
    pub(crate) row_vecs: u32,
    pub(crate) columns: u32,
    pub(crate) slice_k: u32,
    /// Whether it adds to what c holds: a dispatch over later k.
    pub(crate) adds: bool,
    /// Of a and b: elements that are read at once.
    pub(crate) widths: [u32; 2],
    pub(crate) b: Operand,
    pub(crate) reach: Reach,
}

impl Default for Variant {
    fn default() -> Self {
        let (b, reach) = (Operand::Rows, Reach::All);
        Self { lanes: 8, row_vecs: 2, columns: 64, slice_k: 8, adds: false, widths: [1; 2], b, reach }
    }
}

impl Variant {
    /// The variant for products (m, k) by (k, n), reading as wide as dense tensors allow. None on a device without such subgroups.
    pub(crate) fn for_dims(
        b: Operand,
        [m, n, k]: [u32; 3],
        min_subgroup_size: u32,
        features: wgpu::Features,
    ) -> Option<Self> {
        let has_int64 = features.contains(wgpu::Features::SHADER_INT64);
        // What a small product wouldn't fill isn't compiled either.
        let row_vecs = if m <= 4 * Self::default().lanes { 1 } else { 2 };
        let columns = [8, 16, 32].into_iter().find(|&columns| n <= columns).unwrap_or(64);
        let any = Self { row_vecs, columns, b, ..Self::default() };
        let width = |dim: u32| {
            let fits = |read: &wide::Read| {
                dim.is_multiple_of(read.width) && read.width <= any.slice_k && (has_int64 || !read.takes_int64)
            };
            wide::widest(Stored::F32, fits)
        };
        let widths = [width(k), width(if b == Operand::Rows { n } else { k })];
        (min_subgroup_size >= any.lanes).then_some(Self { widths, ..any })
    }

    /// The same, reading no wider than lets every row of the tensors a and b begin at a multiple of the width.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 2]) -> Self {
        let widths = core::array::from_fn(|index| {
            let (strides, is_empty) = tensors[index];
            wide::widest(Stored::F32, |read| {
                self.widths[index].is_multiple_of(read.width) && wide::is_aligned(read.width, strides, is_empty)
            })
        });
        Self { widths, ..self }
    }

    /// Rows of C that a workgroup makes.
    pub(crate) fn block_m(&self) -> u32 {
        4 * self.lanes * self.row_vecs
    }

    /// Columns of C that a workgroup makes.
    pub(crate) fn block_n(&self) -> u32 {
        self.columns
    }

    /// Loop iterations of an invocation for one slice of k: no less than there are, as drivers count.
    pub(crate) fn iterations_of_slice(&self) -> u32 {
        2 // itself, and some for a part of several
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let [a_width, b_width] = self.widths;
        let [b_k, b_columns] = if self.b == Operand::Rows { [1, b_width] } else { [b_width, 1] };
        let recipe = Recipe::new("matmul_broadcast")
            .spec("LANES", self.lanes)
            .spec("ROW_VECS", self.row_vecs)
            .spec("COLUMNS", self.columns)
            .spec("SLICE_K", self.slice_k)
            .spec("ADDS", self.adds)
            .spec("B_K", b_k)
            .spec("B_COLUMNS", b_columns)
            .slot("matmul_b", self.b.alternative())
            .slot("matmul_reach", self.reach.alternative());
        let (recipe, a_features) = wide::apply(recipe, "a", "a_pair", Stored::F32, a_width);
        let (recipe, b_features) = wide::apply(recipe, "b", "b_pair", Stored::F32, b_width);
        Kernel {
            recipe,
            workgroup_size: [self.lanes, 1, 1],
            workgroup_bytes: 0,
            params_bytes: size_of::<Params>() as u32,
            storage: vec![(1, Access::Read), (2, Access::Read), (3, Access::ReadWrite)],
            features: wgpu::Features::SUBGROUP | a_features | b_features,
        }
    }
}
