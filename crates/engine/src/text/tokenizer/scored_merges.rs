//! Byte-pair encoding by score, as SentencePiece does it: of all neighbours whose union is a piece, the best-scored merge
//! first; of equal scores the leftmost.
//!
//! It sees text whose spaces are already '▁', and no special token: those are cut out before.
//!
//! T. Kudo and J. Richardson, "SentencePiece: a simple and language independent subword tokenizer", EMNLP 2018.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

/// Pieces of text with their scores, and what to do with text that is no piece.
#[derive(Debug)]
pub(crate) struct ScoredMerges {
    pieces: HashMap<Arc<str>, Piece>,
    max_piece_bytes: usize,
    fallback: Fallback,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    id: u32,
    score: f32,
}

/// What stands for characters that are no piece.
#[derive(Debug)]
pub(crate) enum Fallback {
    /// One token per byte, by byte.
    Bytes(Box<[u32; 256]>),
    /// One token for any number of neighbouring characters.
    Unknown(u32),
}

/// A part of the text; part of a list linked both ways. An absorbed one is empty.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: usize,
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// A possible merge of the symbol `left` with its neighbour, which ended at `end` when this was found.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    left: usize,
    end: usize,
}

impl ScoredMerges {
    /// Of two pieces with the same text the later counts.
    pub fn new(pieces: impl IntoIterator<Item = (Arc<str>, u32, f32)>, fallback: Fallback) -> Self {
        let pieces: HashMap<Arc<str>, Piece> = pieces
            .into_iter()
            .map(|(text, id, score)| (text, Piece { id, score }))
            .collect();
        ScoredMerges {
            max_piece_bytes: pieces.keys().map(|text| text.len()).max().unwrap_or(0),
            pieces,
            fallback,
        }
    }

    /// The piece with this text.
    pub fn id(&self, text: &str) -> Option<u32> {
        Some(self.pieces.get(text)?.id)
    }

    /// Tokens of `text`, in n log n time.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let symbols = Merging::new(self, text).run();
        let mut ids = Vec::new();
        let mut after_unknown = false;
        for symbol in symbols.iter().filter(|symbol| !symbol.is_absorbed()) {
            let part = &text[symbol.start..symbol.end];
            let piece = self.id(part);
            match (piece, &self.fallback) {
                (Some(id), _) => ids.push(id),
                (None, Fallback::Bytes(tokens)) => {
                    ids.extend(part.bytes().map(|byte| tokens[usize::from(byte)]));
                }
                (None, Fallback::Unknown(id)) if !after_unknown => ids.push(*id),
                (None, Fallback::Unknown(_)) => {}
            }
            after_unknown = piece.is_none();
        }
        ids
    }

    fn score(&self, text: &str) -> Option<f32> {
        if text.len() > self.max_piece_bytes {
            return None;
        }
        Some(self.pieces.get(text)?.score)
    }
}

/// The state of one text's merging.
struct Merging<'a> {
    model: &'a ScoredMerges,
    text: &'a str,
    /// One per character; a symbol keeps its place and its start, and grows to the right.
    symbols: Vec<Symbol>,
    candidates: BinaryHeap<Candidate>,
}

impl<'a> Merging<'a> {
    fn new(model: &'a ScoredMerges, text: &'a str) -> Self {
        let num_characters = text.chars().count();
        let symbols = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, character))| Symbol {
                start,
                end: start + character.len_utf8(),
                previous: index.checked_sub(1),
                next: (index + 1 < num_characters).then_some(index + 1),
            })
            .collect();
        Merging {
            model,
            text,
            symbols,
            candidates: BinaryHeap::new(),
        }
    }

    fn run(mut self) -> Vec<Symbol> {
        for left in 0..self.symbols.len() {
            self.consider(left);
        }
        while let Some(candidate) = self.candidates.pop() {
            self.merge(candidate);
        }
        self.symbols
    }

    fn consider(&mut self, left: usize) {
        let symbol = self.symbols[left];
        let Some(next) = symbol.next else {
            return;
        };
        let end = self.symbols[next].end;
        if let Some(score) = self.model.score(&self.text[symbol.start..end]) {
            self.candidates.push(Candidate { score, left, end });
        }
    }

    /// Does nothing if either side has been merged since: then the neighbour, if any, ends further right.
    fn merge(&mut self, candidate: Candidate) {
        let left = self.symbols[candidate.left];
        let Some(next) = left.next.filter(|_| !left.is_absorbed()) else {
            return;
        };
        let right = self.symbols[next];
        if right.end != candidate.end {
            return;
        }
        self.symbols[next].end = right.start;
        self.symbols[candidate.left].end = right.end;
        self.symbols[candidate.left].next = right.next;
        if let Some(after) = right.next {
            self.symbols[after].previous = Some(candidate.left);
        }
        if let Some(previous) = left.previous {
            self.consider(previous);
        }
        self.consider(candidate.left);
    }
}

impl Symbol {
    fn is_absorbed(&self) -> bool {
        self.start == self.end
    }
}

impl Ord for Candidate {
    /// The greatest is merged first.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score
            .then(other.left.cmp(&self.left))
            .then(other.end.cmp(&self.end))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model(pieces: &[(&str, f32)], fallback: Fallback) -> ScoredMerges {
        let pieces = (0..).zip(pieces);
        ScoredMerges::new(
            pieces.map(|(id, &(text, score))| (text.into(), id, score)),
            fallback,
        )
    }

    const UNKNOWN: u32 = 99;

    #[test]
    fn merges_by_score_then_from_the_left() {
        let pieces = [
            ("a", 0.0),
            ("b", 0.0),
            ("ab", -2.0),
            ("ba", -1.0),
            ("aba", -3.0),
            ("aa", -1.5),
        ];
        let model = model(&pieces, Fallback::Unknown(UNKNOWN));
        let cases: &[(&str, &[u32])] = &[
            ("", &[]),
            ("ab", &[2]),
            ("aba", &[4]),
            ("abba", &[2, 3]),
            ("aaa", &[5, 0]),
            ("axyb", &[0, UNKNOWN, 1]),
        ];
        for &(text, expected) in cases {
            assert_eq!(model.encode(text), expected, "{text:?}");
        }
    }

    #[test]
    fn spells_unknown_characters_as_bytes() {
        let bytes = Box::new(std::array::from_fn(|byte| 1_000 + byte as u32));
        let model = model(&[("a", 0.0)], Fallback::Bytes(bytes));
        assert_eq!(model.encode("aé"), [0, 1_000 + 0xC3, 1_000 + 0xA9]);
    }

    /// The rule in its simplest form: find the best merge, do it, look again.
    fn naive(model: &ScoredMerges, text: &str) -> Vec<u32> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let best = parts
                .windows(2)
                .enumerate()
                .filter_map(|(at, pair)| Some((model.score(&pair.concat())?, at)))
                .max_by(|(a, at), (b, bt)| a.total_cmp(b).then(bt.cmp(at)));
            let Some((_, at)) = best else {
                break;
            };
            let right = parts.remove(at + 1);
            parts[at].push_str(&right);
        }
        parts.iter().filter_map(|part| model.id(part)).collect()
    }

    proptest! {
        #[test]
        fn equals_the_naive_rule(
            merges in prop::collection::vec(("[abc]{2,4}", -4i8..0), 0..12),
            text in "[abc]{0,24}",
        ) {
            let mut pieces: Vec<(&str, f32)> = vec![("a", 0.0), ("b", 0.0), ("c", 0.0)];
            pieces.extend(merges.iter().map(|(text, score)| (text.as_str(), f32::from(*score))));
            let model = model(&pieces, Fallback::Unknown(UNKNOWN));
            prop_assert_eq!(model.encode(&text), naive(&model, &text));
        }
    }
}
