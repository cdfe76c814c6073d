//! Many alike terms: each addition to a sum that is much larger rounds the same way, so that one sum of all, term after term, is off by a
//! part of the number of terms. The tolerance grows with its root.

use tilewise::{Dims, Engine, Path, Plan};

use super::support::{Data, Setup, Tensors, assert_matches, engines, one_head, plans, tiled_plans};

/// In a row all keys but the first have one weight, another than in the next row.
fn alike_weights(kv_len: usize) -> (Setup, Data) {
    let dims = one_head(32, kv_len, 64, 8);
    let one = |rows: usize, x: &dyn Fn(usize) -> f32| {
        (0..rows * 64).map(|at| if at % 64 == 0 { x(at / 64) } else { 0.0 }).collect()
    };
    let data = Data {
        q: one(32, &|row| 8.0 + 0.08 * row as f32),
        k: one(kv_len, &|key| if key == 0 { 0.0 } else { -0.05 }),
        v: (0..kv_len * 8).map(|at| if (at / 8) % (at % 8 + 1) == 0 { 1.0 } else { 0.0 }).collect(),
    };
    (Setup { scale: Some(1.0), ..Setup::new(dims, None) }, data)
}

/// Every product of a score is the same but for the last bits of a row's and a key's.
fn alike_products(head_dim: usize) -> (Setup, Data) {
    let dims = Dims { value_dim: 8, ..Dims::square(1, 1, 40, head_dim) };
    let rows = |x: &dyn Fn(usize) -> f32| (0..40 * head_dim).map(|at| x(at / head_dim)).collect();
    let data = Data {
        q: rows(&|row| 0.7 + 0.013 * row as f32),
        k: rows(&|key| 0.9 + 0.0007 * key as f32),
        v: (0..40 * 8).map(|at| if (at / 8) % (at % 8 + 1) == 0 { 1.0 } else { -1.0 }).collect(),
    };
    (Setup::new(dims, None), data)
}

#[track_caller]
fn check(engine: &Engine, (setup, data): &(Setup, Data), plans: &[Plan]) {
    let expected = setup.reference(data);
    let inputs = Tensors::amid_nan(engine, &setup.dims, data);
    for plan in plans {
        assert_matches(&inputs.run(engine, plan), &expected, &format!("{:?} {}", setup.dims, plan.explain()));
    }
}

#[test]
fn weights() {
    for kv_len in [500, 1000, 5000] {
        let given = alike_weights(kv_len);
        for engine in engines() {
            check(engine, &given, &plans(engine, &given.0.problem()));
        }
    }
}

/// So many keys that a software device takes them in several passes.
#[test]
fn weights_of_very_many_keys() {
    for kv_len in [70_000, 200_000] {
        let given = alike_weights(kv_len);
        for engine in engines() {
            check(engine, &given, &[Plan::new(&given.0.problem(), &engine.facts(), Path::Auto).unwrap()]);
        }
    }
}

/// Of the tiled kernels: naive attention's scores are a matrix product like any other, whose error may be `k + 1` roundings.
#[test]
fn products() {
    for head_dim in [64, 128, 512] {
        let given = alike_products(head_dim);
        for engine in engines() {
            check(engine, &given, &tiled_plans(engine, &given.0.problem()));
        }
    }
}
