//! A server that is killed, a reply that is lost, a network that goes: nothing acknowledged is lost, nothing runs twice.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use futures_util::future::join_all;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Store, StoreError, StoreErrorKind,
};
use onlyonce_store_postgres::PostgresStore;
use testkit::{FaultProxy, Postgres, wait_for};

/// Asks until the answer is not an error, as the engine does.
async fn persist<T>(mut ask: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    wait_for("the store answers", async || match ask().await {
        Ok(answer) => Some(answer),
        Err(error) => {
            assert!(error.retryable() || error.may_have_applied(), "{}", chain(&error));
            None
        }
    })
    .await
}

async fn proxied(place: &Place, rest: &str) -> (FaultProxy, PostgresStore) {
    let network = FaultProxy::start(place.server.addr()).await;
    let url = format!("postgres://postgres@{}/{}?{rest}", network.addr(), place.database);
    let store = PostgresStore::open(&url).await.unwrap();
    (network, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_of_a_commit_is_ambiguous_and_asked_again_it_is_one() {
    let place = place().await;
    for rest in ["", "prepare=off"] {
        let (network, store) = proxied(&place, rest).await;
        for round in 0..5 {
            let key = format!("lost {rest} {round}");
            let request = take_over();
            network.lose_reply_to(key.clone());
            let error = store.claim(&op(&key), &request).await.unwrap_err();
            assert!(error.may_have_applied(), "{}", chain(&error));
            // The reply that is lost may be the first of several: the COMMIT behind it is still under way.
            let status = format!("select status from idempotency_keys where key = '{key}'");
            wait_for("the claim was made", async || {
                (place.psql(&status).await == "in_progress").then_some(())
            })
            .await;
            let lease = acquired(persist(async || store.claim(&op(&key), &request).await).await);
            assert_eq!((lease.token, lease.attempt), (request.token, 1));

            let reply = format!("reply of {round} {rest}");
            network.lose_reply_to(reply.clone());
            let completion = done(request.token, reply.clone());
            let error = store.complete(&op(&key), &completion).await.unwrap_err();
            assert!(error.may_have_applied(), "{}", chain(&error));
            let again = persist(async || store.complete(&op(&key), &completion).await).await;
            match again {
                CompleteOutcome::AlreadyStored(_) => {}
                CompleteOutcome::Stored(_) if !rest.is_empty() => {}
                other => panic!("{other:?}"),
            }
            assert_eq!(
                completed(store.claim(&op(&key), &take_over()).await.unwrap()).body(),
                reply.as_bytes()
            );
        }
        assert_eq!(network.lost_replies(), 10);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_network_is_a_time_out_and_the_store_comes_back() {
    let place = place().await;
    let network = FaultProxy::start(place.server.addr()).await;
    let url = format!("postgres://postgres@{}/{}", network.addr(), place.database);
    let options = PostgresStore::options(&url).unwrap().patience(Duration::from_millis(500));
    let store = options.open().await.unwrap();
    pair(&store, "before").await.unwrap();
    network.silence(true);
    let request = take_over();
    let error = store.claim(&op("k"), &request).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{}", chain(&error));
    assert!(error.may_have_applied());
    network.cut();
    network.silence(false);
    acquired(persist(async || store.claim(&op("k"), &request).await).await);
}

/// Each step of an operation, with the server killed around it.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_at_any_step_loses_nothing_that_was_answered() {
    let server = Postgres::private().await;
    let store = PostgresStore::open(&server.url("postgres")).await.unwrap();
    let crash = async || {
        server.kill_9().await;
        server.start().await;
    };
    for round in 0..2 {
        let op = |step: &str| op(&format!("{step} {round}"));
        let request = take_over();
        // Before the claim: it is made on the server that came back.
        crash().await;
        acquired(persist(async || store.claim(&op("claim"), &request).await).await);
        // After the claim, in the work.
        crash().await;
        let other = persist(async || store.claim(&op("claim"), &take_over()).await).await;
        assert!(matches!(other, ClaimOutcome::InProgress { .. }), "{other:?}");
        assert_eq!(
            persist(async || store.renew(&op("claim"), request.token, LEASE).await).await,
            RenewOutcome::Renewed
        );
        // Before the completion, and after it.
        crash().await;
        let completion = done(request.token, "done");
        let stored = persist(async || store.complete(&op("claim"), &completion).await).await;
        assert!(
            matches!(stored, CompleteOutcome::Stored(_) | CompleteOutcome::AlreadyStored(_)),
            "{stored:?}"
        );
        crash().await;
        let replay = persist(async || store.claim(&op("claim"), &take_over()).await).await;
        assert_eq!(completed(replay).body(), "done");
        // A release and a mark are kept, too.
        for key in ["release", "mark"] {
            acquired(persist(async || store.claim(&op(key), &request).await).await);
        }
        let released = persist(async || store.release(&op("release"), request.token).await).await;
        assert_eq!(released, ReleaseOutcome::Applied);
        persist(async || store.mark_unknown(&op("mark"), request.token).await).await;
        crash().await;
        acquired(persist(async || store.claim(&op("release"), &take_over()).await).await);
        let marked = persist(async || store.claim(&op("mark"), &take_over()).await).await;
        assert!(matches!(marked, ClaimOutcome::Unknown { .. }), "{marked:?}");
    }
}

/// Many callers while the server is killed again and again.
#[tokio::test(flavor = "multi_thread")]
async fn under_load_a_killed_server_keeps_every_answer_and_runs_nothing_twice() {
    let server = Postgres::private().await;
    let stores = [
        PostgresStore::open(&server.url("postgres")).await.unwrap(),
        PostgresStore::open(&server.url("postgres")).await.unwrap(),
    ];
    let stop = AtomicBool::new(false);
    // Two callers of two stores on each key: one runs, the other finds its reply.
    let callers = (0..32).map(|caller| {
        let (store, stop) = (&stores[caller % 2], &stop);
        async move {
            let (mut ran, mut seen) = (Vec::new(), 0);
            for n in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let key = format!("{} {n}", caller / 2);
                let request = take_over();
                let outcome = persist(async || store.claim(&op(&key), &request).await).await;
                if let ClaimOutcome::Acquired(lease) = outcome {
                    assert_eq!(lease.attempt, 1, "nothing is taken over");
                    let completion = done(request.token, format!("{caller} {key}"));
                    let stored = persist(async || store.complete(&op(&key), &completion).await).await;
                    assert!(!matches!(stored, CompleteOutcome::Fenced(_)), "{stored:?}");
                    ran.push(key);
                } else {
                    seen += 1;
                }
            }
            (caller, ran, seen)
        }
    });
    let killer = async {
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(400)).await;
            server.kill_9().await;
            server.start().await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        stop.store(true, Ordering::Relaxed);
    };
    let (callers, ()) = tokio::join!(join_all(callers), killer);
    let (mut runs, mut copies) = (HashMap::new(), 0);
    for (caller, ran, seen) in callers {
        copies += seen;
        for key in ran {
            assert_eq!(runs.insert(key.clone(), caller), None, "{key} ran twice");
        }
    }
    println!("killed 4 times: {} operations ran, {copies} copies were refused", runs.len());
    assert!(runs.len() > 50, "{} ran", runs.len());
    for (key, caller) in &runs {
        let replay = persist(async || stores[0].claim(&op(key), &take_over()).await).await;
        assert_eq!(completed(replay).body(), format!("{caller} {key}").as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_is_refused_and_a_primary_that_becomes_read_only_is_retried() {
    let server = Postgres::private().await;
    let store = PostgresStore::open(&server.url("postgres")).await.unwrap();
    pair(&store, "before").await.unwrap();
    server.stop().await;
    std::fs::write(server.data().join("standby.signal"), "").unwrap();
    server.start().await;
    let error = PostgresStore::open(&server.url("postgres")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{}", chain(&error));
    assert!(error.to_string().contains("standby"), "{error}");
    let error = wait_for("it says that it is read-only", async || {
        let error = store.claim(&op("k"), &take_over()).await.unwrap_err();
        assert!(error.retryable(), "{}", chain(&error));
        error.to_string().contains("read-only").then_some(error)
    })
    .await;
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    server.psql("postgres", "select pg_promote()").await;
    persist(async || pair(&store, "afterwards").await).await;
}
