//! Devices come and go: engines on a caller's device, results read from another thread, and a lost device that gives errors, never a hang
//! or a panic.

use std::sync::mpsc;
use std::time::Duration;

use tilewise::{
    AdapterChoice, Attention, Engine, EngineOptions, Error, GpuError, LimitsChoice, Plan, Tuning, TuningChoice, wgpu,
};

use super::support::{Setup, engines, one_head, open, with_default_limits, with_limits};

/// Runs something that might hang, and fails if it does.
fn within_a_minute<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(Duration::from_secs(60)).expect("it ends within a minute, without a panic")
}

#[test]
fn k4_read_from_a_worker_thread() {
    for engine in engines() {
        let x = engine.upload(&[0.5f32; 64], [1, 1, 8, 8]).unwrap();
        let out = engine.attention(&x, &x, &x, &Attention::full()).unwrap();
        let o = within_a_minute(move || out.o.read()).unwrap();
        assert_eq!(o, [0.5; 64]);
    }
}

#[test]
fn k4_read_after_the_device_is_gone() {
    let limits = wgpu::Limits::default();
    for engine in [open(LimitsChoice::Default), with_limits(limits)].into_iter().flatten() {
        let x = engine.upload(&[0.5f32; 64], [1, 1, 8, 8]).unwrap();
        let out = engine.attention(&x, &x, &x, &Attention::full()).unwrap();
        engine.device().destroy();
        let again = engine.clone();
        let (read, attention, upload, wait) = within_a_minute(move || {
            let attention = again.attention(&x, &x, &x, &Attention::full()).map(|_| ());
            let upload = again.upload(&[1.0f32], [1]).map(|_| ());
            (out.o.read().map(|_| ()), attention, upload, again.wait())
        });
        for (what, result) in [("read", &read), ("attention", &attention), ("upload", &upload)] {
            assert!(matches!(result, Err(Error::Gpu(_))), "{what}: {result:?}");
        }
        // Nothing left to wait for is as good as an error.
        assert!(matches!(wait, Ok(()) | Err(Error::Gpu(_))), "{wait:?}");
        // A new engine works.
        let Some(engine) = open(LimitsChoice::Default) else { return };
        let setup = Setup::new(one_head(3, 5, 4, 4), None);
        let data = setup.data();
        setup.check_on(&engine, &data, &setup.reference(&data));
    }
}

/// `read_async` is awaited while somebody else polls, as a browser does.
#[test]
fn read_async() {
    for engine in engines() {
        let x = engine.upload(&[0.25f32; 16], [1, 1, 4, 4]).unwrap();
        let out = engine.attention(&x, &x, &x, &Attention::full()).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    engine.device().poll(wgpu::PollType::Poll).unwrap();
                    std::thread::yield_now();
                }
            });
            let o = pollster::block_on(out.o.read_async());
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(o.unwrap(), [0.25; 16]);
        });
    }
}

/// The caller's own limits and features are what planning goes by; two engines may share a device.
#[test]
fn on_a_device_of_the_callers() {
    let limits = wgpu::Limits { max_compute_invocations_per_workgroup: 128, ..wgpu::Limits::default() };
    let Some(engine) = with_limits(limits) else { return };
    assert_eq!(engine.facts().limits.max_compute_invocations_per_workgroup, 128);
    assert!(engine.facts().features.is_empty());
    let twin = Engine::with_device(engine.device().clone(), engine.queue().clone());
    let setup = Setup::new(one_head(40, 70, 20, 20), None);
    let data = setup.data();
    for engine in [&engine, &twin] {
        setup.check_on(engine, &data, &setup.reference(&data));
    }
}

#[test]
fn i3_default_limits_are_what_they_say() {
    let Some(engine) = with_default_limits() else { return };
    let facts = engine.facts();
    assert!(facts.features.is_empty(), "{:?}", facts.features);
    let limits = &facts.limits;
    assert_eq!(limits.max_compute_workgroup_storage_size, 16_384);
    assert_eq!(limits.max_compute_invocations_per_workgroup, 256);
    assert_eq!(limits.max_storage_buffers_per_shader_stage, 8);
    assert_eq!(limits.max_storage_buffer_binding_size, 134_217_728);
}

#[test]
fn adapters_are_chosen_by_name_and_number() {
    let Some(engine) = with_default_limits() else { return };
    let name = engine.adapter_info().name.clone();
    let open =
        |adapter| Engine::open(&EngineOptions { adapter, limits: LimitsChoice::Default, ..EngineOptions::default() });
    assert_eq!(open(AdapterChoice::Named(name.to_uppercase())).unwrap().adapter_info().name, name);
    assert!(open(AdapterChoice::Index(0)).is_ok());
    for choice in [AdapterChoice::Index(1000), AdapterChoice::Named("no such adapter".to_owned())] {
        match open(choice.clone()) {
            Err(Error::Gpu(GpuError::NoAdapter(text))) => assert!(text.contains(&name), "{text}"),
            other => panic!("{choice:?}: {other:?}"),
        }
    }
}

/// A software device is never taken for hardware.
#[test]
fn k6_hardware_is_hardware() {
    if with_default_limits().is_none() {
        return;
    }
    let options = EngineOptions { adapter: AdapterChoice::Hardware, ..EngineOptions::default() };
    match Engine::open(&options) {
        Ok(engine) => assert_ne!(engine.adapter_info().device_type, wgpu::DeviceType::Cpu),
        Err(error) => assert!(matches!(error, Error::Gpu(GpuError::NoAdapter(_))), "{error}"),
    }
}

/// Choices come from a file that was asked for, which must be one, and only where it knows the device.
#[test]
fn tuning_files() {
    let Some(engine) = open(LimitsChoice::Adapter) else { return };
    let device = engine.describe_adapter();
    let problem = Setup::new(one_head(300, 300, 64, 64), None).problem();
    let candidates = Plan::candidates(&problem, &engine.facts()).unwrap();
    let last = candidates.last().unwrap();
    let mut tuning = Tuning::default();
    tuning.choose(&device, last, "").unwrap();
    let path = std::env::temp_dir().join(format!("tilewise-tuning-{}.txt", std::process::id()));
    std::fs::write(&path, tuning.to_string()).unwrap();
    let tile_by = |tuning| {
        let options = EngineOptions { tuning, ..EngineOptions::default() };
        Engine::open(&options).map(|engine| engine.plan(&problem).unwrap().tile())
    };
    assert_eq!(tile_by(TuningChoice::File(path.clone())), Ok(last.tile()));
    assert_eq!(tile_by(TuningChoice::None), Ok(candidates[0].tile()));
    std::fs::write(&path, tuning.to_string().replace(&device, "another")).unwrap();
    assert_eq!(tile_by(TuningChoice::File(path.clone())), Ok(candidates[0].tile()));
    std::fs::write(&path, "{}").unwrap();
    let error = tile_by(TuningChoice::File(path.clone())).unwrap_err().to_string();
    assert!(error.contains("not a tuning file") && error.contains("tilewise-tuning-"), "{error}");
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(tile_by(TuningChoice::File(path)), Err(Error::Invalid(_))));

    // What was chosen computes the same.
    let setup = Setup::new(one_head(300, 300, 64, 64), None);
    let data = setup.data();
    let engine = engine.with_tuning(&tuning);
    assert_eq!(engine.plan(&problem).unwrap().tile(), last.tile());
    setup.check_on(&engine, &data, &setup.reference(&data));
}
