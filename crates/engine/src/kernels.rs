//! Every hot operation. The only place where `unsafe` is allowed; each block argues its safety.

pub mod cpu;
