// Slot matmul_b: B stored (k, n). Neighbouring threads take neighbouring columns.

// (k within the slice, vec4 of columns) that a staging item fills.
fn b_item(item: u32) -> vec2<u32> {
    return vec2(item / (TX * COL_VECS), item % (TX * COL_VECS));
}

// Where element (k, column) is, past the matrix's base.
fn b_index(k: u32, column: u32) -> u32 {
    return k * params.b.row + column;
}
