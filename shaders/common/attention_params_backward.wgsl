// Slot attention_params: of the backward kernels.
struct Params {
    q: Strides,
    k: Strides,
    v: Strides,
    grad_o: Strides,
    bias: Strides,
    mask: Strides,
    out: Strides, // of dq, dk or dbias
    dv: Strides,
    q_len: u32,
    kv_len: u32,
    head_dim: u32,
    value_dim: u32,
    q_heads: u32,
    group_size: u32,
    q_blocks: u32,     // blocks of a head: of queries, or of keys
    first_block: u32,  // this dispatch owns the blocks first_block .. end_block of all heads
    end_block: u32,
    first_tile: u32,   // and of the tiles that are walked first_tile .. end_tile; after the first they are added to the output
    end_tile: u32,
    first_key: u32,    // all keys: 0 .. 2^32 - 1
    end_key: u32,
    rows: u32,         // rows of q, or of k and v, that are written however few a batch entry has; 0 for a packed batch
    bottom_right: u32, // 1: the last query stands at the last key; 0: the first at the first
    left: i32,         // row i at position p sees the keys p - left ..= p + right
    right: i32,
    scale: f32,
    softcap: f32,
    bias_key: u32,     // 1, or 0 where one bias is for all keys
    mask_key: u32,     // likewise
    sequences: u32,    // where in extras: for each batch entry the first row and number of queries, and of keys
    slopes: u32,       // ALiBi slopes of the heads
    slopes_batch: u32, // and their distance from one batch entry to the next
    sinks: u32,        // of the heads
    ranges: u32,       // for each row its first key and the one past its last
    ranges_batch: u32,
    ranges_head: u32,
    mod_data: u32,     // the words that score_mod and mask_mod read
    mod_words: u32,
    states: u32,       // lse and delta of each row
    states_batch: u32,
    states_head: u32,
    bias_axes: u32,    // a bit each for the axes that the bias has: batch, heads, rows, keys
    pad_0: u32,
    pad_1: u32,
}
