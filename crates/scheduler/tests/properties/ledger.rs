//! What every client was told, held against what it must be told: right tokens, in order, once, and one end.
//!
//! It reads events and never the scheduler; the right tokens come from `oracle_output`.

use std::collections::BTreeMap;
use std::sync::Arc;

use millpond_scheduler::mock::oracle_output;
use millpond_scheduler::{
    DeadlineKind, FinishReason, Request, RequestId, RowError, StopCause, Summary, Timestamp,
    TokenId,
};

use crate::workload::VOCABULARY;

/// Names one choice of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChoiceId {
    pub request: RequestId,
    pub choice: u32,
}

/// What is known of one choice.
#[derive(Clone, Debug)]
pub struct Record {
    pub request: Arc<Request>,
    pub tokens: Vec<TokenId>,
    /// Tokens of the prompt whose log-probabilities were reported, in order.
    pub prompt_logprobs: Vec<TokenId>,
    pub was_scheduled: bool,
    pub end: Option<End>,
    excuse: Option<Excuse>,
}

/// How a choice ended.
#[derive(Clone, Debug)]
pub struct End {
    pub reason: FinishReason,
    pub summary: Summary,
}

/// Why a choice may end otherwise than by its own stop conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Excuse {
    /// It was aborted.
    Aborted,
    /// Its row was made to fail.
    Failed(RowError),
    /// The whole step was made to fail.
    StepFailed,
    /// The harness, in the driver's place, found a stop string.
    StopString,
}

/// All choices of all requests that were taken in.
#[derive(Debug, Default)]
pub struct Ledger {
    records: BTreeMap<ChoiceId, Record>,
    num_live: u32,
    max_context: u32,
}

impl Ledger {
    pub fn new(max_context: u32) -> Self {
        Ledger {
            max_context,
            ..Ledger::default()
        }
    }

    /// A choice was taken in.
    pub fn open(&mut self, id: ChoiceId, request: &Arc<Request>) {
        let record = Record {
            request: Arc::clone(request),
            tokens: Vec::new(),
            prompt_logprobs: Vec::new(),
            was_scheduled: false,
            end: None,
            excuse: None,
        };
        let previous = self.records.insert(id, record);
        assert!(previous.is_none(), "{id:?} was given out twice");
        self.num_live += 1;
    }

    /// Choices that have not ended.
    pub fn num_live(&self) -> u32 {
        self.num_live
    }

    pub fn record(&self, id: ChoiceId) -> &Record {
        &self.records[&id]
    }

    pub fn records(&self) -> impl Iterator<Item = (ChoiceId, &Record)> {
        self.records.iter().map(|(id, record)| (*id, record))
    }

    /// The choices of one request.
    pub fn choices(&self, request: RequestId) -> impl Iterator<Item = (ChoiceId, &Record)> {
        self.records().filter(move |(id, _)| id.request == request)
    }

    /// Choices that have not ended.
    pub fn live(&self) -> impl Iterator<Item = (ChoiceId, &Record)> {
        self.records().filter(|(_, record)| record.end.is_none())
    }

    /// It may, and must soon, end for this reason.
    pub fn excuse(&mut self, id: ChoiceId, excuse: Excuse) {
        self.live_record(id).excuse = Some(excuse);
    }

    pub fn scheduled(&mut self, id: ChoiceId) {
        self.live_record(id).was_scheduled = true;
    }

    /// Tokens were accepted (I5: never after the end).
    pub fn accept(&mut self, id: ChoiceId, tokens: &[TokenId]) {
        self.live_record(id).tokens.extend(tokens);
    }

    pub fn report_prompt(&mut self, id: ChoiceId, tokens: impl Iterator<Item = TokenId>) {
        self.live_record(id).prompt_logprobs.extend(tokens);
    }

    /// A choice ended: once, and as it should (I4).
    pub fn close(&mut self, id: ChoiceId, reason: FinishReason, summary: Summary) {
        let max_context = self.max_context;
        let record = self.live_record(id);
        record.check_summary(&summary);
        record.check_end(id, &reason, summary.finished, max_context);
        record.end = Some(End { reason, summary });
        self.num_live -= 1;
    }

    fn live_record(&mut self, id: ChoiceId) -> &mut Record {
        let record = self.records.get_mut(&id);
        let record = record.unwrap_or_else(|| panic!("{id:?} was never taken in"));
        assert!(record.end.is_none(), "{id:?} was heard of after its end");
        record
    }

    /// Every excused choice has ended: failures, stops and aborts take effect at once.
    pub fn check_excused_have_ended(&self) {
        for (id, record) in self.live() {
            assert_eq!(record.excuse, None, "{id:?} goes on");
        }
    }

    /// No live choice is past a deadline that binds it.
    pub fn check_deadlines(&self, now: Timestamp) {
        for (id, record) in self.live() {
            if let Some((kind, at)) = record.next_deadline() {
                assert!(now <= at, "{id:?} outlived its {kind:?} deadline");
            }
        }
    }

    /// The earliest deadline that binds a live choice.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let deadlines = self.live().filter_map(|(_, record)| record.next_deadline());
        deadlines.map(|(_, at)| at).min()
    }
}

impl Record {
    /// The whole output and its natural end, however it is scheduled.
    pub fn expected(&self, choice: u32, max_context: u32) -> (Vec<TokenId>, FinishReason) {
        let request = &self.request;
        let mut tokens = oracle_output(request, choice, VOCABULARY);
        tokens.truncate(max_context as usize - request.prompt.len());
        let last = tokens.last().copied().unwrap_or_default();
        let natural = request.stop.finish_at(last, tokens.len() as u32);
        (tokens, natural.unwrap_or(FinishReason::Length))
    }

    fn check_end(&self, id: ChoiceId, reason: &FinishReason, now: Timestamp, max_context: u32) {
        let (expected, natural) = self.expected(id.choice, max_context);
        assert!(
            expected.starts_with(&self.tokens),
            "{id:?} ({reason:?}) got {:?}\nalone it gets {expected:?}",
            self.tokens
        );
        match reason {
            FinishReason::Stop(StopCause::StopString) => {
                assert_eq!(self.excuse, Some(Excuse::StopString), "{id:?}");
            }
            FinishReason::Stop(_) | FinishReason::Length => {
                assert_eq!((&self.tokens, reason), (&expected, &natural), "{id:?}");
                self.check_prompt_logprobs(id);
            }
            FinishReason::Cancelled => assert_eq!(self.excuse, Some(Excuse::Aborted), "{id:?}"),
            FinishReason::Timeout(kind) => {
                let deadline = self.deadline(*kind);
                assert!(deadline.is_some_and(|at| at <= now), "{id:?} {kind:?}");
            }
            FinishReason::Error(RowError::StepFailed(_)) => {
                assert_eq!(self.excuse, Some(Excuse::StepFailed), "{id:?}");
            }
            FinishReason::Error(error) => {
                assert_eq!(self.excuse, Some(Excuse::Failed(error.clone())), "{id:?}");
            }
        }
    }

    /// Choice 0 reports every prompt token after the first, once; the others share its prompt.
    fn check_prompt_logprobs(&self, id: ChoiceId) {
        let asked = self.request.sampling.prompt_logprobs.is_some();
        if asked && id.choice == 0 {
            assert_eq!(self.prompt_logprobs, self.request.prompt[1..], "{id:?}");
        }
    }

    fn check_summary(&self, summary: &Summary) {
        let num_prompt = self.request.prompt.len() as u32;
        assert_eq!(summary.num_prompt_tokens, num_prompt);
        assert_eq!(summary.num_output_tokens, self.tokens.len() as u32);
        assert!(summary.num_cached_tokens < num_prompt);
        assert_eq!(summary.first_scheduled.is_some(), self.was_scheduled);
        assert_eq!(summary.first_token.is_some(), !self.tokens.is_empty());
        let times = [
            Some(summary.arrival),
            summary.first_scheduled,
            summary.first_token,
            Some(summary.finished),
        ];
        assert!(times.iter().flatten().is_sorted(), "{summary:?}");
    }

    fn deadline(&self, kind: DeadlineKind) -> Option<Timestamp> {
        let deadlines = &self.request.deadlines;
        match kind {
            DeadlineKind::Queue => deadlines.queue.filter(|_| !self.was_scheduled),
            DeadlineKind::FirstToken => deadlines.first_token.filter(|_| self.tokens.is_empty()),
            DeadlineKind::Total => deadlines.total,
        }
    }

    /// The earliest deadline that binds it now.
    fn next_deadline(&self) -> Option<(DeadlineKind, Timestamp)> {
        let kinds = [
            DeadlineKind::Queue,
            DeadlineKind::FirstToken,
            DeadlineKind::Total,
        ];
        let binding = kinds.map(|kind| Some((kind, self.deadline(kind)?)));
        binding.into_iter().flatten().min_by_key(|(_, at)| *at)
    }
}
