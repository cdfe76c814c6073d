//! Kernels on a device, against the CPU reference.
