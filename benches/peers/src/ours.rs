//! tilewise itself, by the call that a user meets first.

use anyhow::{Context, Result};
use tilewise::{Attention, AttentionOutput, BackwardInputs, Engine, Gradients, Inputs as Tensors, Tensor};

use crate::{HEAD_DIM, HEADS, Inputs, Peer};

pub struct Tilewise {
    engine: Engine,
    call: Option<Call>,
    output: Option<(AttentionOutput, Option<Gradients>)>,
}

struct Call {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_o: Option<Tensor>,
    options: Attention,
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
        let grad_o = inputs.grad_o.as_deref().map(upload).transpose()?;
        self.call = Some(Call { q: upload(&inputs.q)?, k: upload(&inputs.k)?, v: upload(&inputs.v)?, grad_o, options });
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let Call { q, k, v, grad_o, options } = self.call.as_ref().context("upload comes first")?;
        let out = self.engine.attention(q, k, v, options)?;
        let gradients = grad_o.as_ref().map(|grad_o| {
            let given =
                BackwardInputs { inputs: Tensors::new(q, k, v), o: &out.o, lse: &out.lse, grad_o, grad_lse: None };
            self.engine.attention_backward(&given, options)
        });
        self.output = Some((out, gradients.transpose()?));
        Ok(self.engine.wait()?)
    }

    fn read(&mut self) -> Result<Vec<f32>> {
        let (out, gradients) = self.output.as_ref().context("run comes first")?;
        let Some(Gradients { dq, dk, dv, .. }) = gradients else { return Ok(out.o.read()?) };
        Ok([dq.read()?, dk.read()?, dv.read()?].concat())
    }
}
