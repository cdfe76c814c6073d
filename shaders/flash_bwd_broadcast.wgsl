// flash_bwd_broadcast: the gradient of the queries, or those of keys and values, everything in registers: each invocation reads one row of
//           what is walked, and a subgroup hands it round.
// Maths     As flash_bwd_dq, or with OWN_KEYS as flash_bwd_dkdv: P = e^(S - lse), recomputed;  dS = P (dO V^T - delta) S', S' being the
//           derivative of softcap and score_mod;  dq = scale dS K;  dk = scale dS^T Q;  dv = P^T dO, both summed over the query heads of the KV head.
// Shapes    q (batch, q_heads, q_len, HEAD_DIM)  k (batch, kv_heads, kv_len, HEAD_DIM)  v (batch, kv_heads, kv_len, VALUE_DIM)
//           grad_o (batch, q_heads, q_len, VALUE_DIM)  bias (batch|1, q_heads|1, q_len|1, kv_len|1), mask likewise, 32 keys to a word
//           lse and delta of the rows in extras; dq as q, dk as k, dv as v; strides and offsets come in params, in elements.
// Mapping   A workgroup of LANES invocations, all of one subgroup, owns LANES * ROWS queries of one head, or keys of one KV head: a lane owns
//           the rows first_own + r*LANES + lane, r < ROWS, whole. It walks the others LANES at a time; a lane reads the row
//           first_other + lane of both tensors, and subgroupBroadcast gives each element to all. a is what S is a product of, q and k, and
//           b what dP is one of, dO and V.
// Budget    0 bytes of workgroup memory.
// Registers Rows: own a HEAD_DIM and b VALUE_DIM, sums HEAD_DIM and with OWN_KEYS VALUE_DIM, as many for a part of them, S, dP and S'
//           LANES each; f32: others' a HEAD_DIM and b VALUE_DIM. For software devices, as flash_fwd_broadcast.
// Barriers  None.
// Numerics  As flash_bwd_dq. In tiles with masked pairs weights and gradients of those are 0, and what isn't finite in the rows that are
//           walked is read as 0 by the sums: what a visible one of those does to a row is done by its scores, or by P.
// Source    As flash_bwd_dq and flash_fwd_broadcast.

const LANES: u32 = 8u; // @spec
const HEAD_DIM: u32 = 64u; // @spec
const VALUE_DIM: u32 = 64u; // @spec
const ROWS: u32 = 2u; // @spec
alias Rows = vec2<f32>; // a number for each row of a lane
alias RowWords = vec2<u32>; // and a word
const OWN_KEYS: bool = false; // @spec dk and dv of own keys, else dq of own queries
const B_COLUMNS: u32 = 0u; // @spec of dv: VALUE_DIM, or 0 for dq

// Whether more than the scale changes a score, and whether that has a derivative of its own.
const CHANGED: bool = SCORE_MOD || SOFTCAP || ALIBI || BIAS;
const SLOPES: bool = SCORE_MOD || SOFTCAP;
const BLOCK_OWN: u32 = LANES * ROWS;
const BLOCK_OTHER: u32 = LANES;
const OWN_BITS: u32 = (1u << BLOCK_OWN) - 1u;
const OTHER_BITS: u32 = (1u << BLOCK_OTHER) - 1u;
// How many others' scores, and columns of the sums, are summed side by side: as many as there are registers for.
const OTHERS_AT_ONCE: u32 = 4u;
const A_COLUMNS_AT_ONCE: u32 = 2u - HEAD_DIM % 2u;
const B_COLUMNS_AT_ONCE: u32 = 2u - VALUE_DIM % 2u;
// Dimensions, and tiles, whose terms are summed apart from those before: see flash_fwd.
const A_PART_DIMS: u32 = max(16u, A_OTHER_WIDTH);
const B_PART_DIMS: u32 = max(16u, B_OTHER_WIDTH);
const PART_TILES: u32 = 64u;
// Columns that are stored side by side.
const OUT_WIDTH: u32 = 4u;
const A_SUMS: u32 = (HEAD_DIM + OUT_WIDTH - 1u) / OUT_WIDTH * OUT_WIDTH;
const B_SUMS: u32 = max(1u, (B_COLUMNS + OUT_WIDTH - 1u) / OUT_WIDTH) * OUT_WIDTH;
const A_OWN_BINDING: u32 = select(1u, 2u, OWN_KEYS);
const A_OTHER_BINDING: u32 = select(2u, 1u, OWN_KEYS);
const B_OTHER_BINDING: u32 = select(3u, 5u, OWN_KEYS);
const B_OWN_BINDING: u32 = select(5u, 3u, OWN_KEYS);
const A_OUT_BINDING: u32 = 4u;
const B_OUT_BINDING: u32 = 9u;

// @include params = uniform
// @include wide as a_own = f32_1
// @include pair as a_own_pair = none
// @include wide as a_other = f32_1
// @include pair as a_other_pair = none
// @include wide as b_own = f32_1
// @include pair as b_own_pair = none
// @include wide as b_other = f32_1
// @include pair as b_other_pair = none
// @include out as a_out = f32
// @include out as b_out = none
// @include rows
// @include attention
// @include backward

fn base_of(strides: Strides, batch: u32, head: u32, first_row: u32) -> u32 {
    return strides.offset + batch * strides.batch + head * strides.head + first_row * strides.row;
}

// Which of a tile's others make a pair with an own row that counts, by causality, window and length: a bit each.
fn bits_seen(own: u32, first_other: u32, offset: i32, sequence: Sequence) -> u32 {
    var seen: vec2<i32>;
    if (OWN_KEYS) {
        // Row i, at position i + offset, sees the keys from i + offset - left to i + offset + right.
        seen = vec2(0, i32(sequence.q_len));
        if (params.right != UNBOUNDED) {
            seen.x = i32(own) - params.right - offset;
        }
        if (params.left != UNBOUNDED) {
            seen.y = min(seen.y, i32(own) + params.left - offset + 1);
        }
    } else {
        seen = keys_seen(i32(own) + offset, i32(sequence.kv_len));
    }
    let exists = own < select(sequence.q_len, sequence.kv_len, OWN_KEYS);
    seen = clamp(seen - vec2(i32(first_other)), vec2(0), vec2(i32(LANES)));
    return select(0u, ((1u << u32(seen.y)) - 1u) & ~((1u << u32(seen.x)) - 1u), exists);
}

// 0, when these are known.
fn pinned_by(sums: array<Rows, OTHERS_AT_ONCE>) -> u32 {
    var all = 0u;
    // @unroll
    for (var n = 0u; n < OTHERS_AT_ONCE; n++) {
        let bits = bitcast<RowWords>(sums[n]);
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            all |= bits[r];
        }
    }
    return all & params.zero;
}

fn finite_or_zero(x: f32) -> f32 {
    return select(0.0, x, (bitcast<u32>(x) & INF_BITS) != INF_BITS);
}

@compute @workgroup_size(LANES)
fn flash_bwd_broadcast(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let number = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    var block = block_of(number, BLOCK_OWN);
    if (OWN_KEYS) {
        let kv_heads = params.q_heads / params.group_size;
        block = Block(number / (params.q_blocks * kv_heads), number / params.q_blocks % kv_heads, number % params.q_blocks * BLOCK_OWN);
    }
    let batch = block.batch;
    let first_own = block.first_row;
    let sequence = sequence_of(batch);
    let offset = offset_of(sequence);
    let own_len = select(sequence.q_len, sequence.kv_len, OWN_KEYS);
    let other_len = select(sequence.kv_len, sequence.q_len, OWN_KEYS);
    if (number >= params.end_block || first_own >= max(own_len, params.rows)) {
        return;
    }
    var tiles = tiles_of(first_own, BLOCK_OWN, BLOCK_OTHER, sequence);
    var a_own_strides = params.q;
    var b_own_strides = params.grad_o;
    var a_other_strides = params.k;
    var b_other_strides = params.v;
    if (OWN_KEYS) {
        tiles = tiles_of_queries(first_own, BLOCK_OWN, BLOCK_OTHER, sequence);
        a_own_strides = params.k;
        b_own_strides = params.v;
        a_other_strides = params.q;
        b_other_strides = params.grad_o;
    }
    let own_first = select(sequence.first_q, sequence.first_kv, OWN_KEYS);
    let other_first = select(sequence.first_kv, sequence.first_q, OWN_KEYS);
    let last_own = max(own_len, 1u) - 1u;
    let last_other = max(other_len, 1u) - 1u;
    let own_row = first_own + lane; // the first of them
    let last_query = max(sequence.q_len, 1u) - 1u;

    // Own rows a chunk at a time, each pushing the ones before it on: a loop that isn't unrolled makes less for the driver to compile.
    let a_own_base = base_of(a_own_strides, batch, block.head, own_first);
    var a_own: array<Rows, HEAD_DIM>;
    for (var d = 0u; d < HEAD_DIM; d += A_OWN_WIDTH) {
        // @unroll
        for (var c = 0u; c < HEAD_DIM - A_OWN_WIDTH; c++) {
            a_own[c] = a_own[c + A_OWN_WIDTH];
        }
        for (var r = 0u; r < ROWS; r++) {
            let chunk = a_own_read(a_own_base + min(own_row + r * LANES, last_own) * a_own_strides.row + d);
            // @unroll
            for (var e = 0u; e < A_OWN_WIDTH; e++) {
                a_own[HEAD_DIM - A_OWN_WIDTH + e] = turned(a_own[HEAD_DIM - A_OWN_WIDTH + e], chunk[e]);
            }
        }
    }
    let b_own_base = base_of(b_own_strides, batch, block.head, own_first);
    var b_own: array<Rows, VALUE_DIM>;
    for (var d = 0u; d < VALUE_DIM; d += B_OWN_WIDTH) {
        // @unroll
        for (var c = 0u; c < VALUE_DIM - B_OWN_WIDTH; c++) {
            b_own[c] = b_own[c + B_OWN_WIDTH];
        }
        for (var r = 0u; r < ROWS; r++) {
            let chunk = b_own_read(b_own_base + min(own_row + r * LANES, last_own) * b_own_strides.row + d);
            // @unroll
            for (var e = 0u; e < B_OWN_WIDTH; e++) {
                b_own[VALUE_DIM - B_OWN_WIDTH + e] = turned(b_own[VALUE_DIM - B_OWN_WIDTH + e], chunk[e]);
            }
        }
    }
    var own_lse: Rows;
    var own_delta: Rows;
    for (var r = 0u; r < select(ROWS, 0u, OWN_KEYS); r++) {
        let state = row_state(batch, block.head, own_first + min(own_row + r * LANES, last_own));
        own_lse = turned(own_lse, state.x);
        own_delta = turned(own_delta, state.y);
    }

    var a_sums: array<Rows, A_SUMS>;
    var b_sums: array<Rows, B_SUMS>;
    for (var n_head = 0u; n_head < select(1u, params.group_size, OWN_KEYS); n_head++) {
        let other_head = select(block.head / params.group_size, block.head * params.group_size + n_head, OWN_KEYS);
        let a_other_base = base_of(a_other_strides, batch, other_head, other_first);
        let b_other_base = base_of(b_other_strides, batch, other_head, other_first);
        let q_head = select(block.head, other_head, OWN_KEYS);
        let bias_base = params.bias.offset + batch * params.bias.batch + q_head * params.bias.head;
        var keep: RowWords; // own queries: of the 32 keys round the tile
        var other_keep = 0u; // of the other query: of the own keys
        for (var tile = tiles.first; tile < tiles.end;) {
            var a_part: array<Rows, A_SUMS>;
            var b_part: array<Rows, B_SUMS>;
            for (var n_tiles = 0u; n_tiles < PART_TILES && tile < tiles.end; n_tiles++) {
                if (KEEP_WORDS) {
                    // On to the next tile that masks that are a table or a function leave something of. Behind the last nothing is visible.
                    for (; tile < tiles.end; tile++) {
                        var kept = 0u;
                        if (OWN_KEYS) {
                            let row = tile * LANES + lane;
                            let word = keep_word(batch, q_head, min(row, last_query), first_own / 32u * 32u, sequence);
                            other_keep = select(0u, word >> (first_own % 32u), row < sequence.q_len);
                            kept = other_keep & OWN_BITS;
                        } else {
                            let is_new = tile == tiles.first || tile % (32u / LANES) == 0u;
                            // A loop of no time or one is left at once on devices that run both sides of an `if`.
                            for (var once = 0u; once < select(0u, 1u, is_new); once++) {
                                for (var r = 0u; r < ROWS; r++) {
                                    let row = own_row + r * LANES;
                                    let word = keep_word(batch, q_head, min(row, last_query), tile * LANES / 32u * 32u, sequence);
                                    keep = words_turned(keep, select(0u, word, row < sequence.q_len));
                                }
                            }
                            // @unroll
                            for (var r = 0u; r < ROWS; r++) {
                                kept |= keep[r];
                            }
                            kept = (kept >> (tile * LANES % 32u)) & OTHER_BITS;
                        }
                        if (subgroupAny(kept != 0u)) {
                            break;
                        }
                    }
                }
                let first_other = tile * LANES;
                let masked = BIAS || KEEP_WORDS || tile < tiles.first_full || tile >= tiles.end_full;
                let other = min(first_other + lane, last_other);

                // S and dP, each chunk of the other row read right before its first use: what is read next waits for the sums of what was read
                // before, as flash_fwd_broadcast has it.
                var pin = 0u; // always 0
                let a_row = a_other_base + other * a_other_strides.row;
                var a_other: array<f32, HEAD_DIM>;
                var s: array<Rows, LANES>;
                // @unroll
                for (var first = 0u; first < LANES; first += OTHERS_AT_ONCE) {
                    // @unroll
                    for (var d0 = 0u; d0 < HEAD_DIM; d0 += A_PART_DIMS) {
                        var part: array<Rows, OTHERS_AT_ONCE>;
                        // @unroll
                        for (var d = d0; d < min(d0 + A_PART_DIMS, HEAD_DIM); d += A_OTHER_WIDTH) {
                            if (first == 0u) {
                                let chunk = a_other_read(a_row + d + pin);
                                // @unroll
                                for (var e = 0u; e < A_OTHER_WIDTH; e++) {
                                    a_other[d + e] = chunk[e];
                                }
                            }
                            // @unroll
                            for (var e = 0u; e < A_OTHER_WIDTH; e++) {
                                // @unroll
                                for (var n = 0u; n < OTHERS_AT_ONCE; n++) {
                                    part[n] = fma(a_own[d + e], Rows(subgroupBroadcast(a_other[d + e], first + n)), part[n]);
                                }
                            }
                            if (first == 0u) {
                                pin = pinned_by(part);
                            }
                        }
                        // @unroll
                        for (var n = 0u; n < OTHERS_AT_ONCE; n++) {
                            s[first + n] += part[n];
                        }
                    }
                }
                let b_row = b_other_base + other * b_other_strides.row;
                var b_other: array<f32, VALUE_DIM>;
                var dp: array<Rows, LANES>;
                // @unroll
                for (var first = 0u; first < LANES; first += OTHERS_AT_ONCE) {
                    // @unroll
                    for (var d0 = 0u; d0 < VALUE_DIM; d0 += B_PART_DIMS) {
                        var part: array<Rows, OTHERS_AT_ONCE>;
                        // @unroll
                        for (var d = d0; d < min(d0 + B_PART_DIMS, VALUE_DIM); d += B_OTHER_WIDTH) {
                            if (first == 0u) {
                                let chunk = b_other_read(b_row + d + pin);
                                // @unroll
                                for (var e = 0u; e < B_OTHER_WIDTH; e++) {
                                    b_other[d + e] = chunk[e];
                                }
                            }
                            // @unroll
                            for (var e = 0u; e < B_OTHER_WIDTH; e++) {
                                // @unroll
                                for (var n = 0u; n < OTHERS_AT_ONCE; n++) {
                                    part[n] = fma(b_own[d + e], Rows(subgroupBroadcast(b_other[d + e], first + n)), part[n]);
                                }
                            }
                            if (first == 0u) {
                                pin = pinned_by(part);
                            }
                        }
                        // @unroll
                        for (var n = 0u; n < OTHERS_AT_ONCE; n++) {
                            dp[first + n] += part[n];
                        }
                    }
                }

                // Scores as they count, and what they change by.
                // @unroll
                for (var n = 0u; n < LANES; n++) {
                    s[n] *= params.scale;
                }
                var slopes: array<Rows, LANES>;
                var biased = RowWords(0u); // others that a bias of -inf hides: a bit each
                for (var r = 0u; r < select(0u, ROWS, CHANGED); r++) {
                    let own_at = own_row + r * LANES;
                    var hidden = 0u;
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        let row = select(own_at, first_other + n, OWN_KEYS);
                        let key = select(first_other + n, own_at, OWN_KEYS);
                        var bias = 0.0;
                        if (BIAS) {
                            let exists = row < sequence.q_len && key < sequence.kv_len;
                            bias = bias_at(select(0u, bias_base + row * params.bias.row + key * params.bias_key, exists));
                            hidden |= select(0u, 1u << n, bitcast<u32>(bias) == NEG_INF_BITS);
                        }
                        // Of four neighbours the first: compilers leave the others out.
                        let scaled = vec4(s[n].x);
                        s[n] = turned(s[n], final_scores(scaled, vec4(bias), batch, q_head, row, key, i32(row) + offset).x);
                        if (SLOPES) {
                            slopes[n] = turned(slopes[n], score_slopes(scaled, batch, q_head, row, key).x);
                        }
                    }
                    biased = words_turned(biased, hidden);
                }

                // P in s, and dS in dp.
                var other_state = vec2(0.0);
                if (OWN_KEYS) {
                    other_state = row_state(batch, other_head, other_first + other);
                }
                // @unroll
                for (var n = 0u; n < LANES; n++) {
                    var lse = own_lse;
                    var delta = own_delta;
                    if (OWN_KEYS) {
                        lse = Rows(subgroupBroadcast(other_state.x, n));
                        delta = Rows(subgroupBroadcast(other_state.y, n));
                    }
                    let below = (s[n] - lse) * LOG2_E;
                    // Not every driver's exp2 hands a NaN on.
                    let is_nan = (bitcast<RowWords>(below) & RowWords(0x7fffffffu)) > RowWords(INF_BITS);
                    let no_weights = bitcast<RowWords>(lse) == RowWords(NEG_INF_BITS);
                    s[n] = select(select(exp2(max(below, Rows(-200.0))), below, is_nan), Rows(0.0), no_weights);
                    dp[n] = s[n] * (dp[n] - delta);
                    if (SLOPES) {
                        dp[n] *= slopes[n];
                    }
                    dp[n] = select(dp[n], Rows(0.0), no_weights);
                }
                // A loop of no time or one is left at once on devices that run both sides of an `if`.
                var poison = 0.0; // NaN if a number of the other b isn't finite
                for (var once = 0u; once < select(0u, 1u, masked); once++) {
                    // @unroll
                    for (var d = 0u; d < VALUE_DIM; d++) {
                        poison += b_other[d] - b_other[d];
                        b_other[d] = finite_or_zero(b_other[d]);
                    }
                    // @unroll
                    for (var d = 0u; d < HEAD_DIM; d++) {
                        a_other[d] = finite_or_zero(a_other[d]);
                    }
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        s[n] += Rows(subgroupBroadcast(poison, n));
                    }
                }
                for (var r = 0u; r < select(0u, ROWS, masked); r++) {
                    let own_at = own_row + r * LANES;
                    var bits = bits_seen(own_at, first_other, offset, sequence) & ~biased.x;
                    biased = words_turned(biased, biased.x);
                    if (KEEP_WORDS && OWN_KEYS) {
                        // @unroll
                        for (var n = 0u; n < LANES; n++) {
                            let kept = (subgroupBroadcast(other_keep, n) >> (own_at - first_own)) & 1u;
                            bits &= ~((1u - kept) << n);
                        }
                    }
                    if (KEEP_WORDS && !OWN_KEYS) {
                        bits &= keep.x >> (first_other % 32u);
                        keep = words_turned(keep, keep.x);
                    }
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        let seen = (bits & (1u << n)) != 0u;
                        s[n] = turned(s[n], select(0.0, s[n].x, seen));
                        dp[n] = turned(dp[n], select(0.0, dp[n].x, seen));
                    }
                }

                // a += dS A, and b += P B.
                // @unroll
                for (var c = 0u; c < HEAD_DIM; c += A_COLUMNS_AT_ONCE) {
                    var tile_sums: array<Rows, A_COLUMNS_AT_ONCE>;
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        // @unroll
                        for (var e = 0u; e < A_COLUMNS_AT_ONCE; e++) {
                            tile_sums[e] = fma(dp[n], Rows(subgroupBroadcast(a_other[c + e], n)), tile_sums[e]);
                        }
                    }
                    // @unroll
                    for (var e = 0u; e < A_COLUMNS_AT_ONCE; e++) {
                        a_part[c + e] += tile_sums[e];
                    }
                }
                // @unroll
                for (var c = 0u; c < B_COLUMNS; c += B_COLUMNS_AT_ONCE) {
                    var tile_sums: array<Rows, B_COLUMNS_AT_ONCE>;
                    // @unroll
                    for (var n = 0u; n < LANES; n++) {
                        // @unroll
                        for (var e = 0u; e < B_COLUMNS_AT_ONCE; e++) {
                            tile_sums[e] = fma(s[n], Rows(subgroupBroadcast(b_other[c + e], n)), tile_sums[e]);
                        }
                    }
                    // @unroll
                    for (var e = 0u; e < B_COLUMNS_AT_ONCE; e++) {
                        b_part[c + e] += tile_sums[e];
                    }
                }
                tile++;
            }
            // @unroll
            for (var c = 0u; c < HEAD_DIM; c++) {
                a_sums[c] += a_part[c];
            }
            // @unroll
            for (var c = 0u; c < B_COLUMNS; c++) {
                b_sums[c] += b_part[c];
            }
        }
    }

    // Sums a chunk at a time, each pulling the ones after it up.
    let out_head = block.head;
    let a_out_base = base_of(params.out, batch, out_head, own_first);
    for (var column = 0u; column < HEAD_DIM; column += OUT_WIDTH) {
        for (var r = 0u; r < ROWS; r++) {
            let row = own_row + r * LANES;
            let four = params.scale * vec4(a_sums[0u].x, a_sums[1u].x, a_sums[2u].x, a_sums[3u].x);
            let count = select(0u, HEAD_DIM - min(column, HEAD_DIM), row < max(own_len, params.rows));
            a_out_store(a_out_base + row * params.out.row + column, select(four, vec4(0.0), row >= own_len), count);
            // @unroll
            for (var c = 0u; c < OUT_WIDTH; c++) {
                a_sums[c] = turned(a_sums[c], a_sums[c].x);
            }
        }
        // @unroll
        for (var c = 0u; c < A_SUMS - OUT_WIDTH; c++) {
            a_sums[c] = a_sums[c + OUT_WIDTH];
        }
    }
    let b_out_base = base_of(params.dv, batch, out_head, own_first);
    for (var column = 0u; column < B_COLUMNS; column += OUT_WIDTH) {
        for (var r = 0u; r < ROWS; r++) {
            let row = own_row + r * LANES;
            let four = vec4(b_sums[0u].x, b_sums[1u].x, b_sums[2u].x, b_sums[3u].x);
            let count = select(0u, VALUE_DIM - min(column, VALUE_DIM), row < max(own_len, params.rows));
            b_out_store(b_out_base + row * params.dv.row + column, select(four, vec4(0.0), row >= own_len), count);
            // @unroll
            for (var c = 0u; c < OUT_WIDTH; c++) {
                b_sums[c] = turned(b_sums[c], b_sums[c].x);
            }
        }
        // @unroll
        for (var c = 0u; c < B_SUMS - OUT_WIDTH; c++) {
            b_sums[c] = b_sums[c + OUT_WIDTH];
        }
    }
}
