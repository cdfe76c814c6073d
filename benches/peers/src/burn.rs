//! Burn, whose wgpu backend runs cubek's kernels, the one that its autotuning finds the fastest.

use anyhow::{Context, Result, anyhow};
use burn_tensor::module::attention;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Device, Tensor, TensorData};

use crate::{HEAD_DIM, HEADS, Inputs, Peer};

struct Burn {
    device: Device,
    adapter: String,
    call: Option<([Tensor<4>; 3], Option<Tensor<4>>, AttentionModuleOptions)>,
    /// The output, or the gradients of q, k and v.
    output: Vec<Tensor<4>>,
}

pub fn open() -> Result<Box<dyn Peer>> {
    let (device, setup) = Device::wgpu_options().init_with_setup().map_err(|error| anyhow!("Burn: {error}"))?;
    let adapter = setup.adapter.get_info().name;
    Ok(Box::new(Burn { device, adapter, call: None, output: Vec::new() }))
}

impl Peer for Burn {
    fn name(&self) -> &'static str {
        "Burn"
    }

    fn package(&self) -> &'static str {
        "burn-tensor"
    }

    fn adapter(&self) -> String {
        self.adapter.clone()
    }

    fn upload(&mut self, inputs: &Inputs) -> Result<()> {
        let shape = [1, HEADS, inputs.tokens, HEAD_DIM];
        let upload = |data: &[f32]| Tensor::from_data(TensorData::new(data.to_vec(), shape), &self.device);
        let options = AttentionModuleOptions { is_causal: inputs.causal, ..Default::default() };
        let qkv = [upload(&inputs.q), upload(&inputs.k), upload(&inputs.v)];
        self.call = Some((qkv, inputs.grad_o.as_deref().map(upload), options));
        self.device.sync().map_err(|error| anyhow!("{error:?}"))
    }

    fn run(&mut self) -> Result<()> {
        let ([q, k, v], grad_o, options) = self.call.clone().context("upload comes first")?;
        self.output = match grad_o {
            None => vec![attention(q, k, v, None, None, options)],
            Some(grad_o) => {
                let qkv = [q, k, v].map(|tensor| tensor.autodiff().require_grad());
                let [q, k, v] = qkv.clone();
                let out = attention(q, k, v, None, None, options);
                let gradients = (out * grad_o.autodiff()).sum().backward();
                let of = |tensor: &Tensor<4>| tensor.grad(&gradients).context("no gradient");
                qkv.iter().map(of).collect::<Result<_>>()?
            }
        };
        self.device.sync().map_err(|error| anyhow!("{error:?}"))
    }

    fn read(&mut self) -> Result<Vec<f32>> {
        let read = |tensor: &Tensor<4>| tensor.clone().into_data().try_to_vec().map_err(|error| anyhow!("{error:?}"));
        Ok(self.output.iter().map(read).collect::<Result<Vec<Vec<f32>>>>()?.concat())
    }
}
