// score_mod_slopes: a user's score_mod at scores round some, and what its derivative is said to be at them: for the host to compare.
// Maths     f'(s) ~ (8 (f(s + h) - f(s - h)) - (f(s + 2h) - f(s - 2h))) / 12h, f being score_mod: by the host, to be score_mod_derivative.
// Shapes    out (samples, 6): the score, score_mod at it -2, -1, +1 and +2 STEPs, score_mod_derivative at it.
// Mapping   A thread makes a sample. Scores go from -SPAN to SPAN, batch entries, heads, queries and keys are spread over the call's.
// Budget    0 bytes of workgroup memory.
// Registers A few.
// Barriers  None.
// Numerics  f32: the host's differences are good to some 1e-4 of the largest value.
// Source    Central differences of fourth order.

const THREADS: u32 = 64u; // @spec

const SPAN: f32 = 6.0;
const STEP: f32 = 0.03125;

struct Params {
    out: u32,
    mod_data: u32,    // where in extras
    mod_words: u32,
    batch: u32,       // none of these sizes is 0
    heads: u32,
    q_len: u32,
    kv_len: u32,
    samples: u32,
    first_block: u32, // this dispatch owns the blocks first_block .. end_block, of THREADS samples each
    end_block: u32,
    pad_0: u32,
    pad_1: u32,
}

// @include params = uniform
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
// @include extras = none
// @include mod_data
// @include score_mod = none
// @include score_mod_derivative = none

@compute @workgroup_size(THREADS)
fn score_mod_slopes(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let block = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    let sample = block * THREADS + lane;
    if (block >= params.end_block || sample >= params.samples) {
        return;
    }
    let score = SPAN * (2.0 * (f32(sample) + 0.5) / f32(params.samples) - 1.0);
    // Odd multipliers: neighbouring scores get places far from each other.
    let b = (sample * 7u) % params.batch;
    let h = (sample * 5u + 1u) % params.heads;
    let row = (sample * 2654435761u) / 8u % params.q_len;
    let key = (sample * 2246822519u) / 16u % params.kv_len;
    let at = params.out + 6u * sample;
    out[at] = score;
    out[at + 1u] = score_mod(score - 2.0 * STEP, b, h, row, key);
    out[at + 2u] = score_mod(score - STEP, b, h, row, key);
    out[at + 3u] = score_mod(score + STEP, b, h, row, key);
    out[at + 4u] = score_mod(score + 2.0 * STEP, b, h, row, key);
    out[at + 5u] = score_mod_derivative(score, b, h, row, key);
}
