//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, Completion, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd, Operation,
    Reply, Scope, Store, StoreError,
};
use onlyonce_store_postgres::PostgresStore;
use testkit::Postgres;

pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The lock of the key `order-7` in the scope `merchant-1`.
pub(crate) const LOCK_OF_ORDER_7: i64 = -1_186_552_313_194_976_167;

/// A database of its own on the shared server.
pub(crate) struct Place {
    pub(crate) server: Postgres,
    pub(crate) database: String,
    pub(crate) url: String,
}

pub(crate) async fn place() -> Place {
    let server = Postgres::shared().await;
    let database = server.database().await;
    Place { url: server.url(&database), server, database }
}

impl Place {
    pub(crate) async fn open(&self) -> PostgresStore {
        PostgresStore::open(&self.url).await.unwrap()
    }

    pub(crate) async fn psql(&self, sql: &str) -> String {
        self.server.psql(&self.database, sql).await
    }
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

/// Claims and completes.
pub(crate) async fn pair(store: &PostgresStore, key: &str) -> Result<(), StoreError> {
    let request = take_over();
    acquired(store.claim(&op(key), &request).await?);
    store.complete(&op(key), &done(request.token, key.to_owned())).await?;
    Ok(())
}

/// The error with all of its causes.
pub(crate) fn chain(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
