//! The bench for people, and as comma-separated values.

use core::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::row::{Measured, Row};
use super::{Kind, Report};
use crate::args::Options;
use crate::measure::{bytes, digits, seconds};

/// How the figures of the table come about, a line each.
pub(super) fn method(kind: Kind, software: bool) -> Vec<String> {
    let mut lines = vec![
        "time: wall clock from recording to completion; the median of several runs after a warm-up, or the one run where it \
         takes over 10 s. Every result was checked before its time was taken for anything.",
        match kind {
            Kind::Matmul => "GFLOP/s: 2 n^3 over that time. of FMA: its share of the multiply-add rate above.",
            Kind::Backward => {
                "GFLOP/s: 2 (3 head_dim + 2 value_dim) for each key that a query sees, over that time: the five products that are needed, \
                 of seven that are done. of FMA: its share of the multiply-add rate above."
            }
            _ => {
                "GFLOP/s: 2 (head_dim + value_dim) for each key that a query sees, over that time. of FMA: its share of the \
                 multiply-add rate above."
            }
        },
        match kind {
            Kind::Backward => {
                "extra: the peak of the engine's count of its wgpu buffers, less inputs, o, lse and gradients. peak: with them."
            }
            _ => "extra: the peak of the engine's count of its wgpu buffers, less inputs and o. peak: with them.",
        },
        "allocator: what wgpu's allocator reports for the whole device right after a run, whose tensors are alive.",
    ];
    if software {
        lines.extend([
            "CPU: the process's user and system time over the number of cores: steadier than the wall clock on a busy machine. \
             CPU of FMA: the share, both by it.",
            "process: how far the process's peak memory (VmHWM, reset before) rose above what it held before the outputs were \
             allocated; this device's memory is the host's. Pages that the process has kept from before don't show.",
        ]);
    }
    lines.push(match kind {
        Kind::Matmul => "max |diff|: with the f64 reference, on the elements where 8 rows and 8 columns meet.",
        Kind::Backward => {
            "max |diff|: with the f64 reference, all elements of dq, dk and dv; over 2^34 FLOPs between sums over dv and over the \
             gradient of o, which must be equal."
        }
        _ => {
            "max |diff|: between tiled and naive, over all rows, where both ran; (f64): with the f64 reference, on 16 rows, where one \
             did. Each is held against the f64 reference besides, and against rows left out."
        }
    });
    lines.into_iter().map(str::to_string).collect()
}

impl Report {
    /// The table and what belongs to it.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a String can't fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, text: &mut String) -> core::fmt::Result {
        let roofline = &self.roofline;
        writeln!(text, "{} ({})", self.adapter, self.driver)?;
        write!(text, "multiply-add {} GFLOP/s ({}", digits(roofline.fma_gflops), roofline.fma_shape)?;
        if let Some(cpu) = roofline.cpu_fma_gflops {
            write!(text, "; {} by CPU time of {} cores", digits(cpu), self.cores)?;
        }
        writeln!(text, "); copy {} GB/s read + written ({})\n", digits(roofline.copy_gbps), roofline.copy_method)?;

        // A new table where the shape changes.
        for rows in self.rows.chunk_by(|a, b| a.spec.shape() == b.spec.shape()) {
            let shape = rows[0].spec.shape();
            writeln!(text, "{shape}\n{}\n", self.one_table(rows))?;
            for row in rows {
                if let Some(refused) = row.refused() {
                    writeln!(text, "{} naive refused: {refused}", row.spec.lengths())?;
                }
            }
            for growth in self.growth.iter().filter(|growth| growth.shape == shape) {
                writeln!(text, "{}", growth.line())?;
            }
            for kernel in kernels(rows) {
                writeln!(text, "{kernel}")?;
            }
            writeln!(text)?;
        }
        for line in &self.method {
            writeln!(text, "{line}")?;
        }
        Ok(())
    }

    fn one_table(&self, rows: &[Row]) -> Table {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let mut header = vec!["length", "path", "time"];
        if self.software {
            header.push("CPU");
        }
        header.extend(["GFLOP/s", "of FMA"]);
        if self.software {
            header.push("CPU of FMA");
        }
        header.extend(["extra", "peak", "allocator"]);
        if self.software {
            header.push("process");
        }
        header.push("max |diff|");
        table.set_header(header);
        for row in rows {
            // The difference belongs to both: on the last line.
            let alone = row.spec.kind != Kind::Matmul && (row.tiled.is_none() || row.naive_measured().is_none());
            let diff = format!("{:.1e}{}", row.max_abs_diff, if alone { " (f64)" } else { "" });
            let mut length = row.spec.lengths();
            if let Some(tiled) = &row.tiled {
                let last = if row.naive_measured().is_some() { "" } else { &diff };
                table.add_row(self.cells(&std::mem::take(&mut length), "tiled", tiled, last));
            }
            if let Some(naive) = row.naive_measured() {
                table.add_row(self.cells(&length, "naive", naive, &diff));
            } else if row.refused().is_some() {
                table.add_row([&length, "naive", "refused"]);
            }
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_cell_alignment(if index == 1 { CellAlignment::Left } else { CellAlignment::Right });
        }
        table
    }

    fn cells(&self, length: &str, path: &str, measured: &Measured, diff: &str) -> Vec<Cell> {
        let share = |share: f64| format!("{}%", digits(100.0 * share));
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
        let mut cells = vec![length.to_string(), path.to_string(), seconds(measured.seconds)];
        if self.software {
            cells.push(or_none(measured.cpu_seconds.map(seconds)));
        }
        cells.extend([digits(measured.gflops), share(measured.fma_share)]);
        if self.software {
            cells.push(or_none(measured.cpu_fma_share.map(share)));
        }
        let memory = &measured.memory;
        cells.extend([bytes(memory.extra_bytes), bytes(memory.peak_bytes), or_none(memory.allocator_bytes.map(bytes))]);
        if self.software {
            cells.push(or_none(memory.process_growth_bytes.map(bytes)));
        }
        cells.push(diff.to_string());
        cells.into_iter().map(Cell::new).collect()
    }

    /// One line for each path of each row.
    pub(super) fn csv(&self) -> String {
        let mut text = String::from(
            "adapter,driver,kind,dtype,batch,heads,kv_heads,q_len,kv_len,head_dim,value_dim,causal,window,softcap,path,seconds,cpu_seconds,\
             reps,gflops,fma_share,fma_gflops,copy_gbps,extra_bytes,workspace_bytes,peak_bytes,allocator_bytes,\
             process_growth_bytes,max_abs_diff,kernel,refused,compared\n",
        );
        for row in &self.rows {
            if let Some(tiled) = &row.tiled {
                text += &self.csv_line(row, "tiled", Ok(tiled));
            }
            if let Some(naive) = row.naive_measured() {
                text += &self.csv_line(row, "naive", Ok(naive));
            }
            if let Some(refused) = row.refused() {
                text += &self.csv_line(row, "naive", Err(refused));
            }
        }
        text
    }

    fn csv_line(&self, row: &Row, path: &str, result: Result<&Measured, &str>) -> String {
        let Row { spec, .. } = row;
        let quoted = |field: &str| format!("\"{}\"", field.replace('"', "\"\""));
        let or_empty = |value: Option<String>| value.unwrap_or_default();
        let mut fields =
            vec![quoted(&self.adapter), quoted(&self.driver), spec.kind.name(), spec.dtype.name().to_string()];
        let sizes = [spec.batch, spec.heads, spec.kv_heads, spec.q_len, spec.kv_len, spec.head_dim, spec.value_dim];
        fields.extend(sizes.map(|size| size.to_string()));
        let Options { causal, window, softcap, .. } = spec.options;
        fields.extend([
            causal.to_string(),
            or_empty(window.map(|window| quoted(&window.to_string()))),
            or_empty(softcap.map(|softcap| softcap.to_string())),
            path.to_string(),
        ]);
        match result {
            Ok(measured) => {
                let memory = &measured.memory;
                fields.extend([
                    measured.seconds.to_string(),
                    or_empty(measured.cpu_seconds.map(|seconds| seconds.to_string())),
                    measured.reps.to_string(),
                    measured.gflops.to_string(),
                    measured.fma_share.to_string(),
                    self.roofline.fma_gflops.to_string(),
                    self.roofline.copy_gbps.to_string(),
                    memory.extra_bytes.to_string(),
                    memory.workspace_bytes.to_string(),
                    memory.peak_bytes.to_string(),
                    or_empty(memory.allocator_bytes.map(|bytes| bytes.to_string())),
                    or_empty(memory.process_growth_bytes.map(|bytes| bytes.to_string())),
                    row.max_abs_diff.to_string(),
                    quoted(&measured.kernel),
                    String::new(),
                ]);
            }
            Err(refused) => {
                fields.extend(core::iter::repeat_n(String::new(), 14));
                fields.push(quoted(refused));
            }
        }
        fields.push(or_empty(result.is_ok().then(|| quoted(&row.compared))));
        fields.join(",") + "\n"
    }
}

/// What ran, each kernel once.
fn kernels(rows: &[Row]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for row in rows {
        for (path, measured) in [("tiled", row.tiled.as_ref()), ("naive", row.naive_measured())] {
            let line = measured.map(|measured| format!("{path} kernel: {}", measured.kernel));
            lines.extend(line.filter(|line| !lines.contains(line)));
        }
    }
    lines.sort_by_key(|line| line.starts_with("naive"));
    lines
}
