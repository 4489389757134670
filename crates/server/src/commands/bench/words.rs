//! Prompts of plain words, and how many tokens they are for a server that we know nothing of.

use super::noise::Noise;

/// Each is one token in the usual vocabularies when a space precedes it; the same as in `bench/streams.py`.
const WORDS: &str = "\
    time year people way day man thing woman life child world school state family student group country \
    problem hand part place case week company system program question work government number night point \
    home water room mother area money story fact month lot right study book eye job word business issue \
    side kind head house service friend father power hour game line end member law car city name team \
    minute idea body face level office door health person art war history party result change morning \
    reason research girl moment air teacher force education foot boy age policy music market sense \
    nation plan college interest death experience effect use class control field development role effort \
    rate heart drug show leader light voice wife police mind price report decision son view relationship \
    town road arm difference value building action season society tax position player record paper space \
    ground";

/// `count` words that no other seed gives.
pub fn words(noise: &mut Noise, count: usize) -> String {
    let all: Vec<&str> = WORDS.split(' ').collect();
    let chosen: Vec<&str> = (0..count).map(|_| all[noise.below(all.len())]).collect();
    chosen.join(" ")
}

/// How a server counts words: a prompt of w words has `per_prompt + per_word · w` tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WordCount {
    per_prompt: f64,
    per_word: f64,
}

impl WordCount {
    /// From two prompts, as (words, tokens), the second one longer.
    pub fn of(short: (usize, u64), long: (usize, u64)) -> Self {
        let more_words = (long.0 - short.0) as f64;
        let per_word = (long.1 as f64 - short.1 as f64) / more_words;
        // A server that counts strangely gets one token per word.
        let per_word = if per_word > 0.0 { per_word } else { 1.0 };
        WordCount {
            per_prompt: short.1 as f64 - per_word * short.0 as f64,
            per_word,
        }
    }

    /// Words that make about so many tokens of a whole prompt; at least one.
    pub fn in_prompt(&self, num_tokens: usize) -> usize {
        let words = (num_tokens as f64 - self.per_prompt) / self.per_word;
        (words.round() as usize).max(1)
    }

    /// Words that add about so many tokens to a prompt.
    pub fn in_part(&self, num_tokens: usize) -> usize {
        (num_tokens as f64 / self.per_word).round() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_make_different_prompts_of_the_length_asked() {
        let make = |seed| words(&mut Noise::of(&[seed, 7]), 20);
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
        assert_eq!(make(1).split(' ').count(), 20);
    }

    #[test]
    fn tokens_become_words() {
        // One token per word.
        let plain = WordCount::of((64, 64), (192, 192));
        assert_eq!((plain.in_prompt(512), plain.in_part(100)), (512, 100));
        // One more at the beginning of a sequence.
        let with_bos = WordCount::of((64, 65), (192, 193));
        assert_eq!((with_bos.in_prompt(512), with_bos.in_part(100)), (511, 100));
        // A tokenizer of bytes.
        let bytes = WordCount::of((64, 384), (192, 1152));
        assert_eq!((bytes.in_prompt(600), bytes.in_part(60)), (100, 10));
        assert_eq!(bytes.in_prompt(1), 1);
        // A server that counts nothing.
        assert_eq!(WordCount::of((64, 0), (192, 0)).in_part(10), 10);
    }
}
