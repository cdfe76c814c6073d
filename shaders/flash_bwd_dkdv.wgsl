// flash_bwd_dkdv: the gradients of keys and values, dK = scale dS^T Q and dV = P^T dO, in one pass over the queries of a KV head's group.
// Maths     P = e^(S - lse), recomputed;  dS = P (dO V^T - delta) S', S' being the derivative of softcap and score_mod;
//           dk = scale dS^T Q;  dv = P^T dO;  both summed over the query heads of the KV head.
// Shapes    q (batch, q_heads, q_len, head_dim)  k, dk (batch, kv_heads, kv_len, head_dim)  v, dv (batch, kv_heads, kv_len, value_dim)
//           grad_o (batch, q_heads, q_len, value_dim)  bias (batch|1, q_heads|1, q_len|1, kv_len|1), mask likewise, 32 keys to a word
//           lse and delta of the rows in extras; strides and offsets come in params, in elements.
// Mapping   flash_bwd_dq with keys and queries changed over: a workgroup owns 4*TY*OWN_VECS keys of one KV head and walks the queries of each
//           of its query heads 4*TX*OTHER_VECS at a time. Thread (x, y) owns the keys 4*(i*TY + y) .. +3, i < OWN_VECS, and of them: in
//           the tiles of S^T and dP^T the queries 4*(i*TX + x) .. +3, i < OTHER_VECS, and in dk and dv the columns
//           4*(i*TX + x) .. +3, i < DK_COL_VECS and DV_COL_VECS. head_dim <= 4*TX*DK_COL_VECS, value_dim <= 4*TX*DV_COL_VECS.
// Budget    sh_stage: max(SLICE_D*(OWN_STRIDE + OTHER_STRIDE), SLICE_OTHER*TX*max(DK_COL_VECS, DV_COL_VECS)) vec4; sh_p:
//           BLOCK_OTHER*P_STRIDE vec4, used in turn for P and for dS; sh_keep: KEEP_COUNT words, a bit a key, where masks are tables or
//           functions.
// Registers vec4<f32>: S and dP 4*OWN_VECS*OTHER_VECS each, dk 4*OWN_VECS*DK_COL_VECS, dv 4*OWN_VECS*DV_COL_VECS.
// Barriers  Per tile two a slice of head_dim, of value_dim and, twice, of queries, two for sh_p, one where masks are tables or functions.
//           Workgroup-uniform: loop bounds come from params, the workgroup's number and read-only tables at uniform places.
// Numerics  As flash_bwd_dq. Sums go over the group's heads and their rows in order: the same bits every run.
// Source    As flash_bwd_dq.

const TX: u32 = 8u; // @spec
const TY: u32 = 8u; // @spec
const OWN_VECS: u32 = 1u; // @spec
const OTHER_VECS: u32 = 1u; // @spec
const DK_COL_VECS: u32 = 2u; // @spec
const DV_COL_VECS: u32 = 2u; // @spec
const SLICE_D: u32 = 16u; // @spec
const SLICE_OTHER: u32 = 16u; // @spec
const WRITES_DK: bool = true; // @spec either may be left to another dispatch, where a device can't bind as many buffers
const WRITES_DV: bool = true; // @spec
const PASSES: bool = false; // @spec what is walked is walked in several dispatches, each adding to what is there

const THREADS: u32 = TX * TY;
const BLOCK_OWN: u32 = 4u * TY * OWN_VECS;
const BLOCK_OTHER: u32 = 4u * TX * OTHER_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const OWN_STRIDE: u32 = TY * OWN_VECS + 1u;
const OTHER_STRIDE: u32 = TX * OTHER_VECS + 1u;
const P_STRIDE: u32 = TY * OWN_VECS;
const OTHER_BASE: u32 = SLICE_D * OWN_STRIDE;
const STAGE_VECS: u32 = max(SLICE_D * (OWN_STRIDE + OTHER_STRIDE), SLICE_OTHER * TX * max(DK_COL_VECS, DV_COL_VECS));
const P_VECS: u32 = BLOCK_OTHER * P_STRIDE;
// Words of sh_keep to a row.
const KEEP_STRIDE: u32 = BLOCK_OWN / 32u;
const KEEP_COUNT: u32 = select(1u, BLOCK_OTHER * KEEP_STRIDE, KEEP_WORDS);
const Q_BINDING: u32 = 1u;
const K_BINDING: u32 = 2u;
const V_BINDING: u32 = 3u;
const DK_OUT_BINDING: u32 = 4u;
const GRAD_O_BINDING: u32 = 5u;
const DV_OUT_BINDING: u32 = 9u;

// @include params = uniform
// @include stored as q = f32
// @include stored as k = f32
// @include stored as v = f32
// @include stored as grad_o = f32
// @include out as dk_out = f32
// @include out as dv_out = f32
// @include attention
// @include backward

fn s_own_at(index: u32) -> f32 {
    return k_at(index);
}

fn s_other_at(index: u32) -> f32 {
    return q_at(index);
}

fn dp_own_at(index: u32) -> f32 {
    return v_at(index);
}

fn dp_other_at(index: u32) -> f32 {
    return grad_o_at(index);
}

fn dk_read(index: u32) -> f32 {
    return q_at(index);
}

fn dv_read(index: u32) -> f32 {
    return grad_o_at(index);
}

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> sh_p: array<vec4<f32>, P_VECS>;
var<workgroup> sh_keep: array<u32, KEEP_COUNT>;

@compute @workgroup_size(TX, TY)
fn flash_bwd_dkdv(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let x = thread.x;
    let y = thread.y;
    let kv_heads = params.q_heads / params.group_size;
    let batch = number / (params.q_blocks * kv_heads);
    let kv_head = number / params.q_blocks % kv_heads;
    let first_own = number % params.q_blocks * BLOCK_OWN;
    let sequence = sequence_of(batch);
    let own_len = sequence.kv_len;
    let other_len = sequence.q_len;
    let kv_len = i32(sequence.kv_len);
    let offset = offset_of(sequence);
    let tiles = tiles_of_queries(first_own, BLOCK_OWN, BLOCK_OTHER, sequence);
    if (number >= params.end_block || first_own >= max(own_len, params.rows)) {
        return; // the whole workgroup at once: the grid is folded into a rectangle, and longer than some batch entries
    }

    let s_own_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head + sequence.first_kv * params.k.row;
    let dp_own_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head + sequence.first_kv * params.v.row;
    let dk_first = params.out.offset + batch * params.out.batch + kv_head * params.out.head + sequence.first_kv * params.out.row;
    let dv_first = params.dv.offset + batch * params.dv.batch + kv_head * params.dv.head + sequence.first_kv * params.dv.row;
    let s_dim = params.head_dim;
    let s_own_row = params.k.row;
    let s_other_row = params.q.row;
    let dp_dim = params.value_dim;
    let dp_own_row = params.v.row;
    let dp_other_row = params.grad_o.row;
    let dk_dim = params.head_dim;
    let dk_row = params.q.row;
    let dv_dim = params.value_dim;
    let dv_row = params.grad_o.row;

    var dk_acc: array<vec4<f32>, 4u * OWN_VECS * DK_COL_VECS>; // dk_acc[key * DK_COL_VECS + column vector]
    var dv_acc: array<vec4<f32>, 4u * OWN_VECS * DV_COL_VECS>;
    // Of the tiles of all heads of the group, one head's after the other's, this dispatch's.
    let head_tiles = (params.q_len + BLOCK_OTHER - 1u) / BLOCK_OTHER;
    for (var n = 0u; n < params.group_size; n++) {
        let head = kv_head * params.group_size + n;
        let before = n * head_tiles;
        let end_tile = min(tiles.end, max(params.end_tile, before) - before);
        let s_other_base = params.q.offset + batch * params.q.batch + head * params.q.head + sequence.first_q * params.q.row;
        let dp_other_base = params.grad_o.offset + batch * params.grad_o.batch + head * params.grad_o.head + sequence.first_q * params.grad_o.row;
        let dk_base = s_other_base;
        let dv_base = dp_other_base;
        let bias_base = params.bias.offset + batch * params.bias.batch + head * params.bias.head;
        for (var query_tile = max(tiles.first, max(params.first_tile, before) - before); query_tile < end_tile; query_tile++) {
            let first_other = query_tile * BLOCK_OTHER;
            let masked = BIAS || KEEP_WORDS || query_tile < tiles.first_full || query_tile >= tiles.end_full;
            if (KEEP_WORDS) {
                workgroupBarrier(); // every reader of the previous words is done
                for (var item = lane; item < KEEP_COUNT; item += THREADS) {
                    let row = first_other + item / KEEP_STRIDE;
                    var word = 0u;
                    if (row < other_len) {
                        word = keep_word(batch, head, row, first_own + 32u * (item % KEEP_STRIDE), sequence);
                    }
                    sh_keep[item] = word;
                }
            }
            // @include tile as s = staged
            // @include tile as dp = staged

            // P and dS: a vec4 holds four keys of one query.
            // @unroll
            for (var i = 0u; i < OWN_VECS; i++) {
                let key = first_own + 4u * (i * TY + y);
                let keys = vec4(i32(key)) + vec4(0, 1, 2, 3);
                // @unroll
                for (var j = 0u; j < OTHER_VECS; j++) {
                    // @unroll
                    for (var e = 0u; e < 4u; e++) {
                        let row = first_other + 4u * (j * TX + x) + e;
                        let position = i32(row) + offset;
                        let seen = keys_seen(position, kv_len);
                        let state = row_state(batch, head, sequence.first_q + min(row, max(other_len, 1u) - 1u));
                        var hides = vec4(masked) & ((keys < vec4(seen.x)) | (keys >= vec4(seen.y)));
                        hides |= vec4(row >= other_len);
                        if (KEEP_WORDS) {
                            let local = key - first_own;
                            let bits = sh_keep[(row - first_other) * KEEP_STRIDE + local / 32u] >> (local % 32u);
                            hides |= (vec4(bits) & vec4(1u, 2u, 4u, 8u)) == vec4(0u);
                        }
                        var bias4 = vec4(0.0);
                        if (BIAS) {
                            let count = select(0u, own_len - min(key, own_len), row < other_len);
                            bias4 = bias_of(bias_base + row * params.bias.row + key * params.bias_key, count);
                            hides |= bitcast<vec4<u32>>(bias4) == vec4(NEG_INF_BITS);
                        }
                        let n = 4u * i * OTHER_VECS + j;
                        let scaled = params.scale * vec4(s[n][e], s[n + OTHER_VECS][e], s[n + 2u * OTHER_VECS][e], s[n + 3u * OTHER_VECS][e]);
                        let dp4 = vec4(dp[n][e], dp[n + OTHER_VECS][e], dp[n + 2u * OTHER_VECS][e], dp[n + 3u * OTHER_VECS][e]);
                        let score = final_scores(scaled, bias4, batch, head, row, key, position);
                        let slopes = score_slopes(scaled, batch, head, row, key);
                        let no_weights = is_empty(state.x);
                        let weights = select(weights_of(score, vec4(state.x)), vec4(0.0), no_weights);
                        let gradients = select(weights * (dp4 - state.y) * slopes, vec4(0.0), no_weights);
                        let p4 = select(weights, vec4(MASKED), hides);
                        let ds4 = select(gradients, vec4(MASKED), hides);
                        if (WRITES_DV) {
                            sh_p[(4u * (j * TX + x) + e) * P_STRIDE + i * TY + y] = p4;
                        }
                        // @unroll
                        for (var c = 0u; c < 4u; c++) {
                            s[n + c * OTHER_VECS][e] = ds4[c];
                        }
                    }
                }
            }
            if (WRITES_DV) {
                // @include sums as dv = staged
                workgroupBarrier(); // every reader of P is done
            }
            if (WRITES_DK) {
                // @unroll
                for (var i = 0u; i < OWN_VECS; i++) {
                    // @unroll
                    for (var j = 0u; j < OTHER_VECS; j++) {
                        // @unroll
                        for (var e = 0u; e < 4u; e++) {
                            let n = 4u * i * OTHER_VECS + j;
                            sh_p[(4u * (j * TX + x) + e) * P_STRIDE + i * TY + y] =
                                vec4(s[n][e], s[n + OTHER_VECS][e], s[n + 2u * OTHER_VECS][e], s[n + 3u * OTHER_VECS][e]);
                        }
                    }
                }
                // @include sums as dk = staged
            }
        }
    }

    // @unroll
    for (var i = 0u; i < OWN_VECS; i++) {
        // @unroll
        for (var c = 0u; c < 4u; c++) {
            let key = first_own + 4u * (i * TY + y) + c;
            let written = key < max(own_len, params.rows);
            if (WRITES_DK) {
                // @unroll
                for (var j = 0u; j < DK_COL_VECS; j++) {
                    let column = 4u * (j * TX + x);
                    let count = select(0u, params.head_dim - min(column, params.head_dim), written);
                    let at = dk_first + key * params.out.row + column;
                    var four = select(params.scale * dk_acc[(4u * i + c) * DK_COL_VECS + j], vec4(0.0), key >= own_len);
                    if (PASSES) {
                        // @unroll
                        for (var e = 0u; e < 4u; e++) {
                            if (params.first_tile > 0u && e < count) {
                                four[e] += dk_out_at(at + e);
                            }
                        }
                    }
                    dk_out_store(at, four, count);
                }
            }
            if (WRITES_DV) {
                // @unroll
                for (var j = 0u; j < DV_COL_VECS; j++) {
                    let column = 4u * (j * TX + x);
                    let count = select(0u, params.value_dim - min(column, params.value_dim), written);
                    let at = dv_first + key * params.dv.row + column;
                    var four = select(dv_acc[(4u * i + c) * DV_COL_VECS + j], vec4(0.0), key >= own_len);
                    if (PASSES) {
                        // @unroll
                        for (var e = 0u; e < 4u; e++) {
                            if (params.first_tile > 0u && e < count) {
                                four[e] += dv_out_at(at + e);
                            }
                        }
                    }
                    dv_out_store(at, four, count);
                }
            }
        }
    }
}
