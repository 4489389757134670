//! The key and value tensors of every block.
