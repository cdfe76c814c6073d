// matmul_broadcast: C = alpha * A B for every matrix of a two-level batch, everything in registers: each invocation reads a part of B, and a
//           subgroup hands it round.
// Maths     As matmul: c[m, n] = alpha * sum over k < reach(m) of a[m, k] * b[k, n].
// Shapes    As matmul: a (outer, inner, m, k)  b (outer, inner / group_size, k, n), or (.., n, k) read transposed  c (outer, inner, m, n).
// Mapping   A workgroup of LANES invocations, all of one subgroup, owns LANES * ROWS rows and COLUMNS columns of one c: a lane owns the
//           rows first_row + r*LANES + lane, r < ROWS. It walks k SLICE_K at a time; a lane reads its rows' part of A, and its share of
//           the slice of B, and subgroupBroadcast gives each element of that to all.
// Budget    0 bytes of workgroup memory.
// Registers f32: acc and a part of it ROWS * COLUMNS each, a ROWS * SLICE_K, b READ_COLUMNS * SLICE_K / LANES. As flash_fwd_broadcast it's for software devices.
// Barriers  None.
// Numerics  As matmul: all f32, products summed in the order of k, in parts; rows, columns and k past the end count as zeros, and
//           nothing is added beyond a row's reach.
// Source    As matmul. Why broadcasts: see flash_fwd_broadcast.

const LANES: u32 = 8u; // @spec
const ROW_VECS: u32 = 2u; // @spec
const COLUMNS: u32 = 64u; // @spec
const SLICE_K: u32 = 8u; // @spec
const ADDS: bool = false; // @spec to what c holds: a dispatch over later k

const ROWS: u32 = 4u * ROW_VECS;
const PART_K: u32 = 128u; // as matmul's
// A lane reads B_K by B_COLUMNS elements of B at once, one of them 1, and the subgroup a slice of READ_COLUMNS columns.
const B_K: u32 = 1u; // @spec
const B_COLUMNS: u32 = 1u; // @spec
const K_LANES: u32 = SLICE_K / B_K;
const COLUMN_LANES: u32 = LANES / K_LANES;
const READ_COLUMNS: u32 = COLUMN_LANES * B_COLUMNS;
const A_BINDING: u32 = 1u;
const B_BINDING: u32 = 2u;

// @include params = uniform
// @include wide as a = f32_1
// @include pair as a_pair = none
// @include wide as b = f32_1
// @include pair as b_pair = none
@group(0) @binding(3) var<storage, read_write> c: array<f32>;
// @include matmul

@compute @workgroup_size(LANES)
fn matmul_broadcast(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    if (number >= params.end_block) {
        return;
    }
    let block = block_of(number, LANES * ROWS, COLUMNS);
    let k_end = min(reach(min(block.first_row + LANES * ROWS, params.m) - 1u), params.end_k);
    let last_column = (params.n - 1u) / B_COLUMNS * B_COLUMNS;
    let own_row = block.first_row + lane; // the first of them
    let own_k = lane % K_LANES * B_K;
    let own_column = block.first_column + lane / K_LANES * B_COLUMNS;
    var a_rows: array<u32, ROWS>; // where they begin
    var reaches: array<vec4<u32>, ROW_VECS>;
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = min(own_row + r * LANES, params.m - 1u);
        a_rows[r] = block.a_base + row * params.a.row;
        reaches[r / 4u][r % 4u] = reach(row);
    }

    var acc: array<vec4<f32>, COLUMNS * ROW_VECS>; // acc[column * ROW_VECS + row vector]
    for (var part_k = params.first_k; part_k < k_end; part_k += PART_K) {
        var part: array<vec4<f32>, COLUMNS * ROW_VECS>;
        for (var k0 = part_k; k0 < min(part_k + PART_K, k_end); k0 += SLICE_K) {
            var a_slice: array<vec4<f32>, SLICE_K * ROW_VECS>;
            // @unroll
            for (var k = 0u; k < SLICE_K; k += A_WIDTH) {
                // A row's elements lie before the next row's: k past its end is read elsewhere, and not used.
                let inside = k0 + k < params.k;
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    let elements = a_read(select(0u, a_rows[r] + k0 + k, inside));
                    // @unroll
                    for (var e = 0u; e < A_WIDTH; e++) {
                        a_slice[(k + e) * ROW_VECS + r / 4u][r % 4u] = select(0.0, elements[e], inside);
                    }
                }
            }
            let inside = k0 + own_k < params.k;
            var pin = 0u; // always 0, see params.zero
            // @unroll
            for (var first = 0u; first < COLUMNS; first += READ_COLUMNS) {
                let column = min(own_column + first, last_column);
                var elements = b_read(select(0u, block.b_base + b_index(k0 + own_k, column), inside) + pin);
                // @unroll
                for (var e = 0u; e < B_WIDTH; e++) {
                    elements[e] = select(0.0, elements[e], inside);
                }
                // @unroll
                for (var n = 0u; n < READ_COLUMNS; n++) {
                    // @unroll
                    for (var k = 0u; k < SLICE_K; k++) {
                        let value = vec4(subgroupBroadcast(elements[k % B_K + n % B_COLUMNS], n / B_COLUMNS * K_LANES + k / B_K));
                        // @unroll
                        for (var v = 0u; v < ROW_VECS; v++) {
                            part[(first + n) * ROW_VECS + v] =
                                multiply_add(a_slice[k * ROW_VECS + v], value, part[(first + n) * ROW_VECS + v], k0 + k, reaches[v]);
                        }
                    }
                }
                // The next read waits for these sums. Else Mesa 25 moves all sums behind all reads, which is more than there are registers
                // for: a product of 1024^3 takes 79 ms in place of 55 (and 48 in place of 52 on Mesa 22.3, which doesn't).
                var bits = vec4(0u);
                // @unroll
                for (var n = 0u; n < READ_COLUMNS * ROW_VECS; n++) {
                    bits |= bitcast<vec4<u32>>(part[first * ROW_VECS + n]);
                }
                pin = (bits.x | bits.y | bits.z | bits.w) & params.zero;
            }
        }
        // @unroll
        for (var n = 0u; n < COLUMNS * ROW_VECS; n++) {
            acc[n] += part[n];
        }
    }

    // C four columns at a time, each pulling the ones after it up, and a row at a time likewise: what is unrolled is compiled for each.
    for (var first = 0u; first < COLUMNS; first += 4u) {
        for (var r = 0u; r < ROWS; r++) {
            let row = own_row + r * LANES;
            // @unroll
            for (var n = 0u; n < 4u; n++) {
                let column = block.first_column + first + n;
                let value = acc[n * ROW_VECS].x * params.alpha;
                if (row < params.m && column < params.n) {
                    let at = block.c_base + row * params.c.row + column;
                    if (ADDS) {
                        c[at] += value;
                    } else {
                        c[at] = value;
                    }
                }
                let x = acc[n * ROW_VECS].x;
                // @unroll
                for (var v = 0u; v < ROW_VECS - 1u; v++) {
                    acc[n * ROW_VECS + v] = vec4(acc[n * ROW_VECS + v].yzw, acc[n * ROW_VECS + v + 1u].x);
                }
                acc[(n + 1u) * ROW_VECS - 1u] = vec4(acc[(n + 1u) * ROW_VECS - 1u].yzw, x);
            }
        }
        // @unroll
        for (var n = 0u; n < (COLUMNS - 4u) * ROW_VECS; n++) {
            acc[n] = acc[n + 4u * ROW_VECS];
        }
    }
}
