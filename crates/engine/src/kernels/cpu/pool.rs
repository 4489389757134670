//! Persistent worker threads: one parallel loop at a time, without a fork or an allocation per loop.
//!
//! Workers spin for a moment after a loop, because the next one usually follows within microseconds, then
//! park; an idle pool uses no processor time. What runs where never bears on results: every index is worked
//! on exactly once, and the work writes by index.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a worker waits for the next loop before it parks: longer than the gaps within a step, shorter
/// than a person's patience with a fan.
const SPIN: Duration = Duration::from_micros(50);

/// Work on one index: (worker, index). Workers are numbered from 0, the caller.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The threads. Not `Sync`, so that work can't start a loop inside a loop.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    not_sync: PhantomData<Cell<()>>,
}

struct Worker {
    thread: JoinHandle<()>,
    parked: Arc<AtomicBool>,
}

/// State word: | epoch (32 bits) | open | stop | number of workers inside (30 bits) |
///
/// The caller opens an epoch, workers enter it while it is open, the caller closes it and waits until nobody
/// is inside. A worker that wakes late finds a closed epoch and is not waited for.
struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    count: usize,
}

// SAFETY: `job` is written only while the epoch is closed and nobody is inside, and read only by those
// inside, after an acquiring read of the state that opened it. The work behind the pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is followed only as above; nothing else is bound to a thread.
unsafe impl Send for Shared {}

const INSIDE: u64 = (1 << 30) - 1;
const STOP: u64 = 1 << 30;
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

fn epoch(state: u64) -> u64 {
    state / EPOCH
}

impl Pool {
    /// Starts `num_threads − 1` workers; the caller of `run` is the first thread.
    pub(super) fn new(num_threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job {
                work: &(|_, _| {}) as &Work<'static>,
                count: 0,
            }),
            panic: Mutex::new(None),
        });
        let workers = (1..num_threads.max(1))
            .map(|number| Worker::start(number, &shared))
            .collect::<std::io::Result<_>>()?;
        Ok(Pool {
            shared,
            workers,
            not_sync: PhantomData,
        })
    }

    /// Threads that work, the caller included.
    pub(super) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(worker, index)` for every index below `count` and returns when all are done.
    ///
    /// A panic of the work, in whatever thread, is resumed here once all threads are out of it.
    pub(super) fn run(&self, count: usize, work: &Work<'_>) {
        if self.workers.is_empty() || count <= 1 {
            (0..count).for_each(|index| work(0, index));
            return;
        }
        self.open(count, work);
        let own = catch_unwind(AssertUnwindSafe(|| {
            self.shared.work(0, Job::new(count, work))
        }));
        self.close();
        let others = self.shared.take_panic();
        if let Some(payload) = own.err().or(others) {
            resume_unwind(payload);
        }
    }

    fn open(&self, count: usize, work: &Work<'_>) {
        let shared = &self.shared;
        // SAFETY: the epoch is closed and nobody is inside, and `&self` is on one thread.
        unsafe { *shared.job.get() = Job::new(count, work) };
        shared.next.store(0, Ordering::Relaxed);
        let state = shared.state.load(Ordering::Relaxed);
        shared.state.store(
            ((epoch(state) + 1) % EPOCH * EPOCH) | OPEN,
            Ordering::SeqCst,
        );
        self.workers.iter().for_each(Worker::wake);
    }

    /// Waits until every worker that entered has left.
    fn close(&self) {
        let state = &self.shared.state;
        state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut num_looks = 0u32;
        while state.load(Ordering::Acquire) & INSIDE != 0 {
            num_looks += 1;
            // More threads than processors: the worker may need ours to finish.
            if num_looks.is_multiple_of(256) {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.wake();
            // Workers catch the panics of their work: there is nothing to learn from the result.
            let _ = worker.thread.join();
        }
    }
}

impl Job {
    fn new(count: usize, work: &Work<'_>) -> Self {
        let work: *const Work<'_> = work;
        // SAFETY: only the lifetime changes. The pointer is followed by threads inside an epoch, and `run`
        // does not return before all have left it.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        Job { work, count }
    }
}

impl Shared {
    /// Takes indices until none is left.
    fn work(&self, worker: usize, job: Job) {
        // SAFETY: the caller is inside the job's epoch, during which the work is alive.
        let work = unsafe { &*job.work };
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= job.count {
                return;
            }
            work(worker, index);
        }
    }

    /// Enters an open epoch later than `seen`; none: it is closed, over or the same.
    fn enter(&self, seen: u64) -> Option<u64> {
        let state = self.state.load(Ordering::Acquire);
        if state & OPEN == 0 || epoch(state) == seen {
            return None;
        }
        self.state
            .compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(epoch)
    }

    fn leave(&self) {
        self.state.fetch_sub(1, Ordering::Release);
    }

    fn stopped(&self) -> bool {
        self.state.load(Ordering::Relaxed) & STOP != 0
    }

    fn keep_panic(&self, payload: Box<dyn Any + Send>) {
        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
    }

    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

impl Worker {
    fn start(number: usize, shared: &Arc<Shared>) -> std::io::Result<Self> {
        let parked = Arc::new(AtomicBool::new(false));
        let (own_shared, own_parked) = (Arc::clone(shared), Arc::clone(&parked));
        let thread = thread::Builder::new()
            .name(format!("kernel-{number}"))
            .spawn(move || serve(number, &own_shared, &own_parked))?;
        Ok(Worker { thread, parked })
    }

    fn wake(&self) {
        if self.parked.load(Ordering::SeqCst) {
            self.thread.thread().unpark();
        }
    }
}

/// The life of a worker.
fn serve(number: usize, shared: &Shared, parked: &AtomicBool) {
    let mut seen = 0;
    while !shared.stopped() {
        match wait(shared, seen) {
            Some(entered) => {
                seen = entered;
                // SAFETY: inside an open epoch.
                let job = unsafe { *shared.job.get() };
                let outcome = catch_unwind(AssertUnwindSafe(|| shared.work(number, job)));
                if let Err(payload) = outcome {
                    shared.keep_panic(payload);
                }
                shared.leave();
            }
            None => park(shared, seen, parked),
        }
    }
}

/// Spins until an epoch can be entered or time is up.
fn wait(shared: &Shared, seen: u64) -> Option<u64> {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if let Some(entered) = shared.enter(seen) {
                return Some(entered);
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN || shared.stopped() {
            return None;
        }
    }
}

/// Sleeps until woken. The flag is raised before the last look at the state, and `wake` reads it after the
/// state changed: one of the two sees the other.
fn park(shared: &Shared, seen: u64, parked: &AtomicBool) {
    parked.store(true, Ordering::SeqCst);
    let state = shared.state.load(Ordering::SeqCst);
    if (state & OPEN == 0 || epoch(state) == seen) && state & STOP == 0 {
        thread::park();
    }
    parked.store(false, Ordering::SeqCst);
}
