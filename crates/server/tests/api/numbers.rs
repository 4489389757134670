//! A-T01: every numeric field with every hostile value is a 400 that names the field, and the engine never
//! hears of it.

use crate::server::Server;

/// No number field takes any of these.
const NEVER: &[&str] = &[
    "NaN",
    "Infinity",
    "-Infinity",
    "1e308",
    "-1e308",
    "1e999",
    "-1e999",
    "18446744073709551616",
    "\"1\"",
    "true",
    "[]",
    "{}",
    "[1]",
    "1e",
];

/// Fields of whole numbers take none of these either.
const NEVER_WHOLE: &[&str] = &[
    "9223372036854775808",
    "-9223372036854775809",
    "1.5",
    "0.0",
    "1e0",
];

struct Field {
    name: &'static str,
    whole: bool,
    /// Values just outside the documented range.
    outside: &'static [&'static str],
    /// Values at the edges of the range, which are accepted.
    edges: &'static [&'static str],
    /// Fields that it needs beside itself.
    with: &'static str,
}

const fn number(
    name: &'static str,
    outside: &'static [&'static str],
    edges: &'static [&'static str],
) -> Field {
    Field {
        name,
        whole: false,
        outside,
        edges,
        with: "",
    }
}

const fn whole(
    name: &'static str,
    outside: &'static [&'static str],
    edges: &'static [&'static str],
) -> Field {
    Field {
        name,
        whole: true,
        outside,
        edges,
        with: "",
    }
}

const SHARED: &[Field] = &[
    number(
        "temperature",
        &["-0.01", "2.01", "-1", "9223372036854775808"],
        &["0", "2", "0.5", "null"],
    ),
    number(
        "top_p",
        &["0", "-0.1", "1.01", "1e-60", "9223372036854775808"],
        &["1", "0.01"],
    ),
    number(
        "min_p",
        &["-0.1", "1.01", "9223372036854775808"],
        &["0", "1"],
    ),
    number(
        "frequency_penalty",
        &["-2.01", "2.01", "9223372036854775808"],
        &["-2", "2"],
    ),
    number(
        "presence_penalty",
        &["-2.01", "2.01", "9223372036854775808"],
        &["-2", "2"],
    ),
    number(
        "repetition_penalty",
        &["0", "-1", "2.01", "9223372036854775808"],
        &["0.5", "2"],
    ),
    whole(
        "top_k",
        &["-2", "4294967296"],
        &["-1", "0", "1", "4294967295"],
    ),
    whole("n", &["0", "-1", "9"], &["1", "8"]),
    whole("max_tokens", &["-1", "1000000", "4294967296"], &["1", "9"]),
    whole("min_tokens", &["-1", "1000000", "4294967296"], &["0", "8"]),
    whole(
        "seed",
        &[],
        &["0", "-1", "9223372036854775807", "-9223372036854775808"],
    ),
    whole("prompt_logprobs", &["-1", "21"], &["0", "20"]),
    whole(
        "priority",
        &["2147483648", "-2147483649"],
        &["-1", "2147483647", "-2147483648"],
    ),
    whole("best_of", &["0", "2", "-1"], &["1"]),
];

const CHAT: &[Field] = &[
    whole(
        "max_completion_tokens",
        &["0", "-1", "1000000", "4294967296"],
        &["1"],
    ),
    Field {
        name: "top_logprobs",
        whole: true,
        outside: &["-1", "21"],
        edges: &["0", "20"],
        with: ",\"logprobs\":true",
    },
];

const COMPLETIONS: &[Field] = &[whole("logprobs", &["-1", "21"], &["0", "20"])];

/// Fields whose documented range has no upper end.
const UNBOUNDED: &[Field] = &[number("timeout", &["0", "-1"], &["1", "0.5"])];

/// (path, what every body has, fields)
const DOORS: &[(&str, &str, &[&[Field]])] = &[
    (
        "/v1/chat/completions",
        "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]",
        &[SHARED, CHAT, UNBOUNDED],
    ),
    (
        "/v1/completions",
        "\"prompt\":\"a\"",
        &[SHARED, COMPLETIONS, UNBOUNDED],
    ),
];

fn hostile(field: &Field) -> Vec<&'static str> {
    let is_unbounded = UNBOUNDED
        .iter()
        .any(|unbounded| unbounded.name == field.name);
    let never = NEVER
        .iter()
        .filter(|value| !is_unbounded || !["1e308", "18446744073709551616"].contains(value));
    let whole: &[&str] = if field.whole { NEVER_WHOLE } else { &[] };
    never.chain(whole).chain(field.outside).copied().collect()
}

#[tokio::test]
async fn hostile_numbers_are_refused_by_name() {
    let server = Server::start(&[]);
    let steps = server.metric("vllm:iteration_tokens_total_count").await;
    let mut num_checked = 0;
    for (path, base, tables) in DOORS {
        for field in tables.iter().copied().flatten() {
            for value in hostile(field) {
                let body = format!("{{{base},\"{}\":{value}{}}}", field.name, field.with);
                let answer = server.post_text(path, body.clone()).await;
                assert_eq!(answer.status, 400, "{body}: {}", answer.text);
                assert_eq!(
                    answer.param().as_deref(),
                    Some(field.name),
                    "{body}: {}",
                    answer.text
                );
                num_checked += 1;
            }
        }
    }
    assert!(num_checked > 500, "{num_checked} cases");
    assert_eq!(
        server.metric("vllm:iteration_tokens_total_count").await,
        steps,
        "the engine did nothing"
    );
}

#[tokio::test]
async fn the_edges_of_every_range_are_accepted() {
    let server = Server::start(&[]);
    for (path, base, tables) in DOORS {
        for field in tables.iter().copied().flatten() {
            for value in field.edges {
                let limit = match field.name {
                    "max_tokens" | "max_completion_tokens" => "",
                    _ => ",\"max_tokens\":8",
                };
                let body = format!("{{{base}{limit},\"{}\":{value}{}}}", field.name, field.with);
                let answer = server.post_text(path, body.clone()).await;
                assert_eq!(answer.status, 200, "{body}: {}", answer.text);
            }
        }
    }
}

#[tokio::test]
async fn biases_are_numbers_for_tokens_that_exist() {
    let server = Server::start(&[]);
    for bias in [
        "{\"1\":100.5}",
        "{\"1\":-101}",
        "{\"1\":NaN}",
        "{\"1\":1e308}",
        "{\"1\":\"1\"}",
        "{\"-1\":1}",
        "{\"x\":1}",
        "{\"1000000\":1}",
        "{\"9223372036854775808\":1}",
        "{\"18446744073709551616\":1}",
        "{\"1.5\":1}",
        "[1]",
        "7",
    ] {
        let body = format!("{{\"prompt\":\"a\",\"logit_bias\":{bias}}}");
        let answer = server.post_text("/v1/completions", body).await;
        assert_eq!(
            (answer.status, answer.param().as_deref()),
            (400, Some("logit_bias")),
            "{bias}"
        );
    }
    let body = "{\"prompt\":\"a\",\"logit_bias\":{\"1\":-100,\"2\":100}}";
    assert_eq!(server.post_text("/v1/completions", body).await.status, 200);
}
