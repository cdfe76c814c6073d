// What the tiled kernels share: options, which rows a workgroup owns and which keys they see, what changes a score, where a row begins and
// ends. A kernel has `params`, a uniform of type Params.

const SEQUENCES: bool = false; // @spec lengths of each batch entry, or a packed batch: a table
const RANGES: bool = false; // @spec keys that each row may see: a table
const MASK_MOD: bool = false; // @spec a mask that is a function
const KEEP_WORDS: bool = false; // @spec any mask that is a table or a function: mask, RANGES, MASK_MOD
const BIAS: bool = false; // @spec
const SCORE_MOD: bool = false; // @spec scores that a function changes
const SOFTCAP: bool = false; // @spec
const ALIBI: bool = false; // @spec
const SINKS: bool = false; // @spec

const BIAS_BINDING: u32 = 6u;
const UNBOUNDED: i32 = 0x7fffffff;
const LOG2_E: f32 = 1.4426950408889634;
const LOWEST: f32 = -3.4028234e38;
const NEG_INF_BITS: u32 = 0xff800000u;
const INF_BITS: u32 = 0x7f800000u;

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
    bias: Strides,
    mask: Strides,
    q_len: u32,
    kv_len: u32,
    head_dim: u32,
    value_dim: u32,
    q_heads: u32,
    group_size: u32,
    q_blocks: u32,     // blocks of a head: of queries, or of keys where a kernel owns those
    first_block: u32,  // this dispatch owns the blocks first_block .. end_block of batch * q_heads * q_blocks
    end_block: u32,
    first_key: u32,    // and sees the keys first_key .. end_key, whole tiles
    end_key: u32,
    rows: u32,         // rows that are written however few a batch entry has; 0 for a packed batch
    bottom_right: u32, // 1: the last query stands at the last key; 0: the first at the first
    left: i32,         // row i at position p sees the keys p - left ..= p + right
    right: i32,
    scale: f32,
    softcap: f32,
    bias_key: u32,     // 1, or 0 where one bias is for all keys
    mask_key: u32,     // likewise
    sequences: u32,    // where in extras: for each batch entry the first row and number of queries, and of keys
    slopes: u32,       // ALiBi slopes of the heads
    slopes_batch: u32, // and their distance from one batch entry to the next
    sinks: u32,        // of the heads
    ranges: u32,       // for each row its first key and the one past its last
    ranges_batch: u32,
    ranges_head: u32,
    mod_data: u32,     // the words that score_mod and mask_mod read
    mod_words: u32,
    // @include attention_params = forward
}

// @include stored as bias = none
// @include mask = none
// @include extras = none
// @include mod_data
// @include score_mod = none
// @include mask_mod = none
// @include tanh

// A block of neighbouring rows of one head.
struct Block {
    batch: u32,
    head: u32,
    first_row: u32,
}

// The block of a number, of so many rows. Those of a head come from its end and its beginning by turns: causal ones at the end have most
// to do, and devices that give each core a run of neighbouring workgroups then give all alike.
fn block_of(number: u32, rows: u32) -> Block {
    let turn = number % params.q_blocks;
    let first = select(turn / 2u, params.q_blocks - 1u - turn / 2u, turn % 2u == 0u);
    return Block(number / (params.q_blocks * params.q_heads), (number / params.q_blocks) % params.q_heads, first * rows);
}

// What there is of a batch entry.
struct Sequence {
    first_q: u32,
    q_len: u32,
    first_kv: u32,
    kv_len: u32,
}

fn sequence_of(batch: u32) -> Sequence {
    if (SEQUENCES) {
        let at = params.sequences + 4u * batch;
        return Sequence(extra(at), extra(at + 1u), extra(at + 2u), extra(at + 3u));
    }
    return Sequence(0u, params.q_len, 0u, params.kv_len);
}

// The keys that a row at a position may see by causality, window and length: from x up to y.
fn keys_seen(position: i32, kv_len: i32) -> vec2<i32> {
    var seen = vec2(0, kv_len);
    if (params.left != UNBOUNDED) {
        seen.x = clamp(position - params.left, 0, kv_len);
    }
    if (params.right != UNBOUNDED) {
        seen.y = clamp(position + params.right + 1, 0, kv_len);
    }
    return seen;
}

// Where position 0 of the queries stands among the keys.
fn offset_of(sequence: Sequence) -> i32 {
    return select(0, i32(sequence.kv_len) - i32(sequence.q_len), params.bottom_right == 1u);
}

// Of the tiles of so many keys each that this dispatch owns: those of which some row of a block sees a key, and those that all of its rows
// see whole, by causality, window and length. No rows see nothing.
struct Tiles {
    first: u32,
    end: u32,
    first_full: u32,
    end_full: u32,
}

fn tiles_of(first_row: u32, rows: u32, keys: u32, sequence: Sequence) -> Tiles {
    let offset = offset_of(sequence);
    let last_row = max(min(first_row + rows, sequence.q_len), 1u) - 1u;
    let first_seen = keys_seen(i32(first_row) + offset, i32(sequence.kv_len));
    let last_seen = keys_seen(i32(last_row) + offset, i32(sequence.kv_len));
    return Tiles(
        max(u32(first_seen.x), params.first_key) / keys,
        select(0u, (min(u32(last_seen.y), params.end_key) + keys - 1u) / keys, first_row < sequence.q_len),
        (u32(last_seen.x) + keys - 1u) / keys,
        u32(first_seen.y) / keys,
    );
}

// Bits of the 32 keys from `key` on, a multiple of 32, that mask, ranges and mask_mod let a row see.
fn keep_word(batch: u32, head: u32, row: u32, key: u32, sequence: Sequence) -> u32 {
    let words = select(0u, key / 32u, params.mask_key == 1u);
    let stored = mask_word(params.mask.offset + batch * params.mask.batch + head * params.mask.head + row * params.mask.row + words);
    var word = select(select(0u, 0xffffffffu, (stored & 1u) == 1u), stored, params.mask_key == 1u);
    if (RANGES) {
        let at = params.ranges + batch * params.ranges_batch + head * params.ranges_head + 2u * (sequence.first_q + row);
        let first = clamp(extra(at), key, key + 32u) - key;
        let end = clamp(extra(at + 1u), key, key + 32u) - key;
        // A shift by 32 is one by 0: both ends are below that where they matter.
        let from_first = select(0xffffffffu << (first & 31u), 0u, first > 31u);
        let from_end = select(0xffffffffu << (end & 31u), 0u, end > 31u);
        word &= from_first & ~from_end;
    }
    if (MASK_MOD) {
        for (var n = 0u; n < 32u; n++) {
            word &= ~select(1u << n, 0u, mask_mod(batch, head, row, key + n));
        }
    }
    return word;
}

// The bias of four neighbouring keys, of which the first `count` exist.
fn bias_of(at: u32, count: u32) -> vec4<f32> {
    let steps = vec4(0u, 1u, 2u, 3u);
    let places = select(vec4(0u), vec4(at) + steps * params.bias_key, steps < vec4(count));
    return vec4(bias_at(places.x), bias_at(places.y), bias_at(places.z), bias_at(places.w));
}

// Four neighbouring scores of a row after all that changes them.
fn final_scores(scaled: vec4<f32>, bias4: vec4<f32>, batch: u32, head: u32, row: u32, key: u32, position: i32) -> vec4<f32> {
    var s = scaled;
    if (SOFTCAP) {
        s = params.softcap * accurate_tanh(s / params.softcap);
    }
    s = vec4(
        score_mod(s.x, batch, head, row, key),
        score_mod(s.y, batch, head, row, key + 1u),
        score_mod(s.z, batch, head, row, key + 2u),
        score_mod(s.w, batch, head, row, key + 3u),
    );
    if (ALIBI) {
        let slope = bitcast<f32>(extra(params.slopes + batch * params.slopes_batch + head));
        s -= slope * vec4<f32>(abs(vec4(position - i32(key)) - vec4(0, 1, 2, 3)));
    }
    if (BIAS) {
        s += bias4;
    }
    return s;
}

// Maximum and sum of a row of a head before its first key: nothing, or its sink. That is the logarithm of a sum: a maximum whose sum is 1.
fn row_start(head: u32) -> vec2<f32> {
    var start = NEG_INF_BITS;
    if (SINKS) {
        start = extra(params.sinks + head);
    }
    // NaN stays NaN, by its bits.
    let is_nan = (start & 0x7fffffffu) > 0x7f800000u;
    let sum = select(select(1.0, 0.0, start == NEG_INF_BITS), bitcast<f32>(start), is_nan);
    return vec2(select(bitcast<f32>(start), LOWEST, is_nan || start == NEG_INF_BITS), sum);
}

// The bits of a row's lse, from the maximum and the sum of its weights.
fn lse_bits(largest: f32, sum: f32, empty: bool) -> u32 {
    // Not every driver's log hands a NaN on. That of an infinite maximum says nothing.
    let is_infinite = bitcast<u32>(largest) == INF_BITS;
    let is_nan = (bitcast<u32>(sum) & 0x7fffffffu) > 0x7f800000u && !is_infinite;
    let of_sum = select(bitcast<u32>(largest + log(sum)), bitcast<u32>(sum), is_nan);
    return select(select(of_sum, INF_BITS, is_infinite), NEG_INF_BITS, empty);
}
