//! The device: its limits, memory, tensors and pipelines. Knows nothing of attention.
//!
//! Every wgpu call that can fail is made inside error scopes and comes back as [`crate::Error`]; wgpu's own default, a
//! panic, is never met.

mod device;
mod memory;
mod pipeline;
mod readback;
mod tensor;

pub use device::{AdapterChoice, EngineOptions, LimitsChoice};
pub(crate) use device::{Gpu, describe, instance};
pub use memory::{MemoryUse, Purpose};
pub(crate) use pipeline::{Access, Kernel, Launch};
pub use tensor::{Element, Tensor};
