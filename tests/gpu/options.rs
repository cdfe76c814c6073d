//! Every option of attention against the reference: each by itself on sizes that no tile divides, then all pairs of them.

use std::collections::BTreeSet;

use tilewise::{Align, DType, Dims, Storage};

use super::call::{Call, HostData, Layout, Lens};
use super::support::{engines, one_head, tiled_plans, two_tiled_plans};

/// Two query heads on one of keys, three batch entries, over more than one tile.
fn dims() -> Dims {
    Dims { batch: 3, q_heads: 4, kv_heads: 2, ..one_head(70, 91, 9, 6) }
}

fn call() -> Call {
    Call::new(dims())
}

#[test]
fn windows() {
    for align in [Align::BottomRight, Align::TopLeft] {
        for window in [
            [Some(0), Some(0)],
            [Some(7), None],
            [None, Some(40)],
            [Some(33), Some(2)],
            [Some(u32::MAX), Some(u32::MAX)],
        ] {
            Call { align, window, ..call() }.check();
        }
        Call { align, window: [Some(20), Some(9)], causal: true, ..call() }.check();
    }
    // More queries than keys: rows whose window lies before the first key.
    Call { window: [Some(3), Some(3)], ..Call::new(one_head(200, 70, 8, 8)) }.check();
}

/// Shapes that broadcast over every axis.
pub(crate) const BROADCAST: [[bool; 4]; 7] = [
    [true, true, true, true],
    [false, false, false, true],
    [true, false, false, true],
    [false, true, false, false],
    [false, false, true, true],
    [true, true, true, false],
    [false, false, false, false],
];

pub(crate) fn broadcast(dims: &Dims, full: [bool; 4]) -> [usize; 4] {
    let sizes = [dims.batch, dims.q_heads, dims.q_len, dims.kv_len];
    core::array::from_fn(|axis| if full[axis] { sizes[axis] } else { 1 })
}

#[test]
fn masks_that_broadcast() {
    for full in BROADCAST {
        Call { mask: Some(broadcast(&dims(), full)), ..call() }.check();
    }
}

#[test]
fn biases_that_broadcast() {
    for (index, full) in BROADCAST.into_iter().enumerate() {
        let dtype = [DType::F32, DType::F16, DType::Bf16][index % 3];
        Call { bias: Some((dtype, broadcast(&dims(), full))), seed: 1 + index as u64, ..call() }.check();
    }
}

#[test]
fn ranges_of_rows() {
    for shape in [[3, 4, 70], [1, 4, 70], [3, 1, 70], [1, 1, 70]] {
        Call { ranges: Some(shape), ..call() }.check();
    }
    Call { ranges: Some([1, 1, 70]), lens: Lens::Packed, ..call() }.check();
    Call { ranges: Some([1, 4, 70]), lens: Lens::Packed, causal: true, ..call() }.check();
}

#[test]
fn lengths_and_packed_batches() {
    for lens in [Lens::Kv, Lens::Both, Lens::Packed] {
        for (causal, align) in [(false, Align::BottomRight), (true, Align::BottomRight), (true, Align::TopLeft)] {
            Call { lens, causal, align, ..call() }.check();
        }
    }
    // Sequences of up to several tiles.
    let long = Dims { batch: 3, q_heads: 2, kv_heads: 1, ..one_head(400, 500, 8, 8) };
    Call { lens: Lens::Packed, causal: true, ..Call::new(long) }.check();
}

#[test]
fn scores_that_are_changed() {
    Call { softcap: Some(0.7), scale: Some(1.5), ..call() }.check();
    Call { softcap: Some(30.0), ..call() }.check();
    Call { alibi: Some(tilewise::alibi_slopes(4)), ..call() }.check();
    let each = (0..12).map(|n| 0.01 * n as f32 - 0.02).collect();
    Call { alibi: Some(each), causal: true, align: Align::TopLeft, ..call() }.check();
    Call { sinks: Some(vec![0.0, 3.5, -2.0, f32::NEG_INFINITY]), ..call() }.check();
}

#[test]
fn mods() {
    Call { score_mod: true, ..call() }.check();
    Call { mask_mod: true, ..call() }.check();
    Call { score_mod: true, mask_mod: true, lens: Lens::Packed, ..call() }.check();
}

#[test]
fn storage_types() {
    for dtype in [F16, Bf16] {
        for layout in [Layout::Dense, Layout::Swapped] {
            Call { storage: Storage::all(dtype), layout, ..call() }.check();
            // Every element count odd.
            let odd = Dims { batch: 1, q_heads: 3, kv_heads: 1, ..one_head(5, 7, 1, 3) };
            Call { storage: Storage::all(dtype), layout, ..Call::new(odd) }.check();
        }
    }
    use DType::{Bf16, F16, F32};
    for (q, k, v, o) in [(F32, F16, F16, F32), (F16, F32, Bf16, F32), (F32, F32, F32, F16), (Bf16, F16, F32, Bf16)] {
        Call { storage: Storage { q, k, v, o }, causal: true, ..call() }.check();
    }
}

#[test]
fn everything_at_once() {
    for (index, dtype) in [DType::F32, DType::F16, DType::Bf16].into_iter().enumerate() {
        let all = Call {
            causal: true,
            scale: Some(0.4),
            window: [Some(50), None],
            softcap: Some(2.0),
            alibi: Some(vec![0.1, 0.05, 0.02, 0.01]),
            score_mod: true,
            mask_mod: true,
            bias: Some((dtype, broadcast(&dims(), [true, false, true, true]))),
            mask: Some(broadcast(&dims(), [false, true, true, true])),
            ranges: Some([3, 1, 70]),
            sinks: Some(vec![0.5, -1.0, 0.0, 2.0]),
            lens: Lens::Both,
            storage: Storage::all(dtype),
            layout: [Layout::Dense, Layout::Swapped][index % 2],
            ..call()
        };
        all.check();
        Call { lens: Lens::Packed, bias: None, mask: None, ranges: Some([1, 4, 70]), ..all }.check();
    }
}

/// A choice for each factor of [`PAIRS`], by index.
pub(crate) type Choices = [usize; 11];

/// How many choices each factor of the sweep has; what they are is in [`chosen`].
const PAIRS: Choices = [5, 4, 3, 3, 3, 4, 2, 4, 4, 5, 5];
const MASK: usize = 0;
const BIAS: usize = 1;
const LENS: usize = 8;
const PACKED: usize = 3;

/// A packed batch has no mask or bias of a tensor: ranges and mods have a packed form.
fn allowed(factor: usize, choice: usize, other: usize, other_choice: usize) -> bool {
    let tensor = |factor, choice| (factor == MASK && matches!(choice, 1 | 2)) || (factor == BIAS && choice > 0);
    let packed = |factor, choice| factor == LENS && choice == PACKED;
    !(tensor(factor, choice) && packed(other, other_choice) || tensor(other, other_choice) && packed(factor, choice))
}

pub(crate) fn chosen(row: Choices, seed: u64) -> Call {
    let [mask, bias, causal, window, groups, dtype, layout, dim, lens, len, score] = row;
    let (q_heads, kv_heads) = [(1, 1), (4, 2), (3, 1)][groups];
    let (head_dim, value_dim) = [(8, 8), (5, 3), (64, 64), (80, 33)][dim];
    let (q_len, kv_len) = [(33, 33), (1, 70), (70, 1), (65, 130), (130, 65)][len];
    let dims = Dims { batch: 2, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let f16_keys = Storage { k: DType::F16, v: DType::F16, ..Storage::default() };
    let full = [true; 4];
    Call {
        causal: causal > 0,
        align: [Align::BottomRight, Align::BottomRight, Align::TopLeft][causal],
        window: [[None; 2], [Some(20), None], [Some(9), Some(30)]][window],
        mask: match mask {
            1 => Some(broadcast(&dims, [true, false, false, true])),
            2 => Some(broadcast(&dims, full)),
            _ => None,
        },
        ranges: (mask == 3).then_some([1, q_heads, q_len]),
        mask_mod: mask == 4,
        bias: match bias {
            1 => Some((DType::F32, broadcast(&dims, [false, false, false, true]))),
            2 => Some((DType::F16, broadcast(&dims, full))),
            3 => Some((DType::Bf16, broadcast(&dims, [true, false, true, false]))),
            _ => None,
        },
        storage: [Storage::default(), Storage::all(DType::F16), Storage::all(DType::Bf16), f16_keys][dtype],
        layout: [Layout::Dense, Layout::Swapped][layout],
        lens: [Lens::Full, Lens::Kv, Lens::Both, Lens::Packed][lens],
        softcap: (score == 1).then_some(0.8),
        alibi: (score == 2).then(|| tilewise::alibi_slopes(q_heads)),
        score_mod: score == 3,
        sinks: (score == 4).then(|| vec![0.3; q_heads]),
        seed,
        ..Call::new(dims)
    }
}

/// Rows in which every allowed pair of choices occurs, built greedily.
pub(crate) fn covering_array() -> Vec<Choices> {
    let mut missing = BTreeSet::new();
    for (factor, &choices) in PAIRS.iter().enumerate() {
        for (other, &other_choices) in PAIRS.iter().enumerate().skip(factor + 1) {
            for choice in 0..choices {
                let others = (0..other_choices).filter(|&it| allowed(factor, choice, other, it));
                missing.extend(others.map(|it| [(factor, choice), (other, it)]));
            }
        }
    }
    let mut rows = Vec::new();
    while let Some(&pair) = missing.first() {
        let mut row: [Option<usize>; PAIRS.len()] = [None; PAIRS.len()];
        pair.into_iter().for_each(|(factor, choice)| row[factor] = Some(choice));
        for (factor, &choices) in PAIRS.iter().enumerate() {
            let set: Vec<_> = (0..).zip(row).filter_map(|(other, it)| Some((other, it?))).collect();
            let fits = |choice: &usize| set.iter().all(|&(other, it)| allowed(factor, *choice, other, it));
            let gain = |choice: &usize| {
                let pairs = set.iter().map(|&(other, it)| [(other, it), (factor, *choice)]);
                pairs.filter(|&[a, b]| missing.contains(&[a.min(b), a.max(b)])).count()
            };
            row[factor] = row[factor].or_else(|| (0..choices).filter(fits).max_by_key(gain));
        }
        let row = row.map(|choice| choice.expect("none is always allowed"));
        missing.retain(|&[(factor, choice), (other, it)]| row[factor] != choice || row[other] != it);
        rows.push(row);
    }
    rows
}

/// Every pair of options (Kuhn, Wallace & Gallo 2004: faults of two options together are most of those that single options don't show).
#[test]
fn all_pairs() {
    let rows = covering_array();
    assert!(rows.len() < 60, "{}", rows.len());
    let engines = engines();
    for (n, &row) in rows.iter().enumerate() {
        // By turns one device or the other, and the plan that it would choose or one of its others.
        let Some(engine) = engines.get(n % 2) else { return };
        let call = chosen(row, n as u64);
        let data = call.data();
        let uploaded = call.upload(engine, &data);
        let plans = tiled_plans(engine, &uploaded.problem(&call.options()));
        let plan = &plans[if n % 4 < 2 { 0 } else { n % plans.len() }];
        let results = call.run(engine, plan, &uploaded);
        call.assert_matches(&results, &call.reference(&data), &format!("{:?}", plan.kernels()));
    }
}

/// An infinite score is no sign of an empty row: its lse is infinite, and o what is left of it. A sink has no value.
#[test]
fn infinite_scores() {
    let infinite = f32::INFINITY;
    let call = || Call::new(one_head(1, 2, 1, 1));
    let data = |q: f32, k: [f32; 2]| HostData { q: vec![q], k: k.into(), v: vec![3.0, 4.0], ..HostData::default() };
    let biased = |dtype| Call { bias: Some((dtype, [1, 1, 1, 2])), ..call() };
    let cases = [
        (call(), data(1.0, [infinite, 1.0]), true),
        (call(), data(1e30, [1e30, 1.0]), true),
        (biased(DType::F32), HostData { bias: vec![infinite, 0.0], ..data(1.0, [0.0; 2]) }, true),
        (biased(DType::F16), HostData { bias: vec![0.0, infinite], ..data(1.0, [0.0; 2]) }, true),
        (Call { sinks: Some(vec![infinite]), ..call() }, data(1.0, [1.0, 2.0]), false),
    ];
    for (call, data, visible) in &cases {
        for engine in engines() {
            let uploaded = call.upload(engine, data);
            for plan in two_tiled_plans(engine, &uploaded.problem(&call.options())) {
                let (o, lse) = call.run(engine, &plan, &uploaded);
                assert_eq!((lse[0], o[0].is_nan()), (infinite, *visible), "{call:?} {o:?} {:?}", plan.kernels());
                assert!(*visible || o[0] == 0.0, "{o:?}");
            }
        }
    }
    for engine in engines() {
        let x = engine.upload(&[infinite, 1.0, 2.0, 3.0], [2, 2]).unwrap();
        let lse = engine.softmax_rows(&x).unwrap().1.read().unwrap();
        assert!(lse[0] == infinite && lse[1].is_finite(), "{lse:?}");
    }
}
