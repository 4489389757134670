//! Text to tokens and back, from tokenizer.json, GGUF metadata or plain bytes.
