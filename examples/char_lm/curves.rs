//! The loss curves as a picture.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::Variant;

/// The loss of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Point {
    pub(crate) step: usize,
    pub(crate) loss: f32,
}

/// A run.
#[derive(Debug)]
pub(crate) struct Curve {
    pub(crate) variant: Variant,
    pub(crate) points: Vec<Point>,
}

const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(222, 222, 222);

/// Steps of which a point of a curve is the mean: a step's own loss depends on its text.
const SMOOTH: usize = 8;

/// An SVG document. It names a font family and holds no font.
pub(crate) fn svg(curves: &[Curve]) -> Result<String> {
    let mut text = String::new();
    draw(&mut text, curves).map_err(|error| anyhow!("drawing the curves: {error}"))?;
    Ok(text)
}

fn draw(text: &mut String, curves: &[Curve]) -> Result<(), Box<dyn core::error::Error>> {
    let root = SVGBackend::with_string(text, (820, 440)).into_drawing_area();
    // Paper of its own: the page around it may be dark.
    root.fill(&WHITE)?;
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let steps = points().map(|point| point.step + 1).max().unwrap_or(1);
    let highest = points().map(|point| point.loss).fold(1.0, f32::max);
    let font = |size: u32| ("sans-serif", size).into_font().color(&INK);
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .caption("Training loss of a small transformer, by what its attention has", font(18))
        .build_cartesian_2d(0..steps, 0f32..highest)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_desc("step")
        .y_desc("loss (nats a character)")
        .label_style(font(14))
        .draw()?;
    for curve in curves {
        let (name, color) = match curve.variant {
            Variant::NoMask => ("no causal mask: it sees the answer", RGBColor(200, 80, 0)),
            Variant::NoScale => ("no 1/\u{221a}d", RGBColor(140, 60, 160)),
            Variant::Both => ("causal mask and 1/\u{221a}d", RGBColor(0, 95, 184)),
        };
        let means = curve.points.chunks(SMOOTH).map(|points| {
            let loss: f32 = points.iter().map(|point| point.loss).sum();
            (points[points.len() / 2].step, loss / points.len() as f32)
        });
        let style = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(means, style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(GRID)
        .label_font(font(14))
        .draw()?;
    root.present()?;
    drop(chart);
    Ok(())
}
