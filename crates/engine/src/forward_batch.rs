//! From a batch plan to flat metadata: ids, positions, slots, block tables.
