//! A TCP stream that gives up on peers that stand still: heads that do not arrive, readers that accept nothing.
//!
//! hyper's own timer runs from the moment a connection is idle; one for the head of a request must run from
//! its first byte, so it lives here. Bodies have a timeout of their own where they are read.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Counts the beginnings and ends of the requests on one connection: odd while one is served.
#[derive(Debug, Default)]
pub struct RequestClock(AtomicU64);

impl RequestClock {
    /// A request's head has arrived, or its answer has been handed over.
    pub fn turn(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A TCP stream with timeouts.
pub struct TimedStream {
    stream: TcpStream,
    clock: Arc<RequestClock>,
    seen: u64,
    head: Timer,
    write: Timer,
}

impl TimedStream {
    /// The head of the first request is due within `header_timeout` from now.
    pub fn new(
        stream: TcpStream,
        clock: Arc<RequestClock>,
        header_timeout: Duration,
        write_timeout: Duration,
    ) -> Self {
        let mut head = Timer::new(header_timeout);
        head.start();
        TimedStream {
            seen: clock.now(),
            stream,
            clock,
            head,
            write: Timer::new(write_timeout),
        }
    }

    /// Forgets the head's timer once that head has become a request.
    fn follow_clock(&mut self) {
        let now = self.clock.now();
        if now != self.seen {
            self.seen = now;
            self.head.stop();
        }
    }

    fn expects_head(&self) -> bool {
        self.seen.is_multiple_of(2)
    }

    fn watch_write<T>(&mut self, context: &mut Context, written: Poll<T>) -> Poll<Result<T>> {
        match written {
            Poll::Ready(result) => {
                self.write.stop();
                Poll::Ready(Ok(result))
            }
            Poll::Pending => {
                self.write.start();
                ready!(self.write.poll(context));
                Poll::Ready(Err(timed_out("the reader accepted nothing")))
            }
        }
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.follow_clock();
        match read {
            Poll::Ready(result) => {
                if self.expects_head() && buffer.filled().len() > before {
                    self.head.start();
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(self.head.poll(context));
                Poll::Ready(Err(timed_out("the head of a request did not arrive")))
            }
        }
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch_write(context, written).map(|result| result?)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch_write(context, written).map(|result| result?)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::TimedOut, what)
}

/// A deadline that can be set, cleared and awaited.
struct Timer {
    length: Duration,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Timer {
    fn new(length: Duration) -> Self {
        Timer {
            length,
            sleep: None,
        }
    }

    /// Starts unless it runs already.
    fn start(&mut self) {
        let length = self.length;
        self.sleep
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + length)));
    }

    fn stop(&mut self) {
        self.sleep = None;
    }

    /// Ready once the deadline has passed; never while none is set.
    fn poll(&mut self, context: &mut Context) -> Poll<()> {
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().poll(context),
            None => Poll::Pending,
        }
    }
}
