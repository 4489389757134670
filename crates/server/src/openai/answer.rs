//! Delivers an answer: whole, or streamed as it comes. One enum over the endpoints that generate.

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::chat::ChatAnswer;
use super::completions::CompletionAnswer;
use super::errors::{ApiError, ApiResult};
use super::shape::{AnswerShape, Delivery};
use crate::http::request_name::Warnings;
use crate::http::sse::{Refused, SseSink, write_done, write_event};
use crate::running::{PromptEvent, Running};

/// Encoded bytes after which a burst of events is handed on.
const MAX_BURST_BYTES: usize = 16 << 10;

/// An answer in the making.
pub enum Answer {
    /// Of `/v1/chat/completions`.
    Chat(ChatAnswer),
    /// Of `/v1/completions`.
    Completion(CompletionAnswer),
}

impl Answer {
    fn shape(&self) -> &AnswerShape {
        match self {
            Answer::Chat(answer) => &answer.shape,
            Answer::Completion(answer) => &answer.shape,
        }
    }

    /// Adds an event to a whole answer.
    fn collect(&mut self, event: PromptEvent) {
        match self {
            Answer::Chat(answer) => answer.collect(event),
            Answer::Completion(answer) => answer.collect(event),
        }
    }

    /// The whole answer as JSON.
    fn whole(&self) -> Vec<u8> {
        match self {
            Answer::Chat(answer) => answer.whole(),
            Answer::Completion(answer) => answer.whole(),
        }
    }

    /// Appends the chunks that an event causes.
    fn write_chunks(&mut self, event: PromptEvent, out: &mut Vec<u8>) {
        match self {
            Answer::Chat(answer) => answer.write_chunks(event, out),
            Answer::Completion(answer) => answer.write_chunks(event, out),
        }
    }

    /// Appends what follows the last choice's end.
    fn write_end(&self, out: &mut Vec<u8>) {
        match self {
            Answer::Chat(answer) => answer.write_end(out),
            Answer::Completion(answer) => answer.write_end(out),
        }
        write_done(out);
    }
}

/// Runs a request to its end, or starts to stream it. An error before the first event is a plain HTTP error.
pub async fn deliver(
    mut running: Running,
    mut answer: Answer,
    max_waiting: usize,
) -> ApiResult<Response> {
    let warnings = Warnings(answer.shape().warnings.clone());
    let mut response = match answer.shape().delivery {
        Delivery::Whole => {
            while let Some(event) = running.next().await {
                answer.collect(event?);
            }
            json_response(answer.whole())
        }
        Delivery::Stream(_) => {
            let first = running.next().await.transpose()?;
            let (sink, body) = crate::http::sse::channel(max_waiting);
            tokio::spawn(pump(running, answer, first, sink));
            event_stream_response(Body::new(body))
        }
    };
    response.extensions_mut().insert(warnings);
    Ok(response)
}

/// Moves events to the reader until either side ends. Returning drops `running`, which aborts what still runs.
async fn pump(mut running: Running, mut answer: Answer, first: Option<PromptEvent>, sink: SseSink) {
    let mut out = Vec::new();
    let mut next = first.map(Ok);
    loop {
        match next {
            Some(Ok(event)) => answer.write_chunks(event, &mut out),
            Some(Err(error)) => return finish_with_error(&error, out, sink),
            None => {
                answer.write_end(&mut out);
                return sink.finish(out);
            }
        }
        if out.len() < MAX_BURST_BYTES
            && let Some(ready) = running.next_ready()
        {
            next = ready;
            continue;
        }
        if let Err(refused) = sink.push(&mut out) {
            return log_abort(refused);
        }
        next = tokio::select! {
            biased;
            event = running.next() => event,
            () = sink.reader_gone() => return log_abort(Refused::ReaderGone),
        };
    }
}

fn log_abort(refused: Refused) {
    tracing::info!(reason = refused.as_str(), "a stream was aborted");
}

fn finish_with_error(error: &ApiError, mut out: Vec<u8>, sink: SseSink) {
    tracing::info!(error = %error.message, "a stream ended with an error");
    write_event(&error.body(), &mut out);
    sink.finish(out);
}

/// A JSON body that is already encoded.
pub fn json_response(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn event_stream_response(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, [("x-accel-buffering", "no")], body).into_response()
}
