// Slot matmul_b: B stored (k, n). Neighbouring elements are columns.
const B_TRANSPOSED: bool = false;

// Where element (k, column) is, past the matrix's base.
fn b_index(k: u32, column: u32) -> u32 {
    return k * params.b.row + column;
}
