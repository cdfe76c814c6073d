// Text `out`: an output that isn't asked for.
fn out_at(index: u32) -> f32 {
    return 0.0;
}

fn out_store(first: u32, four: vec4<f32>, count: u32) {
}
