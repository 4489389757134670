//! The only door to the block pool and the radix cache: match, allocate, extend, free, publish.
