// flash_fwd: O = softmax(scale * Q K^T) V in one pass over K and V; the score matrix lives in registers, a tile at a time.
// Maths     s = scale * q.k;  softcap, score_mod, ALiBi and bias change s, masks hide keys;  m' = max(m, rowmax s);  p = e^(s-m');
//           l' = l e^(m-m') + rowsum p;  acc' = acc e^(m-m') + P V;  at the end o = acc / l, lse = m + ln l.
// Shapes    q (batch, q_heads, q_len, head_dim)  k (batch, kv_heads, kv_len, head_dim)  v (batch, kv_heads, kv_len, value_dim)
//           out (batch, q_heads, q_len, value_dim)  lse (batch, q_heads, q_len)  bias (batch|1, q_heads|1, q_len|1, kv_len|1)
//           mask likewise, 32 keys to a word; strides and offsets come in params, in elements. A packed batch has no stride of batch.
// Mapping   A workgroup owns BLOCK_Q rows of one head and walks the keys BLOCK_KV at a time. Thread (x, y) owns the rows
//           4*(i*TY + y) .. +3, i < ROW_VECS, and of them: in the score tile the keys 4*(i*TX + x) .. +3, i < KEY_VECS, and in
//           the output the columns 4*(i*TX + x) .. +3, i < COL_VECS. value_dim <= 4*TX*COL_VECS; head_dim is a loop.
// Budget    sh_stage: max(SLICE_D*(Q_STRIDE + K_STRIDE), SLICE_KV*V_STRIDE) vec4, used in turn for a slice of Q and K and for one of V;
//           sh_p: BLOCK_KV*P_STRIDE vec4, used in turn for partial row maxima and for P; sh_keep: KEEP_COUNT words, a bit a key, where
//           masks are tables or functions; two words of flags, four of the batch entry. At the defaults 14876 bytes.
// Registers vec4<f32>: scores 4*ROW_VECS*KEY_VECS, acc 4*ROW_VECS*COL_VECS, as many again for a slice's part of the scores or a tile's of
//           acc, and, of long inputs, as acc; m and l ROW_VECS each, operands ROW_VECS + KEY_VECS.
// Barriers  One at the start. Per tile two a slice of head_dim, two for the row maxima, two a slice of V less one, three where masks are
//           tables or functions.
//           Workgroup-uniform: loop bounds come from params, the workgroup's number, read-only tables at uniform places and
//           workgroupUniformLoad. Rows and keys past the end are staged as zeros, never skipped.
// Numerics  All f32 whatever is stored. Scores stay in natural units and meet log2(e) after the maximum is subtracted, so that a score
//           of any size keeps its bits. A masked key takes no part in the maximum; its weight is marked by -1, so that PV passes over it
//           and a NaN in its value has no effect. l == 0 when a row saw no key, or none but scores of -inf (any other largest score has
//           weight 1): o = 0, lse = -inf, whose bits are stored as an integer because WGSL has no infinities. A sink is where m and l
//           begin. Of many alike terms each addition to a sum that is much larger rounds the same way: so terms are summed apart, a slice
//           of a dot product, then the keys of a tile, then, of long inputs, PART_TILES tiles, before they meet the sum of all; the error
//           is that of some 100 additions, not of one a key. Dot products and sums of P V are f32 before scale and division: beyond 3.4e38 they are infinite. A NaN among visible
//           scores makes l NaN, hence o and lse; it is handed on by its bits, because SwiftShader's exp2 and log make a number of it.
//           A score of +inf makes o NaN and lse +inf. llvmpipe ends every loop of an invocation after 65535 iterations in all, without a
//           word, so long inputs take several passes there: what is between them is acc in out, m in lse and l in extras.
// Source    Milakov & Gimelshein 2018 (online softmax); Dao 2023 (FlashAttention-2, algorithm 1: unnormalised acc, one division).

const TX: u32 = 8u; // @spec
const TY: u32 = 16u; // @spec
const ROW_VECS: u32 = 1u; // @spec
const KEY_VECS: u32 = 1u; // @spec
const COL_VECS: u32 = 1u; // @spec
const SLICE_D: u32 = 16u; // @spec
const SLICE_KV: u32 = 16u; // @spec
const PART_TILES: u32 = 0xffffffffu; // @spec tiles whose terms are summed apart from those before: see Numerics
const PASSES: bool = false; // @spec keys are gone through in several dispatches, each resuming from the one before; takes a PART_TILES

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
// Words of sh_keep to a row.
const KEEP_STRIDE: u32 = BLOCK_KV / 32u;
const KEEP_COUNT: u32 = select(1u, BLOCK_Q * KEEP_STRIDE, KEEP_WORDS);
const Q_BINDING: u32 = 1u;
const K_BINDING: u32 = 2u;
const V_BINDING: u32 = 3u;

const PARTS: bool = PART_TILES < 0xffffffffu; // else one is all, and threads needn't hold its sums beside all others'

const MASKED: f32 = -1.0;

// @include params = uniform
// @include stored as q = f32
// @include stored as k = f32
// @include stored as v = f32
const OUT_BINDING: u32 = 4u;
// @include out = f32
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;
// @include attention

var<workgroup> sh_stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> sh_p: array<vec4<f32>, P_VECS>;
var<workgroup> sh_keep: array<u32, KEEP_COUNT>;
var<workgroup> sh_kept: atomic<u32>;
var<workgroup> sh_any_kept: u32;
var<workgroup> sh_sequence: Sequence;

// What the rows' sums are worth after their maxima have risen. From LOWEST the difference may overflow; any exponent below -150 rescales
// to 0. An infinite maximum is no less than itself.
fn rescale_of(before: vec4<f32>, after: vec4<f32>) -> vec4<f32> {
    return select(exp2(max((before - after) * LOG2_E, vec4(-200.0))), vec4(1.0), before == after);
}

@compute @workgroup_size(TX, TY)
fn flash_fwd(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_id) thread: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let x = thread.x;
    let y = thread.y;
    let block = block_of(number, BLOCK_Q);
    let batch = block.batch;
    let head = block.head;
    let first_row = block.first_row;
    // Read by one for all: extras may be written to, and browsers take no control flow by what may differ between invocations.
    if (lane == 0u) {
        sh_sequence = sequence_of(batch);
    }
    let sequence = workgroupUniformLoad(&sh_sequence);
    let q_len = sequence.q_len;
    let kv_len = i32(sequence.kv_len);
    let offset = offset_of(sequence);
    let tiles = tiles_of(first_row, BLOCK_Q, BLOCK_KV, sequence);
    let resumes = PASSES && params.first_key > 0u;
    let is_last = !PASSES || params.last_pass == 1u;
    let nothing_new = resumes && !is_last && tiles.first >= tiles.end;
    if (number >= params.end_block || first_row >= max(q_len, params.rows) || nothing_new) {
        return; // the whole workgroup at once: the grid is folded into a rectangle, and longer than some batch entries
    }

    let kv_head = head / params.group_size;
    let q_base = params.q.offset + batch * params.q.batch + head * params.q.head + sequence.first_q * params.q.row;
    let k_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head + sequence.first_kv * params.k.row;
    let v_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head + sequence.first_kv * params.v.row;
    let out_base = params.out.offset + batch * params.out.batch + head * params.out.head + sequence.first_q * params.out.row;
    let lse_base = params.lse.offset + batch * params.lse.batch + head * params.lse.head + sequence.first_q * params.lse.row;
    let bias_base = params.bias.offset + batch * params.bias.batch + head * params.bias.head;
    let sums_base = params.sums + batch * params.sums_batch + head * params.sums_head + sequence.first_q;

    var acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>; // acc[row * COL_VECS + column vector]
    var row_max: array<vec4<f32>, ROW_VECS>;             // one component a row; so far
    var acc_max: array<vec4<f32>, ROW_VECS>;             // when the last part was added to row_sum and acc
    var row_sum: array<vec4<f32>, ROW_VECS>;             // over this thread's keys alone, until the end
    // The rows begin with nothing, with their sink, or with what the keys before this dispatch's have made of them.
    let start = row_start(head);
    // @unroll
    for (var i = 0u; i < ROW_VECS; i++) {
        // @unroll
        for (var c = 0u; c < 4u; c++) {
            let row = first_row + 4u * (i * TY + y) + c;
            row_max[i][c] = start.x;
            row_sum[i][c] = select(start.y, 0.0, x > 0u);
            if (PASSES) {
                if (resumes && row < q_len) {
                    row_max[i][c] = bitcast<f32>(lse[lse_base + row * params.lse.row]);
                    row_sum[i][c] = select(bitcast<f32>(extra(sums_base + row)), 0.0, x > 0u);
                    // @unroll
                    for (var j = 0u; j < COL_VECS; j++) {
                        // @unroll
                        for (var e = 0u; e < 4u; e++) {
                            let column = 4u * (j * TX + x) + e;
                            if (column < params.value_dim) {
                                acc[(4u * i + c) * COL_VECS + j][e] = out_at(out_base + row * params.out.row + column);
                            }
                        }
                    }
                }
            }
        }
    }

    acc_max = row_max;
    if (KEEP_WORDS) {
        if (lane == 0u) {
            atomicStore(&sh_kept, 0u);
        }
        workgroupBarrier();
    }
    for (var tile = tiles.first; tile < tiles.end;) {
        var part_sum: array<vec4<f32>, ROW_VECS>;
        var part_acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>;
        for (var n_tiles = 0u; n_tiles < PART_TILES && tile < tiles.end; n_tiles++) {
            let first_key = tile * BLOCK_KV;
            let masked = BIAS || KEEP_WORDS || tile < tiles.first_full || tile >= tiles.end_full;

            // What masks that are a table or a function leave of the tile; without any key of it the tile is done.
            var any_kept = 1u;
            if (KEEP_WORDS) {
                for (var item = lane; item < KEEP_COUNT; item += THREADS) {
                    let row = first_row + item / KEEP_STRIDE;
                    var word = 0u;
                    if (row < q_len) {
                        word = keep_word(batch, head, row, first_key + 32u * (item % KEEP_STRIDE), sequence);
                    }
                    sh_keep[item] = word;
                    atomicOr(&sh_kept, word);
                }
                workgroupBarrier();
                if (lane == 0u) {
                    sh_any_kept = atomicExchange(&sh_kept, 0u);
                }
                any_kept = workgroupUniformLoad(&sh_any_kept);
            }
            if (any_kept != 0u) {
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
                            let inside = d < params.head_dim && row + c < q_len;
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
                            let inside = d < params.head_dim && key + c < sequence.kv_len;
                            four[c] = select(0.0, k_at(select(0u, k_base + (key + c) * params.k.row + d, inside)), inside);
                        }
                        sh_stage[K_BASE + (item % SLICE_D) * K_STRIDE + item / SLICE_D] = four;
                    }
                    workgroupBarrier();
                    var part: array<vec4<f32>, 4u * ROW_VECS * KEY_VECS>;
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
                                    part[(4u * i + c) * KEY_VECS + j] = fma(vec4(q4[c]), k4[j], part[(4u * i + c) * KEY_VECS + j]);
                                }
                            }
                        }
                    }
                    // @unroll
                    for (var n = 0u; n < 4u * ROW_VECS * KEY_VECS; n++) {
                        s[n] += part[n];
                    }
                }

                // Scores as they count, and which of them are hidden: by position only in tiles at the edge of what rows see.
                var hidden: array<vec4<bool>, 4u * ROW_VECS * KEY_VECS>;
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    // @unroll
                    for (var c = 0u; c < 4u; c++) {
                        let row = first_row + 4u * (i * TY + y) + c;
                        let position = i32(row) + offset;
                        let seen = keys_seen(position, kv_len);
                        // @unroll
                        for (var j = 0u; j < KEY_VECS; j++) {
                            let key = first_key + 4u * (j * TX + x);
                            let keys = vec4(i32(key)) + vec4(0, 1, 2, 3);
                            var hides = vec4(masked) & ((keys < vec4(seen.x)) | (keys >= vec4(seen.y)));
                            if (KEEP_WORDS) {
                                let local = key - first_key;
                                let bits = sh_keep[(row - first_row) * KEEP_STRIDE + local / 32u] >> (local % 32u);
                                hides |= (vec4(bits) & vec4(1u, 2u, 4u, 8u)) == vec4(0u);
                            }
                            var bias4 = vec4(0.0);
                            if (BIAS) {
                                let count = select(0u, sequence.kv_len - min(key, sequence.kv_len), row < q_len);
                                bias4 = bias_of(bias_base + row * params.bias.row + key * params.bias_key, count);
                                hides |= bitcast<vec4<u32>>(bias4) == vec4(NEG_INF_BITS);
                            }
                            let n = (4u * i + c) * KEY_VECS + j;
                            s[n] = final_scores(params.scale * s[n], bias4, batch, head, row, key, position);
                            hidden[n] = hides;
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
                var rescale: array<vec4<f32>, ROW_VECS>;
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    var largest = row_max[i];
                    for (var other = 0u; other < TX; other++) {
                        largest = max(largest, sh_p[other * P_STRIDE + i * TY + y]);
                    }
                    rescale[i] = rescale_of(row_max[i], largest);
                    row_max[i] = largest;
                    part_sum[i] *= rescale[i];
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
                            let below = (score - vec4(row_max[i][c])) * LOG2_E;
                            // Of a NaN, and of an infinite score below itself.
                            let is_nan = (bitcast<vec4<u32>>(below) & vec4(0x7fffffffu)) > vec4(0x7f800000u);
                            let weight = select(exp2(max(below, vec4(-200.0))), below, is_nan);
                            let seen = select(weight, vec4(0.0), hidden[(4u * i + c) * KEY_VECS + j]);
                            part_sum[i][c] += (seen.x + seen.y) + (seen.z + seen.w);
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

                // P V over slices of keys.
                var tile_acc: array<vec4<f32>, 4u * ROW_VECS * COL_VECS>;
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
                            let inside = key < sequence.kv_len && column + c < params.value_dim;
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
                                    tile_acc[(4u * i + c) * COL_VECS + j] = fma(vec4(p4[c]), v4, tile_acc[(4u * i + c) * COL_VECS + j]);
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
                                    let sum = tile_acc[(4u * i + c) * COL_VECS + j];
                                    tile_acc[(4u * i + c) * COL_VECS + j] = select(fma(vec4(p4[c]), v4, sum), sum, p4[c] == MASKED);
                                }
                            }
                        }
                    }
                }
                // @unroll
                for (var i = 0u; i < ROW_VECS; i++) {
                    // @unroll
                    for (var c = 0u; c < 4u; c++) {
                        // @unroll
                        for (var j = 0u; j < COL_VECS; j++) {
                            let n = (4u * i + c) * COL_VECS + j;
                            part_acc[n] = fma(part_acc[n], vec4(rescale[i][c]), tile_acc[n]);
                        }
                    }
                }
            }
            tile++;
        }
        // @unroll
        for (var i = 0u; i < ROW_VECS; i++) {
            let rescale = rescale_of(acc_max[i], row_max[i]);
            acc_max[i] = row_max[i];
            row_sum[i] = fma(row_sum[i], rescale, part_sum[i]);
            // @unroll
            for (var c = 0u; c < 4u; c++) {
                // @unroll
                for (var j = 0u; j < COL_VECS; j++) {
                    let n = (4u * i + c) * COL_VECS + j;
                    acc[n] = select(part_acc[n], fma(acc[n], vec4(rescale[c]), part_acc[n]), PARTS);
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
            if (!is_last) {
                if (row < q_len) {
                    // @unroll
                    for (var j = 0u; j < COL_VECS; j++) {
                        let column = 4u * (j * TX + x);
                        let count = params.value_dim - min(column, params.value_dim);
                        out_store(out_base + row * params.out.row + column, acc[(4u * i + c) * COL_VECS + j], count);
                    }
                    if (x == 0u) {
                        lse[lse_base + row * params.lse.row] = bitcast<u32>(row_max[i][c]);
                        store_extra(sums_base + row, bitcast<u32>(total[c]));
                    }
                }
            } else if (row < max(q_len, params.rows)) {
                let empty = total[c] == 0.0 || row >= q_len;
                let sum = select(total[c], 1.0, empty);
                // @unroll
                for (var j = 0u; j < COL_VECS; j++) {
                    let column = 4u * (j * TX + x);
                    let four = select(acc[(4u * i + c) * COL_VECS + j] / sum, vec4(0.0), empty);
                    out_store(out_base + row * params.out.row + column, four, params.value_dim - min(column, params.value_dim));
                }
                if (x == 0u) {
                    lse[lse_base + row * params.lse.row] = lse_bits(row_max[i][c], sum, empty);
                }
            }
        }
    }
}
