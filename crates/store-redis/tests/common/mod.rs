//! What the tests of this crate share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, LeaseToken, OnLeaseEnd,
    Operation, Reply, Scope, Store,
};
use onlyonce_store_redis::Options;

/// Options for a machine that is busy with other things, too.
pub fn patient(url: &str) -> Options {
    let options = Options::from_url(url).expect("a URL");
    options.timeout(Duration::from_secs(20)).connect_timeout(Duration::from_secs(20))
}

pub fn operation(key: &str) -> Operation {
    scoped("shop", key)
}

pub fn scoped(scope: &str, key: &str) -> Operation {
    Operation::new(
        Scope::new(scope).expect("a scope"),
        Key::new(key).expect("a key"),
        Fingerprint::of("the request"),
    )
}

pub fn token(n: u8) -> LeaseToken {
    LeaseToken::from_bytes([n; 16])
}

/// The rules of `docs/stores.md` for a user that has no other rights, as arguments of `ACL SETUSER`.
pub fn documented_rights() -> Vec<String> {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/stores.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let rules = page.split_once("ACL SETUSER onlyonce ").expect("the rules are there").1;
    rules.split_once("```").expect("the rules end").0.split_whitespace().map(str::to_owned).collect()
}

/// A claim for a minute that may take over and be taken over.
pub fn request(n: u8) -> ClaimRequest {
    ClaimRequest {
        token: token(n),
        lease: Duration::from_secs(60),
        retention: Duration::from_secs(86_400),
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: true,
        max_attempts: 5,
    }
}

pub fn hold(n: u8) -> ClaimRequest {
    ClaimRequest { on_lease_end: OnLeaseEnd::Hold, ..request(n) }
}

pub fn completion(n: u8, reply: Reply) -> Completion {
    Completion { token: token(n), attempt: 1, reply, retention: Duration::from_secs(86_400) }
}

pub async fn acquire(store: &impl Store, operation: &Operation, n: u8) -> u32 {
    match store.claim(operation, &request(n)).await.expect("the store answers") {
        ClaimOutcome::Acquired(lease) => lease.attempt,
        other => panic!("expected Acquired, got {other:?}"),
    }
}

pub async fn finish(store: &impl Store, operation: &Operation, n: u8, reply: Reply) {
    let end = store.complete(operation, &completion(n, reply)).await.expect("the store answers");
    assert!(matches!(end, CompleteOutcome::Stored(_)), "{end:?}");
}

pub async fn replay(store: &impl Store, operation: &Operation) -> Reply {
    match store.claim(operation, &request(0xee)).await.expect("the store answers") {
        ClaimOutcome::Completed(stored) => stored.reply,
        other => panic!("expected Completed, got {other:?}"),
    }
}
