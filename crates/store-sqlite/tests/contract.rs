//! The contract on one file: states, batches, durability, reopening.

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Reply, Store, StoreErrorKind,
};
use onlyonce_store_sqlite::SqliteStore;

#[tokio::test]
async fn a_record_goes_through_its_states_and_survives_reopening() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let (first, second) = (hold(), hold());
    let lease = acquired(store.claim(&op("k"), &first).await.unwrap());
    assert_eq!((lease.token, lease.attempt, lease.duration), (first.token, 1, LEASE));
    assert!(matches!(store.claim(&op("k"), &second).await.unwrap(), ClaimOutcome::InProgress { .. }));
    assert!(matches!(
        store.claim(&op_of("shop", "k", "other"), &second).await.unwrap(),
        ClaimOutcome::Mismatch { stored, .. } if stored == *op("k").fingerprint()
    ));
    // Asked again with its own token it is acquired again.
    assert_eq!(acquired(store.claim(&op("k"), &first).await.unwrap()).attempt, 1);
    assert_eq!(store.renew(&op("k"), first.token, LEASE).await.unwrap(), RenewOutcome::Renewed);
    assert_eq!(store.renew(&op("k"), second.token, LEASE).await.unwrap(), RenewOutcome::Fenced);
    assert_eq!(store.release(&op("k"), second.token).await.unwrap(), ReleaseOutcome::Fenced);
    let binary = vec![0, 255, 10, 13, 0];
    let reply = Reply::new(201, binary.clone())
        .with_header("x-a".parse().unwrap(), "1".parse().unwrap())
        .with_header("x-a".parse().unwrap(), "2".parse().unwrap());
    let completion = onlyonce_core::Completion { reply: reply.clone(), ..done(first.token, "") };
    let stored = store.complete(&op("k"), &completion).await.unwrap();
    let CompleteOutcome::Stored(stored) = stored else { panic!("{stored:?}") };
    assert!(matches!(
        store.complete(&op("k"), &completion).await.unwrap(),
        CompleteOutcome::AlreadyStored(_)
    ));
    assert!(matches!(
        store.complete(&op("k"), &done(second.token, "x")).await.unwrap(),
        CompleteOutcome::Fenced(Some(other)) if other.reply == reply
    ));
    drop(store);

    let store = SqliteStore::open_existing(&path).await.unwrap();
    let again = store.claim(&op("k"), &second).await.unwrap();
    let ClaimOutcome::Completed(again) = again else { panic!("{again:?}") };
    assert_eq!(
        (&again.reply, again.completed_at, again.expires_at),
        (&reply, stored.completed_at, stored.expires_at)
    );
    assert_eq!(store.renew(&op("k"), first.token, LEASE).await.unwrap(), RenewOutcome::Ended);
}

#[tokio::test]
async fn release_frees_and_a_mark_of_unknown_holds_until_its_owner_completes() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let (first, second) = (take_over(), take_over());
    acquired(store.claim(&op("a"), &first).await.unwrap());
    assert_eq!(store.release(&op("a"), first.token).await.unwrap(), ReleaseOutcome::Applied);
    assert_eq!(store.release(&op("a"), first.token).await.unwrap(), ReleaseOutcome::Absent);
    assert_eq!(store.renew(&op("a"), first.token, LEASE).await.unwrap(), RenewOutcome::Gone);
    acquired(store.claim(&op("a"), &second).await.unwrap());

    assert_eq!(store.mark_unknown(&op("a"), first.token).await.unwrap(), ReleaseOutcome::Fenced);
    assert_eq!(store.mark_unknown(&op("a"), second.token).await.unwrap(), ReleaseOutcome::Applied);
    assert!(matches!(store.claim(&op("a"), &first).await.unwrap(), ClaimOutcome::Unknown { .. }));
    assert!(matches!(
        store.complete(&op("a"), &done(second.token, "late")).await.unwrap(),
        CompleteOutcome::Stored(_)
    ));
    assert_eq!(completed(store.claim(&op("a"), &first).await.unwrap()).body(), "late");
    // A lost record: the effect happened, so it is written anew.
    assert!(matches!(
        store.complete(&op("lost"), &done(first.token, "found")).await.unwrap(),
        CompleteOutcome::StoredAnew(_)
    ));
}

#[tokio::test]
async fn one_caller_costs_one_commit_and_a_thousand_at_most_fifty() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("one"), &hold()).await.unwrap());
    assert_eq!(store.counters().commits, 1);
    // Nothing to write: nothing to commit.
    assert!(matches!(store.claim(&op("one"), &hold()).await.unwrap(), ClaimOutcome::InProgress { .. }));
    assert_eq!(store.counters().commits, 1);

    let before = store.counters();
    let claims = (0..1000).map(|n| {
        let store = store.clone();
        async move { acquired(store.claim(&op(&format!("k{n}")), &hold()).await.unwrap()) }
    });
    futures_util::future::join_all(claims).await;
    let after = store.counters();
    assert_eq!(after.operations - before.operations, 1000);
    assert!(after.commits - before.commits <= 50, "{before:?} {after:?}");
}

#[tokio::test]
async fn of_many_claims_in_one_batch_one_wins() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    for round in 0..20 {
        let claims = (0..50).map(|_| {
            let store = store.clone();
            async move { store.claim(&op(&format!("r{round}")), &take_over()).await.unwrap() }
        });
        let outcomes = futures_util::future::join_all(claims).await;
        let won = outcomes.iter().filter(|outcome| matches!(outcome, ClaimOutcome::Acquired(_))).count();
        assert_eq!(won, 1, "round {round}");
    }
}

#[tokio::test]
async fn a_full_queue_refuses_claims_and_a_dropped_claim_is_not_made() {
    let (_folder, path) = place();
    let options = SqliteStore::options(&path).queue_max(4).busy_timeout(Duration::from_secs(30));
    let store = options.open().await.unwrap();
    // Another program holds the database, so that the writer waits with the first claim.
    let other = beside(&path);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let spawn = |key: &str| {
        let (store, op) = (store.clone(), op(key));
        tokio::spawn(async move { store.claim(&op, &hold()).await })
    };
    let first = spawn("first");
    while store.counters().batches == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let mut queued: Vec<_> = (0..4).map(|n| spawn(&format!("q{n}"))).collect();
    // On this runtime of one thread: each is polled, so each is queued.
    tokio::task::yield_now().await;
    let refused = store.claim(&op("over"), &hold()).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Overloaded);
    assert!(refused.retryable() && !refused.may_have_applied());
    // Owners have a lane of their own.
    let renewing = store.clone();
    let renewal = tokio::spawn(async move { renewing.renew(&op("x"), token(), LEASE).await });
    tokio::task::yield_now().await;
    let given_up = queued.pop().unwrap();
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    other.execute_batch("ROLLBACK").unwrap();
    acquired(first.await.unwrap().unwrap());
    for claim in queued {
        acquired(claim.await.unwrap().unwrap());
    }
    assert_eq!(renewal.await.unwrap().unwrap(), RenewOutcome::Gone);
    acquired(store.claim(&op("q3"), &hold()).await.unwrap());
}
