//! Malformed model files: each is refused with an error that names the field, quickly, and nothing panics.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millpond_engine::loader::{self, LoadError};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/bad_models")
}

/// Seconds on a loaded test machine; alone a file takes milliseconds.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// What the manifest asks for: `Some(true)` parses, `Some(false)` is refused, `None` is either.
fn check(name: &str, valid: Option<bool>) {
    let started = Instant::now();
    let result = loader::inspect(&fixtures().join(name));
    assert!(started.elapsed() < TIME_LIMIT, "{name} took too long");
    match (valid, result) {
        (Some(true), Err(error)) => panic!("{name} is valid: {error}"),
        (Some(false), Ok(_)) => panic!("{name} must be refused"),
        (Some(false), Err(error)) => check_error(name, &error),
        (Some(true) | None, _) => {}
    }
}

/// A typed error of one line that names file and field.
fn check_error(name: &str, error: &LoadError) {
    let line = error.to_string();
    assert!(!line.contains('\n'), "{name}: {line}");
    assert!(line.contains(name), "{name} is not named: {line}");
    match error {
        LoadError::Malformed { field, problem, .. } => {
            assert!(!field.is_empty() && !problem.is_empty(), "{name}: {line}");
        }
        other => panic!("{name}: not an error of format: {other:?}"),
    }
}

#[test]
fn the_manifest_is_kept() {
    let manifest = std::fs::read(fixtures().join("MANIFEST.json")).expect("the manifest exists");
    let manifest: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&manifest).expect("the manifest is an object");
    assert_eq!(manifest.len(), 60);
    for (name, entry) in &manifest {
        check(
            name,
            entry.get("valid").and_then(serde_json::Value::as_bool),
        );
    }
}

/// One line per file: what a person reads.
#[test]
fn every_refusal_names_the_field_at_fault() {
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .expect("the fixtures exist")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| name != "MANIFEST.json")
        .collect();
    names.sort();
    let refusal = |name: &String| {
        let path = fixtures().join(name);
        let line = loader::inspect(&path).err()?.to_string();
        Some(line.replace(&path.display().to_string(), name))
    };
    let lines: Vec<String> = names.iter().filter_map(refusal).collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn paths_that_are_no_model_are_refused_without_opening() {
    let check = |path: &Path, expected: &str| {
        let started = Instant::now();
        let line = loader::inspect(path).expect_err("no model").to_string();
        assert!(started.elapsed() < TIME_LIMIT, "{} blocks", path.display());
        assert!(line.contains(expected), "{expected:?} not in {line:?}");
    };
    check(
        Path::new("/nonexistent/model.gguf"),
        "/nonexistent/model.gguf",
    );
    check(Path::new("/dev/zero"), "not a regular file");
    let empty = tempfile::tempdir().expect("a temporary folder");
    check(empty.path(), "neither model.safetensors nor a GGUF file");
}

#[test]
fn a_safetensors_file_alone_can_be_inspected_and_not_opened() {
    let path = fixtures().join("st_ok.safetensors");
    let inspection = loader::inspect(&path).expect("valid");
    assert_eq!(inspection.num_parameters(), 2);
    let error = loader::open(&path)
        .expect_err("no configuration")
        .to_string();
    assert!(error.contains("config.json"), "{error}");
}
