//! A worker: scheduler and oracle, and the driver's part of a hand-off. It does what it is told, in order.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use millpond_scheduler::disagg::{Inbox, Noted};
use millpond_scheduler::mock::{BlockImage, Bursts, MockModel};
use millpond_scheduler::{
    BatchPlan, Command, Event, KvTransfer, ModelOutput, ModelRunner, Peer, Piece, Refusal,
    RequestId, Scheduler, SchedulerConfig, Ticket, Timestamp, TokenId, TransferOrder,
    TransferOutcome,
};

use crate::workload::VOCABULARY;

/// What a worker tells the coordinator.
#[derive(Debug)]
pub enum Report {
    Event(Event, Vec<TokenId>),
    Refused {
        request: RequestId,
        choice: u32,
        refusal: Refusal,
    },
    Transfer(Ticket, TransferOutcome),
}

/// One life of a worker.
pub struct Node {
    pub peer: Peer,
    pub scheduler: Scheduler,
    /// A step that was executed and not committed.
    pub is_in_flight: bool,
    pub orders: VecDeque<(Timestamp, Command)>,
    model: MockModel,
    inbox: Inbox,
    plan: BatchPlan,
    output: ModelOutput,
    events: Vec<Event>,
    /// Blocks per piece.
    piece_size: usize,
}

impl Node {
    pub fn new(peer: Peer, config: &SchedulerConfig, bursts: Bursts, piece_size: usize) -> Self {
        let block_size = NonZeroU32::new(config.block_size).expect("valid");
        let model = MockModel::oracle(VOCABULARY, block_size, config.num_blocks);
        Node {
            peer,
            scheduler: Scheduler::new(config.clone()).expect("valid"),
            is_in_flight: false,
            orders: VecDeque::new(),
            model: model.with_bursts(bursts),
            inbox: Inbox::default(),
            plan: BatchPlan::default(),
            output: ModelOutput::default(),
            events: Vec::new(),
            piece_size,
        }
    }

    /// Carries out a command; one to an earlier life is void.
    pub fn obey(
        &mut self,
        command: Command,
        now: Timestamp,
        link: &mut impl KvTransfer<Payload = BlockImage>,
        reports: &mut Vec<Report>,
    ) {
        match command {
            Command::Add { to, request } if to == self.peer => {
                if let Err(error) = self.scheduler.add(request.clone(), now) {
                    // Only a full queue is left to refuse what the coordinator found fit.
                    assert!(error.to_string().contains("wait"), "{error}");
                    reports.extend((0..request.num_choices).map(|choice| Report::Refused {
                        request: request.id,
                        choice,
                        refusal: Refusal::Busy,
                    }));
                }
            }
            Command::Receive { to, arrival } if to == self.peer => {
                let (request, choice) = (arrival.request.id, arrival.choice);
                if let Err(error) = self.scheduler.receive(arrival, now) {
                    assert!(error.is_busy(), "{error}");
                    reports.push(Report::Refused {
                        request,
                        choice,
                        refusal: Refusal::Busy,
                    });
                }
            }
            Command::StartTransfer(order) if order.from == self.peer => {
                self.send(&order, now, link, reports);
            }
            Command::RetryTransfer { to, ticket } if to == self.peer => {
                self.scheduler.retry_transfer(ticket);
            }
            Command::FinishTransfer {
                to,
                ticket,
                outcome,
            } if to == self.peer => {
                self.scheduler.transfer_finished(ticket, outcome);
            }
            Command::ReleaseOffer { to, sequence } if to == self.peer => {
                self.scheduler.release_offer(sequence);
            }
            Command::Abort { to, request } if to == self.peer => {
                self.scheduler.abort(request, now, &mut self.events);
                self.report_events(reports);
            }
            Command::Deliver { .. } | Command::Finished { .. } => {
                panic!("not a worker's: {command:?}")
            }
            _ => {}
        }
        self.check();
    }

    /// Exports the blocks of an order in pieces, as long as they are offered.
    fn send(
        &mut self,
        order: &TransferOrder,
        now: Timestamp,
        link: &mut impl KvTransfer<Payload = BlockImage>,
        reports: &mut Vec<Report>,
    ) {
        let first = order.first_block as usize;
        let end = first + order.blocks.len();
        let offered = self.scheduler.offered_blocks(order.sequence);
        let Some(source) = offered.map(|offered| offered.blocks[first..end].to_vec()) else {
            reports.push(Report::Transfer(order.ticket, TransferOutcome::Failed));
            return;
        };
        let num_pieces = source.len().div_ceil(self.piece_size) as u32;
        let pieces = source.chunks(self.piece_size);
        for ((number, from), to) in (0..).zip(pieces).zip(order.blocks.chunks(self.piece_size)) {
            let piece = Piece {
                ticket: order.ticket,
                to: order.to,
                number,
                num_pieces,
                blocks: to.to_vec(),
                payload: self.model.export_blocks(from).expect("it has them"),
            };
            link.start(piece, now);
        }
    }

    /// Imports what has come, behind the fence.
    pub fn take(&mut self, piece: &Piece<BlockImage>, reports: &mut Vec<Report>) {
        if !self.scheduler.is_receiving(piece.ticket) {
            return;
        }
        if self
            .model
            .import_blocks(&piece.blocks, &piece.payload)
            .is_err()
        {
            reports.push(Report::Transfer(piece.ticket, TransferOutcome::Failed));
            return;
        }
        match self
            .inbox
            .note(piece.ticket, piece.number, piece.num_pieces)
        {
            Noted::Complete => {
                reports.push(Report::Transfer(piece.ticket, TransferOutcome::Complete));
            }
            Noted::Partial | Noted::Again => {}
            Noted::Nonsense => panic!("{:?}", piece.ticket),
        }
    }

    /// Plans and executes a step, or commits the one that was executed.
    pub fn step(&mut self, now: Timestamp, reports: &mut Vec<Report>) {
        if self.is_in_flight {
            self.scheduler
                .commit(&self.plan, &self.output, now, &mut self.events);
            self.is_in_flight = false;
        } else if self.scheduler.has_work() {
            self.scheduler
                .schedule(now, &mut self.plan, &mut self.events);
            let next = self.scheduler.next_deadline();
            assert!(
                next.is_none_or(|next| next > now),
                "I10: {next:?} at {now:?}"
            );
            if !self.plan.is_empty() {
                self.model
                    .execute(&self.plan, &mut self.output)
                    .expect("no step fails");
                self.is_in_flight = true;
            }
        }
        self.report_events(reports);
        let scheduler = &self.scheduler;
        self.inbox.sweep(|ticket| scheduler.is_receiving(ticket));
        self.check();
    }

    fn report_events(&mut self, reports: &mut Vec<Report>) {
        for event in self.events.drain(..) {
            let tokens = match &event {
                Event::Accepted {
                    row, num_tokens, ..
                } => {
                    let row = &self.output.rows[*row as usize];
                    self.output.row_tokens(row)[..*num_tokens as usize].to_vec()
                }
                _ => Vec::new(),
            };
            reports.push(Report::Event(event, tokens));
        }
    }

    fn check(&self) {
        if let Err(broken) = self.scheduler.check_invariants() {
            panic!("{:?}: {broken}", self.peer);
        }
        let stats = self.scheduler.stats();
        let b = stats.blocks;
        let sum = b.free + b.active + b.cached_evictable + b.cached_pinned + b.in_transfer;
        assert_eq!(sum, b.total, "I1: {b:?}");
        let num_live =
            stats.num_running + stats.num_waiting + stats.num_receiving + stats.num_offered;
        assert_eq!(num_live > 0, self.scheduler.has_work(), "I6: {stats:?}");
    }

    /// Nothing lives here, and every block can be had.
    pub fn check_empty(&self) {
        let stats = self.scheduler.stats();
        assert!(
            !self.scheduler.has_work() && !self.is_in_flight,
            "{stats:?}"
        );
        assert_eq!(stats.blocks.available(), stats.blocks.total, "{stats:?}");
        assert_eq!(self.scheduler.next_deadline(), None);
        assert!(self.inbox.is_empty());
    }

    /// It has nothing to do and nothing to hear.
    pub fn is_quiet(&self) -> bool {
        !self.scheduler.has_work() && !self.is_in_flight && self.orders.is_empty()
    }
}
