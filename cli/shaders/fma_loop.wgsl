// fma_loop: how many fused multiply-adds a second this device does when nothing else is in its way.
//
// Maths     acc = acc * multiplier + addend, `rounds` times over; out = the sum of all accumulators of an invocation.
//           The host gives multiplier 1 and addend 1, which no compiler can know: the accumulators count, exactly, and the
//           sum proves that every step was taken.
// Shapes    out (invocations) f32
// Mapping   an invocation owns its accumulators and one element of out; nothing is shared, and no step waits for another
//           accumulator's.
// Variants  the host repeats the lines that name acc0, once for every accumulator, and those of the loop UNROLL times
//           (`@each`, `@step`): the text below is one accumulator, unrolled once. Which shape is the fastest is the device's
//           own business (registers, latency, loop overhead), so the best of several counts.
// Barriers  none

struct Params {
    multiplier: f32,
    addend: f32,
    rounds: u32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let multiplier = vec4<f32>(params.multiplier);
    let addend = vec4<f32>(params.addend);
    let start = vec4<f32>(0.0, 1.0, 2.0, 3.0) + f32(id.x % 64u);
    var acc0 = start + 0.0; // @each
    for (var round = 0u; round < params.rounds; round++) {
        acc0 = fma(acc0, multiplier, addend); // @step
    }
    var sum = vec4<f32>(0.0);
    sum += acc0; // @each
    if id.x < arrayLength(&out) {
        out[id.x] = sum.x + sum.y + sum.z + sum.w;
    }
}
