//! The tiled backward kernels, seen as one: `flash_bwd_dq`, `flash_bwd_dkdv` and `flash_bwd_dbias` have the same tensors, options and
//! uniform, and are cut alike.

use crate::gpu::{Access, Kernel};
use crate::problem::DType;
use crate::shader::Recipe;

use super::flash_fwd::Options;
use super::{AttentionParams, Stored, Strides, slice_that_fits};

/// Which gradients a kernel makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Makes {
    /// `flash_bwd_dq`.
    Dq(DType),
    /// `flash_bwd_dkdv`: dk, dv, or both.
    DkDv(Option<DType>, Option<DType>),
    /// `flash_bwd_dbias`.
    Dbias(DType),
}

impl Makes {
    /// What they are stored as.
    pub(crate) fn dtypes(self) -> impl Iterator<Item = DType> {
        let [first, second] = match self {
            Self::Dq(dtype) | Self::Dbias(dtype) => [Some(dtype), None],
            Self::DkDv(dk, dv) => [dk, dv],
        };
        first.into_iter().chain(second)
    }
}

/// What is baked into one of their texts: how the tile is cut, and which options it has. See their headers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    pub(crate) tx: u32,
    pub(crate) ty: u32,
    pub(crate) own_vecs: u32,
    pub(crate) other_vecs: u32,
    /// Of head_dim and value_dim.
    pub(crate) col_vecs: [u32; 2],
    pub(crate) slice_d: u32,
    pub(crate) slice_other: u32,
    pub(crate) makes: Makes,
    pub(crate) grad_o: Stored,
    /// What is walked is walked in several dispatches.
    pub(crate) passes: bool,
    pub(crate) options: Options,
}

/// The widest row of any variant.
pub(crate) const MAX_DIM: u32 = 512;

impl Variant {
    /// The variant of a thread grid and a tile for the given dims, with slices that keep within `workgroup_bytes`.
    /// None where the tile alone passes it.
    pub(crate) fn for_dims(
        [tx, ty]: [u32; 2],
        [own_vecs, other_vecs]: [u32; 2],
        [head_dim, value_dim]: [u32; 2],
        workgroup_bytes: u32,
        makes: Makes,
        grad_o: Stored,
        options: Options,
    ) -> Option<Self> {
        // Few distinct widths keep the number of pipelines down; the columns past a dim are zeros.
        let vecs_of = |dim: u32| [1, 2, 3, 4, 6, 8, 12, 16].into_iter().find(|vecs| 4 * tx * vecs >= dim);
        let col_vecs = [vecs_of(head_dim)?, vecs_of(value_dim)?];
        let tile = Self {
            tx,
            ty,
            own_vecs,
            other_vecs,
            col_vecs,
            slice_d: 0,
            slice_other: 0,
            makes,
            grad_o,
            passes: false,
            options,
        };
        let budget = workgroup_bytes.checked_sub(tile.fixed_bytes())?;
        let slice_d = slice_that_fits(head_dim.max(value_dim), 16 * tile.strides(), budget);
        let slice_other = slice_that_fits(tile.block_other(), 16 * tile.sums_stride(), budget);
        let variant = Self { slice_d, slice_other, ..tile };
        (variant.workgroup_bytes() <= workgroup_bytes).then_some(variant)
    }

    /// Rows that a workgroup owns: of queries, or of keys.
    pub(crate) fn block_own(&self) -> u32 {
        4 * self.ty * self.own_vecs
    }

    /// Rows of the other kind in a tile.
    pub(crate) fn block_other(&self) -> u32 {
        4 * self.tx * self.other_vecs
    }

    /// Invocations of a workgroup.
    pub(crate) fn threads(&self) -> u32 {
        self.tx * self.ty
    }

    fn strides(&self) -> u32 {
        self.ty * self.own_vecs + self.tx * self.other_vecs + 2
    }

    /// vec4s of a staged row of the sums.
    fn sums_stride(&self) -> u32 {
        let [of_head, of_value] = self.col_vecs;
        self.tx
            * match self.makes {
                Makes::Dq(_) => of_head,
                Makes::DkDv(..) => of_head.max(of_value),
                Makes::Dbias(_) => 0,
            }
    }

    fn keep_count(&self) -> u32 {
        let [own, other] = [self.block_own(), self.block_other()];
        match (self.options.keep_words(), self.makes) {
            (false, _) => 1,
            (true, Makes::Dq(_) | Makes::Dbias(_)) => own * (other / 32),
            (true, Makes::DkDv(..)) => other * (own / 32),
        }
    }

    /// Bytes of workgroup memory besides the stage: P or what is summed over threads, and the words of masks.
    fn fixed_bytes(&self) -> u32 {
        let p_vecs = match self.makes {
            Makes::Dbias(_) => self.tx * self.ty * self.own_vecs.max(self.other_vecs),
            _ => self.block_other() * self.ty * self.own_vecs,
        };
        16 * p_vecs + 4 * self.keep_count()
    }

    /// vec4s that a thread holds: what it sums, a tile's part of it, and the scores and their gradients.
    pub(crate) fn registers(&self) -> u32 {
        let tile = 4 * self.own_vecs * self.other_vecs;
        let sums = match self.makes {
            Makes::Dq(_) => 2 * self.col_vecs[0],
            Makes::DkDv(..) => self.col_vecs[0] + self.col_vecs[1] + self.col_vecs[0].max(self.col_vecs[1]),
            Makes::Dbias(_) => self.other_vecs,
        };
        2 * tile + 4 * self.own_vecs * sums
    }

    /// Loop iterations of an invocation for one tile, all loops together: no less than there are, as drivers count.
    pub(crate) fn iterations_of_tile(&self, [head_dim, value_dim]: [u32; 2]) -> u32 {
        let threads = self.threads();
        let items = |count: u32| count.div_ceil(threads) + 1;
        let slice = items(self.slice_d * self.ty * self.own_vecs)
            + items(self.slice_d * self.tx * self.other_vecs)
            + self.slice_d
            + 2;
        let slices = head_dim.div_ceil(self.slice_d).saturating_add(value_dim.div_ceil(self.slice_d));
        let sums = |col_vecs: u32| {
            (self.block_other() / self.slice_other)
                * (items(self.slice_other * self.tx * col_vecs) + self.slice_other + 4)
                + 1
        };
        let sums = match self.makes {
            Makes::Dq(_) => sums(self.col_vecs[0]),
            Makes::DkDv(..) => sums(self.col_vecs[0]) + sums(self.col_vecs[1]),
            Makes::Dbias(_) => 0,
        };
        let of_word = self.options.iterations_of_word();
        let keep = if self.options.keep_words() { items(self.keep_count()) * of_word } else { 0 };
        slices.saturating_mul(slice).saturating_add(sums + keep + 4)
    }

    /// Bytes of workgroup memory: the header's Budget.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        16 * (self.slice_d * self.strides()).max(self.slice_other * self.sums_stride()) + self.fixed_bytes()
    }

    /// What the device needs to know.
    pub(crate) fn kernel(&self) -> Kernel {
        let options = &self.options;
        let stem = match self.makes {
            Makes::Dq(_) => "flash_bwd_dq",
            Makes::DkDv(..) => "flash_bwd_dkdv",
            Makes::Dbias(_) => "flash_bwd_dbias",
        };
        let mut recipe = Recipe::new(stem)
            .spec("TX", self.tx)
            .spec("TY", self.ty)
            .spec("OWN_VECS", self.own_vecs)
            .spec("OTHER_VECS", self.other_vecs)
            .spec("SLICE_D", self.slice_d);
        if self.passes {
            recipe = recipe.spec("PASSES", true);
        }
        let stored = [("q", options.q), ("k", options.k), ("v", options.v), ("grad_o", self.grad_o)];
        for (slot, stored) in stored {
            recipe = recipe.slot(slot, stored.alternative());
        }
        let mut outputs = Vec::new();
        match self.makes {
            Makes::Dq(dq) => {
                recipe = recipe
                    .spec("SLICE_OTHER", self.slice_other)
                    .spec("COL_VECS", self.col_vecs[0])
                    .slot("out", dq.name());
                outputs.push((4, Access::ReadWrite));
            }
            Makes::DkDv(dk, dv) => {
                recipe = recipe
                    .spec("SLICE_OTHER", self.slice_other)
                    .spec("DK_COL_VECS", self.col_vecs[0])
                    .spec("DV_COL_VECS", self.col_vecs[1]);
                for (slot, spec, grad, binding) in [("dk_out", "WRITES_DK", dk, 4), ("dv_out", "WRITES_DV", dv, 9)] {
                    recipe = recipe.slot(slot, grad.map_or("none", DType::name));
                    match grad {
                        Some(_) => outputs.push((binding, Access::ReadWrite)),
                        None => recipe = recipe.spec(spec, false),
                    }
                }
            }
            Makes::Dbias(dbias) => {
                recipe = recipe.slot("out", dbias.name());
                outputs.push((4, Access::ReadWrite));
            }
        }
        recipe = recipe.slot("attention_params", "backward");
        if let Some(text) = &options.score_mod_derivative {
            recipe = recipe.text("score_mod_derivative", text);
        }
        let (recipe, mut storage) = options.apply_shared(recipe, Some("words"));
        storage.push((5, Access::Read));
        storage.extend(outputs);
        storage.sort_by_key(|&(binding, _)| binding);
        Kernel {
            recipe,
            workgroup_size: [self.tx, self.ty, 1],
            workgroup_bytes: self.workgroup_bytes(),
            params_bytes: size_of::<Params>() as u32,
            storage,
            features: Stored::features(stored.map(|(_, stored)| stored).into_iter().chain(options.bias)),
        }
    }
}

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) attention: AttentionParams,
    pub(crate) grad_o: Strides,
    /// Of dq, dk or dbias.
    pub(crate) out: Strides,
    pub(crate) dv: Strides,
    pub(crate) first_tile: u32,
    pub(crate) end_tile: u32,
    pub(crate) states: u32,
    pub(crate) states_batch: u32,
    pub(crate) states_head: u32,
    pub(crate) bias_axes: u32,
    pub(crate) zero: u32,
    pub(crate) pad: u32,
}

const _: () = assert!(size_of::<Params>().is_multiple_of(16));
