//! One connection from its first byte to its last.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::limits::{HttpLimits, MAX_HEAD_BYTES, MAX_HEADERS};
use super::timed_stream::{RequestClock, TimedStream};

/// Serves one connection until it ends. Once `closing` is cancelled it closes after the request under way, or at
/// once when there is none.
pub async fn serve(
    stream: TcpStream,
    router: axum::Router,
    limits: &HttpLimits,
    closing: CancellationToken,
) {
    let clock = Arc::new(RequestClock::default());
    let io = TimedStream::new(
        stream,
        Arc::clone(&clock),
        limits.header_timeout,
        limits.slow_reader_timeout,
    );
    let service = service_fn(|request| answer(request, router.clone(), Arc::clone(&clock)));
    let connection = protocol(limits).serve_connection(TokioIo::new(io), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// hyper's timer runs while a connection is idle, too, so it has the longer of the two times.
fn protocol(limits: &HttpLimits) -> http1::Builder {
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(limits.keep_alive.max(limits.header_timeout))
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS);
    protocol
}

async fn answer(
    request: Request<Incoming>,
    router: axum::Router,
    clock: Arc<RequestClock>,
) -> Result<Response<ClockedBody>, Infallible> {
    clock.turn();
    let turn_at_end = TurnAtEnd(clock);
    let response = router.oneshot(request.map(Body::new)).await?;
    Ok(response.map(|inner| ClockedBody {
        inner,
        _turn_at_end: turn_at_end,
    }))
}

/// Tells the clock when an answer has been handed over, or its request has been given up.
struct TurnAtEnd(Arc<RequestClock>);

impl Drop for TurnAtEnd {
    fn drop(&mut self) {
        self.0.turn();
    }
}

/// A response body that tells the clock when it ends.
struct ClockedBody {
    inner: Body,
    _turn_at_end: TurnAtEnd,
}

impl hyper::body::Body for ClockedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
