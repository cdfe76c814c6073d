//! Burn, whose wgpu backend runs cubek's kernels, the one that its autotuning finds the fastest.

use anyhow::{Context, Result, anyhow};
use burn_tensor::module::attention;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Device, Tensor, TensorData};

use crate::{HEAD_DIM, HEADS, Inputs, Peer};

struct Burn {
    device: Device,
    adapter: String,
    call: Option<([Tensor<4>; 3], AttentionModuleOptions)>,
    output: Option<Tensor<4>>,
}

pub fn open() -> Result<Box<dyn Peer>> {
    let (device, setup) = Device::wgpu_options().init_with_setup().map_err(|error| anyhow!("Burn: {error}"))?;
    let adapter = setup.adapter.get_info().name;
    Ok(Box::new(Burn { device, adapter, call: None, output: None }))
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
        self.call = Some(([upload(&inputs.q), upload(&inputs.k), upload(&inputs.v)], options));
        self.device.sync().map_err(|error| anyhow!("{error:?}"))
    }

    fn run(&mut self) -> Result<()> {
        let ([q, k, v], options) = self.call.clone().context("upload comes first")?;
        self.output = Some(attention(q, k, v, None, None, options));
        self.device.sync().map_err(|error| anyhow!("{error:?}"))
    }

    fn read(&mut self) -> Result<Vec<f32>> {
        let output = self.output.clone().context("run comes first")?;
        output.into_data().try_to_vec().map_err(|error| anyhow!("{error:?}"))
    }
}
