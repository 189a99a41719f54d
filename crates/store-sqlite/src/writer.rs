//! The one writer of a store: a thread that commits everything that is queued as one transaction.
//!
//! No timer: a batch exists only because its operations arrived while the last one was in flight.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, CrashPoint, LeaseToken, OnLeaseEnd, Operation,
    ReleaseOutcome, RenewOutcome, StoreError, StoreErrorKind, crash_point,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::boot::{Now, Timeline};
use crate::checkpoint::Checkpoints;
use crate::claims;
use crate::error::Fault;
use crate::file::begin_immediate;
use crate::open::{self, Durability, Identity, Options};
use crate::row::HashText;

/// Where an operation's answer goes. Closed when its caller is gone.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, StoreError>>;

/// What all parts of an open store share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) path: PathBuf,
    pub(crate) options: Options,
    pub(crate) timeline: Timeline,
    pub(crate) identity: Identity,
    pub(crate) others: u64,
    pub(crate) queue: Queue,
    /// Held by whoever writes, so that the writer and the transactions of this process hand over without polling.
    pub(crate) gate: Mutex<()>,
    pub(crate) batches: AtomicU64,
    pub(crate) commits: AtomicU64,
    pub(crate) operations: AtomicU64,
}

/// One operation, waiting.
#[derive(Debug)]
pub(crate) enum Job {
    Claim(Operation, HashText, ClaimRequest, Answer<ClaimOutcome>),
    Renew(Operation, LeaseToken, Duration, Answer<RenewOutcome>),
    // With the encoded head of its reply, made by the caller: the writer is the narrow place.
    Complete(Operation, Vec<u8>, Completion, Answer<CompleteOutcome>),
    Release(Operation, LeaseToken, Answer<ReleaseOutcome>),
    MarkUnknown(Operation, LeaseToken, Answer<ReleaseOutcome>),
}

/// Work with transactions of its own, such as a purge. One step is made after each batch.
pub(crate) trait Chore: Send {
    /// Makes a step, and answers whether another one is needed.
    fn step(&mut self, session: &Session<'_>) -> bool;
}

enum Outcome {
    Claim(ClaimOutcome),
    Renew(RenewOutcome),
    Complete(CompleteOutcome),
    Release(ReleaseOutcome),
}

/// The waiting operations. Bounded: past it they are refused.
pub(crate) struct Queue {
    state: Mutex<Waiting>,
    wake: Condvar,
    each_max: usize,
}

#[derive(Default)]
struct Waiting {
    // Of owners, who hold leases: before claims.
    owners: VecDeque<Job>,
    claims: VecDeque<Job>,
    chores: VecDeque<Box<dyn Chore>>,
    asleep: bool,
    closed: bool,
}

const CHORES_MAX: usize = 64;

/// How long a chore rests between its steps while nothing else is to be done: the turn of other processes.
const CHORE_REST: Duration = Duration::from_millis(2);

/// Serves the queue until it is closed and empty.
pub(crate) fn run(shared: &Arc<Shared>, first: Connection) {
    let mut conn = Some(first);
    loop {
        let served = catch_unwind(AssertUnwindSafe(|| {
            let conn = match conn.take() {
                Some(conn) => conn,
                None => reconnect(shared)?,
            };
            Some(serve(shared, conn))
        }));
        match served {
            Ok(Some(Served::Closed) | None) => return,
            Ok(Some(Served::Broken)) => tracing::warn!(path = %shared.path.display(), "the store reconnects"),
            Err(_) => {
                tracing::error!(path = %shared.path.display(), "the store's writer panicked and goes on")
            }
        }
    }
}

enum Served {
    Closed,
    Broken,
}

fn serve(shared: &Arc<Shared>, mut conn: Connection) -> Served {
    let Ok(mut checkpoints) = Checkpoints::of(&mut conn) else { return Served::Broken };
    let conn = &conn;
    let session = Session { shared, conn, synced: std::cell::Cell::new(None) };
    let mut batch = Vec::new();
    let mut chore_rests = false;
    loop {
        // Those who were just answered ask again at once: let them, so that their next operations share one sync and
        // not two. Nobody else to run: no delay.
        std::thread::yield_now();
        if std::mem::take(&mut chore_rests) {
            shared.queue.rest(CHORE_REST);
        }
        let mut chore = match shared.queue.take(shared.options.batch_max, &mut batch) {
            Taken::Closed => return Served::Closed,
            Taken::Work(chore) => chore,
        };
        let mut broken = session.commit_batch(&mut batch);
        if let Some(mut chore) = chore.take()
            && chore.step(&session)
        {
            shared.queue.again(chore);
            chore_rests = true;
        }
        broken |= !conn.is_autocommit();
        if broken {
            return Served::Broken;
        }
        checkpoints.step(shared, conn);
    }
}

// Until it succeeds everything that is asked is answered with why it does not. None: the queue was closed.
fn reconnect(shared: &Shared) -> Option<Connection> {
    let mut batch = Vec::new();
    loop {
        let opened = shared.identity.check(&shared.path).and_then(|()| open::connect(&shared.options));
        let fault = match opened {
            Ok(conn) => return Some(conn),
            Err(fault) => Arc::new(fault),
        };
        match shared.queue.take(shared.options.batch_max, &mut batch) {
            Taken::Closed => return None,
            // A chore that is dropped answers by its closed channel.
            Taken::Work(_) => batch.drain(..).for_each(|job| job.fail(&fault, shared)),
        }
    }
}

/// The writer's connection, and how it begins and commits.
pub(crate) struct Session<'s> {
    pub(crate) shared: &'s Shared,
    conn: &'s Connection,
    // What `PRAGMA synchronous` was set to last.
    synced: std::cell::Cell<Option<bool>>,
}

impl Session<'_> {
    /// Runs `work` in a transaction and commits it, synced when `durable`.
    pub(crate) fn transaction<T>(
        &self,
        durable: bool,
        work: impl FnOnce(&Connection, &Now<'_>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let shared = self.shared;
        shared.identity.check(&shared.path)?;
        let _gate = shared.gate.try_lock_for(shared.options.busy_timeout).ok_or_else(|| {
            Fault::new(StoreErrorKind::Timeout, "a transaction held the database all the time")
        })?;
        self.sync(durable)?;
        begin_immediate(self.conn, shared.options.busy_timeout)?;
        let changes = self.conn.total_changes();
        // Read after the lock is held: what was waited counts.
        let done = work(self.conn, &shared.timeline.now()).and_then(|done| {
            let committed = self.conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
            committed.map_err(|error| Fault::from(error).in_commit())?;
            Ok(done)
        });
        if done.is_ok() && self.conn.total_changes() != changes {
            shared.commits.fetch_add(1, Ordering::Relaxed);
        }
        if !self.conn.is_autocommit() {
            // A rollback that fails leaves the connection in a transaction, and that is seen by `serve`.
            let _ = self.conn.execute_batch("ROLLBACK");
        }
        done
    }

    /// Reads outside any transaction.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Connection) -> Result<T, Fault>) -> Result<T, Fault> {
        read(self.conn)
    }

    // The pragma acts when it is prepared, and only outside a transaction: no cached statement.
    fn sync(&self, durable: bool) -> Result<(), Fault> {
        if self.shared.options.durability == Durability::Off || self.synced.get() == Some(durable) {
            return Ok(());
        }
        self.synced.set(None);
        self.conn.execute_batch(if durable {
            "PRAGMA synchronous=FULL"
        } else {
            "PRAGMA synchronous=NORMAL"
        })?;
        self.synced.set(Some(durable));
        Ok(())
    }

    // Answers whether the connection is of no more use.
    fn commit_batch(&self, batch: &mut Vec<Job>) -> bool {
        batch.retain(|job| !job.is_given_up());
        if batch.is_empty() {
            return false;
        }
        self.shared.batches.fetch_add(1, Ordering::Relaxed);
        self.shared.operations.fetch_add(batch.len() as u64, Ordering::Relaxed);
        let fault = match self.try_batch(batch) {
            Ok(outcomes) => {
                batch.drain(..).zip(outcomes).for_each(|(job, outcome)| job.answer(outcome, self.shared));
                return false;
            }
            Err(fault) => fault,
        };
        let mut broken = fault.breaks_connection();
        let of_its_content = fault.breaks_connection() || fault.kind() == StoreErrorKind::Full;
        if !of_its_content {
            let fault = Arc::new(fault);
            batch.drain(..).for_each(|job| job.fail(&fault, self.shared));
            return broken;
        }
        if fault.kind() == StoreErrorKind::Full {
            // The WAL holds many copies of a page; once copied back, its room is used again. If not: as before.
            let _ = self.conn.execute_batch("PRAGMA wal_checkpoint(PASSIVE)");
        }
        // One operation may have met a damaged page, or need room that the others do not: each for itself, once more.
        for job in batch.drain(..) {
            let alone = self.try_batch(std::slice::from_ref(&job));
            match alone.map(|mut outcomes| outcomes.pop()) {
                Ok(Some(outcome)) => job.answer(outcome, self.shared),
                Ok(None) => {}
                Err(fault) => {
                    broken |= fault.breaks_connection();
                    job.fail(&Arc::new(fault), self.shared);
                }
            }
        }
        broken
    }

    fn try_batch(&self, batch: &[Job]) -> Result<Vec<Result<Outcome, Fault>>, Fault> {
        let durable = batch.iter().any(Job::is_durable);
        self.transaction(durable, |conn, now| {
            let mut outcomes = Vec::with_capacity(batch.len());
            for job in batch {
                let outcome = job.run(conn, now);
                match outcome {
                    Err(fault) if !fault.is_of_one_operation() || conn.is_autocommit() => return Err(fault),
                    outcome => outcomes.push(outcome),
                }
            }
            batch.iter().for_each(|job| crash_point(job.places().0));
            Ok(outcomes)
        })
        .inspect(|outcomes| {
            for (job, outcome) in batch.iter().zip(outcomes) {
                crash_point(job.places().1);
                if matches!(outcome, Ok(Outcome::Claim(ClaimOutcome::Acquired(lease))) if lease.attempt > 1) {
                    crash_point(CrashPoint::TakeOverAfter);
                }
            }
        })
    }
}

impl Job {
    // A claim whose caller is gone is not made. What owners ask is: the effect of their work is there already.
    fn is_given_up(&self) -> bool {
        matches!(self, Self::Claim(.., answer) if answer.is_closed())
    }

    fn is_durable(&self) -> bool {
        match self {
            Self::Claim(_, _, request, _) => request.on_lease_end == OnLeaseEnd::Hold,
            Self::Complete(..) | Self::MarkUnknown(..) => true,
            Self::Renew(..) | Self::Release(..) => false,
        }
    }

    fn run(&self, conn: &Connection, now: &Now<'_>) -> Result<Outcome, Fault> {
        Ok(match self {
            Self::Claim(operation, hash, request, _) => {
                Outcome::Claim(claims::claim(conn, now, operation, *hash, request, request.on_lease_end)?)
            }
            Self::Renew(operation, token, lease, _) => {
                Outcome::Renew(claims::renew(conn, now, operation, *token, *lease)?)
            }
            Self::Complete(operation, head, completion, _) => {
                Outcome::Complete(claims::complete(conn, now, operation, head, completion)?)
            }
            Self::Release(operation, token, _) => {
                Outcome::Release(claims::release(conn, now, operation, *token)?)
            }
            Self::MarkUnknown(operation, token, _) => {
                Outcome::Release(claims::mark_unknown(conn, now, operation, *token)?)
            }
        })
    }

    // Where it can be made to die: before its commit, and after it.
    fn places(&self) -> (CrashPoint, CrashPoint) {
        match self {
            Self::Claim(..) => (CrashPoint::ClaimBefore, CrashPoint::ClaimAfter),
            Self::Renew(..) => (CrashPoint::RenewBefore, CrashPoint::RenewAfter),
            Self::Complete(..) => (CrashPoint::CompleteBefore, CrashPoint::CompleteAfter),
            Self::Release(..) => (CrashPoint::ReleaseBefore, CrashPoint::ReleaseAfter),
            Self::MarkUnknown(..) => (CrashPoint::UnknownBefore, CrashPoint::UnknownAfter),
        }
    }

    // A caller that is gone needs no answer, so failed sends are fine.
    fn answer(self, outcome: Result<Outcome, Fault>, shared: &Shared) {
        match (self, outcome) {
            (Self::Claim(.., answer), Ok(Outcome::Claim(outcome))) => drop(answer.send(Ok(outcome))),
            (Self::Renew(.., answer), Ok(Outcome::Renew(outcome))) => drop(answer.send(Ok(outcome))),
            (Self::Complete(.., answer), Ok(Outcome::Complete(outcome))) => drop(answer.send(Ok(outcome))),
            (Self::Release(.., answer) | Self::MarkUnknown(.., answer), Ok(Outcome::Release(outcome))) => {
                drop(answer.send(Ok(outcome)))
            }
            (job, Err(fault)) => job.fail(&Arc::new(fault), shared),
            (job, Ok(_)) => {
                let fault = Fault::new(StoreErrorKind::Internal, "an outcome of another operation");
                job.fail(&Arc::new(fault), shared);
            }
        }
    }

    fn fail(self, fault: &Arc<Fault>, shared: &Shared) {
        let error = |operation| fault.of(operation, &shared.path);
        match self {
            Self::Claim(.., answer) => drop(answer.send(Err(error("claim")))),
            Self::Renew(.., answer) => drop(answer.send(Err(error("renew")))),
            Self::Complete(.., answer) => drop(answer.send(Err(error("complete")))),
            Self::Release(.., answer) => drop(answer.send(Err(error("release")))),
            Self::MarkUnknown(.., answer) => drop(answer.send(Err(error("mark_unknown")))),
        }
    }
}

enum Taken {
    Work(Option<Box<dyn Chore>>),
    Closed,
}

impl Queue {
    pub(crate) fn new(each_max: usize) -> Self {
        Self { state: Mutex::default(), wake: Condvar::new(), each_max }
    }

    /// Adds an operation, or refuses it: then nothing was sent.
    pub(crate) fn push(&self, operation: &'static str, job: Job) -> Result<(), StoreError> {
        let mut state = self.open(operation)?;
        let lane = match job {
            Job::Claim(..) => &mut state.claims,
            _ => &mut state.owners,
        };
        if lane.len() >= self.each_max {
            return Err(StoreError::new(StoreErrorKind::Overloaded, operation)
                .with_detail(format!("{} operations are waiting already", self.each_max)));
        }
        lane.push_back(job);
        self.wake(state);
        Ok(())
    }

    pub(crate) fn push_chore(
        &self,
        operation: &'static str,
        chore: Box<dyn Chore>,
    ) -> Result<(), StoreError> {
        let mut state = self.open(operation)?;
        if state.chores.len() >= CHORES_MAX {
            return Err(StoreError::new(StoreErrorKind::Overloaded, operation)
                .with_detail(format!("{CHORES_MAX} purges and operator's changes are waiting already")));
        }
        state.chores.push_back(chore);
        self.wake(state);
        Ok(())
    }

    /// Lets the writer end once it has done what is queued.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake(state);
    }

    fn open(&self, operation: &'static str) -> Result<MutexGuard<'_, Waiting>, StoreError> {
        let state = self.state.lock();
        if state.closed {
            return Err(StoreError::new(StoreErrorKind::Unavailable, operation)
                .with_detail("the store is closed, or open for reading alone"));
        }
        Ok(state)
    }

    fn wake(&self, mut state: MutexGuard<'_, Waiting>) {
        if std::mem::take(&mut state.asleep) {
            drop(state);
            self.wake.notify_one();
        }
    }

    // A chore that needs another step: behind the others.
    fn again(&self, chore: Box<dyn Chore>) {
        self.state.lock().chores.push_back(chore);
    }

    // Sleeps for a while, or until an operation comes.
    fn rest(&self, time: Duration) {
        let mut state = self.state.lock();
        if state.owners.is_empty() && state.claims.is_empty() && !state.closed {
            state.asleep = true;
            self.wake.wait_for(&mut state, time);
            state.asleep = false;
        }
    }

    // Sleeps until there is something.
    fn take(&self, batch_max: usize, batch: &mut Vec<Job>) -> Taken {
        let mut state = self.state.lock();
        loop {
            let owners = state.owners.len().min(batch_max);
            batch.extend(state.owners.drain(..owners));
            let claims = state.claims.len().min(batch_max - owners);
            batch.extend(state.claims.drain(..claims));
            let chore = state.chores.pop_front();
            if !batch.is_empty() || chore.is_some() {
                return Taken::Work(chore);
            }
            if state.closed {
                return Taken::Closed;
            }
            state.asleep = true;
            self.wake.wait(&mut state);
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        write!(
            f,
            "Queue {{ owners: {}, claims: {}, chores: {} }}",
            state.owners.len(),
            state.claims.len(),
            state.chores.len()
        )
    }
}
