//! Tokens to text one token at a time; a character split across tokens is held back.
