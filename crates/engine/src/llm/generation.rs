//! A running generation: a stream of events that can be awaited, blocked on, or collected.

use std::sync::Arc;

use millpond_scheduler::{FinishReason, PositionLogprobs, RequestId, Summary, TokenId};
use tokio::sync::mpsc;

use crate::handle::AbortOnDrop;

/// A submitted request. Dropping it before its end aborts it.
pub struct Generation {
    /// The request's name in the engine.
    pub id: RequestId,
    /// The seed in use, given or minted: with it the same request gives the same bytes.
    pub seed: u64,
    /// What the model reads.
    pub prompt: PromptInfo,
    /// Number of choices; each ends with its own `Finished`.
    pub num_choices: u32,
    pub(crate) events: mpsc::Receiver<GenerationEvent>,
    pub(crate) guard: AbortOnDrop,
}

/// The prompt as the model reads it.
#[derive(Clone, Debug)]
pub struct PromptInfo {
    /// Its text, with special tokens spelled out.
    pub text: Arc<str>,
    /// Its tokens.
    pub tokens: Arc<[TokenId]>,
}

/// What happens to a generation, in order per choice; choices interleave.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// Log-probabilities of prompt tokens 1.. (the first token has none); sent once, before any delta, when
    /// asked for.
    PromptLogprobs(Vec<PositionLogprobs>),
    /// A choice went on. `text` may be empty while a character or a possible stop string is held back.
    Delta(ChoiceText),
    /// A choice ended. `last` holds what was held back.
    Finished {
        /// Its last text and no tokens.
        last: ChoiceText,
        /// Why.
        reason: FinishReason,
        /// The stop string that matched.
        matched_stop: Option<String>,
        /// Counts and times.
        summary: Summary,
    },
}

/// New text of one choice and the tokens it came with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceText {
    /// Which choice, from 0.
    pub choice: u32,
    /// Text to append.
    pub text: String,
    /// New tokens, end-of-sequence and stop tokens included.
    pub tokens: Vec<TokenId>,
    /// One per token, when asked for.
    pub logprobs: Vec<PositionLogprobs>,
}

/// A finished generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Completed {
    /// Log-probabilities of prompt tokens 1.., when asked for.
    pub prompt_logprobs: Vec<PositionLogprobs>,
    /// By choice.
    pub choices: Vec<CompletedChoice>,
}

/// A finished choice.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletedChoice {
    /// All text, tokens and log-probabilities.
    pub output: ChoiceText,
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that matched.
    pub matched_stop: Option<String>,
    /// Counts and times.
    pub summary: Summary,
}

impl Generation {
    /// The next event; `None` after every choice has finished (or the engine died: then a choice is missing).
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        let event = self.events.recv().await;
        self.note(&event);
        event
    }

    /// The next event, blocking the thread. Must not be called from async code.
    pub fn blocking_next(&mut self) -> Option<GenerationEvent> {
        let event = self.events.blocking_recv();
        self.note(&event);
        event
    }

    /// A generation that ended by itself needs no abort.
    fn note(&mut self, event: &Option<GenerationEvent>) {
        if event.is_none() {
            self.guard.disarm();
        }
    }

    /// Everything, once all choices have finished.
    pub async fn collect(mut self) -> Completed {
        let mut collector = Collector::new(self.num_choices);
        while let Some(event) = self.next().await {
            collector.push(event);
        }
        collector.finish()
    }

    /// Everything, blocking the thread. Must not be called from async code.
    pub fn blocking_collect(mut self) -> Completed {
        let mut collector = Collector::new(self.num_choices);
        while let Some(event) = self.blocking_next() {
            collector.push(event);
        }
        collector.finish()
    }
}

/// Joins deltas by choice.
struct Collector {
    prompt_logprobs: Vec<PositionLogprobs>,
    open: Vec<ChoiceText>,
    choices: Vec<Option<CompletedChoice>>,
}

impl Collector {
    fn new(num_choices: u32) -> Self {
        Collector {
            prompt_logprobs: Vec::new(),
            open: (0..num_choices)
                .map(|choice| ChoiceText {
                    choice,
                    ..ChoiceText::default()
                })
                .collect(),
            choices: vec![None; num_choices as usize],
        }
    }

    fn push(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::PromptLogprobs(logprobs) => self.prompt_logprobs = logprobs,
            GenerationEvent::Delta(delta) => self.append(delta),
            GenerationEvent::Finished {
                last,
                reason,
                matched_stop,
                summary,
            } => {
                let choice = last.choice as usize;
                self.append(last);
                let output = std::mem::take(&mut self.open[choice]);
                self.choices[choice] = Some(CompletedChoice {
                    output,
                    reason,
                    matched_stop,
                    summary,
                });
            }
        }
    }

    fn append(&mut self, delta: ChoiceText) {
        let open = &mut self.open[delta.choice as usize];
        open.text.push_str(&delta.text);
        open.tokens.extend(delta.tokens);
        open.logprobs.extend(delta.logprobs);
    }

    /// A choice without an end means that the engine died; it is reported as such.
    fn finish(self) -> Completed {
        let choices = self
            .choices
            .into_iter()
            .zip(self.open)
            .map(|(choice, open)| {
                choice.unwrap_or_else(|| CompletedChoice {
                    output: open,
                    reason: FinishReason::Error(millpond_scheduler::RowError::StepFailed(
                        "the engine stopped".to_owned(),
                    )),
                    matched_stop: None,
                    summary: Summary::default(),
                })
            })
            .collect();
        Completed {
            prompt_logprobs: self.prompt_logprobs,
            choices,
        }
    }
}
