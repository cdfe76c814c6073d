//! Opening a device, and the scopes round every call that can fail.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::memory::{DeviceBuffer, Ledger, Purpose};
use super::pipeline::Pipeline;
use crate::error::{Error, GpuError, Result};
use crate::shader::Recipe;
use crate::tuning::TuningChoice;

/// Which adapter an engine opens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AdapterChoice {
    /// wgpu's own choice of a fast one; a software adapter where there is nothing else.
    #[default]
    Default,
    /// The first whose name, driver or backend contains the text, whatever its case.
    Named(String),
    /// By its number in [`crate::Engine::adapters`].
    Index(usize),
    /// A hardware adapter, or an error: never a CPU in disguise.
    Hardware,
}

/// Which limits and features an engine asks the adapter for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LimitsChoice {
    /// Everything the adapter has.
    #[default]
    Adapter,
    /// wgpu's defaults, which every WebGPU device has, and no optional feature: 16 KiB of workgroup memory, 256 invocations,
    /// 8 storage buffers, 128 MiB a binding.
    Default,
}

/// How an engine is opened.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Which adapter.
    pub adapter: AdapterChoice,
    /// Which limits and features.
    pub limits: LimitsChoice,
    /// Leave subgroup operations out even where the adapter has them.
    pub no_subgroups: bool,
    /// Which measured choices of variants it takes.
    pub tuning: TuningChoice,
    /// How long a blocking call waits for the device before it gives up with an error.
    pub wait_limit: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            adapter: AdapterChoice::default(),
            limits: LimitsChoice::default(),
            no_subgroups: false,
            tuning: TuningChoice::default(),
            // Far beyond any sensible submission: a software device takes minutes for what a GPU does in a second.
            wait_limit: Duration::from_secs(1800),
        }
    }
}

/// A device and what the engine keeps with it.
pub(crate) struct Gpu {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) info: wgpu::AdapterInfo,
    pub(crate) limits: wgpu::Limits,
    pub(crate) features: wgpu::Features,
    pub(crate) ledger: Arc<Ledger>,
    pub(super) pipelines: Mutex<HashMap<Recipe, Arc<Pipeline>>>,
    /// By what they hold.
    pub(super) uniforms: Mutex<HashMap<Vec<u8>, Arc<DeviceBuffer>>>,
    pub(crate) pipeline_cache: OnceLock<wgpu::PipelineCache>,
    lost: Arc<Mutex<Option<String>>>,
    wait_limit: Duration,
}

/// Short: tensors and engines print it too.
impl core::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", describe(&self.info))
    }
}

/// The features that kernels know how to use.
fn wanted_features(options: &EngineOptions) -> wgpu::Features {
    let mut wanted = wgpu::Features::SHADER_F16
        | wgpu::Features::SHADER_INT64
        | wgpu::Features::IMMEDIATES
        | wgpu::Features::PIPELINE_CACHE;
    if !options.no_subgroups {
        wanted |= wgpu::Features::SUBGROUP;
    }
    wanted
}

pub(crate) fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env())
}

/// One line that names an adapter.
pub(crate) fn describe(info: &wgpu::AdapterInfo) -> String {
    let of_driver = [&*info.driver, &*info.driver_info].map(str::trim);
    let of_driver: Vec<_> = of_driver.into_iter().filter(|text| !text.is_empty()).collect();
    let driver = if of_driver.is_empty() { String::new() } else { format!(", {}", of_driver.join(" ")) };
    format!("{} ({:?}, {:?}{driver})", info.name, info.device_type, info.backend)
}

impl Gpu {
    pub(crate) async fn open(options: &EngineOptions) -> Result<Self> {
        let instance = instance();
        let adapter = choose_adapter(&instance, &options.adapter).await?;
        // Some drivers refuse the limits that they report; every device has the defaults.
        let defaults = (wgpu::Features::empty(), wgpu::Limits::default());
        let attempts = match options.limits {
            LimitsChoice::Adapter => vec![(adapter.features() & wanted_features(options), adapter.limits()), defaults],
            LimitsChoice::Default => vec![defaults],
        };
        let mut refused = String::new();
        let mut opened = None;
        for (required_features, required_limits) in attempts {
            let descriptor = wgpu::DeviceDescriptor {
                label: Some("tilewise"),
                required_features,
                required_limits,
                memory_hints: wgpu::MemoryHints::MemoryUsage,
                ..Default::default()
            };
            match adapter.request_device(&descriptor).await {
                Ok(device) => {
                    opened = Some(device);
                    break;
                }
                Err(error) => refused = error.to_string(),
            }
        }
        let (device, queue) =
            opened.ok_or_else(|| GpuError::Internal(format!("{}: {refused}", describe(&adapter.get_info()))))?;
        let mut gpu = Self::with_device(device, queue);
        gpu.wait_limit = options.wait_limit;
        let lost = Arc::clone(&gpu.lost);
        gpu.device.set_device_lost_callback(move |reason, message| {
            *lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{reason:?}: {message}"));
        });
        Ok(gpu)
    }

    pub(crate) fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        Self {
            info: device.adapter_info(),
            limits: device.limits(),
            features: device.features(),
            device,
            queue,
            ledger: Arc::default(),
            pipelines: Mutex::default(),
            uniforms: Mutex::default(),
            pipeline_cache: OnceLock::new(),
            lost: Arc::default(),
            wait_limit: EngineOptions::default().wait_limit,
        }
    }

    fn check_lost(&self) -> Result<()> {
        match &*self.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => Err(GpuError::Lost(reason.clone()).into()),
            None => Ok(()),
        }
    }

    /// Runs wgpu calls inside error scopes and turns what they caught into a typed error.
    pub(crate) fn scoped<T>(&self, calls: impl FnOnce() -> T) -> Result<T> {
        self.check_lost()?;
        // In a browser a scope can only be awaited, and blocking there is impossible: errors go to the device's handler.
        if cfg!(target_arch = "wasm32") {
            return Ok(calls());
        }
        let filters = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
        let scopes = filters.map(|filter| self.device.push_error_scope(filter));
        let value = calls();
        let mut caught = None;
        for scope in scopes.into_iter().rev() {
            caught = pollster::block_on(scope.pop()).or(caught);
        }
        self.check_lost()?;
        match caught {
            None => Ok(value),
            Some(wgpu::Error::OutOfMemory { source }) => Err(GpuError::OutOfMemory(source.to_string()).into()),
            Some(wgpu::Error::Validation { description, .. }) => Err(GpuError::Validation(description).into()),
            Some(wgpu::Error::Internal { description, .. }) => Err(GpuError::Internal(description).into()),
        }
    }

    /// Creates a counted buffer, or says how much was asked for and how much there may be.
    pub(crate) fn create_buffer(
        &self,
        label: &str,
        bytes: u64,
        usage: wgpu::BufferUsages,
        purpose: Purpose,
        contents: Option<&[u8]>,
    ) -> Result<Arc<DeviceBuffer>> {
        // Bindings of size 0 are refused by WebGPU, and vec4 uniforms come in 16 bytes.
        let bytes = bytes.max(16).next_multiple_of(16);
        if bytes > self.limits.max_buffer_size {
            return Err(Error::unsupported(
                format!("bytes in one buffer ({label})"),
                bytes,
                self.limits.max_buffer_size,
            ));
        }
        let raw = self
            .scoped(|| {
                let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size: bytes,
                    usage,
                    mapped_at_creation: contents.is_some(),
                });
                if let Some(contents) = contents {
                    let mut view = raw.get_mapped_range_mut(..).map_err(|error| error.to_string())?;
                    view.slice(..contents.len()).copy_from_slice(contents);
                    drop(view);
                    raw.unmap();
                }
                Ok(raw)
            })?
            .map_err(|error: String| GpuError::Internal(format!("writing {label}: {error}")))?;
        Ok(Arc::new(DeviceBuffer::counted(raw, &self.ledger, purpose)))
    }

    pub(crate) fn encoder(&self, label: &str) -> Result<wgpu::CommandEncoder> {
        self.scoped(|| self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(label) }))
    }

    /// Submits, and lets wgpu free what earlier submissions have done with.
    pub(crate) fn submit(&self, encoder: wgpu::CommandEncoder) -> Result<()> {
        self.scoped(|| self.queue.submit([encoder.finish()]))?;
        self.poll(wgpu::PollType::Poll)?;
        self.check_alive()
    }

    /// Finds out whether the device is there: memory of one that isn't can't be mapped. Submitting to a lost device is no error of wgpu's;
    /// the callback for a loss may come later, and a caller's device has its owner's.
    fn check_alive(&self) -> Result<()> {
        let descriptor = wgpu::BufferDescriptor {
            label: Some("tilewise.probe"),
            size: 16,
            usage: wgpu::BufferUsages::MAP_WRITE,
            mapped_at_creation: true,
        };
        let mapped = self.scoped(|| {
            let probe = self.device.create_buffer(&descriptor);
            probe.get_mapped_range_mut(..).map(drop).map_err(|error| error.to_string())
        })?;
        mapped.map_err(|error| GpuError::Lost(error).into())
    }

    /// Waits until all submitted work is done.
    pub(crate) fn wait(&self) -> Result<()> {
        self.poll(wgpu::PollType::Wait { submission_index: None, timeout: Some(self.wait_limit) })
    }

    fn poll(&self, kind: wgpu::PollType) -> Result<()> {
        self.check_lost()?;
        let polled = self.device.poll(kind);
        self.check_lost()?;
        match polled {
            Ok(_) => Ok(()),
            Err(error) => Err(GpuError::Internal(format!("waiting for the device: {error}")).into()),
        }
    }
}

async fn choose_adapter(instance: &wgpu::Instance, choice: &AdapterChoice) -> Result<wgpu::Adapter> {
    if *choice == AdapterChoice::Default {
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        return match instance.request_adapter(&options).await {
            Ok(adapter) => Ok(adapter),
            Err(error) => Err(GpuError::NoAdapter(error.to_string()).into()),
        };
    }
    let adapters = instance.enumerate_adapters(wgpu::Backends::all()).await;
    let fits = |index: usize, info: &wgpu::AdapterInfo| match choice {
        AdapterChoice::Default => true,
        AdapterChoice::Named(text) => describe(info).to_lowercase().contains(&text.to_lowercase()),
        AdapterChoice::Index(wanted) => index == *wanted,
        AdapterChoice::Hardware => matches!(
            info.device_type,
            wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::VirtualGpu
        ),
    };
    match adapters.iter().enumerate().find(|(index, adapter)| fits(*index, &adapter.get_info())) {
        Some((_, adapter)) => Ok(adapter.clone()),
        None => {
            let seen: Vec<_> = adapters.iter().map(|adapter| describe(&adapter.get_info())).collect();
            let wanted = match choice {
                AdapterChoice::Default => "any".to_string(),
                AdapterChoice::Named(text) => format!("one like {text:?}"),
                AdapterChoice::Index(index) => format!("number {index}"),
                AdapterChoice::Hardware => "a hardware adapter".to_string(),
            };
            Err(GpuError::NoAdapter(format!("wanted {wanted}; there are: [{}]", seen.join("; "))).into())
        }
    }
}
