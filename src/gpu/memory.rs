//! Counting device memory: what the engine holds now, what it held at most, and for what.

use std::sync::{Arc, Mutex, PoisonError};

/// What a piece of device memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Tensors the caller uploaded.
    Input,
    /// Results.
    Output,
    /// Scratch memory of a call, freed after it: the score matrices of naive attention, partial results.
    Workspace,
    /// Sizes, strides and scales of a call, in uniform buffers.
    Params,
    /// Buffers that results are copied through on their way to the host.
    Readback,
}

impl Purpose {
    /// All purposes, in the order of [`MemoryUse`]'s fields.
    pub const ALL: [Self; 5] = [Self::Input, Self::Output, Self::Workspace, Self::Params, Self::Readback];

    /// The name as reports print it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "inputs",
            Self::Output => "outputs",
            Self::Workspace => "workspace",
            Self::Params => "params",
            Self::Readback => "readback",
        }
    }
}

/// Bytes of device memory that the engine has allocated. A snapshot.
///
/// These are the sizes of wgpu buffers, as created. What the driver sets aside for them is a little more:
/// [`crate::Engine::allocator_report`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    live: [u64; Purpose::ALL.len()],
    at_peak: [u64; Purpose::ALL.len()],
    peak: u64,
}

impl MemoryUse {
    /// Bytes allocated now.
    pub fn live_bytes(&self) -> u64 {
        self.live.iter().sum()
    }

    /// Bytes allocated now for one purpose.
    pub fn live_bytes_for(&self, purpose: Purpose) -> u64 {
        self.live[purpose as usize]
    }

    /// The most bytes that were allocated at one time since the engine was made or the peak was last reset.
    pub fn peak_bytes(&self) -> u64 {
        self.peak
    }

    /// What one purpose had allocated at the moment of the peak.
    pub fn peak_bytes_for(&self, purpose: Purpose) -> u64 {
        self.at_peak[purpose as usize]
    }
}

/// The counters behind [`MemoryUse`].
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<MemoryUse>);

impl Ledger {
    fn update<T>(&self, change: impl FnOnce(&mut MemoryUse) -> T) -> T {
        // A panic elsewhere can't leave the counters half-changed: the closures below don't panic.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn snapshot(&self) -> MemoryUse {
        self.update(|memory| *memory)
    }

    pub(crate) fn reset_peak(&self) {
        self.update(|memory| {
            memory.peak = memory.live_bytes();
            memory.at_peak = memory.live;
        });
    }

    fn add(&self, purpose: Purpose, bytes: u64) {
        self.update(|memory| {
            memory.live[purpose as usize] += bytes;
            if memory.live_bytes() > memory.peak {
                memory.peak = memory.live_bytes();
                memory.at_peak = memory.live;
            }
        });
    }

    fn subtract(&self, purpose: Purpose, bytes: u64) {
        self.update(|memory| memory.live[purpose as usize] -= bytes);
    }
}

/// A wgpu buffer that is counted for as long as it lives.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    pub(crate) raw: wgpu::Buffer,
    counted: Option<(Arc<Ledger>, Purpose)>,
}

impl DeviceBuffer {
    pub(crate) fn counted(raw: wgpu::Buffer, ledger: &Arc<Ledger>, purpose: Purpose) -> Self {
        ledger.add(purpose, raw.size());
        Self { raw, counted: Some((Arc::clone(ledger), purpose)) }
    }

    /// A buffer that belongs to the caller, and is in nobody's count.
    pub(crate) fn borrowed(raw: wgpu::Buffer) -> Self {
        Self { raw, counted: None }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some((ledger, purpose)) = &self.counted {
            ledger.subtract(*purpose, self.raw.size());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_remembers_its_moment() {
        let ledger = Ledger::default();
        ledger.add(Purpose::Input, 100);
        ledger.add(Purpose::Workspace, 50);
        ledger.subtract(Purpose::Workspace, 50);
        ledger.add(Purpose::Output, 20);
        let memory = ledger.snapshot();
        assert_eq!((memory.live_bytes(), memory.peak_bytes()), (120, 150));
        assert_eq!(memory.peak_bytes_for(Purpose::Workspace), 50);
        assert_eq!(memory.peak_bytes_for(Purpose::Output), 0);
        ledger.reset_peak();
        assert_eq!(ledger.snapshot().peak_bytes(), 120);
        assert_eq!(ledger.snapshot().peak_bytes_for(Purpose::Output), 20);
    }
}
