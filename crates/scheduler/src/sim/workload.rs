//! What arrives when: sessions of requests as data, and seeded generators of them.
//!
//! Prompts are kept as recipes and spelled out when they are sent, so that a trace of a hundred million
//! tokens fits in memory. No file is read here: whoever has a trace turns its rows into sessions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dice::Dice;
use crate::request::TokenId;
use crate::time::{Span, Timestamp};

/// Simulated tokens lie below this.
pub const VOCABULARY: u32 = 1 << 30;

/// Everything that arrives, in order of `Session::start`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// Conversations; a lone request is one of a single turn.
    pub sessions: Vec<Session>,
}

/// A conversation: each turn is sent after the answer to the one before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// When it begins.
    pub start: Timestamp,
    /// Who asks.
    pub tenant: u32,
    /// Larger runs earlier.
    pub priority: i32,
    /// What is asked, in order.
    pub turns: Vec<Turn>,
}

/// One request of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// From the session's start, or the end of the answer before, until it is sent.
    pub pause: Span,
    /// What it adds to the history, which is the prompt and the answer before it.
    pub prompt: Prompt,
    /// Tokens generated.
    pub num_output: u32,
    /// Answers wanted; a session goes on from the first.
    pub num_choices: u32,
}

/// Prompt tokens, or how to spell them.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Parts one after another; parts of equal keys begin with equal tokens.
    Parts(Vec<Part>),
    /// The tokens themselves.
    Tokens(Arc<[TokenId]>),
}

/// A run of tokens that its key determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is.
    pub key: u64,
    /// How much of it.
    pub num_tokens: u32,
}

impl Prompt {
    /// A prompt that shares nothing with prompts of other keys.
    pub fn distinct(key: u64, num_tokens: u32) -> Self {
        Prompt::Parts(vec![Part { key, num_tokens }])
    }

    /// Blocks of `block_tokens` tokens named by `hashes`, the last one cut so that there are `num_tokens`.
    /// Equal names at equal places stand for equal tokens (Mooncake's `hash_ids`).
    pub fn blocks(hashes: &[u64], block_tokens: u32, num_tokens: u32) -> Self {
        let mut left = num_tokens;
        let part = |key: &u64| {
            let num_tokens = left.min(block_tokens);
            left -= num_tokens;
            Part {
                key: *key,
                num_tokens,
            }
        };
        Prompt::Parts(hashes.iter().map(part).collect())
    }

    /// Tokens in it.
    pub fn num_tokens(&self) -> u32 {
        match self {
            Prompt::Parts(parts) => parts.iter().map(|part| part.num_tokens).sum(),
            Prompt::Tokens(tokens) => tokens.len() as u32,
        }
    }

    /// Appends the tokens to `history`.
    pub fn spell(&self, history: &mut Vec<TokenId>) {
        match self {
            Prompt::Parts(parts) => parts.iter().for_each(|part| part.spell(history)),
            Prompt::Tokens(tokens) => history.extend_from_slice(tokens),
        }
    }
}

impl Part {
    fn spell(self, history: &mut Vec<TokenId>) {
        let mut dice = Dice::new(self.key);
        let token = |_| TokenId(dice.below(u64::from(VOCABULARY)) as u32);
        history.extend((0..self.num_tokens).map(token));
    }
}

impl Workload {
    /// Requests in all sessions.
    pub fn num_requests(&self) -> usize {
        self.sessions
            .iter()
            .map(|session| session.turns.len())
            .sum()
    }

    /// Puts the sessions in order of their start.
    pub fn sorted(mut self) -> Self {
        self.sessions.sort_by_key(|session| session.start);
        self
    }

    /// Lets everything arrive `factor` times as fast.
    pub fn sped_up(mut self, factor: f64) -> Self {
        for session in &mut self.sessions {
            session.start = Timestamp((session.start.0 as f64 / factor) as u64);
        }
        self
    }
}

/// How many tokens a request has and asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Lengths {
    /// Both uniform, ends included.
    Uniform {
        /// Prompt tokens, at least and at most.
        prompt: (u32, u32),
        /// Output tokens, at least and at most.
        output: (u32, u32),
    },
    /// One of these pairs of prompt and output, each as likely.
    Sampled(Vec<(u32, u32)>),
}

impl Lengths {
    fn draw(&self, dice: &mut Dice) -> (u32, u32) {
        let (prompt, output) = match self {
            Lengths::Uniform { prompt, output } => (
                dice.between(prompt.0, prompt.1),
                dice.between(output.0, output.1),
            ),
            Lengths::Sampled(pairs) => dice.pick(pairs).copied().unwrap_or((1, 1)),
        };
        (prompt.max(1), output.max(1))
    }
}

/// A way to make a workload from a seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Generator {
    /// Independent requests at random times.
    Poisson {
        /// Requests per second, on average.
        rate: f64,
        /// Requests in all.
        num_requests: u32,
        /// How long they are.
        lengths: Lengths,
    },
    /// Requests that come all at once, again and again.
    Bursts {
        /// Requests per burst.
        size: u32,
        /// From one burst to the next.
        every: Span,
        /// Bursts in all.
        num_bursts: u32,
        /// How long they are.
        lengths: Lengths,
    },
    /// Conversations that begin with one of a few system prompts and grow by question and answer.
    Chats {
        /// New conversations per second, on average.
        rate: f64,
        /// Conversations in all.
        num_sessions: u32,
        /// Different system prompts.
        num_systems: u32,
        /// Tokens of each.
        system_tokens: u32,
        /// Turns of a conversation, at least and at most.
        turns: (u32, u32),
        /// Mean time from an answer to the next question.
        think: Span,
        /// Question and answer.
        lengths: Lengths,
    },
    /// Agents: chats whose turns follow at tool speed; the prompt of a turn is what the tool said.
    Agents {
        /// New runs per second, on average.
        rate: f64,
        /// Runs in all.
        num_sessions: u32,
        /// Tokens of the one system prompt with its tools.
        system_tokens: u32,
        /// Tool calls of a run, at least and at most.
        turns: (u32, u32),
        /// Mean time a tool takes.
        tool: Span,
        /// What the tool says and what the model answers.
        lengths: Lengths,
    },
}

const ARRIVALS: u64 = 1;
const LENGTHS: u64 = 2;

impl Generator {
    /// The workload of this seed.
    pub fn generate(&self, seed: u64) -> Workload {
        let dice = Dice::new(seed);
        let (mut arrivals, mut lengths) = (dice.fork(ARRIVALS), dice.fork(LENGTHS));
        let mut at = Timestamp(0);
        let mut poisson = |rate: f64| {
            at = at + Span((arrivals.exponential(1e9 / rate)) as u64);
            at
        };
        let sessions = match self {
            Generator::Poisson {
                rate,
                num_requests,
                lengths: shape,
            } => (0..*num_requests)
                .map(|n| lone(poisson(*rate), n, shape, &mut lengths))
                .collect(),
            Generator::Bursts {
                size,
                every,
                num_bursts,
                lengths: shape,
            } => (0..size * num_bursts)
                .map(|n| {
                    let at = Timestamp(every.0.saturating_mul(u64::from(n / size)));
                    lone(at, n, shape, &mut lengths)
                })
                .collect(),
            Generator::Chats {
                rate,
                num_sessions,
                num_systems,
                system_tokens,
                turns,
                think,
                lengths: shape,
            } => (0..*num_sessions)
                .map(|n| {
                    let system = lengths.below(u64::from((*num_systems).max(1)));
                    let system = system_part(system, *system_tokens);
                    chat(
                        poisson(*rate),
                        n,
                        system,
                        *turns,
                        *think,
                        shape,
                        &mut lengths,
                    )
                })
                .collect(),
            Generator::Agents {
                rate,
                num_sessions,
                system_tokens,
                turns,
                tool,
                lengths: shape,
            } => (0..*num_sessions)
                .map(|n| {
                    let system = system_part(0, *system_tokens);
                    chat(
                        poisson(*rate),
                        n,
                        system,
                        *turns,
                        *tool,
                        shape,
                        &mut lengths,
                    )
                })
                .collect(),
        };
        Workload { sessions }
    }
}

/// Keys of system prompts lie above those of everything else.
fn system_part(number: u64, num_tokens: u32) -> Part {
    Part {
        key: u64::MAX - number,
        num_tokens,
    }
}

fn lone(at: Timestamp, number: u32, shape: &Lengths, dice: &mut Dice) -> Session {
    let (prompt, num_output) = shape.draw(dice);
    Session {
        start: at,
        tenant: 0,
        priority: 0,
        turns: vec![Turn {
            pause: Span(0),
            prompt: Prompt::distinct(u64::from(number), prompt),
            num_output,
            num_choices: 1,
        }],
    }
}

fn chat(
    at: Timestamp,
    number: u32,
    system: Part,
    turns: (u32, u32),
    pause: Span,
    shape: &Lengths,
    dice: &mut Dice,
) -> Session {
    let num_turns = dice.between(turns.0, turns.1).max(1);
    let mut turn = |n: u32| {
        let (num_tokens, num_output) = shape.draw(dice);
        let own = Part {
            key: u64::from(number) << 32 | u64::from(n),
            num_tokens,
        };
        Turn {
            pause: match n {
                0 => Span(0),
                _ => Span(dice.exponential(pause.0 as f64) as u64),
            },
            prompt: Prompt::Parts(match n {
                0 => vec![system, own],
                _ => vec![own],
            }),
            num_output,
            num_choices: 1,
        }
    };
    Session {
        start: at,
        tenant: 0,
        priority: 0,
        turns: (0..num_turns).map(&mut turn).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(prompt: &Prompt) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        prompt.spell(&mut tokens);
        assert_eq!(tokens.len() as u32, prompt.num_tokens());
        tokens
    }

    #[test]
    fn equal_hashes_are_equal_tokens_and_the_last_block_is_cut() {
        let long = spelled(&Prompt::blocks(&[7, 8, 9], 512, 1_100));
        let short = spelled(&Prompt::blocks(&[7, 8, 4], 512, 1_030));
        assert_eq!(long.len(), 1_100);
        assert_eq!(long[..1_024], short[..1_024]);
        assert_ne!(long[1_024], short[1_024]);
    }

    #[test]
    fn poisson_has_its_rate_and_its_seed() {
        let generator = Generator::Poisson {
            rate: 5.0,
            num_requests: 2_000,
            lengths: Lengths::Sampled(vec![(10, 1), (20, 2)]),
        };
        let workload = generator.generate(1);
        assert_eq!(workload, generator.generate(1));
        assert_ne!(workload, generator.generate(2));
        let last = workload.sessions.last().expect("there are 2,000").start;
        assert!((380.0..420.0).contains(&(last.0 as f64 * 1e-9)), "{last:?}");
        for session in &workload.sessions {
            let turn = &session.turns[0];
            assert_eq!(turn.prompt.num_tokens(), turn.num_output * 10);
        }
    }

    #[test]
    fn bursts_come_together_and_chats_share_their_system_prompt() {
        let lengths = Lengths::Uniform {
            prompt: (5, 9),
            output: (3, 3),
        };
        let bursts = Generator::Bursts {
            size: 3,
            every: Span(100),
            num_bursts: 2,
            lengths: lengths.clone(),
        };
        let starts = bursts.generate(0).sessions.into_iter().map(|s| s.start.0);
        assert_eq!(starts.collect::<Vec<_>>(), [0, 0, 0, 100, 100, 100]);
        let chats = Generator::Chats {
            rate: 1.0,
            num_sessions: 20,
            num_systems: 1,
            system_tokens: 40,
            turns: (2, 4),
            think: Span::from_secs(1),
            lengths,
        };
        let chats = chats.generate(0);
        let first = |session: &Session| spelled(&session.turns[0].prompt);
        let (one, other) = (first(&chats.sessions[0]), first(&chats.sessions[1]));
        assert_eq!(one[..40], other[..40]);
        assert_ne!(one[40..], other[40..]);
        let num_requests = chats.num_requests();
        assert!((40..=80).contains(&num_requests), "{num_requests}");
        assert!(chats.sessions.iter().all(|s| s.turns[1].pause.0 > 0));
    }
}
