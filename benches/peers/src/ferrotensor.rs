//! ferrotensor, on wgpu 0.19: a thread a query row.

use anyhow::{Context, Result};
use ferrotensor_backend::{ComputeEngine, UnifiedTensor, WgpuContext};

use crate::{HEAD_DIM, HEADS, Inputs, Peer};

struct Ferrotensor {
    context: WgpuContext,
    engine: ComputeEngine,
    call: Option<Call>,
}

/// Tensors are (batch, tokens, heads, `head_dim`).
struct Call {
    tokens: usize,
    causal: bool,
    q: UnifiedTensor,
    k: UnifiedTensor,
    v: UnifiedTensor,
    out: UnifiedTensor,
    gradients: Option<Gradients>,
}

struct Gradients {
    grad_o: UnifiedTensor,
    /// Of q, k and v.
    of: [UnifiedTensor; 3],
}

pub fn open() -> Result<Box<dyn Peer>> {
    let context = pollster::block_on(WgpuContext::new());
    let engine = ComputeEngine::new(&context);
    Ok(Box::new(Ferrotensor { context, engine, call: None }))
}

/// Swaps the two outer axes.
fn swapped(data: &[f32], [outer, inner]: [usize; 2]) -> Vec<f32> {
    let row = |i: usize, o: usize| &data[(o * inner + i) * HEAD_DIM..][..HEAD_DIM];
    (0..inner).flat_map(|i| (0..outer).flat_map(move |o| row(i, o))).copied().collect()
}

impl Peer for Ferrotensor {
    fn name(&self) -> &'static str {
        "ferrotensor"
    }

    fn package(&self) -> &'static str {
        "ferrotensor-backend"
    }

    fn adapter(&self) -> String {
        self.context.adapter.get_info().name
    }

    fn upload(&mut self, inputs: &Inputs) -> Result<()> {
        let tokens = inputs.tokens;
        let shape = [1, tokens, HEADS, HEAD_DIM];
        let upload = |data: &[f32]| UnifiedTensor::new(&self.context, &swapped(data, [HEADS, tokens]), &shape);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|data| upload(data));
        let out = UnifiedTensor::zeros(&self.context, &shape);
        let zeros = || UnifiedTensor::zeros(&self.context, &shape);
        let gradients =
            inputs.grad_o.as_deref().map(|data| Gradients { grad_o: upload(data), of: [zeros(), zeros(), zeros()] });
        self.context.synchronize();
        self.call = Some(Call { tokens, causal: inputs.causal, q, k, v, out, gradients });
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let Call { causal, q, k, v, out, gradients, .. } = self.call.as_ref().context("upload comes first")?;
        self.engine.flash_attention_v2(&self.context, q, k, v, out, *causal, 0.0, 0, None);
        if let Some(Gradients { grad_o, of: [dq, dk, dv] }) = gradients {
            self.engine.flash_attention_v2_backward(&self.context, q, k, v, out, grad_o, dq, dk, dv, *causal);
        }
        self.context.synchronize();
        Ok(())
    }

    fn read(&mut self) -> Result<Vec<f32>> {
        let Call { tokens, out, gradients, .. } = self.call.as_ref().context("upload comes first")?;
        let read = |tensor: &UnifiedTensor| swapped(&pollster::block_on(tensor.to_vec(&self.context)), [*tokens, HEADS]);
        Ok(match gradients {
            None => read(out),
            Some(Gradients { of, .. }) => of.each_ref().map(read).concat(),
        })
    }
}
