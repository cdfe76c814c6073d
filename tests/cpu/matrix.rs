//! Matrix products and the softmax of rows.

use tilewise::reference::{matmul, matmul_transposed, softmax_rows};

use super::{assert_close, random};

#[test]
fn small_products() {
    let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // (2, 3)
    let b = [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]; // (3, 2)
    let product = matmul(1, [2, 3, 2], &a, &b).unwrap();
    assert_eq!(product.c, [58.0, 64.0, 139.0, 154.0]);
    assert_eq!(product.mag, 154.0);
    let transposed = [7.0, 9.0, 11.0, 8.0, 10.0, 12.0]; // (2, 3)
    assert_eq!(matmul_transposed(1, [2, 3, 2], &a, &transposed).unwrap(), product);
    assert_eq!(matmul(1, [1, 2, 1], &[3.0, -2.0], &[1.0, 4.0]).unwrap().mag, 11.0);
}

#[test]
fn batches_by_index() {
    let (batch, m, k, n) = (3, 4, 5, 6);
    let (a, b) = (random(1, batch * m * k), random(2, batch * k * n));
    let mut expected = vec![];
    for e in 0..batch {
        for i in 0..m {
            for j in 0..n {
                expected.push((0..k).map(|x| f64::from(a[(e * m + i) * k + x] * b[(e * k + x) * n + j])).sum());
            }
        }
    }
    assert_close(&matmul(batch, [m, k, n], &a, &b).unwrap().c, &expected, 1e-15);
}

#[test]
fn empty_products() {
    assert_eq!(matmul(2, [2, 0, 2], &[], &[]).unwrap().c, [0.0; 8]);
    for (batch, shape) in [(0, [2, 2, 2]), (1, [0, 2, 0]), (1, [0, 0, 0])] {
        assert!(matmul(batch, shape, &[], &[]).unwrap().c.is_empty());
    }
    assert!(matmul(1, [2, 2, 2], &[0.0; 4], &[0.0; 3]).is_err());
    assert!(matmul(usize::MAX, [2, 2, 0], &[], &[]).is_err());
}

#[test]
fn softmax_of_masked_rows() {
    let none = f32::NEG_INFINITY;
    let softmax = softmax_rows(3, 2, &[none, none, 5.0, none, f32::NAN, 0.0]).unwrap();
    assert_close(&softmax.p, &[0.0, 0.0, 1.0, 0.0, f64::NAN, f64::NAN], 0.0);
    assert_close(&softmax.lse, &[f64::NEG_INFINITY, 5.0, f64::NAN], 0.0);
    assert_eq!(softmax_rows(2, 0, &[]).unwrap().lse, [f64::NEG_INFINITY; 2]);
}
