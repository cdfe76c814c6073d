// softmax_rows: softmax of every row of x, in place, and the logarithm of its sum.
// Maths     m = max x;  x' = e^(x-m) / sum e^(x-m);  lse = m + ln sum e^(x-m), over the first reach(row) columns; the rest become 0.
// Shapes    x (rows, columns) contiguous f32; lse (rows) f32. Rows come in matrices of rows_per_matrix: row i of one reaches
//           i + diagonal + 1 columns, at least 0, at most all.
// Mapping   A workgroup owns a row; thread t its columns t, t + THREADS, ...
// Budget    sh_part: THREADS f32 = 1024 bytes.
// Registers Two scalars.
// Barriers  Two tree reductions of log2(THREADS) + 1 barriers and one between them, workgroup-uniform.
// Numerics  f32. A row that is empty, or -inf throughout, becomes zeros with lse -inf, stored by its bits because WGSL has no
//           infinities: its sum is 0, and that of any other row at least 1. A NaN within a row's reach shows in that row alone.
//           One of +inf makes weights NaN and lse +inf.
// Source    The textbook three passes: maximum, sum, quotient; one read more than Milakov & Gimelshein 2018 needs.

const THREADS: u32 = 256u; // @spec

const LOG2_E: f32 = 1.4426950408889634;
const LOWEST: f32 = -3.4028234e38;
const NEG_INF_BITS: u32 = 0xff800000u;
const INF_BITS: u32 = 0x7f800000u;

struct Params {
    x_offset: u32,
    lse_offset: u32,
    columns: u32,
    rows_per_matrix: u32,
    diagonal: i32,
    first_row: u32, // this dispatch owns the rows first_row .. end_row
    end_row: u32,
    pad: u32,
}

// @include params = uniform
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> lse: array<u32>;

var<workgroup> sh_part: array<f32, THREADS>;

// e^(x - largest); a NaN stays one, which not every driver's exp2 lets it, and an infinite x makes one.
fn weight_of(x: f32, largest: f32) -> f32 {
    let below = (x - largest) * LOG2_E;
    return select(exp2(below), below, (bitcast<u32>(below) & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size(THREADS)
fn softmax_rows(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = params.first_row + workgroup.y * workgroups.x + workgroup.x;
    if (row >= params.end_row) {
        return; // the whole workgroup at once: the grid is folded into a rectangle
    }
    let base = params.x_offset + row * params.columns;
    let reach = u32(clamp(i32(row % params.rows_per_matrix) + params.diagonal + 1, 0, i32(params.columns)));

    var largest = LOWEST;
    for (var column = lane; column < reach; column += THREADS) {
        largest = max(largest, x[base + column]);
    }
    sh_part[lane] = largest;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lane < half) {
            sh_part[lane] = max(sh_part[lane], sh_part[lane + half]);
        }
        workgroupBarrier();
    }
    largest = sh_part[0];
    workgroupBarrier(); // the maximum is read: sh_part may take the sums

    var sum = 0.0;
    for (var column = lane; column < reach; column += THREADS) {
        sum += weight_of(x[base + column], largest);
    }
    sh_part[lane] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (lane < half) {
            sh_part[lane] += sh_part[lane + half];
        }
        workgroupBarrier();
    }
    sum = sh_part[0];
    let empty = sum == 0.0;

    for (var column = lane; column < params.columns; column += THREADS) {
        let weight = weight_of(x[base + column], largest) / select(sum, 1.0, empty);
        x[base + column] = select(0.0, weight, column < reach);
    }
    if (lane == 0u) {
        // Not every driver's log hands a NaN on. That of an infinite maximum says nothing.
        let is_nan = (bitcast<u32>(sum) & 0x7fffffffu) > 0x7f800000u;
        let of_sum = select(bitcast<u32>(largest + log(sum)), bitcast<u32>(sum), is_nan);
        let bits = select(of_sum, INF_BITS, bitcast<u32>(largest) == INF_BITS);
        lse[params.lse_offset + row] = select(bits, NEG_INF_BITS, empty);
    }
}
