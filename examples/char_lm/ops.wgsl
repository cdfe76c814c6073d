// What a transformer needs besides attention and matrix products. Matrices are row-major; the sums of a row or a column are one thread's.

struct Params {
    rows: u32,
    columns: u32,
    // Of rope: tokens of a sequence, and the size of a head.
    length: u32,
    head_dim: u32,
    // Of rope the direction, 1 or -1; of the gradient of the loss its weight; of adam the learning rate.
    factor: f32,
    // Of adam: 1 - beta^step.
    correction_1: f32,
    correction_2: f32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read> c: array<f32>;
@group(0) @binding(4) var<storage, read> d: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<storage, read_write> out_2: array<f32>;
@group(0) @binding(7) var<storage, read_write> out_3: array<f32>;

fn thread_of(workgroup: vec3<u32>, workgroups: vec3<u32>, lane: u32) -> u32 {
    return (workgroup.y * workgroups.x + workgroup.x) * 64u + lane;
}

// out = aᵀ
@compute @workgroup_size(64)
fn transpose(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at < params.rows * params.columns) {
        out[at] = a[(at % params.rows) * params.columns + at / params.rows];
    }
}

// out = a + b
@compute @workgroup_size(64)
fn add(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at < params.rows * params.columns) {
        out[at] = a[at] + b[at];
    }
}

// GELU by its usual formula: x/2 (1 + tanh u), u = 0.79788456 (x + 0.044715 x³). exp of much would overflow on the way to tanh.
fn gelu_tanh(x: f32) -> f32 {
    return tanh(clamp(0.7978845608 * (x + 0.044715 * x * x * x), -15.0, 15.0));
}

// out = gelu(a)
@compute @workgroup_size(64)
fn gelu(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at < params.rows * params.columns) {
        out[at] = 0.5 * a[at] * (1.0 + gelu_tanh(a[at]));
    }
}

// out = b gelu'(a)
@compute @workgroup_size(64)
fn gelu_grad(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at < params.rows * params.columns) {
        let x = a[at];
        let t = gelu_tanh(x);
        let slope = 0.7978845608 * (1.0 + 3.0 * 0.044715 * x * x);
        out[at] = b[at] * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope);
    }
}

// Each row of a, less its mean and over its deviation, times the gain and plus the offset that b holds one after the other. out_2: the mean
// of each row, and 1 over the deviation.
@compute @workgroup_size(64)
fn layer_norm(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = thread_of(workgroup, workgroups, lane);
    if (row >= params.rows) {
        return;
    }
    let at = row * params.columns;
    var sum = 0.0;
    for (var n = 0u; n < params.columns; n++) {
        sum += a[at + n];
    }
    let mean = sum / f32(params.columns);
    var squares = 0.0;
    for (var n = 0u; n < params.columns; n++) {
        let x = a[at + n] - mean;
        squares += x * x;
    }
    let inverse = inverseSqrt(squares / f32(params.columns) + 1e-5);
    for (var n = 0u; n < params.columns; n++) {
        out[at + n] = (a[at + n] - mean) * inverse * b[n] + b[params.columns + n];
    }
    out_2[2u * row] = mean;
    out_2[2u * row + 1u] = inverse;
}

// The gradient of a, which layer_norm read with b, from that of its output, c, and its out_2, d.
@compute @workgroup_size(64)
fn layer_norm_grad(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = thread_of(workgroup, workgroups, lane);
    if (row >= params.rows) {
        return;
    }
    let at = row * params.columns;
    let mean = d[2u * row];
    let inverse = d[2u * row + 1u];
    var sum = 0.0;
    var sum_x = 0.0;
    for (var n = 0u; n < params.columns; n++) {
        let of_normed = c[at + n] * b[n];
        sum += of_normed;
        sum_x += of_normed * (a[at + n] - mean) * inverse;
    }
    sum /= f32(params.columns);
    sum_x /= f32(params.columns);
    for (var n = 0u; n < params.columns; n++) {
        out[at + n] = inverse * (c[at + n] * b[n] - sum - (a[at + n] - mean) * inverse * sum_x);
    }
}

// The gradients of the gain and the offset: sums over the rows.
@compute @workgroup_size(64)
fn layer_norm_grad_gain(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let column = thread_of(workgroup, workgroups, lane);
    if (column >= params.columns) {
        return;
    }
    var gain = 0.0;
    var offset = 0.0;
    for (var row = 0u; row < params.rows; row++) {
        let at = row * params.columns + column;
        gain += c[at] * (a[at] - d[2u * row]) * d[2u * row + 1u];
        offset += c[at];
    }
    out[column] = gain;
    out[params.columns + column] = offset;
}

// Rotary positions (Su et al., RoFormer): in place on the first two thirds of each row of out, q and k of a fused projection. Elements i and
// i + head_dim/2 of a head turn by position * 10000^(-2i/head_dim).
@compute @workgroup_size(64)
fn rope(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pairs = params.columns / 3u; // of a row: half of what q and k have
    let thread = thread_of(workgroup, workgroups, lane);
    if (thread >= params.rows * pairs) {
        return;
    }
    let half_dim = params.head_dim / 2u;
    let row = thread / pairs;
    let pair = thread % pairs;
    let i = pair % half_dim;
    let at = row * params.columns + pair / half_dim * params.head_dim + i;
    let position = f32(row % params.length);
    let angle = params.factor * position * pow(10000.0, -f32(i) / f32(half_dim));
    let x = out[at];
    let y = out[at + half_dim];
    out[at] = x * cos(angle) - y * sin(angle);
    out[at + half_dim] = x * sin(angle) + y * cos(angle);
}

// The cross-entropy of each row: its log-sum-exp, c, less the logit, in a, of the class that b has a 1 at.
@compute @workgroup_size(64)
fn cross_entropy(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = thread_of(workgroup, workgroups, lane);
    if (row >= params.rows) {
        return;
    }
    var target_logit = 0.0;
    for (var n = 0u; n < params.columns; n++) {
        target_logit += a[row * params.columns + n] * b[row * params.columns + n];
    }
    out[row] = c[row] - target_logit;
}

// The gradient of the mean cross-entropy: out = factor (a - b), a being the probabilities.
@compute @workgroup_size(64)
fn cross_entropy_grad(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at < params.rows * params.columns) {
        out[at] = params.factor * (a[at] - b[at]);
    }
}

// One step of Adam (Kingma and Ba) on out, by its gradient a; out_2 and out_3 are the moments.
@compute @workgroup_size(64)
fn adam(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let at = thread_of(workgroup, workgroups, lane);
    if (at >= params.rows * params.columns) {
        return;
    }
    let first = 0.9 * out_2[at] + 0.1 * a[at];
    let second = 0.99 * out_3[at] + 0.01 * a[at] * a[at];
    out_2[at] = first;
    out_3[at] = second;
    out[at] -= params.factor * (first / params.correction_1) / (sqrt(second / params.correction_2) + 1e-8);
}
