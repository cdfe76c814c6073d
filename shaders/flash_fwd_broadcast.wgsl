// flash_fwd_broadcast: O = softmax(scale * Q K^T) V in one pass over K and V, everything in registers: each invocation reads one key of a
//           tile, and a subgroup hands it round.
// Maths     As flash_fwd: s = scale * q.k, changed by options;  m' = max(m, rowmax s);  p = e^(s-m');  l' = l e^(m-m') + rowsum p;
//           acc' = acc e^(m-m') + P V;  at the end o = acc / l, lse = m + ln l.
// Shapes    q (batch, q_heads, q_len, HEAD_DIM)  k (batch, kv_heads, kv_len, HEAD_DIM)  v (batch, kv_heads, kv_len, VALUE_DIM)
//           out (batch, q_heads, q_len, VALUE_DIM)  lse (batch, q_heads, q_len)  bias (batch|1, q_heads|1, q_len|1, kv_len|1)
//           mask likewise, 32 keys to a word; strides and offsets come in params, in elements. A packed batch has no stride of batch.
// Mapping   A workgroup of LANES invocations, all of one subgroup, owns LANES * ROWS rows of one head: a lane owns the rows
//           first_row + r*LANES + lane, r < ROWS, whole, with their Q and their output. It walks the keys LANES at a time; a lane
//           reads K and V of the key first_key + lane, and subgroupBroadcast gives each element to all.
// Budget    0 bytes of workgroup memory.
// Registers Rows: q HEAD_DIM, acc VALUE_DIM and as many for a part of it, scores LANES, m and l; f32: k HEAD_DIM, v V_WIDTH. Far more than a GPU's invocation has:
//           it's for devices whose registers spill to a cache that is as quick, that is to software devices.
// Barriers  None.
// Numerics  As flash_fwd. A masked key has a score of -inf, put there by its bits, hence the weight 0. In tiles with masked keys numbers
//           of V that aren't finite are read as 0, and at the end added to the rows that do see their keys: a NaN in the value of a
//           masked key has no effect.
// Source    As flash_fwd. Why broadcasts: llvmpipe reads memory one invocation after the other unless all read one place that is known when
//           it compiles, so what pays is to read each element once a subgroup, as wide as can be.

const LANES: u32 = 8u; // @spec
const HEAD_DIM: u32 = 64u; // @spec
const VALUE_DIM: u32 = 64u; // @spec
const ROWS: u32 = 4u; // @spec
alias Rows = vec4<f32>; // @spec a number for each row of a lane
alias RowWords = vec4<u32>; // @spec and a word

// Whether more than the scale changes a score.
const CHANGED: bool = SCORE_MOD || SOFTCAP || ALIBI || BIAS;
const BLOCK_Q: u32 = LANES * ROWS;
const BLOCK_KV: u32 = LANES;
const LANE_BITS: u32 = (1u << LANES) - 1u;
// How many keys' scores, and columns of the output, are summed side by side: as many as there are registers for.
const KEYS_AT_ONCE: u32 = 4u;
const COLUMNS_AT_ONCE: u32 = min(2u, V_WIDTH);
// Dimensions, and tiles, whose terms are summed apart from those before: see flash_fwd.
const PART_DIMS: u32 = max(16u, K_WIDTH);
const PART_TILES: u32 = 64u;
// Columns that are stored side by side.
const OUT_WIDTH: u32 = max(4u, V_WIDTH);
const ACC_COLUMNS: u32 = (VALUE_DIM + OUT_WIDTH - 1u) / OUT_WIDTH * OUT_WIDTH;
const Q_BINDING: u32 = 1u;
const K_BINDING: u32 = 2u;
const V_BINDING: u32 = 3u;

// @include params = uniform
// @include wide as q = f32_1
// @include pair as q_pair = none
// @include wide as k = f32_1
// @include pair as k_pair = none
// @include wide as v = f32_1
// @include pair as v_pair = none
const OUT_BINDING: u32 = 4u;
// @include out = f32
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;
// @include rows
// @include attention

// Which of a tile's keys a row sees by causality, window and length: a bit a key.
fn bits_seen(position: i32, first_key: u32, kv_len: i32) -> u32 {
    let seen = clamp(keys_seen(position, kv_len) - vec2(i32(first_key)), vec2(0), vec2(i32(LANES)));
    return ((1u << u32(seen.y)) - 1u) & ~((1u << u32(seen.x)) - 1u);
}

// Which of a tile's keys a bias of -inf leaves. Keys past the end have no bias.
fn bits_biased(bias_row: u32, first_key: u32, kv_len: u32) -> u32 {
    var bits = 0u;
    // @unroll
    for (var n = 0u; n < LANES; n += 4u) {
        let key = first_key + n;
        let bias4 = bias_of(bias_row + key * params.bias_key, kv_len - min(key, kv_len));
        let left = select(vec4(0u), vec4(1u, 2u, 4u, 8u), bitcast<vec4<u32>>(bias4) != vec4(NEG_INF_BITS));
        bits |= (left.x | left.y | left.z | left.w) << n;
    }
    return bits;
}

// The first tile from this one on in which some row may not see some key.
fn next_masked(tile: u32, tiles: Tiles) -> u32 {
    let full = !BIAS && !KEEP_WORDS && tile >= tiles.first_full;
    return select(tile, max(tile, tiles.end_full), full);
}

// What the rows' sums are worth after their maxima have risen. From LOWEST the difference may overflow; any exponent below -150 rescales
// to 0. An infinite maximum is no less than itself.
fn rescale_of(before: Rows, after: Rows) -> Rows {
    return select(exp2(max((before - after) * LOG2_E, Rows(-200.0))), Rows(1.0), before == after);
}

// Those of infinities and NaN are INF_BITS, all others' less.
fn exponent_bits(x: f32) -> i32 {
    return bitcast<i32>(x) & i32(INF_BITS);
}

@compute @workgroup_size(LANES)
fn flash_fwd_broadcast(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let block = block_of(number, BLOCK_Q);
    let batch = block.batch;
    let head = block.head;
    let sequence = sequence_of(batch);
    let q_len = sequence.q_len;
    let kv_len = i32(sequence.kv_len);
    let offset = offset_of(sequence);
    let tiles = tiles_of(block.first_row, BLOCK_Q, BLOCK_KV, sequence);
    if (number >= params.end_block || block.first_row >= max(q_len, params.rows)) {
        return;
    }

    let kv_head = head / params.group_size;
    let q_base = params.q.offset + batch * params.q.batch + head * params.q.head + sequence.first_q * params.q.row;
    let k_base = params.k.offset + batch * params.k.batch + kv_head * params.k.head + sequence.first_kv * params.k.row;
    let v_base = params.v.offset + batch * params.v.batch + kv_head * params.v.head + sequence.first_kv * params.v.row;
    let out_base = params.out.offset + batch * params.out.batch + head * params.out.head + sequence.first_q * params.out.row;
    let lse_base = params.lse.offset + batch * params.lse.batch + head * params.lse.head + sequence.first_q * params.lse.row;
    let bias_base = params.bias.offset + batch * params.bias.batch + head * params.bias.head;
    let scale = params.scale;
    let last_row = max(q_len, 1u) - 1u;
    let last_key = max(sequence.kv_len, 1u) - 1u;
    let own_row = block.first_row + lane; // the first of them

    // Q a chunk at a time, each pushing the ones before it on: a loop that isn't unrolled makes less for the driver to compile.
    var q: array<Rows, HEAD_DIM>;
    for (var d = 0u; d < HEAD_DIM; d += Q_WIDTH) {
        // @unroll
        for (var c = 0u; c < HEAD_DIM - Q_WIDTH; c++) {
            q[c] = q[c + Q_WIDTH];
        }
        for (var r = 0u; r < ROWS; r++) {
            let chunk = q_read(q_base + min(own_row + r * LANES, last_row) * params.q.row + d);
            // @unroll
            for (var e = 0u; e < Q_WIDTH; e++) {
                q[HEAD_DIM - Q_WIDTH + e] = turned(q[HEAD_DIM - Q_WIDTH + e], chunk[e]);
            }
        }
    }

    let start = row_start(head);
    var row_max = Rows(start.x); // so far
    var acc_max = Rows(start.x); // when the last part was added to row_sum and acc
    var row_sum = Rows(start.y);
    var acc: array<Rows, ACC_COLUMNS>;
    var keep: RowWords; // of the 32 keys round the tile
    var all_kept = true; // no number of V that isn't finite in a tile with masked keys
    for (var tile = tiles.first; tile < tiles.end;) {
        var part_sum = Rows(0.0);
        var part_acc: array<Rows, ACC_COLUMNS>;
        for (var n_tiles = 0u; n_tiles < PART_TILES && tile < tiles.end; n_tiles++) {
            if (KEEP_WORDS) {
                // On to the next tile that masks that are a table or a function leave something of. Behind the last nothing is visible.
                for (; tile < tiles.end; tile++) {
                    let is_new = tile == tiles.first || tile % (32u / LANES) == 0u;
                    // A loop of no time or one is left at once on devices that run both sides of an `if`.
                    for (var once = 0u; once < select(0u, 1u, is_new); once++) {
                        for (var r = 0u; r < ROWS; r++) {
                            let row = own_row + r * LANES;
                            let word = keep_word(batch, head, min(row, last_row), tile * LANES / 32u * 32u, sequence);
                            keep = words_turned(keep, select(0u, word, row < q_len));
                        }
                    }
                    var kept = 0u;
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        kept |= keep[r];
                    }
                    if (subgroupAny(((kept >> (tile * LANES % 32u)) & LANE_BITS) != 0u)) {
                        break;
                    }
                }
            }
            let first_key = tile * LANES;
            let masked = next_masked(tile, tiles) == tile;
            let own_key = min(first_key + lane, last_key);

            // S = Q K^T, each chunk of K read right before its first use.
            let k_row = k_base + own_key * params.k.row;
            var k: array<f32, HEAD_DIM>;
            var s: array<Rows, LANES>;
            // @unroll
            for (var first = 0u; first < LANES; first += KEYS_AT_ONCE) {
                // @unroll
                for (var d0 = 0u; d0 < HEAD_DIM; d0 += PART_DIMS) {
                    var part: array<Rows, KEYS_AT_ONCE>;
                    // @unroll
                    for (var d = d0; d < min(d0 + PART_DIMS, HEAD_DIM); d += K_WIDTH) {
                        if (first == 0u) {
                            let chunk = k_read(k_row + d);
                            // @unroll
                            for (var e = 0u; e < K_WIDTH; e++) {
                                k[d + e] = chunk[e];
                            }
                        }
                        // @unroll
                        for (var e = 0u; e < K_WIDTH; e++) {
                            // @unroll
                            for (var n = 0u; n < KEYS_AT_ONCE; n++) {
                                part[n] = fma(q[d + e], Rows(subgroupBroadcast(k[d + e], first + n)), part[n]);
                            }
                        }
                    }
                    // @unroll
                    for (var n = 0u; n < KEYS_AT_ONCE; n++) {
                        s[first + n] += part[n];
                    }
                }
            }

            // Scores as they count.
            // @unroll
            for (var n = 0u; n < LANES; n++) {
                s[n] *= scale;
            }
            for (var r = 0u; r < select(0u, ROWS, CHANGED); r++) {
                let row = own_row + r * LANES;
                // @unroll
                for (var n = 0u; n < LANES; n += 4u) {
                    let key = first_key + n;
                    var bias4 = vec4(0.0);
                    if (BIAS) {
                        let bias_row = bias_base + min(row, last_row) * params.bias.row;
                        bias4 = bias_of(bias_row + key * params.bias_key, sequence.kv_len - min(key, sequence.kv_len));
                    }
                    let four = vec4(s[n].x, s[n + 1u].x, s[n + 2u].x, s[n + 3u].x);
                    let final4 = final_scores(four, bias4, batch, head, row, key, i32(row) + offset);
                    // @unroll
                    for (var e = 0u; e < 4u; e++) {
                        s[n + e] = turned(s[n + e], final4[e]);
                    }
                }
            }
            for (var r = 0u; r < select(0u, ROWS, masked); r++) {
                let row = own_row + r * LANES;
                var bits = bits_seen(i32(row) + offset, first_key, kv_len);
                if (KEEP_WORDS) {
                    bits &= keep.x >> (first_key % 32u);
                    keep = words_turned(keep, keep.x);
                }
                if (BIAS) {
                    bits &= bits_biased(bias_base + min(row, last_row) * params.bias.row, first_key, sequence.kv_len);
                }
                // @unroll
                for (var n = 0u; n < LANES; n++) {
                    let kept = bitcast<f32>(select(NEG_INF_BITS, bitcast<u32>(s[n].x), (bits & (1u << n)) != 0u));
                    s[n] = turned(s[n], kept);
                }
            }

            // The rows' maxima so far, and P = e^(S - m).
            var largest = row_max;
            // @unroll
            for (var n = 0u; n < LANES; n++) {
                largest = max(largest, s[n]);
            }
            var poison = Rows(0.0); // NaN if any score is, or if one is infinite: below itself
            // @unroll
            for (var n = 0u; n < LANES; n++) {
                s[n] = (s[n] - largest) * LOG2_E;
                poison += s[n];
            }
            let is_nan = (bitcast<RowWords>(poison) & RowWords(0x7fffffffu)) > RowWords(INF_BITS);
            let rescale = select(rescale_of(row_max, largest), poison, is_nan);
            row_max = largest;
            var tile_sum = Rows(0.0);
            // @unroll
            for (var n = 0u; n < LANES; n++) {
                s[n] = exp2(max(s[n], Rows(-200.0)));
                tile_sum += s[n];
            }
            part_sum = fma(part_sum, rescale, tile_sum);

            // acc = acc e^(m - m') + P V, each chunk of V read right before its use.
            let v_row = v_base + own_key * params.v.row;
            var pin = 0u; // always 0
            let kept_below = select(0x7fffffff, i32(INF_BITS), masked);
            // @unroll
            for (var c = 0u; c < VALUE_DIM; c += V_WIDTH) {
                var chunk = v_read(v_row + c + pin);
                // @unroll
                for (var e = 0u; e < V_WIDTH; e++) {
                    let kept = exponent_bits(chunk[e]) < kept_below;
                    all_kept = all_kept && kept;
                    chunk[e] = select(0.0, chunk[e], kept);
                }
                // @unroll
                for (var first = 0u; first < V_WIDTH; first += COLUMNS_AT_ONCE) {
                    var tile_acc: array<Rows, COLUMNS_AT_ONCE>;
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        // @unroll
                        for (var e = 0u; e < COLUMNS_AT_ONCE; e++) {
                            tile_acc[e] = fma(s[n], Rows(subgroupBroadcast(chunk[first + e], n)), tile_acc[e]);
                        }
                    }
                    // @unroll
                    for (var e = 0u; e < COLUMNS_AT_ONCE; e++) {
                        part_acc[c + first + e] = fma(part_acc[c + first + e], rescale, tile_acc[e]);
                    }
                }
                // The next read waits for these sums. Else Mesa 25 moves all sums behind all reads, which is more than there are registers
                // for, and takes a fifth longer. last_pass is 0 or 1, which no compiler knows.
                var bits = RowWords(0u);
                // @unroll
                for (var e = 0u; e < V_WIDTH; e++) {
                    bits |= bitcast<RowWords>(part_acc[c + e]);
                }
                var all = 0u;
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    all |= bits[r];
                }
                pin = all & (params.last_pass >> 1u);
            }
            tile++;
        }
        let rescale = rescale_of(acc_max, row_max);
        acc_max = row_max;
        row_sum = fma(row_sum, rescale, part_sum);
        // @unroll
        for (var c = 0u; c < VALUE_DIM; c++) {
            acc[c] = fma(acc[c], rescale, part_acc[c]);
        }
    }

    // O a chunk at a time, each pulling the ones after it up.
    let end_skipped = select(0u, tiles.end, subgroupAny(!all_kept));
    for (var column = 0u; column < VALUE_DIM; column += OUT_WIDTH) {
        // What was skipped of V, for the rows that see it.
        for (var tile = next_masked(tiles.first, tiles); tile < end_skipped; tile = next_masked(tile + 1u, tiles)) {
            let first_key = tile * LANES;
            let v_row = v_base + min(first_key + lane, last_key) * params.v.row;
            var seen: RowWords;
            for (var r = 0u; r < ROWS; r++) {
                let row = own_row + r * LANES;
                var bits = bits_seen(i32(row) + offset, first_key, kv_len);
                if (KEEP_WORDS) {
                    let word = keep_word(batch, head, min(row, last_row), first_key / 32u * 32u, sequence);
                    bits &= word >> (first_key % 32u);
                }
                if (BIAS) {
                    bits &= bits_biased(bias_base + min(row, last_row) * params.bias.row, first_key, sequence.kv_len);
                }
                seen = words_turned(seen, bits);
            }
            // @unroll
            for (var c = 0u; c < OUT_WIDTH; c += V_WIDTH) {
                let chunk = v_read(v_row + min(column + c, VALUE_DIM - V_WIDTH));
                // @unroll
                for (var e = 0u; e < V_WIDTH; e++) {
                    let skip = select(chunk[e], 0.0, exponent_bits(chunk[e]) < i32(INF_BITS));
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        let value = Rows(subgroupBroadcast(skip, n));
                        acc[c + e] += select(Rows(0.0), value, (seen & RowWords(1u << n)) != RowWords(0u));
                    }
                }
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            let row = own_row + r * LANES;
            let empty = row_sum.x == 0.0 || row >= q_len;
            let sum = select(row_sum.x, 1.0, empty);
            // @unroll
            for (var c = 0u; c < OUT_WIDTH; c += 4u) {
                let four = vec4(acc[c].x, acc[c + 1u].x, acc[c + 2u].x, acc[c + 3u].x) / sum;
                let count = select(0u, VALUE_DIM - min(column + c, VALUE_DIM), row < max(q_len, params.rows));
                out_store(out_base + row * params.out.row + column + c, select(four, vec4(0.0), empty), count);
            }
            row_sum = turned(row_sum, row_sum.x);
            // @unroll
            for (var c = 0u; c < OUT_WIDTH; c++) {
                acc[c] = turned(acc[c], acc[c].x);
            }
        }
        // @unroll
        for (var c = 0u; c < ACC_COLUMNS - OUT_WIDTH; c++) {
            acc[c] = acc[c + OUT_WIDTH];
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let row = own_row + r * LANES;
        if (row < max(q_len, params.rows)) {
            let empty = row_sum.x == 0.0 || row >= q_len;
            lse[lse_base + row * params.lse.row] = lse_bits(row_max.x, select(row_sum.x, 1.0, empty), empty);
        }
        row_sum = turned(row_sum, row_sum.x);
        row_max = turned(row_max, row_max.x);
    }
}
