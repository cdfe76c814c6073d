//! Attention with every option against the reference: its data made up, the expected result, and what each plan gives.

use anyhow::Result;
use tilewise::reference::{self, Broadcast, Case, Comparison, GradientTolerance, Precision, compare};
use tilewise::{
    Align, Attention, AttentionOutput, BackwardInputs, DType, Dims, Engine, MaskMod, Path, Plan, Problem, ScoreMod,
    Storage, alibi_slopes,
};

use crate::measure::normal;
use crate::tensors::{DeviceInputs, Numbers, gradients_over_nans, precision, run_over_nans};

/// Which options a problem has, beside causality, alignment and scale.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) storage: Storage,
    mask: bool,
    bias: Option<DType>,
    ranges: bool,
    sinks: bool,
    window: Option<[Option<u32>; 2]>,
    softcap: Option<f32>,
    alibi: bool,
    lens: bool,
    packed: bool,
    mods: bool,
}

const F32: Storage = Storage { q: DType::F32, k: DType::F32, v: DType::F32, o: DType::F32 };
const F16: Storage = Storage { q: DType::F16, k: DType::F16, v: DType::F16, o: DType::F16 };
const BF16: Storage = Storage { q: DType::Bf16, k: DType::Bf16, v: DType::Bf16, o: DType::Bf16 };

/// The name of the group without any.
pub(super) const NO_OPTIONS: &str = "none";

const NONE: Group = Group {
    name: NO_OPTIONS,
    storage: F32,
    mask: false,
    bias: None,
    ranges: false,
    sinks: false,
    window: None,
    softcap: None,
    alibi: false,
    lens: false,
    packed: false,
    mods: false,
};

/// Each option alone, then all that go together.
pub(super) const GROUPS: [Group; 18] = [
    Group { name: "f16", storage: F16, ..NONE },
    Group { name: "bf16", storage: BF16, ..NONE },
    Group { name: "f16 k and v", storage: Storage { k: DType::F16, v: DType::F16, ..F32 }, ..NONE },
    Group { name: "f32 in, bf16 out", storage: Storage { o: DType::Bf16, ..F32 }, ..NONE },
    Group { name: "mask", mask: true, ..NONE },
    Group { name: "bias f32", bias: Some(DType::F32), ..NONE },
    Group { name: "bias f16", bias: Some(DType::F16), ..NONE },
    Group { name: "bias bf16", bias: Some(DType::Bf16), ..NONE },
    Group { name: "window", window: Some([Some(9), Some(3)]), ..NONE },
    Group { name: "softcap", softcap: Some(1.5), ..NONE },
    Group { name: "alibi", alibi: true, ..NONE },
    Group { name: "lengths", lens: true, ..NONE },
    Group { name: "packed", packed: true, ..NONE },
    Group { name: "ranges", ranges: true, ..NONE },
    Group { name: "sinks", sinks: true, ..NONE },
    Group { name: "score_mod, mask_mod", mods: true, ..NONE },
    Group { name: "all", lens: true, mask: true, bias: Some(DType::F16), storage: F16, ..ALL },
    Group { name: "all, packed", packed: true, ..ALL },
];

/// What a packed batch has too.
const ALL: Group = Group {
    ranges: true,
    sinks: true,
    window: Some([Some(40), None]),
    softcap: Some(4.0),
    alibi: true,
    mods: true,
    ..NONE
};

/// Batch, query heads, KV heads, query rows, keys: none a multiple of any tile. Of one group and width all get the same kernels.
const SIZES: [[usize; 5]; 4] = [[2, 4, 2, 33, 71], [1, 3, 1, 67, 31], [3, 2, 1, 1, 101], [1, 2, 2, 5, 0]];

/// Widths of a key and a value, odd: rows in f16 then begin amid a word.
const WIDTHS: (usize, usize) = (19, 13);

/// Sequences of a packed batch, one of them without queries.
const SEQUENCES: usize = 3;

const SCORE_MOD: &str = "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return score + data_f32(h) * f32((q_idx + 3u * kv_idx + b) % 5u);
}";
const DERIVATIVE: &str = "fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return 1.0;
}";
const MASK_MOD: &str = "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
    return (q_idx + 2u * kv_idx + h + b) % 7u != 0u;
}";

/// Results of one kernel on one problem.
pub(super) struct Ran {
    pub(super) kernel: String,
    pub(super) result: Result<Vec<(&'static str, Comparison)>>,
}

impl Group {
    /// No option, tensors stored in one type.
    pub(super) fn plain(dtype: DType) -> Self {
        Self { storage: Storage::all(dtype), ..NONE }
    }

    /// The problems that every group is checked on.
    pub(super) fn problems() -> Vec<(Dims, Attention)> {
        let (head_dim, value_dim) = WIDTHS;
        let dims = SIZES.map(|[batch, q_heads, kv_heads, q_len, kv_len]| Dims {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
        });
        let [first, ..] = dims;
        let full = dims.map(|dims| (dims, Attention::full()));
        let causal = (first, Attention::causal().softmax_scale(0.3));
        let top_left = (first, Attention::causal().align(Align::TopLeft));
        [causal, top_left].into_iter().chain(full).collect()
    }

    /// All plans for a problem of these options against the reference.
    pub(super) fn check(&self, engine: &Engine, dims: Dims, attention: Attention) -> Result<Vec<Ran>> {
        let dims = if self.packed { Dims { batch: SEQUENCES, ..dims } } else { dims };
        let host = Host::new(self, &dims);
        let device = host.upload(engine, self, &dims)?;
        let problem = device.inputs().problem(&self.options(attention, &host)?)?;
        let expected = host.expected(self, &problem)?;
        let facts = engine.facts();
        let mut plans = Plan::candidates(&problem, &facts)?;
        if self.name == NO_OPTIONS && self.storage == F32 {
            plans.push(Plan::new(&problem, &facts, Path::Naive)?);
        }
        let run = |plan: Plan| {
            let compared = || -> Result<_> {
                let output = run_over_nans(engine, &plan, device.inputs())?;
                let o_tolerance = expected.tolerance.o(precision(self.storage.o));
                Ok(vec![
                    ("o", compare(&output.o.read()?, &expected.o, o_tolerance)),
                    ("lse", compare(&output.lse.read()?, &expected.lse, expected.tolerance.lse())),
                ])
            };
            let kernels = plan.kernels();
            let kernel = match kernels.as_slice() {
                [kernel] => kernel.clone(),
                // By what it is made of: each product has variants of its own.
                several => {
                    format!("naive: {}", several.iter().map(|kernel| stem(kernel)).collect::<Vec<_>>().join(", "))
                }
            };
            Ran { kernel, result: compared() }
        };
        Ok(plans.into_iter().map(run).collect())
    }

    /// The gradients of a problem of these options against the reference.
    pub(super) fn check_gradients(&self, engine: &Engine, dims: Dims, attention: Attention) -> Result<Ran> {
        let dims = if self.packed { Dims { batch: SEQUENCES, ..dims } } else { dims };
        let host = Host::new(self, &dims);
        let device = host.upload(engine, self, &dims)?;
        let options = self.options(attention, &host)?;
        let problem = device.inputs().problem(&options)?;
        let rounded = |seed, elems, dtype| Numbers::F32(normal(seed, elems)).stored(dtype);
        let AttentionOutput { o, lse } = engine.attention_with(&device.inputs(), &options)?;
        let (grad_o, grad_lse) = (rounded(10, o.elems(), o.dtype()), normal(11, lse.elems()));
        let given = BackwardInputs {
            inputs: device.inputs(),
            o: &o,
            lse: &lse,
            grad_o: &grad_o.upload(engine, o.shape())?,
            grad_lse: Some(&engine.upload(&grad_lse, lse.shape())?),
        };
        let grad_o = grad_o.into_f32();
        let expected = host.with_case(self, &problem, |case, packed| match packed {
            None => reference::attention_backward(case, &grad_o, Some(&grad_lse)),
            Some([q, kv]) => reference::attention_backward_packed(case, q, kv, &grad_o, Some(&grad_lse)),
        })?;
        let kernels = engine.plan_backward(&problem)?.kernels();
        let kernel = format!("gradients: {}", kernels.iter().map(|kernel| stem(kernel)).collect::<Vec<_>>().join(", "));
        let compared = || -> Result<_> {
            let got = gradients_over_nans(engine, &given, &options)?;
            let tolerance = expected.tolerance;
            // What an o stored in few bits says is as good as that.
            let of = |tolerance_of: fn(&GradientTolerance, Precision) -> f64, dtype: DType| {
                let of = [dtype, self.storage.o].map(|dtype| tolerance_of(&tolerance, precision(dtype)));
                of.into_iter().fold(0.0, f64::max)
            };
            let Storage { q, k, v, .. } = self.storage;
            let bias = self.bias.unwrap_or(DType::F32);
            let mut comparisons = Vec::new();
            for (name, got, expected, tolerance) in [
                ("dq", Some(got.dq), Some(&expected.dq), of(GradientTolerance::dq, q)),
                ("dk", Some(got.dk), Some(&expected.dk), of(GradientTolerance::dk, k)),
                ("dv", Some(got.dv), Some(&expected.dv), of(GradientTolerance::dv, v)),
                ("dbias", got.dbias, expected.dbias.as_ref(), of(GradientTolerance::dbias, bias)),
                ("dsinks", got.dsinks, expected.dsinks.as_ref(), of(GradientTolerance::dsinks, DType::F32)),
            ] {
                if let (Some(got), Some(expected)) = (got, expected) {
                    comparisons.push((name, compare(&got.read()?, expected, tolerance)));
                }
            }
            Ok(comparisons)
        };
        Ok(Ran { kernel, result: compared() })
    }

    fn options(&self, mut options: Attention, host: &Host) -> Result<Attention> {
        options = options.output_dtype(self.storage.o);
        if let Some([left, right]) = self.window {
            options = options.window(left, right);
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        if let Some(slopes) = &host.slopes {
            options = options.alibi(slopes.clone());
        }
        if let Some([q_lens, kv_lens]) = &host.lens {
            options = options.q_lens(q_lens.clone()).kv_lens(kv_lens.clone());
        }
        if let Some([q, kv]) = &host.cu_seqlens {
            options = options.packed(q.clone(), kv.clone());
        }
        if self.mods {
            options =
                options.score_mod(ScoreMod::new(SCORE_MOD)?.derivative(DERIVATIVE)?).mask_mod(MaskMod::new(MASK_MOD)?);
        }
        Ok(options)
    }
}

/// A kernel's name without what is baked in.
pub(super) fn stem(kernel: &str) -> &str {
    kernel.split('[').next().unwrap_or(kernel)
}

/// A problem's data: numbers that its storage types hold exactly.
struct Host {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    mask: Option<(Vec<bool>, [usize; 4])>,
    bias: Option<(Vec<f32>, [usize; 4])>,
    /// (batch, q_heads, q_len, 2)
    ranges: Option<(Vec<u32>, [usize; 4])>,
    sinks: Option<Vec<f32>>,
    slopes: Option<Vec<f32>>,
    lens: Option<[Vec<u32>; 2]>,
    cu_seqlens: Option<[Vec<u32>; 2]>,
    mod_data: Option<Vec<f32>>,
}

impl Host {
    fn new(group: &Group, dims: &Dims) -> Self {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *dims;
        let stored_batch = if group.packed { 1 } else { batch };
        let rounded = |seed, elems, dtype| Numbers::F32(normal(seed, elems)).stored(dtype).into_f32();
        let size = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let Storage { q, k, v, .. } = group.storage;
        // Another axis is broadcast for each type.
        let bias = group.bias.map(|dtype| {
            let shape = match dtype {
                DType::F16 => [1, q_heads, 1, kv_len],
                DType::Bf16 => [batch, 1, q_len, 1],
                DType::F32 | DType::U32 => [batch, q_heads, q_len, kv_len],
            };
            let mut bias = rounded(4, shape.iter().product(), dtype);
            bias.iter_mut().step_by(17).for_each(|bias| *bias = f32::NEG_INFINITY);
            (bias, shape)
        });
        let mask = group.mask.then(|| {
            let shape = [batch, 1, q_len, kv_len];
            let mut mask: Vec<bool> = normal(5, shape.iter().product()).into_iter().map(|x| x > -0.7).collect();
            // The first row sees no key.
            mask.iter_mut().take(kv_len).for_each(|keep| *keep = false);
            (mask, shape)
        });
        let ranges = group.ranges.then(|| {
            let shape = [1, q_heads, q_len, 2];
            let starts = normal(6, q_heads * q_len).into_iter().zip(normal(7, q_heads * q_len));
            let place = |x: f32| {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place is meant")]
                let place = ((x.abs() * kv_len as f32 / 4.0) as u32).min(size(kv_len));
                place
            };
            // Some end before they begin, some at the last key.
            (starts.flat_map(|(start, end)| [place(start), size(kv_len) - place(end)]).collect(), shape)
        });
        let slopes = group.alibi.then(|| {
            let slopes = alibi_slopes(q_heads);
            // One for all batch entries, or with everything else one for each.
            if group.mods { slopes.repeat(batch).into_iter().rev().collect() } else { slopes }
        });
        Self {
            q: rounded(1, stored_batch * q_heads * q_len * head_dim, q),
            k: rounded(2, stored_batch * kv_heads * kv_len * head_dim, k),
            v: rounded(3, stored_batch * kv_heads * kv_len * value_dim, v),
            mask,
            bias,
            ranges,
            sinks: group.sinks.then(|| normal(8, q_heads)),
            slopes,
            lens: group.lens.then(|| {
                let lens =
                    |len: usize, less: usize| (0..batch).map(|entry| size(len.saturating_sub(entry * less))).collect();
                [lens(q_len, 2), lens(kv_len, 23)]
            }),
            cu_seqlens: group.packed.then(|| {
                let third = |len: usize| vec![0, size(len / 3), size(len / 3), size(len)];
                let half = |len: usize| vec![0, size(len / 2), size(len - len / 4), size(len)];
                [third(q_len), half(kv_len)]
            }),
            mod_data: group.mods.then(|| normal(9, q_heads)),
        }
    }

    fn expected(&self, group: &Group, problem: &Problem) -> Result<reference::Output> {
        Ok(self.with_case(group, problem, |case, packed| match packed {
            None => reference::attention(case),
            Some([q, kv]) => reference::attention_packed(case, q, kv),
        })?)
    }

    /// The problem as the reference takes it, and the boundaries of a packed batch.
    fn with_case<T>(
        &self,
        group: &Group,
        problem: &Problem,
        of: impl FnOnce(&Case<'_>, Option<[&[u32]; 2]>) -> T,
    ) -> T {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = problem.dims();
        let [window_left, window_right] = group.window.unwrap_or_default();
        let data = self.mod_data.as_deref().unwrap_or_default();
        let score_mod = |s: f64, b, h: usize, i, j| s + f64::from(data[h]) * ((i + 3 * j + b) % 5) as f64;
        let sees = |b, h, i, j| {
            // Rows of a packed batch are counted within their sequence, their ranges over all.
            let row = self.cu_seqlens.as_ref().map_or(0, |[q, _]| q[b] as usize) + i;
            let in_range = self.ranges.as_ref().is_none_or(|(ranges, _)| {
                let at = 2 * (h * q_len + row);
                (ranges[at] as usize..ranges[at + 1] as usize).contains(&j)
            });
            in_range && (!group.mods || (i + 2 * j + h + b) % 7 != 0)
        };
        let case = Case {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            softmax_scale: Some(problem.softmax_scale().into()),
            causal: problem.attention().is_causal(),
            align: match problem.attention().alignment() {
                Align::BottomRight => reference::Align::BottomRight,
                Align::TopLeft => reference::Align::TopLeft,
            },
            window_left,
            window_right,
            softcap: group.softcap.map(f64::from),
            score_mod: group.mods.then_some(reference::ScoreMod(&score_mod)),
            score_mod_derivative: group.mods.then_some(reference::ScoreMod(&|_, _, _, _, _| 1.0)),
            alibi_slopes: self.slopes.as_deref(),
            bias: self.bias.as_ref().map(|(data, shape)| Broadcast { data, shape: *shape }),
            mask: self.mask.as_ref().map(|(data, shape)| Broadcast { data, shape: *shape }),
            mask_mod: (group.mods || group.ranges).then_some(reference::MaskMod(&sees)),
            sinks: self.sinks.as_deref(),
            q_lens: self.lens.as_ref().map(|[q_lens, _]| q_lens.as_slice()),
            kv_lens: self.lens.as_ref().map(|[_, kv_lens]| kv_lens.as_slice()),
        };
        of(&case, self.cu_seqlens.as_ref().map(|[q, kv]| [&q[..], &kv[..]]))
    }

    fn upload(&self, engine: &Engine, group: &Group, dims: &Dims) -> Result<DeviceInputs> {
        let Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *dims;
        let upload = |numbers: &[f32], dtype, shape: &[usize]| {
            Numbers::F32(numbers.to_vec()).stored(dtype).upload(engine, shape)
        };
        let qkv = |numbers: &[f32], dtype, heads, len, dim| {
            let shape = if group.packed { vec![len, heads, dim] } else { vec![batch, heads, len, dim] };
            upload(numbers, dtype, &shape)
        };
        let dense = |numbers: &Option<Vec<f32>>| {
            numbers.as_ref().map(|numbers| engine.upload(numbers, [numbers.len()])).transpose()
        };
        let Storage { q, k, v, .. } = group.storage;
        let bias = self.bias.as_ref().zip(group.bias);
        let ranges = self.ranges.as_ref().map(|(ranges, shape)| engine.upload(ranges, shape));
        Ok(DeviceInputs {
            q: qkv(&self.q, q, q_heads, q_len, head_dim)?,
            k: qkv(&self.k, k, kv_heads, kv_len, head_dim)?,
            v: qkv(&self.v, v, kv_heads, kv_len, value_dim)?,
            mask: self.mask.as_ref().map(|(mask, shape)| engine.upload_mask(mask, *shape)).transpose()?,
            bias: bias.map(|((bias, shape), dtype)| upload(bias, dtype, shape)).transpose()?,
            ranges: ranges.transpose()?,
            sinks: dense(&self.sinks)?,
            mod_data: dense(&self.mod_data)?,
        })
    }
}
