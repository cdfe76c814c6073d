//! `flash_bwd_broadcast`: gradients of queries, or of keys and values, each row that is walked read by one lane of a subgroup and handed
//! round.

use crate::gpu::{Access, Kernel};
use crate::problem::DType;
use crate::shader::Recipe;

use super::flash_bwd::{Makes, Params};
use super::flash_fwd::Options;
use super::wide::{self, Read};
use super::{Stored, Strides};

/// What is baked into the text: who owns what, how wide tensors are read, and which options it has. See the kernel's header.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) lanes: u32,
    pub(crate) head_dim: u32,
    pub(crate) value_dim: u32,
    /// Of q, k, v and the gradient of o: elements that are read at once.
    pub(crate) widths: [u32; 4],
    pub(crate) makes: Makes,
    pub(crate) grad_o: Stored,
    pub(crate) options: Options,
}

/// Rows of a lane. Three or four are no faster (1024 tokens, 4 heads of 64: 125 to 150 ms of CPU with two, 135 to 160 with three or four),
/// and take drivers four times as long to compile (18 s in place of 4.5 on Mesa 22.3, 35 in place of 15 on 25.0).
const ROWS: u32 = 2;

/// The widest dim that drivers compile in bearable time.
const MAX_DIM: u32 = 128;

impl Variant {
    /// The variant for the given dims on a device with these features and subgroups, reading as wide as dense tensors allow. None where it
    /// has no such subgroups, for wide dims, and for a bias's gradient.
    pub(crate) fn for_dims(
        [head_dim, value_dim]: [u32; 2],
        min_subgroup_size: u32,
        features: wgpu::Features,
        makes: Makes,
        grad_o: Stored,
        options: Options,
    ) -> Option<Self> {
        if head_dim.max(value_dim) > MAX_DIM
            || matches!(makes, Makes::Dbias(_) | Makes::DkDv(None, _) | Makes::DkDv(_, None))
        {
            return None;
        }
        let lanes = [8, 4].into_iter().find(|&lanes| lanes <= min_subgroup_size)?;
        let any = Self { lanes, head_dim, value_dim, widths: [1; 4], makes, grad_o, options };
        let has_int64 = features.contains(wgpu::Features::SHADER_INT64);
        let widths = any.widths_where(|_, read| has_int64 || !read.takes_int64);
        Some(Self { widths, ..any })
    }

    fn tensors(&self) -> [(Stored, u32); 4] {
        let Options { q, k, v, .. } = self.options;
        [(q, self.head_dim), (k, self.head_dim), (v, self.value_dim), (self.grad_o, self.value_dim)]
    }

    /// For each of q, k, v and the gradient of o the most elements at once that make up its rows and that `accepted` takes.
    fn widths_where(&self, accepted: impl Fn(usize, &Read) -> bool) -> [u32; 4] {
        let tensors = self.tensors();
        core::array::from_fn(|index| {
            let (stored, dim) = tensors[index];
            wide::widest(stored, |read| dim.is_multiple_of(read.width) && accepted(index, read))
        })
    }

    /// The same, reading no wider than lets every row of those tensors begin at a multiple of the width.
    pub(crate) fn aligned(self, tensors: [(Strides, bool); 4]) -> Self {
        let widths = self.widths_where(|index, &Read { width, .. }| {
            let (strides, is_empty) = tensors[index];
            width <= self.widths[index] && wide::is_aligned(width, strides, is_empty)
        });
        Self { widths, ..self }
    }

    /// Rows that a workgroup owns: of queries, or of keys.
    pub(crate) fn block_own(&self) -> u32 {
        self.lanes * ROWS
    }

    /// Rows of the other kind in a tile.
    pub(crate) fn block_other(&self) -> u32 {
        self.lanes
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self) -> u32 {
        let options = &self.options;
        // Where only causality, window and length mask, few tiles have masked pairs; a table may have some in any.
        let any_masked = options.keep_words() || options.bias.is_some();
        // A word of each row comes every 32 keys, one of each query every time.
        let words = match self.makes {
            Makes::DkDv(..) => 32,
            _ => ROWS * self.lanes,
        };
        let finding = if options.keep_words() { 2 + (words * options.iterations_of_word()).div_ceil(32) } else { 0 };
        2 + finding + if options.changes_scores() { ROWS } else { 0 } + if any_masked { ROWS + 1 } else { 0 }
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let mut features = wgpu::Features::SUBGROUP | Stored::features(self.options.bias);
        let mut recipe = Recipe::new("flash_bwd_broadcast")
            .spec("LANES", self.lanes)
            .spec("HEAD_DIM", self.head_dim)
            .spec("VALUE_DIM", self.value_dim)
            .spec("ROWS", ROWS);
        let [q, k, v, grad_o] = self.tensors().map(|(stored, _)| stored);
        let [q_width, k_width, v_width, grad_o_width] = self.widths;
        let own_keys = matches!(self.makes, Makes::DkDv(..));
        let [(a_own, a_other), (b_own, b_other)] = if own_keys {
            [((k, k_width), (q, q_width)), ((v, v_width), (grad_o, grad_o_width))]
        } else {
            [((q, q_width), (k, k_width)), ((grad_o, grad_o_width), (v, v_width))]
        };
        for (slot, pair_slot, (stored, width)) in [
            ("a_own", "a_own_pair", a_own),
            ("a_other", "a_other_pair", a_other),
            ("b_own", "b_own_pair", b_own),
            ("b_other", "b_other_pair", b_other),
        ] {
            let (with_reads, needed) = wide::apply(recipe, slot, pair_slot, stored, width);
            recipe = with_reads;
            features |= needed;
        }
        recipe = recipe.slot("attention_params", "backward").spec("OWN_KEYS", own_keys);
        recipe = recipe.spec("B_COLUMNS", if own_keys { self.value_dim } else { 0 });
        let mut outputs = vec![(5, Access::Read), (4, Access::ReadWrite)];
        let mut dtypes = self.makes.dtypes().map(DType::name);
        if let Some(a_out) = dtypes.next() {
            recipe = recipe.slot("a_out", a_out);
        }
        if let Some(b_out) = dtypes.next() {
            recipe = recipe.slot("b_out", b_out);
            outputs.push((9, Access::ReadWrite));
        }
        if let Some(text) = &self.options.score_mod_derivative {
            recipe = recipe.text("score_mod_derivative", text);
        }
        let (recipe, mut storage) = self.options.apply_shared(recipe, Some("words"));
        storage.extend(outputs);
        storage.sort_by_key(|&(binding, _)| binding);
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
