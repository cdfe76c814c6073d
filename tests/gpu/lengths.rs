//! Any number of queries and keys, with every mask: no tail is dropped, padded into the result, or written past.

use tilewise::Dims;

use super::support::{MASKS, Setup, one_head};

const LENGTHS: [usize; 16] = [0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1000];

/// Two query heads on one key/value head, so that a tail written past its head shows in the next; heads wider than one slice.
fn check(q_len: usize, kv_len: usize, mask: usize) {
    let dims = Dims { q_heads: 2, ..one_head(q_len, kv_len, 20, 12) };
    Setup { seed: (1000 * q_len + kv_len) as u64, ..Setup::new(dims, MASKS[mask % 3]) }.check();
}

/// Every pair of lengths up to two tiles; the masks take turns, so that each length meets each mask in both roles.
#[test]
fn short_queries_and_keys() {
    for (i, &q_len) in LENGTHS[..12].iter().enumerate() {
        for (j, &kv_len) in LENGTHS[..12].iter().enumerate() {
            check(q_len, kv_len, i + j);
        }
    }
}

/// The long ones against a selection of all, every mask with each.
#[test]
fn long_queries() {
    for (i, &q_len) in LENGTHS[12..].iter().enumerate() {
        for j in 0..7 {
            check(q_len, LENGTHS[(5 * i + 2 * j) % 15], i + j);
        }
    }
}

#[test]
fn long_keys() {
    for (j, &kv_len) in LENGTHS[12..].iter().enumerate() {
        for i in 0..7 {
            check(LENGTHS[(3 * j + 2 * i + 1) % 15], kv_len, i + j);
        }
    }
}

#[test]
fn a_thousand_by_a_thousand() {
    for mask in 0..3 {
        check(1000, 1000, mask);
    }
}

/// Equal lengths are where the corners meet; one more or less is where they part.
#[test]
fn square_and_one_off() {
    for n in [16, 64, 65, 128] {
        for (q_len, kv_len) in [(n, n), (n, n + 1), (n + 1, n)] {
            (0..3).for_each(|mask| check(q_len, kv_len, mask));
        }
    }
}
