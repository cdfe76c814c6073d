//! Bringing results to the host, blocking or not.

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::sync::{Arc, Mutex, PoisonError};

use super::memory::{DeviceBuffer, Purpose};
use super::tensor::Tensor;
use crate::error::{GpuError, Result};

/// What a mapping callback and the future that waits for it share.
#[derive(Default)]
struct Mapping {
    result: Option<Result<(), wgpu::BufferAsyncError>>,
    waker: Option<Waker>,
}

/// Resolves when a buffer has been mapped.
struct Mapped(Arc<Mutex<Mapping>>);

impl Future for Mapped {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut mapping = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match mapping.result.take() {
            Some(Ok(())) => Poll::Ready(Ok(())),
            Some(Err(error)) => Poll::Ready(Err(GpuError::Internal(format!("mapping a result: {error}")).into())),
            None => {
                mapping.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Tensor {
    /// The tensor's elements in row-major order of its shape, once all work submitted so far is done. Blocks.
    ///
    /// In a browser, where nothing may block, use [`Tensor::read_async`].
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] if the device is lost or doesn't finish within the engine's `wait_limit`.
    pub fn read(&self) -> Result<Vec<f32>> {
        if self.elems() == 0 {
            return Ok(Vec::new());
        }
        let (staging, mapped) = self.start_read()?;
        self.gpu().wait()?;
        // The wait has run the callback: the future is ready, and this doesn't block.
        pollster::block_on(mapped)?;
        self.finish_read(&staging)
    }

    /// [`Tensor::read`] as a future. Something must poll the device meanwhile; a browser does it by itself, elsewhere call
    /// [`wgpu::Device::poll`].
    ///
    /// # Errors
    /// As [`Tensor::read`].
    pub async fn read_async(&self) -> Result<Vec<f32>> {
        if self.elems() == 0 {
            return Ok(Vec::new());
        }
        let (staging, mapped) = self.start_read()?;
        mapped.await?;
        self.finish_read(&staging)
    }

    fn start_read(&self) -> Result<(Arc<DeviceBuffer>, Mapped)> {
        let gpu = self.gpu();
        let extent = self.extent();
        let bytes = 4 * extent.len() as u64;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = gpu.create_buffer("tilewise.readback", bytes, usage, Purpose::Readback, None)?;
        let mut encoder = gpu.encoder("tilewise.readback")?;
        gpu.scoped(|| {
            encoder.copy_buffer_to_buffer(&self.buffer().raw, 4 * extent.start as u64, &staging.raw, 0, bytes);
        })?;
        gpu.submit(encoder)?;
        let mapping = Arc::<Mutex<Mapping>>::default();
        let shared = Arc::clone(&mapping);
        gpu.scoped(|| {
            staging.raw.map_async(wgpu::MapMode::Read, .., move |result| {
                let mut mapping = shared.lock().unwrap_or_else(PoisonError::into_inner);
                mapping.result = Some(result);
                if let Some(waker) = mapping.waker.take() {
                    waker.wake();
                }
            });
        })?;
        Ok((staging, Mapped(mapping)))
    }

    fn finish_read(&self, staging: &DeviceBuffer) -> Result<Vec<f32>> {
        let view = staging
            .raw
            .get_mapped_range(..)
            .map_err(|error| GpuError::Internal(format!("reading a mapped result: {error}")))?;
        let held: &[f32] = bytemuck::try_cast_slice(&view)
            .map_err(|error| GpuError::Internal(format!("reading a mapped result: {error}")))?;
        let mut elements = Vec::with_capacity(self.elems());
        self.for_each_place(|place| elements.push(held[place]));
        drop(view);
        staging.raw.unmap();
        Ok(elements)
    }
}
