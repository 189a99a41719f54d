//! A store that refuses, forgets to answer, or hangs.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use onlyonce_core::{MemoryStore, StoreErrorKind};
use onlyonce_engine::{Begin, Completed, EngineError, Failure, Idempotency, Outcome};

fn op() -> onlyonce_core::Operation {
    operation("a", "x")
}

fn store_error(answer: Result<Begin, EngineError>) -> StoreErrorKind {
    match answer {
        Err(EngineError::Store(error)) => error.kind(),
        other => panic!("no store error: {other:?}"),
    }
}

/// A process whose store works, on the same records.
fn other_process(store: &FaultyStore) -> Idempotency {
    engine(&FaultyStore::onto(store.records())).build()
}

#[tokio::test]
async fn a_refused_claim_is_an_error_and_nothing_is_held() {
    let store = FaultyStore::new();
    let idem = engine(&store).build();
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Full, StoreErrorKind::Unreadable] {
        store.fail(Method::Claim, 1, Fault::Refuse(kind));
        assert_eq!(store_error(idem.begin(&op()).await), kind);
    }
    assert_eq!((store.calls(Method::Claim), store.calls(Method::Release)), (3, 0));
    assert!(store.records().is_empty());
    assert_eq!(idem.in_flight(), 0);
    acquire(&idem, &op()).await.complete(body("done")).await;
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_is_asked_again_with_the_same_token() {
    for fault in [Fault::LoseAnswer, Fault::LoseRequest, Fault::HangAfter, Fault::Hang] {
        let store = FaultyStore::new();
        let idem = engine(&store).store_timeout(secs(4)).build();
        store.fail(Method::Claim, 1, fault);
        let work = async |_: &_| Ok::<_, Failure>(body("done"));
        assert!(matches!(idem.run(&op(), work).await.unwrap(), Outcome::Ran(_)));
        let tokens = store.claim_tokens();
        assert_eq!(tokens.len(), 2, "{fault:?}");
        assert_eq!(tokens[0], tokens[1], "{fault:?}");
        assert_eq!(store.calls(Method::Release), 0, "{fault:?}");
    }
}

#[tokio::test]
async fn every_begin_has_a_token_of_its_own() {
    let store = FaultyStore::new();
    let idem = engine(&store).build();
    for _ in 0..20 {
        acquire(&idem, &op()).await.release().await;
    }
    let mut tokens: Vec<_> = store.claim_tokens().iter().map(|token| *token.as_bytes()).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_stays_lost_is_an_error_and_released_in_the_background() {
    for fault in [Fault::LoseAnswer, Fault::HangAfter] {
        let store = FaultyStore::new();
        let idem = engine(&store).hold().store_timeout(ms(400)).build();
        store.break_down(Method::Claim, fault);
        store.fail(Method::Release, 3, Fault::Refuse(StoreErrorKind::Unavailable));
        store_error(idem.begin(&op()).await);
        assert!(store.calls(Method::Claim) >= 2);
        assert!(store.calls(Method::Claim) < 100, "it pauses between tries");
        // Well before its lease of 30 s, and as a first attempt: nothing ever ran.
        eventually("released", || store.records().is_empty()).await;
        let execution = acquire(&other_process(&store), &op()).await;
        assert_eq!(execution.attempt(), 1);
        execution.complete(body("done")).await;
        all_given_back(&idem).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_goes_on_past_the_lease() {
    let store = FaultyStore::new();
    let idem = brief(&store, ms(300)).hold().store_timeout(ms(100)).build();
    store.break_all(Fault::Refuse(StoreErrorKind::Unavailable));
    store.break_down(Method::Claim, Fault::LoseAnswer);
    store_error(idem.begin(&op()).await);
    begin_until(&other_process(&store), &op(), |begin| matches!(begin, Begin::Unknown { .. })).await;
    store.heal();
    eventually("released", || store.records().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_is_not_forgotten_for_a_refusal_after_it() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().store_timeout(ms(600)).build();
    store.fail(Method::Claim, 1, Fault::HangAfter);
    let asking = tokio::spawn({
        let idem = idem.clone();
        async move { store_error(idem.begin(&op()).await) }
    });
    eventually("claimed", || store.records().len() == 1).await;
    store.break_down(Method::Claim, Fault::Refuse(StoreErrorKind::Unavailable));
    assert_eq!(asking.await.unwrap(), StoreErrorKind::Unavailable);
    eventually("released", || store.records().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_arrives_after_all_is_released() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().store_timeout(ms(200)).build();
    // Lost on the way; the first releases find nothing.
    store.break_down(Method::Claim, Fault::LoseRequest);
    store_error(idem.begin(&op()).await);
    eventually("releases", || store.calls(Method::Release) >= 2).await;
    let token = store.claim_tokens()[0];
    let late = onlyonce_core::ClaimRequest {
        token,
        lease: secs(30),
        retention: secs(60),
        on_lease_end: onlyonce_core::OnLeaseEnd::Hold,
        takeover_now: true,
        max_attempts: 5,
    };
    onlyonce_core::Store::claim(store.records(), &op(), &late).await.unwrap();
    assert_eq!(store.records().len(), 1);
    eventually("released", || store.records().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_in_the_middle_of_its_claim_leaves_nothing_held() {
    for fault in [Fault::HangAfter, Fault::LateAnswer(ms(500))] {
        let store = FaultyStore::new();
        let idem = engine(&store).hold().store_timeout(PATIENCE).build();
        store.break_down(Method::Claim, fault);
        let caller = tokio::spawn({
            let idem = idem.clone();
            async move { idem.begin(&op()).await.map(drop) }
        });
        eventually("claimed", || store.records().len() == 1).await;
        // Its followers ask for themselves.
        let follower = tokio::spawn({
            let idem = idem.clone();
            async move { idem.begin(&op()).await.unwrap() }
        });
        store.heal();
        caller.abort();
        let answer = follower.await.unwrap();
        assert!(is_in_progress(&answer) || matches!(answer, Begin::Acquired(_)), "{answer:?}");
        if let Begin::Acquired(execution) = answer {
            execution.release().await;
        }
        eventually("released", || store.records().is_empty()).await;
        all_given_back(&idem).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_that_hangs_is_an_error_for_the_leader_and_its_followers() {
    let store = FaultyStore::new();
    let idem = engine(&store).store_timeout(ms(400)).wait(secs(3600)).build();
    store.break_all(Fault::Hang);
    let asking: Vec<_> = (0..100)
        .map(|_| {
            let idem = idem.clone();
            tokio::spawn(async move { store_error(idem.begin(&op()).await) })
        })
        .collect();
    for one in asking {
        // Not the caller's own wait of an hour.
        let kind = tokio::time::timeout(PATIENCE, one).await.expect("bounded by the store timeout");
        assert_eq!(kind.unwrap(), StoreErrorKind::Timeout);
    }
    all_given_back(&idem).await;
    assert!(store.calls(Method::Claim) < 100, "the crowd shared the claims of a few");
}

/// Another process may have told the reply already: this one does not say from memory that it is in progress.
#[tokio::test]
async fn a_copy_that_comes_while_the_reply_is_recorded_is_answered_by_what_is_on_record() {
    for (fault, is_on_record) in [
        (Fault::LoseAnswer, true),
        (Fault::HangAfter, true),
        (Fault::LoseRequest, false),
        (Fault::Hang, false),
    ] {
        let store = FaultyStore::new();
        let idem = brief(&store, secs(20)).build();
        let execution = acquire(&idem, &op()).await;
        store.break_down(Method::Complete, fault);
        let completing = tokio::spawn(execution.complete(body("done")));
        eventually("it is sent", || store.calls(Method::Complete) > 0).await;
        let answer = idem.begin(&op()).await.unwrap();
        match is_on_record {
            true => assert_eq!(replayed(&answer), b"done", "{fault:?}"),
            false => assert!(is_in_progress(&answer), "{fault:?}: {answer:?}"),
        }
        let other = idem.begin(&operation("a", "another")).await;
        assert!(matches!(other, Ok(Begin::Mismatch { .. })), "{fault:?}: {other:?}");
        store.heal();
        assert!(matches!(completing.await.unwrap(), Completed::Recorded(_)), "{fault:?}");
        assert_eq!(replayed(&idem.begin(&op()).await.unwrap()), b"done");
        all_given_back(&idem).await;
    }
}

/// What was so before a copy asked may be over, and its reply told to others by another process.
#[tokio::test]
async fn a_copy_is_told_nothing_of_a_time_before_it_asked() {
    // The answer to a claim of before comes late; and a poll of one that waits gets none, after one that did.
    for (wait, ahead, fault) in [(ms(0), 1, Fault::LateAnswer(ms(400))), (ms(300), 2, Fault::HangAfter)] {
        let (here, elsewhere) = two_ways();
        let (idem, owner) = (engine(&here).wait(wait).build(), engine(&elsewhere).build());
        let execution = acquire(&owner, &op()).await;
        if ahead == 1 {
            here.fail(Method::Claim, 1, fault);
        }
        let first = tokio::spawn({
            let idem = idem.clone();
            async move { idem.begin(&op()).await }
        });
        eventually("the first claim is sent", || here.calls(Method::Claim) > 0).await;
        if ahead == 2 {
            here.fail(Method::Claim, 1, fault);
        }
        eventually("the claim without an answer is sent", || here.calls(Method::Claim) == ahead).await;
        execution.complete(body("done")).await;
        assert_eq!(replayed(&owner.begin(&op()).await.unwrap()), b"done");
        let copies = (0..50).map(|_| {
            let idem = idem.clone();
            tokio::spawn(async move { idem.begin(&op()).await })
        });
        for copy in copies.collect::<Vec<_>>() {
            assert_eq!(replayed(&copy.await.unwrap().unwrap()), b"done", "{fault:?}");
        }
        // One has asked for all of them.
        assert!(here.calls(Method::Claim) <= ahead + 2, "{} claims", here.calls(Method::Claim));
        // Whoever asked before may be told either.
        assert!(first.await.unwrap().is_ok());
        all_given_back(&idem).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_is_tried_until_the_store_is_back_and_the_lease_renewed() {
    for fault in
        [Fault::Refuse(StoreErrorKind::Unavailable), Fault::LoseRequest, Fault::Refuse(StoreErrorKind::Full)]
    {
        let store = FaultyStore::new();
        let idem = brief(&store, secs(2)).build();
        let execution = acquire(&idem, &op()).await;
        store.break_down(Method::Complete, fault);
        let completing = tokio::spawn(execution.complete(body("done")));
        // Longer than the lease would have been.
        eventually("renewed meanwhile", || idem.counts().renewals >= 4).await;
        assert!(store.calls(Method::Complete) > 3);
        assert!(is_in_progress(&other_process(&store).begin(&op()).await.unwrap()));
        store.heal();
        assert!(matches!(completing.await.unwrap(), Completed::Recorded(_)), "{fault:?}");
        assert_eq!(replayed(&other_process(&store).begin(&op()).await.unwrap()), b"done");
        all_given_back(&idem).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_fails_for_good_is_not_recorded_and_leaves_the_lease() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().build();
    store.break_down(Method::Complete, Fault::Refuse(StoreErrorKind::Internal));
    let work = async |_: &_| Ok::<_, Failure>(body("done"));
    match idem.run(&op(), work).await.unwrap() {
        Outcome::NotRecorded { reply, error: EngineError::Store(error) } => {
            assert_eq!((reply, error.kind()), (body("done"), StoreErrorKind::Internal));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        (store.calls(Method::Complete), idem.counts().not_recorded),
        (1, 1),
        "not tried on for its caller"
    );
    for idem in [&idem, &other_process(&store)] {
        assert!(is_in_progress(&idem.begin(&op()).await.unwrap()), "held until the lease ends");
    }
    assert_eq!(store.calls(Method::Release), 0);
    all_given_back(&idem).await;
}

/// The caller is told after a lease; what is known is not lost for that, and resolves the record when the store is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_stays_away_past_the_lease_gets_the_reply_when_it_is_back() {
    for fault in [Fault::Refuse(StoreErrorKind::Unavailable), Fault::Hang] {
        let store = FaultyStore::new();
        let idem = brief(&store, ms(600)).hold().store_timeout(ms(200)).build();
        let execution = acquire(&idem, &op()).await;
        store.break_all(fault);
        let ended = tokio::time::timeout(PATIENCE, execution.complete(body("done"))).await;
        assert!(matches!(ended.expect("bounded"), Completed::NotRecorded(_)), "{fault:?}");
        all_given_back(&idem).await;
        let other = other_process(&store);
        begin_until(&other, &op(), |begin| matches!(begin, Begin::Unknown { .. })).await;
        store.heal();
        let replay = begin_until(&other, &op(), |begin| matches!(begin, Begin::Completed(_))).await;
        assert_eq!(replayed(&replay), b"done", "{fault:?}");
        assert_eq!((idem.counts().not_recorded, idem.counts().recorded_late), (1, 1));
    }
}

/// A reply too long to wait in memory is kept without its body: its operation is still never run again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_reply_that_comes_late_is_recorded_without_its_body() {
    let store = FaultyStore::new();
    let idem = brief(&store, ms(600)).hold().build();
    let execution = acquire(&idem, &op()).await;
    store.break_all(Fault::Refuse(StoreErrorKind::Unavailable));
    let long = onlyonce_core::Reply::new(201, vec![7; 40_000]);
    assert!(matches!(execution.complete(long).await, Completed::NotRecorded(_)));
    store.heal();
    match begin_until(&other_process(&store), &op(), |begin| matches!(begin, Begin::Completed(_))).await {
        Begin::Completed(stored) => {
            assert_eq!((stored.reply.status(), stored.reply.is_omitted()), (201, true))
        }
        _ => unreachable!("waited for"),
    }
}

/// Whoever took over while the store was away for the owner fences its late reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_reply_does_not_replace_that_of_a_takeover() {
    let store = FaultyStore::new();
    let idem = brief(&store, ms(600)).build();
    let execution = acquire(&idem, &op()).await;
    store.break_all(Fault::Refuse(StoreErrorKind::Unavailable));
    assert!(matches!(execution.complete(body("late")).await, Completed::NotRecorded(_)));
    let other = other_process(&store);
    let Begin::Acquired(second) =
        begin_until(&other, &op(), |begin| matches!(begin, Begin::Acquired(_))).await
    else {
        unreachable!("waited for")
    };
    assert_eq!(second.attempt(), 2);
    let tries = store.calls(Method::Complete);
    store.heal();
    eventually("the late reply was sent", || store.calls(Method::Complete) > tries).await;
    assert!(matches!(second.complete(body("second")).await, Completed::Recorded(_)));
    assert_eq!(replayed(&other_process(&store).begin(&op()).await.unwrap()), b"second");
    assert_eq!(idem.counts().recorded_late, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_fails_goes_on_in_the_background() {
    let store = FaultyStore::new();
    let idem = engine(&store).hold().build();
    // It fails for good as far as the caller waits for it.
    let execution = acquire(&idem, &op()).await;
    store.fail(Method::Release, 2, Fault::Refuse(StoreErrorKind::Internal));
    execution.release().await;
    eventually("released", || store.records().is_empty()).await;
    // Its caller goes away.
    let execution = acquire(&idem, &op()).await;
    store.fail(Method::Release, 1, Fault::Hang);
    let releases = store.calls(Method::Release);
    let releasing = tokio::spawn(execution.release());
    eventually("releasing", || store.calls(Method::Release) > releases).await;
    releasing.abort();
    eventually("released", || store.records().is_empty()).await;
    all_given_back(&idem).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_end_that_cannot_be_marked_is_unknown_when_its_lease_ends() {
    let store = FaultyStore::new();
    let idem = brief(&store, ms(500)).hold().build();
    let execution = acquire(&idem, &op()).await;
    store.break_down(Method::MarkUnknown, Fault::Refuse(StoreErrorKind::Unavailable));
    tokio::time::timeout(PATIENCE, execution.unknown()).await.expect("bounded by the lease");
    all_given_back(&idem).await;
    begin_until(&other_process(&store), &op(), |begin| matches!(begin, Begin::Unknown { .. })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_does_not_stop_takeovers_of_others() {
    let records = MemoryStore::new();
    let store = FaultyStore::over_network(&records);
    let lease = ms(1000);
    let owner = brief(&FaultyStore::over_network(&records), lease).build();
    drop(acquire(&owner, &op()).await);
    drop(owner);
    let idem = brief(&store, lease).build();
    // A client that asks for a poisoned key, again and again.
    let asking = async {
        loop {
            store.fail(Method::Claim, 1, Fault::Refuse(StoreErrorKind::Unreadable));
            let _ = idem.begin(&operation("poisoned", "x")).await.map(drop);
            match idem.begin(&op()).await.unwrap() {
                Begin::Acquired(execution) => return execution,
                _ => tokio::time::sleep(ms(50)).await,
            }
        }
    };
    let execution = tokio::time::timeout(PATIENCE, asking).await.expect("a takeover");
    assert_eq!(execution.attempt(), 2);
    execution.release().await;
}
