//! Finds any of several strings in a stream of bytes, in linear time whatever the bytes are.
//!
//! It knows nothing of what a match means: stop strings and special tokens both use it.
//!
//! A. V. Aho and M. J. Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6), 1975.

use std::collections::VecDeque;

/// A position in the automaton: the longest beginning of a pattern that the bytes read so far end with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State(usize);

/// A pattern that ends at the current byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its place in the list of patterns; of equal patterns the first.
    pub pattern: usize,
    /// Its bytes.
    pub len: usize,
}

/// The automaton of a list of patterns. Empty patterns never match.
#[derive(Debug)]
pub(crate) struct PatternSet {
    /// The first is the root. Indices in nodes and in `State` are only ever made here.
    nodes: Vec<Node>,
}

#[derive(Debug, Default)]
struct Node {
    /// By byte, ascending.
    children: Vec<(u8, usize)>,
    /// The longest proper suffix of this node's bytes that begins a pattern.
    suffix: usize,
    depth: usize,
    /// The longest pattern that this node's bytes end with.
    found: Option<Found>,
}

const ROOT: usize = 0;

impl PatternSet {
    /// Builds the automaton; memory is proportional to the patterns' bytes.
    pub fn new<S: AsRef<str>>(patterns: impl IntoIterator<Item = S>) -> Self {
        let mut set = PatternSet {
            nodes: vec![Node::default()],
        };
        for (index, pattern) in patterns.into_iter().enumerate() {
            set.insert(index, pattern.as_ref().as_bytes());
        }
        set.link_suffixes();
        set
    }

    fn insert(&mut self, pattern: usize, bytes: &[u8]) {
        let mut node = ROOT;
        for &byte in bytes {
            node = match self.child(node, byte) {
                Some(child) => child,
                None => self.add_child(node, byte),
            };
        }
        let len = bytes.len();
        if len > 0 {
            self.nodes[node].found.get_or_insert(Found { pattern, len });
        }
    }

    fn add_child(&mut self, parent: usize, byte: u8) -> usize {
        let child = self.nodes.len();
        self.nodes.push(Node {
            depth: self.nodes[parent].depth + 1,
            ..Node::default()
        });
        let children = &mut self.nodes[parent].children;
        let place = children.partition_point(|&(other, _)| other < byte);
        children.insert(place, (byte, child));
        child
    }

    /// Breadth first, so that a node's suffix, which is shorter, is complete before the node.
    fn link_suffixes(&mut self) {
        let mut queue = VecDeque::from([ROOT]);
        while let Some(parent) = queue.pop_front() {
            for (byte, child) in self.nodes[parent].children.clone() {
                let suffix = match parent {
                    ROOT => ROOT,
                    _ => self.step(State(self.nodes[parent].suffix), byte).0,
                };
                let inherited = self.nodes[suffix].found;
                let node = &mut self.nodes[child];
                node.suffix = suffix;
                node.found = node.found.or(inherited);
                queue.push_back(child);
            }
        }
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        let children = &self.nodes[node].children;
        let place = children
            .binary_search_by_key(&byte, |&(other, _)| other)
            .ok()?;
        Some(children[place].1)
    }

    /// The state after one more byte; amortised constant time.
    pub fn step(&self, state: State, byte: u8) -> State {
        let mut node = state.0;
        loop {
            if let Some(child) = self.child(node, byte) {
                return State(child);
            }
            if node == ROOT {
                return State(ROOT);
            }
            node = self.nodes[node].suffix;
        }
    }

    /// The longest pattern that ends here.
    pub fn found(&self, state: State) -> Option<Found> {
        self.nodes[state.0].found
    }

    /// How many of the last bytes could be the beginning of a pattern.
    pub fn num_pending(&self, state: State) -> usize {
        self.nodes[state.0].depth
    }

    /// Does `text` begin with a pattern, or with as much of a pattern as fits into it?
    pub fn may_begin(&self, text: &str) -> bool {
        let mut node = ROOT;
        for &byte in text.as_bytes() {
            let Some(child) = self.child(node, byte) else {
                return false;
            };
            if self.nodes[child]
                .found
                .is_some_and(|found| found.len == self.nodes[child].depth)
            {
                return true;
            }
            node = child;
        }
        node != ROOT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(patterns: &[&str], text: &str) -> Vec<(usize, Found)> {
        let set = PatternSet::new(patterns);
        let mut state = State::default();
        let mut ends = Vec::new();
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            state = set.step(state, byte);
            ends.extend(set.found(state).map(|found| (index + 1, found)));
        }
        ends
    }

    #[test]
    fn reports_the_longest_pattern_at_each_end() {
        let he = Found { pattern: 0, len: 2 };
        let she = Found { pattern: 1, len: 3 };
        let hers = Found { pattern: 2, len: 4 };
        assert_eq!(
            ends(&["he", "she", "hers", "", "he"], "ushers he"),
            [(4, she), (6, hers), (9, he)]
        );
    }

    #[test]
    fn a_pattern_or_its_cut_off_beginning_may_begin() {
        let set = PatternSet::new(["<|end|>", "é!"]);
        let cases = [
            ("<|end|> x", true),
            ("<|en", true),
            ("<|enx", false),
            ("é", true),
            ("", false),
            ("x<|end|>", false),
        ];
        for (text, expected) in cases {
            assert_eq!(set.may_begin(text), expected, "{text:?}");
        }
    }
}
