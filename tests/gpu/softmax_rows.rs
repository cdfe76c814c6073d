//! The softmax of rows of any length: each row by itself, x left as it was.

use tilewise::reference;

use super::support::{amid_nan, assert_close, bits, engines, random};

#[test]
fn rows_of_any_length() {
    for engine in engines() {
        for (rows, columns) in [
            (1, 1),
            (3, 1),
            (2, 2),
            (5, 3),
            (1, 63),
            (2, 64),
            (3, 65),
            (2, 255),
            (2, 256),
            (3, 257),
            (2, 1000),
            (300, 7),
        ] {
            for range in [1.0, 80.0] {
                let x = random(columns as u64, range, rows * columns);
                let x_gpu = amid_nan(engine, &x, &[rows, columns]);
                let (p, lse) = engine.softmax_rows(&x_gpu).unwrap();
                assert_eq!((p.shape(), lse.shape()), (&[rows, columns][..], &[rows][..]));
                let expected = reference::softmax_rows(rows, columns, &x).unwrap();
                // A weight's relative error is that of the exponent, and of WGSL's exp: 3 + 2|x| units in the last place.
                let tolerance = f64::from(f32::EPSILON) * (8.0 + 3.0 * f64::from(range));
                assert_close(&p.read().unwrap(), &expected.p, tolerance, &format!("weights {rows} {columns} ±{range}"));
                assert_close(&lse.read().unwrap(), &expected.lse, tolerance, &format!("lse {rows} {columns} ±{range}"));
                assert_eq!(bits(&x_gpu.read().unwrap()), bits(&x), "x was changed");
            }
        }
    }
}

#[test]
fn sizes_of_zero() {
    for engine in engines() {
        let (p, lse) = engine.softmax_rows(&engine.upload::<f32>(&[], [0, 5]).unwrap()).unwrap();
        assert_eq!((p.read().unwrap().len(), lse.read().unwrap().len()), (0, 0));
        // A row without columns: nothing to weigh.
        let (p, lse) = engine.softmax_rows(&engine.upload::<f32>(&[], [3, 0]).unwrap()).unwrap();
        assert_eq!((p.read().unwrap(), lse.read().unwrap()), (vec![], vec![f32::NEG_INFINITY; 3]));
    }
}

#[test]
fn leading_axes_are_rows() {
    let x = random(4, 3.0, 2 * 3 * 4 * 5);
    for engine in engines() {
        let (p, lse) = engine.softmax_rows(&engine.upload(&x, [2, 3, 4, 5]).unwrap()).unwrap();
        assert_eq!((p.shape(), lse.shape()), (&[2, 3, 4, 5][..], &[2, 3, 4][..]));
        let expected = reference::softmax_rows(24, 5, &x).unwrap();
        assert_close(&p.read().unwrap(), &expected.p, 2e-6, "weights");
        let (p, lse) = engine.softmax_rows(&engine.upload(&x[..5], [5]).unwrap()).unwrap();
        assert_close(&p.read().unwrap(), &expected.p[..5], 2e-6, "weights of one row");
        assert_eq!(lse.shape(), [0usize; 0]);
        assert_close(&lse.read().unwrap(), &expected.lse[..1], 2e-6, "lse of one row");
    }
}

#[test]
fn nan_stays_in_its_row() {
    for engine in engines() {
        for place in [0, 69, 299] {
            let mut x = random(5, 1.0, 4 * 300);
            let clean = reference::softmax_rows(4, 300, &x).unwrap();
            x[2 * 300 + place] = f32::NAN;
            let (p, lse) = engine.softmax_rows(&engine.upload(&x, [4, 300]).unwrap()).unwrap();
            let (p, lse) = (p.read().unwrap(), lse.read().unwrap());
            for row in 0..4 {
                let p = &p[300 * row..300 * (row + 1)];
                if row == 2 {
                    assert!(p.iter().all(|p| p.is_nan()) && lse[row].is_nan());
                } else {
                    assert_close(p, &clean.p[300 * row..300 * (row + 1)], 2e-6, "a row without NaN");
                }
            }
        }
    }
}

/// An element of -inf has no weight, as in the reference.
#[test]
fn minus_infinity_is_masked() {
    let mut x = random(6, 1.0, 3 * 70);
    x[..35].fill(f32::NEG_INFINITY);
    x[70..140].fill(f32::NEG_INFINITY);
    let expected = reference::softmax_rows(3, 70, &x).unwrap();
    for engine in engines() {
        let (p, lse) = engine.softmax_rows(&engine.upload(&x, [3, 70]).unwrap()).unwrap();
        assert_close(&p.read().unwrap(), &expected.p, 2e-6, "weights");
        assert_close(&lse.read().unwrap(), &expected.lse, 2e-6, "lse");
    }
}
