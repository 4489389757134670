//! Token prefix to blocks: a radix tree whose spans are aligned to blocks, with leaf-only LRU eviction.
