//! Bounds, the replay cache, the purge, shutdown, and that nothing outlives its engine.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Weak};
use std::time::Duration;

use common::*;
use onlyonce_core::{MemoryStore, OperatorAction, Store, StoreAdmin, StoreErrorKind, Target, TestClock};
use onlyonce_engine::{Begin, EngineError, Failure, Idempotency, InvalidPolicy, Limits, Outcome};
use tokio::sync::oneshot;

fn op() -> onlyonce_core::Operation {
    operation("a", "x")
}

#[tokio::test]
async fn past_max_in_flight_it_is_overloaded_before_anything_is_claimed() {
    let store = FaultyStore::new();
    let idem = engine(&store).max_in_flight(2).build();
    let first = acquire(&idem, &operation("1", "x")).await;
    let second = acquire(&idem, &operation("2", "x")).await;
    assert_eq!(idem.in_flight(), 2);
    assert!(matches!(idem.begin(&operation("3", "x")).await, Err(EngineError::Overloaded)));
    assert_eq!((store.calls(Method::Claim), idem.counts().overloaded), (2, 1));
    // Duplicates of what runs need no place; nor do replays.
    assert!(is_in_progress(&idem.begin(&operation("1", "x")).await.unwrap()));
    first.complete(body("1")).await;
    let third = acquire(&idem, &operation("3", "x")).await;
    assert_eq!(replayed(&idem.begin(&operation("1", "x")).await.unwrap()), b"1");
    second.release().await;
    third.unknown().await;
    assert_eq!(idem.in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_gives_its_place_back() {
    let store = FaultyStore::new();
    let (idem, other) = (engine(&store).max_in_flight(1).build(), engine(&store).hold().build());
    acquire(&other, &operation("completed", "x")).await.complete(body("x")).await;
    acquire(&other, &operation("unknown", "x")).await.unknown().await;
    let _busy = acquire(&other, &operation("busy", "x")).await;
    for _ in 0..3 {
        assert!(matches!(idem.begin(&operation("completed", "x")).await, Ok(Begin::Completed(_))));
        assert!(matches!(idem.begin(&operation("completed", "y")).await, Ok(Begin::Mismatch { .. })));
        assert!(matches!(idem.begin(&operation("unknown", "x")).await, Ok(Begin::Unknown { .. })));
        assert!(matches!(idem.begin(&operation("busy", "x")).await, Ok(Begin::InProgress { .. })));
        store.fail(Method::Claim, 1, Fault::Refuse(StoreErrorKind::Unavailable));
        assert!(idem.begin(&op()).await.is_err());
        let work = async |_: &_| Err(Failure::transient("busy"));
        assert!(matches!(idem.run(&op(), work).await.unwrap(), Outcome::Released(_)));
        assert_eq!(idem.in_flight(), 0);
    }
    let work = async |_: &_| Err(Failure::definitive(body("declined")));
    assert_eq!(recorded(&idem.run(&op(), work).await.unwrap()), b"declined");
    let work = async |_: &_| Ok::<_, Failure>(body("never"));
    assert_eq!(
        recorded(&idem.run(&op(), work).await.unwrap()),
        b"declined",
        "a failure for good is replayed"
    );
    assert_eq!(idem.in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poller_holds_no_place_in_flight() {
    let store = FaultyStore::new();
    let (owner, idem) = (engine(&store).build(), engine(&store).max_in_flight(1).wait(PATIENCE).build());
    let busy = acquire(&owner, &op()).await;
    let poller = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&op()).await.unwrap() }
    });
    for claims in 4..8 {
        eventually("polling", || store.calls(Method::Claim) >= claims).await;
        eventually("no place held between two polls", || idem.in_flight() == 0).await;
    }
    assert!(!poller.is_finished());
    busy.complete(body("done")).await;
    assert_eq!(replayed(&poller.await.unwrap()), b"done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_max_waiters_duplicates_do_not_wait() {
    let store = FaultyStore::new();
    let limits = Limits { max_waiters: 2, ..Limits::default() };
    let idem = engine(&store).limits(limits).wait(PATIENCE * 2).build();
    let execution = acquire(&idem, &op()).await;
    let (answers, mut got) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..10 {
        let (idem, answers) = (idem.clone(), answers.clone());
        tokio::spawn(async move { answers.send(idem.begin(&op()).await.unwrap()) });
    }
    for _ in 0..8 {
        let answer = tokio::time::timeout(PATIENCE, got.recv()).await.expect("at once").unwrap();
        assert!(is_in_progress(&answer));
    }
    execution.complete(body("done")).await;
    for _ in 0..2 {
        assert_eq!(replayed(&got.recv().await.unwrap()), b"done");
    }
    // Places are given back.
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_max_waiters_nobody_waits_for_a_claim_either() {
    let store = FaultyStore::new();
    let limits = Limits { max_waiters: 2, store_timeout: PATIENCE * 4, ..Limits::default() };
    let idem = engine(&store).limits(limits).wait(PATIENCE * 2).build();
    store.fail(Method::Claim, 1, Fault::Hang);
    let leader = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&op()).await.map(drop) }
    });
    eventually("claiming", || store.calls(Method::Claim) == 1).await;
    let (answers, mut got) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..10 {
        let (idem, answers) = (idem.clone(), answers.clone());
        tokio::spawn(async move { answers.send(idem.begin(&op()).await.unwrap()) });
    }
    for _ in 0..8 {
        let answer = tokio::time::timeout(PATIENCE, got.recv()).await.expect("at once").unwrap();
        assert!(is_in_progress(&answer));
    }
    let other_body = idem.begin(&operation("a", "another body")).await;
    assert!(matches!(other_body, Err(EngineError::Overloaded)), "nobody can tell yet: {other_body:?}");
    leader.abort();
    let first = got.recv().await.unwrap();
    let Begin::Acquired(execution) = first else { panic!("{first:?}") };
    execution.complete(body("done")).await;
    assert_eq!(replayed(&got.recv().await.unwrap()), b"done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_what_runs_and_begins_nothing() {
    let idem = engine(&FaultyStore::new()).build();
    let (go, gone) = oneshot::channel::<()>();
    let running = tokio::spawn({
        let idem = idem.clone();
        async move {
            let work = |_| async move {
                gone.await.unwrap();
                Ok(body("done"))
            };
            idem.run_detached(op(), work).await.unwrap()
        }
    });
    eventually("running", || idem.counts().acquired == 1).await;
    let stopping = tokio::spawn({
        let idem = idem.clone();
        async move { idem.shutdown(PATIENCE).await }
    });
    begin_refused(&idem).await;
    assert_eq!(idem.in_flight(), 1, "what is left is told while it waits, too");
    assert!(!stopping.is_finished());
    go.send(()).unwrap();
    assert_eq!(recorded(&running.await.unwrap()), b"done");
    assert_eq!(stopping.await.unwrap(), 0);
    assert!(matches!(idem.begin(&op()).await, Err(EngineError::ShuttingDown)));
}

async fn begin_refused(idem: &Idempotency) {
    let asking = async {
        loop {
            match idem.begin(&operation("new", "x")).await {
                Err(EngineError::ShuttingDown) => return,
                Ok(Begin::Acquired(execution)) => execution.release().await,
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("refused");
}

#[tokio::test]
async fn shutdown_tells_what_is_left_and_leaves_its_lease() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().build();
    let execution = acquire(&idem, &op()).await;
    let _other = acquire(&idem, &operation("b", "x")).await;
    assert_eq!(idem.shutdown(ms(50)).await, 2);
    assert_eq!(store.calls(Method::Release), 0);
    execution.complete(body("done")).await;
    assert_eq!(idem.shutdown(ms(50)).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poller_does_not_begin_after_shutdown() {
    let store = FaultyStore::new();
    let (owner, idem) = (engine(&store).build(), engine(&store).wait(PATIENCE).build());
    let execution = acquire(&owner, &op()).await;
    let poller = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&op()).await }
    });
    eventually("polling", || store.calls(Method::Claim) >= 4).await;
    idem.shutdown(PATIENCE).await;
    execution.release().await;
    assert!(matches!(poller.await.unwrap(), Err(EngineError::ShuttingDown)));
    assert!(store.records().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_claims_that_are_to_be_released() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().store_timeout(ms(100)).build();
    store.break_down(Method::Claim, Fault::LoseAnswer);
    store.fail(Method::Release, 2, Fault::Refuse(StoreErrorKind::Unavailable));
    assert!(idem.begin(&op()).await.is_err());
    assert_eq!(idem.shutdown(PATIENCE).await, 0);
    assert!(store.records().is_empty(), "or it would be unknown for ever, though nothing ran");
}

#[tokio::test]
async fn replays_come_from_memory_within_their_time() {
    let clock = TestClock::new();
    let store = FaultyStore::onto(&MemoryStore::with_clock(Arc::new(clock.clone())));
    let build = || engine(&store).retention(secs(100)).clock(Arc::new(clock.clone())).build();
    let (here, elsewhere) = (build(), build());
    acquire(&here, &op()).await.complete(body("done")).await;
    assert_eq!(store.calls(Method::Claim), 1);
    let ask = async |idem: &Idempotency, claims: u64| {
        let answer = idem.begin(&op()).await.unwrap();
        assert_eq!(replayed(&answer), b"done");
        assert_eq!(store.calls(Method::Claim), claims);
        match answer {
            Begin::Completed(stored) => stored.remaining,
            _ => unreachable!("a replay"),
        }
    };
    assert_eq!(ask(&here, 1).await, secs(100));
    assert_eq!(ask(&elsewhere, 2).await, secs(100));
    clock.advance(secs(59));
    assert_eq!(ask(&here, 2).await, secs(41));
    clock.advance(secs(1));
    // The minute is over: the store is asked, once.
    assert_eq!(ask(&here, 3).await, secs(40));
    assert_eq!(ask(&here, 3).await, secs(40));
    assert_eq!((here.counts().replayed_from_memory, here.counts().replayed_from_store), (3, 1));
    // Past what the record had left it is not served, though within its minute: the key is fresh.
    clock.advance(secs(40));
    let execution = acquire(&here, &op()).await;
    assert_eq!(execution.attempt(), 1);
    execution.release().await;
}

#[tokio::test]
async fn what_an_operator_did_elsewhere_is_seen_within_a_minute() {
    let clock = TestClock::new();
    let store = FaultyStore::onto(&MemoryStore::with_clock(Arc::new(clock.clone())));
    let idem = engine(&store).clock(Arc::new(clock.clone())).build();
    acquire(&idem, &op()).await.complete(body("first")).await;
    let action = OperatorAction { actor: "test".into(), reason: "test".into(), target: Target::Any };
    store.records().resolve(op().id(), &body("corrected"), secs(3600), &action).await.unwrap();
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"first");
    clock.advance(secs(60));
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"corrected");
    // In its own process it is told.
    store.records().resolve(op().id(), &body("again"), secs(3600), &action).await.unwrap();
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"corrected");
    idem.forget_cached(&op());
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"again");
}

#[tokio::test]
async fn without_a_cache_every_replay_comes_from_the_store() {
    let store = FaultyStore::new();
    let idem = engine(&store).cache_bytes(0).build();
    acquire(&idem, &op()).await.complete(body("done")).await;
    for claims in 2..5 {
        assert!(idem.replay_from_memory(&op()).is_none());
        assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
        assert_eq!(store.calls(Method::Claim), claims);
    }
    assert_eq!(idem.counts().replayed_from_store, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_purge_removes_expired_records_and_ends_with_the_last_handle() {
    let clock = TestClock::new();
    let records = MemoryStore::with_clock(Arc::new(clock.clone()));
    let store = FaultyStore::onto(&records);
    let limits = Limits { purge_interval: ms(40), ..Limits::default() };
    let idem = engine(&store).limits(limits).clock(Arc::new(clock.clone())).retention(secs(100)).build();
    for key in 0..1200 {
        acquire(&idem, &operation(&key.to_string(), "x")).await.complete(body("x")).await;
    }
    let _held = acquire(&idem, &operation("held", "x")).await;
    assert_eq!(records.len(), 1201);
    clock.advance(secs(101));
    eventually("purged", || records.len() == 1).await;
    eventually("counted", || idem.counts().purged == 1200).await;
    assert_eq!(
        idem.counts().iter().find(|(name, ..)| *name == "purged").map(|(.., count)| count),
        Some(1200)
    );
    eventually("through", || idem.purge_lag() < secs(100)).await;
    // A failing purge is tried again.
    store.fail(Method::Purge, 3, Fault::Refuse(StoreErrorKind::Unavailable));
    let calls = store.calls(Method::Purge);
    eventually("tried again", || store.calls(Method::Purge) > calls + 4).await;
    store.fail(Method::Purge, usize::MAX, Fault::Refuse(StoreErrorKind::Unavailable));
    // One that was under way when the failures began may still get through.
    let calls = store.calls(Method::Purge);
    eventually("it fails", || store.calls(Method::Purge) > calls + 1).await;
    clock.advance(secs(500));
    let calls = store.calls(Method::Purge);
    eventually("it fails on", || store.calls(Method::Purge) > calls + 1).await;
    assert!(idem.purge_lag() >= secs(500), "{:?}", idem.purge_lag());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_outlives_the_last_handle() {
    let store: Arc<dyn Store> = Arc::new(FaultyStore::new());
    let watched: Weak<dyn Store> = Arc::downgrade(&store);
    let limits = Limits { purge_interval: ms(30), ..Limits::default() };
    let idem = Idempotency::builder_for(store).limits(limits).lease(ms(500)).wait(secs(1)).build();
    // Every way to end, so that a cycle in any of them shows.
    acquire(&idem, &operation("completed", "x")).await.complete(body("x")).await;
    acquire(&idem, &operation("released", "x")).await.release().await;
    acquire(&idem, &operation("unknown", "x")).await.unknown().await;
    drop(acquire(&idem, &operation("dropped", "x")).await);
    idem.begin(&operation("completed", "x")).await.unwrap();
    all_given_back(&idem).await;
    let clone = idem.with_policy(idem.policy().clone()).unwrap();
    drop(idem);
    assert!(watched.upgrade().is_some());
    drop(clone);
    eventually("the store is dropped", || watched.strong_count() == 0).await;
}

#[tokio::test]
async fn policies_are_checked_wherever_they_come_in() {
    let idem = engine(&FaultyStore::new()).build();
    let mut policy = idem.policy().clone();
    policy.retention = policy.lease;
    assert!(matches!(idem.with_policy(policy), Err(InvalidPolicy::RetentionTooShort { .. })));
    let refused = engine(&FaultyStore::new()).lease(Duration::from_millis(1)).try_build();
    assert!(matches!(refused, Err(InvalidPolicy::LeaseTooShort { .. })));
    let extreme = Limits {
        max_in_flight: usize::MAX,
        max_waiters: usize::MAX,
        cache_ttl: Duration::MAX,
        store_timeout: Duration::MAX,
        purge_interval: Duration::MAX,
        hold_retention: Duration::MAX,
        ..Limits::default()
    };
    let idem = engine(&FaultyStore::new()).limits(extreme).build();
    acquire(&idem, &op()).await.complete(body("done")).await;
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
    assert_eq!(idem.shutdown(Duration::MAX).await, 0);
    let none = Limits { max_in_flight: 0, max_waiters: 0, cache_ttl: Duration::ZERO, ..Limits::default() };
    let idem = engine(&FaultyStore::new()).limits(none).wait(secs(10)).build();
    let execution = acquire(&idem, &op()).await;
    assert!(is_in_progress(&idem.begin(&op()).await.unwrap()));
    execution.complete(body("done")).await;
    assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
}
