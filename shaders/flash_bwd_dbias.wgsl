// flash_bwd_dbias: the gradient of a bias, dbias = sum of P (dO V^T - delta) over what reads it; no score matrix but the bias's own.
// Maths     P = e^(S - lse), recomputed;  dbias = P (dO V^T - delta), summed over each axis along which the bias broadcasts.
// Shapes    q (batch, q_heads, q_len, head_dim)  k (batch, kv_heads, kv_len, head_dim)  v (batch, kv_heads, kv_len, value_dim)
//           grad_o (batch, q_heads, q_len, value_dim)  bias, dbias (batch|1, q_heads|1, q_len|1, kv_len|1), mask likewise, 32 keys to a
//           word; lse and delta of the rows in extras; strides and offsets come in params, in elements.
// Mapping   A workgroup owns a tile of dbias: of one batch entry and head of it, 4*TY*OWN_VECS rows by 4*TX*OTHER_VECS keys, or one row, or
//           one key; it walks all tiles of scores that read it. Thread (x, y) has of each tile the rows 4*(i*TY + y) .. +3, i < OWN_VECS,
//           and the keys 4*(i*TX + x) .. +3, i < OTHER_VECS.
// Budget    sh_stage: SLICE_D*(OWN_STRIDE + OTHER_STRIDE) vec4; sh_p: THREADS*max(OWN_VECS, OTHER_VECS) vec4 for sums over threads; sh_keep:
//           KEEP_COUNT words, a bit a key, where masks are tables or functions.
// Registers vec4<f32>: S, dP and the sums 4*OWN_VECS*OTHER_VECS each.
// Barriers  Per tile two a slice of head_dim and of value_dim, one where masks are tables or functions; three at the end. Workgroup-uniform:
//           loop bounds come from params, the workgroup's number and read-only tables at uniform places.
// Numerics  As flash_bwd_dq; what a masked key has adds nothing. Sums go over batch entries, heads, rows and keys in order, then over
//           threads: the same bits every run.
// Source    As flash_bwd_dq. A bias's gradient is that of the scores.

const TX: u32 = 8u; // @spec
const TY: u32 = 8u; // @spec
const OWN_VECS: u32 = 1u; // @spec
const OTHER_VECS: u32 = 1u; // @spec
const SLICE_D: u32 = 16u; // @spec
const PASSES: bool = false; // @spec what is walked is walked in several dispatches, each adding to what is there

const THREADS: u32 = TX * TY;
const BLOCK_OWN: u32 = 4u * TY * OWN_VECS;
const BLOCK_OTHER: u32 = 4u * TX * OTHER_VECS;
// Rows of the staged tiles in vec4s; one vec4 of padding spreads the transposing writes over the banks.
const OWN_STRIDE: u32 = TY * OWN_VECS + 1u;
const OTHER_STRIDE: u32 = TX * OTHER_VECS + 1u;
const OTHER_BASE: u32 = SLICE_D * OWN_STRIDE;
const STAGE_VECS: u32 = SLICE_D * (OWN_STRIDE + OTHER_STRIDE);
const P_VECS: u32 = THREADS * max(OWN_VECS, OTHER_VECS);
// Words of sh_keep to a row.
const KEEP_STRIDE: u32 = BLOCK_OTHER / 32u;
const KEEP_COUNT: u32 = select(1u, BLOCK_OWN * KEEP_STRIDE, KEEP_WORDS);
const Q_BINDING: u32 = 1u;
const K_BINDING: u32 = 2u;
const V_BINDING: u32 = 3u;
const OUT_BINDING: u32 = 4u;
const GRAD_O_BINDING: u32 = 5u;

// @include params = uniform
// @include stored as q = f32
// @include stored as k = f32
// @include stored as v = f32
// @include stored as grad_o = f32
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

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> sh_p: array<vec4<f32>, P_VECS>;
var<workgroup> sh_keep: array<u32, KEEP_COUNT>;

fn store(at: u32, four: vec4<f32>, count: u32) {
    var sum = four;
    if (PASSES) {
        // @unroll
        for (var e = 0u; e < 4u; e++) {
            if (params.first_tile > 0u && e < count) {
                sum[e] += out_at(at + e);
            }
        }
    }
    out_store(at, sum, count);
}

@compute @workgroup_size(TX, TY)
fn flash_bwd_dbias(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    if (number >= params.end_block) {
        return; // the whole workgroup at once: the grid is folded into a rectangle
    }
    let x = thread.x;
    let y = thread.y;
    let row_tiles = (params.q_len + BLOCK_OWN - 1u) / BLOCK_OWN;
    let key_tiles = (params.kv_len + BLOCK_OTHER - 1u) / BLOCK_OTHER;
    let has_batch = (params.bias_axes & 1u) != 0u;
    let has_heads = (params.bias_axes & 2u) != 0u;
    let has_rows = (params.bias_axes & 4u) != 0u;
    let has_keys = (params.bias_axes & 8u) != 0u;
    // The tile of dbias, and from it on the axes that it has not: what is walked.
    let own_keys = select(1u, key_tiles, has_keys);
    let own_rows = select(1u, row_tiles, has_rows);
    let own_heads = select(1u, params.q_heads, has_heads);
    let own = vec4(number / (own_keys * own_rows * own_heads), number / (own_keys * own_rows) % own_heads, number / own_keys % own_rows, number % own_keys);
    let walked_keys = select(key_tiles, 1u, has_keys);
    let walked_rows = select(row_tiles, 1u, has_rows);
    let walked_heads = select(params.q_heads, 1u, has_heads);

    let s_dim = params.head_dim;
    let s_own_row = params.q.row;
    let s_other_row = params.k.row;
    let dp_dim = params.value_dim;
    let dp_own_row = params.grad_o.row;
    let dp_other_row = params.v.row;
    var acc: array<vec4<f32>, 4u * OWN_VECS * OTHER_VECS>; // acc[row * OTHER_VECS + key vector]
    for (var turn = params.first_tile; turn < params.end_tile; turn++) {
        let batch = own.x + turn / (walked_keys * walked_rows * walked_heads);
        let head = own.y + turn / (walked_keys * walked_rows) % walked_heads;
        let first_own = (own.z + turn / walked_keys % walked_rows) * BLOCK_OWN;
        let tile = own.w + turn % walked_keys;
        let first_other = tile * BLOCK_OTHER;
        let sequence = sequence_of(batch);
        let own_len = sequence.q_len;
        let other_len = sequence.kv_len;
        let kv_len = i32(sequence.kv_len);
        let offset = offset_of(sequence);
        let tiles = tiles_of(first_own, BLOCK_OWN, BLOCK_OTHER, sequence);
        if (tile >= tiles.first && tile < tiles.end) {
            let kv_head = head / params.group_size;
            let s_own_base = params.q.offset + batch * params.q.batch + head * params.q.head;
            let s_other_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head;
            let dp_own_base = params.grad_o.offset + batch * params.grad_o.batch + head * params.grad_o.head;
            let dp_other_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head;
            let bias_base = params.bias.offset + batch * params.bias.batch + head * params.bias.head;
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

            // @unroll
            for (var i = 0u; i < OWN_VECS; i++) {
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let row = first_own + 4u * (i * TY + y) + c;
                    let position = i32(row) + offset;
                    let seen = keys_seen(position, kv_len);
                    let state = row_state(batch, head, min(row, max(own_len, 1u) - 1u));
                    let no_weights = row >= own_len || is_empty(state.x);
                    // @unroll
                    for (var j = 0u; j < OTHER_VECS; j++) {
                        let key = first_other + 4u * (j * TX + x);
                        let keys = vec4(i32(key)) + vec4(0, 1, 2, 3);
                        var hides = vec4(no_weights) | (keys < vec4(seen.x)) | (keys >= vec4(seen.y));
                        if (KEEP_WORDS) {
                            let local = key - first_other;
                            let bits = sh_keep[(row - first_own) * KEEP_STRIDE + local / 32u] >> (local % 32u);
                            hides |= (vec4(bits) & vec4(1u, 2u, 4u, 8u)) == vec4(0u);
                        }
                        let count = select(0u, other_len - min(key, other_len), row < own_len);
                        let bias4 = bias_of(bias_base + row * params.bias.row + key * params.bias_key, count);
                        hides |= bitcast<vec4<u32>>(bias4) == vec4(NEG_INF_BITS);
                        let n = (4u * i + c) * OTHER_VECS + j;
                        let score = final_scores(params.scale * s[n], bias4, batch, head, row, key, position);
                        acc[n] += select(weights_of(score, vec4(state.x)) * (dp[n] - state.y), vec4(0.0), hides);
                    }
                }
            }
        }
    }

    // Over the rows, or the keys, of the tile where the bias has but one.
    let out_base = params.out.offset + own.x * params.out.batch + own.y * params.out.head;
    let first_row = select(0u, own.z * BLOCK_OWN, has_rows);
    let first_key = select(0u, own.w * BLOCK_OTHER, has_keys);
    if (has_rows && has_keys) {
        // @unroll
        for (var i = 0u; i < OWN_VECS; i++) {
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                let row = first_row + 4u * (i * TY + y) + c;
                // @unroll
                for (var j = 0u; j < OTHER_VECS; j++) {
                    let key = first_key + 4u * (j * TX + x);
                    let count = select(0u, params.kv_len - min(key, params.kv_len), row < params.q_len);
                    store(out_base + row * params.out.row + key, acc[(4u * i + c) * OTHER_VECS + j], count);
                }
            }
        }
    } else if (has_keys) {
        // @unroll
        for (var j = 0u; j < OTHER_VECS; j++) {
            var sum = vec4(0.0);
            // @unroll
            for (var c = 0u; c < 4u * OWN_VECS; c++) {
                sum += acc[c * OTHER_VECS + j];
            }
            sh_p[y * TX * OTHER_VECS + j * TX + x] = sum;
        }
        workgroupBarrier();
        // @unroll
        for (var j = 0u; j < OTHER_VECS; j++) {
            var sum = vec4(0.0);
            for (var other = 0u; other < TY; other++) {
                sum += sh_p[other * TX * OTHER_VECS + j * TX + x];
            }
            let key = first_key + 4u * (j * TX + x);
            store(out_base + key, sum, select(0u, params.kv_len - min(key, params.kv_len), y == 0u));
        }
    } else {
        // @unroll
        for (var i = 0u; i < OWN_VECS; i++) {
            var sum = vec4(0.0); // of four rows
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                // @unroll
                for (var j = 0u; j < OTHER_VECS; j++) {
                    let four = acc[(4u * i + c) * OTHER_VECS + j];
                    sum[c] += (four.x + four.y) + (four.z + four.w);
                }
            }
            sh_p[x * TY * OWN_VECS + i * TY + y] = sum;
        }
        workgroupBarrier();
        var all = 0.0;
        // @unroll
        for (var i = 0u; i < OWN_VECS; i++) {
            var sum = vec4(0.0);
            for (var other = 0u; other < TX; other++) {
                sum += sh_p[other * TY * OWN_VECS + i * TY + y];
            }
            all += (sum.x + sum.y) + (sum.z + sum.w);
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                let row = first_row + 4u * (i * TY + y) + c;
                store(out_base + row * params.out.row, vec4(sum[c]), select(0u, 1u, has_rows && x == 0u && row < params.q_len));
            }
        }
        workgroupBarrier(); // every reader of the rows' sums is done
        if (!has_rows) {
            if (x == 0u) {
                sh_p[y] = vec4(all);
            }
            workgroupBarrier();
            var sum = 0.0;
            for (var other = 0u; other < TY; other++) {
                sum += sh_p[other].x;
            }
            store(out_base, vec4(sum), select(0u, 1u, lane == 0u));
        }
    }
}
