//! `flash_fwd_broadcast`: tiled attention, forward, each key read by one lane of a subgroup and handed round.

use crate::gpu::Kernel;
use crate::shader::Recipe;

use super::flash_fwd::{Options, Params};
use super::wide::{self, Read};
use super::{Stored, Strides};

/// What is baked into the text: who owns what, how wide tensors are read, and which options it has. See the kernel's header.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) lanes: u32,
    /// Rows of a lane: 2 to 4.
    pub(crate) rows: u32,
    pub(crate) head_dim: u32,
    pub(crate) value_dim: u32,
    /// Of q, k and v: elements that are read at once.
    pub(crate) widths: [u32; 3],
    pub(crate) options: Options,
}

impl Default for Variant {
    fn default() -> Self {
        Self { lanes: 8, rows: 4, head_dim: 64, value_dim: 64, widths: [1; 3], options: Options::default() }
    }
}

/// Numbers of q, and of the output, that a lane holds, at most: more rows need fewer loads a product, but what a driver compiles, and how
/// long it takes for it, grows with them.
const MAX_HELD: u32 = 384;

/// How many rows of the given dims a lane may own: the more, the fewer loads a product. Below 2 this isn't the kernel for them.
pub(crate) fn most_rows(head_dim: u32, value_dim: u32) -> u32 {
    (MAX_HELD / head_dim.max(value_dim).max(1)).min(4)
}

impl Variant {
    /// The variant for the given dims on a device with these features and subgroups, reading as wide as dense tensors allow.
    /// None where it has no such subgroups, or for less than two rows.
    pub(crate) fn for_dims(
        head_dim: u32,
        value_dim: u32,
        rows: u32,
        min_subgroup_size: u32,
        features: wgpu::Features,
        options: Options,
    ) -> Option<Self> {
        let lanes = [8, 4].into_iter().find(|&lanes| lanes <= min_subgroup_size)?;
        let any = Self { lanes, rows, head_dim, value_dim, widths: [1; 3], options };
        let has_int64 = features.contains(wgpu::Features::SHADER_INT64);
        let widths = any.widths_where(|_, read| has_int64 || !read.takes_int64);
        (rows >= 2).then_some(Self { widths, ..any })
    }

    /// For each of q, k and v, which are 0, 1 and 2, the most elements at once that make up its rows and that `accepted` takes.
    fn widths_where(&self, accepted: impl Fn(usize, &Read) -> bool) -> [u32; 3] {
        let Options { q, k, v, .. } = self.options;
        let tensors = [(q, self.head_dim), (k, self.head_dim), (v, self.value_dim)];
        core::array::from_fn(|index| {
            let (stored, dim) = tensors[index];
            wide::widest(stored, |read| dim.is_multiple_of(read.width) && accepted(index, read))
        })
    }

    /// The same, reading no wider than lets every row of the tensors q, k and v begin at a multiple of the width.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 3]) -> Self {
        let widths = self.widths_where(|index, &Read { width, .. }| {
            let (strides, is_empty) = tensors[index];
            width <= self.widths[index] && wide::is_aligned(width, strides, is_empty)
        });
        Self { widths, ..self }
    }

    /// Query rows of a workgroup.
    pub(crate) fn block_q(&self) -> u32 {
        self.lanes * self.rows
    }

    /// Keys of a tile.
    pub(crate) fn block_kv(&self) -> u32 {
        self.lanes
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self) -> u32 {
        let options = &self.options;
        // Where only causality, window and length mask, few tiles have masked keys; a table may have some in any.
        let any_masked = options.keep_words() || options.bias.is_some();
        let word = self.rows * options.iterations_of_word();
        // A new word comes every 32 keys.
        let finding = if options.keep_words() { 2 + (word * self.lanes).div_ceil(32) } else { 0 };
        // What was skipped of V takes all of those tiles again, for each stored chunk of columns.
        let skipped = if any_masked { self.value_dim.div_ceil(4) * (2 + word) } else { 0 };
        2 + finding
            + if options.changes_scores() { self.rows } else { 0 }
            + if any_masked { self.rows } else { 0 }
            + skipped
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let options = &self.options;
        let mut features = wgpu::Features::SUBGROUP | Stored::features(options.bias);
        let mut recipe = Recipe::new("flash_fwd_broadcast")
            .spec("LANES", self.lanes)
            .spec("HEAD_DIM", self.head_dim)
            .spec("VALUE_DIM", self.value_dim)
            .spec("ROWS", self.rows)
            .spec("Rows", ["vec2<f32>", "vec3<f32>", "vec4<f32>"][self.rows as usize - 2])
            .spec("RowWords", ["vec2<u32>", "vec3<u32>", "vec4<u32>"][self.rows as usize - 2]);
        let tensors = [("q", "q_pair", options.q), ("k", "k_pair", options.k), ("v", "v_pair", options.v)];
        for ((slot, pair_slot, stored), width) in tensors.into_iter().zip(self.widths) {
            let (with_reads, needed) = wide::apply(recipe, slot, pair_slot, stored, width);
            recipe = with_reads;
            features |= needed;
        }
        let (recipe, storage) = options.apply(recipe);
        Kernel {
            recipe,
            workgroup_size: [self.lanes, 1, 1],
            workgroup_bytes: 0,
            params_bytes: size_of::<Params>() as u32,
            storage,
            features,
        }
    }
}
