//! The transactional mode: business rows and record, or neither.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::path::Path;
use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, Reply, Store, StoreError, StoreErrorKind};
use onlyonce_store_sqlite::rusqlite::{self, Connection, Transaction, TransactionBehavior};
use onlyonce_store_sqlite::{OnceOutcome, SqliteStore, TxClaim, TxFailure, TxOptions};

async fn with_orders(path: &Path) -> SqliteStore {
    beside(path).execute_batch("CREATE TABLE orders (id TEXT NOT NULL)").unwrap();
    SqliteStore::open(path).await.unwrap()
}

fn order(tx: &Transaction<'_>, id: &str) -> rusqlite::Result<usize> {
    tx.execute("INSERT INTO orders VALUES (?1)", [id])
}

fn orders(path: &Path) -> i64 {
    beside(path).query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
}

fn claim(store: &SqliteStore, tx: &Transaction<'_>, key: &str) -> Result<TxClaim, StoreError> {
    store.claim_in(tx, &op(key), &TxOptions::default())
}

#[tokio::test]
async fn a_claim_its_work_and_its_reply_are_committed_together() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let mut conn = Connection::open(&path).unwrap();

    let tx = conn.transaction().unwrap();
    let TxClaim::Acquired(acquired) = claim(&store, &tx, "k").unwrap() else { panic!() };
    assert_eq!(acquired.attempt(), 1);
    order(&tx, "k").unwrap();
    drop(tx);
    assert_eq!(orders(&path), 0, "rolled back, as by a crash");

    let tx = conn.transaction().unwrap();
    let TxClaim::Acquired(acquired) = claim(&store, &tx, "k").unwrap() else { panic!() };
    order(&tx, "k").unwrap();
    let pending = acquired.complete(&tx, Reply::new(201, "done")).unwrap();
    tx.commit().unwrap();
    let stored = pending.after_commit();

    let tx = conn.transaction().unwrap();
    let TxClaim::Completed(again) = claim(&store, &tx, "k").unwrap() else { panic!() };
    assert_eq!((again.reply, again.completed_at), (stored.reply, stored.completed_at));
    let other = store.claim_in(&tx, &op_of("shop", "k", "other"), &TxOptions::default()).unwrap();
    assert!(matches!(other, TxClaim::Mismatch { .. }), "{other:?}");
    drop(tx);
    assert_eq!(orders(&path), 1);
    // One record for both modes.
    assert_eq!(completed(store.claim(&op("k"), &take_over()).await.unwrap()).body(), "done");
}

#[tokio::test]
async fn a_leased_record_is_seen_by_transactions() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let (live, held) = (hold(), hold());
    acquired(store.claim(&op("live"), &live).await.unwrap());
    acquired(store.claim(&op("held"), &held).await.unwrap());
    store.mark_unknown(&op("held"), held.token).await.unwrap();
    let mut conn = Connection::open(&path).unwrap();
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let seen = claim(&store, &tx, "live").unwrap();
    assert!(matches!(seen, TxClaim::InProgress { .. }), "{seen:?}");
    let seen = claim(&store, &tx, "held").unwrap();
    assert!(matches!(seen, TxClaim::Unknown { .. }), "{seen:?}");
    // Nobody's outcome is lost when somebody commits and forgets the reply.
    let TxClaim::Acquired(forgotten) = claim(&store, &tx, "forgotten").unwrap() else { panic!() };
    order(&tx, "forgotten").unwrap();
    drop(forgotten);
    tx.commit().unwrap();
    // Its lease is the shortest that there is; within the same millisecond it is not over yet.
    let seen = loop {
        match store.claim(&op("forgotten"), &take_over()).await.unwrap() {
            ClaimOutcome::InProgress { .. } => tokio::time::sleep(Duration::from_millis(1)).await,
            seen => break seen,
        }
    };
    assert!(matches!(seen, ClaimOutcome::Unknown { .. }), "{seen:?}");
}

#[tokio::test]
async fn unfit_connections_are_refused() {
    let (folder, path) = place();
    let store = with_orders(&path).await;
    let unfit = |conn: &mut Connection, reason: &str| {
        let error = claim(&store, &conn.transaction().unwrap(), "k").unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    };
    let mut weak = Connection::open(&path).unwrap();
    weak.execute_batch("PRAGMA synchronous = NORMAL").unwrap();
    unfit(&mut weak, "weaker than FULL");
    let elsewhere = folder.path().join("elsewhere.db");
    drop(SqliteStore::open(&elsewhere).await.unwrap());
    unfit(&mut Connection::open(&elsewhere).unwrap(), "another file");
    unfit(&mut Connection::open_in_memory().unwrap(), "another file");
}

#[tokio::test]
async fn a_claim_whose_transaction_is_gone_cannot_be_completed() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let mut conn = Connection::open(&path).unwrap();
    let tx = conn.transaction().unwrap();
    let TxClaim::Acquired(first) = claim(&store, &tx, "k").unwrap() else { panic!() };
    tx.execute_batch("ROLLBACK").unwrap();
    assert_eq!(first.complete(&tx, Reply::ok("x")).unwrap_err().kind(), StoreErrorKind::Conflict);
    drop(tx);
    // Neither in a later transaction.
    let tx = conn.transaction().unwrap();
    let TxClaim::Acquired(first) = claim(&store, &tx, "k").unwrap() else { panic!() };
    tx.rollback().unwrap();
    let tx = conn.transaction().unwrap();
    assert_eq!(first.complete(&tx, Reply::ok("x")).unwrap_err().kind(), StoreErrorKind::Conflict);
    drop(tx);
    acquired(store.claim(&op("k"), &take_over()).await.unwrap());
}

#[tokio::test]
async fn a_transaction_that_another_writer_overtook_is_run_again() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let mut conn = Connection::open(&path).unwrap();
    let tx = conn.transaction().unwrap();
    let _: i64 = tx.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
    acquired(store.claim(&op("other"), &take_over()).await.unwrap());
    assert!(matches!(claim(&store, &tx, "k").unwrap(), TxClaim::RetryTransaction));
    drop(tx);
    let tx = conn.transaction().unwrap();
    assert!(matches!(claim(&store, &tx, "k").unwrap(), TxClaim::Acquired(_)));
}

#[tokio::test]
async fn once_runs_once() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let runs = (0..50).map(|_| {
        let store = store.clone();
        async move {
            let work = |tx: &Transaction<'_>| {
                order(tx, "k")?;
                Ok(Reply::new(201, "done"))
            };
            store.once(&op("k"), work).await.unwrap()
        }
    });
    let outcomes = futures_util::future::join_all(runs).await;
    let ran = outcomes.iter().filter(|outcome| matches!(outcome, OnceOutcome::Ran(_))).count();
    let replayed = outcomes.iter().filter(|outcome| matches!(outcome, OnceOutcome::Replayed(_))).count();
    assert_eq!((ran, replayed, orders(&path)), (1, 49, 1));
    let other = store.once(&op_of("shop", "k", "other"), |_| panic!("never run")).await.unwrap();
    assert!(matches!(other, OnceOutcome::Mismatch { .. }), "{other:?}");
}

#[tokio::test]
async fn a_definitive_failure_takes_the_work_back_and_keeps_the_reply() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    let declined = |tx: &Transaction<'_>| {
        order(tx, "k")?;
        Err(TxFailure::Definitive(Reply::failed("declined")))
    };
    let outcome = store.once(&op("k"), declined).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(stored) if stored.reply.status() == 422));
    let outcome = store.once(&op("k"), |_| panic!("never run")).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Replayed(stored) if stored.reply.body() == "declined"));
    assert_eq!(orders(&path), 0);
}

#[tokio::test]
async fn a_transient_failure_a_panic_and_an_overrun_leave_nothing() {
    let (_folder, path) = place();
    beside(&path).execute_batch("CREATE TABLE orders (id TEXT NOT NULL)").unwrap();
    let options = SqliteStore::options(&path).transaction_timeout(Duration::from_millis(300));
    let store = options.open().await.unwrap();
    let refused = |tx: &Transaction<'_>| {
        order(tx, "k")?;
        Err(TxFailure::transient("the warehouse does not answer"))
    };
    let outcome = store.once(&op("k"), refused).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Transient(cause) if cause.to_string().contains("warehouse")));

    let panicking = store.clone();
    let panicked = tokio::spawn(async move {
        let work = |tx: &Transaction<'_>| {
            order(tx, "k")?;
            panic!("a bug")
        };
        panicking.once(&op("k"), work).await
    });
    assert!(panicked.await.unwrap_err().is_panic());

    let endless = |tx: &Transaction<'_>| {
        order(tx, "k")?;
        let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
        tx.query_row(sql, [], |_| Ok(()))?;
        Ok(Reply::ok("never"))
    };
    let error = store.once(&op("k"), endless).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
    assert!(error.retryable() && !error.may_have_applied());
    let slow = |tx: &Transaction<'_>| {
        order(tx, "k")?;
        std::thread::sleep(Duration::from_millis(400));
        Ok(Reply::ok("too late"))
    };
    assert_eq!(store.once(&op("k"), slow).await.unwrap_err().kind(), StoreErrorKind::Timeout);

    assert_eq!(orders(&path), 0);
    let outcome = store.once(&op("k"), |tx| Ok(Reply::ok(order(tx, "k")?.to_string()))).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "{outcome:?}");
    assert_eq!(orders(&path), 1);
}

#[tokio::test]
async fn work_cannot_commit_by_itself() {
    let (_folder, path) = place();
    let store = with_orders(&path).await;
    for end in ["COMMIT", "ROLLBACK"] {
        let ends = move |tx: &Transaction<'_>| {
            order(tx, "before")?;
            // Whatever it says, and whatever it makes of the answer.
            let _ = tx.execute_batch(end);
            let _ = order(tx, "after, by itself");
            Ok(Reply::ok("x"))
        };
        let error = store.once(&op("k"), ends).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Conflict, "{end}: {error}");
        assert_eq!(orders(&path), 0, "{end}");
    }
    let outcome = store.once(&op("k"), |tx| Ok(Reply::ok(order(tx, "k")?.to_string()))).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_and_the_writer_take_turns() {
    let (_folder, path) = place();
    let options = SqliteStore::options(&path).busy_timeout(Duration::from_secs(120));
    beside(&path).execute_batch("CREATE TABLE orders (id TEXT NOT NULL)").unwrap();
    let store = options.open().await.unwrap();
    let both = (0..60).map(|n| {
        let store = store.clone();
        tokio::spawn(async move {
            let key = format!("k{n}");
            if n % 2 == 0 {
                let id = key.clone();
                store.once(&op(&key), move |tx| Ok(Reply::ok(order(tx, &id)?.to_string()))).await.unwrap();
            } else {
                acquired(store.claim(&op(&key), &hold()).await.unwrap());
            }
        })
    });
    for one in futures_util::future::join_all(both).await {
        one.unwrap();
    }
    assert_eq!(orders(&path), 30);
}
