//! Tensors on the device, and views of them.

use core::ops::Range;
use std::sync::Arc;

use super::device::Gpu;
use super::memory::{DeviceBuffer, Purpose};
use crate::error::{Error, Result};
use crate::problem::DType;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u32 {}
}

/// A number type that tensors can hold.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// How the device stores it.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

/// A tensor on the device, or a view of one: a buffer, a dtype, an offset, a shape and strides.
///
/// Cloning and viewing copy nothing. The memory is freed when the last tensor on it is dropped, in whatever order tensors and
/// engine go.
///
/// Attention takes q, k and v as (batch, heads, length, dim) in this order of axes, wherever they lie: data stored as (batch,
/// length, heads, dim) or as the columns of a fused projection is taken as it is, through [`Tensor::heads`],
/// [`Tensor::permute`] and [`Tensor::slice`]. Only the last axis has to be contiguous.
#[derive(Debug, Clone)]
pub struct Tensor {
    gpu: Arc<Gpu>,
    buffer: Arc<DeviceBuffer>,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

/// The part of a tensor's buffer that a kernel sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Where it starts, as the device's alignment allows.
    pub(crate) offset_bytes: u64,
    pub(crate) bytes: u64,
    /// Where in it the tensor's first element is, in elements.
    pub(crate) first_elem: u32,
}

/// Elements of a dense tensor, or an error where their count or their byte count can't be held.
pub(crate) fn count_elems(shape: &[usize]) -> Result<usize> {
    // A size beside a 0 is bounded too: strides are made of it.
    let bound = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size.max(1)));
    bound
        .filter(|&bound| bound <= u32::MAX as usize)
        .map(|_| shape.iter().product())
        .ok_or_else(|| Error::invalid(format!("shape {shape:?}; accepted: up to {} elements", u32::MAX)))
}

fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}

const BUFFER_USES: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

impl Tensor {
    pub(crate) fn upload<T: Element>(gpu: &Arc<Gpu>, label: &str, data: &[T], shape: &[usize]) -> Result<Self> {
        Self::upload_for(gpu, label, data, shape, Purpose::Input)
    }

    pub(crate) fn upload_for<T: Element>(
        gpu: &Arc<Gpu>,
        label: &str,
        data: &[T],
        shape: &[usize],
        purpose: Purpose,
    ) -> Result<Self> {
        let elems = count_elems(shape)?;
        if data.len() != elems {
            return Err(Error::invalid(format!("{} elements for shape {shape:?}; accepted: {elems}", data.len())));
        }
        let contents = bytemuck::cast_slice(data);
        let buffer = gpu.create_buffer(label, contents.len() as u64, BUFFER_USES, purpose, Some(contents))?;
        Ok(Self::dense(gpu, buffer, T::DTYPE, shape))
    }

    /// A dense tensor of undefined contents.
    pub(crate) fn alloc(gpu: &Arc<Gpu>, label: &str, dtype: DType, shape: &[usize], purpose: Purpose) -> Result<Self> {
        let bytes = (dtype.bytes() * count_elems(shape)?) as u64;
        Ok(Self::dense(gpu, gpu.create_buffer(label, bytes, BUFFER_USES, purpose, None)?, dtype, shape))
    }

    /// A tensor on a buffer of the caller's.
    pub(crate) fn borrow(
        gpu: &Arc<Gpu>,
        raw: wgpu::Buffer,
        dtype: DType,
        offset: usize,
        shape: &[usize],
    ) -> Result<Self> {
        let elems = count_elems(shape)?;
        let bytes = raw.size();
        if bytes < 4 || !bytes.is_multiple_of(4) {
            return Err(Error::invalid(format!("a buffer of {bytes} bytes; accepted: a multiple of 4, not 0")));
        }
        let held = usize::try_from(bytes).unwrap_or(usize::MAX) / dtype.bytes();
        if offset.checked_add(elems).is_none_or(|end| end > held) {
            return Err(Error::invalid(format!(
                "shape {shape:?} at element {offset} of a buffer that holds {held} {dtype}; accepted: what fits"
            )));
        }
        if !raw.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::invalid(format!("a buffer of usage {:?}; accepted: STORAGE among them", raw.usage())));
        }
        Ok(Self { offset, ..Self::dense(gpu, Arc::new(DeviceBuffer::borrowed(raw)), dtype, shape) })
    }

    fn dense(gpu: &Arc<Gpu>, buffer: Arc<DeviceBuffer>, dtype: DType, shape: &[usize]) -> Self {
        Self { gpu: Arc::clone(gpu), buffer, dtype, offset: 0, shape: shape.to_vec(), strides: dense_strides(shape) }
    }

    /// How the elements are stored.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The distance between neighbours along each axis, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Where the first element is in the buffer, in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Elements in the tensor.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// The buffer underneath. Other tensors may lie in it.
    pub fn raw_buffer(&self) -> &wgpu::Buffer {
        &self.buffer.raw
    }

    /// The axes in another order: axis `i` of the result is axis `order[i]` of this tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `order` isn't a permutation of the axes.
    pub fn permute(&self, order: &[usize]) -> Result<Self> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..self.shape.len()) {
            return Err(Error::invalid(format!(
                "axis order {order:?}; accepted: each of 0..{} once",
                self.shape.len()
            )));
        }
        let pick = |values: &[usize]| order.iter().map(|&axis| values[axis]).collect();
        Ok(Self { shape: pick(&self.shape), strides: pick(&self.strides), ..self.clone() })
    }

    /// The part of the tensor within `range` along one axis.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such axis or no such range in it.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<Self> {
        let size = self.axis_size(axis)?;
        if range.start > range.end || range.end > size {
            return Err(Error::invalid(format!("range {range:?} of axis {axis}; accepted: within 0..{size}")));
        }
        let mut view = self.clone();
        view.shape[axis] = range.len();
        // An empty view points at nothing; keep its offset within the buffer.
        if !range.is_empty() {
            view.offset += range.start * self.strides[axis];
        }
        Ok(view)
    }

    /// One axis split in two, the first of `outer` elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such axis or its size is no multiple of `outer`.
    pub fn unflatten(&self, axis: usize, outer: usize) -> Result<Self> {
        let size = self.axis_size(axis)?;
        if outer == 0 || size % outer != 0 {
            return Err(Error::invalid(format!(
                "axis {axis} of size {size} into {outer} parts; accepted: divisors of {size}"
            )));
        }
        let inner = size / outer;
        let mut view = self.clone();
        view.shape.splice(axis..=axis, [outer, inner]);
        view.strides.splice(axis..=axis, [inner * self.strides[axis], self.strides[axis]]);
        Ok(view)
    }

    /// A projection's output (batch, length, heads·dim) seen as (batch, heads, length, dim).
    ///
    /// ```no_run
    /// # fn main() -> tilewise::Result<()> {
    /// # let engine = tilewise::Engine::new()?;
    /// # let (batch, len, heads, dim) = (2, 5, 3, 4);
    /// # let fused = vec![0.0f32; batch * len * 3 * heads * dim];
    /// // A fused QKV projection: (batch, len, 3·heads·dim).
    /// let qkv = engine.upload(&fused, [batch, len, 3 * heads * dim])?;
    /// let q = qkv.slice(2, 0..heads * dim)?.heads(heads)?;
    /// let k = qkv.slice(2, heads * dim..2 * heads * dim)?.heads(heads)?;
    /// let v = qkv.slice(2, 2 * heads * dim..3 * heads * dim)?.heads(heads)?;
    /// // And back: an o that lies as the output projection wants it, (batch, len, heads·dim), for `Bindings::o`.
    /// let joined = engine.alloc(tilewise::DType::F32, [batch, len, heads * dim])?;
    /// let o = joined.heads(heads)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor hasn't three axes or the last is no multiple of `heads`.
    pub fn heads(&self, heads: usize) -> Result<Self> {
        if self.shape.len() != 3 {
            return Err(Error::invalid(format!("shape {:?}; accepted: (batch, length, heads·dim)", self.shape)));
        }
        self.unflatten(2, heads)?.permute(&[0, 2, 1, 3])
    }

    fn axis_size(&self, axis: usize) -> Result<usize> {
        let size = self.shape.get(axis).copied();
        size.ok_or_else(|| Error::invalid(format!("axis {axis}; accepted: 0..{}", self.shape.len())))
    }

    /// Whether the elements lie in row-major order without gaps.
    pub(crate) fn is_dense(&self) -> bool {
        let dense = dense_strides(&self.shape);
        self.shape
            .iter()
            .zip(self.strides.iter().zip(dense))
            .all(|(&size, (&stride, dense))| size <= 1 || stride == dense)
    }

    /// The bytes of the buffer from the tensor's first element to its last, in whole words, and how many elements of it come
    /// before the first.
    pub(crate) fn extent_words(&self) -> (Range<u64>, usize) {
        let (extent, size) = (self.extent(), self.dtype.bytes());
        let start = (size * extent.start) as u64 / 4 * 4;
        let end = ((size * extent.end) as u64).next_multiple_of(4);
        (start..end, extent.start - start as usize / size)
    }

    /// A dense tensor of another shape on the first elements of this dense one.
    pub(crate) fn reinterpret(&self, shape: &[usize]) -> Result<Self> {
        let elems = count_elems(shape)?;
        if elems > 0 && (!self.is_dense() || elems > self.elems()) {
            return Err(Error::invalid(format!(
                "{} elements, strides {:?}; accepted: at least {elems} dense elements",
                self.elems(),
                self.strides
            )));
        }
        Ok(Self { shape: shape.to_vec(), strides: dense_strides(shape), ..self.clone() })
    }

    /// The first words of this tensor of 4-byte elements.
    pub(crate) fn slice_words(&self, words: usize) -> Result<Self> {
        Ok(Self { dtype: DType::U32, ..self.reinterpret(&[words])? })
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// The elements of the buffer from the tensor's first to its last.
    pub(crate) fn extent(&self) -> Range<usize> {
        if self.elems() == 0 {
            return self.offset..self.offset;
        }
        let last: usize = self.shape.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        self.offset..self.offset + last + 1
    }

    /// Whether any byte of the two may be the same. Parts of the rows of one matrix, as q, k and v are of a fused projection, are known to be
    /// apart.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        if self.elems() == 0 || other.elems() == 0 {
            return false;
        }
        let bytes = |tensor: &Self| {
            let (extent, size) = (tensor.extent(), tensor.dtype.bytes());
            size * extent.start..size * extent.end
        };
        let (a, b) = (bytes(self), bytes(other));
        let meet = self.shares_buffer(other) && a.start < b.end && b.start < a.end;
        meet && !self.row_periods().any(|period| self.apart_within(other, period))
    }

    /// Strides in bytes at which the tensor may repeat.
    fn row_periods(&self) -> impl Iterator<Item = usize> {
        let size = self.dtype.bytes();
        self.strides.iter().map(move |stride| stride * size).filter(|period| *period > 0 && period.is_multiple_of(4))
    }

    /// Whether two tensors take different words of every so many bytes.
    fn apart_within(&self, other: &Self, period: usize) -> bool {
        match (self.within(period), other.within(period)) {
            (Some(a), Some(b)) => a.end <= b.start || b.end <= a.start,
            _ => false,
        }
    }

    /// The bytes, in whole words, that the tensor takes of every `period`; None if it takes some across the end of one.
    fn within(&self, period: usize) -> Option<Range<usize>> {
        let size = self.dtype.bytes();
        let axes = self.shape.iter().zip(&self.strides).map(|(len, stride)| (len - 1, size * stride));
        let last: usize =
            axes.filter(|(_, stride)| !stride.is_multiple_of(period)).map(|(steps, stride)| steps * stride).sum();
        let start = size * self.offset % period;
        let taken = start / 4 * 4..(start + last + size).next_multiple_of(4);
        (taken.end <= period).then_some(taken)
    }

    /// Whether the two lie in one buffer.
    pub(crate) fn shares_buffer(&self, other: &Self) -> bool {
        self.buffer.raw == other.buffer.raw
    }

    /// The smallest window on the buffer that the device lets a kernel have and that holds the tensor.
    pub(crate) fn window(&self, limits: &wgpu::Limits) -> Result<Window> {
        let extent = self.extent();
        let alignment = u64::from(limits.min_storage_buffer_offset_alignment.max(4));
        if extent.is_empty() {
            return Ok(Window { offset_bytes: 0, bytes: 16.min(self.buffer.raw.size() / 4 * 4), first_elem: 0 });
        }
        let size = self.dtype.bytes() as u64;
        let start = size * extent.start as u64;
        let offset_bytes = start / alignment * alignment;
        // Kernels read words; a buffer's size is a multiple of one.
        let bytes = (size * extent.end as u64).next_multiple_of(4) - offset_bytes;
        // Kernels index elements in u32, whatever the device would bind.
        let allowed = limits.max_storage_buffer_binding_size.min(size * u64::from(u32::MAX));
        if bytes > allowed {
            return Err(Error::unsupported("bytes in one storage binding", bytes, allowed));
        }
        let first_elem = u32::try_from((start - offset_bytes) / size).unwrap_or(0); // below the alignment
        Ok(Window { offset_bytes, bytes, first_elem })
    }

    /// Every element's place in the buffer, relative to the extent's start, in row-major order of the shape.
    pub(crate) fn for_each_place(&self, mut visit: impl FnMut(usize)) {
        let mut index = vec![0usize; self.shape.len()];
        let mut place = 0;
        for _ in 0..self.elems() {
            visit(place);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                place += self.strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                place -= index[axis] * self.strides[axis];
                index[axis] = 0;
            }
        }
    }
}
