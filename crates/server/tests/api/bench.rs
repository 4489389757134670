//! `millpond bench` and `millpond doctor`, run as a person or a script would.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::server::Server;

fn run_with(environment: &[(&str, &Path)], arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millpond"))
        .args(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts")
}

/// Standard output of a run that must succeed.
fn stdout(arguments: &[&str]) -> String {
    let output = run_with(&[], arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The document of a run that must succeed.
fn document(arguments: &[&str]) -> Value {
    let text = stdout(arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A run that must fail, with an error that holds `expected` and no reason twice.
fn refused(arguments: &[&str], code: i32, expected: &str) {
    let output = run_with(&[], arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(error.contains(expected), "{arguments:?}: {error}");
    assert!(
        error.matches("os error").count() <= 1,
        "{arguments:?}: {error}"
    );
}

/// A rate that was measured: positive, and its median within its range.
fn assert_measured(spread: &Value) {
    let [min, median, max] = ["min", "median", "max"].map(|name| spread[name].as_f64());
    assert!(
        min > Some(0.0) && min <= median && median <= max,
        "{spread}"
    );
}

fn assert_ceilings(report: &Value) {
    let ceilings = &report["ceilings"];
    for rate in [
        "read_one_thread",
        "read_all_threads",
        "int8_macs",
        "f32_macs",
    ] {
        assert_measured(&ceilings[rate]);
    }
    assert_eq!(ceilings["working_set_bytes"], 1 << 20);
}

const SMALL: [&str; 4] = ["--working-set", "1", "--rounds", "2"];

#[test]
fn a_server_is_loaded_and_counted() {
    let server = Server::start(&[]);
    let url = server.url("");
    let arguments = [
        "bench",
        "serve",
        "--json",
        "--base-url",
        &url,
        "--streams",
        "1,3",
        "--prompt-tokens",
        "200",
        "--shared-prefix",
        "100",
        "--output-tokens",
        "5",
    ];
    let report = document(&[&arguments[..], &SMALL].concat());
    assert_ceilings(&report);
    assert_eq!(report["setting"]["model"], "mock");
    let levels = report["results"].as_array().expect("a list");
    // Two rounds of four requests.
    let counts = |level: &Value| {
        ["num_streams", "num_requests", "num_failed"].map(|name| level[name].as_u64())
    };
    assert_eq!(
        levels.iter().map(counts).collect::<Vec<_>>(),
        [[Some(1), Some(8), Some(0)], [Some(3), Some(8), Some(0)],]
    );
    for level in levels {
        // The mock model's tokens are bytes, and words are of several lengths.
        let prompt_tokens = level["prompt_tokens"].as_f64();
        assert!(
            (Some(100.0)..Some(300.0)).contains(&prompt_tokens),
            "{level}"
        );
        assert_measured(&level["output_tokens_per_s"]);
        assert_measured(&level["total_tokens_per_s"]);
        for latency in [&level["ttft_s"], &level["itl_s"]] {
            let [p50, p99] = ["p50", "p99"].map(|name| latency[name].as_f64());
            assert!(Some(0.0) <= p50 && p50 <= p99, "{level}");
        }
        assert_eq!(level["share_of_peak"], Value::Null, "no weights were named");
    }
    // One stream: whoever comes later finds the prefix.
    assert!(
        levels[0]["cached_tokens"].as_f64() > Some(0.0),
        "{}",
        levels[0]
    );
}

#[test]
fn results_are_a_table_unless_json_is_asked_for() {
    let server = Server::start(&[]);
    let url = server.url("/v1/");
    let arguments = [
        "bench",
        "serve",
        "--base-url",
        &url,
        "--streams",
        "2",
        "--output-tokens",
        "3",
    ];
    let text = stdout(&[&arguments[..], &SMALL].concat());
    let lines: Vec<&str> = text.lines().collect();
    for (line, expected) in lines.iter().zip([
        "ceilings",
        "read, 1 thread",
        "read, ",
        "int8",
        "f32",
        "mock at",
        "streams",
    ]) {
        assert!(line.trim_start().starts_with(expected), "{text}");
    }
    let cells: Vec<&str> = lines[7].split_whitespace().collect();
    assert_eq!(cells[..3], ["2", "8", "0"], "{text}");
}

#[tokio::test]
async fn requests_that_fail_are_counted_and_the_run_fails() {
    let server = Server::start(&["--max-waiting", "1", "--max-sequences", "1"]);
    let url = server.url("");
    let arguments = [
        "bench",
        "serve",
        "--base-url",
        &url,
        "--streams",
        "16",
        "--output-tokens",
        "4000",
    ];
    let output = run_with(&[], &[&arguments[..], &SMALL].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{error}");
    assert!(
        error.contains("requests failed; the first: /v1/completions answered 503"),
        "{error}"
    );
}

#[test]
fn servers_that_cannot_be_measured_are_named() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = closed.local_addr().expect("an address").to_string();
    drop(closed);
    let url = format!("http://{address}");
    refused(
        &["bench", "serve", "--base-url", &url],
        69,
        &format!("no server at {address}"),
    );
    refused(
        &["bench", "serve", "--base-url", "example.org"],
        69,
        "--base-url example.org: must begin with http://",
    );
    let server = Server::start(&[]);
    let url = server.url("/elsewhere");
    refused(
        &["bench", "serve", "--base-url", &url],
        69,
        "/elsewhere/v1/models answered 404",
    );
    let url = server.url("");
    refused(
        &["bench", "serve", "--base-url", &url, "--model", "gpt"],
        69,
        "gpt",
    );
}

#[test]
fn a_model_is_measured_in_process() {
    let arguments = [
        "bench",
        "offline",
        "--json",
        "--model",
        "mock",
        "--prefill",
        "32",
        "--decode",
        "1x8",
        "--output-tokens",
        "16",
        "--threads",
        "1",
    ];
    let report = document(&[&arguments[..], &SMALL].concat());
    assert_ceilings(&report);
    assert_eq!(report["setting"]["isa"], "none");
    let results = report["results"].as_array().expect("a list");
    let cases = [
        json!({"case": "prefill", "prompt_tokens": 32}),
        json!({"case": "decode", "num_sequences": 1, "depth": 8, "output_tokens": 16}),
    ];
    assert_eq!(results.len(), cases.len());
    for (result, case) in results.iter().zip(&cases) {
        for (name, value) in case.as_object().expect("an object") {
            assert_eq!(&result[name], value, "{result}");
        }
        assert_measured(&result["tokens_per_s"]);
        assert_eq!(
            result["share_of_bandwidth"],
            Value::Null,
            "the mock model has no weights"
        );
    }
}

#[test]
fn a_model_with_weights_is_held_against_the_ceilings() {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/tiny/llama"
    );
    let arguments = [
        "bench",
        "offline",
        "--json",
        "--model",
        model,
        "--prefill",
        "16",
        "--decode",
        "1x8",
        "--output-tokens",
        "16",
        "--threads",
        "1",
    ];
    let report = document(&[&arguments[..], &SMALL].concat());
    let setting = &report["setting"];
    assert!(setting["weight_bytes"].as_u64() > Some(0), "{setting}");
    assert!(setting["macs_per_token"].as_u64() > Some(0), "{setting}");
    let shares = |result: &Value| {
        ["share_of_bandwidth", "share_of_peak"].map(|name| result[name].as_f64() > Some(0.0))
    };
    let results = report["results"].as_array().expect("a list");
    // Prefill reads the weights too seldom to be held against the bandwidth.
    assert_eq!(
        results.iter().map(shares).collect::<Vec<_>>(),
        [[false, true], [true, true]],
        "{results:?}"
    );
}

#[test]
fn kernels_are_measured_with_their_shares() {
    let arguments = [
        "bench",
        "kernel",
        "--json",
        "--types",
        "q4_1,f32",
        "--shapes",
        "64x64",
        "--rows",
        "1,4",
        "--isa",
        "portable",
        "--threads",
        "1",
    ];
    let report = document(&[&arguments[..], &SMALL].concat());
    assert_ceilings(&report);
    assert_eq!(report["setting"]["isa"], "portable");
    let results = report["results"].as_array().expect("a list");
    let name = |result: &Value| {
        format!("{} {} {}", result["kernel"], result["case"], result["rows"]).replace('"', "")
    };
    assert_eq!(
        results.iter().map(name).collect::<Vec<_>>(),
        [
            "matmul Q4_1 64x64 1",
            "matmul Q4_1 64x64 4",
            "matmul F32 64x64 1",
            "matmul F32 64x64 4",
            "attention f16 depth 128 1",
            "attention f16 depth 1152 1",
            "attention f16 depth 512 512",
        ]
    );
    for result in results {
        assert_measured(&result["seconds"]);
        for share in ["share_of_peak", "share_of_bandwidth"] {
            assert!(result[share].as_f64() > Some(0.0), "{result}");
        }
    }
}

#[test]
fn bad_flags_of_bench_are_named() {
    for (arguments, code, expected) in [
        (&["bench"][..], 2, "Usage: millpond bench"),
        (&["bench", "fast"], 2, "'fast'"),
        (&["bench", "kernel", "--rounds", "0"], 2, "--rounds"),
        (
            &["bench", "kernel", "--types", "q9"],
            2,
            "must be one of F32, F16",
        ),
        (&["bench", "kernel", "--shapes", "5"], 2, "as in 1536x576"),
        (&["bench", "kernel", "--isa", "z80"], 2, "--isa"),
        (
            &[
                "bench",
                "kernel",
                "--working-set",
                "1",
                "--types",
                "q4_k",
                "--shapes",
                "64x64",
            ],
            1,
            "--types Q4_K: its blocks of 256 do not divide 64 inputs",
        ),
        (
            &["bench", "offline", "--model", "no/such.gguf"],
            69,
            "no/such.gguf",
        ),
        (
            &["bench", "offline", "--model", "mock", "--decode", "65x8"],
            1,
            "--decode 65x8: only 64 sequences run at once (--max-sequences)",
        ),
        (
            &[
                "bench",
                "offline",
                "--model",
                "mock",
                "--kv-tokens",
                "64",
                "--decode",
                "2x8",
            ],
            1,
            "--decode 2x8: the keys and values need 288 tokens (--kv-tokens)",
        ),
        (&["bench", "serve", "--streams", "0"], 2, "--streams"),
        (
            &["bench", "serve", "--shared-prefix", "129"],
            1,
            "--shared-prefix 129 exceeds --prompt-tokens 128",
        ),
    ] {
        refused(arguments, code, expected);
    }
}

/// What `doctor` says of a machine with this cache folder.
fn doctor(cache: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let all = [&["doctor"], arguments].concat();
    let output = run_with(&[("MILLPOND_CACHE", cache)], &all);
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

#[test]
fn the_doctor_finds_nothing_where_all_is_well() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (code, text) = doctor(folder.path(), &["--threads", "1", "--isa", "portable"]);
    assert_eq!(code, Some(0), "{text}");
    for expected in [
        "portable (chosen)".to_owned(),
        "threads          1 of ".to_owned(),
        format!("{}, writable", folder.path().display()),
        "default, not here yet: 93.8 MiB are fetched on first use".to_owned(),
        "can serve        yes".to_owned(),
    ] {
        assert!(text.contains(&expected), "{expected}: {text}");
    }

    let (code, text) = doctor(folder.path(), &["--json", "--model", "mock"]);
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((code, &report["problems"]), (Some(0), &json!([])));
    assert_eq!(
        report["model"],
        json!({"asked": "mock", "state": "builtin"})
    );
    let sets = report["kernels"]["instruction_sets"]
        .as_array()
        .expect("a list");
    assert_eq!(sets[0], json!({"name": "portable", "is_available": true}));
    let best = sets
        .iter()
        .rfind(|set| set["is_available"] == true)
        .expect("portable at least");
    assert_eq!(report["kernels"]["chosen"], best["name"]);
    assert!(
        report["machine"]["memory_bytes"].as_u64() >= report["machine"]["available_bytes"].as_u64()
    );
}

#[test]
fn the_doctor_names_what_prevents_serving() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "no folder, no model").expect("writable");
    let inside = file.join("cache");
    let path = file.to_str().expect("a plain path");
    for (cache, arguments, expected) in [
        (
            inside.as_path(),
            &[][..],
            "problem          the model must be fetched, but: ",
        ),
        (
            folder.path(),
            &["--threads", "0"],
            "threads must be at least 1",
        ),
        (
            folder.path(),
            &["--model", "no/such/model.gguf"],
            "problem          no/such/model.gguf",
        ),
        (folder.path(), &["--model", path], "problem  "),
    ] {
        let (code, text) = doctor(cache, arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {text}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
        assert!(text.ends_with("can serve        no\n"), "{text}");
    }
    // Nothing has to be fetched, so nothing has to be written.
    let (code, text) = doctor(&inside, &["--model", "mock"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("not writable"), "{text}");
}
