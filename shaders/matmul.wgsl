// matmul: C = alpha * A B for every matrix of a two-level batch; B as stored, or read as its transpose.
// Maths     c[m, n] = alpha * sum over k < reach(m) of a[m, k] * b[k, n]; reach is all of k, or m + diagonal + 1 for a causal A.
// Shapes    a (outer, inner, m, k)  b (outer, inner / group_size, k, n), or (.., n, k) read transposed  c (outer, inner, m, n); last
//           axes contiguous, the other strides and offsets in params, in elements. Matrix (o, i) of c meets matrix (o, i / group_size)
//           of b: the key/value head of a query head.
// Mapping   A workgroup owns a BLOCK_M x BLOCK_N tile of one c. Thread (x, y) owns its rows 4*(i*TY + y) .. +3, i < ROW_VECS, and of
//           them the columns 4*(i*TX + x) .. +3, i < COL_VECS.
// Budget    sh_stage: SLICE_K*(A_STRIDE + B_STRIDE) vec4: a slice of A and one of B. At the defaults 8704 bytes.
// Registers vec4<f32>: acc and a part of it 4*ROW_VECS*COL_VECS each, operands ROW_VECS + COL_VECS.
// Barriers  Two a slice of k, workgroup-uniform. Rows, columns and k past the end are staged as zeros, never skipped.
// Numerics  All f32. Products are summed in the order of k, PART_K of them apart before they meet the sum of all: of many alike terms each
//           addition to a sum that is much larger rounds the same way. Beyond a row's reach nothing is added, whatever b holds there (a NaN
//           too).
//           A dispatch over later k adds to what c holds: a software device gets a long product in several, see flash_fwd.
// Source    Volkov & Demmel 2008 (register and shared-memory blocking).

const TX: u32 = 16u; // @spec
const TY: u32 = 16u; // @spec
const ROW_VECS: u32 = 1u; // @spec
const COL_VECS: u32 = 1u; // @spec
const SLICE_K: u32 = 16u; // @spec

const THREADS: u32 = TX * TY;
// Products that are summed apart from those before, whole slices: see Numerics.
const PART_K: u32 = 128u;
const BLOCK_M: u32 = 4u * TY * ROW_VECS;
const BLOCK_N: u32 = 4u * TX * COL_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const A_STRIDE: u32 = TY * ROW_VECS + 1u;
const B_STRIDE: u32 = TX * COL_VECS + 1u;
const B_BASE: u32 = SLICE_K * A_STRIDE;
const STAGE_VECS: u32 = SLICE_K * (A_STRIDE + B_STRIDE);

// @include params = uniform
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;

// @include matmul

// (k within the slice, vec4 of columns) that a staging item fills: neighbouring threads read neighbouring elements.
fn b_item(item: u32) -> vec2<u32> {
    if (B_TRANSPOSED) {
        return vec2(item % SLICE_K, item / SLICE_K);
    }
    return vec2(item / (TX * COL_VECS), item % (TX * COL_VECS));
}

@compute @workgroup_size(TX, TY)
fn matmul(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    if (number >= params.end_block) {
        return; // the whole workgroup at once: the grid is folded into a rectangle
    }
    let block = block_of(number, BLOCK_M, BLOCK_N);
    let first_row = block.first_row;
    let first_column = block.first_column;
    let x = thread.x;
    let y = thread.y;
    let k_end = min(reach(min(first_row + BLOCK_M, params.m) - 1u), params.end_k);

    var acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>; // acc[row * COL_VECS + column vector]
    for (var part_k = params.first_k; part_k < k_end; part_k += PART_K) {
        var part: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>;
        for (var k0 = part_k; k0 < min(part_k + PART_K, k_end); k0 += SLICE_K) {
            // A transposed: a vec4 holds four rows of one k.
            for (var item = lane; item < SLICE_K * TY * ROW_VECS; item += THREADS) {
                let k = k0 + item % SLICE_K;
                let row = first_row + 4u * (item / SLICE_K);
                var four = vec4(0.0);
                // @unroll
                for (var e = 0u; e < 4u; e++) {
                    let inside = k < params.k && row + e < params.m;
                    four[e] = select(0.0, a[select(0u, block.a_base + (row + e) * params.a.row + k, inside)], inside);
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
                    four[e] = select(0.0, b[select(0u, block.b_base + b_index(k, column), inside)], inside);
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
                            part[(4u * i + e) * COL_VECS + j] =
                                multiply_add(vec4(a4[e]), b4[j], part[(4u * i + e) * COL_VECS + j], k0 + k, vec4(reach(row)));
                        }
                    }
                }
            }
            workgroupBarrier(); // every reader of the stage is done
        }
        // @unroll
        for (var n = 0u; n < 4u * ROW_VECS * COL_VECS; n++) {
            acc[n] += part[n];
        }
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
                        let at = block.c_base + row * params.c.row + column;
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
