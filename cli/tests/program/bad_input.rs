//! Files and options that make no sense: one clear line, exit status 1, nothing on stdout, no device needed.

use std::path::{Path, PathBuf};

use super::support::{Numbers, Stored, numbers, program, ran, safetensors_of, safetensors_of_any};

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

/// Where the other order of axes would do, it is named.
#[test]
fn shapes_that_fit_in_the_other_order() {
    let of = |shapes: [&[usize]; 3]| {
        let [q, k, v] = shapes;
        Bad::new(&safetensors_of(&[numbers("q", q), numbers("k", k), numbers("v", v)]))
    };
    let hint = "; as (batch, length, heads, dim) they fit: --axes bshd";
    of([&[1, 5, 6, 8], &[1, 7, 3, 8], &[1, 7, 3, 8]]).is_refused(
        &[],
        &format!("q_heads = 5, kv_heads = 7; accepted: both at least 1, q_heads a multiple of kv_heads{hint}"),
    );
    of([&[5, 6, 8], &[7, 3, 8], &[7, 3, 8]]).is_refused(&[], hint);
    let back = of([&[1, 6, 5, 8], &[1, 3, 7, 8], &[1, 3, 7, 8]]);
    back.is_refused(&["--axes", "bshd"], "; as (batch, heads, length, dim) they fit: --axes bhsd");
    let neither = of([&[1, 5, 6, 8], &[1, 7, 4, 8], &[1, 7, 4, 8]]);
    for args in [&[][..], &["--axes", "bshd"]] {
        let ran = ran(program().arg("run").arg(&neither.file).args(args));
        assert!(ran.error().contains("accepted: ") && !ran.error().contains("they fit"), "{ran:?}");
    }
    let q = numbers("q", &[4, 8]);
    Bad::new(&safetensors_of(&[q, numbers("k", &[1, 5, 3, 8]), numbers("v", &[1, 5, 3, 8])]))
        .is_refused(&["--axes", "bshd"], "accepted: (batch, length, heads, dim), or (length, heads, dim) for batch 1");
    let qkv = [numbers("q", &[1, 4, 2, 8]), numbers("k", &[1, 4, 2, 8]), numbers("v", &[1, 4, 2, 8])];
    let lse = Bad::new(&safetensors_of(&[&qkv[..], &[numbers("lse", &[1, 2, 4])]].concat()));
    lse.is_refused(&[], "lse is [1, 2, 4]; accepted: [1, 4, 2], by the shapes of q, k and v; --axes bshd fits it");
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
    for name in ["block_table", "past_key", "past_value", "position_ids", "nonpad_kv_seqlen"] {
        let file = safetensors_of(&[q.clone(), k.clone(), v.clone(), numbers(name, &[1, 1, 4, 5])]);
        Bad::new(&file).is_refused(&[], &format!("it holds {name}: not built yet"));
    }
}

#[test]
fn tensors_of_unknown_names() {
    let unknown = ["key_padding_mask", "Mask", "mod_data", "out"];
    for name in unknown {
        let file = with(&[Stored::f32(numbers(name, &[1, 5])), Stored::f32(numbers("dq", &[1]))]);
        file.is_refused(&[], &format!("it holds {name}: not known, and attention without could be something else"));
        file.is_refused(&[], "accepted: q, k, v, mask (attn_mask, attention_mask), bias");
        file.is_refused(&[], &format!("--ignore {name},.. leaves tensors out"));
    }
    let several = with(&unknown.map(|name| Stored::f32(numbers(name, &[1]))));
    several.is_refused(&[], "it holds Mask, key_padding_mask, mod_data, out: not known");
    several.is_refused(&["--ignore", "Mask,mod_data"], "it holds key_padding_mask, out: not known");
    several.is_refused(&["--ignore", "Mask,nothing"], "--ignore: no tensor nothing; the file holds: Mask, k, ");
    several.is_refused(&["--ignore", "q"], "no tensor q; the file holds: Mask, k, ");
}

#[test]
fn ranges_that_do_not_fit() {
    let ranges = |shape: &[usize]| with(&[Stored::i32("ranges", shape, &vec![0; shape.iter().product()])]);
    ranges(&[4, 5]).is_refused(&[], "ranges is [4, 5]; accepted: (batch, q_heads, q_len, 2)");
    ranges(&[4]).is_refused(&[], "ranges is [4]; accepted: (batch, q_heads, q_len, 2)");
    ranges(&[1, 1, 1, 4, 2]).is_refused(&[], "ranges is [1, 1, 1, 4, 2]; accepted: up to four axes, (batch,");
    ranges(&[1, 2]).is_refused(&[], "ranges is [1, 2]: invalid request: ranges for [1, 1, 1] rows");
    ranges(&[3, 4, 2]).is_refused(&[], "(batch, q_heads, q_len) = [1, 6, 4]");
    with(&[Stored::f32(numbers("ranges", &[4, 2]))]).is_refused(&[], "ranges is F32; accepted: integers");
    with(&[Stored::i32("ranges", &[4, 2], &[-1; 8])]).is_refused(&[], "ranges holds -1");
}

/// q (1, 6, 4, 8), k and v (1, 3, 5, 8), and these.
fn with(others: &[Stored]) -> Bad {
    let tensors: Vec<_> = qkv().into_iter().map(Stored::f32).chain(others.iter().cloned()).collect();
    Bad::new(&safetensors_of_any(&tensors))
}

#[test]
fn masks_and_biases_of_wrong_shapes_and_types() {
    let full = "(batch, q_heads, q_len, kv_len) = [1, 6, 4, 5]";
    for shape in [&[1, 1, 5, 4][..], &[2, 1, 4, 5], &[1, 3, 4, 5], &[4], &[5, 5]] {
        let ones = vec![1; shape.iter().product()];
        let mask = with(&[Stored::bool("attn_mask", shape, &ones)]);
        mask.is_refused(&[], &format!("attn_mask is {shape:?}: invalid request: mask of shape "));
        mask.is_refused(&[], full);
        with(&[Stored::f32(numbers("attn_bias", shape))]).is_refused(&[], full);
    }
    with(&[Stored::bool("mask", &[1, 1, 1, 1, 5], &[1; 5])])
        .is_refused(&[], "mask is [1, 1, 1, 1, 5]; accepted: up to four");
    with(&[Stored::i32("mask", &[5], &[0, 1, 1, 2, 1])]).is_refused(&[], "mask holds 2; accepted: 0 and 1");
    with(&[Stored::bool("bias", &[5], &[1; 5])]).is_refused(&[], "bias is BOOL; accepted: F32, F16, BF16");
    // As a bias it would hide nothing.
    let numbers = ("attention_mask", vec![5], vec![1.0, 1.0, 0.0, 1.0, 1.0]);
    with(&[Stored::f32(numbers)]).is_refused(&[], "attention_mask is F32 of nothing but 0 and 1; accepted: BOOL");
    let [mask, other] = ["mask", "attn_mask"].map(|name| Stored::bool(name, &[5], &[1; 5]));
    with(&[mask.clone(), other]).is_refused(&[], "it holds mask and attn_mask, which say the same");
    mask_with_naive_or_packed(&mask);
}

fn mask_with_naive_or_packed(mask: &Stored) {
    if super::support::gpu() {
        with(std::slice::from_ref(mask)).is_refused(&["--path", "naive"], "the naive path with a mask");
    }
    let cu_seqlens = Stored::i32("cu_seqlens", &[2], &[0, 4]);
    packed(&[mask.clone(), cu_seqlens]).is_refused(&[], "mask with a packed batch");
}

#[test]
fn sinks_slopes_and_lengths_that_do_not_fit() {
    with(&[Stored::f32(numbers("sinks", &[3]))]).is_refused(&[], "sinks is [3]; accepted: (q_heads) = [6]");
    with(&[Stored::f32(numbers("alibi_slopes", &[3, 6]))])
        .is_refused(&[], "alibi_slopes is [3, 6]; accepted: (q_heads) or (batch, q_heads) = [1, 6]");
    let lens = |shape: &[usize], lens: &[i32]| with(&[Stored::i32("kv_lens", shape, lens)]);
    lens(&[1], &[6]).is_refused(&[], "kv_lens[0] = 6; accepted: up to 5");
    lens(&[2], &[1, 2]).is_refused(&[], "kv_lens of 2 batch entries; accepted: 1");
    lens(&[1, 1], &[1]).is_refused(&[], "kv_lens is [1, 1]; accepted: one axis");
    lens(&[1], &[-1]).is_refused(&[], "kv_lens holds -1; accepted: 0 to 4294967295");
    with(&[Stored::f32(numbers("q_lens", &[1]))]).is_refused(&[], "q_lens is F32; accepted: integers");
}

/// q, k and v of 4 tokens, 2 heads and a dim of 8, and these.
fn packed(others: &[Stored]) -> Bad {
    let qkv = ["q", "k", "v"].map(|name| Stored::f32(numbers(name, &[4, 2, 8])));
    Bad::new(&safetensors_of_any(&[&qkv, others].concat()))
}

#[test]
fn packed_batches_that_do_not_fit() {
    let bounds = |name: &'static str, bounds: &[i32]| Stored::i32(name, &[bounds.len()], bounds);
    let of = |q: &[i32], k: &[i32]| packed(&[bounds("cu_seqlens_q", q), bounds("cu_seqlens_k", k)]);
    of(&[0, 3, 2, 4], &[0, 1, 2, 4])
        .is_refused(&[], "cu_seqlens_q = [0, 3, 2, 4]; accepted: 4 numbers that start at 0, never fall");
    of(&[0, 2, 4], &[0, 5, 4]).is_refused(&[], "cu_seqlens_kv = [0, 5, 4]; accepted: 3 numbers");
    of(&[0, 2, 4], &[0, 4]).is_refused(&[], "cu_seqlens_kv = [0, 4]; accepted: 3 numbers");
    of(&[0, 2, 3], &[0, 2, 4]).is_refused(&[], "end at 4");
    of(&[], &[]).is_refused(&[], "cu_seqlens_q = []");
    of(&[0, -1, 4], &[0, 2, 4]).is_refused(&[], "cu_seqlens_q holds -1");
    packed(&[bounds("cu_seqlens_q", &[0, 4])])
        .is_refused(&[], "it holds cu_seqlens_q alone; accepted: cu_seqlens_q and");
    let good = packed(&[bounds("cu_seqlens", &[0, 1, 4])]);
    good.is_refused(&["--layout", "bshd"], "--layout or --axes with a packed batch");
    packed(&[bounds("cu_seqlens", &[0, 4]), bounds("kv_lens", &[3])]).is_refused(&[], "kv_lens of a packed batch");
    with(&[bounds("cu_seqlens", &[0, 4])]).is_refused(&[], "q is [1, 6, 4, 8]; accepted: (tokens, heads, dim)");
}

#[test]
fn softcap_that_caps_nothing() {
    let good = Bad::new(&safetensors_of(&qkv()));
    good.is_refused(&["--softcap", "0"], "softcap = 0; accepted: a finite number above 0");
    good.is_refused(&["--softcap", "-1"], "softcap = -1");
    good.is_refused(&["--softcap", "inf"], "softcap = inf");
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
    Bad::new(&safetensors_of(&asks)).is_refused(&["--limits", "default"], "256 MiB needed, 128 MiB available");
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
    if super::support::gpu() {
        good.is_refused(&["--adapter", "99"], "`tilewise info` numbers them");
    }
}
