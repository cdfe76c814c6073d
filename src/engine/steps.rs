//! Plans and tensors made into dispatches.

use core::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::{Gpu, Kernel, Launch, Purpose, Tensor};
use crate::kernels::{
    AttentionParams, Stored, Strides, UNBOUNDED, flash_fwd, forward, matmul, merge_states, product, softmax_rows,
    to_u32,
};
use crate::plan::{Extras, Plan, Route, loops_per_pass};
use crate::problem::{Align, DType, Dims, MAX_LEN, Problem};

use super::inputs::{AttentionOutput, Bindings, Inputs, Sharing};

/// One kernel's work: a number of blocks that don't depend on each other.
pub(super) struct Step {
    pub(super) kernel: Kernel,
    pub(super) tensors: Vec<Tensor>,
    pub(super) blocks: u64,
    /// The uniform for a range of the blocks.
    pub(super) params: Box<dyn Fn(Range<u32>) -> Vec<u8>>,
}

impl Step {
    pub(super) fn record(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder, blocks: Range<u64>) -> Result<()> {
        let workgroups = blocks.end - blocks.start;
        let as_u32 = to_u32_block(blocks.start)?..to_u32_block(blocks.end)?;
        let params = (self.params)(as_u32);
        gpu.record(encoder, &Launch { kernel: &self.kernel, params: &params, tensors: &self.tensors, workgroups })
    }
}

fn to_u32_block(block: u64) -> Result<u32> {
    u32::try_from(block).map_err(|_| Error::unsupported("workgroups of one call", block, u32::MAX.into()))
}

/// A copy into the workspace, before the steps.
pub(super) struct Copy {
    from: Tensor,
    /// In bytes.
    to: u64,
}

/// All of a call, in order: copies, then steps.
pub(super) struct Work {
    pub(super) copies: Vec<Copy>,
    pub(super) workspace: Option<Tensor>,
    pub(super) steps: Vec<Step>,
}

impl Work {
    /// What a plan does with these tensors.
    pub(super) fn of(gpu: &Arc<Gpu>, plan: &Plan, bindings: &Bindings<'_>) -> Result<Self> {
        let sharing = bindings.check(gpu, plan)?;
        match plan.route() {
            Route::Tiled { variant, keys_per_pass } => {
                let workspace = extras_in(plan.extras(), bindings.workspace)?;
                let copies = copies(gpu, plan.problem(), plan.extras(), &bindings.inputs)?;
                let mut variant = variant.clone();
                variant.options_mut().shared_buffer = sharing == Sharing::OneBuffer;
                let steps = forward_steps(gpu, variant, *keys_per_pass, plan, bindings, workspace.as_ref())?;
                Ok(Self { copies, workspace, steps })
            }
            &Route::Naive { scores, softmax, values } => {
                if sharing == Sharing::OneBuffer {
                    return Err(Error::invalid(
                        "an output in the buffer of an input, naive; accepted: a buffer of its own",
                    ));
                }
                let steps = naive_steps(gpu, scores, softmax, values, plan.problem(), bindings)?;
                Ok(Self { copies: Vec::new(), workspace: None, steps })
            }
        }
    }

    pub(super) fn record(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        self.record_copies(gpu, encoder)?;
        self.steps.iter().try_for_each(|step| step.record(gpu, encoder, 0..step.blocks))
    }

    /// Records the copies; they come before the first step.
    pub(super) fn record_copies(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let Some(workspace) = &self.workspace else { return Ok(()) };
        for Copy { from, to } in &self.copies {
            let (words, _) = from.extent_words();
            let bytes = words.end - words.start;
            gpu.scoped(|| {
                let to = 4 * workspace.offset() as u64 + to;
                encoder.copy_buffer_to_buffer(from.raw_buffer(), words.start, workspace.raw_buffer(), to, bytes);
            })?;
        }
        Ok(())
    }
}

/// The workspace as the small tables of a call; None where it has none.
fn extras_in(extras: &Extras, workspace: Option<&Tensor>) -> Result<Option<Tensor>> {
    if extras.words == 0 { Ok(None) } else { some_extras_in(extras, workspace).map(Some) }
}

/// The same where there is one.
pub(super) fn some_extras_in(extras: &Extras, workspace: Option<&Tensor>) -> Result<Tensor> {
    let words = extras.words as usize;
    let Some(workspace) = workspace.filter(|it| it.is_dense() && it.dtype().bytes() == 4 && it.elems() >= words) else {
        let given =
            workspace.map_or("no workspace".to_owned(), |it| format!("a workspace of {} {}", it.elems(), it.dtype()));
        return Err(Error::invalid(format!("{given}; accepted: one of {} bytes, dense, of f32 or u32", 4 * words)));
    };
    let usage = workspace.raw_buffer().usage();
    if !usage.contains(wgpu::BufferUsages::COPY_DST) {
        return Err(Error::invalid(format!(
            "a workspace in a buffer of usage {usage:?}; accepted: COPY_DST among them"
        )));
    }
    workspace.slice_words(words)
}

/// What fills the small tables: a buffer made for what the host knows, and the caller's tensors.
pub(super) fn copies(gpu: &Arc<Gpu>, problem: &Problem, extras: &Extras, inputs: &Inputs<'_>) -> Result<Vec<Copy>> {
    let mut copies = Vec::new();
    let table = Extras::host_tables(problem);
    if !table.is_empty() {
        let from = Tensor::upload_for(gpu, "tilewise.tables", &table, &[table.len()], Purpose::Params)?;
        copies.push(Copy { from, to: 0 });
    }
    for (name, tensor, at) in [
        ("sinks", inputs.sinks, extras.sinks),
        ("ranges", inputs.ranges, extras.ranges),
        ("mod_data", inputs.mod_data, extras.mod_data),
    ] {
        let Some(tensor) = tensor.filter(|tensor| tensor.elems() > 0) else { continue };
        if !tensor.is_dense() {
            return Err(Error::invalid(format!(
                "{name} with strides {:?}; accepted: a dense tensor",
                tensor.strides()
            )));
        }
        let usage = tensor.raw_buffer().usage();
        if !usage.contains(wgpu::BufferUsages::COPY_SRC) {
            return Err(Error::invalid(format!(
                "{name} in a buffer of usage {usage:?}; accepted: COPY_SRC among them"
            )));
        }
        copies.push(Copy { from: tensor.clone(), to: 4 * u64::from(at) });
    }
    Ok(copies)
}

/// A tensor of two to four axes as (outer, inner, rows, columns).
pub(super) fn as_matrices(name: &str, tensor: &Tensor) -> Result<Tensor> {
    let rank = tensor.shape().len();
    if !(2..=4).contains(&rank) || tensor.dtype() != DType::F32 {
        return Err(Error::invalid(format!(
            "{name} of {} and shape {:?}; accepted: f32, two to four axes",
            tensor.dtype(),
            tensor.shape()
        )));
    }
    (rank..4).try_fold(tensor.clone(), |tensor, _| tensor.unflatten(0, 1))
}

pub(super) fn to_i32(value: impl Into<i128>) -> Result<i32> {
    let value = value.into();
    i32::try_from(value).map_err(|_| Error::invalid(format!("{value}; accepted: within {}..={}", i32::MIN, i32::MAX)))
}

/// Scores, softmax in place, values: each a pass over score matrices that lie in the workspace.
fn naive_steps(
    gpu: &Arc<Gpu>,
    scores: product::Variant,
    softmax: softmax_rows::Variant,
    values: product::Variant,
    problem: &Problem,
    bindings: &Bindings<'_>,
) -> Result<Vec<Step>> {
    let Bindings { inputs: Inputs { q, k, v, .. }, o, lse, workspace } = *bindings;
    let Dims { batch, q_heads, q_len, kv_len, head_dim, value_dim, .. } = problem.dims;
    if !lse.is_dense() {
        return Err(Error::invalid(format!("lse with strides {:?}; accepted: a dense tensor", lse.strides())));
    }
    let s = match workspace {
        Some(workspace) => workspace.reinterpret(&[batch, q_heads, q_len, kv_len])?,
        // Without scores there is nothing to keep: an empty view of any other tensor serves.
        None if problem.dims.score_elems() == 0 => q.reinterpret(&[batch, q_heads, q_len, kv_len])?,
        None => {
            return Err(Error::invalid(format!("no workspace; accepted: one of {} bytes", problem.score_bytes())));
        }
    };
    // Row i of the scores sees the keys j <= i + diagonal.
    let causal = problem.attention.is_causal();
    let diagonal = if causal { problem.attention.align.offset(q_len as i128, kv_len as i128) } else { kv_len as i128 };
    let diagonal = to_i32(diagonal)?;
    let product = |variant, tensors, n, k, alpha| Product { variant, tensors, m: q_len, n, k, diagonal, alpha };
    let mut steps = product(scores, [q, k, &s], kv_len, head_dim, problem.softmax_scale()).steps(gpu)?;
    steps.push(softmax_step(gpu, softmax, &s, lse, [batch * q_heads, q_len, kv_len], diagonal)?);
    steps.extend(product(values, [&s, v, o], value_dim, kv_len, 1.0).steps(gpu)?);
    Ok(steps)
}

/// Of a tensor of attention, (batch, heads, rows, dim), or (rows, heads, dim) of a packed batch.
pub(super) fn strides_of(gpu: &Gpu, name: &str, tensor: &Tensor, packed: bool) -> Result<Strides> {
    if packed {
        // Sequences find their rows in the table: the batch has no stride.
        let strides = Strides::of_matrices(gpu, name, &tensor.unflatten(0, 1)?.permute(&[0, 2, 1, 3])?)?;
        Ok(Strides { outer: 0, ..strides })
    } else {
        Strides::of_matrices(gpu, name, tensor)
    }
}

/// Of one number a row, (batch, heads, rows), or (heads, rows) of a packed batch.
pub(super) fn lse_strides(gpu: &Gpu, name: &str, tensor: &Tensor, packed: bool) -> Result<Strides> {
    if packed {
        Ok(Strides { outer: 0, ..Strides::of_vectors(gpu, name, &tensor.unflatten(0, 1)?)? })
    } else {
        Strides::of_vectors(gpu, name, tensor)
    }
}

/// Of a tensor that is read broadcast, and whether neighbouring keys have elements of their own.
fn broadcast_strides(gpu: &Gpu, name: &str, tensor: Option<&Tensor>) -> Result<(Strides, u32)> {
    let Some(tensor) = tensor else { return Ok((Strides::NONE, 0)) };
    let mut strides = Strides::of_matrices(gpu, name, tensor)?;
    let along = |axis: usize, stride: u32| if tensor.shape()[axis] == 1 { 0 } else { stride };
    (strides.outer, strides.inner, strides.row) =
        (along(0, strides.outer), along(1, strides.inner), along(2, strides.row));
    Ok((strides, u32::from(tensor.shape()[3] != 1)))
}

/// A bound on keys as the kernel takes it.
fn bound(reach: Option<u32>) -> i32 {
    // Beyond the longest input a bound is none.
    let bound = reach.filter(|&reach| (reach as usize) < MAX_LEN);
    bound.and_then(|reach| i32::try_from(reach).ok()).unwrap_or(UNBOUNDED)
}

/// What every tiled kernel is told: by a dispatch of all blocks and keys, of which the caller says how many blocks of how many rows.
/// `base`: where the small tables begin in the window that the kernel sees.
pub(super) fn attention_params(
    gpu: &Gpu,
    problem: &Problem,
    places: &Extras,
    inputs: &Inputs<'_>,
    base: u32,
) -> Result<AttentionParams> {
    let (dims, options) = (&problem.dims, &problem.attention);
    let packed = options.is_packed();
    let (bias, bias_key) = broadcast_strides(gpu, "bias", inputs.bias)?;
    let (mask, _) = broadcast_strides(gpu, "mask", inputs.mask.map(|mask| &mask.words))?;
    let [left, right] = options.reach();
    let ranges = problem.ranges.unwrap_or_default();
    Ok(AttentionParams {
        q: strides_of(gpu, "q", inputs.q, packed)?,
        k: strides_of(gpu, "k", inputs.k, packed)?,
        v: strides_of(gpu, "v", inputs.v, packed)?,
        bias,
        mask,
        q_len: to_u32(dims.q_len)?,
        kv_len: to_u32(dims.kv_len)?,
        head_dim: to_u32(dims.head_dim)?,
        value_dim: to_u32(dims.value_dim)?,
        q_heads: to_u32(dims.q_heads)?,
        group_size: to_u32(dims.group_size())?,
        q_blocks: 0,
        first_block: 0,
        end_block: 0,
        first_key: 0,
        end_key: u32::MAX,
        rows: if packed { 0 } else { to_u32(dims.q_len)? },
        bottom_right: u32::from(options.align == Align::BottomRight),
        left: bound(left),
        right: bound(right),
        scale: problem.softmax_scale(),
        softcap: options.softcap.unwrap_or(1.0),
        bias_key,
        mask_key: u32::from(inputs.mask.is_some_and(|mask| mask.shape()[3] != 1)),
        sequences: base + places.sequences,
        slopes: base + places.slopes,
        slopes_batch: places.slopes_batch,
        sinks: base + places.sinks,
        ranges: base + places.ranges,
        ranges_batch: if ranges[0] == 1 { 0 } else { to_u32(2 * ranges[1] * ranges[2])? },
        ranges_head: if ranges[1] == 1 { 0 } else { to_u32(2 * ranges[2])? },
        mod_data: base + places.mod_data,
        mod_words: to_u32(problem.mod_words.unwrap_or(0))?,
    })
}

fn forward_steps(
    gpu: &Arc<Gpu>,
    variant: forward::Variant,
    keys_per_pass: u32,
    plan: &Plan,
    bindings: &Bindings<'_>,
    extras: Option<&Tensor>,
) -> Result<Vec<Step>> {
    let (problem, places) = (plan.problem(), plan.extras());
    let Bindings { inputs, o, lse, .. } = *bindings;
    let dims = &problem.dims;
    let packed = problem.attention.is_packed();
    let (longest_q, longest_kv) = problem.longest();
    let q_blocks = longest_q.div_ceil(variant.block_q() as usize);
    // Where the tables begin in the window that the kernel sees.
    let base = extras.map_or(Ok(0), |it| first_elem(gpu, it))?;
    let attention = attention_params(gpu, problem, places, &inputs, base)?;
    let params = flash_fwd::Params {
        attention: AttentionParams { q_blocks: to_u32(q_blocks)?, ..attention },
        out: strides_of(gpu, "o", o, packed)?,
        lse: lse_strides(gpu, "lse", lse, packed)?,
        last_pass: 0,
        sums: base + places.rows,
        sums_batch: if packed { 0 } else { to_u32(dims.q_heads * dims.q_len)? },
        sums_head: to_u32(dims.q_len)?,
    };
    let mut tensors = vec![inputs.q, inputs.k, inputs.v, o, lse];
    tensors.extend(inputs.bias);
    tensors.extend(inputs.mask.map(|mask| &mask.words));
    tensors.extend(extras);
    let tensors: Vec<Tensor> = tensors.into_iter().cloned().collect();
    let aligned = [(inputs.q, attention.q), (inputs.k, attention.k), (inputs.v, attention.v)];
    let kernel = variant.aligned(aligned.map(|(tensor, strides)| (strides, tensor.elems() == 0))).kernel();
    let blocks = (q_blocks * dims.q_heads * dims.batch) as u64;
    let pass = |first_key: usize| -> Result<Step> {
        let end_key = longest_kv.min(first_key.saturating_add(keys_per_pass as usize));
        let last_pass = u32::from(end_key == longest_kv);
        let attention =
            AttentionParams { first_key: to_u32(first_key)?, end_key: to_u32(end_key)?, ..params.attention };
        let params = flash_fwd::Params { attention, last_pass, ..params };
        Ok(Step {
            kernel: kernel.clone(),
            tensors: tensors.clone(),
            blocks,
            params: Box::new(move |blocks| {
                bytemuck::bytes_of(&flash_fwd::Params { attention: params.attention.of_blocks(blocks), ..params })
                    .to_vec()
            }),
        })
    };
    // Without keys there is one pass all the same: it writes that there are none.
    (0..longest_kv.max(1)).step_by(keys_per_pass as usize).map(pass).collect()
}

pub(super) fn first_elem(gpu: &Gpu, tensor: &Tensor) -> Result<u32> {
    Ok(tensor.window(&gpu.limits)?.first_elem)
}

/// A batch of matrix products, for its steps.
pub(super) struct Product<'a> {
    pub(super) variant: product::Variant,
    /// a, b and c as (outer, inner, rows, columns).
    pub(super) tensors: [&'a Tensor; 3],
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) diagonal: i32,
    pub(super) alpha: f32,
}

impl Product<'_> {
    /// One for each part of k that the device goes through at once.
    pub(super) fn steps(self, gpu: &Gpu) -> Result<Vec<Step>> {
        let Self { variant, tensors: [a, b, c], m, n, k, diagonal, alpha } = self;
        let [outer, inner] = [a.shape()[0], a.shape()[1]];
        let m_blocks = m.div_ceil(variant.block_m() as usize);
        let n_blocks = n.div_ceil(variant.block_n() as usize);
        let params = matmul::Params {
            a: Strides::of_matrices(gpu, "a", a)?,
            b: Strides::of_matrices(gpu, "b", b)?,
            c: Strides::of_matrices(gpu, "c", c)?,
            m: to_u32(m)?,
            n: to_u32(n)?,
            k: to_u32(k)?,
            inner: to_u32(inner)?,
            group_size: to_u32(inner.checked_div(b.shape()[1]).unwrap_or(1))?,
            m_blocks: to_u32(m_blocks)?,
            n_blocks: to_u32(n_blocks)?,
            first_block: 0,
            end_block: 0,
            diagonal,
            alpha,
            first_k: 0,
            end_k: 0,
            zero: 0,
            pad_0: 0,
            pad_1: 0,
        };
        let variant = variant.aligned([(params.a, a.elems() == 0), (params.b, b.elems() == 0)]);
        let slices = loops_per_pass(variant.iterations_of_slice(), gpu.info.device_type);
        let part = slices.saturating_mul(variant.slice_k()) as usize;
        let of_part = |first_k: usize| -> Result<Step> {
            let end_k = k.min(first_k.saturating_add(part));
            let params = matmul::Params { first_k: to_u32(first_k)?, end_k: to_u32(end_k)?, ..params };
            Ok(Step {
                kernel: if first_k == 0 { variant } else { variant.adding() }.kernel(),
                tensors: [a, b, c].map(Clone::clone).to_vec(),
                blocks: (m_blocks * n_blocks * outer * inner) as u64,
                params: Box::new(move |blocks| {
                    let params = matmul::Params { first_block: blocks.start, end_block: blocks.end, ..params };
                    bytemuck::bytes_of(&params).to_vec()
                }),
            })
        };
        (0..k.max(1)).step_by(part).map(of_part).collect()
    }
}

/// Softmax in place over matrices of (matrices, rows of each, columns), row i reaching i + diagonal + 1 columns.
pub(super) fn softmax_step(
    gpu: &Gpu,
    variant: softmax_rows::Variant,
    x: &Tensor,
    lse: &Tensor,
    [matrices, rows, columns]: [usize; 3],
    diagonal: i32,
) -> Result<Step> {
    let params = softmax_rows::Params {
        x_offset: x.window(&gpu.limits)?.first_elem,
        lse_offset: lse.window(&gpu.limits)?.first_elem,
        columns: to_u32(columns)?,
        rows_per_matrix: to_u32(rows)?,
        diagonal,
        first_row: 0,
        end_row: 0,
        pad: 0,
    };
    Ok(Step {
        kernel: variant.kernel(),
        tensors: vec![x.clone(), lse.clone()],
        blocks: (matrices * rows) as u64,
        params: Box::new(move |blocks| {
            let params = softmax_rows::Params { first_row: blocks.start, end_row: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}

/// A state's o as (batch, heads, rows, dim) and its lse as (batch, heads, rows), of a packed batch too.
fn state_views(name: &str, state: &AttentionOutput) -> Result<(Tensor, Tensor)> {
    let AttentionOutput { o, lse } = state;
    let views = match (o.shape().len(), lse.shape().len()) {
        (4, 3) => (o.clone(), lse.clone()),
        (3, 2) => (o.unflatten(0, 1)?.permute(&[0, 2, 1, 3])?, lse.unflatten(0, 1)?),
        _ => return Err(state_error(name, state)),
    };
    let float = o.dtype().is_float() && lse.dtype() == DType::F32;
    if float && views.0.shape()[..3] == *views.1.shape() { Ok(views) } else { Err(state_error(name, state)) }
}

fn state_error(name: &str, AttentionOutput { o, lse }: &AttentionOutput) -> Error {
    Error::invalid(format!(
        "state {name} with o of {} and shape {:?}, lse of {} and shape {:?}; accepted: (batch, q_heads, q_len, value_dim) and \
         (batch, q_heads, q_len), or (tokens, q_heads, value_dim) and (q_heads, tokens), lse in f32",
        o.dtype(),
        o.shape(),
        lse.dtype(),
        lse.shape()
    ))
}

/// Two states into one, which is apart from both.
pub(super) fn merge_step(gpu: &Gpu, a: &AttentionOutput, b: &AttentionOutput, out: &AttentionOutput) -> Result<Step> {
    if a.o.shape() != b.o.shape() || a.lse.shape() != b.lse.shape() {
        return Err(Error::invalid(format!(
            "states of o {:?}, lse {:?} and o {:?}, lse {:?}; accepted: of the same shapes",
            a.o.shape(),
            a.lse.shape(),
            b.o.shape(),
            b.lse.shape()
        )));
    }
    let ((a_o, a_lse), (b_o, b_lse), (o, lse)) = (state_views("a", a)?, state_views("b", b)?, state_views("out", out)?);
    let variant = merge_states::Variant {
        a: Stored::of(a.o.dtype(), gpu.features),
        b: Stored::of(b.o.dtype(), gpu.features),
        out: out.o.dtype(),
        ..Default::default()
    };
    let &[batch, heads, rows, dim] = o.shape() else { return Err(state_error("out", out)) };
    let row_vecs = dim.div_ceil(4);
    let items = batch * heads * rows * row_vecs;
    let params = merge_states::Params {
        a: Strides::of_matrices(gpu, "o of state a", &a_o)?,
        b: Strides::of_matrices(gpu, "o of state b", &b_o)?,
        out: Strides::of_matrices(gpu, "o", &o)?,
        lse_a: Strides::of_vectors(gpu, "lse of state a", &a_lse)?,
        lse_b: Strides::of_vectors(gpu, "lse of state b", &b_lse)?,
        lse: Strides::of_vectors(gpu, "lse", &lse)?,
        heads: to_u32(heads)?,
        rows: to_u32(rows)?,
        dim: to_u32(dim)?,
        row_vecs: to_u32(row_vecs)?,
        items: to_u32(items)?,
        first_block: 0,
        end_block: 0,
        pad: 0,
    };
    Ok(Step {
        kernel: variant.kernel(),
        tensors: vec![a_o, b_o, a_lse, o, lse, b_lse],
        blocks: items.div_ceil(variant.threads as usize) as u64,
        params: Box::new(move |blocks| {
            let params = merge_states::Params { first_block: blocks.start, end_block: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}
