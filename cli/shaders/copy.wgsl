// copy: how many bytes a second a kernel reads and writes in device memory.
//
// Maths     dst = src
// Shapes    src, dst (elements / 4) vec4<f32>
// Mapping   an invocation copies one vec4; neighbours copy neighbours
// Barriers  none

@group(0) @binding(0) var<storage, read> src: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> dst: array<vec4<f32>>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < arrayLength(&dst) {
        dst[id.x] = src[id.x];
    }
}
