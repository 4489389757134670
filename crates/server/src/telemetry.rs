//! What the server tells about itself: logs and metrics.

pub mod logs;
pub mod metrics;
pub mod observer;
