//! Kernels as the device sees them: a recipe, its bindings, what it needs; and pipelines, made once each.

use std::sync::{Arc, PoisonError};

use super::device::Gpu;
use super::memory::{DeviceBuffer, Purpose};
use super::tensor::Tensor;
use crate::error::{Error, GpuError, Result};
use crate::shader::Recipe;

/// How a kernel uses one of its storage buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

/// One kernel variant: everything that making and checking its pipeline takes. A test compares each field with the text.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub(crate) recipe: Recipe,
    pub(crate) workgroup_size: [u32; 3],
    /// Bytes of workgroup memory.
    pub(crate) workgroup_bytes: u32,
    /// Bytes of the uniform at binding 0, or of the immediates instead.
    pub(crate) params_bytes: u32,
    /// The storage buffers, each with the binding it has.
    pub(crate) storage: Vec<(u32, Access)>,
    pub(crate) features: wgpu::Features,
}

impl Kernel {
    pub(crate) fn invocations(&self) -> u32 {
        self.workgroup_size.iter().product()
    }

    /// Whether a device with these limits and features can run it.
    ///
    /// wgpu checks the workgroup's size itself, but not its memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the first limit that is passed.
    pub(crate) fn check(&self, limits: &wgpu::Limits, features: wgpu::Features) -> Result<()> {
        for (what, needed, available) in [
            ("bytes of workgroup memory", self.workgroup_bytes, limits.max_compute_workgroup_storage_size),
            ("invocations in a workgroup", self.invocations(), limits.max_compute_invocations_per_workgroup),
            ("invocations along x", self.workgroup_size[0], limits.max_compute_workgroup_size_x),
            ("invocations along y", self.workgroup_size[1], limits.max_compute_workgroup_size_y),
            ("storage buffers in a kernel", self.storage.len() as u32, limits.max_storage_buffers_per_shader_stage),
        ] {
            if needed > available {
                return Err(Error::unsupported(
                    format!("{what} ({})", self.recipe.label()),
                    needed.into(),
                    available.into(),
                ));
            }
        }
        let missing = self.features - features;
        if !missing.is_empty() {
            let what = format!("features {missing:?} ({})", self.recipe.label());
            return Err(Error::unsupported(what, u64::from(missing.iter().count() as u32), 0));
        }
        Ok(())
    }
}

/// Uniforms that are kept: 16 KiB of them at most. The layers of a model take the same few, token after token.
const MAX_UNIFORMS: usize = 64;

/// A compiled kernel.
#[derive(Debug)]
pub(crate) struct Pipeline {
    raw: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    /// Whether its parameters go into the commands.
    immediates: bool,
}

/// One dispatch, ready to be recorded.
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) params: &'a [u8],
    /// One tensor a storage buffer. Each is bound as the smallest window the device allows; [`Tensor::window`] tells kernels
    /// where in it they begin.
    pub(crate) tensors: &'a [Tensor],
    /// Workgroups in all. The kernel numbers them across the rectangle that they are folded into.
    pub(crate) workgroups: u64,
}

impl Gpu {
    /// The pipeline of a kernel, compiled at its first use.
    pub(crate) fn pipeline(&self, kernel: &Kernel) -> Result<Arc<Pipeline>> {
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(&kernel.recipe) {
            return Ok(Arc::clone(pipeline));
        }
        kernel.check(&self.limits, self.features)?;
        let pipeline = Arc::new(self.compile(kernel)?);
        pipelines.insert(kernel.recipe.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    /// Whether a kernel's parameters go into the commands: no buffer is made for them then.
    fn takes_immediates(&self, kernel: &Kernel) -> bool {
        self.features.contains(wgpu::Features::IMMEDIATES) && kernel.params_bytes <= self.limits.max_immediate_size
    }

    fn compile(&self, kernel: &Kernel) -> Result<Pipeline> {
        let immediates = self.takes_immediates(kernel);
        let recipe = kernel.recipe.clone();
        let source = if immediates { recipe.slot("params", "immediate") } else { recipe }.source()?;
        let label = kernel.recipe.label();
        let entry = |binding: u32, ty: wgpu::BufferBindingType| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        };
        let storage = kernel.storage.iter().map(|&(binding, access)| {
            entry(binding, wgpu::BufferBindingType::Storage { read_only: access == Access::Read })
        });
        let uniform = (!immediates).then(|| entry(0, wgpu::BufferBindingType::Uniform));
        let entries: Vec<_> = uniform.into_iter().chain(storage).collect();
        self.scoped(|| {
            let device = &self.device;
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&label),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
            let layout = device
                .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(&label), entries: &entries });
            let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(&label),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: if immediates { kernel.params_bytes } else { 0 },
            });
            let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(kernel.recipe.stem()),
                // Every kernel writes its workgroup memory before it reads it.
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: self.pipeline_cache.get(),
            });
            Pipeline { raw, layout, immediates }
        })
    }

    /// A uniform of these contents. The last ones are kept: nothing writes to them, so any number of dispatches can share one.
    fn uniform(&self, params: &[u8]) -> Result<Arc<DeviceBuffer>> {
        let mut uniforms = self.uniforms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(uniform) = uniforms.get(params) {
            return Ok(Arc::clone(uniform));
        }
        let (bytes, usage) = (params.len() as u64, wgpu::BufferUsages::UNIFORM);
        let uniform = self.create_buffer("tilewise.params", bytes, usage, Purpose::Params, Some(params))?;
        if uniforms.len() >= MAX_UNIFORMS {
            uniforms.clear();
        }
        uniforms.insert(params.to_vec(), Arc::clone(&uniform));
        Ok(uniform)
    }

    pub(crate) fn trim(&self) {
        self.uniforms.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Records a dispatch. Allocates nothing, or where `params` can't go into the commands a uniform for them, unless there is one.
    pub(crate) fn record(&self, encoder: &mut wgpu::CommandEncoder, launch: &Launch<'_>) -> Result<()> {
        let Launch { kernel, params, tensors, workgroups } = *launch;
        if workgroups == 0 {
            return Ok(());
        }
        debug_assert_eq!(params.len(), kernel.params_bytes as usize);
        debug_assert_eq!(tensors.len(), kernel.storage.len());
        let grid = self.fold(workgroups)?;
        let pipeline = self.pipeline(kernel)?;
        let uniform = if pipeline.immediates { None } else { Some(self.uniform(params)?) };
        let windows = tensors.iter().map(|tensor| tensor.window(&self.limits)).collect::<Result<Vec<_>>>()?;
        let bindings = kernel.storage.iter().zip(tensors.iter().zip(&windows));
        let storage = bindings.map(|(&(binding, _), (tensor, window))| wgpu::BindGroupEntry {
            binding,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &tensor.buffer().raw,
                offset: window.offset_bytes,
                size: core::num::NonZeroU64::new(window.bytes),
            }),
        });
        let uniform = uniform
            .iter()
            .map(|uniform| wgpu::BindGroupEntry { binding: 0, resource: uniform.raw.as_entire_binding() });
        let entries: Vec<_> = uniform.chain(storage).collect();
        let label = kernel.recipe.stem();
        self.scoped(|| {
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(label),
                layout: &pipeline.layout,
                entries: &entries,
            });
            let mut pass =
                encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some(label), timestamp_writes: None });
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, &group, &[]);
            if pipeline.immediates {
                pass.set_immediates(0, params);
            }
            pass.dispatch_workgroups(grid[0], grid[1], 1);
        })
    }

    /// A rectangle of at least `workgroups` workgroups, each side within the device's limit.
    fn fold(&self, workgroups: u64) -> Result<[u32; 2]> {
        let side = u64::from(self.limits.max_compute_workgroups_per_dimension);
        let height = workgroups.div_ceil(side);
        if height > side {
            return Err(Error::unsupported("workgroups in a dispatch", workgroups, side * side));
        }
        let width = workgroups.div_ceil(height);
        let to_u32 = |count: u64| u32::try_from(count).map_err(|error| GpuError::Internal(error.to_string()));
        Ok([to_u32(width)?, to_u32(height)?])
    }
}
