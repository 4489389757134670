//! `/metrics`: vLLM's names and edges, all there from the first scrape, and right after requests.

use serde_json::json;

use crate::server::Server;

const SIMPLE: &[&str] = &[
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:corrupted_requests_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
];

/// (name, label, values)
const LABELLED: &[(&str, &str, &[&str])] = &[
    (
        "vllm:num_requests_waiting_by_reason",
        "reason",
        &["capacity", "deferred"],
    ),
    (
        "vllm:engine_sleep_state",
        "sleep_state",
        &["awake", "weights_offloaded", "discard_all"],
    ),
    (
        "vllm:request_success_total",
        "finished_reason",
        &["stop", "length", "abort", "error"],
    ),
    (
        "vllm:admission_rejections_total",
        "reason",
        &["max_num_queued_reqs", "max_num_queued_tokens"],
    ),
    ("vllm:cache_config_info", "block_size", &["16"]),
    ("vllm:lora_requests_info", "max_lora", &["0"]),
    // The mock model has no kernels.
    ("millpond:kernels_info", "isa", &["none"]),
    ("millpond:kernels_info", "threads", &["1"]),
];

const FIRST_TOKEN: &str = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560 +Inf";
const TOKEN: &str =
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 +Inf";
const REQUEST: &str =
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 +Inf";
const LADDER: &str = "1 2 5 10 20 50 100 200 500 1000 2000 5000 +Inf";

const HISTOGRAMS: &[(&str, &str)] = &[
    ("vllm:time_to_first_token_seconds", FIRST_TOKEN),
    ("vllm:inter_token_latency_seconds", TOKEN),
    ("vllm:request_time_per_output_token_seconds", TOKEN),
    ("vllm:e2e_request_latency_seconds", REQUEST),
    ("vllm:request_queue_time_seconds", REQUEST),
    ("vllm:request_inference_time_seconds", REQUEST),
    ("vllm:request_prefill_time_seconds", REQUEST),
    ("vllm:request_decode_time_seconds", REQUEST),
    ("vllm:request_prompt_tokens", LADDER),
    ("vllm:request_generation_tokens", LADDER),
    ("vllm:request_max_num_generation_tokens", LADDER),
    ("vllm:request_params_max_tokens", LADDER),
    ("vllm:request_prefill_kv_computed_tokens", LADDER),
    ("vllm:request_params_n", "1 2 5 10 20 +Inf"),
    (
        "vllm:iteration_tokens_total",
        "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 +Inf",
    ),
];

fn label<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let start = line.find(&format!("{name}=\""))? + name.len() + 2;
    line[start..].split('"').next()
}

#[tokio::test]
async fn every_series_is_there_from_the_first_scrape() {
    let server = Server::start(&[]);
    let text = server.get("/metrics").await.text;
    let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for line in &series {
        assert_eq!(
            (label(line, "model_name"), label(line, "engine")),
            (Some("mock"), Some("0")),
            "{line}"
        );
    }
    let of = |name: &str| {
        series
            .iter()
            .copied()
            .filter(|line| line.starts_with(&format!("{name}{{")))
            .collect::<Vec<_>>()
    };
    for name in SIMPLE {
        assert_eq!(of(name).len(), 1, "{name}");
    }
    for (name, label_name, values) in LABELLED {
        let found: Vec<&str> = of(name)
            .iter()
            .filter_map(|line| label(line, label_name))
            .collect();
        let (mut found, mut values) = (found, values.to_vec());
        found.sort_unstable();
        values.sort_unstable();
        assert_eq!(found, values, "{name}");
    }
    for (name, edges) in HISTOGRAMS {
        let found: Vec<&str> = of(&format!("{name}_bucket"))
            .iter()
            .filter_map(|line| label(line, "le"))
            .collect();
        assert_eq!(found.join(" "), *edges, "{name}");
        assert_eq!(
            (
                of(&format!("{name}_sum")).len(),
                of(&format!("{name}_count")).len()
            ),
            (1, 1),
            "{name}"
        );
    }
}

#[tokio::test]
async fn counters_follow_what_was_done() {
    let server = Server::start(&[]);
    let answer = server
        .complete(json!({"n": 2, "max_tokens": 10, "seed": 1}))
        .await
        .json();
    let usage = &answer["usage"];
    assert_eq!(server.metric("vllm:prompt_tokens_total").await, 3.0);
    assert_eq!(
        Some(server.metric("vllm:generation_tokens_total").await),
        usage["completion_tokens"].as_f64()
    );
    assert_eq!(
        server.metric("vllm:request_generation_tokens_count").await,
        2.0
    );
    assert_eq!(server.metric("vllm:request_params_n_count").await, 1.0);
    assert_eq!(
        server.metric("vllm:request_params_max_tokens_sum").await,
        10.0
    );
    assert_eq!(
        server
            .metric("vllm:time_to_first_token_seconds_count")
            .await,
        2.0
    );
    assert_eq!(
        server
            .metric("vllm:inter_token_latency_seconds_count")
            .await,
        18.0
    );
    assert_eq!(
        server
            .metric("vllm:request_max_num_generation_tokens_sum")
            .await,
        10.0
    );
    server
        .metric_becomes("vllm:num_requests_running", 0.0)
        .await;
}
