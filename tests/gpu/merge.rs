//! Results over parts of the keys, merged: what all keys give; exact where a part has none.

use tilewise::reference;
use tilewise::{AttentionOutput, DType, Dims, Engine, Storage};

use super::call::{Call, HostData, Layout, Lens, precision};
use super::support::{amid_nan, amid_nan_in, assert_close, bits, engines, one_head, random};

fn state(engine: &Engine, o: &[f32], lse: &[f32], shape: [usize; 4]) -> AttentionOutput {
    AttentionOutput { o: amid_nan(engine, o, &shape), lse: amid_nan(engine, lse, &shape[..3]) }
}

fn read(state: &AttentionOutput) -> (Vec<f32>, Vec<f32>) {
    (state.o.read().unwrap(), state.lse.read().unwrap())
}

const NONE: f32 = f32::NEG_INFINITY;

/// A11: an empty state has no part, whatever lies in it, and the other's bits are the result's.
#[test]
fn a11_empty_states() {
    let (full, lse) = ([1.5, -0.0, 3.0e-39, f32::MAX, 7.0], [3.0]);
    for engine in engines() {
        let full = state(engine, &full, &lse, [1, 1, 1, 5]);
        for junk in [0.0, f32::NAN, f32::INFINITY] {
            let empty = state(engine, &[junk; 5], &[NONE], [1, 1, 1, 5]);
            for merged in [engine.merge(&empty, &full).unwrap(), engine.merge(&full, &empty).unwrap()] {
                let (o, lse) = read(&merged);
                assert_eq!((bits(&o), bits(&lse)), (bits(&read(&full).0), bits(&[3.0])), "{junk}");
            }
            let (o, lse) = read(&engine.merge(&empty, &empty).unwrap());
            assert_eq!((bits(&o), bits(&lse)), (bits(&[0.0; 5]), bits(&[NONE])), "{junk}");
        }
    }
}

/// Rows of any weights, against the reference: far apart, equal, beyond what e^x can hold.
#[test]
fn states_against_the_reference() {
    let lse_a = [0.0, 1.0, -1.0, 1000.0, -1000.0, 80.0, NONE, NONE, 3.0e38, -3.0e38, 5.0, 0.5];
    let lse_b = [0.0, 2.0, -1.0, 1000.5, -3000.0, -80.0, 1.0, NONE, -3.0e38, -3.0e38, NONE, 0.25];
    for dim in [1, 3, 4, 7, 64] {
        let (o_a, o_b) = (random(1, 2.0, 12 * dim), random(2, 2.0, 12 * dim));
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (o, lse) = reference::merge(dim, [&wide(&o_a), &wide(&o_b)], [&wide(&lse_a), &wide(&lse_b)]).unwrap();
        for engine in engines() {
            for shape in [[1, 1, 12, dim], [2, 3, 2, dim], [12, 1, 1, dim]] {
                let (a, b) = (state(engine, &o_a, &lse_a, shape), state(engine, &o_b, &lse_b, shape));
                let merged = read(&engine.merge(&a, &b).unwrap());
                assert_close(&merged.0, &o, 2e-6, "o");
                for (got, expected) in merged.1.iter().zip(&lse) {
                    assert!(
                        f64::from(*got) == *expected
                            || (f64::from(*got) - expected).abs() <= 2e-7 * expected.abs().max(4.0),
                        "{got} {expected}"
                    );
                }
            }
        }
    }
}

/// A NaN shows in its row and in no other.
#[test]
fn nan_stays_in_its_row() {
    let ones = [1.0; 6];
    for engine in engines() {
        let sound = state(engine, &ones, &[0.5; 3], [1, 1, 3, 2]);
        let broken = state(engine, &[1.0, 1.0, f32::NAN, 1.0, 1.0, 1.0], &[0.5, f32::NAN, 0.5], [1, 1, 3, 2]);
        for (a, b) in [(&sound, &broken), (&broken, &sound)] {
            let (o, lse) = read(&engine.merge(a, b).unwrap());
            assert!(o[2].is_nan() && o[3].is_nan() && lse[1].is_nan(), "{o:?} {lse:?}");
            assert!([o[0], o[1], o[4], o[5], lse[0], lse[2]].iter().all(|x| x.is_finite()), "{o:?} {lse:?}");
        }
    }
}

/// The keys `range` of a call's data.
fn part(call: &Call, data: &HostData, range: core::ops::Range<usize>) -> (Call, HostData) {
    let Dims { kv_len, head_dim, value_dim, .. } = call.dims;
    let cut = |x: &[f32], dim: usize| {
        x.chunks(kv_len * dim).flat_map(|head| head[range.start * dim..range.end * dim].to_vec()).collect()
    };
    let dims = Dims { kv_len: range.len(), ..call.dims };
    (Call { dims, ..call.clone() }, HostData { k: cut(&data.k, head_dim), v: cut(&data.v, value_dim), ..data.clone() })
}

/// Keys in chunks of any sizes, an empty one among them: as many merges, and the result of all keys.
#[test]
fn chunks_of_keys() {
    let dims = Dims { batch: 2, q_heads: 4, kv_heads: 2, ..one_head(37, 211, 9, 6) };
    for (dtype, layout) in [(DType::F32, Layout::Dense), (DType::F16, Layout::Swapped), (DType::Bf16, Layout::Dense)] {
        // What is kept between merges is f32.
        let storage = Storage { o: DType::F32, ..Storage::all(dtype) };
        let call = Call { storage, layout, softcap: Some(3.0), ..Call::new(dims) };
        let data = call.data();
        let expected = call.reference(&data);
        for engine in engines() {
            let parts = [0..64, 64..64, 64..65, 65..200, 200..211].map(|range| {
                let (call, data) = part(&call, &data, range);
                engine.attention_with(&call.upload(engine, &data).inputs(), &call.options()).unwrap()
            });
            let [first, rest @ ..] = &parts;
            let merged = rest.iter().fold(first.clone(), |state, part| engine.merge(&state, part).unwrap());
            call.assert_matches(&read(&merged), &expected, "five parts");
        }
    }
}

/// States of a packed batch, and of types of two bytes whose rows share words.
#[test]
fn packed_and_small_states() {
    let dims = Dims { batch: 3, q_heads: 3, kv_heads: 1, ..one_head(20, 33, 8, 5) };
    let call = Call { lens: Lens::Packed, ..Call::new(dims) };
    let data = call.data();
    for engine in engines() {
        let part = engine.attention_with(&call.upload(engine, &data).inputs(), &call.options()).unwrap();
        let (o, lse) = read(&part);
        // Twice the same keys: the same mean, and ln 2 more.
        let merged = read(&engine.merge(&part, &part).unwrap());
        assert_close(&merged.0, &o.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), 1e-6, "o");
        let twice: Vec<f64> = lse.iter().map(|&x| f64::from(x) + core::f64::consts::LN_2).collect();
        assert_close(&merged.1, &twice, 1e-6, "lse");
        for dtype in [DType::F16, DType::Bf16] {
            let o = amid_nan_in(dtype, engine, &o, part.o.shape());
            let small = AttentionOutput { o, lse: part.lse.clone() };
            let merged = engine.merge(&small, &part).unwrap();
            assert_eq!(merged.o.dtype(), dtype);
            let tolerance = 2.0 * precision(dtype).unit_roundoff() + 1e-6;
            assert_close(&merged.o.read().unwrap(), &expected_of(&part), tolerance, "o");
        }
    }
}

fn expected_of(state: &AttentionOutput) -> Vec<f64> {
    state.o.read().unwrap().iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn states_that_do_not_fit_together() {
    let engines = engines();
    for engine in &engines {
        let new = |o: &[usize], lse: &[usize]| AttentionOutput {
            o: engine.alloc(DType::F32, o).unwrap(),
            lse: engine.alloc(DType::F32, lse).unwrap(),
        };
        let sound = new(&[1, 2, 3, 4], &[1, 2, 3]);
        for (other, word) in [
            (new(&[1, 2, 3, 5], &[1, 2, 3]), "same shapes"),
            (new(&[1, 2, 4, 4], &[1, 2, 4]), "same shapes"),
            (new(&[2, 3, 4], &[3, 2]), "same shapes"),
        ] {
            let message = engine.merge(&sound, &other).unwrap_err().to_string();
            assert!(message.contains(word) && message.contains("accepted"), "{message}");
        }
        let twisted = new(&[1, 2, 3, 4], &[1, 3, 2]);
        assert!(engine.merge(&twisted, &twisted).unwrap_err().to_string().contains("accepted"));
        let empty = new(&[1, 2, 0, 4], &[1, 2, 0]);
        assert_eq!(engine.merge(&empty, &empty).unwrap().o.read().unwrap(), []);
    }
    if let [one, other] = engines[..] {
        let of = |engine: &Engine| state(engine, &[1.0], &[0.0], [1, 1, 1, 1]);
        let message = one.merge(&of(one), &of(other)).unwrap_err().to_string();
        assert!(message.contains("another engine"), "{message}");
    }
}
