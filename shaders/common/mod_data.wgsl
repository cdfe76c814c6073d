// What score_mod and mask_mod may read: the words of the caller's buffer, and 0 past its end.
fn data_u32(index: u32) -> u32 {
    // Without a branch: score_mod is called many times in one block, and SwiftShader's compiler takes minutes over as many branches.
    let inside = index < params.mod_words;
    return select(0u, extra(params.mod_data + select(0u, index, inside)), inside);
}

fn data_i32(index: u32) -> i32 {
    return i32(data_u32(index));
}

fn data_f32(index: u32) -> f32 {
    return bitcast<f32>(data_u32(index));
}
