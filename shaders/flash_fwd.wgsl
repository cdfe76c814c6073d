// flash_fwd: O = softmax(scale * Q K^T) V in one pass over K and V; the score matrix lives in registers, a tile at a time.
// Maths     s = scale * q.k;  m' = max(m, rowmax s);  p = e^(s-m');  l' = l e^(m-m') + rowsum p;  acc' = acc e^(m-m') + P V;
//           at the end o = acc / l, lse = m + ln l.
// Shapes    q (batch, q_heads, q_len, head_dim)  k (batch, kv_heads, kv_len, head_dim)  v (batch, kv_heads, kv_len, value_dim)
//           out (batch, q_heads, q_len, value_dim)  lse (batch, q_heads, q_len); strides and offsets come in params, in elements.
// Mapping   A workgroup owns BLOCK_Q rows of one head and walks the keys BLOCK_KV at a time. Thread (x, y) owns the rows
//           4*(i*TY + y) .. +3, i < ROW_VECS, and of them: in the score tile the keys 4*(i*TX + x) .. +3, i < KEY_VECS, and in
//           the output the columns 4*(i*TX + x) .. +3, i < COL_VECS. value_dim <= 4*TX*COL_VECS; head_dim is a loop.
// Budget    sh_stage: max(SLICE_D*(Q_STRIDE + K_STRIDE), SLICE_KV*V_STRIDE) vec4, used in turn for a slice of Q and K and for one of V;
//           sh_p: BLOCK_KV*P_STRIDE vec4, used in turn for partial row maxima and for P. At the defaults 14848 bytes.
// Registers vec4<f32>: scores 4*ROW_VECS*KEY_VECS, acc 4*ROW_VECS*COL_VECS, m and l ROW_VECS each, operands ROW_VECS + KEY_VECS.
// Barriers  Per tile two a slice of head_dim, two for the row maxima, two a slice of V less one. Workgroup-uniform: loop bounds come
//           from params and the workgroup's number. Rows and keys past the end are staged as zeros, never skipped.
// Numerics  All f32. Scores stay in natural units and meet log2(e) after the maximum is subtracted, so that a score of any size keeps
//           its bits. A masked key takes no part in the maximum; its weight is marked by -1, so that PV passes over it and a NaN in
//           its value has no effect. l == 0 when a row saw no key, or none but scores of -inf (any other largest score has weight 1):
//           o = 0, lse = -inf, whose bits are stored as an integer because WGSL has no infinities. Dot products and sums of P V are
//           f32 before scale and division: beyond 3.4e38 they are infinite. A NaN among visible scores makes l NaN, hence o and lse; it is
//           handed on by its bits, because SwiftShader's exp2 and log make a number of it.
// Source    Milakov & Gimelshein 2018 (online softmax); Dao 2023 (FlashAttention-2, algorithm 1: unnormalised acc, one division).

const TX: u32 = 8u; // @spec
const TY: u32 = 16u; // @spec
const ROW_VECS: u32 = 1u; // @spec
const KEY_VECS: u32 = 1u; // @spec
const COL_VECS: u32 = 1u; // @spec
const SLICE_D: u32 = 16u; // @spec
const SLICE_KV: u32 = 16u; // @spec

const THREADS: u32 = TX * TY;
const BLOCK_Q: u32 = 4u * TY * ROW_VECS;
const BLOCK_KV: u32 = 4u * TX * KEY_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const Q_STRIDE: u32 = TY * ROW_VECS + 1u;
const K_STRIDE: u32 = TX * KEY_VECS + 1u;
const V_STRIDE: u32 = TX * COL_VECS;
const P_STRIDE: u32 = TY * ROW_VECS;
const K_BASE: u32 = SLICE_D * Q_STRIDE;
const STAGE_VECS: u32 = max(SLICE_D * (Q_STRIDE + K_STRIDE), SLICE_KV * V_STRIDE);
const P_VECS: u32 = BLOCK_KV * P_STRIDE;

const LOG2_E: f32 = 1.4426950408889634;
const LOWEST: f32 = -3.4028234e38;
const MASKED: f32 = -1.0;
const NEG_INF_BITS: u32 = 0xff800000u;

// One tensor's place: element (b, h, row, column) is at offset + b*batch + h*head + row*row + column.
struct Strides {
    offset: u32,
    batch: u32,
    head: u32,
    row: u32,
}

struct Params {
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    lse: Strides,
    q_len: u32,
    kv_len: u32,
    head_dim: u32,
    value_dim: u32,
    q_heads: u32,
    group_size: u32,
    q_blocks: u32,     // ceil(q_len / BLOCK_Q)
    first_block: u32,  // this dispatch owns the blocks first_block .. end_block of batch * q_heads * q_blocks
    end_block: u32,
    diagonal: i32,     // row i sees the keys j <= i + diagonal
    scale: f32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// @include qkv = f32
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> sh_p: array<vec4<f32>, P_VECS>;

@compute @workgroup_size(TX, TY)
fn flash_fwd(
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
    let first_row = (block % params.q_blocks) * BLOCK_Q;
    let head = (block / params.q_blocks) % params.q_heads;
    let batch = block / (params.q_blocks * params.q_heads);
    let kv_head = head / params.group_size;
    let q_base = params.q.offset + batch * params.q.batch + head * params.q.head;
    let k_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head;
    let v_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head;

    // Keys that the block's first row sees (all of its rows see them) and that its last row sees (no row sees more).
    let kv_len = i32(params.kv_len);
    let last_row = min(first_row + BLOCK_Q, params.q_len) - 1u;
    let full_keys = u32(clamp(i32(first_row) + params.diagonal + 1, 0, kv_len));
    let seen_keys = u32(clamp(i32(last_row) + params.diagonal + 1, 0, kv_len));
    let full_tiles = full_keys / BLOCK_KV;
    let tiles = (seen_keys + BLOCK_KV - 1u) / BLOCK_KV;

    var acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>; // acc[row * COL_VECS + column vector]
    var row_max: array<vec4<f32>, ROW_VECS>;             // one component a row
    var row_sum: array<vec4<f32>, ROW_VECS>;             // over this thread's keys alone, until the end
    // @unroll
    for (var i = 0u; i < ROW_VECS; i++) {
        row_max[i] = vec4(LOWEST);
    }

    for (var tile = 0u; tile < tiles; tile++) {
        let first_key = tile * BLOCK_KV;
        let masked = tile >= full_tiles;

        // S = Q K^T over slices of head_dim, both staged transposed: a vec4 holds four rows, or four keys, of one dimension.
        var s: array<vec4<f32>, 4u * ROW_VECS * KEY_VECS>; // s[row * KEY_VECS + key vector]
        for (var d0 = 0u; d0 < params.head_dim; d0 += SLICE_D) {
            workgroupBarrier(); // every reader of the previous stage is done
            for (var item = lane; item < SLICE_D * P_STRIDE; item += THREADS) {
                let d = d0 + item % SLICE_D;
                let row = first_row + 4u * (item / SLICE_D);
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = d < params.head_dim && row + c < params.q_len;
                    four[c] = select(0.0, q_at(select(0u, q_base + (row + c) * params.q.row + d, inside)), inside);
                }
                sh_stage[(item % SLICE_D) * Q_STRIDE + item / SLICE_D] = four;
            }
            for (var item = lane; item < SLICE_D * TX * KEY_VECS; item += THREADS) {
                let d = d0 + item % SLICE_D;
                let key = first_key + 4u * (item / SLICE_D);
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = d < params.head_dim && key + c < params.kv_len;
                    four[c] = select(0.0, k_at(select(0u, k_base + (key + c) * params.k.row + d, inside)), inside);
                }
                sh_stage[K_BASE + (item % SLICE_D) * K_STRIDE + item / SLICE_D] = four;
            }
            workgroupBarrier();
            for (var d = 0u; d < SLICE_D; d++) {
                var k4: array<vec4<f32>, KEY_VECS>;
                // @unroll
                for (var j = 0u; j < KEY_VECS; j++) {
                    k4[j] = sh_stage[K_BASE + d * K_STRIDE + j * TX + x];
                }
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    let q4 = sh_stage[d * Q_STRIDE + i * TY + y];
                    // @unroll
                    for (var c = 0u; c < 4u; c++) {
                        // @unroll
                        for (var j = 0u; j < KEY_VECS; j++) {
                            s[(4u * i + c) * KEY_VECS + j] = fma(vec4(q4[c]), k4[j], s[(4u * i + c) * KEY_VECS + j]);
                        }
                    }
                }
            }
        }

        // Scale, and of a tile on the diagonal or at the end of the keys leave only what each row sees.
        // @unroll
        for (var n = 0u; n < 4u * ROW_VECS * KEY_VECS; n++) {
            s[n] *= params.scale;
        }
        var hidden: array<vec4<bool>, 4u * ROW_VECS * KEY_VECS>;
        // @unroll
        for (var i = 0u; i < ROW_VECS; i++) {
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                let row = first_row + 4u * (i * TY + y) + c;
                let keys = min(i32(row) + params.diagonal + 1, kv_len);
                // @unroll
                for (var j = 0u; j < KEY_VECS; j++) {
                    let key = vec4(i32(first_key + 4u * (j * TX + x))) + vec4(0, 1, 2, 3);
                    hidden[(4u * i + c) * KEY_VECS + j] = vec4(masked) & (key >= vec4(keys));
                }
            }
        }

        // The rows' maxima so far: of this thread's keys, then over the threads that share the rows.
        // @unroll
        for (var i = 0u; i < ROW_VECS; i++) {
            var largest = row_max[i];
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                // @unroll
                for (var j = 0u; j < KEY_VECS; j++) {
                    let seen = select(s[(4u * i + c) * KEY_VECS + j], vec4(LOWEST), hidden[(4u * i + c) * KEY_VECS + j]);
                    largest[c] = max(largest[c], max(max(seen.x, seen.y), max(seen.z, seen.w)));
                }
            }
            sh_p[x * P_STRIDE + i * TY + y] = largest;
        }
        workgroupBarrier();
        // @unroll
        for (var i = 0u; i < ROW_VECS; i++) {
            var largest = row_max[i];
            for (var other = 0u; other < TX; other++) {
                largest = max(largest, sh_p[other * P_STRIDE + i * TY + y]);
            }
            // From LOWEST the difference may overflow; any exponent below -150 rescales to 0.
            let rescale = exp2(max((row_max[i] - largest) * LOG2_E, vec4(-200.0)));
            row_max[i] = largest;
            row_sum[i] *= rescale;
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                // @unroll
                for (var j = 0u; j < COL_VECS; j++) {
                    acc[(4u * i + c) * COL_VECS + j] *= rescale[c];
                }
            }
        }
        workgroupBarrier(); // the maxima are read: sh_p may take P

        // P = e^(S - m), stored transposed: a vec4 holds four rows' weights of one key.
        // @unroll
        for (var i = 0u; i < ROW_VECS; i++) {
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                // @unroll
                for (var j = 0u; j < KEY_VECS; j++) {
                    let score = s[(4u * i + c) * KEY_VECS + j];
                    let is_nan = (bitcast<vec4<u32>>(score) & vec4(0x7fffffffu)) > vec4(0x7f800000u);
                    let weight = select(exp2((score - vec4(row_max[i][c])) * LOG2_E), score, is_nan);
                    let seen = select(weight, vec4(0.0), hidden[(4u * i + c) * KEY_VECS + j]);
                    row_sum[i][c] += (seen.x + seen.y) + (seen.z + seen.w);
                    s[(4u * i + c) * KEY_VECS + j] = select(weight, vec4(MASKED), hidden[(4u * i + c) * KEY_VECS + j]);
                }
            }
            // @unroll
            for (var j = 0u; j < KEY_VECS; j++) {
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let key = 4u * (j * TX + x) + c;
                    sh_p[key * P_STRIDE + i * TY + y] = vec4(
                        s[(4u * i + 0u) * KEY_VECS + j][c],
                        s[(4u * i + 1u) * KEY_VECS + j][c],
                        s[(4u * i + 2u) * KEY_VECS + j][c],
                        s[(4u * i + 3u) * KEY_VECS + j][c],
                    );
                }
            }
        }

        // acc += P V over slices of keys.
        for (var k0 = 0u; k0 < BLOCK_KV; k0 += SLICE_KV) {
            if (k0 > 0u) {
                workgroupBarrier(); // every reader of the previous slice is done
            }
            for (var item = lane; item < SLICE_KV * V_STRIDE; item += THREADS) {
                let key = first_key + k0 + item / V_STRIDE;
                let column = 4u * (item % V_STRIDE);
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = key < params.kv_len && column + c < params.value_dim;
                    four[c] = select(0.0, v_at(select(0u, v_base + key * params.v.row + column + c, inside)), inside);
                }
                sh_stage[item] = four;
            }
            workgroupBarrier();
            // Two loops, of which one runs no time: what masks cost is paid by masked tiles alone.
            for (var key = 0u; key < select(SLICE_KV, 0u, masked); key++) {
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    let p4 = sh_p[(k0 + key) * P_STRIDE + i * TY + y];
                    // @unroll
                    for (var j = 0u; j < COL_VECS; j++) {
                        let v4 = sh_stage[key * V_STRIDE + j * TX + x];
                        // @unroll
                        for (var c = 0u; c < 4u; c++) {
                            acc[(4u * i + c) * COL_VECS + j] = fma(vec4(p4[c]), v4, acc[(4u * i + c) * COL_VECS + j]);
                        }
                    }
                }
            }
            for (var key = 0u; key < select(0u, SLICE_KV, masked); key++) {
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    let p4 = sh_p[(k0 + key) * P_STRIDE + i * TY + y];
                    // @unroll
                    for (var j = 0u; j < COL_VECS; j++) {
                        let v4 = sh_stage[key * V_STRIDE + j * TX + x];
                        // @unroll
                        for (var c = 0u; c < 4u; c++) {
                            let sum = acc[(4u * i + c) * COL_VECS + j];
                            acc[(4u * i + c) * COL_VECS + j] = select(fma(vec4(p4[c]), v4, sum), sum, p4[c] == MASKED);
                        }
                    }
                }
            }
        }
    }

    // The rows' sums over the threads that share them.
    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < ROW_VECS; i++) {
        sh_p[x * P_STRIDE + i * TY + y] = row_sum[i];
    }
    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < ROW_VECS; i++) {
        var total = vec4(0.0);
        for (var other = 0u; other < TX; other++) {
            total += sh_p[other * P_STRIDE + i * TY + y];
        }
        // @unroll
        for (var c = 0u; c < 4u; c++) {
            let row = first_row + 4u * (i * TY + y) + c;
            if (row < params.q_len) {
                let empty = total[c] == 0.0;
                let sum = select(total[c], 1.0, empty);
                let out_base = params.out.offset + batch * params.out.batch + head * params.out.head + row * params.out.row;
                // @unroll
                for (var j = 0u; j < COL_VECS; j++) {
                    let four = acc[(4u * i + c) * COL_VECS + j] / sum;
                    // @unroll
                    for (var e = 0u; e < 4u; e++) {
                        let column = 4u * (j * TX + x) + e;
                        if (column < params.value_dim) {
                            out[out_base + column] = four[e];
                        }
                    }
                }
                if (x == 0u) {
                    let at = params.lse.offset + batch * params.lse.batch + head * params.lse.head + row * params.lse.row;
                    // Not every driver's log hands a NaN on.
                    let is_nan = (bitcast<u32>(sum) & 0x7fffffffu) > 0x7f800000u;
                    let bits = select(bitcast<u32>(row_max[i][c] + log(sum)), bitcast<u32>(sum), is_nan);
                    lse[at] = select(bits, NEG_INF_BITS, empty);
                }
            }
        }
    }
}
