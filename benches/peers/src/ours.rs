//! tilewise itself, by the call that a user meets first.

use anyhow::{Context, Result};
use tilewise::{Attention, AttentionOutput, Engine, Tensor};

use crate::{HEAD_DIM, HEADS, Inputs, Peer};

pub struct Tilewise {
    engine: Engine,
    call: Option<(Tensor, Tensor, Tensor, Attention)>,
    output: Option<AttentionOutput>,
}

impl Tilewise {
    pub fn new() -> Result<Self> {
        let engine =
            Engine::new().context("there is nothing to measure (scripts/vulkan.sh installs a software driver)")?;
        Ok(Self { engine, call: None, output: None })
    }

    /// The adapter with its driver.
    pub fn describe(&self) -> String {
        self.engine.describe_adapter()
    }
}

impl Peer for Tilewise {
    fn name(&self) -> &'static str {
        "tilewise"
    }

    fn package(&self) -> &'static str {
        "tilewise"
    }

    fn adapter(&self) -> String {
        self.engine.adapter_info().name.clone()
    }

    fn upload(&mut self, inputs: &Inputs) -> Result<()> {
        let upload = |data: &[f32]| self.engine.upload(data, [1, HEADS, inputs.tokens, HEAD_DIM]);
        let options = inputs.problem()?.attention().clone();
        self.call = Some((upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?, options));
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let (q, k, v, options) = self.call.as_ref().context("upload comes first")?;
        self.output = Some(self.engine.attention(q, k, v, options)?);
        Ok(self.engine.wait()?)
    }

    fn read(&mut self) -> Result<Vec<f32>> {
        Ok(self.output.as_ref().context("run comes first")?.o.read()?)
    }
}
