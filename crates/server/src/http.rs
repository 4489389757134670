//! The HTTP door: connections, bodies, streams, limits and the router. It knows no model, and of the wire only how
//! errors look.

pub mod body;
pub mod connection;
pub mod lifecycle;
pub mod limits;
pub mod listener;
pub mod request_name;
pub mod router;
pub mod sse;
pub mod timed_stream;
