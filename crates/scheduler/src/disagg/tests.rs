//! The coordinator alone: workers are played by hand, so that everything can come in any order.

use super::*;
use crate::plan::BlockId;
use crate::request::{
    CacheSalt, DeadlineKind, Deadlines, RowError, SamplingParams, StopConditions,
};

const P: u32 = 0;
const D1: u32 = 1;
const D2: u32 = 2;

const MS: u64 = 1_000_000;

/// A coordinator, what it said last, and the time.
struct Table {
    coordinator: Coordinator,
    commands: Vec<Command>,
    now: Timestamp,
}

fn request(id: u64, num_choices: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: (0..10).map(TokenId).collect(),
        sampling: SamplingParams::default(),
        stop: StopConditions {
            max_tokens: 8,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            ignore_eos: false,
        },
        num_choices,
        priority: 0,
        salt: CacheSalt::default(),
        arrival: Timestamp(0),
        deadlines: Deadlines::default(),
    }
}

impl Table {
    /// One prefill worker and two that decode.
    fn split() -> Self {
        Table::new(&[Role::Prefill, Role::Decode, Role::Decode])
    }

    fn new(roles: &[Role]) -> Self {
        let worker = |role: &Role| SchedulerConfig {
            role: *role,
            ..SchedulerConfig::default()
        };
        let workers: Vec<SchedulerConfig> = roles.iter().map(worker).collect();
        Table {
            coordinator: Coordinator::new(CoordinatorConfig::default(), &workers).expect("valid"),
            commands: Vec::new(),
            now: Timestamp(0),
        }
    }

    fn peer(&self, worker: u32) -> Peer {
        let peer = self.coordinator.peer(WorkerId(worker));
        peer.expect("it is configured")
    }

    /// Lets `act` happen; returns what follows.
    fn tell(
        &mut self,
        act: impl FnOnce(&mut Coordinator, Timestamp, &mut Vec<Command>),
    ) -> Vec<Command> {
        let mut commands = Vec::new();
        act(&mut self.coordinator, self.now, &mut commands);
        assert_eq!(self.coordinator.check_invariants(), Ok(()));
        self.commands.extend(commands.iter().cloned());
        commands
    }

    fn submit(&mut self, request: Request) -> Vec<Command> {
        self.tell(|c, now, out| {
            c.submit(Arc::new(request), now, out).expect("acceptable");
        })
    }

    fn event(&mut self, from: Peer, event: &Event, tokens: &[u32]) -> Vec<Command> {
        let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
        self.tell(|c, now, out| c.event(from, event, &tokens, now, out))
    }

    fn accepted(&mut self, from: Peer, choice: u32, tokens: &[u32]) -> Vec<Command> {
        let event = Event::Accepted {
            request: RequestId(1),
            choice,
            row: 0,
            num_tokens: tokens.len() as u32,
        };
        self.event(from, &event, tokens)
    }

    fn prefilled(&mut self, from: Peer, choice: u32) -> Vec<Command> {
        let event = Event::Prefilled {
            request: RequestId(1),
            choice,
            sequence: SequenceId(u64::from(choice)),
            num_tokens: 10,
            progress: Progress {
                first_scheduled: Some(self.now),
                first_token: Some(self.now),
                ..Progress::default()
            },
        };
        self.event(from, &event, &[])
    }

    fn reserved(&mut self, from: Peer, ticket: Ticket, num_blocks: u32) -> Vec<Command> {
        let event = Event::Reserved {
            request: RequestId(1),
            choice: 0,
            ticket,
            first_block: 0,
            blocks: (0..num_blocks).map(BlockId).collect(),
        };
        self.event(from, &event, &[])
    }

    fn finished(&mut self, from: Peer, choice: u32, reason: FinishReason) -> Vec<Command> {
        let event = Event::Finished {
            request: RequestId(1),
            choice,
            reason,
            summary: Summary::default(),
        };
        self.event(from, &event, &[])
    }

    fn transferred(&mut self, ticket: Ticket, outcome: TransferOutcome) -> Vec<Command> {
        self.tell(|c, now, out| c.transfer_finished(ticket, outcome, now, out))
    }

    fn expire(&mut self, now: u64) -> Vec<Command> {
        self.now = Timestamp(now);
        self.tell(|c, now, out| c.expire(now, out))
    }

    fn lose(&mut self, worker: u32) -> Vec<Command> {
        self.tell(|c, now, out| c.worker_lost(WorkerId(worker), now, out))
    }

    fn bring_back(&mut self, worker: u32) -> Vec<Command> {
        self.tell(|c, now, out| {
            c.worker_back(WorkerId(worker), now, out);
        })
    }

    /// Request 1 up to its hand-off: who receives it, under which ticket.
    fn hand_over(&mut self) -> (Peer, Ticket) {
        let from = self.peer(P);
        self.submit(request(1, 1));
        self.accepted(from, 0, &[100]);
        let commands = self.prefilled(from, 0);
        arrival(&commands)
    }

    /// The same, up to the copying.
    fn transfer(&mut self) -> (Peer, Ticket) {
        let (to, ticket) = self.hand_over();
        let commands = self.reserved(to, ticket, 1);
        assert!(matches!(commands[..], [Command::StartTransfer(_)]));
        (to, ticket)
    }

    /// The tokens and the reasons that the client of request 1 was told.
    fn client(&self) -> (Vec<u32>, Vec<FinishReason>) {
        let (mut delivered, mut reasons) = (Vec::new(), Vec::new());
        for command in &self.commands {
            match command {
                Command::Deliver { tokens, .. } => delivered.extend(tokens.iter().map(|t| t.0)),
                Command::Finished { reason, .. } => reasons.push(reason.clone()),
                _ => {}
            }
        }
        (delivered, reasons)
    }

    /// It goes on at `on` to its end, and nothing is left.
    fn finish(&mut self, on: Peer) {
        self.accepted(on, 0, &[101, 102]);
        self.finished(on, 0, FinishReason::Length);
        assert_eq!(
            self.client(),
            (vec![100, 101, 102], vec![FinishReason::Length])
        );
        self.check_empty();
    }

    fn check_empty(&self) {
        assert!(self.coordinator.is_idle());
        let stats = self.coordinator.stats();
        let sizes = (stats.num_requests, stats.num_parked, stats.num_offers);
        assert_eq!(sizes, (0, 0, 0));
        assert_eq!(self.coordinator.next_deadline(), None);
    }
}

/// Who is to receive what, under which ticket.
#[track_caller]
fn arrival(commands: &[Command]) -> (Peer, Ticket) {
    match commands {
        [.., Command::Receive { to, arrival }] => {
            assert_eq!(arrival.output, [TokenId(100)]);
            (*to, arrival.source.expect("it has a source").ticket)
        }
        _ => panic!("{commands:?}"),
    }
}

fn release(to: Peer) -> Command {
    Command::ReleaseOffer {
        to,
        sequence: SequenceId(0),
    }
}

fn finish_transfer(to: Peer, ticket: Ticket, outcome: TransferOutcome) -> Command {
    Command::FinishTransfer {
        to,
        ticket,
        outcome,
    }
}

#[test]
fn a_request_goes_from_prefill_to_decode() {
    let mut table = Table::split();
    let commands = table.submit(request(1, 1));
    let from = table.peer(P);
    assert!(matches!(&commands[..], [Command::Add { to, .. }] if *to == from));
    let commands = table.accepted(from, 0, &[100]);
    assert!(matches!(&commands[..], [Command::Deliver { .. }]));
    let (to, ticket) = arrival(&table.prefilled(from, 0));
    assert_eq!(to, table.peer(D1));
    let commands = table.reserved(to, ticket, 3);
    let Command::StartTransfer(order) = &commands[0] else {
        panic!("{commands:?}");
    };
    assert_eq!((order.from, order.to, order.ticket), (from, to, ticket));
    assert_eq!((order.sequence, order.blocks.len()), (SequenceId(0), 3));
    let commands = table.transferred(ticket, TransferOutcome::Complete);
    assert_eq!(
        commands,
        [
            finish_transfer(to, ticket, TransferOutcome::Complete),
            release(from)
        ]
    );
    table.finish(to);
    assert_eq!(table.coordinator.stats().counters.num_transfers, 1);
}

#[test]
fn what_lacks_nothing_is_released_at_once() {
    let mut table = Table::split();
    let (to, ticket) = table.hand_over();
    assert_eq!(table.reserved(to, ticket, 0), [release(table.peer(P))]);
    assert_eq!(table.transferred(ticket, TransferOutcome::Complete), []);
    table.finish(to);
    let counters = table.coordinator.stats().counters;
    assert_eq!((counters.num_spared, counters.num_fenced), (1, 1));
}

#[test]
fn three_tries_each_with_a_generation_then_it_is_computed_again() {
    let mut table = Table::split();
    let (to, first) = table.transfer();
    let mut ticket = first;
    for generation in 2..=3 {
        let commands = table.transferred(ticket, TransferOutcome::Failed);
        assert_eq!(table.transferred(ticket, TransferOutcome::Failed), []);
        ticket = ticket.next();
        assert_eq!(ticket.generation, generation);
        assert_eq!(commands[0], Command::RetryTransfer { to, ticket });
        let is_next =
            matches!(&commands[1], Command::StartTransfer(order) if order.ticket == ticket);
        assert!(is_next, "{commands:?}");
        for late in [TransferOutcome::Complete, TransferOutcome::Failed] {
            assert_eq!(table.transferred(first, late), []);
        }
    }
    let commands = table.transferred(ticket, TransferOutcome::Failed);
    assert_eq!(
        commands,
        [
            finish_transfer(to, ticket, TransferOutcome::Failed),
            release(table.peer(P))
        ]
    );
    table.finish(to);
    let counters = table.coordinator.stats().counters;
    assert_eq!((counters.num_tries, counters.num_recomputed), (3, 1));
    assert_eq!(counters.num_fenced, 6);
}

#[test]
fn a_try_that_takes_too_long_has_failed() {
    let mut table = Table::split();
    let (to, ticket) = table.transfer();
    let timeout = CoordinatorConfig::default().try_timeout;
    assert_eq!(
        table.coordinator.next_deadline(),
        Some(Timestamp(timeout.0))
    );
    assert_eq!(table.expire(timeout.0 - 1), []);
    let commands = table.expire(timeout.0);
    assert!(matches!(commands[..], [Command::RetryTransfer { .. }, _]));
    table.transferred(ticket.next(), TransferOutcome::Complete);
    table.finish(to);
}

#[test]
fn leases_that_end_on_either_side_leave_the_receiver_alone_with_it() {
    let gone = Event::OfferExpired {
        request: RequestId(1),
        choice: 0,
        sequence: SequenceId(0),
    };
    let mut table = Table::split();
    let (to, ticket) = table.hand_over();
    let commands = table.event(table.peer(P), &gone, &[]);
    assert_eq!(
        commands,
        [finish_transfer(to, ticket, TransferOutcome::Failed)]
    );
    assert_eq!(table.event(table.peer(P), &gone, &[]), []);
    table.finish(to);

    let mut table = Table::split();
    let (to, ticket) = table.transfer();
    let expired = Event::TransferExpired {
        request: RequestId(1),
        choice: 0,
        ticket,
    };
    assert_eq!(table.event(to, &expired, &[]), [release(table.peer(P))]);
    assert_eq!(table.transferred(ticket, TransferOutcome::Complete), []);
    table.finish(to);
}

#[test]
fn d02_a_lost_decode_worker_is_replaced_from_the_tokens_or_from_the_offer() {
    let mut table = Table::split();
    let (to, ticket) = table.transfer();
    let commands = table.lose(to.worker.0);
    let (other, second) = arrival(&commands);
    assert_eq!((other, second), (table.peer(D2), ticket.next()));
    assert_eq!(table.reserved(to, ticket, 1), [], "it is not heard");
    table.reserved(other, second, 1);
    table.transferred(second, TransferOutcome::Complete);
    table.accepted(other, 0, &[101]);
    table.bring_back(D1);
    let commands = table.lose(D2);
    let [Command::Receive { to, arrival }] = &commands[..] else {
        panic!("{commands:?}");
    };
    assert_eq!(*to, table.peer(D1));
    assert_eq!(to.epoch, 2);
    assert_eq!(arrival.output, [TokenId(100), TokenId(101)]);
    assert_eq!((arrival.source, arrival.num_reported), (None, 9));
    let num_fenced = table.coordinator.stats().counters.num_fenced;
    assert_eq!(table.accepted(other, 0, &[102]), [], "a zombie");
    let counters = table.coordinator.stats().counters;
    assert_eq!(counters.num_fenced, num_fenced + 1);
    table.accepted(*to, 0, &[102]);
    table.finished(*to, 0, FinishReason::Length);
    assert_eq!(table.client().0, [100, 101, 102]);
    table.check_empty();
}

#[test]
fn a_lost_prefill_worker_costs_the_receiver_a_prefill() {
    let mut table = Table::split();
    let (to, ticket) = table.transfer();
    let commands = table.lose(P);
    assert_eq!(
        commands,
        [finish_transfer(to, ticket, TransferOutcome::Failed)]
    );
    table.finish(to);

    let mut table = Table::split();
    table.submit(request(1, 2));
    let commands = table.lose(P);
    let decoders = [table.peer(D1), table.peer(D2)];
    let fallen_back = commands.iter().filter(|command| {
        matches!(command, Command::Receive { to, arrival }
            if decoders.contains(to) && arrival.output.is_empty())
    });
    assert_eq!((fallen_back.count(), commands.len()), (2, 2));
}

#[test]
fn nobody_to_decode_parks_the_choice_and_keeps_its_offer() {
    let mut table = Table::new(&[Role::Prefill, Role::Decode]);
    let from = table.peer(P);
    table.submit(request(1, 1));
    table.accepted(from, 0, &[100]);
    table.lose(D1);
    assert_eq!(table.prefilled(from, 0), []);
    assert_eq!(table.coordinator.stats().num_parked, 1);
    assert_eq!(table.expire(100 * MS), [], "still nobody");
    let (to, ticket) = arrival(&table.bring_back(D1));
    assert_eq!(ticket.generation, 1, "no try was made");
    table.reserved(to, ticket, 0);
    table.finish(to);
}

#[test]
fn a_busy_worker_is_asked_again_later_and_a_final_no_is_an_end() {
    let refuse = |table: &mut Table, by: Peer, refusal: Refusal| {
        table.tell(|c, now, out| c.refused(by, RequestId(1), 0, refusal, now, out))
    };
    let mut table = Table::new(&[Role::Prefill, Role::Decode]);
    let (to, ticket) = table.hand_over();
    assert_eq!(refuse(&mut table, to, Refusal::Busy), []);
    assert_eq!(refuse(&mut table, to, Refusal::Busy), [], "it has nothing");
    assert_eq!(table.coordinator.stats().num_parked, 1);
    let commands = table.expire(100 * MS);
    assert_eq!(arrival(&commands), (to, ticket));
    let commands = refuse(&mut table, to, Refusal::Never("no".into()));
    assert_eq!(commands[0], release(table.peer(P)));
    let reason = FinishReason::Error(RowError::Abandoned("no".into()));
    assert_eq!(table.client().1, [reason]);
    table.check_empty();
}

#[test]
fn a_choice_that_outlives_too_many_workers_is_given_up() {
    let mut table = Table::new(&[Role::Aggregated]);
    table.submit(request(1, 1));
    for _ in 0..3 {
        table.lose(0);
        table.bring_back(0);
        assert_eq!(table.client().1, []);
    }
    table.lose(0);
    let [FinishReason::Error(RowError::Abandoned(_))] = &table.client().1[..] else {
        panic!("{:?}", table.client());
    };
    table.check_empty();
}

#[test]
fn deadlines_of_what_is_parked_are_minded_here() {
    let mut table = Table::new(&[Role::Aggregated]);
    table.lose(0);
    let mut late = request(1, 2);
    late.deadlines.queue = Some(Timestamp(250 * MS));
    table.submit(late);
    table.expire(100 * MS);
    table.expire(200 * MS);
    assert_eq!(table.client().1, []);
    table.expire(250 * MS);
    let timeout = FinishReason::Timeout(DeadlineKind::Queue);
    assert_eq!(table.client().1, [timeout.clone(), timeout]);
    table.check_empty();
}

#[test]
fn d06_an_abort_in_any_phase_reaches_everybody_and_ends_once() {
    let check = |bring: &dyn Fn(&mut Table), expected: &[u32]| {
        let mut table = Table::split();
        bring(&mut table);
        let commands = table.tell(|c, now, out| c.abort(RequestId(1), now, out));
        let told = |command: &Command| match command {
            Command::Abort { to, .. } => Some(to.worker.0),
            _ => None,
        };
        let told: Vec<u32> = commands.iter().filter_map(told).collect();
        assert_eq!(told, expected);
        assert_eq!(table.client().1, [FinishReason::Cancelled]);
        table.check_empty();
        let again = table.tell(|c, now, out| c.abort(RequestId(1), now, out));
        assert_eq!(again, []);
        if expected.is_empty() {
            return;
        }
        // What was under way comes in late.
        let (from, ticket) = (
            table.peer(P),
            Ticket {
                transfer: TransferId(1),
                generation: 1,
            },
        );
        assert_eq!(table.accepted(from, 0, &[7]), []);
        assert_eq!(table.prefilled(from, 0), [release(from)]);
        assert_eq!(table.reserved(table.peer(D1), ticket, 2), []);
        assert_eq!(table.transferred(ticket, TransferOutcome::Complete), []);
        assert_eq!(table.finished(from, 0, FinishReason::Cancelled), []);
    };
    check(
        &|table| {
            table.submit(request(1, 1));
        },
        &[P],
    );
    check(
        &|table| {
            table.hand_over();
        },
        &[P, D1],
    );
    check(
        &|table| {
            table.transfer();
        },
        &[P, D1],
    );
    check(
        &|table| {
            let (_, ticket) = table.transfer();
            table.transferred(ticket, TransferOutcome::Complete);
        },
        &[D1],
    );
    check(
        &|table| {
            table.lose(P);
            table.lose(D1);
            table.lose(D2);
            table.submit(request(1, 1));
            for worker in [P, D1, D2] {
                assert_eq!(table.coordinator.stats().num_parked, 1);
                table.lose(worker);
            }
        },
        &[],
    );
}

#[test]
fn a_deadline_on_the_prefill_side_takes_the_offer_and_the_decode_side_tells_the_end() {
    let mut table = Table::split();
    let (to, ticket) = table.transfer();
    let timeout = FinishReason::Timeout(DeadlineKind::Total);
    let commands = table.finished(table.peer(P), 0, timeout.clone());
    assert_eq!(
        commands,
        [finish_transfer(to, ticket, TransferOutcome::Failed)]
    );
    table.finished(to, 0, timeout.clone());
    assert_eq!(table.client().1, [timeout]);
    table.check_empty();
}

#[test]
fn choices_of_a_request_are_handed_over_one_by_one_to_where_the_prompt_is() {
    let mut table = Table::split();
    let from = table.peer(P);
    let mut three = request(1, 3);
    three.prompt = (0..40).map(TokenId).collect();
    table.submit(three);
    for choice in 0..3 {
        table.accepted(from, choice, &[100]);
        let (to, _) = arrival(&table.prefilled(from, choice));
        assert_eq!(to, table.peer(D1));
    }
    for choice in [1, 2, 0] {
        table.finished(table.peer(D1), choice, FinishReason::Length);
    }
    assert_eq!(table.client().1.len(), 3);
    table.check_empty();
}

#[test]
fn aggregated_workers_share_the_load_and_hand_nothing_over() {
    let mut table = Table::new(&[Role::Aggregated, Role::Aggregated]);
    let mut to = Vec::new();
    for id in 1..=2 {
        let mut long = request(id, 1);
        long.prompt = (0..5000)
            .map(|token| TokenId(token + 10_000 * id as u32))
            .collect();
        if let [Command::Add { to: peer, .. }] = &table.submit(long)[..] {
            to.push(peer.worker.0);
        }
    }
    assert_eq!(to, [0, 1]);
    table.accepted(table.peer(0), 0, &[100, 101]);
    table.finished(table.peer(0), 0, FinishReason::Length);
    assert_eq!(table.client(), (vec![100, 101], vec![FinishReason::Length]));
}

#[test]
fn workers_of_different_block_sizes_cannot_hand_over() {
    let worker = |block_size| SchedulerConfig {
        block_size,
        ..SchedulerConfig::default()
    };
    let mixed = Coordinator::new(CoordinatorConfig::default(), &[worker(16), worker(8)]);
    let expected = ConfigError::MixedBlockSizes {
        first: 16,
        other: 8,
    };
    assert_eq!(mixed.err(), Some(expected));
}

#[test]
fn what_cannot_be_submitted_is_refused() {
    let mut table = Table::split();
    table.coordinator.config.max_requests = 1;
    let refusal = |table: &mut Table, request: Request| {
        let mut commands = Vec::new();
        let submitted = table
            .coordinator
            .submit(Arc::new(request), Timestamp(0), &mut commands);
        assert_eq!(commands, []);
        submitted.expect_err("it is refused").to_string()
    };
    let nobody = "request RequestId(1): no worker could ever take it";
    let mut long = request(1, 1);
    long.prompt = (0..8192).map(TokenId).collect();
    assert_eq!(refusal(&mut table, long), nobody);
    assert_eq!(refusal(&mut table, request(1, 0)), nobody);
    assert_eq!(refusal(&mut table, request(1, u32::MAX)), nobody);
    table.submit(request(1, 1));
    assert_eq!(
        refusal(&mut table, request(1, 1)),
        "request RequestId(1): the id is in use"
    );
    assert_eq!(
        refusal(&mut table, request(2, 1)),
        "request RequestId(2): 1 requests are live, the limit is 1"
    );
}
