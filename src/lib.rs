//! Transformer attention on any GPU, through wgpu, with kernels written by hand in WGSL.
//!
//! `softmax(scale · Q Kᵀ + mask) V`, tiled in the manner of FlashAttention: the n×n score matrix never exists in device memory.
//! Runs on wgpu's default limits without optional features, takes more where a device has it, and is checked against a CPU
//! reference in f64.
//!
//! ```no_run
//! use tilewise::{Attention, Engine};
//!
//! # fn main() -> tilewise::Result<()> {
//! let engine = Engine::new()?;
//! // Grouped-query attention: 8 query heads on 2 key/value heads, 1000 tokens, head_dim 64.
//! let (q_host, kv_host) = (vec![0.1f32; 8 * 1000 * 64], vec![0.2f32; 2 * 1000 * 64]);
//! let q = engine.upload(&q_host, [1, 8, 1000, 64])?;
//! let k = engine.upload(&kv_host, [1, 2, 1000, 64])?;
//! let v = engine.upload(&kv_host, [1, 2, 1000, 64])?;
//! let out = engine.attention(&q, &k, &v, &Attention::causal())?;
//! let o: Vec<f32> = out.o.read()?; // (batch, q_heads, q_len, value_dim)
//! let lse: Vec<f32> = out.lse.read()?; // (batch, q_heads, q_len)
//! # Ok(()) }
//! ```
//!
//! | to | see |
//! |---|---|
//! | open a device, or bring one | [`Engine::new`], [`Engine::open`], [`Engine::with_device`] |
//! | say what to compute | [`Attention`], [`Dims`], [`Problem`] |
//! | mask, add a bias, use ranges, sinks, tables of your own | [`Inputs`], [`Engine::upload_mask`] |
//! | change scores or hide keys by WGSL of your own | [`ScoreMod`], [`MaskMod`] |
//! | store in f16 or bf16 | [`DType`], [`Storage`], [`Attention::output_dtype`] |
//! | place data: strides, (batch, length, heads, dim), a fused QKV projection, your own buffer | [`Tensor`], [`Engine::borrow`] |
//! | know what will run, with how many bytes, and why, without a GPU | [`Plan`], [`DeviceFacts`] |
//! | compile kernels before their first call | [`Engine::warm_up`], [`Engine::warm_up_backward`], [`Engine::set_pipeline_cache`] |
//! | have the fastest variants of this device chosen | [`Tuning`], [`TuningChoice`] |
//! | record into an encoder of your own | [`Plan::record`] |
//! | train: gradients; `examples/char_lm` trains a transformer | [`Engine::attention_backward`], [`BackwardPlan::record`] |
//! | attend to keys in parts: chunks, shared prefixes | [`Engine::merge`] |
//! | run for long, with progress and cancellation | [`Engine::run`], [`Engine::run_backward`] |
//! | count device memory | [`Engine::memory`], [`Engine::allocator_report`] |
//! | compare with attention that stores the score matrix | [`Path::Naive`] |
//! | decide what is right | [`mod@reference`] |
//!
//! What attention means here, exactly: a row that sees no key gives o = 0 and lse = -inf (or its sink); causal masks align
//! bottom-right unless asked otherwise ([`Align`]); a masked key has no effect whatever is stored there; a NaN that a query sees shows
//! in that row and in no other; the same input on the same adapter gives the same bits.

mod engine;
mod error;
mod gpu;
mod kernels;
mod plan;
mod problem;
pub mod reference;
mod shader;
mod tuning;

pub use engine::{
    AttentionOutput, BackwardBindings, BackwardInputs, Bindings, Engine, Gradients, Inputs, Mask, MaskElement,
};
pub use error::{Error, GpuError, Result};
pub use gpu::{AdapterChoice, Element, EngineOptions, LimitsChoice, MemoryUse, Purpose, Tensor};
pub use plan::{BackwardPlan, DeviceFacts, Path, Plan};
pub use problem::{Align, Attention, DType, Dims, MaskMod, Problem, ScoreMod, Storage, alibi_slopes};
pub use tuning::{Choices, Tuning, TuningChoice};
pub use {half, wgpu};
