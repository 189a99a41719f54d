//! Copies of one request, at once and after one another, in one process and in two.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use onlyonce_engine::{Begin, Failure, Idempotency, Outcome};
use tokio::sync::{Barrier, oneshot};

async fn ten_thousand_copies(idem: Idempotency, store: FaultyStore) {
    let runs = Arc::new(AtomicUsize::new(0));
    let copies: Vec<_> = (0..10_000)
        .map(|copy| {
            let (idem, runs) = (idem.clone(), runs.clone());
            tokio::spawn(async move {
                let work = async |_: &_| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(ms(300)).await;
                    Ok::<_, Failure>(body(format!("charged by copy {copy}")))
                };
                let outcome = idem.run(&operation("one", "100 EUR"), work).await.unwrap();
                recorded(&outcome).to_vec()
            })
        })
        .collect();
    let mut bodies = Vec::new();
    for copy in copies {
        bodies.push(copy.await.unwrap());
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert!(bodies.iter().all(|body| *body == bodies[0]), "every copy has one body");
    assert!((1..=10).contains(&store.calls(Method::Claim)), "{} claims", store.calls(Method::Claim));
    all_given_back(&idem).await;
    let counts = idem.counts();
    let replays = counts.replayed_from_memory + counts.replayed_from_store;
    assert_eq!((counts.acquired, counts.completed, replays), (1, 1, 9999));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_copies_run_once_and_cost_a_handful_of_claims() {
    let store = FaultyStore::new();
    ten_thousand_copies(engine(&store).wait(PATIENCE).build(), store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_copies_run_once_while_the_claim_is_slow() {
    let store = FaultyStore::new();
    store.break_down(Method::Claim, Fault::Late(ms(100)));
    ten_thousand_copies(engine(&store).wait(PATIENCE).build(), store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_copies_in_each_of_two_hundred_rounds_run_once_each() {
    let store = FaultyStore::new();
    // Half of the copies in one process, half in another.
    let engines = [engine(&store).wait(PATIENCE).build(), engine(&store).wait(PATIENCE).build()];
    let (mut rounds, mut answers) = (0, 0);
    for round in 0..200 {
        let (runs, start) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(50)));
        let copies: Vec<_> = (0..50)
            .map(|copy| {
                let (idem, runs, start) = (engines[copy % 2].clone(), runs.clone(), start.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    let work = move |_| async move {
                        runs.fetch_add(1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                        Ok(body(format!("copy {copy}")))
                    };
                    let outcome = idem.run_detached(operation(&format!("round {round}"), "x"), work).await;
                    recorded(&outcome.unwrap()).to_vec()
                })
            })
            .collect();
        let mut bodies = Vec::new();
        for copy in copies {
            bodies.push(copy.await.unwrap());
        }
        assert_eq!(runs.load(Ordering::SeqCst), 1, "round {round}");
        assert!(bodies.iter().all(|body| *body == bodies[0]), "round {round}");
        (rounds, answers) = (rounds + 1, answers + bodies.len());
    }
    println!("{rounds} rounds, {answers} answers, {} claims", store.calls(Method::Claim));
    assert_eq!((rounds, answers), (200, 10_000));
}

#[tokio::test]
async fn without_a_wait_a_duplicate_is_in_progress_at_once() {
    let store = FaultyStore::new();
    let (here, elsewhere) = (engine(&store).build(), engine(&store).build());
    let execution = acquire(&here, &operation("a", "x")).await;
    for idem in [&here, &elsewhere] {
        match idem.begin(&operation("a", "x")).await.unwrap() {
            Begin::InProgress { retry_after, last: None, .. } => {
                assert!(retry_after >= secs(1) && retry_after <= secs(5), "{retry_after:?}");
                assert_eq!(retry_after.subsec_nanos(), 0, "whole seconds");
            }
            other => panic!("{other:?}"),
        }
    }
    execution.complete(body("done")).await;
    for idem in [&here, &elsewhere] {
        assert_eq!(replayed(&idem.begin(&operation("a", "x")).await.unwrap()), b"done");
    }
    assert_eq!((here.counts().in_progress, elsewhere.counts().in_progress), (1, 1));
}

#[tokio::test]
async fn waiters_here_are_woken_and_waiters_elsewhere_poll() {
    let store = FaultyStore::new();
    let (here, elsewhere) = (engine(&store).wait(PATIENCE).build(), engine(&store).wait(PATIENCE).build());
    let execution = acquire(&here, &operation("a", "x")).await;
    let waiters: Vec<_> = [here.clone(), here.clone(), elsewhere.clone(), elsewhere.clone()]
        .map(|idem| tokio::spawn(async move { idem.begin(&operation("a", "x")).await.unwrap() }))
        .into_iter()
        .collect();
    eventually("the other process polls", || store.calls(Method::Claim) >= 5).await;
    execution.complete(body("done")).await;
    for waiter in waiters {
        assert_eq!(replayed(&waiter.await.unwrap()), b"done");
    }
    assert_eq!(here.counts().claims, 1, "waiters in one process ask no store");
}

#[tokio::test]
async fn a_wait_that_is_over_is_in_progress() {
    let store = FaultyStore::new();
    let (here, elsewhere) = (engine(&store).wait(ms(300)).build(), engine(&store).wait(ms(300)).build());
    let _execution = acquire(&here, &operation("a", "x")).await;
    for idem in [&here, &elsewhere] {
        let begun = tokio::time::Instant::now();
        assert!(is_in_progress(&idem.begin(&operation("a", "x")).await.unwrap()));
        assert!(begun.elapsed() >= ms(300), "it waited its time");
    }
}

#[tokio::test]
async fn a_duplicate_that_does_not_wait_is_not_held_up_by_one_that_polls() {
    let store = FaultyStore::new();
    let (owner, idem) = (engine(&store).build(), engine(&store).wait(PATIENCE * 2).build());
    let mut hasty = idem.policy().clone();
    hasty.wait = Duration::ZERO;
    let hasty = idem.with_policy(hasty).unwrap();
    let execution = acquire(&owner, &operation("a", "x")).await;
    let poller = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&operation("a", "x")).await.unwrap() }
    });
    eventually("polling", || store.calls(Method::Claim) >= 4).await;
    let answer = tokio::time::timeout(PATIENCE, hasty.begin(&operation("a", "x"))).await;
    assert!(is_in_progress(&answer.expect("at once").unwrap()));
    let answer = tokio::time::timeout(PATIENCE, hasty.begin(&operation("a", "another body"))).await;
    assert!(matches!(answer.expect("at once").unwrap(), Begin::Mismatch { .. }));
    execution.complete(body("done")).await;
    assert_eq!(replayed(&poller.await.unwrap()), b"done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_whose_wait_ends_does_not_poll_one_by_one() {
    let store = FaultyStore::new();
    let (owner, idem) = (engine(&store).build(), engine(&store).wait(ms(400)).build());
    let _execution = acquire(&owner, &operation("a", "x")).await;
    let crowd: Vec<_> = (0..2000)
        .map(|_| {
            let idem = idem.clone();
            tokio::spawn(async move { idem.begin(&operation("a", "x")).await.unwrap() })
        })
        .collect();
    for one in crowd {
        assert!(is_in_progress(&one.await.unwrap()));
    }
    assert!(store.calls(Method::Claim) < 1000, "{} claims", store.calls(Method::Claim));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn after_a_transient_end_one_waiter_runs_and_the_others_get_its_reply() {
    let store = FaultyStore::new();
    let idem = engine(&store).wait(PATIENCE).build();
    let mut execution = acquire(&idem, &operation("a", "x")).await;
    for round in 1..=2 {
        let (answers, mut got) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..20 {
            let (idem, answers) = (idem.clone(), answers.clone());
            tokio::spawn(async move { answers.send(idem.begin(&operation("a", "x")).await.unwrap()) });
        }
        // They cannot be seen from here: what shows that they wait is that nobody answers.
        tokio::time::sleep(ms(200)).await;
        assert!(got.try_recv().is_err());
        execution.release_answering(Some(body(format!("busy {round}")))).await;
        let (mut acquired, mut answered) = (Vec::new(), 0);
        for _ in 0..20 {
            match got.recv().await.unwrap() {
                Begin::Acquired(execution) => acquired.push(execution),
                Begin::InProgress { retry_after, last, .. } => {
                    assert_eq!(last.unwrap().body(), format!("busy {round}").as_bytes());
                    assert!(retry_after >= secs(1) && retry_after.subsec_nanos() == 0);
                    answered += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((acquired.len(), answered), (1, 19), "round {round}");
        execution = acquired.pop().unwrap();
        assert_eq!(execution.attempt(), 1, "nothing happened before");
    }
    execution.complete(body("at last")).await;
    assert_eq!(replayed(&idem.begin(&operation("a", "x")).await.unwrap()), b"at last");
    assert_eq!(store.calls(Method::Claim), 3);
    all_given_back(&idem).await;
}

#[tokio::test]
async fn a_successor_that_goes_away_leaves_the_key_free() {
    let store = FaultyStore::new();
    let idem = engine(&store).wait(PATIENCE).build();
    let execution = acquire(&idem, &operation("a", "x")).await;
    let waiter = tokio::spawn({
        let idem = idem.clone();
        async move { idem.begin(&operation("a", "x")).await }
    });
    tokio::time::sleep(ms(50)).await;
    store.fail(Method::Claim, 1, Fault::Late(ms(500)));
    execution.release().await;
    eventually("the successor claims", || store.calls(Method::Claim) == 2).await;
    waiter.abort();
    let execution = acquire(&idem, &operation("a", "x")).await;
    execution.complete(body("x")).await;
    all_given_back(&idem).await;
}

#[tokio::test]
async fn another_body_is_a_mismatch_at_every_stage() {
    let store = FaultyStore::new();
    let (here, elsewhere) = (engine(&store).wait(PATIENCE).build(), engine(&store).wait(PATIENCE).build());
    let (right, wrong) = (operation("a", "x"), operation("a", "y"));
    let is_mismatch =
        |begin: Begin| matches!(begin, Begin::Mismatch { stored, .. } if stored == *right.fingerprint());
    // While the claim is under way.
    store.fail(Method::Claim, 1, Fault::LateAnswer(ms(300)));
    let claiming = tokio::spawn({
        let (here, right) = (here.clone(), right.clone());
        async move { acquire(&here, &right).await }
    });
    eventually("claiming", || store.calls(Method::Claim) == 1).await;
    assert!(is_mismatch(here.begin(&wrong).await.unwrap()));
    // While it works: before the wait.
    let execution = claiming.await.unwrap();
    assert!(is_mismatch(here.begin(&wrong).await.unwrap()));
    assert!(is_mismatch(elsewhere.begin(&wrong).await.unwrap()));
    // From the cache, and from the store; the stored reply stays.
    execution.complete(body("done")).await;
    for idem in [&here, &elsewhere] {
        assert!(is_mismatch(idem.begin(&wrong).await.unwrap()));
        assert_eq!(replayed(&idem.begin(&right).await.unwrap()), b"done");
        assert!(is_mismatch(idem.begin(&wrong).await.unwrap()));
    }
    assert_eq!(here.counts().mismatches + elsewhere.counts().mismatches, 6 + 1);
}

#[tokio::test]
async fn whose_fingerprint_is_stored_is_no_mismatch_behind_one_whose_is_not() {
    let store = FaultyStore::new();
    let (owner, idem) = (engine(&store).build(), engine(&store).wait(PATIENCE).build());
    let (right, wrong) = (operation("a", "x"), operation("a", "y"));
    acquire(&owner, &right).await.complete(body("done")).await;
    // The wrong one leads; the right one follows it.
    store.fail(Method::Claim, 1, Fault::LateAnswer(ms(300)));
    let leading = tokio::spawn({
        let (idem, wrong) = (idem.clone(), wrong.clone());
        async move { idem.begin(&wrong).await.unwrap() }
    });
    eventually("leading", || store.calls(Method::Claim) == 2).await;
    assert_eq!(replayed(&idem.begin(&right).await.unwrap()), b"done");
    assert!(matches!(leading.await.unwrap(), Begin::Mismatch { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fingerprints_that_race_for_a_fresh_key_one_runs_and_the_others_mismatch() {
    let store = FaultyStore::new();
    let engines = [engine(&store).wait(PATIENCE).build(), engine(&store).wait(PATIENCE).build()];
    for round in 0..50 {
        let start = Arc::new(Barrier::new(24));
        let racers: Vec<_> = (0..24)
            .map(|racer| {
                let (idem, start) = (engines[racer % 2].clone(), start.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    let print = racer % 3;
                    let operation = operation(&format!("round {round}"), &print.to_string());
                    let work = async |_: &_| {
                        tokio::task::yield_now().await;
                        Ok(body(print.to_string()))
                    };
                    (print, idem.run(&operation, work).await.unwrap())
                })
            })
            .collect();
        let mut outcomes = Vec::new();
        for racer in racers {
            outcomes.push(tokio::time::timeout(PATIENCE, racer).await.expect("no deadlock").unwrap());
        }
        let winners: Vec<_> = outcomes.iter().filter(|(_, o)| matches!(o, Outcome::Ran(_))).collect();
        assert_eq!(winners.len(), 1, "round {round}");
        let winner = winners[0].0;
        for (print, outcome) in &outcomes {
            match outcome {
                Outcome::Ran(reply) => assert_eq!(reply.body(), winner.to_string().as_bytes()),
                Outcome::Replayed(stored) => {
                    assert_eq!(stored.reply.body(), winner.to_string().as_bytes());
                    assert_eq!(*print, winner);
                }
                Outcome::Mismatch { .. } => assert_ne!(*print, winner, "round {round}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn another_body_waits_for_a_claim_that_is_released_and_then_runs() {
    let store = FaultyStore::new();
    let idem = engine(&store).wait(PATIENCE).build();
    let execution = acquire(&idem, &operation("a", "x")).await;
    execution.release().await;
    acquire(&idem, &operation("a", "y")).await.complete(body("y")).await;
    assert!(matches!(idem.begin(&operation("a", "x")).await.unwrap(), Begin::Mismatch { .. }));
}

#[tokio::test]
async fn handles_with_other_policies_share_the_table_in_flight() {
    let store = FaultyStore::new();
    let idem = engine(&store).build();
    let mut policy = idem.policy().clone();
    policy.wait = PATIENCE;
    let patient = idem.with_policy(policy).unwrap();
    let (go, gone) = oneshot::channel::<()>();
    let running = tokio::spawn({
        let idem = idem.clone();
        async move {
            let work = move |_| async move {
                gone.await.unwrap();
                Ok(body("done"))
            };
            idem.run_detached(operation("a", "x"), work).await.unwrap()
        }
    });
    eventually("running", || idem.in_flight() == 1).await;
    eventually("claimed", || idem.counts().acquired == 1).await;
    let waiting = tokio::spawn(async move { patient.begin(&operation("a", "x")).await.unwrap() });
    tokio::time::sleep(ms(50)).await;
    go.send(()).unwrap();
    assert!(matches!(running.await.unwrap(), Outcome::Ran(_)));
    assert_eq!(replayed(&waiting.await.unwrap()), b"done");
    assert_eq!(store.calls(Method::Claim), 1);
}
