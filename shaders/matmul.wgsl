// matmul: C = alpha * A B for every matrix of a two-level batch; B as stored, or read as its transpose.
// Maths     c[m, n] = alpha * sum over k < reach(m) of a[m, k] * b[k, n]; reach is all of k, or m + diagonal + 1 for a causal A.
// Shapes    a (outer, inner, m, k)  b (outer, inner / group_size, k, n), or (.., n, k) read transposed  c (outer, inner, m, n); last
//           axes contiguous, the other strides and offsets in params, in elements. Matrix (o, i) of c meets matrix (o, i / group_size)
//           of b: the key/value head of a query head.
// Mapping   A workgroup owns a BLOCK_M x BLOCK_N tile of one c. Thread (x, y) owns its rows 4*(i*TY + y) .. +3, i < ROW_VECS, and of
//           them the columns 4*(i*TX + x) .. +3, i < COL_VECS.
// Budget    sh_stage: SLICE_K*(A_STRIDE + B_STRIDE) vec4: a slice of A and one of B. At the defaults 8704 bytes.
// Registers vec4<f32>: acc 4*ROW_VECS*COL_VECS, operands ROW_VECS + COL_VECS.
// Barriers  Two a slice of k, workgroup-uniform. Rows, columns and k past the end are staged as zeros, never skipped.
// Numerics  All f32, products summed in the order of k. Beyond a row's reach nothing is added, whatever b holds there (a NaN too).
//           A dispatch over later k adds to what c holds: a software device gets a long product in several, see flash_fwd.
// Source    Volkov & Demmel 2008 (register and shared-memory blocking).

const TX: u32 = 16u; // @spec
const TY: u32 = 16u; // @spec
const ROW_VECS: u32 = 1u; // @spec
const COL_VECS: u32 = 1u; // @spec
const SLICE_K: u32 = 16u; // @spec

const THREADS: u32 = TX * TY;
const BLOCK_M: u32 = 4u * TY * ROW_VECS;
const BLOCK_N: u32 = 4u * TX * COL_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const A_STRIDE: u32 = TY * ROW_VECS + 1u;
const B_STRIDE: u32 = TX * COL_VECS + 1u;
const B_BASE: u32 = SLICE_K * A_STRIDE;
const STAGE_VECS: u32 = SLICE_K * (A_STRIDE + B_STRIDE);

// One tensor's place: element (o, i, row, column) is at offset + o*outer + i*inner + row*row + column.
struct Strides {
    offset: u32,
    outer: u32,
    inner: u32,
    row: u32,
}

struct Params {
    a: Strides,
    b: Strides,
    c: Strides,
    m: u32,
    n: u32,
    k: u32,
    inner: u32,
    group_size: u32,
    m_blocks: u32,    // ceil(m / BLOCK_M)
    n_blocks: u32,    // ceil(n / BLOCK_N)
    first_block: u32, // this dispatch owns the blocks first_block .. end_block of all matrices
    end_block: u32,
    diagonal: i32,    // of a causal A
    alpha: f32,
    first_k: u32,     // and its part first_k .. end_k of the sum, whole slices; after the first it is added to c
    end_k: u32,
    pad_0: u32,
    pad_1: u32,
    pad_2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;

// @include matmul_b = rows
// @include matmul_reach = all

@compute @workgroup_size(TX, TY)
fn matmul(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let block = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    if (block >= params.end_block) {
        return; // the whole workgroup at once: the grid is folded into a rectangle
    }
    let x = thread.x;
    let y = thread.y;
    let first_column = (block % params.n_blocks) * BLOCK_N;
    let first_row = (block / params.n_blocks % params.m_blocks) * BLOCK_M;
    let matrix = block / (params.n_blocks * params.m_blocks);
    let outer = matrix / params.inner;
    let inner = matrix % params.inner;
    let a_base = params.a.offset + outer * params.a.outer + inner * params.a.inner;
    let b_base = params.b.offset + outer * params.b.outer + inner / params.group_size * params.b.inner;
    let c_base = params.c.offset + outer * params.c.outer + inner * params.c.inner;
    let k_end = min(reach(min(first_row + BLOCK_M, params.m) - 1u), params.end_k);

    var acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>; // acc[row * COL_VECS + column vector]
    for (var k0 = params.first_k; k0 < k_end; k0 += SLICE_K) {
        // A transposed: a vec4 holds four rows of one k.
        for (var item = lane; item < SLICE_K * TY * ROW_VECS; item += THREADS) {
            let k = k0 + item % SLICE_K;
            let row = first_row + 4u * (item / SLICE_K);
            var four = vec4(0.0);
            // @unroll
            for (var e = 0u; e < 4u; e++) {
                let inside = k < params.k && row + e < params.m;
                four[e] = select(0.0, a[select(0u, a_base + (row + e) * params.a.row + k, inside)], inside);
            }
            sh_stage[(item % SLICE_K) * A_STRIDE + item / SLICE_K] = four;
        }
        for (var item = lane; item < SLICE_K * TX * COL_VECS; item += THREADS) {
            let at = b_item(item);
            var four = vec4(0.0);
            // @unroll
            for (var e = 0u; e < 4u; e++) {
                let k = k0 + at.x;
                let column = first_column + 4u * at.y + e;
                let inside = k < params.k && column < params.n;
                four[e] = select(0.0, b[select(0u, b_base + b_index(k, column), inside)], inside);
            }
            sh_stage[B_BASE + at.x * B_STRIDE + at.y] = four;
        }
        workgroupBarrier();
        for (var k = 0u; k < SLICE_K; k++) {
            var b4: array<vec4<f32>, COL_VECS>;
            // @unroll
            for (var j = 0u; j < COL_VECS; j++) {
                b4[j] = sh_stage[B_BASE + k * B_STRIDE + j * TX + x];
            }
            // @unroll
            for (var i = 0u; i < ROW_VECS; i++) {
                let a4 = sh_stage[k * A_STRIDE + i * TY + y];
                // @unroll
                for (var e = 0u; e < 4u; e++) {
                    // @unroll
                    for (var j = 0u; j < COL_VECS; j++) {
                        let row = first_row + 4u * (i * TY + y) + e;
                        acc[(4u * i + e) * COL_VECS + j] = multiply_add(a4[e], b4[j], acc[(4u * i + e) * COL_VECS + j], row, k0 + k);
                    }
                }
            }
        }
        workgroupBarrier(); // every reader of the stage is done
    }

    // @unroll
    for (var i = 0u; i < ROW_VECS; i++) {
        // @unroll
        for (var e = 0u; e < 4u; e++) {
            let row = first_row + 4u * (i * TY + y) + e;
            // @unroll
            for (var j = 0u; j < COL_VECS; j++) {
                let four = acc[(4u * i + e) * COL_VECS + j] * params.alpha;
                // @unroll
                for (var f = 0u; f < 4u; f++) {
                    let column = first_column + 4u * (j * TX + x) + f;
                    if (row < params.m && column < params.n) {
                        let at = c_base + row * params.c.row + column;
                        if (params.first_k > 0u) {
                            c[at] += four[f];
                        } else {
                            c[at] = four[f];
                        }
                    }
                }
            }
        }
    }
}
