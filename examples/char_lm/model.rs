//! A small transformer: embedding, layers of attention with rotary positions and of an MLP, layer norm before each, logits. Everything runs
//! on the device: matrix products, attention and its gradients are the engine's, the rest is `ops.wgsl`.
//!
//! A matrix of activations has a row a token, `batch · length` of them; tokens go in as rows that are 1 at their character, so that looking
//! up an embedding and adding up its gradient are matrix products.

use anyhow::Result;
use tilewise::{
    Attention, AttentionOutput, BackwardBindings, BackwardInputs, Bindings, Engine, Gradients, Inputs, Tensor, wgpu,
};

use crate::ops::Ops;

#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) characters: usize,
    pub(crate) dim: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) layers: usize,
    /// Mask and scale.
    pub(crate) attention: Attention,
}

impl Config {
    /// Columns of q, of k, of v and of o: all heads side by side.
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// A parameter, with what Adam keeps of it.
#[derive(Debug)]
pub(crate) struct Parameter {
    #[cfg_attr(not(test), expect(dead_code, reason = "what a failing test calls it"))]
    pub(crate) name: String,
    pub(crate) value: Tensor,
    moments: [Tensor; 2],
}

/// The parameters of a layer, or the tensors of their gradients.
struct Layer<T> {
    norm_1: T,
    qkv: T,
    attended: T,
    norm_2: T,
    up: T,
    down: T,
}

/// How many parameters a layer has; before those of the layers there are 3.
const OF_LAYER: usize = 6;

/// What a layer computed and its gradient needs.
struct Saved {
    x: Tensor,
    moments_1: Tensor,
    normed_1: Tensor,
    /// (tokens, 3 heads head_dim), after rope.
    qkv: Tensor,
    /// (tokens, heads head_dim)
    o: Tensor,
    lse: Tensor,
    middle: Tensor,
    moments_2: Tensor,
    normed_2: Tensor,
    up: Tensor,
    activated: Tensor,
}

/// A forward pass.
pub(crate) struct Pass {
    /// (tokens, characters)
    pub(crate) logits: Tensor,
    tokens: Tensor,
    layers: Vec<Saved>,
    last: Tensor,
    moments: Tensor,
    normed: Tensor,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: Config,
    pub(crate) parameters: Vec<Parameter>,
    ops: Ops,
    steps: i32,
}

impl Model {
    pub(crate) fn new(engine: &Engine, config: Config, seed: u64) -> Result<Self> {
        let Config { characters, dim, head_dim, layers, .. } = config;
        let inner = config.inner();
        assert!(head_dim.is_multiple_of(2), "rope turns pairs");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut parameters = Vec::new();
        let mut add = |name: String, [rows, columns]: [usize; 2], values: Vec<f32>| -> Result<()> {
            let value = engine.upload(&values, [rows, columns])?;
            let zeros = vec![0.0f32; rows * columns];
            let moment = || engine.upload(&zeros, [rows, columns]);
            parameters.push(Parameter { name, value, moments: [moment()?, moment()?] });
            Ok(())
        };
        // Variance 1 in, variance 1 out; what is added to the residual stream is smaller, the more of it there is.
        let mut matrix = |rows: usize, columns: usize, size: f32| -> Vec<f32> {
            (0..rows * columns).map(|_| size * normal(&mut random) / (rows as f32).sqrt()).collect()
        };
        let gain = || [vec![1.0; dim], vec![0.0; dim]].concat();
        let to_residual = 1.0 / (2.0 * layers as f32).sqrt();
        add("embedding".into(), [characters, dim], matrix(characters, dim, (characters as f32).sqrt()))?;
        add("norm".into(), [2, dim], gain())?;
        add("logits".into(), [dim, characters], matrix(dim, characters, 1.0))?;
        for layer in 0..layers {
            let name = |what| format!("layer {layer}: {what}");
            add(name("norm_1"), [2, dim], gain())?;
            add(name("qkv"), [dim, 3 * inner], matrix(dim, 3 * inner, 1.0))?;
            add(name("attended"), [inner, dim], matrix(inner, dim, to_residual))?;
            add(name("norm_2"), [2, dim], gain())?;
            add(name("up"), [dim, 4 * dim], matrix(dim, 4 * dim, 1.0))?;
            add(name("down"), [4 * dim, dim], matrix(4 * dim, dim, to_residual))?;
        }
        Ok(Self { config, parameters, ops: Ops::new(engine), steps: 0 })
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.ops.engine()
    }

    fn value(&self, index: usize) -> &Tensor {
        &self.parameters[index].value
    }

    fn layer(&self, index: usize) -> Layer<&Tensor> {
        let value = |n| self.value(3 + OF_LAYER * index + n);
        Layer { norm_1: value(0), qkv: value(1), attended: value(2), norm_2: value(3), up: value(4), down: value(5) }
    }

    /// Characters as rows that are 1 at their number.
    pub(crate) fn one_hot(&self, tokens: &[u8]) -> Result<Tensor> {
        let characters = self.config.characters;
        let mut rows = vec![0.0f32; tokens.len() * characters];
        for (row, &token) in rows.chunks_exact_mut(characters).zip(tokens) {
            row[usize::from(token)] = 1.0;
        }
        Ok(self.engine().upload(&rows, [tokens.len(), characters])?)
    }

    /// q, k and v of a fused projection, each (batch, heads, length, head_dim), as they lie in it.
    fn heads(&self, qkv: &Tensor, batch: usize) -> Result<[Tensor; 3]> {
        let (qkv, inner) = (qkv.unflatten(0, batch)?, self.config.inner());
        let part = |n: usize| qkv.slice(2, n * inner..(n + 1) * inner)?.heads(self.config.heads);
        Ok([part(0)?, part(1)?, part(2)?])
    }

    /// The logits of what comes after each token, under a mask and a scale.
    pub(crate) fn forward(&self, tokens: &[u8], batch: usize, attention: &Attention) -> Result<Pass> {
        let (ops, engine) = (&self.ops, self.engine());
        let tokens = self.one_hot(tokens)?;
        let mut x = engine.matmul(&tokens, self.value(0))?;
        let mut layers = Vec::new();
        for index in 0..self.config.layers {
            let layer = self.layer(index);
            let (normed_1, moments_1) = ops.layer_norm(&x, layer.norm_1)?;
            let (qkv, o, lse) = self.attend(&engine.matmul(&normed_1, layer.qkv)?, batch, attention)?;
            let middle = ops.add(&x, &engine.matmul(&o, layer.attended)?)?;
            let (normed_2, moments_2) = ops.layer_norm(&middle, layer.norm_2)?;
            let up = engine.matmul(&normed_2, layer.up)?;
            let activated = ops.gelu(&up)?;
            let next = ops.add(&middle, &engine.matmul(&activated, layer.down)?)?;
            layers.push(Saved { x, moments_1, normed_1, qkv, o, lse, middle, moments_2, normed_2, up, activated });
            x = next;
        }
        let (normed, moments) = ops.layer_norm(&x, self.value(1))?;
        let logits = engine.matmul(&normed, self.value(2))?;
        Ok(Pass { logits, tokens, layers, last: x, moments, normed })
    }

    /// Turns q and k in place, and attends: q, k and v, o as the projection after it wants it, (tokens, heads head_dim), and lse.
    fn attend(&self, qkv: &Tensor, batch: usize, attention: &Attention) -> Result<(Tensor, Tensor, Tensor)> {
        let Config { heads, head_dim, .. } = self.config;
        let (engine, tokens) = (self.engine(), qkv.shape()[0]);
        self.ops.rope(qkv, tokens / batch, head_dim, 1.0)?;
        let [q, k, v] = self.heads(qkv, batch)?;
        let inputs = Inputs::new(&q, &k, &v);
        let plan = engine.plan(&inputs.problem(attention)?)?;
        let o = self.ops.alloc(&[tokens, self.config.inner()])?;
        let lse = self.ops.alloc(&[batch, heads, tokens / batch])?;
        let workspace = engine.alloc_workspace(&plan)?;
        let o_heads = o.unflatten(0, batch)?.heads(heads)?;
        let bindings = Bindings { inputs, o: &o_heads, lse: &lse, workspace: workspace.as_ref() };
        self.submit(|encoder| plan.record(encoder, &bindings))?;
        Ok((qkv.clone(), o, lse))
    }

    /// The gradient of a projection that `attend` read, from that of its o.
    fn attend_grad(&self, saved: &Saved, grad_o: &Tensor, batch: usize, attention: &Attention) -> Result<Tensor> {
        let Config { heads, head_dim, .. } = self.config;
        let engine = self.engine();
        let [q, k, v] = self.heads(&saved.qkv, batch)?;
        let inputs = Inputs::new(&q, &k, &v);
        let plan = engine.plan_backward(&inputs.problem(attention)?)?;
        let grad_qkv = self.ops.alloc(saved.qkv.shape())?;
        let [dq, dk, dv] = self.heads(&grad_qkv, batch)?;
        let gradients = Gradients { dq, dk, dv, dbias: None, dsinks: None };
        let as_heads = |x: &Tensor| x.unflatten(0, batch)?.heads(heads);
        let (o, grad_o) = (as_heads(&saved.o)?, as_heads(grad_o)?);
        let given = BackwardInputs { inputs, o: &o, lse: &saved.lse, grad_o: &grad_o, grad_lse: None };
        let workspace = engine.alloc_backward_workspace(&plan)?;
        let bindings = BackwardBindings { inputs: given, gradients: &gradients, workspace: workspace.as_ref() };
        self.submit(|encoder| plan.record(encoder, &bindings))?;
        self.ops.rope(&grad_qkv, grad_qkv.shape()[0] / batch, head_dim, -1.0)?;
        Ok(grad_qkv)
    }

    fn submit(&self, record: impl FnOnce(&mut wgpu::CommandEncoder) -> tilewise::Result<()>) -> Result<()> {
        let mut encoder = self.engine().device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        record(&mut encoder)?;
        self.engine().queue().submit([encoder.finish()]);
        Ok(())
    }

    /// The loss of each token, and the gradients of their mean in the order of the parameters.
    pub(crate) fn gradients(
        &self,
        tokens: &[u8],
        targets: &[u8],
        batch: usize,
        attention: &Attention,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (ops, engine) = (&self.ops, self.engine());
        let pass = self.forward(tokens, batch, attention)?;
        let (losses, grad) = ops.cross_entropy(&pass.logits, &self.one_hot(targets)?)?;
        let logits = ops.weight_grad(&pass.normed, &grad)?;
        let grad = engine.matmul_transposed(&grad, self.value(2))?;
        let [mut grad, norm] = ops.layer_norm_grad(&pass.last, self.value(1), &pass.moments, &grad)?;
        let mut of_layers = Vec::new();
        for (index, saved) in pass.layers.iter().enumerate().rev() {
            let layer = self.layer(index);
            let down = ops.weight_grad(&saved.activated, &grad)?;
            let of_up = ops.gelu_grad(&saved.up, &engine.matmul_transposed(&grad, layer.down)?)?;
            let up = ops.weight_grad(&saved.normed_2, &of_up)?;
            let of_normed = engine.matmul_transposed(&of_up, layer.up)?;
            let [of_middle, norm_2] = ops.layer_norm_grad(&saved.middle, layer.norm_2, &saved.moments_2, &of_normed)?;
            grad = ops.add(&grad, &of_middle)?;
            let attended = ops.weight_grad(&saved.o, &grad)?;
            let of_o = engine.matmul_transposed(&grad, layer.attended)?;
            let of_qkv = self.attend_grad(saved, &of_o, batch, attention)?;
            let qkv = ops.weight_grad(&saved.normed_1, &of_qkv)?;
            let of_normed = engine.matmul_transposed(&of_qkv, layer.qkv)?;
            let [of_x, norm_1] = ops.layer_norm_grad(&saved.x, layer.norm_1, &saved.moments_1, &of_normed)?;
            grad = ops.add(&grad, &of_x)?;
            of_layers.push([norm_1, qkv, attended, norm_2, up, down]);
        }
        let embedding = ops.weight_grad(&pass.tokens, &grad)?;
        Ok((losses, [embedding, norm, logits].into_iter().chain(of_layers.into_iter().rev().flatten()).collect()))
    }

    /// A step of training; gives the mean loss before it.
    pub(crate) fn train(&mut self, tokens: &[u8], targets: &[u8], batch: usize, rate: f32) -> Result<f32> {
        let (losses, gradients) = self.gradients(tokens, targets, batch, &self.config.attention)?;
        self.steps += 1;
        for (Parameter { value, moments: [first, second], .. }, grad) in self.parameters.iter().zip(&gradients) {
            self.ops.adam([value, first, second], grad, rate, self.steps)?;
        }
        mean(&losses)
    }

    /// The mean loss under a mask and a scale.
    pub(crate) fn loss(&self, tokens: &[u8], targets: &[u8], batch: usize, attention: &Attention) -> Result<f32> {
        let pass = self.forward(tokens, batch, attention)?;
        mean(&self.ops.cross_entropy(&pass.logits, &self.one_hot(targets)?)?.0)
    }

    /// The mean entropy of the rows of attention in each layer, in nats: 0 where a row looks at one key alone.
    ///
    /// A row's weights p are never there to be summed over, and need not be: their entropy is lse - Σ p·score, and Σ p·score is the scale
    /// times q·(Σ p k), which attention gives with k in the place of v.
    pub(crate) fn entropy(&self, tokens: &[u8], batch: usize) -> Result<Vec<f32>> {
        let attention = &self.config.attention;
        let pass = self.forward(tokens, batch, attention)?;
        let of_layer = |saved: &Saved| -> Result<f32> {
            let [q, k, _] = self.heads(&saved.qkv, batch)?;
            let inputs = Inputs::new(&q, &k, &k);
            let scale = inputs.problem(attention)?.softmax_scale();
            let AttentionOutput { o, lse } = self.engine().attention_with(&inputs, attention)?;
            let (q, o, lse) = (q.read()?, o.read()?, lse.read()?);
            let rows = q.chunks_exact(self.config.head_dim).zip(o.chunks_exact(self.config.head_dim)).zip(&lse);
            let of_row = |((q, mean_k), lse): ((&[f32], &[f32]), &f32)| {
                lse - scale * q.iter().zip(mean_k).map(|(q, k)| q * k).sum::<f32>()
            };
            Ok(rows.map(of_row).sum::<f32>() / lse.len() as f32)
        };
        pass.layers.iter().map(of_layer).collect()
    }
}

fn mean(x: &Tensor) -> Result<f32> {
    let x = x.read()?;
    Ok(x.iter().sum::<f32>() / x.len() as f32)
}

/// Of mean 0 and variance 1 (Box and Muller).
fn normal(random: &mut fastrand::Rng) -> f32 {
    let radius = (-2.0 * (1.0 - random.f32()).ln()).sqrt();
    radius * (core::f32::consts::TAU * random.f32()).cos()
}
