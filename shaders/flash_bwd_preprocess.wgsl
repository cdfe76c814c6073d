// flash_bwd_preprocess: of each row what the other backward kernels need, its lse and delta.
// Maths     delta = do . o - dlse: dS = P (dO V^T - delta), since the weights of a row sum to 1 and lse's gradient adds P dlse.
// Shapes    o, grad_o (batch, heads, rows, dim)  lse, grad_lse (batch, heads, rows)  extras: at states, two words a row: lse, delta;
//           strides and offsets come in params, in elements.
// Mapping   A thread owns a row; a workgroup THREADS of them.
// Budget    0 bytes of workgroup memory.
// Registers A few.
// Barriers  None.
// Numerics  f32, summed in the order of the columns. A row with an lse of -inf has no weights: its state is never read beyond that. The
//           gradient of an lse of -inf counts for nothing, nor does do where o is 0, whatever it holds: rows that see no key.
// Source    Dao et al. 2022, appendix B.4 (D), Dao 2023; dlse as in Shah et al. 2024's code: taken from delta.

const THREADS: u32 = 64u; // @spec
const GRAD_LSE: bool = false; // @spec lse has a gradient too

const O_BINDING: u32 = 1u;
const GRAD_O_BINDING: u32 = 2u;
const GRAD_LSE_BINDING: u32 = 4u;
const NEG_INF_BITS: u32 = 0xff800000u;

// One tensor's place: element (b, h, row, column) is at offset + b*batch + h*head + row*row + column.
struct Strides {
    offset: u32,
    batch: u32,
    head: u32,
    row: u32,
}

struct Params {
    o: Strides,
    grad_o: Strides,
    lse: Strides,
    grad_lse: Strides,
    heads: u32,
    rows: u32,
    dim: u32,
    items: u32,       // rows of all heads
    states: u32,      // where in extras
    first_block: u32, // this dispatch owns the blocks first_block .. end_block, of THREADS rows each
    end_block: u32,
    pad: u32,
}

// @include params = uniform
// @include stored as o = f32
// @include stored as grad_o = f32
@group(0) @binding(3) var<storage, read> lse: array<u32>;
// @include stored as grad_lse = none
// @include extras = state

@compute @workgroup_size(THREADS)
fn flash_bwd_preprocess(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let block = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let item = block * THREADS + lane;
    if (block >= params.end_block || item >= params.items) {
        return;
    }
    let batch = item / (params.heads * params.rows);
    let head = item / params.rows % params.heads;
    let row = item % params.rows;
    let o_base = params.o.offset + batch * params.o.batch + head * params.o.head + row * params.o.row;
    let grad_base = params.grad_o.offset + batch * params.grad_o.batch + head * params.grad_o.head + row * params.grad_o.row;
    var delta = 0.0;
    for (var column = 0u; column < params.dim; column++) {
        let value = o_at(o_base + column);
        delta = select(fma(value, grad_o_at(grad_base + column), delta), delta, value == 0.0);
    }
    let bits = lse[params.lse.offset + batch * params.lse.batch + head * params.lse.head + row * params.lse.row];
    if (GRAD_LSE) {
        let at = params.grad_lse.offset + batch * params.grad_lse.batch + head * params.grad_lse.head + row * params.grad_lse.row;
        delta -= select(grad_lse_at(at), 0.0, bits == NEG_INF_BITS);
    }
    store_extra(params.states + 2u * item, bits);
    store_extra(params.states + 2u * item + 1u, bitcast<u32>(delta));
}
