//! Messages to prompt text and tokens; content never becomes control tokens.
