//! The in-flight table: what this process is claiming or running, so that its duplicates cost no store reads.
//!
//! A flight goes through Claiming → Working → Ended; its leader moves it, any number of followers watch. The table
//! saves work only: correctness is the store's.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onlyonce_core::{ClaimOutcome, Fingerprint, Operation, OperationId, Reply, StoredReply};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::execution::Live;
use crate::outcome::EngineError;

const SHARDS: usize = 32;

type Shard = HashMap<OperationId, Arc<Flight>>;

#[derive(Debug)]
pub(crate) struct Flights {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
}

#[derive(Debug)]
pub(crate) struct Flight {
    /// The leader's fingerprint; the operation's own once Working.
    pub(crate) fingerprint: Fingerprint,
    phase: watch::Sender<Phase>,
    successor_taken: AtomicBool,
}

#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The store is being asked.
    Claiming,
    /// The leader owns the operation.
    Working(Arc<Live>),
    /// It is over for this process.
    Ended(End),
}

/// How a flight ended, for its followers.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// Recorded under the flight's fingerprint.
    Completed(StoredReply),
    /// Given back; what the leader was answered. One follower claims again.
    Released(Option<Reply>),
    /// The store gave another answer than Acquired; what fingerprint it has on record.
    Answered(Fingerprint, ClaimOutcome),
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
    Follower(Arc<Flight>, watch::Receiver<Phase>),
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
        Arc::new(Self { shards, hasher: RandomState::new() })
    }

    /// Joins the flight of this operation, or starts it.
    pub(crate) fn join(self: &Arc<Self>, operation: &Operation) -> Place {
        let mut shard = self.shard(operation.id()).lock();
        if let Some(flight) = shard.get(operation.id()) {
            return Place::Follower(flight.clone(), flight.phase.subscribe());
        }
        Place::Leader(self.start(&mut shard, operation))
    }

    /// Starts a flight in the place of one whose owner holds a dead lease; somebody may have been faster.
    pub(crate) fn replace(self: &Arc<Self>, operation: &Operation, dead: &Arc<Flight>) -> Option<Leader> {
        let mut shard = self.shard(operation.id()).lock();
        match shard.get(operation.id()) {
            Some(flight) if !Arc::ptr_eq(flight, dead) => None,
            _ => Some(self.start(&mut shard, operation)),
        }
    }

    fn start(self: &Arc<Self>, shard: &mut Shard, operation: &Operation) -> Leader {
        let flight = Arc::new(Flight {
            fingerprint: *operation.fingerprint(),
            phase: watch::Sender::new(Phase::Claiming),
            successor_taken: AtomicBool::new(false),
        });
        shard.insert(operation.id().clone(), flight.clone());
        Leader { table: self.clone(), id: operation.id().clone(), flight, ended: false }
    }

    /// Visits what is being worked on, one shard at a time.
    pub(crate) fn for_each_live(&self, mut visit: impl FnMut(&Arc<Live>)) {
        for shard in &self.shards {
            for flight in shard.lock().values() {
                if let Phase::Working(live) = &*flight.phase.borrow() {
                    visit(live);
                }
            }
        }
    }

    fn remove(&self, id: &OperationId, flight: &Arc<Flight>) {
        let mut shard = self.shard(id).lock();
        if shard.get(id).is_some_and(|current| Arc::ptr_eq(current, flight)) {
            shard.remove(id);
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
}

impl Leader {
    /// The operation is this process's now.
    pub(crate) fn working(&self, live: Arc<Live>) {
        self.flight.phase.send_replace(Phase::Working(live));
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
        self.flight.phase.send_replace(Phase::Ended(end));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(End::Abandoned);
        }
    }
}
