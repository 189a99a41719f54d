//! Takeover: who may, when, and what it counts as.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use onlyonce_core::{MemoryStore, OnLeaseEnd, StoreErrorKind, TestClock};
use onlyonce_engine::{Begin, Completed, Context};

fn op() -> onlyonce_core::Operation {
    operation("a", "x")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_meet_at_the_end_of_a_lease() {
    for (owner, caller, takes_over) in [
        (OnLeaseEnd::TakeOver, OnLeaseEnd::TakeOver, true),
        (OnLeaseEnd::TakeOver, OnLeaseEnd::Hold, false),
        (OnLeaseEnd::Hold, OnLeaseEnd::TakeOver, false),
    ] {
        let clock = TestClock::new();
        let records = MemoryStore::with_clock(Arc::new(clock.clone()));
        let build = |on_lease_end| {
            let store = FaultyStore::onto(&records);
            // The lease ends by silence: nothing is marked.
            store.break_down(Method::MarkUnknown, Fault::Refuse(StoreErrorKind::Internal));
            brief(&store, secs(30)).clock(Arc::new(clock.clone())).on_lease_end(on_lease_end).build()
        };
        let (owner, caller) = (build(owner), build(caller));
        drop(acquire(&owner, &op()).await);
        all_given_back(&owner).await;
        clock.advance(secs(30));
        let answer = caller.begin(&op()).await.unwrap();
        assert_eq!(matches!(answer, Begin::Acquired(_)), takes_over);
        assert_eq!(matches!(answer, Begin::Unknown { .. }), !takes_over);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_a_network_nobody_takes_over_before_its_contact_is_unbroken_for_a_lease() {
    let records = MemoryStore::new();
    let (store, other) = (FaultyStore::over_network(&records), FaultyStore::over_network(&records));
    let lease = ms(1500);
    let owner = brief(&store, lease).build();
    drop(acquire(&owner, &op()).await);
    drop(owner);
    tokio::time::sleep(lease * 2).await;
    // The lease is long over, but this process has just begun.
    let begun = tokio::time::Instant::now();
    let rival = brief(&other, lease).build();
    assert!(is_in_progress(&rival.begin(&op()).await.unwrap()));
    // Idle in between: the contact is kept up without callers.
    eventually("probes", || other.calls(Method::Release) >= 3).await;
    let execution = attempt_after_takeover(&rival, &op()).await;
    assert!(begun.elapsed() >= lease, "not before an unbroken lease");
    assert_eq!(execution.attempt(), 2);
    execution.release().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_outage_of_a_network_store_the_owner_goes_first() {
    let records = MemoryStore::new();
    let (store, other) = (FaultyStore::over_network(&records), FaultyStore::over_network(&records));
    let lease = ms(1500);
    let (owner, rival) = (brief(&store, lease).build(), brief(&other, lease).build());
    let execution = acquire(&owner, &op()).await;
    tokio::time::sleep(lease * 2).await;
    let away = Fault::Refuse(StoreErrorKind::Unavailable);
    store.break_all(away);
    other.break_all(away);
    let errors = rival.counts().store_errors;
    tokio::time::sleep(lease * 2).await;
    // Nobody asked in between: the outage is noticed all the same.
    assert!(rival.counts().store_errors > errors, "an idle process notices an outage");
    other.heal();
    assert!(is_in_progress(&rival.begin(&op()).await.unwrap()), "lease over, but the owner goes first");
    let renewals = owner.counts().renewals;
    store.heal();
    eventually("the owner renews", || owner.counts().renewals > renewals).await;
    assert!(matches!(execution.complete(body("done")).await, Completed::Recorded(_)));
    assert_eq!(rival.counts().takeovers, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_counted_under_takeover_by_the_attempt() {
    let (store, other) = two_ways();
    let (owner, rival) = (brief(&store, ms(300)).build(), brief(&other, ms(300)).wait(PATIENCE).build());
    let runs = Arc::new(AtomicUsize::new(0));
    drop(acquire(&owner, &op()).await);
    let counted = runs.clone();
    let work = move |context: Context| async move {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(body(format!("attempt {}", context.attempt())))
    };
    // A waiter takes over by itself when the lease is over.
    let outcome = rival.run_detached(op(), work).await.unwrap();
    assert_eq!((recorded(&outcome), runs.load(Ordering::SeqCst)), (&b"attempt 2"[..], 1));
}
