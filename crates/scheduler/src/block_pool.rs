//! Which block is free, owned, shared, cached or in transfer. The only creator of block ids (A2).
