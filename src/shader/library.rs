//! The kernel files, embedded.

/// A set of files, each a path below `shaders/` and a text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library(pub(super) &'static [(&'static str, &'static str)]);

macro_rules! embed {
    ($($path:literal,)*) => {
        Library(&[$(($path, include_str!(concat!("../../shaders/", $path))),)*])
    };
}

impl Library {
    /// Every file of `shaders/`: a new one needs its line here.
    pub(crate) const EMBEDDED: Self = embed! {
        "flash_bwd_broadcast.wgsl",
        "flash_bwd_dbias.wgsl",
        "flash_bwd_dkdv.wgsl",
        "flash_bwd_dq.wgsl",
        "flash_bwd_dsinks.wgsl",
        "flash_bwd_preprocess.wgsl",
        "flash_fwd.wgsl",
        "flash_fwd_broadcast.wgsl",
        "matmul.wgsl",
        "matmul_broadcast.wgsl",
        "merge_states.wgsl",
        "score_mod_slopes.wgsl",
        "softmax_rows.wgsl",
        "common/attention.wgsl",
        "common/attention_params_backward.wgsl",
        "common/attention_params_forward.wgsl",
        "common/backward.wgsl",
        "common/extras_none.wgsl",
        "common/extras_state.wgsl",
        "common/extras_words.wgsl",
        "common/mask_mod_none.wgsl",
        "common/mask_none.wgsl",
        "common/mask_words.wgsl",
        "common/matmul.wgsl",
        "common/matmul_b_columns.wgsl",
        "common/matmul_b_rows.wgsl",
        "common/matmul_reach_all.wgsl",
        "common/matmul_reach_causal.wgsl",
        "common/mod_data.wgsl",
        "common/out_bf16.wgsl",
        "common/out_f16.wgsl",
        "common/out_f32.wgsl",
        "common/out_halves.wgsl",
        "common/out_none.wgsl",
        "common/pair_bf16.wgsl",
        "common/pair_f16.wgsl",
        "common/pair_none.wgsl",
        "common/params_immediate.wgsl",
        "common/params_uniform.wgsl",
        "common/rows.wgsl",
        "common/score_mod_derivative_none.wgsl",
        "common/score_mod_none.wgsl",
        "common/stored_bf16.wgsl",
        "common/stored_f16.wgsl",
        "common/stored_f16_packed.wgsl",
        "common/stored_f32.wgsl",
        "common/stored_none.wgsl",
        "common/sums_staged.wgsl",
        "common/tanh.wgsl",
        "common/tile_staged.wgsl",
        "common/wide_f32_1.wgsl",
        "common/wide_f32_4.wgsl",
        "common/wide_f32_8.wgsl",
        "common/wide_halves_1.wgsl",
        "common/wide_halves_16.wgsl",
        "common/wide_halves_8.wgsl",
    };

    /// A file by its path; gives the path too, with the longer life.
    pub(crate) fn file(self, path: &str) -> Option<(&'static str, &'static str)> {
        self.0.iter().find(|(known, _)| *known == path).copied()
    }

    pub(crate) fn paths(self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(path, _)| *path)
    }

    /// The alternatives that a slot has among the files.
    pub(super) fn alternatives(self, slot: &str) -> Vec<&'static str> {
        let prefix = format!("common/{slot}_");
        self.paths().filter_map(|path| path.strip_prefix(&prefix)?.strip_suffix(".wgsl")).collect()
    }
}
