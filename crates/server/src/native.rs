//! Paths of our own: health, metrics, version, and what can be done to a live request.

pub mod health;
pub mod metrics;
pub mod requests;
pub mod version;
