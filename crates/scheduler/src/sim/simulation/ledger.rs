//! What clients see and what is counted: requests under way, their tokens, and the report.
//!
//! It also judges: every token once and in order, one end per choice, and (on the oracle) the very tokens
//! that a request must get.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::super::report::{Report, Sample, Transfers};
use super::super::worker::{Stand, Worker};
use super::super::workload::{Prompt, VOCABULARY, Workload};
use super::{Progress, SimulationConfig};
use crate::mock::oracle_output;
use crate::plan::Summary;
use crate::request::{FinishReason, Request, RequestId, TokenId};
use crate::stats::{BlockCounts, Counters};
use crate::time::{Span, Timestamp};

/// A request that has not ended.
struct Live {
    request: Arc<Request>,
    session: u32,
    turn: u32,
    choices: Vec<Answer>,
    num_open: u32,
}

/// What has come of one choice.
#[derive(Clone, Default)]
struct Answer {
    output: Vec<TokenId>,
    last_token: Option<Timestamp>,
    has_ended: bool,
}

/// The next turn of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextTurn {
    pub(super) session: u32,
    pub(super) turn: u32,
    pub(super) pause: Span,
}

/// Requests under way and the report so far.
pub(super) struct Ledger {
    live: BTreeMap<RequestId, Live>,
    /// Prompt and answer so far, of sessions that go on.
    histories: BTreeMap<u32, Vec<TokenId>>,
    /// For each session the pauses before its turns.
    pauses: Vec<Vec<Span>>,
    report: Report,
    buried: Counters,
    needed_prefill: u64,
    num_sent: u64,
    num_ended: u64,
    num_requests: u64,
    block_size: u32,
    max_context: u32,
    /// Everything must be over by then, if nothing arrives any more.
    settle_within: Option<Span>,
    quiet_from: Timestamp,
    judges_tokens: bool,
    first_arrival: Option<Timestamp>,
}

impl Ledger {
    pub(super) fn new(workload: &Workload, config: &SimulationConfig) -> Self {
        let pauses = |session: &super::super::workload::Session| {
            session.turns.iter().map(|turn| turn.pause).collect()
        };
        Ledger {
            live: BTreeMap::new(),
            histories: BTreeMap::new(),
            pauses: workload.sessions.iter().map(pauses).collect(),
            report: Report::new(config.slo),
            buried: Counters::default(),
            needed_prefill: 0,
            num_sent: 0,
            num_ended: 0,
            num_requests: workload.num_requests() as u64,
            block_size: config.workers.first().map_or(1, |w| w.scheduler.block_size),
            max_context: config
                .workers
                .first()
                .map_or(0, |w| w.scheduler.max_context),
            settle_within: config.settle_within,
            quiet_from: config.faults_until,
            judges_tokens: config.stand == Stand::Oracle,
            first_arrival: None,
        }
    }

    /// A name for the next request.
    pub(super) fn mint_id(&mut self) -> RequestId {
        self.num_sent += 1;
        RequestId(self.num_sent)
    }

    /// The history of a session and what is added to it.
    pub(super) fn prompt(&mut self, session: u32, added: &Prompt) -> Arc<[TokenId]> {
        let mut tokens = self.histories.remove(&session).unwrap_or_default();
        added.spell(&mut tokens);
        tokens.into()
    }

    /// A request was sent.
    pub(super) fn open(&mut self, request: &Arc<Request>, session: u32, turn: u32, now: Timestamp) {
        self.report.num_prompt_tokens += request.prompt.len() as u64;
        self.first_arrival.get_or_insert(now);
        self.quiet_from = self.quiet_from.max(now);
        let live = Live {
            request: Arc::clone(request),
            session,
            turn,
            choices: vec![Answer::default(); request.num_choices as usize],
            num_open: request.num_choices,
        };
        self.live.insert(request.id, live);
    }

    /// Nobody took it; its session ends.
    pub(super) fn refuse(&mut self, request: RequestId) {
        if let Some(live) = self.live.remove(&request) {
            self.report.num_prompt_tokens -= live.request.prompt.len() as u64;
            self.report.ended.refused += 1;
            self.num_ended += 1 + self.num_turns_after(live.session, live.turn);
        }
    }

    /// Has it been sent and not ended?
    pub(super) fn is_live(&self, request: RequestId) -> bool {
        self.live.contains_key(&request)
    }

    /// Tokens reached the client.
    pub(super) fn deliver(
        &mut self,
        request: RequestId,
        choice: u32,
        tokens: &[TokenId],
        now: Timestamp,
    ) -> Result<(), String> {
        let answer = self
            .live
            .get_mut(&request)
            .and_then(|live| live.choices.get_mut(choice as usize))
            .filter(|answer| !answer.has_ended)
            .ok_or_else(|| {
                format!("I5: tokens for {request:?}, choice {choice}, which has ended")
            })?;
        answer.output.extend_from_slice(tokens);
        self.report.num_output_tokens += tokens.len() as u64;
        for _ in tokens {
            if let Some(last) = answer.last_token.replace(now) {
                self.report.itl.add(now - last);
            }
        }
        Ok(())
    }

    /// A choice ended. With its last choice the request is over, and its session may go on.
    pub(super) fn finish(
        &mut self,
        request: RequestId,
        choice: u32,
        reason: &FinishReason,
        summary: &Summary,
    ) -> Result<Option<NextTurn>, String> {
        let live = self.live.get_mut(&request).ok_or_else(|| {
            format!("I4: {request:?}, choice {choice}, ended and was not live: {reason:?}")
        })?;
        let answer = live
            .choices
            .get_mut(choice as usize)
            .filter(|answer| !answer.has_ended)
            .ok_or_else(|| format!("I4: {request:?}, choice {choice}, ended twice"))?;
        answer.has_ended = true;
        live.num_open -= 1;
        let is_over = live.num_open == 0;
        if self.judges_tokens {
            judge(
                &live.request,
                choice,
                &answer.output,
                reason,
                self.max_context,
            )?;
        }
        if answer.output.len() != summary.num_output_tokens as usize {
            return Err(format!(
                "I12: {request:?}, choice {choice}: {} tokens delivered, {} counted",
                answer.output.len(),
                summary.num_output_tokens
            ));
        }
        self.count(reason, summary);
        if !is_over {
            return Ok(None);
        }
        let live = self.live.remove(&request).ok_or("it was there above")?;
        Ok(self.next_turn(live, reason))
    }

    fn count(&mut self, reason: &FinishReason, summary: &Summary) {
        self.report.end(reason, summary);
        let end = summary.finished;
        self.report.duration = end - self.first_arrival.unwrap_or(end);
        if summary.first_scheduled.is_some() {
            let (num_prompt, num_cached) = (summary.num_prompt_tokens, summary.num_cached_tokens);
            self.report
                .hits
                .add(num_prompt, num_cached, self.block_size);
            if let FinishReason::Length | FinishReason::Stop(_) = reason {
                self.needed_prefill += u64::from(num_prompt - num_cached.min(num_prompt));
            }
        }
    }

    fn next_turn(&mut self, live: Live, reason: &FinishReason) -> Option<NextTurn> {
        self.num_ended += 1;
        let num_later = self.num_turns_after(live.session, live.turn);
        let goes_on = matches!(reason, FinishReason::Length | FinishReason::Stop(_));
        if num_later == 0 || !goes_on {
            self.num_ended += num_later;
            return None;
        }
        let mut history = live.request.prompt.to_vec();
        history.extend(
            live.choices
                .first()
                .into_iter()
                .flat_map(|answer| &answer.output),
        );
        self.histories.insert(live.session, history);
        let turn = live.turn + 1;
        let pauses = self.pauses.get(live.session as usize)?;
        Some(NextTurn {
            session: live.session,
            turn,
            pause: *pauses.get(turn as usize)?,
        })
    }

    fn num_turns_after(&self, session: u32, turn: u32) -> u64 {
        let num_turns = self.pauses.get(session as usize).map_or(0, Vec::len) as u64;
        num_turns.saturating_sub(u64::from(turn) + 1)
    }

    /// A step began.
    pub(super) fn note_step(&mut self, time: Span) {
        self.report.num_steps += 1;
        self.report.busy.0 += time.0;
    }

    /// Something went wrong on purpose.
    pub(super) fn count_fault(&mut self) {
        self.report.num_faults += 1;
    }

    /// Counts of hand-offs, to add to.
    pub(super) fn transfers(&mut self) -> &mut Transfers {
        &mut self.report.transfers
    }

    /// A worker is lost, and its counters with it.
    pub(super) fn bury(&mut self, worker: &Worker) {
        let counters = worker.scheduler.stats().counters;
        self.buried.num_preemptions += counters.num_preemptions;
        self.buried.num_prefill_tokens += counters.num_prefill_tokens;
    }

    /// Notes how things stand, if it is time to.
    pub(super) fn sample<'w>(&mut self, now: Timestamp, workers: impl Iterator<Item = &'w Worker>) {
        if !self.report.series.is_due(now) {
            return;
        }
        let mut sample = Sample {
            at: now,
            num_output_tokens: self.report.num_output_tokens,
            ..Sample::default()
        };
        for worker in workers {
            let stats = worker.scheduler.stats();
            sample.num_running += stats.num_running;
            sample.num_waiting += stats.num_waiting;
            sample.blocks = sum(sample.blocks, stats.blocks);
        }
        self.report.series.push(sample);
    }

    /// How far it got.
    pub(super) fn progress(&self) -> Progress {
        Progress {
            num_ended: self.num_ended,
            num_requests: self.num_requests,
        }
    }

    /// Liveness: some time after the last arrival and the last fault nothing is under way.
    pub(super) fn check_time(&self, now: Timestamp) -> Result<(), String> {
        let Some(within) = self.settle_within else {
            return Ok(());
        };
        match self.live.keys().next() {
            Some(id) if now > self.quiet_from + within => Err(format!(
                "liveness: {} requests are under way {} s after the last arrival and fault, first {id:?}",
                self.live.len(),
                within.as_secs_f64()
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Nothing is left to happen.
    pub(super) fn check_rest(&self) -> Result<(), String> {
        match self.live.keys().next() {
            Some(id) => Err(format!(
                "liveness: nothing is left to happen, and {} requests have not ended, first {id:?}",
                self.live.len()
            )),
            None => Ok(()),
        }
    }

    /// The report, once all is over.
    pub(super) fn close<'w>(
        mut self,
        workers: impl Iterator<Item = &'w Worker>,
        digest: u64,
    ) -> Report {
        for worker in workers {
            self.bury(worker);
        }
        let lost = &mut self.report.lost;
        lost.num_preemptions = self.buried.num_preemptions;
        lost.num_prefill_tokens = self
            .buried
            .num_prefill_tokens
            .saturating_sub(self.needed_prefill);
        self.report.digest = digest;
        self.report
    }
}

/// What a choice got must be what the oracle says, or the beginning of it if it was cut short.
fn judge(
    request: &Request,
    choice: u32,
    output: &[TokenId],
    reason: &FinishReason,
    max_context: u32,
) -> Result<(), String> {
    let vocabulary = NonZeroU32::new(VOCABULARY).ok_or("a vocabulary has tokens")?;
    let mut expected = oracle_output(request, choice, vocabulary);
    expected.truncate((max_context as usize).saturating_sub(request.prompt.len()));
    let is_whole = matches!(reason, FinishReason::Length | FinishReason::Stop(_));
    if let FinishReason::Error(crate::request::RowError::Inconsistent(what)) = reason {
        return Err(format!("A6: {:?}, choice {choice}: {what}", request.id));
    }
    match expected.starts_with(output) && (!is_whole || expected.len() == output.len()) {
        true => Ok(()),
        false => Err(format!(
            "A6: {:?}, choice {choice}: {} tokens that are not those it gets alone",
            request.id,
            output.len()
        )),
    }
}

fn sum(a: BlockCounts, b: BlockCounts) -> BlockCounts {
    BlockCounts {
        total: a.total + b.total,
        free: a.free + b.free,
        active: a.active + b.active,
        cached_evictable: a.cached_evictable + b.cached_evictable,
        cached_pinned: a.cached_pinned + b.cached_pinned,
        in_transfer: a.in_transfer + b.in_transfer,
    }
}
