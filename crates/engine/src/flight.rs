//! The in-flight table: what this process is claiming or running, so that its duplicates cost no store reads.
//!
//! A flight goes from Claiming, by way of Elsewhere where another process is at work, to Working and Ended; its leader
//! moves it, any number of followers watch. The table saves work only: correctness is the store's.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use foldhash::quality::RandomState;
use onlyonce_core::{ClaimOutcome, Fingerprint, Operation, OperationId, Origin, Reply, StoredReply};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::execution::Live;
use crate::outcome::EngineError;

const SHARDS: usize = 32;

#[derive(Debug, Default)]
struct Shard {
    flights: HashMap<OperationId, Arc<Flight>, RandomState>,
    // Owners of dead leases in whose place somebody asks the store. They are renewed all the same: until the store says
    // otherwise the operation is theirs. Rare, so a list will do.
    displaced: Vec<(OperationId, Arc<Flight>)>,
}

#[derive(Debug)]
pub(crate) struct Flights {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
}

#[derive(Debug)]
pub(crate) struct Flight {
    /// The leader's fingerprint; the operation's own once Working.
    pub(crate) fingerprint: Fingerprint,
    /// The leader's request; the operation's own once Working.
    pub(crate) origin: Option<Origin>,
    phase: Mutex<Phase>,
    // Followers are woken in the order in which they came.
    changed: Notify,
    successor_taken: AtomicBool,
}

#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The store is being asked.
    Claiming,
    /// Another process is at work, and the leader polls.
    Elsewhere(Sighting),
    /// The leader owns the operation.
    Working(Arc<Live>),
    /// It is over for this process.
    Ended(End),
}

/// What the store said of another process's work.
#[derive(Clone, Debug)]
pub(crate) struct Sighting {
    /// When it was said, on the boot clock.
    pub(crate) at: Duration,
    pub(crate) age: Duration,
    pub(crate) lease_left: Duration,
    pub(crate) origin: Option<Origin>,
}

/// How a flight ended, for its followers.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// Recorded under the flight's fingerprint.
    Completed(StoredReply),
    /// Given back; what the leader was answered. One follower claims again.
    Released(Option<Reply>),
    /// The store gave another answer than Acquired, to a claim that was sent then, on the boot clock.
    Answered(ClaimOutcome, Duration),
    /// The store could not answer.
    Failed(EngineError),
    /// The leader went away without an answer: ask for yourself.
    Abandoned,
}

/// The place of one caller in a flight.
pub(crate) enum Place {
    /// Ask the store, and end the flight.
    Leader(Leader),
    /// Watch.
    Follower(Arc<Flight>),
}

/// The duty to end a flight. Dropped undone, its followers ask for themselves.
#[derive(Debug)]
pub(crate) struct Leader {
    table: Arc<Flights>,
    id: OperationId,
    flight: Arc<Flight>,
    ended: bool,
}

impl Flights {
    pub(crate) fn new() -> Arc<Self> {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Arc::new(Self { shards, hasher: RandomState::default() })
    }

    /// Joins the flight of this operation, or starts it.
    pub(crate) fn join(self: &Arc<Self>, operation: &Operation) -> Place {
        let mut shard = self.shard(operation.id()).lock();
        if let Some(flight) = shard.flights.get(operation.id()) {
            return Place::Follower(flight.clone());
        }
        Place::Leader(self.start(&mut shard, operation))
    }

    /// Starts a flight in the place of one whose owner holds a dead lease; somebody may have been faster. If the store
    /// leaves the operation to that owner its flight is back when this one ends.
    pub(crate) fn replace(self: &Arc<Self>, operation: &Operation, dead: &Arc<Flight>) -> Option<Leader> {
        let mut shard = self.shard(operation.id()).lock();
        match shard.flights.get(operation.id()) {
            Some(flight) if !Arc::ptr_eq(flight, dead) => return None,
            Some(_) => shard.displaced.push((operation.id().clone(), dead.clone())),
            None => {}
        }
        Some(self.start(&mut shard, operation))
    }

    fn start(self: &Arc<Self>, shard: &mut Shard, operation: &Operation) -> Leader {
        let flight = Arc::new(Flight {
            fingerprint: *operation.fingerprint(),
            origin: operation.origin().cloned(),
            phase: Mutex::new(Phase::Claiming),
            changed: Notify::new(),
            successor_taken: AtomicBool::new(false),
        });
        shard.flights.insert(operation.id().clone(), flight.clone());
        Leader { table: self.clone(), id: operation.id().clone(), flight, ended: false }
    }

    /// Visits what is being worked on, one shard at a time.
    pub(crate) fn for_each_live(&self, mut visit: impl FnMut(&Arc<Live>)) {
        for shard in &self.shards {
            let shard = shard.lock();
            let displaced = shard.displaced.iter().map(|(_, flight)| flight);
            for flight in shard.flights.values().chain(displaced) {
                if let Phase::Working(live) = &*flight.phase.lock() {
                    visit(live);
                }
            }
        }
    }

    fn remove(&self, id: &OperationId, flight: &Arc<Flight>) {
        let mut shard = self.shard(id).lock();
        if !shard.flights.get(id).is_some_and(|current| Arc::ptr_eq(current, flight)) {
            shard.displaced.retain(|(_, displaced)| !Arc::ptr_eq(displaced, flight));
            return;
        }
        match shard.displaced.iter().rposition(|(of, _)| of == id) {
            Some(at) => {
                let (id, flight) = shard.displaced.swap_remove(at);
                shard.flights.insert(id, flight);
            }
            None => drop(shard.flights.remove(id)),
        }
    }

    fn shard(&self, id: &OperationId) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(id) as usize % SHARDS]
    }
}

impl Flight {
    /// True for the first caller alone: it claims again after a release.
    pub(crate) fn take_succession(&self) -> bool {
        !self.successor_taken.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.lock().clone()
    }

    /// Waits for a phase that `pick` takes something from.
    pub(crate) async fn until<T>(&self, pick: impl Fn(&Phase) -> Option<T>) -> T {
        loop {
            // Created before the look: a change in between wakes it.
            let changed = self.changed.notified();
            let picked = pick(&self.phase.lock());
            if let Some(picked) = picked {
                return picked;
            }
            changed.await;
        }
    }

    fn enter(&self, phase: Phase) {
        let before = std::mem::replace(&mut *self.phase.lock(), phase);
        self.changed.notify_waiters();
        // It may be the last to hold an owner's view of its lease.
        drop(before);
    }
}

impl Leader {
    /// The operation is this process's now.
    pub(crate) fn working(&self, live: Arc<Live>) {
        self.flight.enter(Phase::Working(live));
    }

    /// Another process has it: followers need not wait for this leader to know.
    pub(crate) fn elsewhere(&self, sighting: Sighting) {
        match &mut *self.flight.phase.lock() {
            phase @ Phase::Claiming => *phase = Phase::Elsewhere(sighting),
            // Nobody waits for the next sighting.
            Phase::Elsewhere(before) => return *before = sighting,
            Phase::Working(_) | Phase::Ended(_) => return,
        }
        self.flight.changed.notify_waiters();
    }

    /// Ends the flight: new arrivals start afresh, then followers are told.
    pub(crate) fn end(mut self, end: End) {
        self.finish(end);
    }

    /// Ends the flight with an error, for the leader to return too.
    pub(crate) fn fail(self, error: EngineError) -> EngineError {
        self.end(End::Failed(error.clone()));
        error
    }

    fn finish(&mut self, end: End) {
        self.ended = true;
        self.table.remove(&self.id, &self.flight);
        self.flight.enter(Phase::Ended(end));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(End::Abandoned);
        }
    }
}
