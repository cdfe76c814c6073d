// Text `tile`, within an entry point: the products of a workgroup's own rows with a tile of other rows, over slices of their width that are
// staged transposed: a vec4 holds four rows of one dimension. The kernel says tile_dim, tile_own_base, tile_own_row, tile_other_base,
// tile_other_row, and how to read both: tile_own_at, tile_other_at. Each slice is summed apart: see flash_fwd, Numerics.
        var tile: array<vec4<f32>, 4u * OWN_VECS * OTHER_VECS>; // tile[own row * OTHER_VECS + vector of others]
        for (var d0 = 0u; d0 < tile_dim; d0 += SLICE_D) {
            workgroupBarrier(); // every reader of the previous stage is done
            for (var item = lane; item < SLICE_D * TY * OWN_VECS; item += THREADS) {
                let d = d0 + item % SLICE_D;
                let row = first_own + 4u * (item / SLICE_D);
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = d < tile_dim && row + c < own_len;
                    four[c] = select(0.0, tile_own_at(select(0u, tile_own_base + (row + c) * tile_own_row + d, inside)), inside);
                }
                sh_stage[(item % SLICE_D) * OWN_STRIDE + item / SLICE_D] = four;
            }
            for (var item = lane; item < SLICE_D * TX * OTHER_VECS; item += THREADS) {
                let d = d0 + item % SLICE_D;
                let row = first_other + 4u * (item / SLICE_D);
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = d < tile_dim && row + c < other_len;
                    four[c] = select(0.0, tile_other_at(select(0u, tile_other_base + (row + c) * tile_other_row + d, inside)), inside);
                }
                sh_stage[OTHER_BASE + (item % SLICE_D) * OTHER_STRIDE + item / SLICE_D] = four;
            }
            workgroupBarrier();
            var tile_part: array<vec4<f32>, 4u * OWN_VECS * OTHER_VECS>;
            for (var d = 0u; d < SLICE_D; d++) {
                var other4: array<vec4<f32>, OTHER_VECS>;
                // @unroll
                for (var j = 0u; j < OTHER_VECS; j++) {
                    other4[j] = sh_stage[OTHER_BASE + d * OTHER_STRIDE + j * TX + x];
                }
                // @unroll
                for (var i = 0u; i < OWN_VECS; i++) {
                    let own4 = sh_stage[d * OWN_STRIDE + i * TY + y];
                    // @unroll
                    for (var c = 0u; c < 4u; c++) {
                        // @unroll
                        for (var j = 0u; j < OTHER_VECS; j++) {
                            tile_part[(4u * i + c) * OTHER_VECS + j] = fma(vec4(own4[c]), other4[j], tile_part[(4u * i + c) * OTHER_VECS + j]);
                        }
                    }
                }
            }
            // @unroll
            for (var n = 0u; n < 4u * OWN_VECS * OTHER_VECS; n++) {
                tile[n] += tile_part[n];
            }
        }
