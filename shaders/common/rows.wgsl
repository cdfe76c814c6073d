// Numbers of a lane's rows that turn. Rows come one by one in loops that aren't unrolled, each time the first: after ROWS turns all are back in
// their places. What is unrolled is compiled once for each row, and drivers take long for it.

fn turned(rows: Rows, last: f32) -> Rows {
    var turned: Rows;
    // @unroll
    for (var r = 0u; r < ROWS - 1u; r++) {
        turned[r] = rows[r + 1u];
    }
    turned[ROWS - 1u] = last;
    return turned;
}

fn words_turned(words: RowWords, last: u32) -> RowWords {
    var turned: RowWords;
    // @unroll
    for (var r = 0u; r < ROWS - 1u; r++) {
        turned[r] = words[r + 1u];
    }
    turned[ROWS - 1u] = last;
    return turned;
}
