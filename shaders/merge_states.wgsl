// merge_states: attention over all keys, of two results over some of them each.
// Maths     m = max(lse_a, lse_b);  w_a = e^(lse_a-m), w_b likewise;  o = (w_a a + w_b b) / (w_a + w_b);  lse = m + ln(w_a + w_b).
// Shapes    a, b, out (batch, heads, rows, dim), lse_a, lse_b, lse (batch, heads, rows); strides and offsets come in params, in elements.
// Mapping   A thread owns four neighbouring columns of a row; a workgroup THREADS of them, row by row.
// Budget    None: 0 bytes.
// Registers Three vec4<f32>.
// Barriers  None.
// Numerics  f32. A state without keys, lse -inf, has no part: the other's bits are the result's, whatever lies in its o; of two such the
//           result is 0 and -inf. A NaN in an lse shows in the row.
// Source    Milakov & Gimelshein 2018 (the operator of online softmax, which is associative); Dao et al. 2023 (Flash-Decoding).

const THREADS: u32 = 64u; // @spec

const A_BINDING: u32 = 1u;
const B_BINDING: u32 = 2u;
const LOG2_E: f32 = 1.4426950408889634;
const NEG_INF_BITS: u32 = 0xff800000u;

// One tensor's place: element (b, h, row, column) is at offset + b*batch + h*head + row*row + column.
struct Strides {
    offset: u32,
    batch: u32,
    head: u32,
    row: u32,
}

struct Params {
    a: Strides,
    b: Strides,
    out: Strides,
    lse_a: Strides,
    lse_b: Strides,
    lse: Strides,
    heads: u32,
    rows: u32,
    dim: u32,
    row_vecs: u32,    // ceil(dim / 4)
    items: u32,       // batch * heads * rows * row_vecs
    first_block: u32, // this dispatch owns the items first_block * THREADS .. end_block * THREADS
    end_block: u32,
    pad: u32,
}

// @include params = uniform
// @include stored as a = f32
// @include stored as b = f32
@group(0) @binding(3) var<storage, read> lse_a: array<u32>;
const OUT_BINDING: u32 = 4u;
// @include out = f32
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;
@group(0) @binding(6) var<storage, read> lse_b: array<u32>;

// WGSL may take NaN for impossible, so that it is told by its bits.
fn is_nan(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

@compute @workgroup_size(THREADS)
fn merge_states(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let block = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let item = block * THREADS + lane;
    if (block >= params.end_block || item >= params.items) {
        return;
    }
    let column = 4u * (item % params.row_vecs);
    let line = item / params.row_vecs;
    let row = line % params.rows;
    let head = (line / params.rows) % params.heads;
    let batch = line / (params.rows * params.heads);
    let a_at = params.a.offset + batch * params.a.batch + head * params.a.head + row * params.a.row + column;
    let b_at = params.b.offset + batch * params.b.batch + head * params.b.head + row * params.b.row + column;
    let out_base = params.out.offset + batch * params.out.batch + head * params.out.head + row * params.out.row + column;
    let a_bits = lse_a[params.lse_a.offset + batch * params.lse_a.batch + head * params.lse_a.head + row * params.lse_a.row];
    let b_bits = lse_b[params.lse_b.offset + batch * params.lse_b.batch + head * params.lse_b.head + row * params.lse_b.row];
    let a_empty = a_bits == NEG_INF_BITS;
    let b_empty = b_bits == NEG_INF_BITS;

    // Each state's weight, an empty one's standing for nothing that is read.
    let a_lse = bitcast<f32>(select(a_bits, 0u, a_empty));
    let b_lse = bitcast<f32>(select(b_bits, 0u, b_empty));
    let largest = max(a_lse, b_lse);
    // An infinite lse is no less than itself.
    let a_weight = select(exp2(max((a_lse - largest) * LOG2_E, -200.0)), 1.0, a_lse == largest);
    let b_weight = select(exp2(max((b_lse - largest) * LOG2_E, -200.0)), 1.0, b_lse == largest);
    let sum = a_weight + b_weight;
    let count = min(params.dim - column, 4u);
    var four = vec4(0.0);
    // @unroll
    for (var e = 0u; e < 4u; e++) {
        let inside = e < count;
        let a_value = a_at_or_zero(a_at + e, inside && !a_empty);
        let b_value = b_at_or_zero(b_at + e, inside && !b_empty);
        // The other's as it is, a -0 too.
        let either = select(a_value, b_value, a_empty);
        let merged = select((a_weight * a_value + b_weight * b_value) / sum, either, a_empty || b_empty);
        four[e] = select(select(merged, b_lse, is_nan(b_bits)), a_lse, is_nan(a_bits));
    }
    out_store(out_base, four, count);
    if (column == 0u) {
        var bits = bitcast<u32>(largest + log(sum));
        if (a_empty || is_nan(b_bits)) {
            bits = b_bits;
        } else if (b_empty || is_nan(a_bits)) {
            bits = a_bits;
        }
        lse[params.lse.offset + batch * params.lse.batch + head * params.lse.head + row * params.lse.row] = bits;
    }
}

fn a_at_or_zero(index: u32, present: bool) -> f32 {
    return select(0.0, a_at(select(0u, index, present)), present);
}

fn b_at_or_zero(index: u32, present: bool) -> f32 {
    return select(0.0, b_at(select(0u, index, present)), present);
}
