//! A·B and A·Bᵀ of any sizes, batched, on views: within the error that sums in f32 may have, and nothing written beside them.

use tilewise::reference::{self, Precision, Product};
use tilewise::{Align, Dims, Engine, Path, Tensor};

use super::support::{Setup, Tensors, amid_nan, assert_close, engines, random};

/// Off by at most (k + 1) units of roundoff in the largest sum of magnitudes.
#[track_caller]
fn assert_product(got: &Tensor, expected: &Product, k: usize, what: &str) {
    let tolerance = (k + 1) as f64 * f64::from(f32::EPSILON) / 2.0 * expected.mag;
    assert_close(&got.read().unwrap(), &expected.c, tolerance, what);
}

fn check(engine: &Engine, [m, k, n]: [usize; 3], leading: &[usize]) {
    let batch = leading.iter().product();
    let shape = |rows, columns| [leading, &[rows, columns]].concat();
    let (a, b) = (random(1, 1.0, batch * m * k), random(2, 1.0, batch * k * n));
    let a_gpu = amid_nan(engine, &a, &shape(m, k));
    let what = format!("{leading:?} {m} {k} {n}");

    let c = engine.matmul(&a_gpu, &amid_nan(engine, &b, &shape(k, n))).unwrap();
    assert_eq!(c.shape(), shape(m, n));
    assert_product(&c, &reference::matmul(batch, [m, k, n], &a, &b).unwrap(), k, &what);

    let c = engine.matmul_transposed(&a_gpu, &amid_nan(engine, &b, &shape(n, k))).unwrap();
    assert_eq!(c.shape(), shape(m, n));
    assert_product(&c, &reference::matmul_transposed(batch, [m, k, n], &a, &b).unwrap(), k, &what);
}

#[test]
fn odd_sizes() {
    let sizes = [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 129];
    for engine in engines() {
        for (index, &m) in sizes.iter().enumerate() {
            for step in 0..5 {
                let k = sizes[(index + 3 * step) % sizes.len()];
                let n = sizes[(2 * index + 5 * step + 1) % sizes.len()];
                check(engine, [m, k, n], &[]);
            }
        }
    }
}

#[test]
fn batches() {
    for engine in engines() {
        check(engine, [17, 33, 9], &[1]);
        check(engine, [17, 33, 9], &[5]);
        check(engine, [17, 3, 65], &[2, 3]);
        check(engine, [17, 3, 65], &[0, 3]);
    }
}

/// Big enough for the kernel that software devices take big products with, whole tiles or not, read in every width: rows that begin at
/// multiples of 8, of 4, or anywhere.
#[test]
fn big_sizes() {
    for engine in engines() {
        let sizes = [
            ([200, 264, 200], &[][..]),
            ([257, 260, 132], &[]),
            ([257, 129, 259], &[]),
            ([33, 328, 40], &[5, 4]),
            ([30, 1000, 500], &[]),
            ([700, 2000, 7], &[]),
            ([65, 9000, 16], &[1]),
        ];
        for ([m, k, n], leading) in sizes {
            check(engine, [m, k, n], leading);
            // The same where a row's width is all that decides how wide it's read.
            let batch: usize = leading.iter().product();
            let shape = |rows, columns| [leading, &[rows, columns]].concat();
            let (a, b) = (random(3, 1.0, batch * m * k), random(4, 1.0, batch * k * n));
            let a_gpu = engine.upload(&a, shape(m, k)).unwrap();
            let what = format!("{leading:?} {m} {k} {n}");
            let c = engine.matmul(&a_gpu, &engine.upload(&b, shape(k, n)).unwrap()).unwrap();
            assert_product(&c, &reference::matmul(batch, [m, k, n], &a, &b).unwrap(), k, &what);
            let c = engine.matmul_transposed(&a_gpu, &engine.upload(&b, shape(n, k)).unwrap()).unwrap();
            assert_product(&c, &reference::matmul_transposed(batch, [m, k, n], &a, &b).unwrap(), k, &what);
        }
    }
}

/// Both products of naive attention in the kernel for big ones: causal weights reach no later value, not even one that is NaN.
#[test]
fn big_products_of_naive_attention() {
    const FIRST_NAN: usize = 201;
    let setup = Setup::new(Dims { q_heads: 4, kv_heads: 2, ..Dims::square(1, 1, 300, 68) }, Some(Align::BottomRight));
    let Dims { q_len, kv_len, value_dim, .. } = setup.dims;
    let data = setup.data();
    let expected = setup.reference(&data);
    let tolerance = expected.tolerance.o(Precision::F32);
    let mut poisoned = setup.data();
    for head in poisoned.v.chunks_mut(kv_len * value_dim) {
        head[FIRST_NAN * value_dim..][..value_dim].fill(f32::NAN);
    }
    for engine in engines() {
        let plan = engine.plan_by(Path::Naive, &setup.problem()).unwrap();
        let (o, _) = Tensors::amid_nan(engine, &setup.dims, &poisoned).run(engine, &plan);
        for (row, (got, expected)) in o.chunks(value_dim).zip(expected.o.chunks(value_dim)).enumerate() {
            if row % q_len < FIRST_NAN {
                assert_close(got, expected, tolerance, &format!("row {row}"));
            } else {
                assert!(got.iter().all(|x| x.is_nan()), "row {row}");
            }
        }
    }
}

/// So long that a software device gets them in several passes, of either kernel. Of positive terms: what is left out shows beyond the
/// rounding.
#[test]
fn very_long_sums() {
    for (k, n) in [(100_000, 2), (500_000, 6)] {
        let positive = |seed, len| random(seed, 1.0, len).iter().map(|x| x.abs()).collect::<Vec<_>>();
        let (a, b) = (positive(1, 3 * k), positive(2, n * k));
        let expected = reference::matmul_transposed(1, [3, k, n], &a, &b).unwrap();
        for engine in engines() {
            let (a, b) = (amid_nan(engine, &a, &[3, k]), amid_nan(engine, &b, &[n, k]));
            assert_product(&engine.matmul_transposed(&a, &b).unwrap(), &expected, k, &format!("k = {k}"));
        }
    }
}

#[test]
fn one_long_sum() {
    for engine in engines() {
        check(engine, [2, 10_000, 3], &[]);
        check(engine, [300, 2, 200], &[]);
    }
}

/// Over views, one of them with a row stride that isn't its width, the other transposed by its strides.
#[test]
fn views() {
    let (a, b) = (random(1, 1.0, 5 * 40), random(2, 1.0, 2 * 7 * 9));
    for engine in engines() {
        let a_gpu = amid_nan(engine, &a, &[5, 40]).slice(1, 3..12).unwrap().slice(0, 1..4).unwrap();
        let a_host: Vec<f32> = (1..4).flat_map(|row| a[40 * row + 3..40 * row + 12].to_vec()).collect();
        let b_gpu = amid_nan(engine, &b, &[7, 2, 9]).permute(&[1, 0, 2]).unwrap().slice(0, 1..2).unwrap();
        let b_host: Vec<f32> = (0..7).flat_map(|row| b[18 * row + 9..18 * row + 18].to_vec()).collect();
        let c = engine.matmul_transposed(&a_gpu.unflatten(0, 1).unwrap(), &b_gpu).unwrap();
        assert_product(&c, &reference::matmul_transposed(1, [3, 9, 7], &a_host, &b_host).unwrap(), 9, "views");
    }
}

/// A NaN shows in its row, or its column, and nowhere else.
#[test]
fn nan_stays_in_its_row() {
    let (mut a, b) = (random(1, 1.0, 20 * 18), random(2, 1.0, 18 * 20));
    a[7 * 18 + 17] = f32::NAN;
    for engine in engines() {
        let (a, b) = (engine.upload(&a, [20, 18]).unwrap(), engine.upload(&b, [18, 20]).unwrap());
        let c = engine.matmul(&a, &b).unwrap().read().unwrap();
        assert!(c.iter().enumerate().all(|(at, c)| c.is_nan() == (at / 20 == 7)));
        let c = engine.matmul(&b, &a).unwrap().read().unwrap();
        assert!(c.iter().enumerate().all(|(at, c)| c.is_nan() == (at % 18 == 17)));
    }
}
