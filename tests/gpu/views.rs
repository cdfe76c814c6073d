//! Tensors as they lie: strides, offsets and shared buffers give the very bits that dense copies give, and results go where the output's
//! strides say.

use tilewise::{Align, Attention, Bindings, Dims, Engine, Error, Inputs, Plan, Tensor, wgpu};

use super::support::{Data, Guarded, Setup, Tensors, amid_nan, bits, engines, is_naive, one_head, plans};

const BATCH: usize = 2;
const LEN: usize = 37;
const DIM: usize = 12;

fn setup(q_heads: usize, kv_heads: usize) -> Setup {
    let dims = Dims { batch: BATCH, q_heads, kv_heads, ..one_head(LEN, LEN, DIM, DIM) };
    Setup::new(dims, Some(Align::BottomRight))
}

/// (batch, heads, length, dim) to (batch, length, heads, dim), or back with the sizes the other way round.
fn swap_heads<T: Copy>(x: &[T], heads: usize, len: usize, dim: usize) -> Vec<T> {
    let at = |b: usize, s: usize, h: usize| ((b * heads + h) * len + s) * dim;
    let batch = x.len() / (heads * len * dim);
    let mut swapped = Vec::new();
    for b in 0..batch {
        for s in 0..len {
            (0..heads).for_each(|h| swapped.extend_from_slice(&x[at(b, s, h)..at(b, s, h) + dim]));
        }
    }
    swapped
}

/// Whether the views give what dense copies of the data give, by every plan.
#[track_caller]
fn check(setup: &Setup, engine: &Engine, data: &Data, views: &Tensors) {
    let dense = Tensors::amid_nan(engine, &setup.dims, data);
    for plan in plans(engine, &setup.problem()) {
        let (one, other) = (views.run(engine, &plan), dense.run(engine, &plan));
        assert_eq!((bits(&one.0), bits(&one.1)), (bits(&other.0), bits(&other.1)), "{:?}", plan.kernels());
    }
}

fn swapped(engine: &Engine, x: &[f32], heads: usize) -> Tensor {
    let lying = amid_nan(engine, &swap_heads(x, heads, LEN, DIM), &[BATCH, LEN, heads, DIM]);
    lying.permute(&[0, 2, 1, 3]).unwrap()
}

#[test]
fn batch_length_heads_dim() {
    let setup = setup(4, 2);
    let data = setup.data();
    for engine in engines() {
        let views =
            Tensors { q: swapped(engine, &data.q, 4), k: swapped(engine, &data.k, 2), v: swapped(engine, &data.v, 2) };
        assert_eq!(bits(&views.q.read().unwrap()), bits(&data.q), "reading a view");
        check(&setup, engine, &data, &views);
    }
}

/// A fused projection: (batch, length, columns of all q, then k, then v heads).
#[test]
fn columns_of_a_fused_projection() {
    for (q_heads, kv_heads) in [(3, 3), (4, 2), (3, 1)] {
        let setup = setup(q_heads, kv_heads);
        let data = setup.data();
        let parts = [(&data.q, q_heads), (&data.k, kv_heads), (&data.v, kv_heads)];
        let parts = parts.map(|(x, heads)| (swap_heads(x, heads, LEN, DIM), heads * DIM));
        let row = |n: usize| parts.iter().flat_map(move |(x, width)| x[n * width..(n + 1) * width].iter().copied());
        let fused: Vec<f32> = (0..BATCH * LEN).flat_map(row).collect();
        let width = (q_heads + 2 * kv_heads) * DIM;
        for engine in engines() {
            let qkv = amid_nan(engine, &fused, &[BATCH, LEN, width]);
            let part = |from: usize, heads: usize| {
                qkv.slice(2, from * DIM..(from + heads) * DIM).unwrap().heads(heads).unwrap()
            };
            let views =
                Tensors { q: part(0, q_heads), k: part(q_heads, kv_heads), v: part(q_heads + kv_heads, kv_heads) };
            check(&setup, engine, &data, &views);
        }
    }
}

/// K and V side by side in one row, and a cache that is longer than what is in use.
#[test]
fn part_of_a_cache_that_holds_both() {
    let setup = setup(2, 1);
    let data = setup.data();
    let capacity = LEN + 20;
    let mut cache = vec![f32::NAN; BATCH * capacity * 2 * DIM];
    for b in 0..BATCH {
        for s in 0..LEN {
            let (to, from) = ((b * capacity + s) * 2 * DIM, (b * LEN + s) * DIM);
            cache[to..to + DIM].copy_from_slice(&data.k[from..from + DIM]);
            cache[to + DIM..to + 2 * DIM].copy_from_slice(&data.v[from..from + DIM]);
        }
    }
    for engine in engines() {
        let cache = amid_nan(engine, &cache, &[BATCH, 1, capacity, 2 * DIM]).slice(2, 0..LEN).unwrap();
        let q = amid_nan(engine, &data.q, &[BATCH, 2, LEN, DIM]);
        let views = Tensors { q, k: cache.slice(3, 0..DIM).unwrap(), v: cache.slice(3, DIM..2 * DIM).unwrap() };
        check(&setup, engine, &data, &views);
    }
}

/// q, k and v may be one tensor.
#[test]
fn one_tensor_for_all_three() {
    let setup = setup(2, 2);
    let data = setup.data();
    let data = Data { k: data.q.clone(), v: data.q.clone(), ..data };
    for engine in engines() {
        let x = amid_nan(engine, &data.q, &[BATCH, 2, LEN, DIM]);
        check(&setup, engine, &data, &Tensors { q: x.clone(), k: x.clone(), v: x });
    }
}

/// o as (batch, length, heads, dim), as a part of wider rows whose other columns stay as they are; lse as (batch, length, heads), which
/// the naive path refuses.
#[test]
fn outputs_with_strides() {
    let setup = setup(4, 2);
    let data = setup.data();
    for engine in engines() {
        let inputs = Tensors::amid_nan(engine, &setup.dims, &data);
        for plan in plans(engine, &setup.problem()) {
            let (o_dense, lse_dense) = inputs.run(engine, &plan);
            let o = Guarded::new(engine, &[BATCH, LEN, 4, DIM + 3]);
            let o_view = o.tensor.permute(&[0, 2, 1, 3]).unwrap().slice(3, 2..2 + DIM).unwrap();
            let lse = Guarded::new(engine, &[BATCH, LEN, 4]);
            let lse_dense_again = Guarded::new(engine, &[BATCH, 4, LEN]);
            let strided = lse.tensor.permute(&[0, 2, 1]).unwrap();
            let lse_view = if is_naive(&plan) { &lse_dense_again.tensor } else { &strided };
            inputs.run_into(engine, &plan, &o_view, lse_view);
            assert_eq!(bits(&o_view.read().unwrap()), bits(&o_dense), "{:?}", plan.kernels());
            assert_eq!(bits(&lse_view.read().unwrap()), bits(&lse_dense), "{:?}", plan.kernels());
            let between =
                o.read().chunks(DIM + 3).all(|row| row[..2].iter().chain(&row[2 + DIM..]).all(|x| x.is_nan()));
            assert!(between, "columns beside the view were written by {:?}", plan.kernels());
            if is_naive(&plan) {
                refuses_strided_lse(engine, &plan, &inputs, &o_view, &strided);
            }
        }
    }
}

fn refuses_strided_lse(engine: &Engine, plan: &Plan, inputs: &Tensors, o: &Tensor, lse: &Tensor) {
    let workspace = engine.alloc_workspace(plan).unwrap();
    let bindings =
        Bindings { inputs: Inputs::new(&inputs.q, &inputs.k, &inputs.v), o, lse, workspace: workspace.as_ref() };
    let mut encoder = engine.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    assert!(
        matches!(plan.record(&mut encoder, &bindings), Err(Error::Invalid(text)) if text.contains("lse with strides"))
    );
}

/// Every start within the device's alignment.
#[test]
fn any_offset() {
    let setup = Setup::new(one_head(3, 5, 4, 4), None);
    let data = setup.data();
    for engine in engines() {
        let plan = engine.plan(&setup.problem()).unwrap();
        let expected = Tensors::amid_nan(engine, &setup.dims, &data).run(engine, &plan);
        for offset in 0..70 {
            let place = |x: &[f32], len: usize, offset: usize| {
                let whole = engine.upload(&[&vec![f32::NAN; offset][..], x].concat(), [offset + x.len()]).unwrap();
                whole.slice(0, offset..offset + x.len()).unwrap().unflatten(0, len).unwrap().unflatten(0, 1).unwrap()
            };
            let place = |x, len, offset| place(x, len, offset).unflatten(0, 1).unwrap();
            let views = Tensors {
                q: place(&data.q, 3, offset),
                k: place(&data.k, 5, offset + 3),
                v: place(&data.v, 5, 2 * offset),
            };
            let got = views.run(engine, &plan);
            assert_eq!((bits(&got.0), bits(&got.1)), (bits(&expected.0), bits(&expected.1)), "offset {offset}");
        }
    }
}

/// Reading and uploading: what went up comes down, narrower types widened.
#[test]
fn uploads_come_back() {
    for engine in engines() {
        let x: Vec<f32> = (0..60u8).map(f32::from).collect();
        let t = engine.upload(&x, [3, 4, 5]).unwrap();
        assert_eq!(t.read().unwrap(), x);
        let part = t.permute(&[2, 0, 1]).unwrap().slice(0, 1..3).unwrap().slice(2, 2..3).unwrap();
        assert_eq!(part.shape(), [2, 3, 1]);
        assert_eq!(part.read().unwrap(), [11.0, 31.0, 51.0, 12.0, 32.0, 52.0]);
        let halves: Vec<_> = x.iter().map(|&x| half::f16::from_f32(x)).collect();
        assert_eq!(engine.upload(&halves, [60]).unwrap().read().unwrap(), x);
        let brains: Vec<_> = x.iter().map(|&x| half::bf16::from_f32(x)).collect();
        assert_eq!(engine.upload(&brains, [60]).unwrap().read().unwrap(), x);
        assert_eq!(engine.upload::<f32>(&[], [4, 0]).unwrap().read().unwrap(), [0.0f32; 0]);
    }
}

/// A last axis that isn't contiguous is refused, not misread.
#[test]
fn a_last_axis_with_gaps_is_refused() {
    for engine in engines() {
        let x = engine.upload(&[0.5f32; 2 * 3 * 4 * 5], [2, 3, 5, 4]).unwrap();
        let turned = x.permute(&[0, 1, 3, 2]).unwrap();
        let error = engine.attention(&turned, &turned, &turned, &Attention::full()).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("contiguous")), "{error}");
    }
}
