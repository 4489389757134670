//! The other commands, run as a person or a script would.

use std::process::{Command, Output, Stdio};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millpond"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn chat_answers_a_prompt_on_standard_output() {
    let ask = [
        "chat",
        "--model",
        "mock",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "hello",
    ];
    let output = run(&ask);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output).trim_end_matches('\n').chars().count(), 5);
    assert_eq!(stdout(&output), stdout(&run(&ask)), "greedy answers repeat");
    assert_eq!(stderr(&output), "");
}

#[test]
fn complete_continues_a_text() {
    let output = run(&[
        "complete",
        "--model",
        "mock",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "abc",
    ]);
    assert_eq!(
        (output.status.code(), stdout(&output).as_str()),
        (Some(0), "defg\n"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn mistakes_are_one_line_and_a_code() {
    for arguments in [
        &["chat", "--model", "mock", "--temperature", "9", "x"][..],
        &["chat", "--model", "no/such/file.gguf", "x"],
        &["inspect", "no-such-file.gguf"],
        &[
            "serve",
            "--model",
            "mock",
            "--log-level",
            "error",
            "--host",
            "256.0.0.1",
            "--port",
            "0",
        ],
    ] {
        let output = run(arguments);
        let code = output.status.code().expect("no signal");
        assert!((1..=99).contains(&code), "{arguments:?}: {code}");
        assert_eq!(
            stderr(&output).trim_end().lines().count(),
            1,
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn malformed_model_files_are_refused_politely() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/bad_models"
    );
    let manifest =
        std::fs::read_to_string(format!("{folder}/MANIFEST.json")).expect("the fixtures");
    let manifest: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&manifest).expect("JSON");
    for (name, entry) in &manifest {
        let output = run(&["inspect", &format!("{folder}/{name}")]);
        let code = output
            .status
            .code()
            .unwrap_or_else(|| panic!("{name} ends by a signal"));
        match entry["valid"].as_bool() {
            Some(true) => assert_eq!(code, 0, "{name}: {}", stderr(&output)),
            Some(false) => assert!((1..=99).contains(&code), "{name}: {code}"),
            None => assert!((0..=99).contains(&code), "{name}: {code}"),
        }
        let num_lines = stderr(&output).trim_end().lines().count();
        assert_eq!(
            num_lines,
            usize::from(code != 0),
            "{name}: {}",
            stderr(&output)
        );
    }
    assert!(manifest.len() >= 60, "{} files", manifest.len());
}
