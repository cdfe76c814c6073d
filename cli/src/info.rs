//! `tilewise info`: what this machine has, and what it gets.

use anyhow::Result;
use serde::Serialize;
use tilewise::{Attention, Dims, Engine, Path, Plan, Problem};

use crate::args::Common;
use crate::measure::bytes;
use crate::output;
use crate::plan::explain;

/// The widths of a head that models have.
const HEAD_DIMS: [usize; 5] = [64, 80, 128, 256, 512];

#[derive(Debug, Serialize)]
struct Adapter {
    index: usize,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    backend: String,
    driver: String,
    driver_info: String,
}

#[derive(Debug, Serialize)]
struct Report {
    adapters: Vec<Adapter>,
    /// The name of the one that was opened.
    adapter: String,
    driver: String,
    limits: Limits,
    /// Optional features that it was opened with.
    features: Vec<String>,
    /// Choices of variants that were measured on it.
    tuned_calls: usize,
    kernels: Vec<Kernel>,
}

/// The limits that planning looks at.
#[derive(Debug, Serialize)]
struct Limits {
    workgroup_storage_bytes: u32,
    workgroup_invocations: u32,
    workgroup_size_x: u32,
    workgroup_size_y: u32,
    workgroups_per_dimension: u32,
    storage_buffers: u32,
    binding_bytes: u64,
    buffer_bytes: u64,
    offset_alignment_bytes: u32,
}

/// What a common head gets.
#[derive(Debug, Serialize)]
struct Kernel {
    head_dim: usize,
    kernels: Vec<String>,
    explain: String,
}

pub(crate) fn run(common: &Common) -> Result<()> {
    let engine = common.engine()?;
    let report = Report::new(&engine)?;
    if common.json { output::print_json(&report) } else { output::print(&report.text()) }
}

fn kind(kind: wgpu::DeviceType) -> &'static str {
    match kind {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "CPU",
        wgpu::DeviceType::Other => "other",
    }
}

impl Report {
    fn new(engine: &Engine) -> Result<Self> {
        let adapters = Engine::adapters().into_iter().enumerate().map(|(index, adapter)| {
            let info = adapter.get_info();
            Adapter {
                index,
                kind: kind(info.device_type),
                backend: format!("{:?}", info.backend),
                name: info.name,
                driver: info.driver,
                driver_info: info.driver_info,
            }
        });
        let facts = engine.facts();
        let limits = &facts.limits;
        let kernels = HEAD_DIMS.into_iter().map(|head_dim| {
            let problem = Problem::new(Dims::square(1, 1, 1024, head_dim), Attention::causal())?;
            // A device too small for a head says so in the row.
            let (kernels, explain) = match Plan::new(&problem, &facts, Path::Auto) {
                Ok(plan) => (plan.kernels(), explain(&plan, Path::Auto)),
                Err(error) => (Vec::new(), output::error_text(&error.into())),
            };
            Ok(Kernel { head_dim, kernels, explain })
        });
        let info = engine.adapter_info();
        Ok(Self {
            adapters: adapters.collect(),
            adapter: info.name.clone(),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
            limits: Limits {
                workgroup_storage_bytes: limits.max_compute_workgroup_storage_size,
                workgroup_invocations: limits.max_compute_invocations_per_workgroup,
                workgroup_size_x: limits.max_compute_workgroup_size_x,
                workgroup_size_y: limits.max_compute_workgroup_size_y,
                workgroups_per_dimension: limits.max_compute_workgroups_per_dimension,
                storage_buffers: limits.max_storage_buffers_per_shader_stage,
                binding_bytes: limits.max_storage_buffer_binding_size,
                buffer_bytes: limits.max_buffer_size,
                offset_alignment_bytes: limits.min_storage_buffer_offset_alignment,
            },
            features: facts.features.iter_names().map(|(name, _)| name.to_string()).collect(),
            tuned_calls: facts.choices.len(),
            kernels: kernels.collect::<Result<_>>()?,
        })
    }

    fn text(&self) -> String {
        let mut adapters = output::table(["", "adapter", "type", "backend", "driver"]);
        for adapter in &self.adapters {
            let Adapter { index, name, kind, backend, driver, driver_info } = adapter;
            adapters.add_row([&index.to_string(), name, *kind, backend, format!("{driver} {driver_info}").trim()]);
        }
        let Limits { workgroup_size_x, workgroup_size_y, .. } = self.limits;
        let mut limits = output::table(["limit", ""]);
        for (name, value) in [
            ("memory of a workgroup", bytes(self.limits.workgroup_storage_bytes.into())),
            ("invocations in a workgroup", self.limits.workgroup_invocations.to_string()),
            ("size of a workgroup, x and y", format!("{workgroup_size_x}, {workgroup_size_y}")),
            ("workgroups a dimension", self.limits.workgroups_per_dimension.to_string()),
            ("storage buffers a kernel", self.limits.storage_buffers.to_string()),
            ("one binding", bytes(self.limits.binding_bytes)),
            ("one buffer", bytes(self.limits.buffer_bytes)),
            ("alignment of a binding", bytes(self.limits.offset_alignment_bytes.into())),
        ] {
            limits.add_row([name, &value]);
        }
        let features = if self.features.is_empty() { "none".to_string() } else { self.features.join(", ") };
        let tuned = match self.tuned_calls {
            0 => "Tuned: no; `tilewise tune` measures which variants are the fastest".to_string(),
            calls => format!("Tuned: kinds of calls that were measured: {calls}"),
        };
        let mut text = format!(
            "{adapters}\n\nOpened: {} ({})\nOptional features in use: {features}\n{tuned}\n\n{limits}\n",
            self.adapter, self.driver
        );
        for Kernel { head_dim, explain, .. } in &self.kernels {
            text += &format!("\nhead_dim {head_dim}\n");
            for line in explain.lines() {
                text += &format!("  {line}\n");
            }
        }
        text
    }
}
