//! Choosing kernels and tiles. Pure: a problem and the facts of a device go in, a plan comes out, and no GPU is touched.

use core::fmt;

use crate::error::{Error, Result};
use crate::gpu::Kernel;
use crate::kernels::{flash_fwd, matmul, softmax_rows};
use crate::problem::Problem;

/// What planning needs to know of a device.
#[derive(Debug, Clone)]
pub struct DeviceFacts {
    /// The limits it was opened with.
    pub limits: wgpu::Limits,
    /// The features it was opened with.
    pub features: wgpu::Features,
    /// Hardware or software.
    pub device_type: wgpu::DeviceType,
}

impl Default for DeviceFacts {
    /// What every WebGPU device has: wgpu's default limits and no optional feature.
    fn default() -> Self {
        Self {
            limits: wgpu::Limits::default(),
            features: wgpu::Features::empty(),
            device_type: wgpu::DeviceType::Other,
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
    /// chosen by itself.
    Naive,
}

/// The kernels of a plan, in the order they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Route {
    Tiled(flash_fwd::Variant),
    Naive { scores: matmul::Variant, softmax: softmax_rows::Variant, values: matmul::Variant },
}

/// What will run for a problem, with what memory, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    problem: Problem,
    route: Route,
    why: String,
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

/// Accumulator vec4s a thread may hold before it spills: 128 scalars of the 255 registers that common GPUs give a thread.
const MAX_ACC_VECS: u32 = 32;

fn supported(kernel: &Kernel, facts: &DeviceFacts) -> bool {
    kernel.check(&facts.limits, facts.features).is_ok()
}

/// All variants of `flash_fwd` that the device can run for a problem, the preferred first.
pub(crate) fn flash_fwd_variants(problem: &Problem, facts: &DeviceFacts) -> Vec<flash_fwd::Variant> {
    let tiles: &[_] = if facts.device_type == wgpu::DeviceType::Cpu { &CPU_TILES } else { &GPU_TILES };
    let width = |dim: usize| u32::try_from(dim).unwrap_or(u32::MAX);
    let (head_dim, value_dim) = (width(problem.dims.head_dim), width(problem.dims.value_dim));
    let budget = facts.limits.max_compute_workgroup_storage_size;
    let fits = tiles.iter().filter_map(|&(grid, vecs)| {
        flash_fwd::Variant::for_dims(grid, vecs, head_dim, value_dim, budget)
            .filter(|variant| supported(&variant.kernel(), facts))
    });
    let mut variants: Vec<_> = fits.collect();
    // Stable: among those that don't spill the order above stands.
    variants.sort_by_key(|variant| (4 * variant.row_vecs * variant.col_vecs).max(MAX_ACC_VECS));
    variants
}

/// The preferred variant of `matmul` for a product over `k`.
pub(crate) fn matmul_variant(
    b: matmul::Operand,
    reach: matmul::Reach,
    k: usize,
    facts: &DeviceFacts,
) -> Result<matmul::Variant> {
    let tiles: &[_] = if facts.device_type == wgpu::DeviceType::Cpu { &CPU_MATMUL_TILES } else { &GPU_MATMUL_TILES };
    let budget = facts.limits.max_compute_workgroup_storage_size;
    let k = u32::try_from(k).unwrap_or(u32::MAX);
    let fits = tiles.iter().filter_map(|&(grid, vecs)| {
        matmul::Variant::for_dims(grid, vecs, k, budget)
            .map(|variant| matmul::Variant { b, reach, ..variant })
            .filter(|variant| supported(&variant.kernel(), facts))
    });
    fits.into_iter().next().ok_or_else(|| no_variant("matmul", facts))
}

/// The preferred variant of `softmax_rows`.
pub(crate) fn softmax_rows_variant(facts: &DeviceFacts) -> Result<softmax_rows::Variant> {
    let variants = [256, 64].map(|threads| softmax_rows::Variant { threads });
    let fits = variants.into_iter().find(|variant| supported(&variant.kernel(), facts));
    fits.ok_or_else(|| no_variant("softmax_rows", facts))
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
                let candidates = Self::candidates(problem, facts)?;
                candidates.into_iter().next().ok_or_else(|| no_variant("flash_fwd", facts))
            }
            Path::Naive => Self::naive(problem, facts),
        }
    }

    /// Every tiled plan that the device can run for a problem, the one that [`Plan::new`] chooses first: what
    /// verification and tuning go through.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn candidates(problem: &Problem, facts: &DeviceFacts) -> Result<Vec<Self>> {
        check_bindings(problem, facts)?;
        let value_dim = problem.dims.value_dim as u64;
        if value_dim > flash_fwd::MAX_VALUE_DIM.into() {
            return Err(Error::unsupported(
                "value_dim (of any tiled kernel)",
                value_dim,
                flash_fwd::MAX_VALUE_DIM.into(),
            ));
        }
        let plans = flash_fwd_variants(problem, facts).into_iter().map(|variant| Self {
            problem: *problem,
            route: Route::Tiled(variant),
            why: why_tiled(&variant, problem, facts),
        });
        Ok(plans.collect())
    }

    fn naive(problem: &Problem, facts: &DeviceFacts) -> Result<Self> {
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
        let dims = &problem.dims;
        let route = Route::Naive {
            scores: matmul_variant(matmul::Operand::Columns, matmul::Reach::All, dims.head_dim, facts)?,
            softmax: softmax_rows_variant(facts)?,
            values: matmul_variant(matmul::Operand::Rows, reach, dims.kv_len, facts)?,
        };
        let why = format!("naive was asked for: {score_bytes} bytes of scores in device memory");
        Ok(Self { problem: *problem, route, why })
    }

    /// The problem it is for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    /// The kernels it runs, in order, with what is baked into each.
    pub fn kernels(&self) -> Vec<String> {
        let kernels = match self.route {
            Route::Tiled(variant) => vec![variant.kernel()],
            Route::Naive { scores, softmax, values } => vec![scores.kernel(), softmax.kernel(), values.kernel()],
        };
        kernels.iter().map(|kernel| kernel.recipe.label()).collect()
    }

    /// Bytes of device memory that it needs besides inputs, outputs and a uniform of a few hundred bytes a dispatch.
    pub fn workspace_bytes(&self) -> u64 {
        match self.route {
            Route::Tiled(_) => 0,
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
        writeln!(f, "{}", self.why)?;
        write!(f, "workspace {} bytes; naive would need {}", self.workspace_bytes(), self.naive_bytes())
    }
}

fn why_tiled(variant: &flash_fwd::Variant, problem: &Problem, facts: &DeviceFacts) -> String {
    format!(
        "tiles of {} queries by {} keys, {} threads: the first choice for {} that fits value_dim {} in {} of {} bytes of workgroup memory",
        variant.block_q(),
        variant.block_kv(),
        variant.tx * variant.ty,
        if facts.device_type == wgpu::DeviceType::Cpu { "a software device" } else { "a GPU" },
        problem.dims.value_dim,
        variant.workgroup_bytes(),
        facts.limits.max_compute_workgroup_storage_size,
    )
}

/// Each tensor must fit one binding.
fn check_bindings(problem: &Problem, facts: &DeviceFacts) -> Result<()> {
    let dims = &problem.dims;
    let available = facts.limits.max_storage_buffer_binding_size;
    for (name, elems) in [
        ("q", dims.q_elems()),
        ("k", dims.k_elems()),
        ("v", dims.v_elems()),
        ("o", dims.o_elems()),
        ("lse", dims.rows()),
    ] {
        let needed = 4 * elems as u64;
        if needed > available {
            return Err(Error::unsupported(format!("bytes in one storage binding ({name})"), needed, available));
        }
    }
    Ok(())
}
