//! What callers ask of one connection goes out in batches: each takes what came while others were under way.
//!
//! No timer and no wait: with a lane free a caller's commands go out at once, alone. A batch is one write and one run of
//! answers; its completions are one script. Whatever a caller is answered is about its own commands alone, an error of the
//! server too; only a connection that fails, fails all that was sent on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use parking_lot::{Mutex, MutexGuard};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::batch::Batch;
use crate::clock_ms;
use crate::error::Fault;
use crate::fitness::Durability;
use crate::request::What;

/// Batches under way at once: while the server works on one, the answers to the other are told.
const LANES: usize = 2;
/// With a server that syncs each batch it is the syncs that take the time: the fewer, the better.
const LANES_SYNCED: usize = 1;
/// Callers in a batch.
const BATCH_MAX: usize = 256;
/// Bytes of a batch; its last part may go over.
const BATCH_BYTES_MAX: usize = 1 << 20;
/// Claims that wait, and as many others. Past it they are refused.
const WAITING_MAX: usize = 4096;

pub(crate) type Answer = Result<Vec<redis::Value>, Fault>;

/// Whether a connection is any good.
#[derive(Debug)]
pub(crate) struct Health {
    broken: AtomicBool,
    last_answer_ms: AtomicU64,
}

impl Health {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { broken: AtomicBool::new(false), last_answer_ms: AtomicU64::new(clock_ms()) })
    }

    pub(crate) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub(crate) fn silent_ms(&self) -> u64 {
        clock_ms().saturating_sub(self.last_answer_ms.load(Ordering::Relaxed))
    }

    fn answered(&self) {
        self.last_answer_ms.store(clock_ms(), Ordering::Relaxed);
    }
}

/// The way to one connection. Dropped, it lets what is under way end.
#[derive(Debug)]
pub(crate) struct Lanes {
    shared: Arc<Shared>,
    connection: MultiplexedConnection,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Notify,
    health: Arc<Health>,
    timeout: Duration,
    lanes: usize,
}

#[derive(Debug, Default)]
struct Queue {
    // In the order of their numbers. What owners ask goes first: their work has happened.
    owners: VecDeque<Job>,
    claims: VecDeque<Job>,
    next: u64,
    lanes_idle: usize,
    over: bool,
}

/// What one caller asks.
pub(crate) struct Job {
    number: u64,
    pub(crate) what: Arc<What>,
    /// Each command is allowed on a slot that the server is about to take over.
    pub(crate) asking: bool,
    answer: oneshot::Sender<Answer>,
}

impl Lanes {
    /// Starts them in the current runtime.
    pub(crate) fn start(
        connection: &MultiplexedConnection,
        health: &Arc<Health>,
        durability: Durability,
        timeout: Duration,
    ) -> Self {
        let lanes = if durability == Durability::Always { LANES_SYNCED } else { LANES };
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Notify::new(),
            health: Arc::clone(health),
            timeout,
            lanes,
        });
        for _ in 0..lanes {
            tokio::spawn(lane(Arc::clone(&shared), connection.clone()));
        }
        Self { shared, connection: connection.clone() }
    }

    /// Sends this with what others ask, and waits for its answers; an answer may be an error of the server.
    pub(crate) async fn ask(&self, what: &Arc<What>, asking: bool) -> Answer {
        let shared = &*self.shared;
        let (answer, mut answered) = oneshot::channel();
        let job = Job { number: 0, what: Arc::clone(what), asking, answer };
        let unanswered = || {
            let why = "the batch ended without an answer";
            Fault::new(StoreErrorKind::Unavailable, why).with_sent(true)
        };
        // Nobody else is there: sent from here, which spares two changes of the task.
        if let Some(_turn) = shared.take_turn() {
            if shared.exchange(&mut self.connection.clone(), vec![job]).await.is_err() {
                shared.close();
            }
            return answered.try_recv().unwrap_or_else(|_| Err(unanswered()));
        }
        let number = shared.push(job)?;
        match timeout(shared.timeout, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(unanswered()),
            Err(_) if shared.withdraw(number, what.is_claim()) => {
                let why = format!("not sent within {:?}: the server answers others slowly", shared.timeout);
                Err(Fault::new(StoreErrorKind::Timeout, why))
            }
            Err(_) => {
                shared.health.give_up();
                Err(no_answer(shared.timeout))
            }
        }
    }
}

impl Lanes {
    /// Whether whatever was sent so far has been carried out, which the server does in turn; false when it does not say
    /// so in time, or the connection broke.
    pub(crate) async fn have_drained(&self, patience: Duration) -> bool {
        let mut connection = self.connection.clone();
        let ping = redis::cmd("PING");
        matches!(timeout(patience, connection.req_packed_command(&ping)).await, Ok(Ok(_)))
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// A lane that a caller uses himself. Dropped, also by a caller who does not wait for the answer, it goes on with what
/// came meanwhile.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        queue.lanes_idle += 1;
        self.0.wake_one(queue);
    }
}

async fn lane(shared: Arc<Shared>, mut connection: MultiplexedConnection) {
    // However it ends, nobody waits for it.
    let _closed = Closed(&shared);
    loop {
        // Those who were just answered ask again at once: let them, so that it is one batch. Nobody else to run: no delay.
        tokio::task::yield_now().await;
        let Some(jobs) = shared.take().await else { return };
        if jobs.is_empty() {
            continue;
        }
        if let Err(fault) = shared.exchange(&mut connection, jobs).await {
            tracing::debug!(?fault, "a connection to Redis failed");
            return;
        }
    }
}

struct Closed<'a>(&'a Shared);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.health.give_up();
        self.0.close();
    }
}

impl Shared {
    fn push(&self, mut job: Job) -> Result<u64, Fault> {
        let mut queue = self.queue.lock();
        if queue.over {
            return Err(ended());
        }
        let number = queue.next;
        (queue.next, job.number) = (number + 1, number);
        let waiting = queue.line(job.what.is_claim());
        if waiting.len() >= WAITING_MAX {
            let why = format!("{WAITING_MAX} operations are waiting for the server already");
            return Err(Fault::new(StoreErrorKind::Overloaded, why));
        }
        waiting.push_back(job);
        self.wake_one(queue);
        Ok(number)
    }

    /// Wakes a lane if there is something to do. It is counted as busy at once: who comes next wakes no second one for
    /// the same batch.
    fn wake_one(&self, mut queue: MutexGuard<'_, Queue>) {
        if queue.lanes_idle > 0 && !queue.is_empty() {
            queue.lanes_idle -= 1;
            drop(queue);
            self.wake.notify_one();
        }
    }

    /// A lane for a caller who finds all of them idle. Never the only one: a caller may stop polling, and all would wait
    /// for him.
    fn take_turn(&self) -> Option<Turn<'_>> {
        let mut queue = self.queue.lock();
        if queue.over || self.lanes == 1 || queue.lanes_idle < self.lanes || !queue.is_empty() {
            return None;
        }
        queue.lanes_idle -= 1;
        Some(Turn(self))
    }

    /// Takes a job back; false when it was sent.
    fn withdraw(&self, number: u64, is_claim: bool) -> bool {
        let mut queue = self.queue.lock();
        let line = queue.line(is_claim);
        let found = line.binary_search_by_key(&number, |job| job.number);
        found.ok().and_then(|at| line.remove(at)).is_some()
    }

    /// The next batch; nothing once it is over.
    async fn take(&self) -> Option<Vec<Job>> {
        loop {
            let woken = self.wake.notified();
            {
                let mut queue = self.queue.lock();
                if queue.over {
                    return None;
                }
                if !queue.is_empty() {
                    let jobs = queue.take();
                    self.wake_one(queue);
                    return Some(jobs);
                }
                queue.lanes_idle += 1;
            }
            woken.await;
        }
    }

    /// Refuses what waits and what comes: none of it was sent.
    fn close(&self) {
        let mut queue = self.queue.lock();
        queue.over = true;
        let waiting: Vec<_> = queue.owners.drain(..).collect();
        let waiting: Vec<_> = waiting.into_iter().chain(queue.claims.drain(..)).collect();
        drop(queue);
        self.wake.notify_waiters();
        waiting.into_iter().for_each(|job| job.tell(Err(ended())));
    }

    async fn exchange(&self, connection: &mut MultiplexedConnection, jobs: Vec<Job>) -> Result<(), Fault> {
        let batch = Batch::new(jobs);
        let (pipeline, count) = batch.pipeline();
        let answered = timeout(self.timeout, connection.req_packed_commands(&pipeline, 0, count)).await;
        let fault = match answered {
            Ok(Ok(values)) if values.len() == count => {
                self.health.answered();
                batch.tell(values);
                return Ok(());
            }
            Ok(Ok(_)) => Fault::strange("another number of answers than of commands").with_sent(true),
            Ok(Err(error)) => Fault::lost(error),
            Err(_) => no_answer(self.timeout),
        };
        self.health.give_up();
        batch.fail(&fault);
        Err(fault)
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.owners.is_empty() && self.claims.is_empty()
    }

    fn line(&mut self, is_claim: bool) -> &mut VecDeque<Job> {
        if is_claim { &mut self.claims } else { &mut self.owners }
    }

    fn take(&mut self) -> Vec<Job> {
        let (mut jobs, mut bytes) = (Vec::new(), 0);
        while jobs.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX {
            let Some(job) = self.owners.pop_front().or_else(|| self.claims.pop_front()) else { break };
            // Nobody wants to know: not sent.
            if !job.answer.is_closed() {
                bytes += job.what.bytes();
                jobs.push(job);
            }
        }
        jobs
    }
}

impl Job {
    // A caller that is gone needs no answer.
    pub(crate) fn tell(self, answer: Answer) {
        let _ = self.answer.send(answer);
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({})", self.number)
    }
}

fn ended() -> Fault {
    Fault::new(StoreErrorKind::Unavailable, "the connection failed before it was sent")
}

fn no_answer(within: Duration) -> Fault {
    Fault::new(StoreErrorKind::Timeout, format!("no answer within {within:?}")).with_sent(true)
}
