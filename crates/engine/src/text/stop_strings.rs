//! Finds stop strings in a stream of text; what may be the start of one is held back.
