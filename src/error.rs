//! The one error type of the library.

use core::fmt;

/// Everything that can go wrong, by whose concern it is.
///
/// After any of them except a lost device the engine is as usable as before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for something that has no meaning. The message names the value received and the values accepted.
    Invalid(String),
    /// The request is sound, but this device can't serve it.
    Unsupported {
        /// What was asked for, in words: `bytes in one storage binding`, `workgroup memory in bytes`.
        what: String,
        /// How much of it the request needs.
        needed: u64,
        /// How much of it the device has.
        available: u64,
    },
    /// The caller's progress function said to stop. Outputs hold part of the result; the engine is as usable as before.
    Cancelled,
    /// The device or its driver failed.
    Gpu(GpuError),
}

/// A failure of the device, its driver or wgpu itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuError {
    /// No adapter fits the request. The text lists the adapters that were seen.
    NoAdapter(String),
    /// An allocation failed.
    OutOfMemory(String),
    /// The device is gone; a new engine is needed.
    Lost(String),
    /// wgpu refused a command: a defect of this library, worth a report.
    Validation(String),
    /// The driver or wgpu failed in another way: a mapping, a shader compiler, a time-out.
    Internal(String),
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

impl Error {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    pub(crate) fn unsupported(what: impl Into<String>, needed: u64, available: u64) -> Self {
        Self::Unsupported { what: what.into(), needed, available }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(message) => write!(f, "invalid request: {message}"),
            Self::Unsupported { what, needed, available } => {
                write!(f, "this device can't do that: {what}: {needed} needed, {available} available")
            }
            Self::Cancelled => write!(f, "cancelled by the caller"),
            Self::Gpu(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAdapter(text) => write!(f, "no usable GPU adapter: {text}"),
            Self::OutOfMemory(text) => write!(f, "out of device memory: {text}"),
            Self::Lost(text) => write!(f, "device lost: {text}"),
            Self::Validation(text) => write!(f, "wgpu refused a command: {text}"),
            Self::Internal(text) => write!(f, "GPU failure: {text}"),
        }
    }
}

impl core::error::Error for Error {}
impl core::error::Error for GpuError {}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}
