//! Finds stop strings in a stream of text; what may be the start of one is held back.
//!
//! The result depends on the text alone, never on how it was cut into pieces: the match that ends first wins, and of
//! several that end at the same place the longest, so that no part of a stop string is left in the output. (vLLM looks
//! for the first of the list in each new piece; that agrees unless two stop strings end within one token.)

use super::pattern_set::{Found, PatternSet, State};

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that no later piece can make part of a stop string.
    pub text: String,
    /// Index of the stop string that ended in this piece; what followed it is gone.
    pub matched: Option<usize>,
}

/// Watches the text of one choice.
#[derive(Debug)]
pub struct StopMatcher {
    stops: PatternSet,
    kept: KeptStop,
    state: State,
    /// Text read and not yet given out.
    held: String,
    finished: bool,
}

/// Is the stop string that matched part of the output?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeptStop {
    Yes,
    No,
}

impl StopMatcher {
    /// Watches for any of `stops`; empty ones never match. `include_in_output` keeps the matched one in the text.
    pub fn new(stops: &[String], include_in_output: bool) -> Self {
        StopMatcher {
            stops: PatternSet::new(stops),
            kept: if include_in_output {
                KeptStop::Yes
            } else {
                KeptStop::No
            },
            state: State::default(),
            held: String::new(),
            finished: false,
        }
    }

    /// Takes the next piece. After a match nothing more is given out.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.finished {
            return StopStep::default();
        }
        let num_held = self.held.len();
        self.held.push_str(text);
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            self.state = self.stops.step(self.state, byte);
            if let Some(found) = self.stops.found(self.state) {
                return self.stop_at(num_held + index + 1, found);
            }
        }
        StopStep {
            text: self.release(),
            matched: None,
        }
    }

    /// Takes the next piece of an output that may not stop yet: it passes through and can never become part of a match.
    pub fn push_unchecked(&mut self, text: &str) -> StopStep {
        if self.finished {
            return StopStep::default();
        }
        self.state = State::default();
        self.held.push_str(text);
        StopStep {
            text: std::mem::take(&mut self.held),
            matched: None,
        }
    }

    /// The text that was held back, when nothing more follows.
    pub fn finish(&mut self) -> String {
        self.finished = true;
        std::mem::take(&mut self.held)
    }

    fn stop_at(&mut self, end: usize, found: Found) -> StopStep {
        self.held.truncate(match self.kept {
            KeptStop::Yes => end,
            KeptStop::No => end - found.len,
        });
        StopStep {
            text: self.finish(),
            matched: Some(found.pattern),
        }
    }

    /// All but the longest end that may begin a stop string. It starts at a character, as stop strings do.
    fn release(&mut self) -> String {
        let num_pending = match self.kept {
            KeptStop::Yes => 0,
            KeptStop::No => self.stops.num_pending(self.state),
        };
        let pending = self.held.split_off(self.held.len() - num_pending);
        std::mem::replace(&mut self.held, pending)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    /// Text given out in all, and the stop string that matched.
    fn run<'a>(
        stops: &[&str],
        include_in_output: bool,
        pieces: impl IntoIterator<Item = &'a str>,
    ) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops, include_in_output);
        let mut output = String::new();
        let mut matched = None;
        for piece in pieces {
            let step = matcher.push(piece);
            output.push_str(&step.text);
            matched = matched.or(step.matched);
        }
        output.push_str(&matcher.finish());
        (output, matched)
    }

    /// The rule in its simplest form.
    fn naive(stops: &[&str], include_in_output: bool, text: &str) -> (String, Option<usize>) {
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        for end in ends {
            let matching = stops
                .iter()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty() && text[..end].ends_with(**stop));
            let longest = matching.max_by_key(|&(index, stop)| (stop.len(), usize::MAX - index));
            if let Some((index, stop)) = longest {
                let cut = end - if include_in_output { 0 } else { stop.len() };
                return (text[..cut].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn cuts_at_the_first_match() {
        // Stop strings, pieces of text (both cut at commas), text given out, stop string that matched.
        let cases = [
            ("END", "a E,N,D b", "a ", Some(0)),
            ("END", "a E,N,E", "a ENE", None),
            ("aab", "aaa,ab", "aa", Some(0)),
            ("b,abc", "xabc", "xa", Some(0)),
            ("bc,abc", "xabc", "x", Some(1)),
            ("é\n", "caf,é,\nx", "caf", Some(0)),
            (",x", "y", "y", None),
            ("", "y", "y", None),
        ];
        for (stops, pieces, text, matched) in cases {
            let stops: Vec<&str> = stops.split(',').collect();
            assert_eq!(
                run(&stops, false, pieces.split(',')),
                (text.to_owned(), matched),
                "{stops:?} in {pieces:?}"
            );
        }
    }

    #[test]
    fn holds_back_only_what_may_match() {
        let mut matcher = StopMatcher::new(&["STOP".to_owned()], false);
        assert_eq!(matcher.push("a S").text, "a ");
        assert_eq!(matcher.push("T").text, "");
        assert_eq!(matcher.push("S").text, "ST");
        assert_eq!(matcher.finish(), "S");
    }

    #[test]
    fn unchecked_text_never_becomes_part_of_a_match() {
        let mut matcher = StopMatcher::new(&["STOP".to_owned()], false);
        assert_eq!(matcher.push("S").text, "");
        assert_eq!(matcher.push_unchecked("TOPST").text, "STOPST");
        assert_eq!(matcher.push("OP").text, "OP");
        assert_eq!(matcher.push("STOP").matched, Some(0));
        assert_eq!(matcher.push("more"), StopStep::default());
    }

    #[test]
    fn nearly_matching_text_takes_linear_time() {
        let stop = format!("{}b", "a".repeat(255));
        let text = "a".repeat(1_000_000);
        let start = Instant::now();
        let (output, matched) = run(&[&stop], false, [text.as_str()]);
        assert_eq!((output.len(), matched), (1_000_000, None));
        assert!(start.elapsed() < Duration::from_secs(1), "quadratic time");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_naive_result(
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            pieces in prop::collection::vec("[abé]{0,5}", 0..8),
            include_in_output: bool,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let expected = naive(&stops, include_in_output, &pieces.concat());
            let actual = run(&stops, include_in_output, pieces.iter().map(String::as_str));
            prop_assert_eq!(actual, expected);
        }
    }
}
