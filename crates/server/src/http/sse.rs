//! Server-sent events: a bounded buffer between the task that writes events and the connection that sends
//! them.
//!
//! Bytes that wait are one buffer per stream, so that a slow connection gets larger writes and a slow reader
//! is noticed by size alone (A4). Nobody blocks: a writer that is too far ahead is refused.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use axum::body::Bytes;
use hyper::body::{Body, Frame};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

/// Appends one event that carries `data` as JSON.
pub fn write_event(data: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, data).expect("events are plain data with text keys");
    out.extend_from_slice(b"\n\n");
}

/// Appends OpenAI's end of a complete stream.
pub fn write_done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// A writer and the body that sends what it writes; at most `max_bytes` wait in between.
pub fn channel(max_bytes: usize) -> (SseSink, SseBody) {
    let shared = Arc::new(Shared {
        max_bytes,
        buffer: Mutex::default(),
        reader_gone: CancellationToken::new(),
    });
    let sink = SseSink {
        shared: Arc::clone(&shared),
    };
    (sink, SseBody { shared })
}

struct Shared {
    max_bytes: usize,
    buffer: Mutex<Buffer>,
    reader_gone: CancellationToken,
}

#[derive(Default)]
struct Buffer {
    waiting: Vec<u8>,
    end: Option<End>,
    reader: Option<Waker>,
}

/// How a stream ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// All of it was written.
    Complete,
    /// The rest will never come; the connection is to be broken off so that nobody takes it for complete.
    BrokenOff,
}

impl Shared {
    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        // Nothing that runs under the lock can leave the buffer half-changed.
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where events are written. Dropping it without `finish` breaks the stream off.
pub struct SseSink {
    shared: Arc<Shared>,
}

/// Why a writer must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// More than the limit waits for the reader.
    ReaderSlow,
    /// The connection is closed.
    ReaderGone,
}

impl Refused {
    /// For logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Refused::ReaderSlow => "the reader is too slow (max_stream_buffer_bytes)",
            Refused::ReaderGone => "the reader is gone",
        }
    }
}

impl SseSink {
    /// Moves `bytes` to the reader, leaving them empty.
    pub fn push(&self, bytes: &mut Vec<u8>) -> Result<(), Refused> {
        if self.shared.reader_gone.is_cancelled() {
            return Err(Refused::ReaderGone);
        }
        let mut buffer = self.shared.buffer();
        if buffer.waiting.is_empty() {
            std::mem::swap(&mut buffer.waiting, bytes);
        } else {
            buffer.waiting.append(bytes);
        }
        if buffer.waiting.len() > self.shared.max_bytes {
            return Err(Refused::ReaderSlow);
        }
        wake(buffer);
        Ok(())
    }

    /// Moves the last bytes to the reader and ends the stream.
    pub fn finish(self, mut bytes: Vec<u8>) {
        let mut buffer = self.shared.buffer();
        buffer.waiting.append(&mut bytes);
        buffer.end = Some(End::Complete);
        wake(buffer);
    }

    /// Returns once the connection is closed.
    pub async fn reader_gone(&self) {
        self.shared.reader_gone.cancelled().await;
    }
}

impl Drop for SseSink {
    fn drop(&mut self) {
        let mut buffer = self.shared.buffer();
        if buffer.end.is_none() {
            buffer.end = Some(End::BrokenOff);
            wake(buffer);
        }
    }
}

/// Wakes the reader after the lock is gone.
fn wake(mut buffer: MutexGuard<Buffer>) {
    let reader = buffer.reader.take();
    drop(buffer);
    if let Some(reader) = reader {
        reader.wake();
    }
}

/// The body of a streamed response. Dropping it tells the writer that the reader is gone.
pub struct SseBody {
    shared: Arc<Shared>,
}

/// The stream ended before it was complete.
#[derive(Debug, thiserror::Error)]
#[error("the stream was broken off")]
pub struct BrokenOff;

impl Body for SseBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let mut buffer = self.shared.buffer();
        match buffer.end {
            Some(End::BrokenOff) => Poll::Ready(Some(Err(BrokenOff))),
            Some(End::Complete) if buffer.waiting.is_empty() => Poll::Ready(None),
            None if buffer.waiting.is_empty() => {
                buffer.reader = Some(context.waker().clone());
                Poll::Pending
            }
            Some(End::Complete) | None => {
                let bytes = std::mem::take(&mut buffer.waiting);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
            }
        }
    }
}

impl Drop for SseBody {
    fn drop(&mut self) {
        self.shared.reader_gone.cancel();
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn events_arrive_in_order_and_whole() {
        let (sink, body) = channel(1024);
        let writer = tokio::spawn(async move {
            for index in 0..20 {
                let mut out = Vec::new();
                write_event(&index, &mut out);
                sink.push(&mut out).expect("the reader reads");
                tokio::task::yield_now().await;
            }
            let mut out = Vec::new();
            write_done(&mut out);
            sink.finish(out);
        });
        let bytes = body.collect().await.expect("complete").to_bytes();
        writer.await.expect("no panic");
        let expected: String = (0..20).map(|index| format!("data: {index}\n\n")).collect();
        assert_eq!(bytes, format!("{expected}data: [DONE]\n\n"));
    }

    #[tokio::test]
    async fn a_reader_that_is_too_slow_ends_the_stream_with_an_error() {
        let (sink, body) = channel(10);
        assert_eq!(sink.push(&mut vec![0; 8]), Ok(()));
        assert_eq!(sink.push(&mut vec![0; 8]), Err(Refused::ReaderSlow));
        drop(sink);
        assert!(body.collect().await.is_err());
    }

    #[tokio::test]
    async fn the_writer_learns_that_the_reader_is_gone() {
        let (sink, body) = channel(10);
        drop(body);
        sink.reader_gone().await;
        assert_eq!(sink.push(&mut vec![0]), Err(Refused::ReaderGone));
    }
}
