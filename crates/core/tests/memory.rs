//! What the memory store promises beyond the contract: it is bounded.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, LeaseToken, MemoryStore,
    OnLeaseEnd, Operation, PurgeRequest, Reply, Scope, Store, StoreAdmin, StoreErrorKind, TestClock,
};

const OWNER: LeaseToken = LeaseToken::from_bytes([1; 16]);
const RETENTION: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn past_its_bound_new_keys_are_refused_until_a_purge() {
    let clock = TestClock::new();
    let store = MemoryStore::with_clock(Arc::new(clock.clone())).records_max(64);
    let mut held = Vec::new();
    // Keys are spread over shards by chance, so that the bound is met somewhere before 64.
    let refused = loop {
        let operation = operation(held.len());
        match store.claim(&operation, &request()).await {
            Ok(ClaimOutcome::Acquired(_)) => held.push(operation),
            Ok(other) => panic!("a new key is Acquired or refused, not {other:?}"),
            Err(error) => break (operation, error),
        }
        assert!(held.len() <= 64, "{} records", held.len());
    };
    assert_eq!((refused.1.kind(), refused.1.may_have_applied()), (StoreErrorKind::Full, false));
    assert_eq!(store.len(), held.len(), "a refused claim leaves nothing behind");
    assert!(!store.is_empty());

    // What is there already goes on, and an effect that happened is written even past the bound.
    for operation in &held {
        assert!(matches!(store.claim(operation, &request()).await, Ok(ClaimOutcome::Acquired(_))));
        let end = store.complete(operation, &completion()).await;
        assert!(matches!(end, Ok(CompleteOutcome::Stored(_))), "{end:?}");
    }
    let anew = store.complete(&refused.0, &completion()).await;
    assert!(matches!(anew, Ok(CompleteOutcome::StoredAnew(_))), "{anew:?}");

    clock.advance(RETENTION);
    let purged = store.purge(&PurgeRequest::default()).await.unwrap();
    assert_eq!(purged.removed as usize, held.len() + 1);
    assert!(store.is_empty());
    assert!(matches!(store.claim(&refused.0, &request()).await, Ok(ClaimOutcome::Acquired(_))));
}

#[tokio::test]
async fn the_bytes_of_records_are_those_of_their_names_and_replies() {
    let store = MemoryStore::new();
    let bytes = async || store.stats().await.unwrap().bytes.unwrap();
    assert_eq!(bytes().await, 0);
    let (short, long) = (operation(1), operation(1000));
    let scope = Scope::new("shop").unwrap();
    let scoped = Operation::new(scope, long.key().clone(), *long.fingerprint());
    store.claim(&short, &request()).await.unwrap();
    let one = bytes().await;
    assert!(one > short.key().as_str().len() as u64);
    store.claim(&long, &request()).await.unwrap();
    store.claim(&scoped, &request()).await.unwrap();
    assert_eq!(bytes().await, 3 * one + 2 * 3 + 4, "two keys of three bytes more, and one scope of four");
    let before = bytes().await;
    store.complete(&short, &completion()).await.unwrap();
    assert_eq!(bytes().await - before, completion().reply.weight_bytes() as u64);
}

fn operation(n: usize) -> Operation {
    Operation::new(Scope::anonymous(), Key::new(format!("key {n}")).unwrap(), Fingerprint::of("a"))
}

fn request() -> ClaimRequest {
    ClaimRequest {
        token: OWNER,
        lease: Duration::from_secs(30),
        retention: RETENTION,
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: true,
        max_attempts: 5,
    }
}

fn completion() -> Completion {
    Completion { token: OWNER, attempt: 1, reply: Reply::ok("done"), retention: RETENTION }
}
