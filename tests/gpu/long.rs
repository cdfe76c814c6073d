//! Inputs so long that a software device gets them in several passes: llvmpipe ends the loops of an invocation after 65535 iterations in
//! all, without a word.

use tilewise::reference::{self, Case, Precision};
use tilewise::{Align, Attention, DType, Engine, Inputs, wgpu};

use super::support::{assert_close, engines, one_head, random};

/// Several passes of any tile.
const LONG: usize = 70_000;

/// Attention of a few rows over many keys, against the reference.
#[track_caller]
fn check(engine: &Engine, options: &Attention, with_sink: bool, case: &Case<'_>) {
    let Case { q_len, kv_len, head_dim, value_dim, .. } = *case;
    let tensor = |data: &[f32], rows, dim| engine.upload(data, [1, 1, rows, dim]).unwrap();
    let (q, k, v) =
        (tensor(case.q, q_len, head_dim), tensor(case.k, kv_len, head_dim), tensor(case.v, kv_len, value_dim));
    let sink = engine.upload(&[1.5f32], [1]).unwrap();
    let inputs = Inputs { sinks: with_sink.then_some(&sink), ..Inputs::new(&q, &k, &v) };
    let out = engine.attention_with(&inputs, options).unwrap();
    let case = Case { sinks: with_sink.then_some(&[1.5]), ..*case };
    let expected = reference::attention(&case).unwrap();
    let what = format!("{:?}, sink {with_sink}", engine.plan(&inputs.problem(options).unwrap()).unwrap().explain());
    assert_close(&out.o.read().unwrap(), &expected.o, expected.tolerance.o(Precision::F32), &what);
    assert_close(&out.lse.read().unwrap(), &expected.lse, expected.tolerance.lse(), &what);
}

#[test]
fn many_keys() {
    let dims = one_head(77, LONG, 5, 7);
    let (q, mut k, v) =
        (random(1, 1.0, dims.q_elems()), random(2, 1.0, dims.k_elems()), random(3, 1.0, dims.v_elems()));
    // The scores rise towards the end, so that every pass changes what those before it have made.
    for (at, x) in k.iter_mut().enumerate() {
        *x *= 1.0 + at as f32 / 1e5;
    }
    let case = Case {
        batch: 1,
        q_heads: 1,
        kv_heads: 1,
        q_len: dims.q_len,
        kv_len: dims.kv_len,
        head_dim: dims.head_dim,
        value_dim: dims.value_dim,
        q: &q,
        k: &k,
        v: &v,
        ..Case::default()
    };
    let options = [
        (Attention::full(), case),
        (Attention::causal(), Case { causal: true, ..case }),
        // No key of the last passes, and none of the first.
        (Attention::causal().align(Align::TopLeft), Case { causal: true, align: reference::Align::TopLeft, ..case }),
        (Attention::causal().window(Some(99), None), Case { causal: true, window_left: Some(99), ..case }),
        (Attention::full().kv_lens([50_001]), Case { kv_lens: Some(&[50_001]), ..case }),
    ];
    for engine in engines() {
        for (options, case) in &options {
            check(engine, options, false, case);
        }
        check(engine, &options[0].0, true, &options[0].1);
    }
}

/// What would have to be resumed from an output that is rounded is refused, on devices that take several passes.
#[test]
fn many_keys_into_few_bits() {
    for engine in engines() {
        let k = engine.alloc(DType::F16, [1, 1, LONG, 4]).unwrap();
        let q = engine.alloc(DType::F16, [1, 1, 1, 4]).unwrap();
        let software = engine.facts().device_type == wgpu::DeviceType::Cpu;
        let refused = engine.attention(&q, &k, &k, &Attention::full());
        assert_eq!(refused.is_err(), software, "{:?}", refused.err());
        engine.attention(&q, &k, &k, &Attention::full().output_dtype(DType::F32)).unwrap();
    }
}
