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
        "flash_fwd.wgsl",
        "matmul.wgsl",
        "softmax_rows.wgsl",
        "common/matmul_b_columns.wgsl",
        "common/matmul_b_rows.wgsl",
        "common/matmul_reach_all.wgsl",
        "common/matmul_reach_causal.wgsl",
        "common/qkv_f32.wgsl",
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
