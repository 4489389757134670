//! One connection from its first byte to its last.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use hyper::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::limits::{HttpLimits, MAX_HEAD_BYTES, MAX_HEADERS};
use super::timed_stream::{RequestClock, TimedStream};

/// Serves one connection until it ends. Once `draining` is cancelled it closes after the request under way.
pub async fn serve(
    stream: TcpStream,
    router: axum::Router,
    limits: &HttpLimits,
    draining: CancellationToken,
) {
    let clock = Arc::new(RequestClock::default());
    let io = TimedStream::new(
        stream,
        Arc::clone(&clock),
        limits.header_timeout,
        limits.slow_reader_timeout,
    );
    let service = service_fn(|request: Request<Incoming>| {
        clock.turn();
        let turn_at_end = TurnAtEnd(Arc::clone(&clock));
        let response = router.clone().oneshot(request.map(Body::new));
        async move {
            let response = response.await?;
            Ok::<_, std::convert::Infallible>(response.map(|inner| ClockedBody {
                inner,
                _turn_at_end: turn_at_end,
            }))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.keep_alive.max(limits.header_timeout))
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(io), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = draining.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
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
