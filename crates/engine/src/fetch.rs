//! Model cards and how a model comes to be on this disk.
