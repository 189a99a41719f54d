//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, Completion, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd, Operation,
    Reply, Scope,
};
use tempfile::TempDir;

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// A folder of its own, and a path in it.
pub(crate) fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("onlyonce.db");
    (folder, path)
}

pub(crate) fn op(key: &str) -> Operation {
    op_of("shop", key, "body")
}

pub(crate) fn op_of(scope: &str, key: &str, body: &str) -> Operation {
    Operation::new(Scope::new(scope).unwrap(), Key::new(key).unwrap(), Fingerprint::of(body))
}

pub(crate) fn token() -> LeaseToken {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).unwrap();
    LeaseToken::from_bytes(bytes)
}

pub(crate) fn request(on_lease_end: OnLeaseEnd) -> ClaimRequest {
    ClaimRequest {
        token: token(),
        lease: LEASE,
        retention: RETENTION,
        on_lease_end,
        takeover_now: true,
        max_attempts: 5,
    }
}

pub(crate) fn hold() -> ClaimRequest {
    request(OnLeaseEnd::Hold)
}

pub(crate) fn take_over() -> ClaimRequest {
    request(OnLeaseEnd::TakeOver)
}

pub(crate) fn done(token: LeaseToken, body: impl Into<bytes::Bytes>) -> Completion {
    Completion { token, attempt: 1, reply: Reply::ok(body), retention: RETENTION }
}

#[track_caller]
pub(crate) fn acquired(outcome: ClaimOutcome) -> Lease {
    match outcome {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("not acquired: {other:?}"),
    }
}

#[track_caller]
pub(crate) fn completed(outcome: ClaimOutcome) -> Reply {
    match outcome {
        ClaimOutcome::Completed(stored) => stored.reply,
        other => panic!("not completed: {other:?}"),
    }
}

/// A connection beside the store, as another program would have.
pub(crate) fn beside(path: &Path) -> rusqlite::Connection {
    rusqlite::Connection::open(path).unwrap()
}
