//! What the host says of a kernel, compared with what its text says: every variant that the planner can choose, without a GPU.

use core::any::type_name_of_val;
use core::mem::offset_of;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::OnceLock;

use bytemuck::Zeroable;
use wgpu::naga::{self, AddressSpace, ScalarKind, StorageAccess, TypeInner};

use super::{
    AttentionParams, Stored, Strides, flash_bwd, flash_bwd_dsinks, flash_bwd_preprocess, flash_fwd,
    flash_fwd_broadcast, forward, matmul, matmul_broadcast, merge_states, score_mod_slopes, softmax_rows,
};
use crate::gpu::{Access, Kernel};
use crate::plan::{self, Among, BackwardPlan, DeviceFacts};
use crate::problem::{Attention, DType, Dims, MaskMod, Problem, ScoreMod, Storage};
use crate::shader::{Library, Recipe, spec_defaults};

/// Devices of both kinds: the least that WebGPU allows, what software drivers have, and what big GPUs have.
fn devices() -> Vec<DeviceFacts> {
    let mut devices = Vec::new();
    for (device_type, min_subgroup_size) in [(wgpu::DeviceType::Cpu, 8), (wgpu::DeviceType::Other, 4)] {
        for (bytes, invocations) in [(16_384, 256), (32_768, 1024), (65_536, 1024)] {
            let limits = wgpu::Limits {
                max_compute_workgroup_storage_size: bytes,
                max_compute_invocations_per_workgroup: invocations,
                max_compute_workgroup_size_x: invocations,
                max_compute_workgroup_size_y: invocations,
                ..wgpu::Limits::default()
            };
            let features = wgpu::Features::all();
            devices.push(DeviceFacts { limits, features, device_type, min_subgroup_size, ..Default::default() });
        }
    }
    devices
}

/// Sizes on both sides of each step that tiles and slices take: the slices depend on `head_dim`, the output columns of a thread on
/// `value_dim`.
fn sizes() -> impl Iterator<Item = Dims> {
    let head_dims = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64, 128, 512, 1000];
    let value_dims = [1].into_iter().chain((32..512).step_by(32).flat_map(|step| [step, step + 1])).chain([512]);
    value_dims.flat_map(move |value_dim| {
        head_dims.into_iter().map(move |head_dim| Dims { head_dim, value_dim, ..Dims::square(1, 1, 1, 1) })
    })
}

/// All variants of the tiled forward kernels for one of those sizes.
fn forward_variants(dims: Dims, facts: &DeviceFacts) -> Vec<forward::Variant> {
    plan::forward_variants(&Problem::new(dims, Attention::full()).unwrap(), facts, Among::All).collect()
}

const SCORE_MOD: &str = "fn score_mod(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return score + data_f32(h);
}";

const DERIVATIVE: &str = "fn score_mod_derivative(score: f32, b: u32, h: u32, q_idx: u32, kv_idx: u32) -> f32 {
    return 1.0;
}";

const MASK_MOD: &str = "fn mask_mod(b: u32, h: u32, q_idx: u32, kv_idx: u32) -> bool {
    return q_idx != kv_idx;
}";

/// Problems that have each option by itself, each storage type, and all options at once.
fn optioned(dims: Dims) -> Vec<Problem> {
    let problem = |options: Attention| Problem::new(dims, options).unwrap();
    let plain = || problem(Attention::full());
    let score_mod = || ScoreMod::new(SCORE_MOD).unwrap().derivative(DERIVATIVE).unwrap();
    let mask_mod = || MaskMod::new(MASK_MOD).unwrap();
    let mut problems = vec![
        plain().mask([1; 4]).unwrap(),
        plain().ranges([1, 1, 1]).unwrap(),
        plain().sinks(),
        problem(Attention::full().softcap(1.0)),
        problem(Attention::full().alibi([1.0])),
        problem(Attention::full().kv_lens([1])),
        problem(Attention::full().score_mod(score_mod())).mod_data(1).unwrap(),
        problem(Attention::full().mask_mod(mask_mod())),
    ];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        problems.push(plain().storage(Storage::all(dtype)).unwrap());
        problems.push(plain().bias(dtype, [1; 4]).unwrap());
        let all = Attention::causal().softcap(1.0).alibi([1.0]).kv_lens([1]).q_lens([1]);
        let all = problem(all.score_mod(score_mod()).mask_mod(mask_mod())).storage(Storage::all(dtype)).unwrap();
        let all = all
            .bias(dtype, [1; 4])
            .unwrap()
            .mask([1; 4])
            .unwrap()
            .ranges([1, 1, 1])
            .unwrap()
            .sinks()
            .mod_data(1)
            .unwrap();
        problems.push(all);
    }
    problems
}

/// A kernel's text as naga sees it.
struct Parsed {
    kernel: Kernel,
    label: String,
    source: String,
    module: naga::Module,
}

/// Every distinct kernel that any of the devices runs for any sizes.
fn kernels() -> &'static [Parsed] {
    static KERNELS: OnceLock<Vec<Parsed>> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let mut kernels: HashMap<Recipe, Kernel> = HashMap::new();
        let mut add = |kernel: Kernel| kernels.insert(kernel.recipe.clone(), kernel);
        for facts in devices() {
            for dims in sizes() {
                let variants = forward_variants(dims, &facts);
                assert!(!variants.is_empty(), "{dims:?} {:?}", facts.limits);
                // `flash_fwd_broadcast` is a kernel, and a long one, for each size: some of them tell.
                let few = dims.value_dim < 64 || dims.value_dim == dims.head_dim;
                for variant in variants.into_iter().filter(|variant| few || variant.has_passes()) {
                    add(variant.kernel());
                }
            }
            for kernel in backward_kernels(&facts) {
                add(kernel);
            }
            // On the least of the devices, whose workgroup memory is tightest.
            let least = facts.limits.max_compute_workgroup_storage_size == 16_384;
            for (head_dim, value_dim) in [(64, 64), (80, 512)].into_iter().filter(|_| least) {
                let dims = Dims { head_dim, value_dim, ..Dims::square(1, 1, 1, 1) };
                for problem in optioned(dims) {
                    let all = problem.sinks && problem.bias.is_some();
                    if value_dim > 64 && !all {
                        continue; // what is wide is tightest with all options
                    }
                    for features in [wgpu::Features::all(), wgpu::Features::SUBGROUP, wgpu::Features::empty()] {
                        let facts = DeviceFacts { features, ..facts.clone() };
                        let variants = plan::forward_variants(&problem, &facts, Among::Likely);
                        let (of_workgroups, of_subgroups): (Vec<_>, Vec<_>) =
                            variants.partition(|variant| variant.has_passes());
                        for variant in of_workgroups.into_iter().take(1).chain(of_subgroups) {
                            if problem.storage.o == DType::F32 && variant.has_passes() {
                                add(variant.clone().for_keys(0, true).kernel());
                            }
                            if all {
                                let mut sharing = variant.clone();
                                sharing.options_mut().shared_buffer = true;
                                add(sharing.kernel());
                            }
                            // Rows that begin anywhere.
                            let odd = Strides { offset: 1, ..Strides::zeroed() };
                            add(variant.clone().aligned([(odd, false); 3]).kernel());
                            add(variant.kernel());
                        }
                    }
                }
            }
            for b in [matmul::Operand::Rows, matmul::Operand::Columns] {
                for reach in [matmul::Reach::All, matmul::Reach::Causal] {
                    for k in (0..=17).chain([512, 100_000]) {
                        add(plan::product_variant(b, reach, 1, [1, 1, k], &facts).unwrap().kernel());
                    }
                    for (n, k) in [(1001, 1024), (1024, 1001), (1004, 1004), (1024, 1024)] {
                        let variant = plan::product_variant(b, reach, 1, [1000, n, k], &facts).unwrap();
                        let odd = Strides { offset: 1, ..Strides::zeroed() };
                        add(variant.aligned([(odd, false); 2]).kernel());
                        add(variant.adding().kernel());
                        add(variant.kernel());
                    }
                }
            }
            add(plan::softmax_rows_variant(1000, &facts).unwrap().kernel());
        }
        for mod_data in [false, true] {
            add(score_mod_slopes::Variant { mod_data, ..Default::default() }.kernel());
        }
        for out in [DType::F32, DType::F16, DType::Bf16] {
            for stored in [Stored::F32, Stored::F16, Stored::F16Packed, Stored::Bf16] {
                for (a, b) in [(stored, Stored::F32), (stored, stored)] {
                    add(merge_states::Variant { a, b, out, ..Default::default() }.kernel());
                }
            }
        }
        kernels.into_values().map(parse).collect()
    })
}

/// What gradients take on a device: of plain problems of many sizes, and of small ones with options.
fn backward_kernels(facts: &DeviceFacts) -> Vec<Kernel> {
    let plain = |dims| Problem::new(dims, Attention::full()).unwrap();
    let sizes = [1, 8, 33, 64, 100, 128, 300, 512].into_iter().flat_map(|dim| [(dim, dim), (dim, 1), (1, dim)]);
    let plain = sizes.map(|(head_dim, value_dim)| plain(Dims { head_dim, value_dim, ..Dims::square(1, 1, 1, 1) }));
    let long = Dims { q_len: 200_000, kv_len: 200_000, ..Dims::square(1, 1, 1, 64) };
    let long = Problem::new(long, Attention::full()).unwrap().bias(DType::F32, [1; 4]).unwrap();
    let with_options = optioned(Dims::square(1, 1, 1, 64));
    // Long for a software device.
    let longer = [(64, 64, DType::F32), (40, 24, DType::F16), (16, 48, DType::Bf16), (35, 19, DType::F32)];
    let longer = longer.map(|(head_dim, value_dim, dtype)| {
        let dims = Dims { value_dim, ..Dims::square(1, 1, 1024, head_dim) };
        Problem::new(dims, Attention::full()).unwrap().storage(Storage::all(dtype)).unwrap()
    });
    let problems = plain.chain([long]).chain(with_options).chain(longer);
    problems.flat_map(|problem| BackwardPlan::new(&problem, facts).unwrap().needed_kernels()).collect()
}

fn parse(kernel: Kernel) -> Parsed {
    let (source, label) = (kernel.recipe.source().unwrap(), kernel.recipe.label());
    let module = naga::front::wgsl::parse_str(&source)
        .unwrap_or_else(|error| panic!("{label}: {}", error.emit_to_string(&source)));
    Parsed { kernel, label, source, module }
}

/// What naga may take for granted on a device with these features. A feature that kernels come to use needs its line here.
fn capabilities(features: wgpu::Features) -> naga::valid::Capabilities {
    // unpack2x16float, which is WebGPU's own.
    let mut capabilities = naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let known = [
        (wgpu::Features::SHADER_F16, naga::valid::Capabilities::SHADER_FLOAT16),
        (wgpu::Features::SHADER_INT64, naga::valid::Capabilities::SHADER_INT64),
        (wgpu::Features::SUBGROUP, naga::valid::Capabilities::SUBGROUP),
    ];
    let mut unknown = features;
    for (feature, capability) in known {
        capabilities.set(capability, features.contains(feature));
        unknown = unknown - feature;
    }
    assert!(unknown.is_empty(), "{unknown:?} has no capability yet");
    capabilities
}

#[test]
fn texts_validate_with_the_features_they_claim() {
    for Parsed { kernel, label, module, .. } in kernels() {
        let flags = naga::valid::ValidationFlags::all();
        let mut validator = naga::valid::Validator::new(flags, capabilities(kernel.features));
        let validated = validator.validate(module);
        assert!(validated.is_ok(), "{label}: {:?}", validated.err());
    }
}

#[test]
fn entry_points_are_named_and_sized_as_the_host_says() {
    for Parsed { kernel, label, module, .. } in kernels() {
        let [entry] = module.entry_points.as_slice() else { panic!("{label}: one entry point") };
        assert_eq!(entry.name, kernel.recipe.stem());
        assert_eq!(entry.workgroup_size, kernel.workgroup_size, "{label}");
    }
}

#[test]
fn bindings_are_those_of_the_host() {
    for Parsed { kernel, label, module, .. } in kernels() {
        let mut bound: Vec<_> = module
            .global_variables
            .iter()
            .filter_map(|(_, global)| global.binding.as_ref().map(|at| (at.group, at.binding, global.space)))
            .collect();
        bound.sort_by_key(|&(group, binding, _)| (group, binding));
        let storage = kernel.storage.iter().map(|&(binding, access)| {
            let access = match access {
                Access::Read => StorageAccess::LOAD,
                Access::ReadWrite => StorageAccess::LOAD | StorageAccess::STORE,
            };
            (0, binding, AddressSpace::Storage { access })
        });
        let expected: Vec<_> = core::iter::once((0, 0, AddressSpace::Uniform)).chain(storage).collect();
        assert_eq!(bound, expected, "{label}");
    }
}

/// The budget that the host checks against the device, since wgpu doesn't.
#[test]
fn workgroup_memory_is_what_the_host_says() {
    for Parsed { kernel, label, module, .. } in kernels() {
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let workgroup = module.global_variables.iter().filter(|(_, global)| global.space == AddressSpace::WorkGroup);
        let bytes: u32 = workgroup.map(|(_, global)| layouter[global.ty].size).sum();
        assert_eq!(bytes, kernel.workgroup_bytes, "{label}");
    }
}

/// A member of a uniform: name, offset in bytes, type.
type Member = (String, usize, String);

/// The members of a host struct, with those of its `Strides` under the names that the kernel gives them.
macro_rules! members {
    ($params:ty, $strides:expr, [$($field:ident),* $(,)?]) => {{
        let zero = <$params>::zeroed();
        let mut members = Vec::new();
        $(add_member(&mut members, $strides, stringify!($field), offset_of!($params, $field), type_name_of_val(&zero.$field));)*
        members
    }};
}

fn add_member(members: &mut Vec<Member>, strides: [&str; 4], name: &str, offset: usize, type_name: &str) {
    if type_name.ends_with("Strides") {
        let offsets = [
            offset_of!(Strides, offset),
            offset_of!(Strides, outer),
            offset_of!(Strides, inner),
            offset_of!(Strides, row),
        ];
        for (part, within) in strides.into_iter().zip(offsets) {
            members.push((format!("{name}.{part}"), offset + within, "u32".to_owned()));
        }
    } else {
        members.push((name.to_owned(), offset, type_name.to_owned()));
    }
}

const ATTENTION_STRIDES: [&str; 4] = ["offset", "batch", "head", "row"];

/// With the members that all tiled kernels have before their own.
fn attention_members(own: Vec<Member>) -> Vec<Member> {
    const { assert!(offset_of!(flash_fwd::Params, attention) == 0 && offset_of!(flash_bwd::Params, attention) == 0) };
    let mut members = members!(
        AttentionParams,
        ATTENTION_STRIDES,
        [
            q,
            k,
            v,
            bias,
            mask,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            q_heads,
            group_size,
            q_blocks,
            first_block,
            end_block,
            first_key,
            end_key,
            rows,
            bottom_right,
            left,
            right,
            scale,
            softcap,
            bias_key,
            mask_key,
            sequences,
            slopes,
            slopes_batch,
            sinks,
            ranges,
            ranges_batch,
            ranges_head,
            mod_data,
            mod_words,
        ]
    );
    members.extend(own);
    members
}

/// What the host writes into a kernel's uniform. A new kernel needs its line here.
fn host_members(stem: &str) -> Vec<Member> {
    match stem {
        "flash_fwd" | "flash_fwd_broadcast" => attention_members(members!(
            flash_fwd::Params,
            ATTENTION_STRIDES,
            [out, lse, last_pass, sums, sums_batch, sums_head]
        )),
        "flash_bwd_broadcast" | "flash_bwd_dq" | "flash_bwd_dkdv" | "flash_bwd_dbias" => attention_members(members!(
            flash_bwd::Params,
            ATTENTION_STRIDES,
            [grad_o, out, dv, first_tile, end_tile, states, states_batch, states_head, bias_axes, zero, pad]
        )),
        "flash_bwd_preprocess" => members!(
            flash_bwd_preprocess::Params,
            ATTENTION_STRIDES,
            [o, grad_o, lse, grad_lse, heads, rows, dim, items, states, first_block, end_block, pad]
        ),
        "score_mod_slopes" => members!(
            score_mod_slopes::Params,
            [""; 4],
            [out, mod_data, mod_words, batch, heads, q_len, kv_len, samples, first_block, end_block, pad_0, pad_1]
        ),
        "flash_bwd_dsinks" => members!(
            flash_bwd_dsinks::Params,
            [""; 4],
            [out, heads, rows, batch, sinks, states, first_block, end_block]
        ),
        "matmul" | "matmul_broadcast" => members!(
            matmul::Params,
            ["offset", "outer", "inner", "row"],
            [
                a,
                b,
                c,
                m,
                n,
                k,
                inner,
                group_size,
                m_blocks,
                n_blocks,
                first_block,
                end_block,
                diagonal,
                alpha,
                first_k,
                end_k,
                zero,
                pad_0,
                pad_1
            ]
        ),
        "softmax_rows" => members!(
            softmax_rows::Params,
            [""; 4],
            [x_offset, lse_offset, columns, rows_per_matrix, diagonal, first_row, end_row, pad]
        ),
        "merge_states" => members!(
            merge_states::Params,
            ATTENTION_STRIDES,
            [a, b, out, lse_a, lse_b, lse, heads, rows, dim, row_vecs, items, first_block, end_block, pad]
        ),
        _ => panic!("{stem} has no list of members"),
    }
}

/// The scalar members of a struct of the text, those of inner structs under `outer.inner`.
fn text_members(module: &naga::Module, ty: naga::Handle<naga::Type>, name: &str, offset: usize) -> Vec<Member> {
    match &module.types[ty].inner {
        TypeInner::Struct { members, .. } => {
            let of_member = |member: &naga::StructMember| {
                let inner = member.name.as_deref().unwrap_or_default();
                let name = if name.is_empty() { inner.to_owned() } else { format!("{name}.{inner}") };
                text_members(module, member.ty, &name, offset + member.offset as usize)
            };
            members.iter().flat_map(of_member).collect()
        }
        TypeInner::Scalar(scalar) => {
            let kind = match scalar.kind {
                ScalarKind::Uint => "u",
                ScalarKind::Sint => "i",
                ScalarKind::Float => "f",
                other => panic!("{name} is {other:?}"),
            };
            vec![(name.to_owned(), offset, format!("{kind}{}", 8 * scalar.width))]
        }
        other => panic!("{name} is {other:?}; accepted across the border: 4-byte scalars"),
    }
}

#[test]
fn uniforms_are_laid_out_as_the_host_writes_them() {
    for Parsed { kernel, label, module, .. } in kernels() {
        let uniforms: Vec<_> =
            module.global_variables.iter().filter(|(_, global)| global.space == AddressSpace::Uniform).collect();
        let [(_, uniform)] = uniforms.as_slice() else { panic!("{label}: one uniform") };
        let TypeInner::Struct { span, .. } = module.types[uniform.ty].inner else { panic!("a struct") };
        assert_eq!(span, kernel.params_bytes, "{label}");
        let expected = host_members(kernel.recipe.stem());
        assert_eq!(text_members(module, uniform.ty, "", 0), expected, "{label}");
        let (name, offset, _) = expected.last().unwrap();
        assert_eq!(offset + 4, span as usize, "{name} isn't the last member");
    }
}

/// On a device that has room for parameters in the commands no kernel has a uniform.
#[test]
fn uniforms_can_be_immediates() {
    for kernel in default_kernels() {
        let stem = kernel.recipe.stem();
        let kernel = Kernel { recipe: kernel.recipe.slot("params", "immediate"), ..kernel };
        let Parsed { module, .. } = parse(kernel.clone());
        let capabilities = capabilities(kernel.features) | naga::valid::Capabilities::IMMEDIATES;
        let validated =
            naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities).validate(&module);
        assert!(validated.is_ok(), "{stem}: {:?}", validated.err());
        let mut globals = module.global_variables.iter().map(|(_, global)| global);
        let params = globals.find(|global| global.space == AddressSpace::Immediate).unwrap();
        let TypeInner::Struct { span, .. } = module.types[params.ty].inner else { panic!("a struct") };
        assert_eq!(span, kernel.params_bytes, "{stem}");
        assert!(globals.all(|global| global.space != AddressSpace::Uniform), "{stem}");
    }
}

fn default_kernels() -> [Kernel; 6] {
    [
        flash_fwd::Variant::default().kernel(),
        flash_fwd_broadcast::Variant::default().kernel(),
        matmul::Variant::default().kernel(),
        matmul_broadcast::Variant::default().kernel(),
        softmax_rows::Variant::default().kernel(),
        merge_states::Variant::default().kernel(),
    ]
}

/// The values that a reader sees in the file are those of `Variant::default()`, so that the header's figures are of it.
#[test]
fn spec_defaults_are_those_of_the_host() {
    for kernel in default_kernels() {
        let stem = kernel.recipe.stem();
        let as_written = Recipe::new(stem).source().unwrap();
        assert_eq!(spec_defaults(&kernel.recipe.source().unwrap()), spec_defaults(&as_written), "{stem}");
        assert!(!spec_defaults(&as_written).unwrap().is_empty());
        let (_, text) = Library::EMBEDDED.file(&format!("{stem}.wgsl")).unwrap();
        let budget = format!("{} bytes", kernel.workgroup_bytes);
        assert!(text.contains(&budget), "the Budget of {stem}.wgsl doesn't say {budget}");
    }
}

#[test]
fn headers_have_their_sections() {
    let sections = ["Maths", "Shapes", "Mapping", "Budget", "Registers", "Barriers", "Numerics", "Source"]
        .map(|it| format!("// {it:<9} "));
    for path in Library::EMBEDDED.paths() {
        let (_, text) = Library::EMBEDDED.file(path).unwrap();
        let mut header = text.lines().take_while(|line| line.starts_with("//"));
        if path.starts_with("common/") {
            assert!(header.next().is_some(), "{path} begins with no comment");
            continue;
        }
        let stem = path.trim_end_matches(".wgsl");
        assert!(header.next().is_some_and(|line| line.starts_with(&format!("// {stem}: "))), "{path}: the title");
        let mut wanted = sections.iter();
        let mut next = wanted.next();
        for line in header {
            if next.is_some_and(|section| line.starts_with(section.as_str())) {
                next = wanted.next();
            }
        }
        assert_eq!(next, None, "{path}: a section that is missing or out of order");
    }
}

#[test]
fn every_file_is_reached_by_some_variant() {
    let mut reached = BTreeSet::new();
    for Parsed { kernel, .. } in kernels() {
        let expanded = kernel.recipe.expand(Library::EMBEDDED).unwrap();
        reached.extend((1..=expanded.text.lines().count()).filter_map(|line| Some(expanded.origin(line)?.file)));
    }
    reached.insert("common/params_immediate.wgsl"); // see `uniforms_can_be_immediates`
    // Users' texts count as files of their slots' names.
    reached.retain(|path| path.ends_with(".wgsl"));
    assert_eq!(reached, Library::EMBEDDED.paths().collect());
}

/// Pipelines are compiled once each and kept. All variants of all devices are what verification may have to go through; those that
/// one device chooses by itself, for all sizes there are, are what an app can come to pay; but `flash_fwd_broadcast`, which has its
/// dims baked in, is one kernel for each.
#[test]
fn distinct_kernels_are_few() {
    let of = |stem: &str| kernels().iter().filter(|parsed| parsed.kernel.recipe.stem() == stem).count();
    let counts = (of("flash_fwd"), of("matmul"), of("softmax_rows"));
    assert!(counts.0 <= 500 && counts.1 <= 40 && counts.2 <= 2, "{counts:?}");
    for facts in devices() {
        let of_workgroups = |dims| forward_variants(dims, &facts).into_iter().find(forward::Variant::has_passes);
        let chosen: HashSet<_> = sizes().filter_map(of_workgroups).collect();
        assert!(chosen.len() <= 40, "{} of {:?}", chosen.len(), facts.device_type);
    }
}

/// The text without its comments.
fn code(source: &str) -> Vec<&str> {
    source.lines().map(|line| line.split("//").next().unwrap_or_default().trim()).collect()
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|char: char| !char.is_alphanumeric() && char != '_').any(|it| it == word)
}

/// Browsers refuse a barrier that some invocations may not reach, naga doesn't, and some drivers hang. So barriers stand in
/// the entry point alone, under no condition that differs between invocations, and nothing leaves it before the end but the
/// whole workgroup at once.
#[test]
fn barriers_are_reached_by_all_or_none() {
    for Parsed { kernel, label, source, .. } in kernels() {
        let entry = format!("fn {}(", kernel.recipe.stem());
        let mut enclosing: Vec<&str> = Vec::new();
        let mut barriers = 0;
        for line in code(source) {
            for _ in line.matches('}') {
                enclosing.pop();
            }
            let in_entry = enclosing.first().is_some_and(|header| header.contains(&entry) || header.starts_with(") {"));
            let loads = line.contains("workgroupUniformLoad"); // a barrier too
            if loads || line.contains("workgroupBarrier") {
                barriers += 1;
                assert!(in_entry, "{label}: a barrier outside the entry point");
                assert!(loads || line == "workgroupBarrier();", "{label}: a barrier with something else on its line");
                for header in &enclosing[1..] {
                    let differs = ["lane", "thread", "x", "y", "item", "row", "key", "column"];
                    let word = differs.into_iter().find(|word| has_word(header, word));
                    assert_eq!(word, None, "{label}: a barrier within `{header}`");
                }
            }
            if in_entry
                && kernel.workgroup_bytes > 0
                && ["return", "break", "continue"].into_iter().any(|word| has_word(line, word))
            {
                let header = enclosing.last().copied().unwrap_or_default();
                let whole_workgroup = header.starts_with("if (") && header.contains(" >= params.end_");
                assert!(line == "return;" && whole_workgroup, "{label}: `{line}` within `{header}`");
            }
            for _ in line.matches('{') {
                enclosing.push(line);
            }
        }
        // Who has no workgroup memory has nothing to wait for.
        assert_eq!(barriers > 0, kernel.workgroup_bytes > 0, "{label}: {barriers} barriers");
    }
}

/// What WGSL lacks or naga doesn't carry: infinities, 0/0, `enable` of anything but f16, `override`, extensions.
#[test]
fn texts_keep_to_plain_wgsl() {
    for Parsed { kernel, label, source, .. } in kernels() {
        let native = kernel.features.contains(wgpu::Features::SHADER_F16);
        for line in code(source).into_iter().filter(|line| !(native && *line == "enable f16;")) {
            let banned = ["enable", "override", "requires", "diagnostic", "inf", "nan", "isInf", "isNan"];
            let word = banned.into_iter().find(|word| has_word(line, word));
            assert_eq!(word, None, "{label}: `{line}`");
            let made = ["bitcast<f32>(0", "bitcast<vec4<f32>>(vec4(0", "bitcast<f32>(NEG", "/ 0.0", "/ 0f", "0x1p"]
                .into_iter()
                .find(|it| line.contains(it));
            assert_eq!(made, None, "{label}: `{line}`");
        }
    }
}
