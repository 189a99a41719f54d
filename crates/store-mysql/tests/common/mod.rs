//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, Completion, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd, Operation,
    Reply, Scope,
};
use onlyonce_store_mysql::MysqlStore;
use testkit::Mariadb;

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The server that the tests share, and the name of a database of one's own.
pub(crate) async fn database() -> (Mariadb, String) {
    let server = Mariadb::shared().await;
    let database = server.database().await;
    (server, database)
}

/// A store on a database of its own.
pub(crate) async fn store() -> (Mariadb, String, MysqlStore) {
    let (server, database) = database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    (server, database, store)
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
