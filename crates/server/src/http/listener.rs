//! The accept loop, the caps on connections, and the way from serving to a clean end.
//!
//! Nothing that a peer does ends the loop: a process without free file descriptors waits and tries again.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::connection;
use crate::app::App;
use crate::openai::errors::{ApiError, ErrorKind};

/// Connections that the system may hold for us until we accept them.
const BACKLOG: u32 = 1024;

/// Bytes that the system holds for one reader. With a fixed size a reader that stands still is noticed after
/// so many bytes, not after as many as the system thinks fit.
const SEND_BUFFER_BYTES: u32 = 256 << 10;

/// Pauses after a failed accept, doubled up to the second.
const MIN_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// How long answers that are complete may take to leave once everything else has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Refusals that are being written at once; more are cut off without a word.
const MAX_REFUSALS: usize = 64;

/// How long a refused peer is listened to. Closing at once would destroy the refusal with unread data.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(500);

/// Binds the address.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts and serves connections.
pub struct Server {
    app: Arc<App>,
    router: axum::Router,
    connections: TaskTracker,
    slots: Arc<Slots>,
}

impl Server {
    /// A server without connections yet.
    pub fn new(app: Arc<App>, router: axum::Router) -> Self {
        Server {
            slots: Arc::new(Slots::new(&app)),
            app,
            router,
            connections: TaskTracker::new(),
        }
    }

    /// Accepts until the future is dropped.
    pub async fn accept(&self, listener: &TcpListener) -> Infallible {
        let mut pause = MIN_PAUSE;
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    pause = MIN_PAUSE;
                    self.admit(stream, peer.ip());
                }
                // The peer has gone already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_PAUSE);
                }
            }
        }
    }

    /// Serves a connection if there is a slot for it.
    fn admit(&self, stream: TcpStream, peer: IpAddr) {
        // Without it small events would wait for each other; a socket that refuses is served all the same.
        let _ = stream.set_nodelay(true);
        let slot = match Slots::take(&self.slots, peer) {
            Ok(slot) => slot,
            Err(error) => return self.refuse(stream, error),
        };
        let (app, router) = (Arc::clone(&self.app), self.router.clone());
        self.connections.spawn(async move {
            let closing = app.lifecycle.closing();
            connection::serve(stream, router, &app.limits, closing).await;
            drop(slot);
        });
    }

    fn refuse(&self, stream: TcpStream, error: ApiError) {
        let Ok(permit) = Arc::clone(&self.slots.refusals).try_acquire_owned() else {
            return;
        };
        tokio::spawn(async move {
            let refusal = write_refusal(stream, &error);
            // A peer that does not listen is cut off.
            let _ = tokio::time::timeout(REFUSAL_TIMEOUT, refusal).await;
            drop(permit);
        });
    }

    /// Waits for running requests, but not beyond `timeout`; then ends them and lets answers leave.
    pub async fn drain(&self, timeout: Duration) {
        self.app.lifecycle.drain();
        self.app.llm.drain();
        let live = &self.app.live;
        tracing::info!(running = live.len(), "draining");
        if tokio::time::timeout(timeout, live.idle()).await.is_err() {
            tracing::warn!(running = live.len(), "the drain timeout has passed");
        }
        self.app.lifecycle.stop();
        self.connections.close();
        let flushed = async {
            live.idle().await;
            self.connections.wait().await;
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, flushed).await.is_err() {
            tracing::warn!(
                connections = self.connections.len(),
                "connections left open"
            );
        }
    }
}

/// Counts connections, in all and by address.
struct Slots {
    total: Arc<Semaphore>,
    by_address: DashMap<IpAddr, usize>,
    refusals: Arc<Semaphore>,
    max_total: usize,
    max_per_address: usize,
}

/// A connection's place in the counts.
struct Slot {
    slots: Arc<Slots>,
    address: IpAddr,
    _total: tokio::sync::OwnedSemaphorePermit,
}

impl Slots {
    fn new(app: &App) -> Self {
        let max_total = app.limits.max_connections.min(Semaphore::MAX_PERMITS);
        Slots {
            total: Arc::new(Semaphore::new(max_total)),
            by_address: DashMap::new(),
            refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
            max_total,
            max_per_address: app.limits.max_connections_per_address,
        }
    }

    fn take(slots: &Arc<Slots>, address: IpAddr) -> Result<Slot, ApiError> {
        let total = Arc::clone(&slots.total).try_acquire_owned().map_err(|_| {
            let message = format!("{} connections are open (max_connections)", slots.max_total);
            ApiError::new(ErrorKind::Overloaded, message)
        })?;
        let mut count = slots.by_address.entry(address).or_insert(0);
        if *count >= slots.max_per_address {
            let message = format!(
                "{} connections from one address are open (max_connections_per_address)",
                slots.max_per_address
            );
            return Err(ApiError::new(ErrorKind::TooManyConnections, message));
        }
        *count += 1;
        Ok(Slot {
            slots: Arc::clone(slots),
            address,
            _total: total,
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(mut count) = self.slots.by_address.get_mut(&self.address) {
            *count = count.saturating_sub(1);
        }
        self.slots
            .by_address
            .remove_if(&self.address, |_, count| *count == 0);
    }
}

/// Answers without reading a request, then reads until the peer closes.
async fn write_refusal(stream: TcpStream, error: &ApiError) -> io::Result<()> {
    let body = serde_json::to_string(&error.body())?;
    let response = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n{body}",
        error.status(),
        body.len()
    );
    let mut rest = response.as_bytes();
    while !rest.is_empty() {
        stream.writable().await?;
        match stream.try_write(rest) {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    discard_input(&stream).await
}

async fn discard_input(stream: &TcpStream) -> io::Result<()> {
    let mut scratch = [0; 4096];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut scratch) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
