//! A fixed pipeline from logits to a token.
