// Slot extras: the small tables, and behind them what is kept of the rows from one pass to the next.
@group(0) @binding(8) var<storage, read_write> extras: array<u32>;

fn extra(at: u32) -> u32 {
    return extras[at];
}

fn store_extra(at: u32, word: u32) {
    extras[at] = word;
}
