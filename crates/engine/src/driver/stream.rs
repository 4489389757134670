//! One request's answer on its way out: tokens become text, stop strings are found, events are sent.
//!
//! It runs on the engine thread and never blocks: the channel holds every event the request can cause.

use std::sync::Arc;

use millpond_scheduler::{
    FinishReason, ModelOutput, OutputRow, PositionLogprobs, Request, RowVerdict, StopCause, Summary,
};
use tokio::sync::mpsc;

use crate::llm::{ChoiceText, GenerationEvent};
use crate::text::detokenizer::Detokenizer;
use crate::text::stop_strings::StopMatcher;
use crate::text::tokenizer::Tokenizer;

/// How the text of a request is made.
#[derive(Clone, Debug)]
pub(crate) struct TextOptions {
    /// Texts that end the output.
    pub(crate) stop: Arc<[String]>,
    /// Keep the stop string in the text.
    pub(crate) include_stop: bool,
    /// Leave special tokens out of the text.
    pub(crate) skip_special: bool,
}

/// A request on its way to the engine thread, with the channel for its answer.
pub(crate) struct Submission {
    request: Arc<Request>,
    text: TextOptions,
    events: mpsc::Sender<GenerationEvent>,
}

impl Submission {
    /// Makes the channel, large enough for a delta per token, an end per choice and the prompt's report.
    pub(crate) fn new(
        request: Arc<Request>,
        text: TextOptions,
    ) -> (Self, mpsc::Receiver<GenerationEvent>) {
        let per_choice = request.stop.max_tokens as usize + 1;
        let capacity = per_choice
            .saturating_mul(request.num_choices as usize)
            .saturating_add(1);
        let (events, receiver) = mpsc::channel(capacity);
        (
            Submission {
                request,
                text,
                events,
            },
            receiver,
        )
    }

    pub(crate) fn request(&self) -> &Arc<Request> {
        &self.request
    }
}

/// A live request on the engine thread.
pub(crate) struct Stream {
    request: Arc<Request>,
    events: mpsc::Sender<GenerationEvent>,
    choices: Vec<ChoiceStream>,
    prompt_logprobs: Vec<PositionLogprobs>,
    num_open: u32,
    num_queued: u32,
}

/// The text of one choice.
struct ChoiceStream {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    num_output: u32,
    /// Text of tokens not yet reported.
    pending: String,
    matched_stop: Option<usize>,
    queued: bool,
    stop: Arc<[String]>,
}

impl Stream {
    pub(crate) fn new(submission: Submission, tokenizer: &Tokenizer) -> Self {
        let Submission {
            request,
            text,
            events,
        } = submission;
        let choice = || ChoiceStream {
            detokenizer: Detokenizer::new(tokenizer.clone(), text.skip_special),
            matcher: StopMatcher::new(&text.stop, text.include_stop),
            num_output: 0,
            pending: String::new(),
            matched_stop: None,
            queued: true,
            stop: Arc::clone(&text.stop),
        };
        Stream {
            choices: (0..request.num_choices).map(|_| choice()).collect(),
            num_open: request.num_choices,
            num_queued: request.num_choices,
            prompt_logprobs: Vec::new(),
            request,
            events,
        }
    }

    /// The choice was scheduled; returns true the first time.
    pub(crate) fn leave_queue(&mut self, choice: u32) -> bool {
        let Some(choice) = self.choices.get_mut(choice as usize) else {
            return false;
        };
        let first = std::mem::replace(&mut choice.queued, false);
        self.num_queued -= u32::from(first);
        first
    }

    /// Turns a row's new tokens into text before they are committed. Where a stop string completes, the row
    /// is cut after that token and marked, so that nothing later is counted or published.
    pub(crate) fn read_row(&mut self, choice: u32, index: usize, output: &mut ModelOutput) {
        let ModelOutput {
            rows,
            tokens,
            prompt_logprobs,
            ..
        } = output;
        let Some(row) = rows.get_mut(index) else {
            return;
        };
        if row.verdict != RowVerdict::Continue {
            return;
        }
        self.prompt_logprobs
            .extend_from_slice(&prompt_logprobs[row.prompt_logprobs.range()]);
        let Some(choice) = self.choices.get_mut(choice as usize) else {
            return;
        };
        for (offset, token) in (1..).zip(&tokens[row.tokens.range()]) {
            match self.request.stop.finish_at(*token, choice.num_output + 1) {
                Some(FinishReason::Stop(_)) => {
                    choice.num_output += 1;
                    return;
                }
                finish => {
                    choice.read_token(*token, self.request.stop.min_tokens);
                    if choice.matched_stop.is_some() {
                        return cut_row(row, offset);
                    }
                    if finish.is_some() {
                        return;
                    }
                }
            }
        }
    }

    /// Reports the first `num_tokens` tokens of a committed row; a prefill chunk that only brought
    /// log-probabilities of the prompt has none.
    pub(crate) fn send_accepted(
        &mut self,
        choice: u32,
        row: &OutputRow,
        num_tokens: u32,
        output: &ModelOutput,
    ) {
        if num_tokens == 0 {
            return;
        }
        if !self.prompt_logprobs.is_empty() {
            let logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.send(GenerationEvent::PromptLogprobs(logprobs));
        }
        let Some(stream) = self.choices.get_mut(choice as usize) else {
            return;
        };
        let num_tokens = num_tokens as usize;
        let logprobs = &output.logprobs[row.logprobs.range()];
        let delta = ChoiceText {
            choice,
            text: std::mem::take(&mut stream.pending),
            tokens: output.row_tokens(row)[..num_tokens].to_vec(),
            logprobs: logprobs[..num_tokens.min(logprobs.len())].to_vec(),
        };
        self.send(GenerationEvent::Delta(delta));
    }

    /// Ends a choice with what was held back.
    pub(crate) fn send_finished(&mut self, choice: u32, reason: FinishReason, summary: Summary) {
        self.leave_queue(choice);
        let Some(stream) = self.choices.get_mut(choice as usize) else {
            return;
        };
        let text = stream.finish(&reason);
        let matched_stop = stream.matched_stop.map(|index| stream.stop[index].clone());
        self.num_open = self.num_open.saturating_sub(1);
        let last = ChoiceText {
            choice,
            text,
            ..ChoiceText::default()
        };
        self.send(GenerationEvent::Finished {
            last,
            reason,
            matched_stop,
            summary,
        });
    }

    /// Choices that have not been scheduled yet.
    pub(crate) fn num_queued(&self) -> u64 {
        u64::from(self.num_queued)
    }

    /// Every choice has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.num_open == 0
    }

    /// The capacity covers every event, so sending fails only when nobody listens any more; then the
    /// listener's guard has asked for an abort.
    fn send(&self, event: GenerationEvent) {
        let _ = self.events.try_send(event);
    }
}

impl ChoiceStream {
    fn read_token(&mut self, token: millpond_scheduler::TokenId, min_tokens: u32) {
        self.num_output += 1;
        let mut text = String::new();
        self.detokenizer.push(token, &mut text);
        if text.is_empty() {
            return;
        }
        let step = if self.num_output < min_tokens {
            self.matcher.push_unchecked(&text)
        } else {
            self.matcher.push(&text)
        };
        self.pending.push_str(&step.text);
        self.matched_stop = step.matched;
    }

    /// The text still due at the end: nothing follows a stop string.
    fn finish(&mut self, reason: &FinishReason) -> String {
        let mut text = std::mem::take(&mut self.pending);
        if *reason == FinishReason::Stop(StopCause::StopString) {
            return text;
        }
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        let step = self.matcher.push_unchecked(&rest);
        text.push_str(&step.text);
        text.push_str(&self.matcher.finish());
        text
    }
}

/// Keeps the first `num_tokens` tokens of a row and marks it as ended by a stop string.
fn cut_row(row: &mut OutputRow, num_tokens: u32) {
    row.tokens.end = row.tokens.start + num_tokens;
    if !row.logprobs.is_empty() {
        row.logprobs.end = row.logprobs.start + num_tokens;
    }
    row.verdict = RowVerdict::StopString;
}
