//! Kernels on a device, against the CPU reference.
//!
//! Every sweep runs twice: on a device with all that the adapter has, and on one with wgpu's default limits and no optional feature.
//! Without an adapter the tests fail where `REQUIRE_GPU=1`, and elsewhere say loudly that they did nothing.
//!
//! Each module states the contract that it checks; [`support`] has what they share. The tests of [`smoke`] are the quick ones, for drivers
//! that are slow.

mod alike;
mod backward;
mod call;
mod dims;
mod errors;
mod field_cases;
mod hand_worked;
mod lengths;
mod lifecycle;
mod long;
mod matmul;
mod memory;
mod merge;
mod options;
mod poison;
mod properties;
mod readme;
mod repeats;
mod smoke;
mod softmax_rows;
mod support;
mod views;
