//! Lost answers, cut and silent networks, and a server that is killed.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Store, StoreAdmin, StoreErrorKind,
};
use onlyonce_store_mysql::MysqlStore;
use parking_lot::Mutex;
use testkit::{FaultProxy, Mariadb, wait_for, within};

/// A store behind a network of its own.
async fn behind(server: &Mariadb, query: &str) -> (FaultProxy, String, MysqlStore) {
    let database = server.database().await;
    let network = FaultProxy::start(server.addr()).await;
    let url = format!("mysql://root@{}/{database}{query}", network.addr());
    let options = MysqlStore::options(&url).unwrap().statement_timeout(Duration::from_secs(20));
    let store = options.open().await.unwrap();
    (network, database, store)
}

fn hex(name: &str) -> Vec<u8> {
    name.bytes().map(|byte| format!("{byte:02x}")).collect::<String>().into_bytes()
}

/// Whatever the answer was to, the change was made and the answer never came: asked again, all is as if it had.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_ambiguous_and_asked_again() {
    for query in ["", "?prepare=off"] {
        let server = Mariadb::shared().await;
        let (network, database, store) = behind(&server, query).await;
        // The names as they go over the wire: bytes, or hexadecimal digits.
        let wire = |name: &str| match query {
            "" => name.as_bytes().to_vec(),
            _ => hex(name),
        };
        let (operation, mine) = (op("needle"), take_over());

        network.lose_reply_to(wire("needle"));
        let lost = store.claim(&operation, &mine).await.unwrap_err();
        assert_eq!((lost.kind(), lost.may_have_applied()), (StoreErrorKind::Unavailable, true), "{lost}");
        assert_eq!(server.sql(&database, "select count(*) from idempotency_keys").await, "1", "it was made");
        let others = store.claim(&operation, &take_over()).await.unwrap();
        assert!(matches!(others, ClaimOutcome::InProgress { .. }));
        assert_eq!(acquired(store.claim(&operation, &mine).await.unwrap()).attempt, 1);

        network.lose_reply_to(wire("needle"));
        assert!(store.renew(&operation, mine.token, LEASE).await.unwrap_err().may_have_applied());
        assert_eq!(store.renew(&operation, mine.token, LEASE).await.unwrap(), RenewOutcome::Renewed);

        network.lose_reply_to(wire("needle"));
        let lost = store.complete(&operation, &done(mine.token, "first")).await.unwrap_err();
        assert!(lost.may_have_applied(), "{lost}");
        match store.complete(&operation, &done(mine.token, "second")).await.unwrap() {
            CompleteOutcome::AlreadyStored(stored) => assert_eq!(stored.reply.body(), "first"),
            other => panic!("expected AlreadyStored, got {other:?}"),
        }

        let (released, token) = (op("needle two"), take_over());
        acquired(store.claim(&released, &token).await.unwrap());
        // A release is never prepared.
        network.lose_reply_to(hex("needle two"));
        assert!(store.release(&released, token.token).await.unwrap_err().may_have_applied());
        assert_eq!(store.release(&released, token.token).await.unwrap(), ReleaseOutcome::Absent);
        assert_eq!(network.lost_replies(), 4);
    }
}

/// The COMMIT of what is not the usual case: a takeover.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_commit_is_ambiguous_too() {
    let server = Mariadb::shared().await;
    let (network, _, store) = behind(&server, "").await;
    let operation = op("k");
    let short = onlyonce_core::ClaimRequest { lease: Duration::from_millis(100), ..take_over() };
    acquired(store.claim(&operation, &short).await.unwrap());
    tokio::time::sleep(Duration::from_millis(150)).await;
    let next = take_over();
    // Not the one of READ COMMITTED.
    network.lose_reply_to(";\nCOMMIT");
    let lost = store.claim(&operation, &next).await.unwrap_err();
    assert!(lost.may_have_applied(), "{lost}");
    assert!(matches!(store.claim(&operation, &take_over()).await.unwrap(), ClaimOutcome::InProgress { .. }));
    assert_eq!(acquired(store.claim(&operation, &next).await.unwrap()).attempt, 2);
}

/// Idle connections that the network lost are found out before anything is sent on them, or after.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_network_is_forgotten_once_it_is_back() {
    let server = Mariadb::shared().await;
    let (network, _, store) = behind(&server, "").await;
    for round in 0..5 {
        acquired(store.claim(&op(&format!("before {round}")), &take_over()).await.unwrap());
        network.cut();
        network.refuse(true);
        for n in 0..3 {
            let error = store.claim(&op(&format!("during {round} {n}")), &take_over()).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
            assert!(error.retryable());
        }
        network.refuse(false);
        // The first operation may still meet a connection that is gone; the next one does not.
        let claimed = wait_for("the store is back", async || {
            store.claim(&op(&format!("after {round}")), &take_over()).await.ok()
        });
        claimed.await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_network_is_not_waited_for_for_ever() {
    let server = Mariadb::shared().await;
    let database = server.database().await;
    let network = FaultProxy::start(server.addr()).await;
    let url = format!("mysql://root@{}/{database}", network.addr());
    let options = MysqlStore::options(&url).unwrap();
    let store = options
        .statement_timeout(Duration::from_millis(500))
        .connect_timeout(Duration::from_millis(500))
        .open()
        .await
        .unwrap();
    let mine = take_over();
    acquired(store.claim(&op("k"), &mine).await.unwrap());
    network.silence(true);
    let error = within("an answer", store.complete(&op("k"), &done(mine.token, "x"))).await.unwrap_err();
    assert_eq!((error.kind(), error.may_have_applied()), (StoreErrorKind::Timeout, true), "{error}");
    // No connection, nothing sent.
    let error = within("an answer", store.claim(&op("l"), &take_over())).await.unwrap_err();
    assert_eq!((error.kind(), error.may_have_applied()), (StoreErrorKind::Unavailable, false), "{error}");
    network.silence(false);
    let stored = store.complete(&op("k"), &done(mine.token, "x")).await.unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_) | CompleteOutcome::AlreadyStored(_)), "{stored:?}");
}

/// Whatever was acknowledged before a SIGKILL of the server is there after it.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_outlives_a_killed_server() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    // The furthest that each operation is known to have come.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Known {
        Claimed,
        Completed,
        Released,
    }
    let known: Arc<Mutex<HashMap<String, Known>>> = Arc::default();
    let mut total = 0;
    for kill in 0..4 {
        let workers: Vec<_> = (0..24)
            .map(|worker| {
                let (store, known) = (store.clone(), Arc::clone(&known));
                tokio::spawn(async move {
                    for n in 0.. {
                        let name = format!("{kill} {worker} {n}");
                        let (operation, mine) = (op(&name), hold());
                        let Ok(claimed) = store.claim(&operation, &mine).await else { return };
                        acquired(claimed);
                        known.lock().insert(name.clone(), Known::Claimed);
                        if n % 4 == 0 {
                            let Ok(outcome) = store.release(&operation, mine.token).await else {
                                known.lock().remove(&name);
                                return;
                            };
                            assert_eq!(outcome, ReleaseOutcome::Applied);
                            known.lock().insert(name, Known::Released);
                        } else {
                            let Ok(outcome) =
                                store.complete(&operation, &done(mine.token, name.clone())).await
                            else {
                                // Claimed, and perhaps completed.
                                known.lock().remove(&name);
                                return;
                            };
                            assert!(matches!(outcome, CompleteOutcome::Stored(_)), "{outcome:?}");
                            known.lock().insert(name, Known::Completed);
                        }
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(700)).await;
        server.kill_9().await;
        for worker in workers {
            within("the workers end with the server", worker).await.unwrap();
        }
        server.start().await;
        let known = std::mem::take(&mut *known.lock());
        total += known.len();
        for (name, known) in known {
            let outcome =
                wait_for("the store is back", async || store.claim(&op(&name), &hold()).await.ok()).await;
            match known {
                Known::Claimed => {
                    assert!(matches!(outcome, ClaimOutcome::InProgress { .. }), "{name}: {outcome:?}")
                }
                Known::Completed => assert_eq!(completed(outcome).body(), name.as_bytes()),
                Known::Released => assert_eq!(acquired(outcome).attempt, 1),
            }
        }
    }
    println!("{total} operations, 4 kills");
    assert!(total > 100, "only {total} operations before the kills");
    store.stats().await.unwrap();
}

/// A paused server holds up what is asked, and nothing is lost when it goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_server_holds_up_and_loses_nothing() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let options = MysqlStore::options(&server.url(&database)).unwrap();
    let store = options.statement_timeout(Duration::from_secs(25)).open().await.unwrap();
    let mine = take_over();
    acquired(store.claim(&op("k"), &mine).await.unwrap());
    server.pause();
    let (paused, completion) = (store.clone(), done(mine.token, "x"));
    let completing = tokio::spawn(async move { paused.complete(&op("k"), &completion).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!completing.is_finished());
    server.resume();
    let stored = within("the completion", completing).await.unwrap().unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
}

/// Past its bound the queue refuses, and what it refused was not sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses() {
    let server = Mariadb::shared().await;
    let database = server.database().await;
    let network = FaultProxy::start(server.addr()).await;
    let url = format!("mysql://root@{}/{database}", network.addr());
    let options = MysqlStore::options(&url).unwrap().queue_max(10).batch_max(1).lanes(1);
    let store = options.open().await.unwrap();
    network.silence(true);
    let claims: Vec<_> = (0..50)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.claim(&op(&format!("k{n}")), &take_over()).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    network.silence(false);
    let (mut acquired, mut refused) = (0, 0);
    for claim in claims {
        match claim.await.unwrap() {
            Ok(ClaimOutcome::Acquired(_)) => acquired += 1,
            Err(error) => {
                assert_eq!((error.kind(), error.may_have_applied()), (StoreErrorKind::Overloaded, false));
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(refused > 0 && acquired >= 10, "{acquired} acquired, {refused} refused");
    let records = server.sql(&database, "select count(*) from idempotency_keys").await;
    assert_eq!(records, acquired.to_string());
}
