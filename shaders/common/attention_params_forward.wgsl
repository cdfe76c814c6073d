// Slot attention_params: of the forward kernels, which have the bindings 1 to 5: q, k, v, out and lse.
struct Params {
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    lse: Strides,
    bias: Strides,
    mask: Strides,
    q_len: u32,
    kv_len: u32,
    head_dim: u32,
    value_dim: u32,
    q_heads: u32,
    group_size: u32,
    q_blocks: u32,     // ceil(q_len / BLOCK_Q)
    first_block: u32,  // this dispatch owns the blocks first_block .. end_block of batch * q_heads * q_blocks
    end_block: u32,
    first_key: u32,    // and the keys first_key .. end_key, whole tiles
    end_key: u32,
    last_pass: u32,    // 1: no keys come after them
    rows: u32,         // rows that are written however few a batch entry has; 0 for a packed batch
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
    sums: u32,         // l of each row between passes
    sums_batch: u32,
    sums_head: u32,
}
