//! The README's table of options: each of its cells, run.

use tilewise::{Align, DType, Dims, Storage};

use super::call::{Call, Layout, Lens};
use super::support::{engines, one_head, with_default_limits};

const README: &str = include_str!("../../README.md");
const HEADER: &str = "| option | said by | f32 | f16 | bf16 | packed batch | workspace, bytes |";

/// The calls that a row of the table is about.
fn calls(option: &str) -> Vec<Call> {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 4, ..one_head(37, 70, 12, 12) };
    let call = || Call::new(dims);
    let of = |dims: Dims| Call::new(dims);
    let heads = |x: f32| Some((1..=4).map(|n| x * n as f32).collect::<Vec<f32>>());
    match option {
        "nothing else" | "keys in parts, merged" => vec![call()],
        "grouped-query and multi-query; K and V are never expanded" => {
            vec![of(Dims { kv_heads: 2, ..dims }), of(Dims { kv_heads: 1, ..dims })]
        }
        "any lengths, 0 included, `q_len` and `kv_len` independent" => {
            let of = |q_len, kv_len| of(Dims { q_len, kv_len, ..dims });
            vec![of(0, 5), of(5, 0), of(1, 129), of(129, 1), of(33, 65)]
        }
        "any `head_dim`; `value_dim` up to 512, its own" => {
            let of = |head_dim, value_dim| of(Dims { q_len: 5, head_dim, value_dim, ..dims });
            vec![of(1, 3), of(80, 5), of(3, 512), of(513, 33)]
        }
        "any strides with a contiguous last axis, any offset" => vec![Call { layout: Layout::Swapped, ..call() }],
        "causal, bottom-right" => vec![Call { causal: true, ..call() }],
        "causal, top-left" => vec![Call { causal: true, align: Align::TopLeft, ..call() }],
        "scale" => vec![Call { scale: Some(0.7), ..call() }],
        "sliding window, left and right" => {
            vec![Call { window: [Some(11), None], ..call() }, Call { window: [Some(5), Some(7)], ..call() }]
        }
        "softcap" => vec![Call { softcap: Some(0.5), ..call() }],
        "ALiBi" => vec![Call { alibi: heads(0.1), ..call() }],
        "lengths of each batch entry" => {
            vec![Call { lens: Lens::Kv, ..call() }, Call { lens: Lens::Both, causal: true, ..call() }]
        }
        "boolean mask that broadcasts, a bit a key" => {
            [[2, 4, 37, 70], [1, 1, 1, 70], [2, 1, 37, 1]].map(|shape| Call { mask: Some(shape), ..call() }).into()
        }
        "additive bias that broadcasts" => {
            let of = |dtype| [[2, 4, 37, 70], [1, 4, 1, 70]].map(|shape| Call { bias: Some((dtype, shape)), ..call() });
            [DType::F32, DType::F16, DType::Bf16].into_iter().flat_map(of).collect()
        }
        "a range of keys for each row: documents, prefixes" => vec![Call { ranges: Some([1, 1, 37]), ..call() }],
        "attention sinks" => vec![Call { sinks: heads(0.3), ..call() }],
        "scores changed by your WGSL" | "numbers that your WGSL reads" => vec![Call { score_mod: true, ..call() }],
        "keys hidden by your WGSL" => vec![Call { mask_mod: true, ..call() }],
        other => panic!("the table's option {other:?} has no test"),
    }
}

/// A product such as `16 · batch`.
fn bytes(cell: &str, dims: &Dims) -> u64 {
    let factor = |word: &str| match word {
        "batch" => dims.batch as u64,
        "q_heads" | "mod_data" => dims.q_heads as u64, // the test's mod reads a number a head
        "q_len" => dims.q_len as u64,
        number => number.parse().unwrap_or_else(|_| panic!("{number:?} in {cell:?}")),
    };
    cell.split('·').map(|word| factor(word.trim())).product()
}

/// Whether a call is accepted, and right. On the least device alone: kernels take their time to compile.
fn works(call: &Call) -> bool {
    let Some(engine) = with_default_limits() else { return false };
    let data = call.data();
    let uploaded = call.upload(engine, &data);
    let Ok(problem) = uploaded.inputs().problem(&call.options()) else { return false };
    let plan = engine.plan(&problem).unwrap();
    call.assert_matches(&call.run(engine, &plan, &uploaded), &call.reference(&data), "");
    true
}

#[test]
fn every_cell_is_true() {
    if engines().is_empty() {
        return;
    }
    let rows: Vec<Vec<&str>> = README
        .lines()
        .skip_while(|line| *line != HEADER)
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() >= 20, "{} rows: where is the table?", rows.len());
    for row in &rows {
        let [option, _, f32, f16, bf16, packed, workspace] = row[..] else { panic!("{row:?}") };
        for call in calls(option) {
            for (cell, dtype) in [(f32, DType::F32), (f16, DType::F16), (bf16, DType::Bf16)] {
                let stored = Call { storage: Storage::all(dtype), ..call.clone() };
                assert_eq!(if works(&stored) { "yes" } else { "no" }, cell, "{option} in {dtype}");
            }
            let of_packed =
                Call { lens: if call.lens == Lens::Full { Lens::Packed } else { call.lens }, ..call.clone() };
            let refused = call.lens != Lens::Full; // lengths are what a packed batch has instead
            assert_eq!(if !refused && works(&of_packed) { "yes" } else { "no" }, packed, "{option}, packed");

            let engine = engines()[0];
            let plan = engine.plan(&call.upload(engine, &call.data()).problem(&call.options())).unwrap();
            // What the mods read is a row of its own.
            let mod_data = if option.starts_with("scores changed") { 4 * call.dims.q_heads as u64 } else { 0 };
            assert_eq!(plan.workspace_bytes() - mod_data, bytes(workspace, &call.dims), "workspace of {option}");
        }
    }
}

/// Merged parts of each type, as the table says.
#[test]
fn the_types_of_merged_states() {
    let call = Call::new(Dims { batch: 2, q_heads: 4, kv_heads: 4, ..one_head(37, 70, 12, 12) });
    for lens in [Lens::Full, Lens::Packed] {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let call = Call { lens, storage: Storage::all(dtype), ..call.clone() };
            let data = call.data();
            // The same keys twice: o as it is, and ln 2 more.
            let expected = call.reference(&data);
            for engine in engines() {
                let part = engine.attention_with(&call.upload(engine, &data).inputs(), &call.options()).unwrap();
                let merged = engine.merge(&part, &part).unwrap();
                let lse = merged.lse.read().unwrap().iter().map(|x| x - core::f32::consts::LN_2).collect();
                call.assert_matches(&(merged.o.read().unwrap(), lse), &expected, "merged");
            }
        }
    }
}
