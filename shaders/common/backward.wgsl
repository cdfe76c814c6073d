// What the backward kernels share: what preprocess has found of each row, what a score's gradient is, and which queries see a key.

// @include score_mod_derivative = none

// A weight that is none: of a masked key. No gradient is just this.
const MASKED: f32 = -3.4028234e38;

// lse and delta of a row.
fn row_state(batch: u32, head: u32, row: u32) -> vec2<f32> {
    let at = params.states + batch * params.states_batch + head * params.states_head + 2u * row;
    return vec2(bitcast<f32>(extra(at)), bitcast<f32>(extra(at + 1u)));
}

// Whether a row has no weights: it saw no key, or none but scores of -inf.
fn is_empty(lse: f32) -> bool {
    return bitcast<u32>(lse) == NEG_INF_BITS;
}

// e^(s - lse) of four scores.
fn weights_of(scores: vec4<f32>, lse: vec4<f32>) -> vec4<f32> {
    let below = (scores - lse) * LOG2_E;
    // Not every driver's exp2 hands a NaN on.
    let is_nan = (bitcast<vec4<u32>>(below) & vec4(0x7fffffffu)) > vec4(INF_BITS);
    return select(exp2(max(below, vec4(-200.0))), below, is_nan);
}

// What four neighbouring scores of a row change by when q.k, scaled, does: the derivative of all that changes them.
fn score_slopes(scaled: vec4<f32>, batch: u32, head: u32, row: u32, key: u32) -> vec4<f32> {
    var slopes = vec4(1.0);
    var s = scaled;
    if (SOFTCAP) {
        let t = accurate_tanh(s / params.softcap);
        s = params.softcap * t;
        slopes = 1.0 - t * t;
    }
    if (SCORE_MOD) {
        slopes *= vec4(
            score_mod_derivative(s.x, batch, head, row, key),
            score_mod_derivative(s.y, batch, head, row, key + 1u),
            score_mod_derivative(s.z, batch, head, row, key + 2u),
            score_mod_derivative(s.w, batch, head, row, key + 3u),
        );
    }
    return slopes;
}

// Of the tiles of so many queries each: those of which some query sees one of so many keys from a first one on, and those all of whose
// queries see all of them, by causality, window and length.
fn tiles_of_queries(first_key: u32, keys: u32, queries: u32, sequence: Sequence) -> Tiles {
    let q_len = i32(sequence.q_len);
    let offset = offset_of(sequence);
    let end_key = min(first_key + keys, sequence.kv_len);
    var seen = vec2(0, q_len);
    var full = vec2(0, q_len);
    // Row i, at position i + offset, sees the keys from i + offset - left to i + offset + right.
    if (params.right != UNBOUNDED) {
        seen.x = clamp(i32(first_key) - params.right - offset, 0, q_len);
        full.x = clamp(i32(end_key) - 1 - params.right - offset, 0, q_len);
    }
    if (params.left != UNBOUNDED) {
        seen.y = clamp(i32(end_key) - 1 + params.left - offset + 1, 0, q_len);
        full.y = clamp(i32(first_key) + params.left - offset + 1, 0, q_len);
    }
    return Tiles(
        u32(seen.x) / queries,
        select(0u, (u32(seen.y) + queries - 1u) / queries, first_key < sequence.kv_len),
        (u32(full.x) + queries - 1u) / queries,
        u32(full.y) / queries,
    );
}
