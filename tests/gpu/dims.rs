//! Any width of heads and values, and any number of heads, groups and batch entries: the default scale is that of the true width, each
//! query head reads its own key/value head, and no head gets another's result.

use tilewise::{Align, Dims, Error, wgpu};

use super::support::{MASKS, Setup, Tensors, bits, engines, one_head, plans, with_limits};

/// Widths that fill a thread's columns, and some that nothing divides. Each is a kernel to compile, which is most of what these tests take.
const DIMS: [usize; 12] = [1, 3, 8, 20, 40, 63, 64, 96, 128, 160, 256, 512];

const DIMS_APART: [[usize; 2]; 7] = [[1, 63], [63, 1], [20, 72], [192, 40], [80, 256], [512, 3], [2, 512]];

fn check(index: usize, head_dim: usize, value_dim: usize) {
    let setup = Setup::new(one_head(37, 70, head_dim, value_dim), MASKS[index % 3]);
    Setup { seed: index as u64, ..setup }.check();
}

#[test]
fn values_as_wide_as_keys() {
    for (index, dim) in DIMS.into_iter().enumerate() {
        check(index, dim, dim);
    }
}

#[test]
fn values_of_another_width() {
    for (index, [head_dim, value_dim]) in DIMS_APART.into_iter().enumerate() {
        check(index + 1, head_dim, value_dim);
    }
}

/// Scores of 8 · 8 · head_dim before the scale: weights from nearly 1 to nearly 0.
#[test]
fn scores_of_a_wide_range() {
    for (index, dim) in [8, 64, 128].into_iter().enumerate() {
        let setup = Setup::new(one_head(65, 129, dim, dim), MASKS[index]);
        Setup { range: 8.0, seed: 5, ..setup }.check();
    }
}

#[test]
fn scales_of_the_callers() {
    for (index, scale) in [1.0, 0.0, -0.5, 0.125].into_iter().enumerate() {
        let setup = Setup::new(one_head(33, 65, 20, 20), MASKS[index % 3]);
        Setup { scale: Some(scale), ..setup }.check();
    }
}

#[test]
fn groups_of_query_heads() {
    for (index, (q_heads, kv_heads)) in
        [(1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2), (9, 3), (8, 2), (8, 1), (16, 2), (28, 4), (12, 12)]
            .into_iter()
            .enumerate()
    {
        let dims = Dims { batch: 2, q_heads, kv_heads, ..one_head(5, 37, 8, 5) };
        Setup::new(dims, MASKS[index % 3]).check();
    }
}

/// Grouped heads are repeated heads, to the bit: only the address differs.
#[test]
fn groups_equal_repeated_heads() {
    let dims = Dims { batch: 2, q_heads: 6, kv_heads: 2, ..one_head(17, 70, 20, 20) };
    let repeated = Dims { kv_heads: 6, ..dims };
    let (grouped, expanded) =
        (Setup::new(dims, Some(Align::BottomRight)), Setup::new(repeated, Some(Align::BottomRight)));
    let data = grouped.data();
    let repeat = |x: &[f32]| x.chunks(70 * 20).flat_map(|head| head.repeat(3)).collect::<Vec<_>>();
    let mut more = data.clone();
    (more.k, more.v) = (repeat(&data.k), repeat(&data.v));
    for engine in engines() {
        let (few, many) = (Tensors::amid_nan(engine, &dims, &data), Tensors::amid_nan(engine, &repeated, &more));
        for (one, other) in plans(engine, &grouped.problem()).iter().zip(&plans(engine, &expanded.problem())) {
            assert_eq!(one.kernels(), other.kernels());
            let (one, other) = (few.run(engine, one), many.run(engine, other));
            assert_eq!((bits(&one.0), bits(&one.1)), (bits(&other.0), bits(&other.1)));
        }
    }
}

/// Many heads and batch entries of one row each.
#[test]
fn many_heads() {
    let dims = Dims { batch: 12, q_heads: 24, kv_heads: 8, ..one_head(1, 3, 5, 2) };
    Setup::new(dims, None).check();
}

/// More blocks than one axis of a dispatch may have, on a device where that is soon reached: the grid is folded into a rectangle whose
/// last row is partly past the end.
#[test]
fn more_workgroups_than_an_axis_has() {
    let limits = wgpu::Limits { max_compute_workgroups_per_dimension: 13, ..wgpu::Limits::default() };
    let Some(engine) = with_limits(limits) else { return };
    for heads in [13, 14, 29, 160] {
        let setup = Setup::new(Dims::square(1, heads, 1, 1), None);
        let data = setup.data();
        setup.check_on(&engine, &data, &setup.reference(&data));
    }
    // Past the square of it, an error that says so.
    let setup = Setup::new(Dims::square(1, 170, 1, 1), None);
    let inputs = Tensors::amid_nan(&engine, &setup.dims, &setup.data());
    let error = engine.attention(&inputs.q, &inputs.k, &inputs.v, &setup.options()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { needed: 170, available: 169, .. }), "{error}");
}
