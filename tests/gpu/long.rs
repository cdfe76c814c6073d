//! Inputs so long that a software device gets them in several passes: llvmpipe ends the loops of an invocation after 65535 iterations in
//! all, without a word.

use tilewise::reference::{self, Case, Precision};
use tilewise::{
    Align, Attention, DType, DeviceFacts, Engine, Error, Inputs, MaskMod, Path, Plan, Problem, ScoreMod, Storage, wgpu,
};

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

/// What would have to be resumed from an output that is rounded is refused, on devices that take several passes with every kernel they have.
#[test]
fn many_keys_into_few_bits() {
    for engine in engines() {
        let k = engine.alloc(DType::F16, [1, 1, LONG, 4]).unwrap();
        let q = engine.alloc(DType::F16, [1, 1, 1, 4]).unwrap();
        let facts = engine.facts();
        let software = facts.device_type == wgpu::DeviceType::Cpu;
        let subgroups = facts.features.contains(wgpu::Features::SUBGROUP) && facts.min_subgroup_size >= 4;
        let refused = engine.attention(&q, &k, &k, &Attention::full());
        assert_eq!(refused.is_err(), software && !subgroups, "{:?}", refused.err());
        // Of the kernels' bounds the widest is told, and what has none.
        let more = engine.alloc(DType::F16, [1, 1, 20 * LONG, 4]).unwrap();
        if let Err(Error::Unsupported { what, available, .. }) = engine.attention(&q, &more, &more, &Attention::full())
        {
            assert!(what.ends_with("of an output in f16; f32 has no such bound"), "{what}");
            assert_eq!(available > LONG as u64, subgroups, "{available}");
        } else {
            assert!(!software);
        }
        engine.attention(&q, &k, &k, &Attention::full().output_dtype(DType::F32)).unwrap();
    }
}

/// What one of the tiles does in one pass is done by it, whatever the others would need.
#[test]
fn as_many_keys_into_few_bits_as_into_many() {
    let facts = DeviceFacts { device_type: wgpu::DeviceType::Cpu, ..DeviceFacts::default() };
    let passes = |plan: &Plan| plan.explain().contains("passes");
    let mut bound = 0;
    for kv_len in (1000..30_000).step_by(500) {
        let problem = |q_len| Problem::new(one_head(q_len, kv_len, 64, 64), Attention::full()).unwrap();
        let f16 = problem(4).storage(Storage { o: DType::F16, ..Storage::default() }).unwrap();
        // As many queries as it takes for all tiles to be among the candidates: passes don't depend on them.
        let one_pass = Plan::candidates(&problem(2048), &facts).unwrap().iter().any(|plan| !passes(plan));
        assert_eq!(Plan::new(&f16, &facts, Path::Auto).is_ok(), one_pass, "{kv_len}");
        bound = if one_pass { kv_len } else { bound };
    }
    assert!((5000..25_000).contains(&bound), "{bound}");
}

/// Scores so large, or so low, that the logarithm of a sum is lost beside them: what passes between passes is more than lse.
#[test]
fn passes_at_large_scores() {
    for engine in engines() {
        let q = engine.upload(&[0.0f32], [1, 1, 1, 1]).unwrap();
        let k = engine.upload(&vec![0.0f32; LONG], [1, 1, LONG, 1]).unwrap();
        // Half of the keys, the first, have a value of 1.
        let v: Vec<f32> = (0..LONG).map(|key| if key < LONG / 2 { 1.0 } else { 0.0 }).collect();
        let v = engine.upload(&v, [1, 1, LONG, 1]).unwrap();
        for bias in [0.0, 1e5, -1e6, 1e9, f32::MIN] {
            let bias_gpu = engine.upload(&[bias], [1; 4]).unwrap();
            let inputs = Inputs { bias: Some(&bias_gpu), ..Inputs::new(&q, &k, &v) };
            let o = engine.attention_with(&inputs, &Attention::full()).unwrap().o.read().unwrap();
            assert_close(&o, &[0.5], 1e-5, &format!("{bias}"));
        }
    }
}

/// A mod's own loops count too.
#[test]
fn mods_that_loop() {
    let score_mod = "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
        var s = score;
        for (var i = 0u; i < 64u; i++) { s += data_f32(i); }
        return s;
    }";
    let mask_mod = "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
        var bits = 0u;
        for (var i = 0u; i < 64u; i++) { bits += data_u32(i) & 1u; }
        return bits == 0u || kv_idx == 0u;
    }";
    let options = [
        Attention::full().score_mod(ScoreMod::new(score_mod).unwrap()),
        Attention::full().mask_mod(MaskMod::new(mask_mod).unwrap()),
    ];
    for engine in engines() {
        let x = |len: usize| engine.upload(&vec![0.0f32; 4 * len], [1, 1, len, 4]).unwrap();
        let sixty_fourths = engine.upload(&[1.0f32 / 64.0; 64], [64]).unwrap();
        for (options, more) in options.iter().zip([1.0, 0.0]) {
            for len in [1000_usize, 4096] {
                let (q, kv) = (x(2), x(len));
                let inputs = Inputs { mod_data: Some(&sixty_fourths), ..Inputs::new(&q, &kv, &kv) };
                let lse = engine.attention_with(&inputs, options).unwrap().lse.read().unwrap();
                assert_close(&lse, &[(len as f64).ln() + more; 2], 2e-5, &format!("{len}"));
            }
        }
    }
}
