//! What is stored at a key that a row doesn't see has no effect on the row, to the bit; what it sees shows in it, and in no other row.

use tilewise::{Align, Dims, Engine, Plan};

use super::support::{Data, Results, Setup, Tensors, bits, engines, one_head, plans};

const POISONS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX];

/// Two heads on one key/value head, across the tiles of every plan, the diagonal within them.
fn setup() -> Setup {
    Setup::new(Dims { q_heads: 2, ..one_head(140, 150, 8, 5) }, Some(Align::BottomRight))
}

/// What row i sees: the keys up to i + OFFSET.
const OFFSET: usize = 10;

/// Runs every plan on both engines, with the data and with zeros in place of what will be poisoned.
fn compare(poisoned: &Data, zeroed: &Data, check: impl Fn(&Results, &Results, &str)) {
    let setup = setup();
    for engine in engines() {
        let run = |data: &Data, plan: &Plan| Tensors::amid_nan(engine, &setup.dims, data).run(engine, plan);
        for plan in plans(engine, &setup.problem()) {
            check(&run(poisoned, &plan), &run(zeroed, &plan), &format!("{:?}", plan.kernels()));
        }
    }
}

/// Fills rows of width `dim`.
fn fill(x: &mut [f32], dim: usize, rows: impl Iterator<Item = usize>, value: f32) {
    rows.for_each(|row| x[row * dim..(row + 1) * dim].fill(value));
}

#[track_caller]
fn assert_same_rows(one: &Results, other: &Results, rows: impl Iterator<Item = usize>, what: &str) {
    for row in rows {
        let (a, b) = (&one.0[5 * row..5 * row + 5], &other.0[5 * row..5 * row + 5]);
        assert_eq!(bits(a), bits(b), "row {row}: {a:?} and {b:?}: {what}");
        assert_eq!(one.1[row].to_bits(), other.1[row].to_bits(), "lse of row {row}: {what}");
    }
}

#[test]
fn keys_that_a_row_does_not_see() {
    for (first, poison) in [(33, POISONS[0]), (64, POISONS[1]), (95, POISONS[2]), (149, POISONS[3])] {
        let (mut poisoned, mut zeroed) = (setup().data(), setup().data());
        for (data, value) in [(&mut poisoned, poison), (&mut zeroed, 0.0)] {
            fill(&mut data.k, 8, first..150, value);
            fill(&mut data.v, 5, first..150, value);
        }
        compare(&poisoned, &zeroed, |poisoned, zeroed, what| {
            for head in 0..2 {
                assert_same_rows(poisoned, zeroed, (0..first - OFFSET).map(|row| 140 * head + row), what);
                if poison.is_nan() {
                    let seeing = 140 * head + first - OFFSET..140 * (head + 1);
                    assert!(poisoned.0[5 * seeing.start..5 * seeing.end].iter().all(|o| o.is_nan()), "o of {what}");
                    assert!(poisoned.1[seeing].iter().all(|lse| lse.is_nan()), "lse of {what}");
                }
            }
        });
    }
}

/// One key only: later keys are sound, so only a row that drops NaN again would come out finite.
#[test]
fn one_key_that_is_nan() {
    for key in [40, 80, 127] {
        let (mut poisoned, mut zeroed) = (setup().data(), setup().data());
        poisoned.k[8 * key + 3] = f32::NAN;
        zeroed.k[8 * key + 3] = 0.0;
        compare(&poisoned, &zeroed, |poisoned, zeroed, what| {
            for head in 0..2 {
                assert_same_rows(poisoned, zeroed, (0..key - OFFSET).map(|row| 140 * head + row), what);
                for row in 140 * head + key - OFFSET..140 * (head + 1) {
                    assert!(poisoned.0[5 * row].is_nan() && poisoned.1[row].is_nan(), "row {row} of {what}");
                }
            }
        });
    }
}

/// In a value, NaN shows in its column of the rows that see it, and not in lse.
#[test]
fn one_value_that_is_nan() {
    let key = 70;
    let (mut poisoned, mut zeroed) = (setup().data(), setup().data());
    poisoned.v[5 * key + 2] = f32::NAN;
    zeroed.v[5 * key + 2] = 0.0;
    compare(&poisoned, &zeroed, |poisoned, zeroed, what| {
        assert_eq!(bits(&poisoned.1), bits(&zeroed.1), "lse of {what}");
        for (at, (one, other)) in poisoned.0.iter().zip(&zeroed.0).enumerate() {
            let sees = at / 5 % 140 + OFFSET >= key;
            assert_eq!(one.is_nan(), sees && at % 5 == 2, "element {at} of {what}");
            assert!(one.is_nan() || one.to_bits() == other.to_bits(), "element {at} of {what}");
        }
    });
}

#[test]
fn one_query_that_is_nan() {
    let (mut poisoned, clean) = (setup().data(), setup().data());
    let row = 77;
    poisoned.q[8 * row] = f32::NAN;
    compare(&poisoned, &clean, |poisoned, clean, what| {
        assert!(poisoned.0[5 * row..5 * row + 5].iter().all(|o| o.is_nan()) && poisoned.1[row].is_nan(), "{what}");
        assert_same_rows(poisoned, clean, (0..280).filter(|it| *it != row), what);
    });
}

/// A batch entry and a key/value head that are NaN throughout leave the others as they are.
#[test]
fn other_heads_and_batch_entries() {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(9, 40, 8, 5) };
    let setup = Setup::new(dims, None);
    let (clean, mut poisoned) = (setup.data(), setup.data());
    // Batch entry 1, head 0: the query heads 0 and 1 of the entry.
    poisoned.k[2 * 40 * 8..3 * 40 * 8].fill(f32::NAN);
    poisoned.v[2 * 40 * 5..3 * 40 * 5].fill(f32::NAN);
    let run = |engine: &Engine, data: &Data, plan: &Plan| Tensors::amid_nan(engine, &dims, data).run(engine, plan);
    for engine in engines() {
        for plan in plans(engine, &setup.problem()) {
            let (poisoned, clean) = (run(engine, &poisoned, &plan), run(engine, &clean, &plan));
            let what = format!("{:?}", plan.kernels());
            let hit = 4 * 9..6 * 9;
            assert_same_rows(&poisoned, &clean, (0..8 * 9).filter(|row| !hit.contains(row)), &what);
            assert!(poisoned.1[hit].iter().all(|lse| lse.is_nan()), "{what}");
        }
    }
}
