//! Gradients: what a backward call reads and writes, and its dispatches.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::{Gpu, Purpose, Tensor};
use crate::kernels::flash_bwd::{self, Makes};
use crate::kernels::{AttentionParams, Strides, flash_bwd_dsinks, flash_bwd_preprocess, score_mod_slopes, to_u32};
use crate::plan::{BackwardPart, BackwardPlan};
use crate::problem::{DType, Dims, Problem};

use super::inputs::{Inputs, check_tensors, in_one_buffer, not_a_buffer_of_its_own, wrong_tensor};
use super::steps::{Step, Work, attention_params, copies, first_elem, lse_strides, some_extras_in, strides_of};

/// What a backward call reads: what the forward call read, what it gave, and the gradients of that.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// What the forward call read.
    pub inputs: Inputs<'a>,
    /// What it gave: [`super::AttentionOutput::o`].
    pub o: &'a Tensor,
    /// Likewise [`super::AttentionOutput::lse`].
    pub lse: &'a Tensor,
    /// The gradient of o, of its shape and type.
    pub grad_o: &'a Tensor,
    /// The gradient of lse, f32, of its shape. None is 0. Of a row whose lse is -inf it counts for nothing.
    pub grad_lse: Option<&'a Tensor>,
}

/// The gradients of what a call read.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Of q, of its shape and type.
    pub dq: Tensor,
    /// Of k likewise: that of a key/value head is summed over its query heads.
    pub dk: Tensor,
    /// Of v likewise.
    pub dv: Tensor,
    /// Of the bias, of its own shape and type: summed over the axes along which it broadcasts. None where there is none, or in
    /// [`BackwardBindings`] where it isn't wanted: it takes as long as dq.
    pub dbias: Option<Tensor>,
    /// Of the sinks, f32, `(q_heads)`. None where there are none, or where it isn't wanted.
    pub dsinks: Option<Tensor>,
}

/// The tensors of one backward call. The gradients lie in buffers that the call doesn't read.
#[derive(Debug, Clone, Copy)]
pub struct BackwardBindings<'a> {
    /// What is read.
    pub inputs: BackwardInputs<'a>,
    /// Where the gradients go: of the shapes and types of what they are of, in any strides with a contiguous last axis.
    pub gradients: &'a Gradients,
    /// At least [`BackwardPlan::workspace_bytes`] of scratch memory, dense. None where there is no row.
    pub workspace: Option<&'a Tensor>,
}

impl BackwardPlan {
    /// Records the plan's dispatches into the caller's encoder, as [`crate::Plan::record`] does.
    ///
    /// # Errors
    /// As [`crate::Plan::record`]; [`Error::Invalid`] too for a gradient in a buffer that is read.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, bindings: &BackwardBindings<'_>) -> Result<()> {
        let gpu = bindings.inputs.inputs.q.gpu();
        work_of(gpu, self, bindings)?.record(gpu, encoder)
    }
}

impl BackwardBindings<'_> {
    /// Whether the tensors are what the plan says, on one device, and no gradient where something is read or another one written.
    fn check(&self, gpu: &Arc<Gpu>, plan: &BackwardPlan) -> Result<()> {
        let Self { inputs: BackwardInputs { inputs, o, lse, grad_o, grad_lse }, gradients, workspace } = *self;
        let problem = plan.problem();
        check_tensors(problem, &inputs, o, lse)?;
        let Gradients { dq, dk, dv, dbias, dsinks } = gradients;
        let alike = [
            ("grad_o", Some(grad_o), Some(o)),
            ("grad_lse", grad_lse, Some(lse)),
            ("dq", Some(dq), Some(inputs.q)),
            ("dk", Some(dk), Some(inputs.k)),
            ("dv", Some(dv), Some(inputs.v)),
            ("dbias", dbias.as_ref(), inputs.bias),
            ("dsinks", dsinks.as_ref(), inputs.sinks),
        ];
        for (name, tensor, of) in alike {
            match (tensor, of) {
                (Some(tensor), Some(of)) if tensor.shape() == of.shape() && tensor.dtype() == of.dtype() => {}
                (Some(tensor), Some(of)) => {
                    return Err(wrong_tensor(name, tensor, of.dtype(), of.shape()));
                }
                (Some(_), None) => {
                    return Err(Error::invalid(format!("{name} of what isn't there; accepted: none")));
                }
                (None, _) => {}
            }
        }
        if let Some(dsinks) = dsinks.as_ref().filter(|dsinks| !dsinks.is_dense()) {
            return Err(Error::invalid(format!(
                "dsinks with strides {:?}; accepted: a dense tensor",
                dsinks.strides()
            )));
        }
        let read = inputs.tensors().chain([("o", o), ("lse", lse), ("grad_o", grad_o)]);
        let read: Vec<_> = read.chain(grad_lse.map(|tensor| ("grad_lse", tensor))).collect();
        let written = [("dq", dq), ("dk", dk), ("dv", dv)].into_iter();
        let written = written.chain(dbias.as_ref().map(|tensor| ("dbias", tensor)));
        let written = written.chain(dsinks.as_ref().map(|tensor| ("dsinks", tensor)));
        let written: Vec<_> = written.chain(workspace.map(|tensor| ("workspace", tensor))).collect();
        for (name, other_name) in in_one_buffer(gpu, &read, &written, "gradients")? {
            if name == "workspace" || read.iter().any(|&(read, _)| read == other_name) {
                return Err(not_a_buffer_of_its_own(name, other_name));
            }
        }
        Ok(())
    }
}

/// Tensors of undefined contents for the gradients of a problem, dense.
pub(super) fn alloc_gradients(gpu: &Arc<Gpu>, problem: &Problem) -> Result<Gradients> {
    let alloc = |dtype, shape: &[usize]| Tensor::alloc(gpu, "tilewise.gradient", dtype, shape, Purpose::Output);
    let [q, k, v, ..] = problem.shapes();
    let storage = problem.storage;
    Ok(Gradients {
        dq: alloc(storage.q, &q)?,
        dk: alloc(storage.k, &k)?,
        dv: alloc(storage.v, &v)?,
        dbias: problem.bias.map(|(dtype, shape)| alloc(dtype, &shape)).transpose()?,
        dsinks: problem.sinks.then(|| alloc(DType::F32, &[problem.dims.q_heads])).transpose()?,
    })
}

/// What a plan does with these tensors.
pub(super) fn work_of(gpu: &Arc<Gpu>, plan: &BackwardPlan, bindings: &BackwardBindings<'_>) -> Result<Work> {
    bindings.check(gpu, plan)?;
    let extras = some_extras_in(plan.extras(), bindings.workspace)?;
    let copies = copies(gpu, plan.problem(), plan.extras(), &bindings.inputs.inputs)?;
    let mut steps = vec![preprocess_step(gpu, plan, &bindings.inputs, &extras)?];
    for part in plan.parts() {
        steps.extend(part_steps(gpu, plan, part, bindings, &extras)?);
    }
    if let (Some(variant), Some(dsinks)) = (plan.dsinks(), &bindings.gradients.dsinks) {
        steps.push(dsinks_step(gpu, plan, variant, dsinks, &extras)?);
    }
    Ok(Work { copies, workspace: Some(extras), steps })
}

/// Scores at which a derivative is compared with differences.
const SAMPLES: usize = 512;

/// Whether a problem's `score_mod` has the slopes that its derivative says, at scores within ±6 in places all over the call. Where it has a
/// kink differences say nothing: an eighth of them may.
pub(super) fn check_derivative(gpu: &Arc<Gpu>, problem: &Problem, mod_data: Option<&Tensor>) -> Result<()> {
    let Some(score_mod) = &problem.attention.score_mod else { return Ok(()) };
    let mod_data = mod_data.filter(|tensor| tensor.elems() > 0);
    let variant = score_mod_slopes::Variant {
        score_mod: Some(score_mod.clone()),
        mod_data: mod_data.is_some(),
        ..score_mod_slopes::Variant::default()
    };
    let out =
        Tensor::alloc(gpu, "tilewise.slopes", DType::F32, &[SAMPLES, score_mod_slopes::SAMPLE], Purpose::Workspace)?;
    let Dims { batch, q_heads, .. } = problem.dims;
    let (q_len, kv_len) = problem.longest();
    let [batch, heads, q_len, kv_len] = [batch, q_heads, q_len, kv_len].map(|size| to_u32(size.max(1)));
    let params = score_mod_slopes::Params {
        out: first_elem(gpu, &out)?,
        mod_data: mod_data.map_or(Ok(0), |tensor| first_elem(gpu, tensor))?,
        mod_words: to_u32(mod_data.map_or(0, Tensor::elems))?,
        batch: batch?,
        heads: heads?,
        q_len: q_len?,
        kv_len: kv_len?,
        samples: to_u32(SAMPLES)?,
        first_block: 0,
        end_block: 0,
        pad_0: 0,
        pad_1: 0,
    };
    let step = Step {
        kernel: variant.kernel(),
        tensors: core::iter::once(&out).chain(mod_data).cloned().collect(),
        blocks: SAMPLES.div_ceil(variant.threads as usize) as u64,
        params: Box::new(move |blocks| {
            let params = score_mod_slopes::Params { first_block: blocks.start, end_block: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    };
    let mut encoder = gpu.encoder("tilewise.check_derivative")?;
    step.record(gpu, &mut encoder, 0..step.blocks)?;
    gpu.submit(encoder)?;
    let (mut counted, mut wrong, mut first) = (0, 0, None);
    for sample in out.read()?.chunks_exact(score_mod_slopes::SAMPLE) {
        let &[score, two_below, below, above, two_above, derivative] = sample else { continue };
        let values = [two_below, below, above, two_above].map(f64::from);
        let [two_below, below, above, two_above] = values;
        let slope = (8.0 * (above - below) - (two_above - two_below)) / (12.0 * score_mod_slopes::STEP);
        if !slope.is_finite() {
            continue; // a key that it hides
        }
        counted += 1;
        let largest = values.into_iter().map(f64::abs).fold(0.0, f64::max);
        let error = (f64::from(derivative) - slope).abs();
        if error.is_nan() || error > 5e-3 * (1.0 + slope.abs()) + 1e-3 * largest {
            wrong += 1;
            first.get_or_insert((score, slope, derivative));
        }
    }
    match first {
        Some((score, slope, derivative)) if 8 * wrong > counted => Err(Error::invalid(format!(
            "a score_mod_derivative of {derivative} where score_mod has a slope of {slope:.4}, at a score of {score}, and {wrong} of \
             {counted} like it; accepted: its derivative with respect to the score"
        ))),
        _ => Ok(()),
    }
}

/// How many of (batch, heads, rows) lie behind one another; a packed batch is one entry of all rows.
fn rows_of(problem: &Problem) -> [usize; 3] {
    let Dims { batch, q_heads, q_len, .. } = problem.dims;
    [if problem.attention.is_packed() { 1 } else { batch }, q_heads, q_len]
}

fn preprocess_step(gpu: &Gpu, plan: &BackwardPlan, inputs: &BackwardInputs<'_>, extras: &Tensor) -> Result<Step> {
    let BackwardInputs { o, lse, grad_o, grad_lse, .. } = *inputs;
    let problem = plan.problem();
    let packed = problem.attention.is_packed();
    let [batch, heads, rows] = rows_of(problem);
    let variant = flash_bwd_preprocess::Variant { grad_lse: grad_lse.is_some(), ..plan.preprocess() };
    let items = batch * heads * rows;
    let params = flash_bwd_preprocess::Params {
        o: strides_of(gpu, "o", o, packed)?,
        grad_o: strides_of(gpu, "grad_o", grad_o, packed)?,
        lse: lse_strides(gpu, "lse", lse, packed)?,
        grad_lse: grad_lse.map_or(Ok(Strides::NONE), |tensor| lse_strides(gpu, "grad_lse", tensor, packed))?,
        heads: to_u32(heads)?,
        rows: to_u32(rows)?,
        dim: to_u32(problem.dims.value_dim)?,
        items: to_u32(items)?,
        states: first_elem(gpu, extras)? + plan.extras().rows,
        first_block: 0,
        end_block: 0,
        pad: 0,
    };
    let tensors = [o, grad_o, lse].into_iter().chain(grad_lse).chain([extras]);
    Ok(Step {
        kernel: variant.kernel(),
        tensors: tensors.cloned().collect(),
        blocks: items.div_ceil(variant.threads as usize) as u64,
        params: Box::new(move |blocks| {
            let params = flash_bwd_preprocess::Params { first_block: blocks.start, end_block: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}

fn dsinks_step(
    gpu: &Gpu,
    plan: &BackwardPlan,
    variant: flash_bwd_dsinks::Variant,
    dsinks: &Tensor,
    extras: &Tensor,
) -> Result<Step> {
    let [batch, heads, rows] = rows_of(plan.problem());
    let base = first_elem(gpu, extras)?;
    let params = flash_bwd_dsinks::Params {
        out: first_elem(gpu, dsinks)?,
        heads: to_u32(heads)?,
        rows: to_u32(rows)?,
        batch: to_u32(batch)?,
        sinks: base + plan.extras().sinks,
        states: base + plan.extras().rows,
        first_block: 0,
        end_block: 0,
    };
    Ok(Step {
        kernel: variant.kernel(),
        tensors: vec![dsinks.clone(), extras.clone()],
        blocks: heads as u64,
        params: Box::new(move |blocks| {
            let params = flash_bwd_dsinks::Params { first_block: blocks.start, end_block: blocks.end, ..params };
            bytemuck::bytes_of(&params).to_vec()
        }),
    })
}

/// The dispatches of one of the tiled kernels; none of a gradient that isn't wanted.
fn part_steps(
    gpu: &Gpu,
    plan: &BackwardPlan,
    BackwardPart { variant, tiles_per_pass }: &BackwardPart,
    bindings: &BackwardBindings<'_>,
    extras: &Tensor,
) -> Result<Vec<Step>> {
    let (problem, places) = (plan.problem(), plan.extras());
    let BackwardBindings { inputs: BackwardInputs { inputs, grad_o, .. }, gradients, .. } = *bindings;
    let dims = &problem.dims;
    let packed = problem.attention.is_packed();
    let (out, dv) = match variant.makes() {
        Makes::Dq(_) => (Some(&gradients.dq), None),
        Makes::DkDv(dk, dv) => (dk.map(|_| &gradients.dk), dv.map(|_| &gradients.dv)),
        Makes::Dbias(_) => (gradients.dbias.as_ref(), None),
    };
    if out.is_none() && dv.is_none() {
        return Ok(Vec::new());
    }
    let strides = |name: &str, tensor: Option<&Tensor>| {
        tensor.map_or(Ok(Strides::NONE), |tensor| strides_of(gpu, name, tensor, packed))
    };
    let own_keys = matches!(variant.makes(), Makes::DkDv(..));
    let (longest_q, longest_kv) = problem.longest();
    let (own, rows) = if own_keys { (longest_kv, dims.kv_len) } else { (longest_q, dims.q_len) };
    let base = first_elem(gpu, extras)?;
    let [_, heads, all_rows] = rows_of(problem);
    let axes = problem.bias.map_or([1; 4], |(_, shape)| shape);
    let attention = attention_params(gpu, problem, places, &inputs, base)?;
    let params = flash_bwd::Params {
        attention: AttentionParams {
            q_blocks: to_u32(own.div_ceil(variant.block_own() as usize))?,
            rows: if packed { 0 } else { to_u32(rows)? },
            ..attention
        },
        grad_o: strides_of(gpu, "grad_o", grad_o, packed)?,
        out: strides("a gradient", out)?,
        dv: strides("dv", dv)?,
        first_tile: 0,
        end_tile: 0,
        states: base + places.rows,
        states_batch: if packed { 0 } else { to_u32(2 * heads * all_rows)? },
        states_head: to_u32(2 * all_rows)?,
        bias_axes: (0..).zip(axes).map(|(axis, size)| u32::from(size != 1) << axis).sum(),
        zero: 0,
        pad: 0,
    };
    let mut tensors = vec![inputs.q, inputs.k, inputs.v];
    tensors.extend(out);
    tensors.push(grad_o);
    tensors.extend(inputs.bias);
    tensors.extend(inputs.mask.map(|mask| &mask.words));
    tensors.push(extras);
    tensors.extend(dv);
    let tensors: Vec<Tensor> = tensors.into_iter().cloned().collect();
    let aligned = [(inputs.q, attention.q), (inputs.k, attention.k), (inputs.v, attention.v), (grad_o, params.grad_o)];
    let aligned = variant.clone().aligned(aligned.map(|(tensor, strides)| (strides, tensor.elems() == 0)));
    let kernel = aligned.kernel();
    let blocks = variant.blocks(problem) as u64;
    let tiles = variant.walked_tiles(problem);
    let pass = |first: usize| -> Result<Step> {
        let end = tiles.min(first.saturating_add(*tiles_per_pass as usize));
        let params = flash_bwd::Params { first_tile: to_u32(first)?, end_tile: to_u32(end)?, ..params };
        Ok(Step {
            kernel: kernel.clone(),
            tensors: tensors.clone(),
            blocks,
            params: Box::new(move |blocks| {
                bytemuck::bytes_of(&flash_bwd::Params { attention: params.attention.of_blocks(blocks), ..params })
                    .to_vec()
            }),
        })
    };
    // With nothing to walk there is one pass all the same: it writes that gradients are 0.
    (0..tiles.max(1)).step_by(*tiles_per_pass as usize).map(pass).collect()
}
