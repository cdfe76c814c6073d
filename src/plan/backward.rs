//! Choosing kernels and tiles for gradients.

use core::fmt;

use super::{
    DeviceFacts, Extras, SOFTWARE_LOOP_ITERATIONS, check_bindings, is_long, least_refused, loops_per_pass, no_variant,
    supported,
};
use crate::error::{Error, Result};
use crate::gpu::Kernel;
use crate::kernels::flash_bwd::{self, Makes};
use crate::kernels::{Stored, backward, flash_bwd_broadcast, flash_bwd_dsinks, flash_bwd_preprocess, flash_fwd, mods};
use crate::problem::{Dims, Problem, Storage};

/// Words that are kept of each row: lse and delta.
const ROW_WORDS: usize = 2;

/// Thread grids and tiles (vec4s of own and of other rows a thread) in order of preference: see the forward kernels' tiles.
const GPU_TILES: [([u32; 2], [u32; 2]); 3] = [([16, 16], [1, 1]), ([16, 8], [1, 1]), ([8, 8], [1, 1])];
const CPU_TILES: [([u32; 2], [u32; 2]); 3] = [([8, 8], [2, 2]), ([8, 8], [1, 2]), ([8, 8], [1, 1])];

/// vec4s that a thread may hold before it spills: most of the 255 registers that common GPUs give it.
const MAX_VECS: u32 = 56;

/// One of the tiled kernels.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    pub(crate) variant: backward::Variant,
    /// What a workgroup walks in one dispatch at most.
    pub(crate) tiles_per_pass: u32,
}

/// What will run for the gradients of a problem, with what memory, and why.
///
/// One kernel owns rows of queries, another keys, and each computes scores and their gradients anew: seven products in place of the five that
/// are needed, so that nothing is added to by two workgroups. The same bits every run then, and no memory that grows with
/// `q_len * kv_len`, but for the gradient of a bias that does.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardPlan {
    problem: Problem,
    preprocess: flash_bwd_preprocess::Variant,
    parts: Vec<Part>,
    dsinks: Option<flash_bwd_dsinks::Variant>,
    extras: Extras,
}

impl BackwardPlan {
    /// Plans the gradients of a problem for a device. They are stored as what they are of: dq as q is, dbias as the bias is; dsinks in
    /// f32. The gradient of o is stored as o is.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a `score_mod` without its derivative; [`Error::Unsupported`] if the device can't do it: as [`super::Plan::new`], and a
    /// `head_dim` over 512.
    pub fn new(problem: &Problem, facts: &DeviceFacts) -> Result<Self> {
        check_bindings(problem, facts)?;
        let Dims { head_dim, value_dim, .. } = problem.dims;
        for (what, dim) in [("head_dim (of gradients)", head_dim), ("value_dim (of gradients)", value_dim)] {
            if dim > flash_bwd::MAX_DIM as usize {
                return Err(Error::unsupported(what, dim as u64, flash_bwd::MAX_DIM.into()));
            }
        }
        if problem.attention.score_mod.as_ref().is_some_and(|it| it.derivative.is_none()) {
            return Err(Error::invalid(
                "gradients through a score_mod without its derivative; accepted: one with ScoreMod::derivative",
            ));
        }
        mods::check_together(&problem.attention)?;
        let extras = Extras::of(problem, ROW_WORDS)?;
        let (needed, available) = (4 * u64::from(extras.words), facts.limits.max_storage_buffer_binding_size);
        if needed > available {
            return Err(Error::unsupported(
                "bytes in one storage binding (lse and delta of all rows)",
                needed,
                available,
            ));
        }
        let Storage { q, k, v, o } = problem.storage;
        let stored = |dtype| Stored::of(dtype, facts.features);
        let preprocess = flash_bwd_preprocess::Variant {
            o: stored(o),
            grad_o: stored(o),
            ..flash_bwd_preprocess::Variant::default()
        };
        let mut parts = vec![Part::of(problem, facts, Makes::Dq(q))?];
        // Both at once where a device can bind as many buffers, and a thread hold as much.
        match Part::of(problem, facts, Makes::DkDv(Some(k), Some(v))) {
            Ok(both) if !both.spills() => parts.push(both),
            _ => {
                for makes in [Makes::DkDv(Some(k), None), Makes::DkDv(None, Some(v))] {
                    parts.push(Part::of(problem, facts, makes)?);
                }
            }
        }
        if let Some((dtype, _)) = problem.bias {
            parts.push(Part::of(problem, facts, Makes::Dbias(dtype))?);
        }
        let dsinks = problem.sinks.then(flash_bwd_dsinks::Variant::default);
        Ok(Self { problem: problem.clone(), preprocess, parts, dsinks, extras })
    }

    /// The problem whose gradients it makes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn preprocess(&self) -> flash_bwd_preprocess::Variant {
        self.preprocess
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(crate) fn dsinks(&self) -> Option<flash_bwd_dsinks::Variant> {
        self.dsinks
    }

    pub(crate) fn extras(&self) -> &Extras {
        &self.extras
    }

    /// What it runs with dense tensors, in order.
    pub(crate) fn needed_kernels(&self) -> Vec<Kernel> {
        let parts = self.parts.iter().map(|part| part.variant.kernel());
        let dsinks = self.dsinks.iter().map(flash_bwd_dsinks::Variant::kernel);
        core::iter::once(self.preprocess.kernel()).chain(parts).chain(dsinks).collect()
    }

    /// Floating-point operations of the five products that gradients need, over visible pairs: 2.5 times those of the forward call.
    pub fn flops(&self) -> u64 {
        let Dims { head_dim, value_dim, .. } = self.problem.dims;
        // S, dQ and dK are head_dim wide, dP and dV value_dim.
        let (wide, forward) = (3 * head_dim + 2 * value_dim, head_dim + value_dim);
        let flops = u128::from(self.problem.flops()) * wide as u128 / (forward as u128).max(1);
        u64::try_from(flops).unwrap_or(u64::MAX)
    }

    /// The kernels it runs, in order, with what is baked into each.
    pub fn kernels(&self) -> Vec<String> {
        self.needed_kernels().iter().map(|kernel| kernel.recipe.label()).collect()
    }

    /// Bytes of device memory that it needs besides inputs, gradients and a uniform of a few hundred bytes a dispatch: 8 a row of queries of
    /// each head, and the tables of [`super::Plan::workspace_bytes`].
    pub fn workspace_bytes(&self) -> u64 {
        4 * u64::from(self.extras.words)
    }

    /// What runs, with which tiles and how many bytes: for people.
    pub fn explain(&self) -> String {
        self.to_string()
    }
}

fn width(dim: usize) -> u32 {
    u32::try_from(dim).unwrap_or(u32::MAX)
}

impl Part {
    /// The preferred variant that the device can run.
    fn of(problem: &Problem, facts: &DeviceFacts, makes: Makes) -> Result<Self> {
        let is_software = facts.device_type == wgpu::DeviceType::Cpu;
        let tiles = if is_software { CPU_TILES } else { GPU_TILES };
        let budget = facts.limits.max_compute_workgroup_storage_size;
        let Dims { head_dim, value_dim, .. } = problem.dims;
        let dims = [width(head_dim), width(value_dim)];
        let grad_o = Stored::of(problem.storage.o, facts.features);
        // A row's lse has its sink in it.
        let derivative = problem.attention.score_mod.as_ref().and_then(|it| it.derivative.as_ref());
        let options = flash_fwd::Options {
            sinks: false,
            score_mod_derivative: derivative.map(|it| it.wgsl.clone()),
            ..flash_fwd::Options::of(problem, facts.features)
        };
        let of_tile = |&(grid, vecs): &([u32; 2], [u32; 2])| {
            flash_bwd::Variant::for_dims(grid, vecs, dims, budget, makes, grad_o, options.clone())
        };
        let mut fits: Vec<_> = tiles.iter().filter_map(of_tile).collect();
        // Stable: among those that don't spill the order above stands.
        fits.sort_by_key(|variant| variant.registers().max(MAX_VECS));
        let of_subgroups = flash_bwd_broadcast::Variant::for_dims(
            dims,
            facts.min_subgroup_size,
            facts.features,
            makes,
            grad_o,
            options.clone(),
        );
        let of_subgroups = of_subgroups.filter(|_| is_software && is_long(problem)).map(backward::Variant::Broadcast);
        let variants = of_subgroups.into_iter().chain(fits.into_iter().map(backward::Variant::Workgroup));
        let mut refused = None;
        for variant in variants.filter(|variant| supported(&variant.kernel(), facts)) {
            match Self::in_passes(problem, facts, variant) {
                Ok(part) => return Ok(part),
                Err(error) => refused = Some(least_refused(refused, error)),
            }
        }
        Err(refused.unwrap_or_else(|| no_variant("flash_bwd", facts)))
    }

    /// A variant with as many passes as the device wants.
    fn in_passes(problem: &Problem, facts: &DeviceFacts, variant: backward::Variant) -> Result<Self> {
        let Dims { head_dim, value_dim, .. } = problem.dims;
        let iterations = variant.iterations_of_tile([head_dim, value_dim].map(width));
        let loops = loops_per_pass(iterations, facts.device_type);
        // How often a user's loop runs isn't known.
        let tiles_per_pass = if loops < u32::MAX && mods::have_loops(&problem.attention) { 1 } else { loops };
        if tiles_per_pass == 0 {
            let what = "loop iterations that a software device allows a workgroup, of which head_dim and value_dim take one each";
            return Err(Error::unsupported(what, iterations.into(), SOFTWARE_LOOP_ITERATIONS.into()));
        }
        let tiles = variant.walked_tiles(problem);
        if tiles <= tiles_per_pass as usize {
            return Ok(Self { variant, tiles_per_pass });
        }
        let what = "tiles in one pass of a software device, of a gradient in f16 or bf16; f32 has no such bound";
        let refused = Error::unsupported(what, tiles as u64, tiles_per_pass.into());
        variant.with_passes().map(|variant| Self { variant, tiles_per_pass }).ok_or(refused)
    }

    /// Whether a thread would hold more than common GPUs have registers for.
    fn spills(&self) -> bool {
        matches!(&self.variant, backward::Variant::Workgroup(variant) if variant.registers() > MAX_VECS)
    }
}

impl fmt::Display for BackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kernel in self.kernels() {
            writeln!(f, "{kernel}")?;
        }
        for Part { variant, tiles_per_pass } in &self.parts {
            let [own, other] = [variant.block_own(), variant.block_other()];
            let (what, rows, others) = match variant.makes() {
                Makes::Dq(_) => ("dq", "queries", "keys"),
                Makes::DkDv(Some(_), Some(_)) => ("dk and dv", "keys", "queries"),
                Makes::DkDv(_, None) => ("dk", "keys", "queries"),
                Makes::DkDv(None, _) => ("dv", "keys", "queries"),
                Makes::Dbias(_) => ("dbias", "queries", "keys"),
            };
            let passes = variant.walked_tiles(&self.problem).div_ceil(*tiles_per_pass as usize);
            let passes = if passes > 1 {
                format!(", {passes} passes of {tiles_per_pass} tiles, as software devices bound loops")
            } else {
                String::new()
            };
            writeln!(f, "{what}: tiles of {own} {rows} by {other} {others}, {} threads{passes}", variant.threads())?;
        }
        write!(f, "workspace {} bytes: lse and delta of each row, and tables", self.workspace_bytes())
    }
}
