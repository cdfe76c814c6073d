// flash_bwd_dsinks: the gradient of each head's sink.
// Maths     dsink = sum over rows of -e^(sink - lse) delta: a sink's weight has no value, so its dP is 0.
// Shapes    out (q_heads), f32; sinks, and lse and delta of the rows (batch, q_heads, q_len), in extras, in words.
// Mapping   A workgroup owns a head; a thread takes every THREADS-th of its rows in all batch entries.
// Budget    sh_sums: THREADS words.
// Registers A few.
// Barriers  One.
// Numerics  f32; a thread's rows in their order, then over the threads: the same bits every run. A sink of -inf has no weight. Of a row
//           that saw no key lse is the sink, and delta minus the gradient of lse, which the sink then gets.
// Source    As flash_bwd_preprocess.

const THREADS: u32 = 64u; // @spec

const NEG_INF_BITS: u32 = 0xff800000u;

struct Params {
    out: u32,
    heads: u32,
    rows: u32,         // of a head in a batch entry
    batch: u32,
    sinks: u32,        // where in extras
    states: u32,
    first_block: u32,  // this dispatch owns the heads first_block .. end_block
    end_block: u32,
}

// @include params = uniform
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
// @include extras = words

var<workgroup> sh_sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn flash_bwd_dsinks(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let head = params.first_block + workgroup.y * workgroups.x + workgroup.x;
    if (head >= params.end_block) {
        return; // the whole workgroup at once: the grid is folded into a rectangle
    }
    let sink = extra(params.sinks + head);
    var sum = 0.0;
    for (var batch = 0u; batch < params.batch; batch++) {
        for (var row = lane; row < params.rows; row += THREADS) {
            let at = params.states + 2u * ((batch * params.heads + head) * params.rows + row);
            let below = bitcast<f32>(sink) - bitcast<f32>(extra(at));
            let weight = exp(max(below, -100.0));
            let is_none = sink == NEG_INF_BITS || extra(at) == NEG_INF_BITS;
            sum -= select(weight * bitcast<f32>(extra(at + 1u)), 0.0, is_none);
        }
    }
    sh_sums[lane] = sum;
    workgroupBarrier();
    if (lane == 0u) {
        var all = 0.0;
        for (var other = 0u; other < THREADS; other++) {
            all += sh_sums[other];
        }
        out[params.out + head] = all;
    }
}
