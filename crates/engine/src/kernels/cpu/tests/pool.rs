use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::pool::Pool;

fn pool(num_threads: usize) -> Pool {
    Pool::new(num_threads).expect("threads can be started")
}

#[test]
fn every_index_is_worked_on_once() {
    for num_threads in [1, 2, 3, 8] {
        let pool = pool(num_threads);
        for count in [0, 1, 2, 7, 1000] {
            let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            pool.run(count, &|worker, index| {
                assert!(worker < num_threads);
                seen[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn many_short_loops_and_pauses_lose_nothing() {
    let pool = pool(3);
    let total = AtomicUsize::new(0);
    for round in 0..3000 {
        // Now and then long enough for the workers to park.
        if round % 500 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        pool.run(5, &|_, index| {
            total.fetch_add(index, Ordering::Relaxed);
        });
    }
    assert_eq!(total.load(Ordering::Relaxed), 3000 * 10);
}

#[test]
fn a_panic_of_any_index_reaches_the_caller_and_the_pool_lives_on() {
    let pool = pool(3);
    for bad in 0..64 {
        let done = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(64, &|_, index| {
                assert!(index != bad, "index {bad}");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let payload = outcome.expect_err("the panic is resumed");
        let message = payload
            .downcast_ref::<String>()
            .expect("a formatted message");
        assert!(message.contains(&format!("index {bad}")), "{message}");
        assert!(done.load(Ordering::Relaxed) <= 63);
    }
    let done = AtomicUsize::new(0);
    pool.run(64, &|_, _| {
        done.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(done.load(Ordering::Relaxed), 64);
}
