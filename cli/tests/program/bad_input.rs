//! Files and options that make no sense: one clear line, exit status 1, nothing on stdout, no device needed.

use std::path::{Path, PathBuf};

use super::support::{Numbers, numbers, program, ran, safetensors_of};

/// A folder with a file of the given bytes.
struct Bad {
    _folder: tempfile::TempDir,
    file: PathBuf,
}

impl Bad {
    fn new(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("input.safetensors");
        std::fs::write(&file, bytes).unwrap();
        Self { _folder: folder, file }
    }

    fn is_refused(&self, args: &[&str], error: &str) {
        let ran = ran(program().arg("run").arg(&self.file).args(args));
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
        assert!(ran.error().contains(error), "{error:?} not in {:?}", ran.error());
    }
}

fn qkv() -> [Numbers; 3] {
    [numbers("q", &[1, 6, 4, 8]), numbers("k", &[1, 3, 5, 8]), numbers("v", &[1, 3, 5, 8])]
}

#[test]
fn no_such_file() {
    let mut bad = Bad::new(&[]);
    bad.file.set_file_name("another.safetensors");
    bad.is_refused(&[], "another.safetensors: no such file");
    bad.file.pop();
    bad.is_refused(&[], "not a regular file");
}

#[test]
fn truncated_anywhere() {
    let whole = safetensors_of(&qkv());
    for length in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        Bad::new(&whole[..length]).is_refused(&[], "truncated");
    }
}

#[test]
fn not_safetensors() {
    Bad::new(b"hello, I am a text of some length").is_refused(&[], "not a safetensors file");
    let mut bytes = 5_u64.to_le_bytes().to_vec();
    bytes.extend(b"{\"q\":");
    Bad::new(&bytes).is_refused(&[], "not a safetensors file");
}

/// Eight tensors whose ends add up to more than 64 bits hold: the sum must not be taken.
#[test]
fn offsets_that_overflow() {
    let size = (1_u64 << 61) - 1;
    let tensors = (0..8).map(|n| {
        let (start, end) = (n * size, (n + 1) * size);
        format!(r#""t{n}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#)
    });
    let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    Bad::new(&bytes).is_refused(&[], "truncated");
}

#[test]
fn missing_tensor() {
    let [q, _, v] = qkv();
    Bad::new(&safetensors_of(&[q, v])).is_refused(&[], "no tensor k; the file holds: q, v");
}

#[test]
fn wrong_dtype() {
    let file = safetensors_of(&qkv());
    // In the header, where names are sorted within a dtype: the first is k's.
    let at = file.windows(3).position(|bytes| bytes == b"F32").unwrap();
    let mut file = file;
    file[at..at + 3].copy_from_slice(b"I32");
    Bad::new(&file).is_refused(&[], "is I32; accepted: F32, F16, BF16");
}

#[test]
fn seven_query_heads_on_three() {
    let [_, k, v] = qkv();
    let file = safetensors_of(&[numbers("q", &[1, 7, 4, 8]), k, v]);
    Bad::new(&file).is_refused(&[], "q_heads = 7, kv_heads = 3");
}

#[test]
fn shapes_that_do_not_fit() {
    let [q, k, v] = qkv();
    let file = safetensors_of(&[q.clone(), numbers("k", &[1, 3, 5, 7]), v.clone()]);
    Bad::new(&file).is_refused(&[], "don't fit together");
    let file = safetensors_of(&[numbers("q", &[4, 8]), k.clone(), v.clone()]);
    Bad::new(&file).is_refused(&[], "q is [4, 8]; accepted: (batch, heads, length, dim)");
    let file = safetensors_of(&[q, k, v, numbers("o", &[1, 6, 4, 9])]);
    Bad::new(&file).is_refused(&[], "o is [1, 6, 4, 9]; accepted: [1, 6, 4, 8]");
}

#[test]
fn scale_that_is_no_number() {
    let good = Bad::new(&safetensors_of(&qkv()));
    good.is_refused(&["--scale", "NaN"], "softmax_scale = NaN");
    good.is_refused(&["--scale", "inf"], "softmax_scale = inf");
}

#[test]
fn inputs_that_are_not_built() {
    let [q, k, v] = qkv();
    for name in ["mask", "bias", "sinks", "kv_lens"] {
        let file = safetensors_of(&[q.clone(), k.clone(), v.clone(), numbers(name, &[1, 1, 4, 5])]);
        Bad::new(&file).is_refused(&[], &format!("it holds {name}: not built yet"));
    }
}

#[test]
fn more_than_fits() {
    if !super::support::gpu() {
        return;
    }
    let [q, k, _] = qkv();
    let wide = Bad::new(&safetensors_of(&[q, k, numbers("v", &[1, 3, 5, 600])]));
    wide.is_refused(&[], "value_dim (of any tiled kernel): 600 needed, 512 available");
    // No keys: a small file that asks for an o of 256 MiB, over the default limit of a binding.
    let asks = [numbers("q", &[1, 131_072, 1, 1]), numbers("k", &[1, 1, 0, 1]), numbers("v", &[1, 1, 0, 512])];
    Bad::new(&safetensors_of(&asks)).is_refused(&["--limits", "default"], "268435456 needed, 134217728 available");
}

/// A name in a file can't command the terminal.
#[test]
fn control_characters_are_not_passed_on() {
    let file = safetensors_of(&[numbers("\u{1b}[31mq", &[1, 1, 4, 5])]);
    Bad::new(&file).is_refused(&[], "\u{fffd}[31mq");
}

#[test]
fn out_that_cannot_be_written() {
    let good = Bad::new(&safetensors_of(&qkv()));
    if Path::new("/proc").is_dir() {
        good.is_refused(&["--out", "/proc/o.safetensors"], "no file can be written in /proc");
    }
    good.is_refused(&["--out", "no-such-folder/o.safetensors"], "there is no folder");
    good.is_refused(&["--out", "."], "isn't a regular file");
}

#[test]
fn adapter_that_is_not_there() {
    let good = Bad::new(&safetensors_of(&qkv()));
    good.is_refused(&["--adapter", "no such adapter"], "no usable GPU adapter");
    good.is_refused(&["--adapter", "99"], "no usable GPU adapter");
}
