//! What the tensors of a case become on the host: shapes, numbers and booleans.

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tilewise::DType;

use crate::tensors::{Numbers, elements};

/// The shape of a bias or mask with all four axes, (`batch`, `q_heads`, `q_len`, `kv_len`): those it lacks are the first, of size 1.
pub(super) fn four_axes(name: &str, shape: &[usize]) -> Result<[usize; 4]> {
    ensure!(
        shape.len() <= 4,
        "{name} is {shape:?}; accepted: up to four axes, (batch, q_heads, q_len, kv_len) from the right"
    );
    let mut axes = [1; 4];
    axes[4 - shape.len()..].copy_from_slice(shape);
    Ok(axes)
}

pub(super) fn booleans(name: &str, view: &TensorView<'_>) -> Result<Vec<bool>> {
    ensure!(view.dtype() == Dtype::BOOL, "{name} is {:?}; accepted: BOOL", view.dtype());
    Ok(view.data().iter().map(|&byte| byte != 0).collect())
}

/// Numbers of tokens: whole, and not below 0.
pub(super) fn lengths(name: &str, view: &TensorView<'_>) -> Result<Vec<u32>> {
    let numbers: Vec<i64> = match view.dtype() {
        Dtype::I32 => elements(view.data(), |bytes| i32::from_le_bytes(bytes).into()),
        Dtype::U32 => elements(view.data(), |bytes| u32::from_le_bytes(bytes).into()),
        Dtype::I64 => elements(view.data(), i64::from_le_bytes),
        other => bail!("{name} is {other:?}; accepted: I32, U32, I64"),
    };
    let length = |(index, number): (usize, i64)| {
        u32::try_from(number).with_context(|| format!("{name}[{index}] = {number}; accepted: 0 to {}", u32::MAX))
    };
    numbers.into_iter().enumerate().map(length).collect()
}

/// The numbers stored in a type, or None if it doesn't hold every one of them exactly.
pub(super) fn stored_exactly(numbers: &[f32], dtype: DType) -> Option<Numbers> {
    let back = |x: f32| match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        DType::F32 | DType::U32 => x,
    };
    let exact = numbers.iter().all(|&x| back(x) == x || x.is_nan());
    exact.then(|| Numbers::F32(numbers.to_vec()).stored(dtype))
}
