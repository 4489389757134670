//! The Hub's client against a small server of ours on the loopback: the requests it makes, and giving up.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn id(spec: &str) -> HubId {
    HubId::parse(spec).expect("a valid id")
}

#[test]
fn ids_are_told_from_paths() {
    let check = |spec: &str, selector: Option<&str>| {
        let parsed = id(spec);
        assert_eq!(
            (parsed.repository().as_str(), parsed.selector.as_deref()),
            ("owner/na.me-1", selector)
        );
    };
    check("owner/na.me-1", None);
    check("owner/na.me-1:Q4_K_M", Some("Q4_K_M"));
    check("owner/na.me-1:sub/m.gguf", Some("sub/m.gguf"));
    for spec in [
        "",
        "name",
        "/abs/path",
        "./a",
        "../a",
        "a/b/c",
        "a/",
        "a/b:",
        "a/b:../c",
        "a/b:/c",
        "a b/c",
        "a/b\n",
    ] {
        assert_eq!(HubId::parse(spec), None, "{spec:?}");
    }
}

#[test]
fn one_model_is_chosen_or_the_choice_is_the_user_s() {
    let check = |files: &[&str], quantisation: Option<&str>, expected: Result<Choice, &str>| {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        match (choose(&files, quantisation), expected) {
            (Ok(choice), Ok(expected)) => assert_eq!(choice, expected, "{files:?}"),
            (Err(error), Err(expected)) => {
                assert!(error.to_string().contains(expected), "{files:?}: {error}");
            }
            (result, expected) => panic!("{files:?}: {result:?}, expected {expected:?}"),
        }
    };
    let file = |names: &[&str]| {
        Ok(Choice::Files(
            names.iter().map(|name| (*name).to_owned()).collect(),
        ))
    };
    let quants = ["m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-IQ4_K.gguf", "README.md"];
    check(
        &["config.json", "model.safetensors"],
        None,
        Ok(Choice::Folder),
    );
    check(
        &["config.json", "model.safetensors.index.json"],
        None,
        Ok(Choice::Folder),
    );
    check(&["config.json", "m.gguf"], None, file(&["m.gguf"]));
    check(&quants, Some("q4_k"), file(&["m-Q4_K.gguf"]));
    check(&quants, Some("Q4_K_M"), file(&["m-Q4_K_M.gguf"]));
    check(
        &quants,
        None,
        Err("name one file after a colon: m-Q4_K.gguf, m-Q4_K_M.gguf"),
    );
    check(&quants, Some("Q8_0"), Err("name one file"));
    check(&["m.gguf", "mmproj-m.gguf"], None, file(&["m.gguf"]));
    let parts = [
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf",
    ];
    check(&parts, None, file(&parts));
    check(&parts, Some("Q8_0"), file(&parts));
    check(
        &["config.json", "pytorch_model.bin"],
        None,
        Err("neither a GGUF file nor"),
    );
}

/// Serves (path, body) pairs as the Hub would; counts nothing, forgets nothing.
struct TestHub {
    hub: Hub,
    _cache: tempfile::TempDir,
}

impl TestHub {
    fn serve(files: &'static [(&'static str, &'static str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answer(stream, files));
            }
        });
        Self::at(&format!("http://{address}"))
    }

    fn at(endpoint: &str) -> Self {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let place = Some((endpoint.to_owned(), cache.path().to_owned()));
        TestHub {
            hub: Hub { place },
            _cache: cache,
        }
    }
}

/// Answers one request and closes.
fn answer(mut stream: TcpStream, files: &[(&str, &str)]) {
    let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
    let mut request = String::new();
    reader.read_line(&mut request).expect("a request");
    let mut line = String::new();
    while reader
        .read_line(&mut line)
        .is_ok_and(|num_read| num_read > 2)
    {
        line.clear();
    }
    let mut words = request.split_whitespace();
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let path = target.split('?').next().unwrap_or("");
    let file = |prefix: &str| {
        let name = path.strip_prefix(prefix)?;
        let (_, name) = name.split_once('/')?;
        files
            .iter()
            .find(|(path, _)| *path == name)
            .map(|(_, body)| (*body).to_owned())
    };
    let body = match path {
        _ if path.starts_with("/api/models/owner/name/tree/") => Some(tree(files)),
        _ if path.starts_with("/api/models/owner/name") => {
            Some(format!("{{\"sha\":\"{COMMIT}\"}}"))
        }
        _ => file("/owner/name/resolve/"),
    };
    let (status, body) = body.map_or(("404 Not Found", String::new()), |body| ("200 OK", body));
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"{:016x}\"\r\nX-Repo-Commit: {COMMIT}\r\nConnection: close\r\n\r\n",
        body.len(),
        body.len(),
    );
    let body = if method == "HEAD" { "" } else { &body };
    let _ = stream.write_all(format!("{head}{body}").as_bytes());
}

fn tree(files: &[(&str, &str)]) -> String {
    let entries: Vec<String> = files
        .iter()
        .map(|(path, body)| {
            format!(
                "{{\"type\":\"file\",\"oid\":\"0\",\"size\":{},\"path\":\"{path}\"}}",
                body.len()
            )
        })
        .collect();
    format!("[{}]", entries.join(","))
}

const QUANTISED: &[(&str, &str)] = &[("m-Q4_0.gguf", "four"), ("m-Q8_0.gguf", "eighteight")];

#[test]
fn a_file_is_chosen_downloaded_and_found_again() {
    let server = TestHub::serve(QUANTISED);
    let mut events = Vec::new();
    let path = server
        .hub
        .resolve(&id("owner/name:Q8_0"), &mut |event| events.push(event))
        .expect("fetched");
    assert_eq!(std::fs::read(&path).expect("readable"), b"eighteight");
    assert_eq!(
        path.file_name().and_then(|name| name.to_str()),
        Some("m-Q8_0.gguf")
    );
    let total = FetchProgress::Downloading {
        done: 10,
        total: 10,
    };
    assert!(events.contains(&total), "{events:?}");

    // The same cache with a dead endpoint: what is there is used.
    let dead = Hub {
        place: server
            .hub
            .place
            .clone()
            .map(|(_, cache)| (dead_endpoint(), cache)),
    };
    for spec in ["owner/name:m-Q8_0.gguf", "owner/name:Q8_0"] {
        let again = dead.resolve(&id(spec), &mut |_| {}).expect(spec);
        assert_eq!(std::fs::read(again).expect("readable"), b"eighteight");
    }
    assert!(
        dead.resolve(&id("owner/name:m-Q4_0.gguf"), &mut |_| {})
            .is_err()
    );
}

const FOLDER: &[(&str, &str)] = &[
    ("config.json", "{}"),
    ("tokenizer.json", "{ }"),
    ("model.safetensors", "weights"),
    ("onnx/model.onnx", "not wanted"),
];

#[test]
fn a_folder_is_downloaded_without_what_is_not_needed() {
    let server = TestHub::serve(FOLDER);
    let path = server
        .hub
        .resolve(&id("owner/name"), &mut |_| {})
        .expect("fetched");
    let mut names = names_in(&path).expect("a folder");
    names.sort();
    assert_eq!(
        names,
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
}

#[test]
fn a_card_s_file_goes_where_it_is_wanted() {
    let server = TestHub::serve(QUANTISED);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = ("owner/name", "main", "m-Q4_0.gguf");
    let path = server
        .hub
        .download_to(folder.path(), file, &mut |_| {})
        .expect("fetched");
    assert!(path.starts_with(folder.path()));
    assert_eq!(std::fs::read(path).expect("readable"), b"four");
    let missing = ("owner/name", "main", "m-Q2_K.gguf");
    assert!(
        server
            .hub
            .download_to(folder.path(), missing, &mut |_| {})
            .is_err()
    );
}

/// An address that refuses connections: a port that was free a moment ago.
fn dead_endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

#[test]
fn no_network_is_found_out_at_once() {
    let started = Instant::now();
    let server = TestHub::at(&dead_endpoint());
    let error = server
        .hub
        .resolve(&id("owner/name"), &mut |_| {})
        .expect_err("no server");
    assert!(started.elapsed() < Duration::from_secs(5), "{error}");
    assert!(!error.to_string().contains('\n'));
}
