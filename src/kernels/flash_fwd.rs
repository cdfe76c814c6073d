//! `flash_fwd`: tiled attention, forward. One pass over keys and values, the scores in registers.

use std::sync::Arc;

use crate::gpu::{Access, Kernel};
use crate::problem::{DType, Problem};
use crate::shader::Recipe;

use super::{AttentionParams, Stored, Strides, slice_that_fits};

/// What is baked into the text: how the tile is cut, and which options it has. See the kernel's header.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) tx: u32,
    pub(crate) ty: u32,
    pub(crate) row_vecs: u32,
    pub(crate) key_vecs: u32,
    pub(crate) col_vecs: u32,
    pub(crate) slice_d: u32,
    pub(crate) slice_kv: u32,
    /// Tiles whose terms are summed apart from those before; None where all are one part.
    pub(crate) part_tiles: Option<u32>,
    pub(crate) options: Options,
}

/// Which options a variant has. The plain ones are as the text stands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    pub(crate) q: Stored,
    pub(crate) k: Stored,
    pub(crate) v: Stored,
    pub(crate) out: DType,
    pub(crate) bias: Option<Stored>,
    pub(crate) mask: bool,
    pub(crate) ranges: bool,
    pub(crate) sequences: bool,
    pub(crate) softcap: bool,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    pub(crate) score_mod: Option<Arc<str>>,
    /// What gradients take beside it.
    pub(crate) score_mod_derivative: Option<Arc<str>>,
    pub(crate) mask_mod: Option<Arc<str>>,
    pub(crate) mod_data: bool,
    /// Keys are gone through in several dispatches.
    pub(crate) passes: bool,
    /// An output lies in the buffer of an input.
    pub(crate) shared_buffer: bool,
}

impl Default for Options {
    fn default() -> Self {
        let f32 = Stored::F32;
        Self {
            q: f32,
            k: f32,
            v: f32,
            out: DType::F32,
            bias: None,
            mask: false,
            ranges: false,
            sequences: false,
            softcap: false,
            alibi: false,
            sinks: false,
            score_mod: None,
            score_mod_derivative: None,
            mask_mod: None,
            mod_data: false,
            passes: false,
            shared_buffer: false,
        }
    }
}

impl Options {
    /// What a problem needs on a device with these features.
    pub(crate) fn of(problem: &Problem, features: wgpu::Features) -> Self {
        let stored = |dtype| Stored::of(dtype, features);
        let attention = &problem.attention;
        Self {
            q: stored(problem.storage.q),
            k: stored(problem.storage.k),
            v: stored(problem.storage.v),
            out: problem.storage.o,
            bias: problem.bias.map(|(dtype, _)| stored(dtype)),
            mask: problem.mask.is_some(),
            ranges: problem.ranges.is_some(),
            sequences: problem.has_sequences(),
            softcap: attention.softcap.is_some(),
            alibi: attention.alibi_slopes.is_some(),
            sinks: problem.sinks,
            score_mod: attention.score_mod.as_ref().map(|it| it.text.wgsl.clone()),
            score_mod_derivative: None,
            mask_mod: attention.mask_mod.as_ref().map(|it| it.0.wgsl.clone()),
            mod_data: problem.mod_words.is_some_and(|words| words > 0),
            passes: false,
            shared_buffer: false,
        }
    }

    /// Whether some mask is a table or a function.
    pub(crate) fn keep_words(&self) -> bool {
        self.mask || self.ranges || self.mask_mod.is_some()
    }

    /// Loop iterations for a word of those, as `keep_word` in common/attention.wgsl: a `mask_mod` is asked for each of its 32 keys.
    pub(crate) fn iterations_of_word(&self) -> u32 {
        if self.mask_mod.is_some() { 34 } else { 1 }
    }

    /// A recipe with these options, and its storage buffers; but for how q, k and v are read, which each kernel has its own way for.
    pub(crate) fn apply(&self, recipe: Recipe) -> (Recipe, Vec<(u32, Access)>) {
        let has_extras = self.has_tables() || self.passes;
        let extras = has_extras.then_some(if self.passes { "state" } else { "words" });
        let (recipe, mut storage) = self.apply_shared(recipe.slot("out", self.out.name()), extras);
        storage.splice(3..3, [(4, Access::ReadWrite), (5, Access::ReadWrite)]);
        (recipe, storage)
    }

    /// The same without outputs, with the alternative of the text `extras` that it takes.
    pub(crate) fn apply_shared(
        &self,
        mut recipe: Recipe,
        extras: Option<&'static str>,
    ) -> (Recipe, Vec<(u32, Access)>) {
        // What is as the text has it stays out of the name.
        for (name, on) in [
            ("SEQUENCES", self.sequences),
            ("RANGES", self.ranges),
            ("MASK_MOD", self.mask_mod.is_some()),
            ("KEEP_WORDS", self.keep_words()),
            ("BIAS", self.bias.is_some()),
            ("SCORE_MOD", self.score_mod.is_some()),
            ("SOFTCAP", self.softcap),
            ("ALIBI", self.alibi),
            ("SINKS", self.sinks),
        ] {
            if on {
                recipe = recipe.spec(name, true);
            }
        }
        let read = if self.shared_buffer { Access::ReadWrite } else { Access::Read };
        let mut storage = vec![(1, read), (2, read), (3, read)];
        if let Some(bias) = self.bias {
            recipe = recipe.slot("bias", bias.alternative());
            storage.push((6, read));
        }
        if self.mask {
            recipe = recipe.slot("mask", "words");
            storage.push((7, Access::Read));
        }
        if let Some(extras) = extras {
            recipe = recipe.slot("extras", extras);
            storage.push((8, if extras == "state" { Access::ReadWrite } else { Access::Read }));
        }
        if let Some(text) = &self.score_mod {
            recipe = recipe.text("score_mod", text);
        }
        if let Some(text) = &self.mask_mod {
            recipe = recipe.text("mask_mod", text);
        }
        if self.shared_buffer {
            recipe = recipe.read_write();
        }
        (recipe, storage)
    }

    /// Whether more than the scale changes a score.
    pub(crate) fn changes_scores(&self) -> bool {
        self.score_mod.is_some() || self.softcap || self.alibi || self.bias.is_some()
    }

    /// Whether it reads small tables.
    fn has_tables(&self) -> bool {
        self.sequences || self.ranges || self.alibi || self.sinks || self.mod_data
    }
}

impl Default for Variant {
    fn default() -> Self {
        let options = Options::default();
        Self {
            tx: 8,
            ty: 16,
            row_vecs: 1,
            key_vecs: 1,
            col_vecs: 1,
            slice_d: 16,
            slice_kv: 16,
            part_tiles: None,
            options,
        }
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
        options: Options,
    ) -> Option<Self> {
        // Few distinct widths keep the number of pipelines down; the columns past value_dim are zeros.
        let col_vecs = [1, 2, 3, 4, 6, 8, 12, 16].into_iter().find(|vecs| 4 * tx * vecs >= value_dim)?;
        let tile = Self { tx, ty, row_vecs, key_vecs, col_vecs, slice_d: 0, slice_kv: 0, part_tiles: None, options };
        let budget = workgroup_bytes.checked_sub(tile.fixed_bytes())?;
        let slice_d = slice_that_fits(head_dim, 16 * (tile.q_stride() + tile.k_stride()), budget);
        let slice_kv = slice_that_fits(tile.block_kv(), 16 * tile.v_stride(), budget);
        let variant = Self { slice_d, slice_kv, ..tile };
        (variant.workgroup_bytes() <= workgroup_bytes).then_some(variant)
    }

    /// The same for at most so many keys, all of which one dispatch goes through, or else several.
    pub(crate) fn for_keys(mut self, kv_len: usize, passes: bool) -> Self {
        const PART_TILES: u32 = 64;
        self.part_tiles = (passes || kv_len > (PART_TILES * self.block_kv()) as usize).then_some(PART_TILES);
        self.options.passes = passes;
        self
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

    fn threads(&self) -> u32 {
        self.tx * self.ty
    }

    fn keep_count(&self) -> u32 {
        if self.options.keep_words() { self.block_q() * (self.block_kv() / 32) } else { 1 }
    }

    /// Bytes of workgroup memory besides the stage: P, the words of masks, two flags, a batch entry.
    fn fixed_bytes(&self) -> u32 {
        16 * self.block_kv() * self.ty * self.row_vecs + 4 * self.keep_count() + 24
    }

    /// Bytes of workgroup memory: the header's Budget.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        let stage = (self.slice_d * (self.q_stride() + self.k_stride())).max(self.slice_kv * self.v_stride());
        16 * stage + self.fixed_bytes()
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self, head_dim: u32) -> u32 {
        let threads = self.threads();
        let items = |count: u32| count.div_ceil(threads) + 1;
        let q_and_k = items(self.slice_d * self.ty * self.row_vecs) + items(self.slice_d * self.tx * self.key_vecs);
        let scores = head_dim.div_ceil(self.slice_d).saturating_mul(q_and_k + self.slice_d + 2);
        let values =
            (self.block_kv() / self.slice_kv) * (items(self.slice_kv * self.v_stride()) + self.slice_kv + 4) + 1;
        let of_word = self.options.iterations_of_word();
        let keep = if self.options.keep_words() { items(self.keep_count()) * of_word } else { 0 };
        scores.saturating_add(values + self.tx + 4 + keep)
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let options = &self.options;
        let mut recipe = Recipe::new("flash_fwd")
            .spec("TX", self.tx)
            .spec("TY", self.ty)
            .spec("ROW_VECS", self.row_vecs)
            .spec("KEY_VECS", self.key_vecs)
            .spec("COL_VECS", self.col_vecs)
            .spec("SLICE_D", self.slice_d)
            .spec("SLICE_KV", self.slice_kv);
        for (slot, stored) in [("q", options.q), ("k", options.k), ("v", options.v)] {
            recipe = recipe.slot(slot, stored.alternative());
        }
        if let Some(tiles) = self.part_tiles {
            recipe = recipe.spec("PART_TILES", tiles);
        }
        if options.passes {
            recipe = recipe.spec("PASSES", true);
        }
        let (recipe, storage) = options.apply(recipe);
        Kernel {
            recipe,
            workgroup_size: [self.tx, self.ty, 1],
            workgroup_bytes: self.workgroup_bytes(),
            params_bytes: size_of::<Params>() as u32,
            storage,
            features: Stored::features([options.q, options.k, options.v].into_iter().chain(options.bias)),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) attention: AttentionParams,
    pub(crate) out: Strides,
    pub(crate) lse: Strides,
    pub(crate) last_pass: u32,
    pub(crate) sums: u32,
    pub(crate) sums_batch: u32,
    pub(crate) sums_head: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
