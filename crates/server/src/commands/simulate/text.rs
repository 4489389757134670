//! Runs as text: one in full, several side by side.

use super::summary::{Quantiles, Summary};
use crate::commands::lines::Lines;

/// One run in full, or a table with a line per run.
pub fn render(summaries: &[Summary]) -> String {
    match summaries {
        [one] => full(one),
        several => table(several),
    }
}

fn full(run: &Summary) -> String {
    let mut lines = Lines::default();
    lines.add("run", &run.label);
    let ended = &run.ended;
    let others = [
        (ended.cancelled, "cancelled"),
        (ended.timed_out, "timed out"),
        (ended.failed, "failed"),
        (ended.refused, "refused"),
    ];
    let others = others.iter().filter(|(count, _)| *count > 0);
    let others: String = others
        .map(|(count, how)| format!(", {count} {how}"))
        .collect();
    lines.add("requests", format!("{} finished{others}", ended.finished));
    lines.add(
        "simulated",
        format!("{:.1} s, {} steps", run.duration_s, run.steps),
    );
    lines.add(
        "tokens",
        format!("{} prompt, {} output", run.prompt_tokens, run.output_tokens),
    );
    lines.add(
        "throughput",
        format!(
            "{:.1} output tokens/s, {:.3} requests/s",
            run.output_tokens_per_s, run.requests_per_s
        ),
    );
    if let Some(attainment) = run.slo_attainment {
        lines.add(
            "goodput",
            format!(
                "{:.3} requests/s, {:.1} % of all kept the promise",
                run.goodput_per_s,
                attainment * 100.0
            ),
        );
    }
    let times = [
        ("TTFT", &run.ttft_s),
        ("ITL", &run.itl_s),
        ("TPOT", &run.tpot_s),
        ("latency", &run.latency_s),
        ("queue", &run.queue_s),
    ];
    for (name, quantiles) in times {
        lines.add(name, quantile_line(quantiles));
    }
    let hits = &run.hit_rate;
    lines.add(
        "hit rate",
        format!(
            "{:.4} of blocks, {:.4} of tokens, {:.4} mean per request, {:.4} of requests hit",
            hits.block_weighted, hits.token_weighted, hits.mean_per_request, hits.share_with_hit
        ),
    );
    lines.add(
        "lost work",
        format!(
            "{} preemptions, {} prefill tokens computed for nothing, {} output tokens of requests that did not finish",
            run.lost.num_preemptions, run.lost.num_prefill_tokens, run.lost.num_output_tokens
        ),
    );
    if run.transfers.started > 0 {
        lines.add(
            "transfers",
            format!(
                "{} of {} arrived, {} blocks",
                run.transfers.completed, run.transfers.started, run.transfers.num_blocks
            ),
        );
    }
    lines.add("utilisation", format!("{:.1} %", run.utilisation * 100.0));
    if run.faults > 0 {
        lines.add("faults", run.faults);
    }
    lines.add("log digest", &run.digest);
    lines.into_text()
}

fn quantile_line(times: &Quantiles) -> String {
    let [mean, p50, p90, p99, max] =
        [times.mean, times.p50, times.p90, times.p99, times.max].map(duration);
    format!("mean {mean}, p50 {p50}, p90 {p90}, p99 {p99}, max {max}")
}

/// A time with a unit that suits it.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

const HEADER: [&str; 10] = [
    "run", "finished", "tokens/s", "goodput", "kept %", "TTFT p50", "TTFT p99", "ITL p50",
    "ITL p99", "hits",
];

fn table(runs: &[Summary]) -> String {
    let row = |run: &Summary| {
        [
            run.label.clone(),
            format!("{}/{}", run.ended.finished, run.ended.total()),
            format!("{:.1}", run.output_tokens_per_s),
            format!("{:.3}", run.goodput_per_s),
            run.slo_attainment
                .map_or("-".to_owned(), |share| format!("{:.1}", share * 100.0)),
            duration(run.ttft_s.p50),
            duration(run.ttft_s.p99),
            duration(run.itl_s.p50),
            duration(run.itl_s.p99),
            format!("{:.4}", run.hit_rate.token_weighted),
        ]
    };
    let rows: Vec<_> = std::iter::once(HEADER.map(str::to_owned))
        .chain(runs.iter().map(row))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..HEADER.len()).filter_map(width).collect();
    let line = |row: &[String; HEADER.len()]| {
        let cells =
            row.iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| match column {
                    0 => format!("{cell:<width$}"),
                    _ => format!("{cell:>width$}"),
                });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
