//! Running the program, and files for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

/// What the program did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// The one JSON document on stdout.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The line with the error, of which there is one. (Graphics drivers write to stderr too.)
    pub(crate) fn error(&self) -> &str {
        let mut lines = self.stderr.lines().filter(|line| line.starts_with("error: ") && !line.contains("XDG_"));
        let line = lines.next().unwrap_or_else(|| panic!("no error: {self:?}"));
        assert_eq!(lines.next(), None, "{self:?}");
        line
    }
}

/// Without what `tilewise tune` may have saved on this machine.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewise"));
    command.env("XDG_CACHE_HOME", std::env::temp_dir().join("tilewise-no-cache"));
    command
}

pub(crate) fn ran(command: &mut Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

pub(crate) fn tilewise<const N: usize>(args: [&str; N]) -> Ran {
    ran(program().args(args))
}

/// Whether there is a device. Without one a test that needs it fails where `REQUIRE_GPU=1`, and else says loudly that it didn't run.
pub(crate) fn gpu() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let found = *FOUND.get_or_init(|| !tilewise::Engine::adapters().is_empty());
    if !found {
        assert_ne!(std::env::var("REQUIRE_GPU").as_deref(), Ok("1"), "REQUIRE_GPU=1, and there is no adapter");
        eprintln!("NOT RUN: there is no GPU adapter, not even a software one");
    }
    found
}

/// A file or folder of the repository's test data.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A tensor of f32.
pub(crate) type Numbers = (&'static str, Vec<usize>, Vec<f32>);

/// Numbers of all sizes within (-1, 1), the same every time.
pub(crate) fn numbers(name: &'static str, shape: &[usize]) -> Numbers {
    let elems: usize = shape.iter().product();
    let number = |n: usize| ((n * 37 + name.len() + name.as_bytes()[0] as usize) % 101) as f32 / 51.0 - 0.99;
    (name, shape.to_vec(), (0..elems).map(number).collect())
}

/// A tensor of any type.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn f32((name, shape, numbers): Numbers) -> Self {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { name, dtype: Dtype::F32, shape, bytes }
    }

    pub(crate) fn i32(name: &'static str, shape: &[usize], numbers: &[i32]) -> Self {
        let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { name, dtype: Dtype::I32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn bool(name: &'static str, shape: &[usize], numbers: &[u8]) -> Self {
        Self { name, dtype: Dtype::BOOL, shape: shape.to_vec(), bytes: numbers.to_vec() }
    }
}

/// The bytes of a file with these tensors in it.
pub(crate) fn safetensors_of_any(tensors: &[Stored]) -> Vec<u8> {
    let views = tensors.iter().map(|Stored { name, dtype, shape, bytes }| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("sizes that fit"))
    });
    safetensors::serialize(views, None).expect("a file")
}

/// Likewise of tensors of f32.
pub(crate) fn safetensors_of(tensors: &[Numbers]) -> Vec<u8> {
    safetensors_of_any(&tensors.iter().cloned().map(Stored::f32).collect::<Vec<_>>())
}

/// Reads a tensor of f32 back.
pub(crate) fn tensor(file: &[u8], name: &str) -> (Vec<usize>, Vec<f32>) {
    let file = safetensors::SafeTensors::deserialize(file).expect("a safetensors file");
    let view = file.tensor(name).expect("the tensor");
    assert_eq!(view.dtype(), Dtype::F32);
    let numbers = view.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    (view.shape().to_vec(), numbers)
}
