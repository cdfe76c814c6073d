//! Choosing kernels and tiles. Pure: a problem and the facts of a device go in, a plan comes out, and no GPU is touched.

mod backward;

use core::fmt;
use std::sync::Arc;

pub use backward::BackwardPlan;
pub(crate) use backward::Part as BackwardPart;

use crate::error::{Error, Result};
use crate::gpu::Kernel;
use crate::kernels::{
    flash_fwd, flash_fwd_broadcast, forward, matmul, matmul_broadcast, mods, product, softmax_rows, to_u32,
};
use crate::problem::{Attention, DType, Dims, Problem, Storage};
use crate::tuning::{Choices, Tuning};

/// What planning needs to know of a device.
#[derive(Debug, Clone)]
pub struct DeviceFacts {
    /// The limits it was opened with.
    pub limits: wgpu::Limits,
    /// The features it was opened with.
    pub features: wgpu::Features,
    /// Hardware or software.
    pub device_type: wgpu::DeviceType,
    /// The fewest invocations that a subgroup may have; what it is only matters with [`wgpu::Features::SUBGROUP`].
    pub min_subgroup_size: u32,
    /// What was found fastest on it.
    pub choices: Arc<Choices>,
}

impl Default for DeviceFacts {
    /// What every WebGPU device has: wgpu's default limits and no optional feature.
    fn default() -> Self {
        Self {
            limits: wgpu::Limits::default(),
            features: wgpu::Features::empty(),
            device_type: wgpu::DeviceType::Other,
            min_subgroup_size: wgpu::MINIMUM_SUBGROUP_MIN_SIZE,
            choices: Arc::default(),
        }
    }
}

/// Which way a problem is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Path {
    /// The planner's choice among the paths that never store the score matrix.
    #[default]
    Auto,
    /// Scores, softmax and values as three passes over score matrices that really lie in device memory. For comparison; never
    /// chosen by itself. It takes f32, causality, alignment and scale, and refuses every other option by name.
    Naive,
}

/// The kernels of a plan, in the order they run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Route {
    Tiled {
        variant: forward::Variant,
        /// Keys that one dispatch goes through, whole tiles: later ones resume from its result.
        keys_per_pass: u32,
    },
    Naive {
        scores: product::Variant,
        softmax: softmax_rows::Variant,
        values: product::Variant,
    },
}

/// Where in the small tables of a call each lies, in words. Those that the host writes come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Extras {
    pub(crate) sequences: u32,
    pub(crate) slopes: u32,
    /// From one batch entry's slopes to the next's.
    pub(crate) slopes_batch: u32,
    pub(crate) sinks: u32,
    pub(crate) ranges: u32,
    pub(crate) mod_data: u32,
    /// What is kept of rows: their sums between passes, or what their gradients need.
    pub(crate) rows: u32,
    /// The words of the tables that the host writes: sequences and slopes.
    pub(crate) host_words: u32,
    /// All words.
    pub(crate) words: u32,
}

impl Extras {
    /// The tables of a problem, and behind them so many words a row, or as for one row where there is none.
    pub(crate) fn of(problem: &Problem, row_words: usize) -> Result<Self> {
        let Dims { batch, q_heads, .. } = problem.dims;
        let slopes = problem.attention.alibi_slopes.as_ref().map_or(0, |slopes| slopes.len());
        let mut words = 0usize;
        let mut place = |count: usize| {
            let at = words;
            words = words.saturating_add(count);
            at
        };
        let sequences = place(if problem.has_sequences() { 4 * batch } else { 0 });
        let slopes_at = place(slopes);
        let host_words = place(0);
        let sinks = place(if problem.sinks { q_heads } else { 0 });
        let ranges = place(problem.ranges.map_or(0, |shape| shape.into_iter().fold(2, usize::saturating_mul)));
        let mod_data = place(problem.mod_words.unwrap_or(0));
        let [.., rows] = problem.elems();
        let rows = place(usize::try_from(rows).unwrap_or(usize::MAX).max(1).saturating_mul(row_words));
        Ok(Self {
            sequences: to_u32(sequences)?,
            slopes: to_u32(slopes_at)?,
            slopes_batch: if slopes == q_heads { 0 } else { to_u32(q_heads)? },
            sinks: to_u32(sinks)?,
            ranges: to_u32(ranges)?,
            mod_data: to_u32(mod_data)?,
            rows: to_u32(rows)?,
            host_words: to_u32(host_words)?,
            words: to_u32(words)?,
        })
    }

    /// The tables that the host writes.
    pub(crate) fn host_tables(problem: &Problem) -> Vec<u32> {
        let mut table = Vec::new();
        if problem.has_sequences() {
            table.extend(problem.sequences().flat_map(|it| [it.first_q, it.q_len, it.first_kv, it.kv_len]));
        }
        let slopes = problem.attention.alibi_slopes.as_deref().unwrap_or_default();
        table.extend(slopes.iter().map(|slope| slope.to_bits()));
        table
    }
}

/// What will run for a problem, with what memory, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    problem: Problem,
    route: Route,
    extras: Extras,
    why: Why,
}

/// Why a plan is as it is: what [`Plan::explain`] tells of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Why {
    device_type: wgpu::DeviceType,
    workgroup_bytes: u32,
    min_subgroup_size: u32,
    choice: Choice,
}

/// Whose choice it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The first in the planner's order.
    Preferred,
    /// Measured on the device.
    Tuned,
    /// Measured too, but this problem can't have it.
    TunedInVain,
}

impl Why {
    fn of(facts: &DeviceFacts) -> Self {
        Self {
            device_type: facts.device_type,
            workgroup_bytes: facts.limits.max_compute_workgroup_storage_size,
            min_subgroup_size: facts.min_subgroup_size,
            choice: Choice::Preferred,
        }
    }
}

/// Thread grids and score tiles (vec4s of rows and keys a thread) in order of preference.
///
/// On a GPU a bigger tile reuses each staged element more often, up to what its registers hold. A software device runs
/// invocations as SIMD lanes and pays for every load lane by lane: there the fewest loads a product win, with small workgroups.
const GPU_TILES: [([u32; 2], [u32; 2]); 4] =
    [([16, 16], [1, 1]), ([8, 16], [1, 1]), ([16, 8], [1, 1]), ([8, 8], [1, 1])];
const CPU_TILES: [([u32; 2], [u32; 2]); 3] = [([8, 8], [2, 2]), ([8, 8], [2, 1]), ([8, 8], [1, 1])];

const GPU_MATMUL_TILES: [([u32; 2], [u32; 2]); 2] = [([16, 16], [1, 1]), ([8, 8], [1, 1])];
const CPU_MATMUL_TILES: [([u32; 2], [u32; 2]); 2] = [([8, 8], [2, 2]), ([8, 8], [1, 1])];

/// llvmpipe ends every loop of an invocation, without a word, once all its loops together have made 65535 iterations
/// (`LP_MAX_TGSI_LOOP_ITERATIONS`; Mesa 22.3 does, 25.0 doesn't). A software device's dispatches stay below that.
const SOFTWARE_LOOP_ITERATIONS: u32 = 60_000;

/// How many tiles, or slices, of so many loop iterations each a dispatch may go through on a device. 0 where one is too long.
pub(crate) fn loops_per_pass(iterations: u32, device_type: wgpu::DeviceType) -> u32 {
    if device_type == wgpu::DeviceType::Cpu { SOFTWARE_LOOP_ITERATIONS / iterations } else { u32::MAX }
}

/// What the `_broadcast` kernels are worth their compilation for, on a software device: that takes a second or more, once, and saves five
/// sixths of the 3 ms that the others take for this much, each time. 256 tokens of one head of 64 are so much.
const BROADCAST_FLOPS: u64 = 1 << 24;

/// Rows of the other kernels' blocks there: a call with fewer costs as much as one with so many.
const CPU_BLOCK_Q: usize = 64;

/// What is worth trying the tiles of other devices for, each a pipeline to compile: 1024 tokens of one head of 64 are so much.
const ALL_TRIED_FLOPS: u64 = 1 << 28;

/// Whether an attention call takes long, for a software device.
fn is_long(problem: &Problem) -> bool {
    let (q_len, _) = problem.longest();
    problem.flops().saturating_mul((CPU_BLOCK_Q / q_len.max(1)).max(1) as u64) >= BROADCAST_FLOPS
}

/// Accumulator vec4s a thread may hold before it spills: 128 scalars of the 255 registers that common GPUs give a thread.
const MAX_ACC_VECS: u32 = 32;

fn supported(kernel: &Kernel, facts: &DeviceFacts) -> bool {
    kernel.check(&facts.limits, facts.features).is_ok()
}

/// Which variants of the tiled forward kernels there are to choose among.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Among {
    /// Those that are likely to be good on such a device.
    Likely,
    /// Those of other devices too: worth trying for calls that take long.
    All,
}

/// The variants of the tiled forward kernels that the device can run for a problem, the preferred first.
pub(crate) fn forward_variants<'a>(
    problem: &Problem,
    facts: &'a DeviceFacts,
    among: Among,
) -> impl Iterator<Item = forward::Variant> + use<'a> {
    let is_software = facts.device_type == wgpu::DeviceType::Cpu;
    let (tiles, others): (&[_], &[_]) = if is_software { (&CPU_TILES, &GPU_TILES) } else { (&GPU_TILES, &CPU_TILES) };
    let others: &[_] = if among == Among::All { others } else { &[] };
    let width = |dim: usize| u32::try_from(dim).unwrap_or(u32::MAX);
    let (head_dim, value_dim) = (width(problem.dims.head_dim), width(problem.dims.value_dim));
    let budget = facts.limits.max_compute_workgroup_storage_size;
    let options = flash_fwd::Options::of(problem, facts.features);
    let mut variants = Vec::new();
    for (tiles, done) in [(tiles, &[][..]), (others, tiles)] {
        let tiles = tiles.iter().filter(|tile| !done.contains(tile));
        let mut fits: Vec<_> = tiles
            .filter_map(|&(grid, vecs)| {
                flash_fwd::Variant::for_dims(grid, vecs, head_dim, value_dim, budget, options.clone())
            })
            .collect();
        // Stable: among those that don't spill the order above stands.
        fits.sort_by_key(|variant| (4 * variant.row_vecs * variant.col_vecs).max(MAX_ACC_VECS));
        variants.extend(fits.into_iter().map(forward::Variant::Workgroup));
    }
    let most_rows = flash_fwd_broadcast::most_rows(head_dim, value_dim);
    let rows = most_rows.min(width(problem.longest().0).div_ceil(8).max(2));
    let other_rows = [4, 3, 2].into_iter().filter(|&other| among == Among::All && other != rows && other <= most_rows);
    let of_subgroups = [rows].into_iter().chain(other_rows).filter_map(|rows| {
        let (subgroup, options) = (facts.min_subgroup_size, options.clone());
        flash_fwd_broadcast::Variant::for_dims(head_dim, value_dim, rows, subgroup, facts.features, options)
    });
    let of_subgroups: Vec<_> = of_subgroups.collect();
    let first = is_software && is_long(problem) && of_subgroups.first().is_some_and(|preferred| preferred.lanes == 8);
    let at = if first { 0 } else { variants.len() };
    variants.splice(at..at, of_subgroups.into_iter().map(forward::Variant::Broadcast));
    variants.into_iter().filter(|variant| supported(&variant.kernel(), facts))
}

/// The preferred variant of the matrix products for so many products (m, k) by (k, n).
pub(crate) fn product_variant(
    b: matmul::Operand,
    reach: matmul::Reach,
    matrices: usize,
    [m, n, k]: [usize; 3],
    facts: &DeviceFacts,
) -> Result<product::Variant> {
    let is_software = facts.device_type == wgpu::DeviceType::Cpu;
    let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
    let flops = [m, n, k].iter().fold(2 * matrices as u64, |flops, &size| flops.saturating_mul(size as u64));
    if is_software && flops >= BROADCAST_FLOPS {
        let dims = [m, n, k].map(size);
        let variant = matmul_broadcast::Variant::for_dims(b, dims, facts.min_subgroup_size, facts.features)
            .map(|variant| matmul_broadcast::Variant { reach, ..variant });
        if let Some(variant) = variant.filter(|variant| supported(&variant.kernel(), facts)) {
            return Ok(product::Variant::Broadcast(variant));
        }
    }
    let tiles: &[_] = if is_software { &CPU_MATMUL_TILES } else { &GPU_MATMUL_TILES };
    let budget = facts.limits.max_compute_workgroup_storage_size;
    let mut fits = tiles.iter().filter_map(|&(grid, vecs)| {
        matmul::Variant::for_dims(grid, vecs, size(k), budget)
            .map(|variant| matmul::Variant { b, reach, ..variant })
            .filter(|variant| supported(&variant.kernel(), facts))
    });
    fits.next().map(product::Variant::Workgroup).ok_or_else(|| no_variant("matmul", facts))
}

/// The preferred variant of `softmax_rows`.
pub(crate) fn softmax_rows_variant(columns: usize, facts: &DeviceFacts) -> Result<softmax_rows::Variant> {
    let variants = [256, 64].map(|threads| softmax_rows::Variant { threads });
    let fits = variants.into_iter().find(|variant| supported(&variant.kernel(), facts));
    let variant = fits.ok_or_else(|| no_variant("softmax_rows", facts))?;
    // Three loops over the columns, and two over the threads.
    let most = u64::from(loops_per_pass(4, facts.device_type)) * u64::from(variant.threads);
    if columns as u64 > most {
        return Err(Error::unsupported(
            "columns of softmax on a software device, which bounds loops",
            columns as u64,
            most,
        ));
    }
    Ok(variant)
}

/// Which of two variants' refusals to tell: the first, or the one that would take more of the same.
fn least_refused(first: Option<Error>, next: Error) -> Error {
    let takes = |error: &Error| match error {
        Error::Unsupported { what, available, .. } => Some((what.clone(), *available)),
        _ => None,
    };
    match first {
        None => next,
        Some(first) => match (takes(&first), takes(&next)) {
            (Some((what, less)), Some((same, more))) if what == same && more > less => next,
            _ => first,
        },
    }
}

fn no_variant(stem: &str, facts: &DeviceFacts) -> Error {
    let limits = &facts.limits;
    // The smallest variants want 64 invocations and a few KiB: only a device below WebGPU's guarantees gets here.
    Error::unsupported(
        format!(
            "invocations in a workgroup, or bytes of workgroup memory, of which it has {} ({stem})",
            limits.max_compute_workgroup_storage_size
        ),
        64,
        limits.max_compute_invocations_per_workgroup.into(),
    )
}

impl Plan {
    /// Plans a problem for a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device can't do it: a tensor over one binding, a `value_dim` over 512, too little workgroup
    /// memory. Nothing is allocated to find out.
    pub fn new(problem: &Problem, facts: &DeviceFacts, path: Path) -> Result<Self> {
        match path {
            Path::Auto => {
                check_tiled(problem, facts)?;
                let tuned = facts.choices.forward(problem);
                if let Some(tile) = tuned {
                    let chosen =
                        forward_variants(problem, facts, Among::All).find(|variant| variant.tile().to_string() == tile);
                    if let Some(Ok(plan)) = chosen.map(|variant| Self::tiled(problem, facts, variant)) {
                        return Ok(plan.chosen_by(Choice::Tuned));
                    }
                }
                let mut refused = None;
                let ever_less_likely = [Among::Likely, Among::All].into_iter();
                for variant in ever_less_likely.flat_map(|among| forward_variants(problem, facts, among)) {
                    match Self::tiled(problem, facts, variant) {
                        // One that can't do it is no reason against the others.
                        Err(error) => refused = Some(least_refused(refused, error)),
                        Ok(plan) if tuned.is_some() => return Ok(plan.chosen_by(Choice::TunedInVain)),
                        Ok(plan) => return Ok(plan),
                    }
                }
                Err(refused.unwrap_or_else(|| no_variant("flash_fwd", facts)))
            }
            Path::Naive => Self::naive(problem, facts),
        }
    }

    /// The tiled plans that the device can run for a problem: what verification and tuning go through. First the one that [`Plan::new`]
    /// chooses where nothing was tuned; of a call that takes long those that are likely on other devices too.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn candidates(problem: &Problem, facts: &DeviceFacts) -> Result<Vec<Self>> {
        check_tiled(problem, facts)?;
        let among = if problem.flops() >= ALL_TRIED_FLOPS { Among::All } else { Among::Likely };
        let (mut plans, mut refused) = (Vec::new(), None);
        for variant in forward_variants(problem, facts, among) {
            match Self::tiled(problem, facts, variant) {
                Ok(plan) => plans.push(plan),
                Err(error) => refused = Some(least_refused(refused, error)),
            }
        }
        if plans.is_empty() { Err(refused.unwrap_or_else(|| no_variant("flash_fwd", facts))) } else { Ok(plans) }
    }

    fn chosen_by(self, choice: Choice) -> Self {
        Self { why: Why { choice, ..self.why }, ..self }
    }

    /// The kernel and its tile, as [`crate::Tuning`] calls them; None of the naive path.
    pub fn tile(&self) -> Option<String> {
        match &self.route {
            Route::Tiled { variant, .. } => Some(variant.tile().to_string()),
            Route::Naive { .. } => None,
        }
    }

    fn tiled(problem: &Problem, facts: &DeviceFacts, variant: forward::Variant) -> Result<Self> {
        let (_, kv_len) = problem.longest();
        let iterations = variant.iterations_of_tile(u32::try_from(problem.dims.head_dim).unwrap_or(u32::MAX));
        let tiles = loops_per_pass(iterations, facts.device_type);
        if tiles == 0 {
            let what = "loop iterations that a software device allows a workgroup, of which head_dim takes one each";
            return Err(Error::unsupported(what, iterations.into(), SOFTWARE_LOOP_ITERATIONS.into()));
        }
        // How often a user's loop runs isn't known: it gets what a tile leaves.
        let tiles = if tiles < u32::MAX && mods::have_loops(&problem.attention) { 1 } else { tiles };
        let keys_per_pass = tiles.saturating_mul(variant.block_kv());
        let passes = kv_len > keys_per_pass as usize;
        // Whether one dispatch can resume from what the one before it has stored.
        if passes && !(variant.has_passes() && problem.storage.o == DType::F32) {
            let what = format!(
                "keys in one pass of a software device, of an output in {}; f32 has no such bound",
                problem.storage.o
            );
            return Err(Error::unsupported(what, kv_len as u64, keys_per_pass.into()));
        }
        let variant = variant.for_keys(kv_len, passes);
        let extras = Extras::of(problem, usize::from(passes))?;
        let why = Why::of(facts);
        Ok(Self { problem: problem.clone(), route: Route::Tiled { variant, keys_per_pass }, extras, why })
    }

    fn naive(problem: &Problem, facts: &DeviceFacts) -> Result<Self> {
        check_plain(problem)?;
        check_bindings(problem, facts)?;
        let score_bytes = problem.score_bytes();
        for (what, available) in [
            ("bytes of scores that u32 can index", 4 * u64::from(u32::MAX)),
            ("bytes in one storage binding (naive scores)", facts.limits.max_storage_buffer_binding_size),
            ("bytes in one buffer (naive scores)", facts.limits.max_buffer_size),
        ] {
            if score_bytes > available {
                return Err(Error::unsupported(what, score_bytes, available));
            }
        }
        let reach = if problem.attention.is_causal() { matmul::Reach::Causal } else { matmul::Reach::All };
        let &Dims { batch, q_heads, q_len, kv_len, head_dim, value_dim, .. } = &problem.dims;
        let product = |b, reach, n, k| product_variant(b, reach, batch * q_heads, [q_len, n, k], facts);
        let route = Route::Naive {
            scores: product(matmul::Operand::Columns, matmul::Reach::All, kv_len, head_dim)?,
            softmax: softmax_rows_variant(kv_len, facts)?,
            values: product(matmul::Operand::Rows, reach, value_dim, kv_len)?,
        };
        Ok(Self { problem: problem.clone(), route, extras: Extras::default(), why: Why::of(facts) })
    }

    /// The problem it is for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    pub(crate) fn extras(&self) -> &Extras {
        &self.extras
    }

    /// What it runs with dense tensors, in order.
    pub(crate) fn needed_kernels(&self) -> Vec<Kernel> {
        match &self.route {
            Route::Tiled { variant, .. } => vec![variant.kernel()],
            Route::Naive { scores, softmax, values } => vec![scores.kernel(), softmax.kernel(), values.kernel()],
        }
    }

    /// The kernels it runs, in order, with what is baked into each.
    pub fn kernels(&self) -> Vec<String> {
        self.needed_kernels().iter().map(|kernel| kernel.recipe.label()).collect()
    }

    /// Bytes of device memory that it needs besides inputs, outputs and a uniform of a few hundred bytes a dispatch. Of a tiled plan:
    /// 16 a batch entry where lengths are given or the batch is packed, 4 an ALiBi slope, 4 a sink, 8 a row with a range of its own, and
    /// what the mods read; 4 a row where a software device takes several passes; for anything else nothing.
    pub fn workspace_bytes(&self) -> u64 {
        match self.route {
            Route::Tiled { .. } => 4 * u64::from(self.extras.words),
            Route::Naive { .. } => self.problem.score_bytes(),
        }
    }

    /// Bytes that [`Path::Naive`] would need for the same problem, besides inputs and outputs.
    pub fn naive_bytes(&self) -> u64 {
        self.problem.score_bytes()
    }

    /// What runs, with which tile and how many bytes, and why: for people.
    pub fn explain(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kernel in self.kernels() {
            writeln!(f, "{kernel}")?;
        }
        match &self.route {
            Route::Tiled { variant, keys_per_pass } => writeln!(f, "{}", self.why_tiled(variant, *keys_per_pass))?,
            Route::Naive { .. } => {
                writeln!(f, "for comparison: {} bytes of scores in device memory", self.problem.score_bytes())?;
            }
        }
        write!(f, "workspace {} bytes", self.workspace_bytes())
    }
}

impl Plan {
    fn why_tiled(&self, variant: &forward::Variant, keys_per_pass: u32) -> String {
        let Why { device_type, workgroup_bytes, min_subgroup_size, choice } = self.why;
        let (_, kv_len) = self.problem.longest();
        let passes = kv_len.div_ceil(keys_per_pass as usize);
        let passes = if passes > 1 {
            format!("; {passes} passes of {keys_per_pass} keys, as software devices bound loops")
        } else {
            String::new()
        };
        let device = if device_type == wgpu::DeviceType::Cpu { "a software device" } else { "a GPU" };
        let (rows, keys) = (variant.block_q(), variant.block_kv());
        let tile = format!("tiles of {rows} queries by {keys} keys, {} threads", variant.threads());
        let chosen = match (choice, variant) {
            (Choice::Tuned, _) => "measured fastest on this device for such calls".to_owned(),
            (_, forward::Variant::Workgroup(_)) => format!("the first choice for {device}"),
            (_, forward::Variant::Broadcast(_)) => format!("the first choice for long calls on {device}"),
        };
        let vain = if choice == Choice::TunedInVain {
            ", as what was measured fastest for such calls can't do this one"
        } else {
            ""
        };
        match variant {
            forward::Variant::Workgroup(variant) => format!(
                "{tile}: {chosen} that fits value_dim {} in {} of {workgroup_bytes} bytes of workgroup memory{vain}{passes}",
                self.problem.dims.value_dim,
                variant.workgroup_bytes(),
            ),
            forward::Variant::Broadcast(variant) => format!(
                "{tile}: {chosen}{vain}; keys handed round subgroups of {min_subgroup_size} or more, {} rows an invocation",
                variant.rows,
            ),
        }
    }
}

impl Tuning {
    /// Keeps a plan's kernel and tile as the choice for calls like its problem, in place of what there was. `note` is for readers.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan of the naive path.
    pub fn choose(&mut self, device: &str, plan: &Plan, note: &str) -> Result<()> {
        let tile = plan.tile().ok_or_else(|| Error::invalid("the naive path as a choice; accepted: a tiled plan"))?;
        self.insert(device, &plan.problem, &tile, note);
        Ok(())
    }
}

/// What no tiled kernel can do.
fn check_tiled(problem: &Problem, facts: &DeviceFacts) -> Result<()> {
    check_bindings(problem, facts)?;
    let (needed, available) = (problem.dims.value_dim as u64, u64::from(flash_fwd::MAX_VALUE_DIM));
    if needed > available {
        return Err(Error::unsupported("value_dim (of any tiled kernel)", needed, available));
    }
    mods::check_together(&problem.attention)
}

/// The naive path is there to be compared with: it has no options but causality, alignment and scale.
fn check_plain(problem: &Problem) -> Result<()> {
    let Attention { window_left, window_right, softcap, alibi_slopes, score_mod, mask_mod, .. } = &problem.attention;
    let given = [
        ("storage other than f32", problem.storage != Storage::default()),
        ("a window", window_left.is_some() || window_right.is_some()),
        ("a softcap", softcap.is_some()),
        ("ALiBi", alibi_slopes.is_some()),
        ("a score_mod", score_mod.is_some()),
        ("a mask_mod", mask_mod.is_some()),
        ("lengths or a packed batch", problem.has_sequences()),
        ("a bias", problem.bias.is_some()),
        ("a mask", problem.mask.is_some()),
        ("ranges", problem.ranges.is_some()),
        ("sinks", problem.sinks),
    ];
    let given: Vec<_> = given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    if given.is_empty() {
        return Ok(());
    }
    Err(Error::invalid(format!("the naive path with {}; accepted: causality, alignment and scale", given.join(", "))))
}

/// Each tensor must fit one binding.
fn check_bindings(problem: &Problem, facts: &DeviceFacts) -> Result<()> {
    let available = facts.limits.max_storage_buffer_binding_size;
    let Storage { q, k, v, o } = problem.storage;
    let [q_elems, k_elems, v_elems, o_elems, rows] = problem.elems();
    let broadcast = |shape: [usize; 4]| shape.into_iter().map(|size| size as u64).fold(1, u64::saturating_mul);
    let bias = problem.bias.map(|(dtype, shape)| (dtype, broadcast(shape)));
    let mask =
        problem.mask.map(|[batch, heads, rows, keys]| (DType::U32, broadcast([batch, heads, rows, keys.div_ceil(32)])));
    // Passes need no more than lse does.
    let extras = (DType::U32, u64::from(Extras::of(problem, 0)?.words));
    for (name, (dtype, elems)) in [
        ("q", (q, q_elems)),
        ("k", (k, k_elems)),
        ("v", (v, v_elems)),
        ("o", (o, o_elems)),
        ("lse", (DType::F32, rows)),
        ("bias", bias.unwrap_or_default()),
        ("mask", mask.unwrap_or_default()),
        ("the small tables of the options", extras),
    ] {
        let needed = elems.saturating_mul(dtype.bytes() as u64);
        if needed > available {
            return Err(Error::unsupported(format!("bytes in one storage binding ({name})"), needed, available));
        }
        if elems > u64::from(u32::MAX) {
            return Err(Error::unsupported(format!("elements that u32 can index ({name})"), elems, u32::MAX.into()));
        }
    }
    Ok(())
}
