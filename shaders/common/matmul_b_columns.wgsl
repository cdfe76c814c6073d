// Slot matmul_b: B stored (n, k) and read as its transpose. Neighbouring elements are of one column.
const B_TRANSPOSED: bool = true;

// Where element (k, column) is, past the matrix's base.
fn b_index(k: u32, column: u32) -> u32 {
    return column * params.b.row + k;
}
