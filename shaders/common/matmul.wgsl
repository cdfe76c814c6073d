// What the matrix products share: uniform, place of a workgroup's block, how far a row reads. A kernel has `params`, a uniform of type
// Params.

// One tensor's place: element (o, i, row, column) is at offset + o*outer + i*inner + row*row + column.
struct Strides {
    offset: u32,
    outer: u32,
    inner: u32,
    row: u32,
}

struct Params {
    a: Strides,
    b: Strides,
    c: Strides,
    m: u32,
    n: u32,
    k: u32,
    inner: u32,
    group_size: u32,
    m_blocks: u32,    // ceil(m / rows of a block)
    n_blocks: u32,    // ceil(n / columns of a block)
    first_block: u32, // this dispatch owns the blocks first_block .. end_block of all matrices
    end_block: u32,
    diagonal: i32,    // of a causal A
    alpha: f32,
    first_k: u32,     // and its part first_k .. end_k of the sum, whole slices; after the first it is added to c
    end_k: u32,
    zero: u32,        // always, which no compiler knows
    pad_0: u32,
    pad_1: u32,
}

struct Block {
    first_row: u32,
    first_column: u32,
    a_base: u32, // where its matrices begin
    b_base: u32,
    c_base: u32,
}

fn block_of(number: u32, rows: u32, columns: u32) -> Block {
    let matrix = number / (params.n_blocks * params.m_blocks);
    let outer = matrix / params.inner;
    let inner = matrix % params.inner;
    var block: Block;
    block.first_row = (number / params.n_blocks % params.m_blocks) * rows;
    block.first_column = (number % params.n_blocks) * columns;
    block.a_base = params.a.offset + outer * params.a.outer + inner * params.a.inner;
    block.b_base = params.b.offset + outer * params.b.outer + inner / params.group_size * params.b.inner;
    block.c_base = params.c.offset + outer * params.c.outer + inner * params.c.inner;
    return block;
}

// @include matmul_b = rows
// @include matmul_reach = all
