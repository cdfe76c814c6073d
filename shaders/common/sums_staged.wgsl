// Text `sums`, within an entry point: to each of a workgroup's own rows the other rows are added, each as often as sh_p says: W B, over
// slices of B that are staged. The kernel says sums_acc, an array of SUMS_COL_VECS vec4s a row, sums_dim, sums_base, sums_row, and how to
// read: sums_read. A tile's terms are summed apart: see flash_fwd, Numerics.
        var sums_tile: array<vec4<f32>, 4u * OWN_VECS * SUMS_COL_VECS>;
        for (var k0 = 0u; k0 < BLOCK_OTHER; k0 += SLICE_OTHER) {
            workgroupBarrier(); // sh_p is written, and every reader of the previous stage is done
            for (var item = lane; item < SLICE_OTHER * TX * SUMS_COL_VECS; item += THREADS) {
                let row = first_other + k0 + item / (TX * SUMS_COL_VECS);
                let column = 4u * (item % (TX * SUMS_COL_VECS));
                var four = vec4(0.0);
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    let inside = row < other_len && column + c < sums_dim;
                    four[c] = select(0.0, sums_read(select(0u, sums_base + row * sums_row + column + c, inside)), inside);
                }
                sh_stage[item] = four;
            }
            workgroupBarrier();
            // Two loops, of which one runs no time: what masks cost is paid by masked tiles alone.
            for (var other = 0u; other < select(SLICE_OTHER, 0u, masked); other++) {
                // @unroll
                for (var i = 0u; i < OWN_VECS; i++) {
                    let w4 = sh_p[(k0 + other) * P_STRIDE + i * TY + y];
                    // @unroll
                    for (var j = 0u; j < SUMS_COL_VECS; j++) {
                        let row4 = sh_stage[other * TX * SUMS_COL_VECS + j * TX + x];
                        // @unroll
                        for (var c = 0u; c < 4u; c++) {
                            sums_tile[(4u * i + c) * SUMS_COL_VECS + j] = fma(vec4(w4[c]), row4, sums_tile[(4u * i + c) * SUMS_COL_VECS + j]);
                        }
                    }
                }
            }
            for (var other = 0u; other < select(0u, SLICE_OTHER, masked); other++) {
                // @unroll
                for (var i = 0u; i < OWN_VECS; i++) {
                    let w4 = sh_p[(k0 + other) * P_STRIDE + i * TY + y];
                    // @unroll
                    for (var j = 0u; j < SUMS_COL_VECS; j++) {
                        let row4 = sh_stage[other * TX * SUMS_COL_VECS + j * TX + x];
                        // @unroll
                        for (var c = 0u; c < 4u; c++) {
                            let sum = sums_tile[(4u * i + c) * SUMS_COL_VECS + j];
                            sums_tile[(4u * i + c) * SUMS_COL_VECS + j] = select(fma(vec4(w4[c]), row4, sum), sum, w4[c] == MASKED);
                        }
                    }
                }
            }
        }
        // @unroll
        for (var n = 0u; n < 4u * OWN_VECS * SUMS_COL_VECS; n++) {
            sums_acc[n] += sums_tile[n];
        }
