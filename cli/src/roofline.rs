//! What this machine can do at best: its rate of fused multiply-adds and its copy bandwidth, measured with WGSL that does
//! nothing else. Every other figure is given as a share of these.

use anyhow::{Result, ensure};
use serde::Serialize;
use tilewise::{DType, Engine, Tensor};

use crate::measure::{Elapsed, Progress, Stopwatch, caught, is_software};

/// The machine's best.
#[derive(Debug, Serialize)]
pub(crate) struct Roofline {
    /// Billions of f32 operations a second of the best loop shape, a fused multiply-add counting as two.
    pub(crate) fma_gflops: f64,
    /// The same by CPU time, on software devices.
    pub(crate) cpu_fma_gflops: Option<f64>,
    /// That shape, in words.
    pub(crate) fma_shape: String,
    /// All shapes that were tried.
    fma_shapes: Vec<FmaRate>,
    /// Billions of bytes a second, read and written, of the best way to copy.
    pub(crate) copy_gbps: f64,
    /// That way.
    pub(crate) copy_method: &'static str,
    /// All ways that were tried.
    copies: Vec<CopyRate>,
}

#[derive(Debug, Clone, Serialize)]
struct FmaRate {
    accumulators: usize,
    unroll: usize,
    gflops: f64,
    cpu_gflops: Option<f64>,
}

#[derive(Debug, Serialize)]
struct CopyRate {
    method: &'static str,
    gbps: f64,
}

/// vec4 accumulators of an invocation, and how often the loop is unrolled. No shape is the best everywhere: few accumulators
/// wait for the last result, many spill, and a loop that is too long leaves the instruction cache.
const ACCUMULATORS: [usize; 4] = [2, 4, 8, 16];
const UNROLLS: [usize; 3] = [1, 4, 16];

/// How long one timed run should take: long against a submission's overhead, short against watchdogs.
const TARGET_SECONDS: f64 = 0.1;
const ENOUGH_SECONDS: f64 = 0.05;
const RUNS: usize = 3;

impl Roofline {
    pub(crate) fn measure(engine: &Engine, progress: &Progress) -> Result<Self> {
        progress.stage("measuring this machine's multiply-add rate");
        let mut shapes = Vec::new();
        let mut size = FmaSize::SMALLEST;
        for accumulators in ACCUMULATORS {
            for unroll in UNROLLS {
                shapes.push(fma_rate(engine, accumulators, unroll, &mut size)?);
                progress.done(shapes.len() as f64 / (ACCUMULATORS.len() * UNROLLS.len()) as f64);
            }
        }
        let fma_gflops = shapes.iter().map(|shape| shape.gflops).fold(0.0, f64::max);
        // Where there are two clocks, the steadier one names the shape.
        let best = best(&shapes, |shape| shape.cpu_gflops.unwrap_or(shape.gflops));
        let cpu_fma_gflops = shapes.iter().filter_map(|shape| shape.cpu_gflops).reduce(f64::max);
        progress.stage("measuring this machine's copy bandwidth");
        let copies = copy_rates(engine)?;
        let fastest = self::best(&copies, |copy| copy.gbps);
        Ok(Self {
            fma_gflops,
            cpu_fma_gflops,
            fma_shape: format!("{} vec4 accumulators, unrolled {}", best.accumulators, best.unroll),
            copy_gbps: fastest.gbps,
            copy_method: fastest.method,
            fma_shapes: shapes.clone(),
            copies,
        })
    }
}

fn best<T>(candidates: &[T], rate: impl Fn(&T) -> f64) -> &T {
    // Both lists are made of constants above and are never empty.
    candidates.iter().fold(&candidates[0], |best, next| if rate(next) > rate(best) { next } else { best })
}

/// The text of a shape: see the header of `fma_loop.wgsl`.
fn fma_text(accumulators: usize, unroll: usize) -> String {
    let mut text = String::new();
    for line in include_str!("../shaders/fma_loop.wgsl").lines() {
        let times = if line.ends_with("// @step") {
            unroll
        } else if line.ends_with("// @each") {
            1
        } else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        for _ in 0..times {
            for n in 0..accumulators {
                text.push_str(&line.replace("acc0", &format!("acc{n}")).replace(" 0.0;", &format!(" {n}.0;")));
                text.push('\n');
            }
        }
    }
    text
}

/// How much one dispatch does.
#[derive(Debug, Clone, Copy)]
struct FmaSize {
    workgroups: u32,
    /// Multiply-adds of an accumulator.
    steps: u32,
}

impl FmaSize {
    const SMALLEST: Self = Self { workgroups: 64, steps: 4096 };
    const INVOCATIONS: usize = 64;
    /// WebGPU's smallest limit of workgroups.
    const MOST_WORKGROUPS: u32 = 65535;
    /// The sum of 64 counters stays exact in f32.
    const MOST_STEPS: u32 = 65536;

    /// More work of the same kind: more workgroups while there may be, then longer loops.
    fn times(self, factor: f64) -> Self {
        let scale = |size: u32, most: u32, factor: f64| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to a u32")]
            let scaled = (f64::from(size) * factor).clamp(1.0, most.into()) as u32;
            scaled
        };
        let workgroups = scale(self.workgroups, Self::MOST_WORKGROUPS, factor);
        let left = factor * f64::from(self.workgroups) / f64::from(workgroups);
        // The loop's steps are a multiple of every unroll.
        let steps = scale(self.steps, Self::MOST_STEPS, left.max(1.0)).next_multiple_of(16);
        Self { workgroups, steps }
    }

    fn is_largest(self) -> bool {
        self.workgroups >= Self::MOST_WORKGROUPS && self.steps >= Self::MOST_STEPS
    }

    fn invocations(self) -> usize {
        self.workgroups as usize * Self::INVOCATIONS
    }
}

/// The rate of one shape. `size` is where the last shape got to, a good guess for the next.
fn fma_rate(engine: &Engine, accumulators: usize, unroll: usize, size: &mut FmaSize) -> Result<FmaRate> {
    let pipeline = pipeline(engine, "fma_loop", &fma_text(accumulators, unroll))?;
    let mut out = engine.alloc(DType::F32, [size.invocations()])?;
    fma_run(engine, &pipeline, &out, *size, unroll)?; // compiles
    let mut elapsed = fma_run(engine, &pipeline, &out, *size, unroll)?;
    while elapsed.seconds < ENOUGH_SECONDS && !size.is_largest() {
        *size = size.times((TARGET_SECONDS / elapsed.seconds.max(1e-6)).clamp(1.5, 16.0));
        out = engine.alloc(DType::F32, [size.invocations()])?;
        elapsed = fma_run(engine, &pipeline, &out, *size, unroll)?;
    }
    let runs: Vec<_> = (0..RUNS).map(|_| fma_run(engine, &pipeline, &out, *size, unroll)).collect::<Result<_>>()?;
    check_counters(&out, accumulators, *size)?;
    let elapsed = Elapsed::median(&runs);
    let gflop = 8.0 * accumulators as f64 * f64::from(size.steps) * size.invocations() as f64 / 1e9;
    Ok(FmaRate {
        accumulators,
        unroll,
        gflops: gflop / elapsed.seconds,
        cpu_gflops: elapsed.cpu_seconds.map(|seconds| gflop / seconds),
    })
}

fn fma_run(
    engine: &Engine,
    pipeline: &wgpu::ComputePipeline,
    out: &Tensor,
    size: FmaSize,
    unroll: usize,
) -> Result<Elapsed> {
    let device = engine.device();
    let rounds = size.steps / u32::try_from(unroll)?;
    let params: Vec<u8> = [1f32.to_bits(), 1f32.to_bits(), rounds, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    let commands = caught(device, || {
        let uniform = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("fma_loop.params"),
            size: params.len() as u64,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        engine.queue().write_buffer(&uniform, 0, &params);
        let bindings = bind(device, pipeline, &[&uniform, out.raw_buffer()]);
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &bindings, &[]);
        pass.dispatch_workgroups(size.workgroups, 1, 1);
        drop(pass);
        encoder.finish()
    })?;
    submit(engine, commands)
}

/// Whether every accumulator of every invocation has counted to the end.
fn check_counters(out: &Tensor, accumulators: usize, size: FmaSize) -> Result<()> {
    let sum = |lane: usize| -> f64 {
        let starts = (0..accumulators).flat_map(|n| (0..4).map(move |component| n + component + lane));
        starts.map(|start| start as f64 + f64::from(size.steps)).sum()
    };
    let expected: Vec<f64> = (0..FmaSize::INVOCATIONS).map(sum).collect();
    for (index, &got) in out.read()?.iter().enumerate() {
        let expected = expected[index % FmaSize::INVOCATIONS];
        ensure!(
            f64::from(got) == expected,
            "the multiply-add loop gave {got} instead of {expected} at invocation {index}: its rate means nothing"
        );
    }
    Ok(())
}

/// The two ways to copy, on buffers too large for most caches.
fn copy_rates(engine: &Engine) -> Result<Vec<CopyRate>> {
    const WORKGROUP: u64 = 256;
    let limits = engine.device().limits();
    let elems = usize::try_from(limits.max_storage_buffer_binding_size.min(128 << 20) / 16)? * 4;
    let pattern: Vec<f32> = (0..elems).map(|n| (n % 8191) as f32).collect();
    let src = engine.upload(&pattern, [elems])?;
    let dst = engine.alloc(DType::F32, [elems])?;
    let bytes = 4 * elems as u64;

    let pipeline = pipeline(engine, "copy", include_str!("../shaders/copy.wgsl"))?;
    let bindings = caught(engine.device(), || bind(engine.device(), &pipeline, &[src.raw_buffer(), dst.raw_buffer()]))?;
    let workgroups = u32::try_from((bytes / 16).div_ceil(WORKGROUP))?;
    let by_kernel = |encoder: &mut wgpu::CommandEncoder| {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &bindings, &[]);
        pass.dispatch_workgroups(workgroups, 1, 1);
    };
    let by_command = |encoder: &mut wgpu::CommandEncoder| {
        encoder.copy_buffer_to_buffer(src.raw_buffer(), 0, dst.raw_buffer(), 0, bytes);
    };
    let rate = |method, copy: &dyn Fn(&mut wgpu::CommandEncoder)| -> Result<CopyRate> {
        copies(engine, 1, |encoder| encoder.clear_buffer(dst.raw_buffer(), 0, None))?;
        copies(engine, 1, copy)?; // compiles, and touches every page
        check_copy(&dst, &pattern, method)?;
        let mut times = 1;
        let mut elapsed = copies(engine, times, copy)?;
        while elapsed.seconds < ENOUGH_SECONDS && times < 4096 {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 16")]
            let factor = (TARGET_SECONDS / elapsed.seconds.max(1e-6)).clamp(2.0, 16.0) as u64;
            times *= factor;
            elapsed = copies(engine, times, copy)?;
        }
        let runs: Vec<_> = (0..RUNS).map(|_| copies(engine, times, copy)).collect::<Result<_>>()?;
        let seconds = Elapsed::median(&runs).seconds;
        Ok(CopyRate { method, gbps: 2.0 * (bytes * times) as f64 / seconds / 1e9 })
    };
    Ok(vec![rate("kernel", &by_kernel)?, rate("copy_buffer_to_buffer", &by_command)?])
}

fn copies(engine: &Engine, times: u64, copy: impl Fn(&mut wgpu::CommandEncoder)) -> Result<Elapsed> {
    let commands = caught(engine.device(), || {
        let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        (0..times).for_each(|_| copy(&mut encoder));
        encoder.finish()
    })?;
    submit(engine, commands)
}

/// Whether the copy arrived: its beginning, middle and end.
fn check_copy(dst: &Tensor, pattern: &[f32], method: &str) -> Result<()> {
    let window = pattern.len().min(1 << 14);
    for start in [0, (pattern.len() - window) / 2, pattern.len() - window] {
        let range = start..start + window;
        ensure!(
            dst.slice(0, range.clone())?.read()? == pattern[range.clone()],
            "copying by {method} left other bytes in elements {range:?}: its rate means nothing"
        );
    }
    Ok(())
}

fn pipeline(engine: &Engine, label: &str, text: &str) -> Result<wgpu::ComputePipeline> {
    let device = engine.device();
    caught(device, || {
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(label),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(label),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        })
    })
}

fn bind(device: &wgpu::Device, pipeline: &wgpu::ComputePipeline, buffers: &[&wgpu::Buffer]) -> wgpu::BindGroup {
    let entries: Vec<_> = (0..)
        .zip(buffers)
        .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
        .collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &entries,
    })
}

/// Submits, waits to the end, and tells what that took.
fn submit(engine: &Engine, commands: wgpu::CommandBuffer) -> Result<Elapsed> {
    let watch = Stopwatch::start(is_software(engine));
    caught(engine.device(), || engine.queue().submit([commands]))?;
    engine.wait()?;
    Ok(watch.stop())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_the_lines_that_they_say() {
        let text = fma_text(4, 16);
        assert_eq!(text.matches("= fma(").count(), 64);
        assert!(text.contains("acc3 = start + 3.0;"), "{text}");
        assert!(!fma_text(1, 1).contains("acc1"));
    }

    #[test]
    fn sizes_grow_to_their_limits() {
        let mut size = FmaSize::SMALLEST;
        while !size.is_largest() {
            size = size.times(16.0);
            assert_eq!(size.steps % 16, 0);
        }
        assert_eq!((size.workgroups, size.steps), (65535, 65536));
    }
}
