//! Runs as one self-contained HTML page: numbers, and plots as inline SVG. It loads nothing from anywhere.

use anyhow::Context;
use millpond_scheduler::sim::histogram::Histogram;
use millpond_scheduler::sim::report::Sample;
use plotters::prelude::*;

use super::summary::Summary;
use super::text;

const SIZE: (u32, u32) = (620, 300);

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1300px;margin:2em auto;padding:0 1em}\
pre{background:#f4f4f4;padding:1em;overflow-x:auto}svg{max-width:100%;height:auto}\
.plots{display:flex;flex-wrap:wrap;gap:8px}";

/// A curve with its name.
struct Curve {
    name: &'static str,
    points: Vec<(f64, f64)>,
}

/// The whole page.
pub fn render(runs: &[Summary]) -> anyhow::Result<String> {
    let mut body = String::new();
    if runs.len() > 1 {
        body.push_str(&preformatted(&text::render(runs)));
    }
    for run in runs {
        body.push_str(&section(run)?);
    }
    Ok(document(&body))
}

/// A page of nothing but text.
pub fn page(text: &str) -> String {
    document(&preformatted(text))
}

fn document(body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>millpond simulate</title>\
         <style>{STYLE}</style></head><body>\n<h1>millpond simulate</h1>\n{body}</body></html>\n"
    )
}

fn section(run: &Summary) -> anyhow::Result<String> {
    let samples = &run.series.samples;
    let over_time = |name, value: &dyn Fn(&Sample) -> f64| Curve {
        name,
        points: samples.iter().map(|s| (seconds(s), value(s))).collect(),
    };
    let plots = [
        plot(
            "Throughput",
            ("time, s", "output tokens/s"),
            &[Curve {
                name: "output",
                points: throughput(samples),
            }],
        )?,
        plot(
            "Sequences",
            ("time, s", "sequences"),
            &[
                over_time("running", &|s| f64::from(s.num_running)),
                over_time("waiting", &|s| f64::from(s.num_waiting)),
            ],
        )?,
        plot(
            "KV pool",
            ("time, s", "blocks"),
            &[
                over_time("held", &|s| {
                    f64::from(s.blocks.total - s.blocks.free - s.blocks.cached_evictable)
                }),
                over_time("held or cached", &|s| {
                    f64::from(s.blocks.total - s.blocks.free)
                }),
                over_time("total", &|s| f64::from(s.blocks.total)),
            ],
        )?,
        plot(
            "Latency up to",
            ("milliseconds, to the 99.9th percentile", "share"),
            &[
                distribution("TTFT", &run.histograms.ttft),
                distribution("whole request", &run.histograms.latency),
            ],
        )?,
        plot(
            "Time between tokens up to",
            ("milliseconds, to the 99.9th percentile", "share"),
            &[distribution("ITL", &run.histograms.itl)],
        )?,
    ];
    Ok(format!(
        "<h2>{}</h2>\n{}<div class=\"plots\">\n{}\n</div>\n",
        escaped(&run.label),
        preformatted(&text::render(std::slice::from_ref(run))),
        plots.join("\n")
    ))
}

fn seconds(sample: &Sample) -> f64 {
    sample.at.0 as f64 * 1e-9
}

/// Tokens per second from each sample to the next.
fn throughput(samples: &[Sample]) -> Vec<(f64, f64)> {
    let rate = |pair: &[Sample]| {
        let tokens = pair[1].num_output_tokens - pair[0].num_output_tokens;
        (
            seconds(&pair[1]),
            tokens as f64 / (seconds(&pair[1]) - seconds(&pair[0])),
        )
    };
    samples.windows(2).map(rate).collect()
}

/// Share of spans up to each length. The last thousandth would squeeze the rest into a corner.
fn distribution(name: &'static str, histogram: &Histogram) -> Curve {
    let points = histogram.cumulative().into_iter();
    let points = points.map(|(span, share)| (span.as_secs_f64() * 1e3, share));
    let mut points: Vec<_> = points.take_while(|(_, share)| *share <= 0.999).collect();
    if points.is_empty() && histogram.total() > 0 {
        points.push((histogram.max().as_secs_f64() * 1e3, 1.0));
    }
    Curve { name, points }
}

fn plot(caption: &str, (x_name, y_name): (&str, &str), curves: &[Curve]) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw(&mut svg, caption, (x_name, y_name), curves)
        .map_err(|error| anyhow::anyhow!("{error}"))
        .with_context(|| format!("cannot draw the plot {caption:?}"))?;
    Ok(svg)
}

type DrawError = Box<dyn std::error::Error>;

fn draw(
    svg: &mut String,
    caption: &str,
    (x_name, y_name): (&str, &str),
    curves: &[Curve],
) -> Result<(), DrawError> {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let limit = |largest: f64| if largest > 0.0 { largest * 1.05 } else { 1.0 };
    let x_end = limit(all().map(|(x, _)| *x).fold(0.0, f64::max));
    let y_end = limit(all().map(|(_, y)| *y).fold(0.0, f64::max));
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .caption(caption, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..x_end, 0.0..y_end)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(x_name)
        .y_desc(y_name)
        .draw()?;
    for (number, curve) in curves.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(
                curve.points.iter().copied(),
                colour.stroke_width(2),
            ))?
            .label(curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

fn preformatted(text: &str) -> String {
    format!("<pre>{}</pre>\n", escaped(text))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
