//! Transformer attention on any GPU, through wgpu, with kernels written by hand in WGSL: tiled, so that the n×n score matrix
//! never exists in GPU memory.

mod engine;
mod error;
mod gpu;
mod kernels;
mod plan;
mod problem;
pub mod reference;
mod shader;

pub use engine::{AttentionOutput, Bindings, Engine};
pub use error::{Error, GpuError, Result};
pub use gpu::{AdapterChoice, Element, EngineOptions, LimitsChoice, MemoryUse, Purpose, Tensor};
pub use plan::{DeviceFacts, Path, Plan};
pub use problem::{Align, Attention, Dims, Problem};
