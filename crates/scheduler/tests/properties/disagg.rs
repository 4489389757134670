//! Pools of workers that hand over to each other, under every fault there is between them (D01 to D07, D10).
//!
//! Whatever happens, a client gets what a single idle worker would have told it, once and in order, or the
//! beginning of it and one reason why not more.

mod link;
mod node;
mod world;

use std::collections::BTreeMap;

use millpond_scheduler::mock::Bursts;
use millpond_scheduler::placement::PlacementConfig;
use millpond_scheduler::{CoordinatorConfig, RequestId, Role, SchedulerConfig, Span};
use proptest::prelude::*;

use crate::property::{check_property, sample_cases};
use crate::workload::{Ask, asks};
use link::LinkFaults;
use world::{Faults, Setup, TICK, World};

/// Leases and patience are short, so that a world sees many of them end.
const LEASE: Span = Span::from_millis(60);

fn coordinator() -> CoordinatorConfig {
    CoordinatorConfig {
        max_requests: 64,
        max_tries: 3,
        try_timeout: Span::from_millis(15),
        max_migrations: 3,
        retry_delay: Span::from_millis(3),
        placement: PlacementConfig {
            load_slack: 64,
            tokens_per_link: 4,
            max_links: 8,
            max_entries: 64,
        },
    }
}

fn worker(role: Role, block_size: u32, num_blocks: u32) -> SchedulerConfig {
    SchedulerConfig {
        block_size,
        num_blocks,
        max_batch_tokens: 48,
        max_sequences: 8,
        max_waiting: 12,
        max_context: 160,
        role,
        transfer_lease: LEASE,
        ..SchedulerConfig::default()
    }
}

/// Two and two, with room for everything and nothing that goes wrong.
fn calm(block_size: u32, seed: u64) -> Setup {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let workers = roles.map(|role| worker(role, block_size, 1024 / block_size));
    Setup {
        workers: workers.to_vec(),
        coordinator: coordinator(),
        bursts: Bursts::default(),
        piece_size: 2,
        faults: Faults::default(),
        link: LinkFaults::default(),
        seed,
    }
}

fn pools() -> impl Strategy<Value = Vec<Role>> {
    use Role::{Aggregated as A, Decode as D, Prefill as P};
    prop_oneof![
        4 => Just(vec![P, P, D, D]),
        2 => Just(vec![P, D]),
        1 => Just(vec![P, D, D, D]),
        1 => Just(vec![A, A]),
        1 => Just(vec![P, D, A]),
        1 => Just(vec![A]),
    ]
}

fn faults() -> impl Strategy<Value = (Faults, LinkFaults)> {
    let probability = |max: f64| prop_oneof![1 => Just(0.0), 2 => 0.0..max];
    let outside = (probability(0.08), 0.0..1.0f64, probability(0.02), 0u64..4);
    let link = (
        probability(0.4),
        probability(0.3),
        probability(0.3),
        0u64..20,
    );
    (outside, link).prop_map(|(outside, link)| {
        let faults = Faults {
            worker_loss: outside.0,
            zombie: outside.1,
            abort: outside.2,
            max_delay: outside.3,
        };
        let link = LinkFaults {
            loss: link.0,
            duplication: link.1,
            corruption: link.2,
            max_delay: Span(link.3 * TICK.0),
        };
        (faults, link)
    })
}

fn setups() -> impl Strategy<Value = Setup> {
    let block_size = prop_oneof![Just(1u32), Just(3u32), Just(4u32), Just(8u32), Just(16u32)];
    let bursts = prop_oneof![2 => Just((0u32, 0u32)), 1 => (0u32..4, 0u32..4)];
    let switches = (prop::bool::weighted(0.9), prop::bool::weighted(0.8));
    let sizes = (block_size, 110u32..480, 2u32..12, 1usize..4);
    (pools(), sizes, switches, bursts, faults(), any::<u64>()).prop_map(
        |(roles, sizes, switches, bursts, (faults, link), seed)| {
            let (block_size, num_slots, max_waiting, piece_size) = sizes;
            let worker = |role: Role| SchedulerConfig {
                max_waiting,
                prefix_cache: switches.0,
                partial_copies: switches.1,
                ..worker(role, block_size, num_slots.div_ceil(block_size))
            };
            Setup {
                workers: roles.into_iter().map(worker).collect(),
                coordinator: coordinator(),
                bursts: Bursts {
                    max_drafts: bursts.0,
                    max_forced: bursts.1,
                },
                piece_size,
                faults,
                link,
                seed,
            }
        },
    )
}

/// A world, and who asks what how many milliseconds after the one before.
fn worlds() -> impl Strategy<Value = (Setup, Vec<(u32, Ask)>)> {
    let gap = prop_oneof![2 => Just(0u32), 1 => 1u32..12];
    let asks = prop::collection::vec((gap, asks()), 1..24);
    (setups(), asks)
}

fn live((setup, asks): &(Setup, Vec<(u32, Ask)>)) -> World {
    let mut world = World::new(setup.clone());
    for (id, (gap, ask)) in (0..).zip(asks) {
        for _ in 0..*gap {
            world.tick();
        }
        world.submit(ask.request(id, world.now));
    }
    for _ in 0..100 {
        world.tick();
    }
    world.come_to_rest();
    world.count();
    world
}

#[test]
fn d02_to_d07_whatever_goes_wrong_clients_are_told_what_a_single_worker_would_tell() {
    check_property(3000, worlds(), |world| {
        live(&world);
    });
}

#[test]
fn a1_the_same_world_lives_the_same_life() {
    check_property(40, worlds(), |world| {
        assert_eq!(live(&world).transcript(), live(&world).transcript());
    });
}

/// What a property never meets it does not test.
#[test]
fn the_worlds_of_d02_meet_everything_they_are_about() {
    let mut met: BTreeMap<&str, u64> = BTreeMap::new();
    for world in sample_cases(120, worlds()) {
        for (what, times) in live(&world).met {
            *met.entry(what).or_default() += times;
        }
    }
    println!("{met:?}");
    assert_eq!(met.len(), 19, "{met:?}");
    assert!(met.values().all(|times| *times >= 5), "{met:?}");
}

/// D01: 500 prompts whose lengths lie on and around block borders, each with a request for three choices among them.
#[test]
fn d01_without_faults_every_output_is_that_of_one_worker_and_every_block_comes_once() {
    for block_size in [1, 4, 16] {
        let mut world = World::new(calm(block_size, 7));
        for number in 0..500u32 {
            let num_prompt = (number % 5 + 1) * block_size.max(2) + number % 3 - 1;
            let mut ask = Ask::plain(number as u8, num_prompt, 1 + number % 20);
            ask.num_choices = if number % 10 == 0 { 3 } else { 1 };
            ask.prompt.family = (number % 7) as u8;
            ask.prompt.shared = number % 2 * 2 * block_size;
            ask.seed = u64::from(number);
            world.submit(ask.request(u64::from(number), world.now));
            while world.coordinator.stats().num_requests > 20 {
                world.tick();
            }
        }
        world.come_to_rest();
        world.count();
        let counters = world.coordinator.stats().counters;
        assert_eq!(world.met["own end"], 600);
        assert_eq!(world.met["expired lease"], 0);
        assert_eq!(world.met["fenced by a worker"], 0);
        assert_eq!(counters.num_recomputed, 0, "{counters:?}");
        assert_eq!(counters.num_fenced, 0, "{counters:?}");
        assert_eq!(counters.num_tries, counters.num_transfers, "{counters:?}");
        assert!(counters.num_spared > 20, "{counters:?}");
    }
}

/// D06: an abort at every millisecond of a life whose transfer never ends gives everything back within a lease.
#[test]
fn d06_an_abort_in_any_phase_gives_everything_back_within_a_lease() {
    for num_ticks in 0..80 {
        for loss in [0.0, 1.0] {
            let mut setup = calm(4, 3);
            setup.link.loss = loss;
            let mut world = World::new(setup);
            let mut ask = Ask::plain(1, 41, 30);
            ask.num_choices = 2;
            world.submit(ask.request(1, world.now));
            for _ in 0..num_ticks {
                world.tick();
            }
            world.abort(RequestId(1));
            let limit = world.now + LEASE + Span::from_millis(5);
            while !world.is_at_rest() {
                world.tick();
                assert!(world.now < limit, "aborted after {num_ticks}");
            }
            world.come_to_rest();
        }
    }
}

/// D06: a peer that never answers costs its lease, and the output is the same.
#[test]
fn d06_a_link_that_brings_nothing_costs_time_alone() {
    let mut setup = calm(4, 5);
    setup.link.loss = 1.0;
    let mut world = World::new(setup);
    for id in 0..20 {
        let ask = Ask::plain(id as u8, 20 + id, 8);
        world.submit(ask.request(u64::from(id), world.now));
    }
    for _ in 0..200 {
        world.tick();
    }
    let counters = world.coordinator.stats().counters;
    assert_eq!(counters.num_transfers, 0);
    assert_eq!(counters.num_recomputed, 20, "{counters:?}");
    assert!(counters.num_tries <= 60, "{counters:?}");
    world.come_to_rest();
    assert_eq!(world.met["own end"], 20);
}

/// D02: the decode worker dies at ever later moments of the same stream.
#[test]
fn d02_a_stream_survives_the_loss_of_its_decode_worker_at_any_token() {
    for num_ticks in 1..60 {
        for is_zombie in [false, true] {
            let mut world = World::new(calm(4, 11));
            world.submit(Ask::plain(1, 22, 24).request(1, world.now));
            for _ in 0..num_ticks {
                world.tick();
            }
            world.lose(2, is_zombie);
            world.lose(3, is_zombie);
            world.come_to_rest();
            assert_eq!(world.met["own end"], 1);
        }
    }
}
