// flash_bwd_dq: the gradient of the queries, dQ = scale dS K, in one pass over K and V; no score matrix.
// Maths     P = e^(S - lse), recomputed;  dS = P (dO V^T - delta) S', S' being the derivative of softcap and score_mod;  dq = scale dS K.
// Shapes    q, dq (batch, q_heads, q_len, head_dim)  k (batch, kv_heads, kv_len, head_dim)  v (batch, kv_heads, kv_len, value_dim)
//           grad_o (batch, q_heads, q_len, value_dim)  bias (batch|1, q_heads|1, q_len|1, kv_len|1), mask likewise, 32 keys to a word
//           lse and delta of the rows in extras; strides and offsets come in params, in elements.
// Mapping   As flash_fwd: a workgroup owns 4*TY*OWN_VECS rows of one head and walks the keys 4*TX*OTHER_VECS at a time. Thread (x, y)
//           owns the rows 4*(i*TY + y) .. +3, i < OWN_VECS, and of them: in the tiles of S and dP the keys 4*(i*TX + x) .. +3,
//           i < OTHER_VECS, and in dq the columns 4*(i*TX + x) .. +3, i < COL_VECS. head_dim <= 4*TX*COL_VECS; value_dim is a loop.
// Budget    sh_stage: max(SLICE_D*(OWN_STRIDE + OTHER_STRIDE), SLICE_OTHER*TX*COL_VECS) vec4; sh_p: BLOCK_OTHER*P_STRIDE vec4 for dS;
//           sh_keep: KEEP_COUNT words, a bit a key, where masks are tables or functions.
// Registers vec4<f32>: S and dP 4*OWN_VECS*OTHER_VECS each, dq 4*OWN_VECS*COL_VECS, lse and delta OWN_VECS each.
// Barriers  Per tile two a slice of head_dim, of value_dim and of keys, one where masks are tables or functions. Workgroup-uniform: loop
//           bounds come from params, the workgroup's number and read-only tables at uniform places.
// Numerics  All f32 whatever is stored. The gradient of a masked key's score is marked, so that dS K passes over it and a NaN in its key or
//           value has no effect. Sums go over the keys in their order: the same bits every run.
// Source    Dao et al. 2022, algorithm 4, in two kernels without atomics as in Turner's Metal FlashAttention; Dao 2023.

const TX: u32 = 8u; // @spec
const TY: u32 = 8u; // @spec
const OWN_VECS: u32 = 1u; // @spec
const OTHER_VECS: u32 = 1u; // @spec
const COL_VECS: u32 = 2u; // @spec
const SLICE_D: u32 = 16u; // @spec
const SLICE_OTHER: u32 = 16u; // @spec
const PASSES: bool = false; // @spec what is walked is walked in several dispatches, each adding to what is there

const THREADS: u32 = TX * TY;
const BLOCK_OWN: u32 = 4u * TY * OWN_VECS;
const BLOCK_OTHER: u32 = 4u * TX * OTHER_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const OWN_STRIDE: u32 = TY * OWN_VECS + 1u;
const OTHER_STRIDE: u32 = TX * OTHER_VECS + 1u;
const P_STRIDE: u32 = TY * OWN_VECS;
const OTHER_BASE: u32 = SLICE_D * OWN_STRIDE;
const DQ_COL_VECS: u32 = COL_VECS;
const STAGE_VECS: u32 = max(SLICE_D * (OWN_STRIDE + OTHER_STRIDE), SLICE_OTHER * TX * COL_VECS);
const P_VECS: u32 = BLOCK_OTHER * P_STRIDE;
// Words of sh_keep to a row.
const KEEP_STRIDE: u32 = BLOCK_OTHER / 32u;
const KEEP_COUNT: u32 = select(1u, BLOCK_OWN * KEEP_STRIDE, KEEP_WORDS);
const Q_BINDING: u32 = 1u;
const K_BINDING: u32 = 2u;
const V_BINDING: u32 = 3u;
const GRAD_O_BINDING: u32 = 5u;

// @include params = uniform
// @include stored as q = f32
// @include stored as k = f32
// @include stored as v = f32
// @include stored as grad_o = f32
const OUT_BINDING: u32 = 4u;
// @include out = f32
// @include attention
// @include backward

fn s_own_at(index: u32) -> f32 {
    return q_at(index);
}

fn s_other_at(index: u32) -> f32 {
    return k_at(index);
}

fn dp_own_at(index: u32) -> f32 {
    return grad_o_at(index);
}

fn dp_other_at(index: u32) -> f32 {
    return v_at(index);
}

fn dq_read(index: u32) -> f32 {
    return k_at(index);
}

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> sh_p: array<vec4<f32>, P_VECS>;
var<workgroup> sh_keep: array<u32, KEEP_COUNT>;

@compute @workgroup_size(TX, TY)
fn flash_bwd_dq(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let x = thread.x;
    let y = thread.y;
    let block = block_of(number, BLOCK_OWN);
    let batch = block.batch;
    let head = block.head;
    let first_own = block.first_row;
    let sequence = sequence_of(batch);
    let own_len = sequence.q_len;
    let other_len = sequence.kv_len;
    let kv_len = i32(sequence.kv_len);
    let offset = offset_of(sequence);
    let tiles = tiles_of(first_own, BLOCK_OWN, BLOCK_OTHER, sequence);
    if (number >= params.end_block || first_own >= max(own_len, params.rows)) {
        return; // the whole workgroup at once: the grid is folded into a rectangle, and longer than some batch entries
    }

    let kv_head = head / params.group_size;
    let k_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head + sequence.first_kv * params.k.row;
    let dq_out = params.out.offset + batch * params.out.batch + head * params.out.head + sequence.first_q * params.out.row;
    let bias_base = params.bias.offset + batch * params.bias.batch + head * params.bias.head;
    let s_dim = params.head_dim;
    let s_own_base = params.q.offset + batch * params.q.batch + head * params.q.head + sequence.first_q * params.q.row;
    let s_own_row = params.q.row;
    let s_other_base = k_base;
    let s_other_row = params.k.row;
    let dp_dim = params.value_dim;
    let dp_own_base = params.grad_o.offset + batch * params.grad_o.batch + head * params.grad_o.head + sequence.first_q * params.grad_o.row;
    let dp_own_row = params.grad_o.row;
    let dp_other_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head + sequence.first_kv * params.v.row;
    let dp_other_row = params.v.row;
    let dq_dim = params.head_dim;
    let dq_base = k_base;
    let dq_row = params.k.row;

    var states: array<vec2<f32>, 4u * OWN_VECS>;
    // @unroll
    for (var i = 0u; i < OWN_VECS; i++) {
        // @unroll
        for (var c = 0u; c < 4u; c++) {
            let row = first_own + 4u * (i * TY + y) + c;
            states[4u * i + c] = row_state(batch, head, sequence.first_q + min(row, max(own_len, 1u) - 1u));
        }
    }

    var dq_acc: array<vec4<f32>, 4u * OWN_VECS * COL_VECS>; // dq_acc[row * COL_VECS + column vector]
    for (var tile = max(tiles.first, params.first_tile); tile < min(tiles.end, params.end_tile); tile++) {
        let first_other = tile * BLOCK_OTHER;
        let masked = BIAS || KEEP_WORDS || tile < tiles.first_full || tile >= tiles.end_full;
        if (KEEP_WORDS) {
            workgroupBarrier(); // every reader of the previous words is done
            for (var item = lane; item < KEEP_COUNT; item += THREADS) {
                let row = first_own + item / KEEP_STRIDE;
                var word = 0u;
                if (row < own_len) {
                    word = keep_word(batch, head, row, first_other + 32u * (item % KEEP_STRIDE), sequence);
                }
                sh_keep[item] = word;
            }
        }
        // @include tile as s = staged
        // @include tile as dp = staged

        // dS, stored transposed: a vec4 holds four rows of one key.
        // @unroll
        for (var i = 0u; i < OWN_VECS; i++) {
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                let row = first_own + 4u * (i * TY + y) + c;
                let position = i32(row) + offset;
                let seen = keys_seen(position, kv_len);
                let state = states[4u * i + c];
                let no_weights = row >= own_len || is_empty(state.x);
                // @unroll
                for (var j = 0u; j < OTHER_VECS; j++) {
                    let key = first_other + 4u * (j * TX + x);
                    let keys = vec4(i32(key)) + vec4(0, 1, 2, 3);
                    var hides = vec4(masked) & ((keys < vec4(seen.x)) | (keys >= vec4(seen.y)));
                    if (KEEP_WORDS) {
                        let local = key - first_other;
                        let bits = sh_keep[(row - first_own) * KEEP_STRIDE + local / 32u] >> (local % 32u);
                        hides |= (vec4(bits) & vec4(1u, 2u, 4u, 8u)) == vec4(0u);
                    }
                    var bias4 = vec4(0.0);
                    if (BIAS) {
                        let count = select(0u, other_len - min(key, other_len), row < own_len);
                        bias4 = bias_of(bias_base + row * params.bias.row + key * params.bias_key, count);
                        hides |= bitcast<vec4<u32>>(bias4) == vec4(NEG_INF_BITS);
                    }
                    let n = (4u * i + c) * OTHER_VECS + j;
                    let scaled = params.scale * s[n];
                    let score = final_scores(scaled, bias4, batch, head, row, key, position);
                    let slopes = score_slopes(scaled, batch, head, row, key);
                    let gradient = weights_of(score, vec4(state.x)) * (dp[n] - state.y) * slopes;
                    s[n] = select(select(gradient, vec4(0.0), no_weights), vec4(MASKED), hides);
                }
            }
            // @unroll
            for (var j = 0u; j < OTHER_VECS; j++) {
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    sh_p[(4u * (j * TX + x) + c) * P_STRIDE + i * TY + y] = vec4(
                        s[(4u * i + 0u) * OTHER_VECS + j][c],
                        s[(4u * i + 1u) * OTHER_VECS + j][c],
                        s[(4u * i + 2u) * OTHER_VECS + j][c],
                        s[(4u * i + 3u) * OTHER_VECS + j][c],
                    );
                }
            }
        }
        // @include sums as dq = staged
    }

    // @unroll
    for (var i = 0u; i < OWN_VECS; i++) {
        // @unroll
        for (var c = 0u; c < 4u; c++) {
            let row = first_own + 4u * (i * TY + y) + c;
            // @unroll
            for (var j = 0u; j < COL_VECS; j++) {
                let column = 4u * (j * TX + x);
                let count = select(0u, params.head_dim - min(column, params.head_dim), row < max(own_len, params.rows));
                let at = dq_out + row * params.out.row + column;
                var four = select(params.scale * dq_acc[(4u * i + c) * COL_VECS + j], vec4(0.0), row >= own_len);
                if (PASSES) {
                    // @unroll
                    for (var e = 0u; e < 4u; e++) {
                        if (params.first_tile > 0u && e < count) {
                            four[e] += out_at(at + e);
                        }
                    }
                }
                out_store(at, four, count);
            }
        }
    }
}
