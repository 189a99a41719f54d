//! THE state machine, as pure functions: every store loads a [`Record`], asks here, and writes the answer.
//!
//! ```text
//!             claim                 complete (token matches)
//!   absent ----------> in_progress --------------------------> completed --expires_at--> absent
//!      ^                |   |  ^   \--- lease over and nobody may take over ---> unknown
//!      |    release     |   |  | claim after the lease, both sides allow it: take over, new token, attempt + 1
//!      +----------------+   +--+            unknown --resolve | release, by an operator--> completed | freed
//! ```
//!
//! A record past `expires_at` is absent before anything else is looked at; then the fingerprint is compared,
//! then the state.

use std::time::{Duration, SystemTime};

use crate::admin::{StateName, Target};
use crate::fingerprint::Fingerprint;
use crate::lease::{LeaseToken, OnLeaseEnd};
use crate::mutant::{Mutant, mutant};
use crate::operation::Origin;
use crate::reply::StoredReply;
use crate::store::{ClaimOutcome, ClaimRequest};

/// A stored record as it stands at this moment, by the store's own clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The fingerprint of the request that made it.
    pub fingerprint: Fingerprint,
    /// The owner's policy: a takeover needs this one's leave and the caller's.
    pub on_lease_end: OnLeaseEnd,
    /// How many runs were started, this one included.
    pub attempt: u32,
    /// The owner's request.
    pub origin: Option<Origin>,
    /// Where it stands.
    pub state: State,
}

/// The states of a record. No record is the state `absent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Somebody works on it, or did when its lease ended.
    InProgress {
        /// The owner.
        token: LeaseToken,
        /// What is left of the lease.
        lease: LeaseView,
        /// Since the owner claimed it.
        age: Duration,
    },
    /// The reply is stored; it never changes until it expires.
    Completed {
        /// The owner that completed it, so that its repeated completion is known.
        token: LeaseToken,
        /// The reply with its times.
        stored: StoredReply,
    },
    /// It may have happened; nobody may run it again.
    Unknown {
        /// The last owner: its late completion still resolves the record.
        token: LeaseToken,
        /// Since when, by the wall clock.
        since: SystemTime,
    },
    /// An operator freed it. Claims see it as absent; its token, which nobody holds, fences returning owners.
    Freed {
        /// A fresh token that belongs to nobody.
        token: LeaseToken,
    },
}

/// What is left of a lease, by the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseView {
    /// It runs for this much longer. Zero is over, and is written [`LeaseView::Over`].
    Left(Duration),
    /// It ended.
    Over {
        /// Wall time of its end, for people.
        since: SystemTime,
    },
}

/// What a claim does to the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Write the request's token with a full lease, then answer Acquired with this attempt.
    Acquire {
        /// The attempt to store and to answer.
        attempt: u32,
        /// How it came about.
        how: Acquire,
    },
    /// Write nothing, answer this.
    Answer(ClaimOutcome),
}

/// How an operation is acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// Nothing was there: insert, or overwrite the expired or freed record whole.
    Fresh,
    /// The owner asks again after a lost answer: its lease starts anew, nothing else changes.
    Reentrant,
    /// The lease is over and both sides allow it: new token, attempt + 1.
    TakeOver,
}

/// Decides a claim. Pure: equal arguments, equal answers.
pub fn decide(record: Option<&Record>, fingerprint: &Fingerprint, request: &ClaimRequest) -> Decision {
    use ClaimOutcome as Out;
    let fresh = |attempt| Decision::Acquire { attempt, how: Acquire::Fresh };
    let Some(record) = record else { return fresh(1) };
    if record.is_expired() {
        return fresh(1);
    }
    if matches!(record.state, State::Freed { .. }) {
        // An operator decided that it may run again; it is a later attempt all the same.
        return fresh(record.attempt.saturating_add(1));
    }
    if record.fingerprint != *fingerprint {
        let origin = record.origin.clone();
        return Decision::Answer(Out::Mismatch { stored: record.fingerprint, origin });
    }
    match &record.state {
        State::Completed { stored, .. } => Decision::Answer(Out::Completed(stored.clone())),
        State::InProgress { token, .. } | State::Unknown { token, .. } if *token == request.token => {
            Decision::Acquire { attempt: record.attempt, how: Acquire::Reentrant }
        }
        State::Unknown { since, .. } => {
            Decision::Answer(Out::Unknown { since: *since, origin: record.origin.clone() })
        }
        State::InProgress { lease: LeaseView::Left(left), age, .. } if !left.is_zero() => {
            Decision::Answer(Out::InProgress { lease_left: *left, age: *age, origin: record.origin.clone() })
        }
        State::InProgress { lease, age, .. } => after_the_lease(record, lease, *age, request),
        State::Freed { .. } => unreachable!("answered above"),
    }
}

fn after_the_lease(record: &Record, lease: &LeaseView, age: Duration, request: &ClaimRequest) -> Decision {
    let both_allow =
        record.on_lease_end == OnLeaseEnd::TakeOver && request.on_lease_end == OnLeaseEnd::TakeOver;
    if !both_allow || record.attempt >= request.max_attempts {
        let since = match lease {
            LeaseView::Over { since } => *since,
            LeaseView::Left(_) => SystemTime::UNIX_EPOCH,
        };
        return Decision::Answer(ClaimOutcome::Unknown { since, origin: record.origin.clone() });
    }
    if !request.takeover_now {
        // The caller's own contact with the store was broken: the owner's may have been too, so it goes first.
        let (lease_left, origin) = (Duration::ZERO, record.origin.clone());
        return Decision::Answer(ClaimOutcome::InProgress { lease_left, age, origin });
    }
    Decision::Acquire { attempt: record.attempt.saturating_add(1), how: Acquire::TakeOver }
}

/// What a renewal does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewDecision {
    /// Back to in_progress with a full lease, counted from now.
    Extend,
    /// This owner completed it already: nothing to write.
    Ended,
    /// Another token is stored.
    Fenced,
    /// There is no record.
    Gone,
}

/// Decides a renewal: the stored token renews however late, and an unknown record is in progress again.
pub fn decide_renew(record: Option<&Record>, token: &LeaseToken) -> RenewDecision {
    match record.filter(|r| !r.is_expired()).map(|r| &r.state) {
        None => RenewDecision::Gone,
        Some(state) if state.token() != token => RenewDecision::Fenced,
        Some(State::Completed { .. }) => RenewDecision::Ended,
        Some(State::Freed { .. }) => RenewDecision::Fenced,
        Some(State::InProgress { .. } | State::Unknown { .. }) => RenewDecision::Extend,
    }
}

/// What a completion does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompleteDecision {
    /// Write the reply.
    Write,
    /// Insert a completed record: the old one is lost or purged, and the effect happened.
    WriteAnew,
    /// This owner stored its reply already: nothing to write.
    AlreadyStored,
    /// Another token is stored; its reply, if there is one and it answers the same request.
    Fenced(Option<StoredReply>),
}

/// Decides a completion: the stored token completes however late, and resolves an unknown record.
///
/// A fenced owner is only shown a reply to its own request: once an operator has freed a key, another request may have
/// taken it.
pub fn decide_complete(
    record: Option<&Record>,
    fingerprint: &Fingerprint,
    token: &LeaseToken,
) -> CompleteDecision {
    let Some(record) = record.filter(|r| !r.is_expired()) else { return CompleteDecision::WriteAnew };
    if mutant(Mutant::FencingOff) {
        return CompleteDecision::Write;
    }
    let mine = record.state.token() == token;
    match &record.state {
        State::Completed { .. } if mine => CompleteDecision::AlreadyStored,
        State::Completed { stored, .. } => {
            CompleteDecision::Fenced((record.fingerprint == *fingerprint).then(|| stored.clone()))
        }
        State::InProgress { .. } | State::Unknown { .. } if mine => CompleteDecision::Write,
        State::InProgress { .. } | State::Unknown { .. } | State::Freed { .. } => {
            CompleteDecision::Fenced(None)
        }
    }
}

/// What a release, or a mark of unknown outcome, does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseDecision {
    /// The token is stored and nothing is completed: do it.
    Apply,
    /// Another token is stored, or the record is completed: change nothing.
    Fenced,
    /// There is no record: nothing to do.
    Absent,
}

/// Decides the owner's release (delete the record) and its mark of an unknown outcome alike.
pub fn decide_release(record: Option<&Record>, token: &LeaseToken) -> ReleaseDecision {
    match record.filter(|r| !r.is_expired()).map(|r| &r.state) {
        None => ReleaseDecision::Absent,
        Some(state @ (State::InProgress { .. } | State::Unknown { .. })) if state.token() == token => {
            ReleaseDecision::Apply
        }
        Some(_) => ReleaseDecision::Fenced,
    }
}

/// What an operator's change does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorDecision {
    /// Rotate the token and write it, with its audit entry.
    Apply,
    /// There is no record: nothing to do.
    Absent,
    /// The owner is at work: refuse.
    LiveLease {
        /// What is left of its lease.
        left: Duration,
    },
    /// There is a reply already: refuse.
    Completed,
    /// There is no reply to give up: refuse.
    NoReply,
}

/// Decides an operator's resolve and free alike: what `target` does not reach stays as it is.
pub fn decide_operator(record: Option<&Record>, target: Target) -> OperatorDecision {
    match (record.filter(|r| !r.is_expired()).map(|r| &r.state), target) {
        (None, _) => OperatorDecision::Absent,
        (Some(_), Target::Any) | (Some(State::Completed { .. }), Target::Completed) => {
            OperatorDecision::Apply
        }
        (Some(State::InProgress { lease: LeaseView::Left(left), .. }), _) if !left.is_zero() => {
            OperatorDecision::LiveLease { left: *left }
        }
        (Some(State::Completed { .. }), Target::Undecided) => OperatorDecision::Completed,
        (Some(_), Target::Completed) => OperatorDecision::NoReply,
        (Some(_), Target::Undecided) => OperatorDecision::Apply,
    }
}

impl Record {
    /// The state as operators see it: a record whose lease is over is unknown, whether a retry may take it over or not,
    /// for nobody is at work on it and nobody knows whether it happened; an expired one is still completed.
    pub fn state_name(&self) -> StateName {
        match &self.state {
            State::InProgress { lease: LeaseView::Left(left), .. } if !left.is_zero() => {
                StateName::InProgress
            }
            State::InProgress { .. } | State::Unknown { .. } => StateName::Unknown,
            State::Completed { .. } => StateName::Completed,
            State::Freed { .. } => StateName::Freed,
        }
    }

    /// Completed, and past its `expires_at`: absent for everybody but the purge and the operator's lists.
    pub fn is_expired(&self) -> bool {
        matches!(&self.state, State::Completed { stored, .. } if stored.remaining.is_zero())
    }
}

impl State {
    /// The stored token.
    pub fn token(&self) -> &LeaseToken {
        match self {
            Self::InProgress { token, .. }
            | Self::Completed { token, .. }
            | Self::Unknown { token, .. }
            | Self::Freed { token } => token,
        }
    }
}
