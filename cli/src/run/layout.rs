//! The order of a file's axes, and the shapes of its q, k and v.

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use safetensors::tensor::TensorView;
use serde::Serialize;
use tilewise::{Attention, Dims, Problem, Tensor};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LayoutArg {
    /// That of --axes, unless the file's own o is reproduced in the other and missed in this
    #[default]
    Auto,
    /// By batch, heads, length, dim
    Bhsd,
    /// By batch, length, heads, dim, even where the axes are bhsd: a transposed array that was saved without copying it
    Bshd,
}

/// An order of axes: of the sizes in a file's header, or of its numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Layout {
    /// (batch, heads, length, dim), as in ONNX and torch's `scaled_dot_product_attention`
    #[default]
    Bhsd,
    /// (batch, length, heads, dim), as in flash-attn and JAX
    Bshd,
    /// A packed batch: (tokens, heads, dim), in no other order.
    #[value(skip)]
    Thd,
}

impl Layout {
    /// The other one that a batch which isn't packed may have.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Bhsd => Self::Bshd,
            Self::Bshd => Self::Bhsd,
            Self::Thd => Self::Thd,
        }
    }

    pub(super) fn axes(self) -> &'static str {
        match self {
            Self::Bhsd => "(batch, heads, length, dim)",
            Self::Bshd => "(batch, length, heads, dim)",
            Self::Thd => "(tokens, heads, dim)",
        }
    }

    /// As flags call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bhsd => "bhsd",
            Self::Bshd => "bshd",
            Self::Thd => "thd",
        }
    }
}

/// The order of axes that takes (batch, length, heads, dim) to (batch, heads, length, dim), and back.
pub(super) const SWAPPED: [usize; 4] = [0, 2, 1, 3];

/// The elements of a tensor of (batch, heads, length, dim), or of a packed batch, in some order.
pub(super) fn read(tensor: &Tensor, layout: Layout) -> tilewise::Result<Vec<f32>> {
    match layout {
        Layout::Bhsd | Layout::Thd => tensor.read(),
        Layout::Bshd => tensor.permute(&SWAPPED)?.read(),
    }
}

pub(super) fn shape(name: &str, view: &TensorView<'_>, axes: Layout) -> Result<[usize; 4]> {
    match *view.shape() {
        [batch, a, b, dim] => Ok([batch, a, b, dim]),
        [a, b, dim] => Ok([1, a, b, dim]),
        ref other => {
            let all = axes.axes();
            bail!("{name} is {other:?}; accepted: {all}, or ({} for batch 1", all.trim_start_matches("(batch, "))
        }
    }
}

/// (batch, heads, length, dim) of sizes in some order.
pub(super) fn heads_first(shape: [usize; 4], axes: Layout) -> [usize; 4] {
    if axes == Layout::Bshd { SWAPPED.map(|axis| shape[axis]) } else { shape }
}

pub(super) fn packed_shape(name: &str, view: &TensorView<'_>) -> Result<Vec<usize>> {
    let shape = view.shape();
    ensure!(shape.len() == 3, "{name} is {shape:?}; accepted: (tokens, heads, dim), as the file holds cu_seqlens");
    Ok(shape.to_vec())
}

/// The dims of shapes in some order of axes. None if they don't fit together; an error if nothing can be computed of them.
fn fit(shapes: &[[usize; 4]; 3], axes: Layout) -> Option<tilewise::Result<Dims>> {
    let [[batch, q_heads, q_len, head_dim], [k_batch, kv_heads, kv_len, k_dim], [v_batch, v_heads, v_len, value_dim]] =
        shapes.map(|shape| heads_first(shape, axes));
    let fit = k_batch == batch && v_batch == batch && v_heads == kv_heads && v_len == kv_len && k_dim == head_dim;
    let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    fit.then(|| Problem::new(dims, Attention::full()).map(|_| dims))
}

pub(super) fn dims(shapes: &[[usize; 4]; 3], axes: Layout) -> Result<Dims> {
    let hint = || match (axes.other(), fit(shapes, axes.other())) {
        (other, Some(Ok(_))) => format!("; as {} they fit: --axes {}", other.axes(), other.name()),
        _ => String::new(),
    };
    match fit(shapes, axes) {
        Some(Ok(dims)) => Ok(dims),
        Some(Err(error)) => bail!("{error}{}", hint()),
        None => {
            let [q, k, v] = shapes;
            bail!(
                "q {q:?}, k {k:?}, v {v:?} don't fit together; accepted: one batch; k and v of the same heads and length; q and \
                 k of the same dim{}",
                hint()
            )
        }
    }
}

pub(super) fn packed_dims([q, k, v]: &[Vec<usize>; 3], batch: usize) -> Result<Dims> {
    let (&[q_len, q_heads, head_dim], &[kv_len, kv_heads, k_dim], &[v_len, v_heads, value_dim]) =
        (&q[..], &k[..], &v[..])
    else {
        bail!("q {q:?}, k {k:?}, v {v:?}; accepted: three axes each");
    };
    ensure!(
        v_heads == kv_heads && v_len == kv_len && k_dim == head_dim,
        "q {q:?}, k {k:?}, v {v:?} don't fit together; accepted: k and v of the same tokens and heads; q and k of the same dim"
    );
    Ok(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim })
}
