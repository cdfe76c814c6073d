//! Device memory: what the engine counts is what the allocator has, tiled attention takes none beside its tensors, naive takes the score
//! matrices, and nothing grows or stays.
//!
//! Each test counts on a device of its own.

use tilewise::{Align, AttentionOutput, Bindings, Dims, Engine, Inputs, LimitsChoice, Path, Purpose, wgpu};

use super::support::{Setup, Tensors, one_head, open};

fn upload(engine: &Engine, setup: &Setup) -> Tensors {
    let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = setup.dims;
    let data = setup.data();
    Tensors {
        q: engine.upload(&data.q, [batch, q_heads, q_len, head_dim]).unwrap(),
        k: engine.upload(&data.k, [batch, kv_heads, kv_len, head_dim]).unwrap(),
        v: engine.upload(&data.v, [batch, kv_heads, kv_len, value_dim]).unwrap(),
    }
}

fn attention(engine: &Engine, inputs: &Tensors, setup: &Setup, path: Path) -> AttentionOutput {
    engine.attention_by(path, &Inputs::new(&inputs.q, &inputs.k, &inputs.v), &setup.options()).unwrap()
}

/// Bytes of the engine's buffers as wgpu's allocator has them, once no work is under way.
fn allocated(engine: &Engine) -> Option<u64> {
    engine.wait().unwrap();
    engine.trim();
    let report = engine.allocator_report()?;
    Some(report.allocations.iter().filter(|it| it.name.starts_with("tilewise")).map(|it| it.size).sum())
}

#[test]
fn everything_is_given_back() {
    let Some(engine) = open(LimitsChoice::Adapter) else { return };
    let setup = Setup::new(Dims::square(1, 2, 100, 20), Some(Align::BottomRight));
    assert_eq!(engine.memory().live_bytes(), 0);
    let inputs = upload(&engine, &setup);
    let base = engine.memory().live_bytes();
    assert_eq!(base, setup.problem().input_bytes());
    assert_eq!(base, engine.memory().live_bytes_for(Purpose::Input));
    let base_allocated = allocated(&engine);
    for path in [Path::Auto, Path::Naive] {
        let output = attention(&engine, &inputs, &setup, path);
        output.o.read().unwrap();
        engine.trim();
        let live = engine.memory().live_bytes();
        assert_eq!(live, base + setup.problem().output_bytes(), "outputs alone, {path:?}");
        drop(output);
        assert_eq!(engine.memory().live_bytes(), base, "{path:?}");
        assert_eq!(allocated(&engine), base_allocated, "{path:?}");
    }
    // Views and clones share; the last one frees.
    let view = inputs.q.slice(2, 0..3).unwrap();
    drop(inputs);
    assert_eq!(engine.memory().live_bytes(), 4 * setup.dims.q_elems() as u64);
    drop(view);
    assert_eq!(engine.memory().live_bytes(), 0);
    assert!(allocated(&engine).is_none_or(|bytes| bytes == 0));
}

#[test]
fn l5_the_ledger_is_what_the_allocator_has() {
    let Some(engine) = open(LimitsChoice::Adapter) else { return };
    let setup = Setup::new(Dims { batch: 2, q_heads: 3, ..one_head(70, 90, 20, 33) }, None);
    let inputs = upload(&engine, &setup);
    let outputs = [Path::Auto, Path::Naive].map(|path| attention(&engine, &inputs, &setup, path));
    let odd = engine.upload(&[1.0f32; 3], [3]).unwrap();
    engine.trim();
    let counted = engine.memory().live_bytes();
    if let Some(allocated) = allocated(&engine) {
        // Drivers round each buffer up to their alignment, at most a few hundred bytes.
        let buffers = 8;
        let fits = (counted..=counted + buffers * 512).contains(&allocated);
        assert!(fits, "{counted} counted, {allocated} allocated: {:?}", engine.allocator_report());
    }
    drop((outputs, odd));
}

/// B = 1, H = 2, S = 1024, D = 64: 8,388,608 bytes of scores.
#[test]
fn l5_peak_of_tiled_and_of_naive() {
    let Some(engine) = open(LimitsChoice::Adapter) else { return };
    let setup = Setup::new(Dims::square(1, 2, 1024, 64), None);
    let problem = setup.problem();
    let inputs = upload(&engine, &setup);
    let tensors = problem.input_bytes() + problem.output_bytes();
    let peak = |path| {
        engine.reset_peak();
        let output = attention(&engine, &inputs, &setup, path);
        engine.wait().unwrap();
        drop(output);
        (engine.memory().peak_bytes() - tensors, engine.memory().peak_bytes_for(Purpose::Workspace))
    };
    let (tiled_extra, tiled_workspace) = peak(Path::Auto);
    assert!(tiled_extra < 1024 && tiled_workspace == 0, "{tiled_extra} {tiled_workspace}");
    let (naive_extra, naive_workspace) = peak(Path::Naive);
    assert_eq!(naive_workspace, 8_388_608);
    assert!((8_388_608..8_388_608 + 2048).contains(&naive_extra), "{naive_extra}");
}

/// Twice the length: twice the bytes, none of them scores.
#[test]
fn tiled_memory_grows_linearly() {
    let Some(engine) = open(LimitsChoice::Default) else { return };
    let peaks = [128, 256, 512].map(|len| {
        let setup = Setup::new(Dims::square(1, 1, len, 16), Some(Align::BottomRight));
        let inputs = upload(&engine, &setup);
        engine.trim();
        engine.reset_peak();
        attention(&engine, &inputs, &setup, Path::Auto).o.read().unwrap();
        let memory = engine.memory();
        assert_eq!(memory.peak_bytes_for(Purpose::Workspace), 0);
        memory.peak_bytes()
    });
    let [first, second, third] = peaks;
    // Equal steps of the sum: a + b n, with the uniform in a.
    assert_eq!(third - second, 2 * (second - first), "{peaks:?}");
}

#[test]
fn k2_five_hundred_calls_and_rising_shapes() {
    let Some(engine) = open(LimitsChoice::Default) else { return };
    let setup = Setup::new(one_head(5, 9, 8, 8), None);
    let inputs = upload(&engine, &setup);
    let base = engine.memory().live_bytes();
    let base_allocated = allocated(&engine);
    for call in 0..500 {
        let _output = attention(&engine, &inputs, &setup, if call % 5 == 0 { Path::Naive } else { Path::Auto });
        let memory = engine.memory();
        let kept = memory.live_bytes_for(Purpose::Params);
        assert_eq!(memory.live_bytes() - kept, base + output_bytes(&setup), "call {call}");
        assert!(kept <= MAX_KEPT, "{kept}");
    }
    let given_back = || {
        let allocated = allocated(&engine);
        assert_eq!((engine.memory().live_bytes(), allocated), (base, base_allocated));
    };
    given_back();
    for len in 1..50 {
        let setup = Setup::new(one_head(len, 2 * len, 8, 8), None);
        attention(&engine, &upload(&engine, &setup), &setup, Path::Auto);
        assert!(engine.memory().live_bytes() - base <= MAX_KEPT);
    }
    given_back();
    // What it still does is still right.
    let data = setup.data();
    setup.check_on(&engine, &data, &setup.reference(&data));
}

/// What an engine keeps for later calls, at most.
const MAX_KEPT: u64 = 16 << 10;

/// A call that was recorded before makes no buffer; on a device whose commands have room for its parameters the first doesn't either.
#[test]
fn a_warm_call_allocates_nothing() {
    for limits in [LimitsChoice::Adapter, LimitsChoice::Default] {
        let Some(engine) = open(limits) else { return };
        let setup = Setup::new(Dims::square(1, 2, 100, 20), Some(Align::BottomRight));
        let inputs = upload(&engine, &setup);
        let plan = engine.plan(&setup.problem()).unwrap();
        engine.warm_up(&plan).unwrap();
        let output = engine.alloc_output(&plan).unwrap();
        let bindings = Bindings {
            inputs: Inputs::new(&inputs.q, &inputs.k, &inputs.v),
            o: &output.o,
            lse: &output.lse,
            workspace: None,
        };
        let record = || {
            engine.reset_peak();
            let before = engine.memory().live_bytes();
            let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            engine.plan(&setup.problem()).unwrap().record(&mut encoder, &bindings).unwrap();
            engine.queue().submit([encoder.finish()]);
            (engine.memory().peak_bytes() - before, engine.memory().live_bytes() - before)
        };
        let first = record();
        let room = engine.device().limits().max_immediate_size >= 240;
        assert_eq!(first, if room { (0, 0) } else { (240, 240) });
        for _ in 0..3 {
            assert_eq!(record(), (0, 0));
        }
    }
}

/// Bytes of o and lse as allocated: in units of 16.
fn output_bytes(setup: &Setup) -> u64 {
    let units = |elems: usize| (4 * elems as u64).next_multiple_of(16);
    units(setup.dims.o_elems()) + units(setup.dims.rows())
}

/// Engine and tensors may go in any order.
#[test]
fn tensors_outlive_their_engine() {
    let Some(engine) = open(LimitsChoice::Default) else { return };
    let setup = Setup::new(one_head(5, 9, 8, 8), None);
    let output = attention(&engine, &upload(&engine, &setup), &setup, Path::Auto);
    drop(engine);
    assert_eq!(output.o.read().unwrap().len(), 40);
}
