//! The waiting jobs: a line for each operation, and the operations whose turn it is.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use foldhash::fast::RandomState;
use onlyonce_core::{OperationId, StoreError, StoreErrorKind};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::{Job, Limits};

/// How long an operation that somebody held locked is kept out of the batches.
const APART: Duration = Duration::from_secs(5);
/// How many such operations are kept in mind.
const APART_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Notify,
    limits: Limits,
}

#[derive(Debug, Default)]
struct State {
    lines: HashMap<OperationId, Line, RandomState>,
    // Operations with a job whose turn it is. An entry may be out of date: its line is asked.
    owners: VecDeque<OperationId>,
    claims: VecDeque<OperationId>,
    owners_waiting: usize,
    claims_waiting: usize,
    apart: HashMap<OperationId, Instant, RandomState>,
    lanes_idle: usize,
    closed: bool,
}

/// What waits on one operation.
#[derive(Debug, Default)]
struct Line {
    owners: VecDeque<Job>,
    claims: VecDeque<Job>,
    in_flight: bool,
}

/// What a lane is to do next.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) batch: Vec<Job>,
    /// Jobs on operations that somebody held locked a moment ago.
    pub(crate) alone: Vec<Job>,
}

impl Queue {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { state: Mutex::default(), wake: Notify::new(), limits }
    }

    /// Adds a job, or refuses it: then nothing was sent.
    pub(crate) fn push(&self, job: Job) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(
                StoreError::new(StoreErrorKind::Unavailable, job.name()).with_detail("the store is closed")
            );
        }
        let is_claim = job.is_claim();
        let waiting = if is_claim { state.claims_waiting } else { state.owners_waiting };
        if waiting >= self.limits.queue_max {
            return Err(StoreError::new(StoreErrorKind::Overloaded, job.name())
                .with_detail(format!("{waiting} operations are waiting already")));
        }
        let State { lines, owners, claims, owners_waiting, claims_waiting, .. } = &mut *state;
        let id = job.id().clone();
        let line = lines.entry(id.clone()).or_default();
        let (of_line, turn, waiting) = match is_claim {
            true => (&mut line.claims, claims, claims_waiting),
            false => (&mut line.owners, owners, owners_waiting),
        };
        *waiting += 1;
        of_line.push_back(job);
        if !line.in_flight && of_line.len() == 1 {
            turn.push_back(id);
        }
        self.wake_one(state);
        Ok(())
    }

    /// Waits until there is something to do. `None` once the queue is closed and empty.
    pub(crate) async fn take(&self) -> Option<Taken> {
        loop {
            let woken = self.wake.notified();
            {
                let mut state = self.state.lock();
                let taken = state.take(&self.limits);
                if !taken.batch.is_empty() || !taken.alone.is_empty() {
                    if state.has_turns() {
                        self.wake_one(state);
                    }
                    return Some(taken);
                }
                if state.is_over() {
                    self.wake_all(state);
                    return None;
                }
                state.lanes_idle += 1;
            }
            woken.await;
        }
    }

    /// Says that these operations are not in flight any more: their next jobs have their turn.
    pub(crate) fn finish<'a>(&self, ids: impl Iterator<Item = &'a OperationId>) {
        let mut state = self.state.lock();
        for id in ids {
            state.finish(id);
        }
        if state.is_over() {
            self.wake_all(state);
        } else if state.has_turns() {
            self.wake_one(state);
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        let state = self.state.lock();
        state.owners_waiting + state.claims_waiting
    }

    /// Keeps an operation out of the batches for a while.
    pub(crate) fn set_apart(&self, id: &OperationId) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.apart.len() >= APART_MAX {
            state.apart.retain(|_, until| *until > now);
        }
        if state.apart.len() < APART_MAX {
            state.apart.insert(id.clone(), now + APART);
        }
    }

    /// Refuses what comes from now on; what waits is done.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake_all(state);
    }

    // Whoever wakes a lane counts it as busy at once: what comes next wakes no second one for the same batch.
    fn wake_one(&self, mut state: MutexGuard<'_, State>) {
        if state.lanes_idle > 0 {
            state.lanes_idle -= 1;
            drop(state);
            self.wake.notify_one();
        }
    }

    fn wake_all(&self, mut state: MutexGuard<'_, State>) {
        state.lanes_idle = 0;
        drop(state);
        self.wake.notify_waiters();
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.closed && self.lines.is_empty()
    }

    fn has_turns(&self) -> bool {
        !self.owners.is_empty() || !self.claims.is_empty()
    }

    fn take(&mut self, limits: &Limits) -> Taken {
        let mut taken = Taken::default();
        let mut bytes = 0;
        let now = (!self.apart.is_empty()).then(Instant::now);
        let room = |taken: &Taken, bytes| {
            taken.batch.len() + taken.alone.len() < limits.batch_max && bytes < limits.batch_bytes_max
        };
        while room(&taken, bytes) {
            let Some(job) = self.next_of_an_owner().or_else(|| self.next_claim()) else { break };
            bytes += job.bytes();
            let is_apart = now.is_some_and(|now| self.apart.get(job.id()).is_some_and(|until| *until > now));
            if is_apart { &mut taken.alone } else { &mut taken.batch }.push(job);
        }
        taken
    }

    fn next_of_an_owner(&mut self) -> Option<Job> {
        while let Some(id) = self.owners.pop_front() {
            let Some(line) = self.lines.get_mut(&id).filter(|line| !line.in_flight) else { continue };
            let Some(job) = line.owners.pop_front() else { continue };
            line.in_flight = true;
            self.owners_waiting -= 1;
            return Some(job);
        }
        None
    }

    fn next_claim(&mut self) -> Option<Job> {
        while let Some(id) = self.claims.pop_front() {
            let Some(line) = self.lines.get_mut(&id).filter(|line| !line.in_flight) else { continue };
            while let Some(job) = line.claims.pop_front() {
                self.claims_waiting -= 1;
                if !job.is_given_up() {
                    line.in_flight = true;
                    return Some(job);
                }
            }
            if line.owners.is_empty() {
                self.lines.remove(&id);
            }
        }
        None
    }

    fn finish(&mut self, id: &OperationId) {
        let Some(line) = self.lines.get_mut(id) else { return };
        line.in_flight = false;
        if !line.owners.is_empty() {
            self.owners.push_back(id.clone());
        }
        if !line.claims.is_empty() {
            self.claims.push_back(id.clone());
        }
        if line.owners.is_empty() && line.claims.is_empty() {
            self.lines.remove(id);
        }
    }
}
