//! The core of `onlyonce`: the words, the state machine and the store contract.
//!
//! Nothing here runs a task, opens a file or speaks to a server. A store depends on this crate alone:
//! it loads a [`Record`], asks [`mod@decide`], and writes what was decided, atomically.
//!
//! | module | what it holds |
//! |---|---|
//! | [`operation`] | [`Scope`], [`Key`], [`Operation`]: what is to happen once |
//! | [`fingerprint`] | [`Fingerprint`]: what tells a retry from another request under the same key |
//! | [`reply`] | [`Reply`]: what every retry is answered with, and its stored form |
//! | [`lease`] | [`Lease`], [`LeaseToken`]: who may work, and for how long |
//! | [`mod@decide`] | the state machine, as pure functions |
//! | [`store`] | the [`Store`] contract |
//! | [`transaction`] | [`TxOptions`], [`TxClaim`], [`OnceOutcome`]: the words of the transactional mode |
//! | [`admin`] | [`StoreAdmin`]: what an operator may ask of a store |
//! | [`memory`] | [`MemoryStore`]: the reference store |
//! | [`clock`] | every reading of time in the product |

pub mod admin;
pub mod clock;
#[doc(hidden)]
pub mod crash;
pub mod decide;
pub mod error;
pub mod fingerprint;
pub mod lease;
pub mod memory;
pub mod mutant;
pub mod operation;
pub mod reply;
pub mod store;
pub mod transaction;

pub use admin::{
    AuditEntry, ListPage, ListQuery, OperatorAction, OperatorOutcome, RecordView, StateName, StoreAdmin,
    StoreStats, Target, probe_operation,
};
pub use clock::{Clock, SystemClock, TestClock};
#[doc(hidden)]
pub use crash::{CrashPoint, crash_point};
pub use decide::{
    Acquire, CompleteDecision, Decision, LeaseView, OperatorDecision, Record, ReleaseDecision, RenewDecision,
    State, decide, decide_complete, decide_operator, decide_release, decide_renew,
};
pub use error::{StoreError, StoreErrorKind};
pub use fingerprint::{Definition, DefinitionId, Fingerprint, FingerprintBuilder};
pub use lease::{Lease, LeaseToken, OnLeaseEnd};
pub use memory::MemoryStore;
pub use mutant::{Mutant, mutant};
pub use operation::{InvalidName, Key, Operation, OperationId, Origin, Scope};
pub use reply::{Reply, StoredReply};
pub use store::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, PurgeRequest, Purged,
    ReleaseOutcome, RenewOutcome, Store,
};
pub use transaction::{OnceOutcome, Pending, TxClaim, TxFailure, TxOptions, TxStep};
