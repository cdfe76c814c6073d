//! `tilewise verify`: this device against the CPU reference, or against a folder of cases.

mod device;
mod options;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::args::Common;
pub(crate) use crate::args::Dtype;
use crate::cases;

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Folder with manifest.json and its cases, instead of every kernel variant against the CPU reference. To try:
    /// tests/data/golden in tilewise's repository
    #[arg(long, value_name = "DIR")]
    pub(crate) cases: Option<PathBuf>,
    /// Storage type, of every kernel variant; options are checked in several besides. Golden cases whose inputs it can't hold
    /// exactly are left out; ONNX cases have a type of their own
    #[arg(long, value_enum, default_value_t)]
    pub(crate) dtype: Dtype,
    /// Which outputs to check of each case: with gradients, or without
    #[arg(long, value_enum, default_value_t, requires = "cases")]
    pub(crate) outputs: Outputs,
    /// With --cases: run only those whose name contains this
    #[arg(long, value_name = "SUBSTRING", requires = "cases")]
    pub(crate) only: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Outputs {
    /// Only o and lse.
    Forward,
    /// Gradients too.
    #[default]
    All,
}

/// The exit code says whether all is right.
pub(crate) fn run(args: &VerifyArgs, common: &Common) -> Result<ExitCode> {
    let right = match &args.cases {
        Some(folder) => cases::run(folder, args, common)?,
        None => device::run(args.dtype, common)?,
    };
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
