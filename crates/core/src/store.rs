//! The store contract.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::lease::{Lease, LeaseToken, OnLeaseEnd};
use crate::operation::{Operation, Origin};
use crate::reply::{Reply, StoredReply};

/// Where records live. One store may serve any number of processes at once.
///
/// Here is one, complete. Only [`Store::claim`] and its kin are the store's own work; every decision is asked of
/// [`decide`](crate::decide::decide), [`decide_renew`](crate::decide::decide_renew),
/// [`decide_complete`](crate::decide::decide_complete) and [`decide_release`](crate::decide::decide_release).
///
/// ```
#[doc = include_str!("../examples/custom_store.rs")]
/// ```
///
/// # Testing one
/// The crate `onlyonce-conformance` has the one case list that every store must pass. Implement its `Subject` (how a fresh
/// store is made, how its clock is moved) and let it write the tests, a name for each case:
///
/// ```text
/// onlyonce_conformance::conformance!(MySubject::fresh);
/// onlyonce_conformance::admin_conformance!(MySubject::fresh);   // for a StoreAdmin
/// ```
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// Asks for the right to run `operation`: [`decide`](crate::decide::decide) on the stored record, applied atomically.
    ///
    /// # Guarantees
    /// Of any number of concurrent claims with different tokens on one operation, in any number of processes, at most
    /// one is Acquired until its lease is over by the store's own clock. Asked again with the same token (after a
    /// lost answer) it is Acquired again with a full lease. An Acquired claim under
    /// [`OnLeaseEnd::Hold`] is durable, as far as the store is, before it is answered. The record keeps the operation's
    /// origin; a takeover puts its own in place of the last owner's.
    ///
    /// # Errors
    /// [`StoreError`]; when its `may_have_applied()` is true the claim may be held: ask again with the same token, or
    /// release it.
    ///
    /// # Cancellation
    /// Dropped before it was sent: nothing happens. Dropped later: the claim may be held under the request's token.
    ///
    /// # Cost
    /// One round trip.
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError>;

    /// Starts the lease anew, `lease` long from now by the store's clock.
    ///
    /// # Guarantees
    /// The stored token renews however late, and turns an unknown record back into one in progress. Goes before
    /// claims in every queue of the store.
    ///
    /// # Errors
    /// [`StoreError`]; safe to ask again.
    ///
    /// # Cancellation
    /// May or may not have been applied.
    ///
    /// # Cost
    /// One round trip.
    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError>;

    /// Stores the reply and ends the operation.
    ///
    /// # Guarantees
    /// When this returns `Stored`, `StoredAnew` or `AlreadyStored` the reply is durable, as far as the store is, and
    /// every later claim with the same fingerprint is answered with it until it expires. A completed record is never
    /// changed. On a living record the state alone changes: fingerprint, origin and attempt stay those of the claim. No record
    /// any more: the completed record is written anew, for the effect happened.
    ///
    /// # Errors
    /// [`StoreError`]; safe to ask again with the same completion.
    ///
    /// # Cancellation
    /// May or may not have been applied.
    ///
    /// # Cost
    /// One round trip.
    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError>;

    /// Gives the operation back: nothing happened, a retry may run it. Idempotent.
    ///
    /// # Guarantees
    /// Only a record in progress or unknown under this very token is removed.
    ///
    /// # Errors
    /// [`StoreError`]; safe to ask again.
    ///
    /// # Cancellation
    /// May or may not have been applied.
    ///
    /// # Cost
    /// One round trip.
    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError>;

    /// Says that the outcome is unknown: nobody may run it again until it is resolved. Ends the lease at once; one that is
    /// over already keeps its end, which is what `since` and the purge go by.
    ///
    /// # Guarantees
    /// Only a record in progress or unknown under this very token changes; a later `complete` or `renew` with the
    /// token still succeeds. Durable like a completion.
    ///
    /// # Errors
    /// [`StoreError`]; safe to ask again.
    ///
    /// # Cancellation
    /// May or may not have been applied.
    ///
    /// # Cost
    /// One round trip.
    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError>;

    /// Removes up to `request.limit` records that are over: completed ones past `expires_at`; records in progress or
    /// unknown `request.hold_retention` after their lease; freed ones as long after they were freed. A store that drops
    /// records by a time to live of its own answers that it removed none.
    ///
    /// # Guarantees
    /// Never a record that anybody may still need; never stalls claims for longer than one batch.
    ///
    /// # Errors
    /// [`StoreError`]; safe to ask again.
    ///
    /// # Cancellation
    /// The batch may or may not have been removed.
    ///
    /// # Cost
    /// One bounded batch.
    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError>;

    /// What this store is and can do. Constant, no round trip.
    fn capabilities(&self) -> Capabilities;
}

/// What a claim asks for.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Fresh for each `begin`; the same one when asking again after a lost answer.
    pub token: LeaseToken,
    /// How long the claim holds without renewal.
    pub lease: Duration,
    /// How long the record is kept after completion; stores with a time to live of their own need it early.
    pub retention: Duration,
    /// The policy kept in the record, and the caller's own leave to take over.
    pub on_lease_end: OnLeaseEnd,
    /// False while the caller's contact with a network store has been unbroken for less than a lease: the owner,
    /// cut off by the same outage, renews first.
    pub takeover_now: bool,
    /// A takeover past this many attempts is not made: the outcome is unknown instead.
    pub max_attempts: u32,
}

/// What a claim is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The caller owns the operation and must end it.
    Acquired(Lease),
    /// Somebody else works on it.
    InProgress {
        /// What is left of the owner's lease; it may renew. Zero: the lease is over and the owner goes first.
        lease_left: Duration,
        /// Since the owner claimed it.
        age: Duration,
        /// The owner's request.
        origin: Option<Origin>,
    },
    /// It is done: this is the answer.
    Completed(StoredReply),
    /// The key belongs to another request.
    Mismatch {
        /// The fingerprint of that request, to be compared under its own definition.
        stored: Fingerprint,
        /// That request.
        origin: Option<Origin>,
    },
    /// It may have happened, and nobody may run it again.
    Unknown {
        /// Since when, by the wall clock.
        since: SystemTime,
        /// The request that may have had its effect.
        origin: Option<Origin>,
    },
}

/// What a renewal is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// A full lease from now.
    Renewed,
    /// This owner completed it already.
    Ended,
    /// Another owner has it: stop, and do not touch it again.
    Fenced,
    /// The record is gone. Before the work: claim again. During the work: go on, completion writes it anew.
    Gone,
}

/// What is stored at the end.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The owner's token.
    pub token: LeaseToken,
    /// The owner's attempt, for a record that must be written anew.
    pub attempt: u32,
    /// The answer for every retry.
    pub reply: Reply,
    /// `expires_at` is the time of completion plus this.
    pub retention: Duration,
}

/// What a completion is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompleteOutcome {
    /// Stored.
    Stored(StoredReply),
    /// Stored, though the record had been lost or purged in the meantime.
    StoredAnew(StoredReply),
    /// This owner had stored it before.
    AlreadyStored(StoredReply),
    /// Another owner has it; its reply, if there is one and it answers the same request.
    Fenced(Option<StoredReply>),
}

/// What a release or a mark of unknown outcome is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// Done.
    Applied,
    /// Another token is stored, or the record is completed: nothing changed.
    Fenced,
    /// There was no record.
    Absent,
}

/// How much to purge.
#[derive(Clone, Copy, Debug)]
pub struct PurgeRequest {
    /// At most this many records in one batch.
    pub limit: u32,
    /// How long records without a reply are kept after their lease. 7 days by default.
    pub hold_retention: Duration,
}

impl Default for PurgeRequest {
    fn default() -> Self {
        Self { limit: 500, hold_retention: Duration::from_secs(7 * 24 * 3600) }
    }
}

/// What a purge did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Records removed in this batch.
    pub removed: u64,
    /// Whether more are waiting.
    pub more: bool,
    /// True when nothing was removed because the store's clocks disagree; see the store.
    pub paused: bool,
}

/// What a store is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name, such as `sqlite`.
    pub name: &'static str,
    /// Where it is, without secrets: for banners and logs.
    pub location: String,
    /// Reached over a network: a takeover then needs unbroken contact for one lease.
    pub network: bool,
    /// Acknowledged completions survive a power cut. When false, `hazard` says what a crash loses.
    pub durable: bool,
    /// What an operator should know, in a sentence; shown at start.
    pub hazard: Option<String>,
}
