//! Why a request was refused before it ran.

/// A refusal; nothing of the request has run. `param` names the field in the engine's terms, which are the
/// OpenAI API's names.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// A field has a value that it may not have.
    #[error("{param}: {message}")]
    Invalid {
        /// The field.
        param: &'static str,
        /// What is wrong with it, naming the limit.
        message: String,
    },
    /// Prompt and output can never fit the context or the KV pool.
    #[error("{param}: {message}")]
    NeverFits {
        /// The field to shorten.
        param: &'static str,
        /// The numbers.
        message: String,
    },
    /// The queue is full; the same request may succeed later.
    #[error("the server is overloaded: {message}")]
    Overloaded {
        /// Which limit was met.
        message: String,
    },
    /// The engine is draining or has stopped.
    #[error("the engine is shutting down")]
    ShuttingDown,
}
