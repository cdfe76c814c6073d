// Slot attention_params: the rest of the members of Params, of the backward kernels.
    grad_o: Strides,
    out: Strides,      // of dq, dk or dbias
    dv: Strides,
    first_tile: u32,   // of the tiles that are walked first_tile .. end_tile; after the first they are added to the output
    end_tile: u32,
    states: u32,       // lse and delta of each row
    states_batch: u32,
    states_head: u32,
    bias_axes: u32,    // a bit each for the axes that the bias has: batch, heads, rows, keys
    zero: u32,         // 0, which compilers don't know
    pad: u32,
