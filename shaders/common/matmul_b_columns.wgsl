// Slot matmul_b: B stored (n, k) and read as its transpose. Neighbouring threads take neighbouring k.

// (k within the slice, vec4 of columns) that a staging item fills.
fn b_item(item: u32) -> vec2<u32> {
    return vec2(item % SLICE_K, item / SLICE_K);
}

// Where element (k, column) is, past the matrix's base.
fn b_index(k: u32, column: u32) -> u32 {
    return column * params.b.row + k;
}
