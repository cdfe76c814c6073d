//! The bench as a picture: memory and time against length, both axes logarithmic, so that powers of the length are straight
//! lines: linear growth climbs one step a doubling, quadratic growth two.

use core::ops::Range;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

use crate::bench::{Measured, Report};
use crate::measure::{bytes, seconds};

const SIZE: (u32, u32) = (1100, 480);
const TILED: RGBColor = RGBColor(0, 95, 184);
const NAIVE: RGBColor = RGBColor(200, 80, 0);
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(222, 222, 222);

/// A line of the plot.
struct Series {
    name: String,
    color: RGBColor,
    /// Lines after the first of a colour have hollow points.
    hollow: bool,
    /// (length, value).
    points: Vec<(f64, f64)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// An SVG document of two panels. It names a font family and holds no font.
pub(crate) fn svg(report: &Report) -> Result<String> {
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    draw(&root, report).map_err(|error| anyhow!("drawing the plot: {error}"))?;
    root.present().map_err(|error| anyhow!("drawing the plot: {error}"))?;
    drop(root);
    Ok(text)
}

fn draw(root: &Area<'_>, report: &Report) -> Result<(), Box<dyn core::error::Error>> {
    // Paper of its own: the page around it may be dark.
    root.fill(&WHITE)?;
    let what = if report.rows.iter().any(|row| row.tiled.is_some() && row.naive.is_none()) {
        "Matrix product"
    } else {
        "Attention, tiled and naive,"
    };
    let title = format!("{what} on {}", report.adapter);
    let mut inner = root.margin(12, 4, 4, 16).titled(&title, ("sans-serif", 20).into_font().color(&INK))?;
    // Where naive ends, and why.
    let refused = report.rows.iter().filter_map(|row| Some((row.spec.kv_len, row.spec.lengths(), row.refused()?)));
    if let Some((_, lengths, refused)) = refused.min_by_key(|&(len, ..)| len) {
        let text = format!("naive refused at {lengths}: {refused}");
        inner = inner.titled(&text, ("sans-serif", 15).into_font().color(&NAIVE))?;
    }
    let (left, right) = inner.split_horizontally(SIZE.0 / 2);
    let memory = series(report, |measured| measured.memory.extra_bytes as f64);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes that were a u64 before")]
    panel(&left, "device memory beyond q, k, v and o", &memory, 4.0, |value| bytes(value.round() as u64))?;
    let time = series(report, |measured| measured.seconds);
    panel(&right, "time", &time, 10.0, seconds)?;
    Ok(())
}

/// The lines of a report: one a path and shape.
fn series(report: &Report, value: impl Fn(&Measured) -> f64) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    let several = report.rows.iter().any(|row| row.spec.shape() != report.rows[0].spec.shape());
    for (path, color) in [("tiled", TILED), ("naive", NAIVE)] {
        for row in &report.rows {
            let measured = if path == "tiled" { row.tiled.as_ref() } else { row.naive_measured() };
            let Some(measured) = measured else { continue };
            let name = if several { format!("{path}, {}", row.spec.shape()) } else { path.to_string() };
            // A logarithm wants something above 0.
            let point = (row.spec.kv_len.max(1) as f64, value(measured).max(1e-9));
            match all.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => {
                    let hollow = all.iter().any(|series| series.color == color);
                    all.push(Series { name, color, hollow, points: vec![point] });
                }
            }
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// An axis of values above 0 in logarithms of a base, from one whole power to another, with labels at whole powers.
struct LogAxis {
    base: f64,
    powers: Range<f64>,
}

impl LogAxis {
    fn of(values: impl Iterator<Item = f64> + Clone, base: f64) -> Self {
        let logs = values.map(|value| value.log(base));
        let low = logs.clone().fold(f64::INFINITY, f64::min).floor();
        let high = logs.fold(f64::NEG_INFINITY, f64::max).ceil();
        // Nothing to draw is drawn on an empty grid.
        Self { base, powers: if low <= high { low..high.max(low + 1.0) } else { 0.0..1.0 } }
    }
}

impl Ranged for LogAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let part = (value.log(self.base) - self.powers.start) / (self.powers.end - self.powers.start);
        #[expect(clippy::cast_possible_truncation, reason = "within the picture")]
        let pixels = (part * f64::from(to - from)).round() as i32;
        from + pixels
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        // More than a dozen labels run into each other.
        let step = ((self.powers.end - self.powers.start) / 12.0).ceil().max(1.0);
        let powers = core::iter::successors(Some(self.powers.start), |power| Some(power + step));
        powers.take_while(|power| *power <= self.powers.end).map(|power| self.base.powf(power)).collect()
    }

    fn range(&self) -> Range<f64> {
        self.base.powf(self.powers.start)..self.base.powf(self.powers.end)
    }
}

fn panel(
    area: &Area<'_>,
    what: &str,
    all: &[Series],
    base: f64,
    format_value: impl Fn(f64) -> String,
) -> Result<(), Box<dyn core::error::Error>> {
    let points = || all.iter().flat_map(|series| series.points.iter());
    let lengths = LogAxis::of(points().map(|point| point.0), 2.0);
    let values = LogAxis::of(points().map(|point| point.1), base);
    let text = || ("sans-serif", 14).into_font().color(&INK);
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .caption(what, ("sans-serif", 16).into_font().color(&INK))
        .x_label_area_size(46)
        .y_label_area_size(78)
        .build_cartesian_2d(lengths, values)?;
    chart
        .configure_mesh()
        .x_desc("length, tokens")
        .label_style(text())
        .axis_desc_style(text())
        .axis_style(INK)
        .bold_line_style(GRID)
        .disable_x_mesh()
        .x_label_formatter(&|length| format!("{length:.0}"))
        .y_label_formatter(&|value| format_value(*value))
        .draw()?;
    for series in all {
        let Series { name, color, hollow, points } = series;
        let color = *color;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(name.as_str())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2)));
        let style = if *hollow { color.stroke_width(2) } else { color.filled() };
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 4, style)))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(GRID)
        .label_font(text())
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use plotters::coord::ranged1d::BoldPoints;

    use super::*;

    #[test]
    fn axes_end_at_whole_powers_and_label_them() {
        let axis = LogAxis::of([600.0, 1024.0, 8000.0].into_iter(), 2.0);
        assert_eq!(axis.key_points(BoldPoints(10)), [512.0, 1024.0, 2048.0, 4096.0, 8192.0]);
        assert_eq!(axis.map(&512.0, (100, 500)), 100);
        assert_eq!(axis.map(&2048.0, (100, 500)), 300);
        assert_eq!(axis.map(&8192.0, (500, 100)), 100);
    }

    #[test]
    fn an_axis_of_one_value_or_none_has_a_length() {
        assert_eq!(LogAxis::of([8.0].into_iter(), 2.0).powers, 3.0..4.0);
        assert_eq!(LogAxis::of(core::iter::empty(), 2.0).powers, 0.0..1.0);
    }
}
