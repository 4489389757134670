//! Counters of steps and caches, returned as data.
