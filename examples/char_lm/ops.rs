//! The kernels of `ops.wgsl`, on the engine's tensors: what a program with its own kernels does beside the library.

use std::collections::HashMap;

use anyhow::{Context, Result};
use tilewise::wgpu::{self, util::DeviceExt};
use tilewise::{DType, Engine, Tensor};

/// `struct Params` of the WGSL.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Params {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) length: u32,
    pub(crate) head_dim: u32,
    pub(crate) factor: f32,
    pub(crate) correction_1: f32,
    pub(crate) correction_2: f32,
    pub(crate) pad: u32,
}

/// A kernel's threads.
#[derive(Debug, Clone, Copy)]
enum Each {
    Element,
    Row,
    Column,
}

const ENTRIES: [(&str, Each); 10] = [
    ("transpose", Each::Element),
    ("add", Each::Element),
    ("gelu", Each::Element),
    ("gelu_grad", Each::Element),
    ("layer_norm", Each::Row),
    ("layer_norm_grad", Each::Row),
    ("layer_norm_grad_gain", Each::Column),
    ("cross_entropy", Each::Row),
    ("cross_entropy_grad", Each::Element),
    ("adam", Each::Element),
];

#[derive(Debug)]
pub(crate) struct Ops {
    engine: Engine,
    pipelines: HashMap<&'static str, (wgpu::ComputePipeline, Each)>,
}

impl Ops {
    pub(crate) fn new(engine: &Engine) -> Self {
        let device = engine.device();
        let module = device.create_shader_module(wgpu::include_wgsl!("ops.wgsl"));
        let pipeline = |entry| {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(entry),
                layout: None,
                module: &module,
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions::default(),
                cache: None,
            })
        };
        // A thread of rope turns a pair of elements; more threads than there are pairs do nothing.
        let entries = ENTRIES.into_iter().chain([("rope", Each::Element)]);
        Self { engine: engine.clone(), pipelines: entries.map(|(name, each)| (name, (pipeline(name), each))).collect() }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// A tensor of f32, of undefined contents.
    pub(crate) fn alloc(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.engine.alloc(DType::F32, shape)?)
    }

    /// Runs a kernel on tensors at its bindings.
    pub(crate) fn run(&self, entry: &'static str, params: Params, tensors: &[(u32, &Tensor)]) -> Result<()> {
        let device = self.engine.device();
        let (pipeline, each) = self.pipelines.get(entry).context(entry)?;
        let threads = match each {
            Each::Element => params.rows * params.columns,
            Each::Row => params.rows,
            Each::Column => params.columns,
        };
        let uniform = device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some(entry),
            contents: bytemuck::bytes_of(&params),
            usage: wgpu::BufferUsages::UNIFORM,
        });
        let uniform = wgpu::BindGroupEntry { binding: 0, resource: uniform.as_entire_binding() };
        let tensors = tensors.iter().map(|&(binding, tensor)| {
            assert_eq!(tensor.offset(), 0, "{entry}: these kernels take whole tensors");
            wgpu::BindGroupEntry { binding, resource: tensor.raw_buffer().as_entire_binding() }
        });
        let bindings = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(entry),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &core::iter::once(uniform).chain(tensors).collect::<Vec<_>>(),
        });
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(entry) });
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, &bindings, &[]);
            let workgroups = threads.div_ceil(64);
            let wide = workgroups.clamp(1, 32768);
            pass.dispatch_workgroups(wide, workgroups.div_ceil(wide), 1);
        }
        self.engine.queue().submit([encoder.finish()]);
        Ok(())
    }

    /// An elementwise kernel, or another that gives a matrix of the shape of `a`.
    fn matrix(&self, entry: &'static str, params: Params, inputs: &[&Tensor]) -> Result<Tensor> {
        let out = self.alloc(inputs[0].shape())?;
        let bound: Vec<_> = (1..).zip(inputs.iter().copied()).chain([(5, &out)]).collect();
        self.run(entry, params, &bound)?;
        Ok(out)
    }

    pub(crate) fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.matrix("add", sized(a), &[a, b])
    }

    pub(crate) fn gelu(&self, x: &Tensor) -> Result<Tensor> {
        self.matrix("gelu", sized(x), &[x])
    }

    pub(crate) fn gelu_grad(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        self.matrix("gelu_grad", sized(x), &[x, grad])
    }

    pub(crate) fn transpose(&self, x: &Tensor) -> Result<Tensor> {
        let params = sized(x);
        let out = self.alloc(&[x.shape()[1], x.shape()[0]])?;
        self.run("transpose", params, &[(1, x), (5, &out)])?;
        Ok(out)
    }

    /// The gradient of W in x W, xᵀ times that of the product.
    pub(crate) fn weight_grad(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        Ok(self.engine.matmul(&self.transpose(x)?, grad)?)
    }

    /// The result, and what its gradient needs.
    pub(crate) fn layer_norm(&self, x: &Tensor, gain: &Tensor) -> Result<(Tensor, Tensor)> {
        let (out, moments) = (self.alloc(x.shape())?, self.alloc(&[x.shape()[0], 2])?);
        self.run("layer_norm", sized(x), &[(1, x), (2, gain), (5, &out), (6, &moments)])?;
        Ok((out, moments))
    }

    /// The gradients of x and of the gain.
    pub(crate) fn layer_norm_grad(
        &self,
        x: &Tensor,
        gain: &Tensor,
        moments: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let (of_x, of_gain) = (self.alloc(x.shape())?, self.alloc(gain.shape())?);
        self.run("layer_norm_grad", sized(x), &[(1, x), (2, gain), (3, grad), (4, moments), (5, &of_x)])?;
        self.run("layer_norm_grad_gain", sized(x), &[(1, x), (3, grad), (4, moments), (5, &of_gain)])?;
        Ok([of_x, of_gain])
    }

    /// Turns q and k of a fused projection by their positions; with `direction` -1 their gradients back.
    pub(crate) fn rope(&self, qkv: &Tensor, length: usize, head_dim: usize, direction: f32) -> Result<()> {
        let params = Params { length: length as u32, head_dim: head_dim as u32, factor: direction, ..sized(qkv) };
        self.run("rope", params, &[(5, qkv)])
    }

    /// The cross-entropy of each row, and its mean's gradient of the logits.
    pub(crate) fn cross_entropy(&self, logits: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        let (probabilities, lse) = self.engine.softmax_rows(logits)?;
        let losses = self.alloc(&[logits.shape()[0]])?;
        self.run("cross_entropy", sized(logits), &[(1, logits), (2, targets), (3, &lse), (5, &losses)])?;
        let params = Params { factor: 1.0 / logits.shape()[0] as f32, ..sized(logits) };
        Ok((losses, self.matrix("cross_entropy_grad", params, &[&probabilities, targets])?))
    }

    /// Step `step`, from 1 on, for a parameter and its moments.
    pub(crate) fn adam(&self, [value, first, second]: [&Tensor; 3], grad: &Tensor, rate: f32, step: i32) -> Result<()> {
        let params = Params {
            factor: rate,
            correction_1: 1.0 - 0.9f32.powi(step),
            correction_2: 1.0 - 0.99f32.powi(step),
            ..sized(value)
        };
        self.run("adam", params, &[(1, grad), (5, value), (6, first), (7, second)])
    }
}

/// For a matrix; a vector is one of one column.
fn sized(x: &Tensor) -> Params {
    let (rows, columns) = (x.shape()[0], x.shape().get(1).copied().unwrap_or(1));
    Params { rows: rows as u32, columns: columns as u32, ..Params::default() }
}
