//! Bringing results to the host, blocking or not.

use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::sync::{Arc, Mutex, PoisonError};

use super::memory::{DeviceBuffer, Purpose};
use super::tensor::{Element, Tensor};
use crate::error::{Error, GpuError, Result};
use crate::problem::DType;

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

fn widened<T>(elements: Vec<T>, widen: impl Fn(T) -> f32) -> Vec<f32> {
    elements.into_iter().map(widen).collect()
}

impl Tensor {
    /// The tensor's elements in row-major order of its shape, widened to f32, once all work submitted so far is done. Blocks.
    ///
    /// In a browser, where nothing may block, use [`Tensor::read_async`].
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a tensor of integers; [`crate::Error::Gpu`] if the device is lost or doesn't finish within the
    /// engine's `wait_limit`.
    pub fn read(&self) -> Result<Vec<f32>> {
        match self.dtype() {
            DType::F16 => Ok(widened(self.read_as()?, half::f16::to_f32)),
            DType::Bf16 => Ok(widened(self.read_as()?, half::bf16::to_f32)),
            DType::F32 | DType::U32 => self.read_as(),
        }
    }

    /// The tensor's elements as they are stored; else as [`Tensor::read`].
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the tensor is of another type than `T`; else as [`Tensor::read`].
    pub fn read_as<T: Element>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>()?;
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
        match self.dtype() {
            DType::F16 => Ok(widened(self.read_as_async().await?, half::f16::to_f32)),
            DType::Bf16 => Ok(widened(self.read_as_async().await?, half::bf16::to_f32)),
            DType::F32 | DType::U32 => self.read_as_async().await,
        }
    }

    /// [`Tensor::read_as`] as a future, as [`Tensor::read_async`].
    ///
    /// # Errors
    /// As [`Tensor::read_as`].
    pub async fn read_as_async<T: Element>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>()?;
        if self.elems() == 0 {
            return Ok(Vec::new());
        }
        let (staging, mapped) = self.start_read()?;
        mapped.await?;
        self.finish_read(&staging)
    }

    fn check_dtype<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype() {
            return Ok(());
        }
        Err(Error::invalid(format!("read of a tensor of {} as {}; accepted: its own type", self.dtype(), T::DTYPE)))
    }

    fn start_read(&self) -> Result<(Arc<DeviceBuffer>, Mapped)> {
        let gpu = self.gpu();
        let (words, _) = self.extent_words();
        let bytes = words.end - words.start;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = gpu.create_buffer("tilewise.readback", bytes, usage, Purpose::Readback, None)?;
        let mut encoder = gpu.encoder("tilewise.readback")?;
        gpu.scoped(|| {
            encoder.copy_buffer_to_buffer(&self.buffer().raw, words.start, &staging.raw, 0, bytes);
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

    fn finish_read<T: Element>(&self, staging: &DeviceBuffer) -> Result<Vec<T>> {
        let view = staging
            .raw
            .get_mapped_range(..)
            .map_err(|error| GpuError::Internal(format!("reading a mapped result: {error}")))?;
        let held: &[T] = bytemuck::try_cast_slice(&view)
            .map_err(|error| GpuError::Internal(format!("reading a mapped result: {error}")))?;
        let (_, first) = self.extent_words();
        let mut elements = Vec::with_capacity(self.elems());
        self.for_each_place(|place| elements.push(held[first + place]));
        drop(view);
        staging.raw.unmap();
        Ok(elements)
    }
}
