//! A request's progress: computed tokens, block table, status.
