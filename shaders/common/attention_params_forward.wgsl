// Slot attention_params: the rest of the members of Params, of the forward kernels. These have the bindings 1 to 5: q, k, v, out and lse.
    out: Strides,
    lse: Strides,
    last_pass: u32,    // 1: no keys come after first_key .. end_key
    sums: u32,         // l of each row between passes
    sums_batch: u32,
    sums_head: u32,
