//! The transactional mode: business rows and record, or neither.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error};
use onlyonce_core::{ClaimOutcome, Reply, Store, StoreError, StoreErrorKind};
use onlyonce_store_mysql::{
    MysqlStore, OnceOutcome, Transaction, TransactionClaim, TxClaim, TxFailure, TxOptions, mysql_async,
};
use testkit::{FaultProxy, Mariadb, wait_for, within};

const ISOLATIONS: [&str; 3] = ["read committed", "repeatable read", "serializable"];

/// A store, and a table of the business beside its own.
async fn shop() -> (Mariadb, String, MysqlStore) {
    let (server, database, store) = store().await;
    open_shop(&server, &database).await;
    (server, database, store)
}

async fn open_shop(server: &Mariadb, database: &str) {
    server.sql(database, "create table orders (id varchar(40) not null)").await;
    server.sql(database, "create table stock (id int primary key, pieces int not null)").await;
    server.sql(database, "insert into stock values (1, 100), (2, 100)").await;
}

async fn connect(url: &str) -> Conn {
    Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap()
}

async fn isolated(url: &str, isolation: &str) -> Conn {
    let mut conn = connect(url).await;
    conn.query_drop(format!("set session transaction isolation level {isolation}")).await.unwrap();
    conn
}

async fn order(tx: &mut Transaction<'_>, id: &str) -> Result<(), Error> {
    tx.exec_drop("insert into orders values (?)", (id,)).await
}

async fn orders(server: &Mariadb, database: &str) -> String {
    server.sql(database, "select count(*) from orders").await
}

async fn records(server: &Mariadb, database: &str) -> String {
    server.sql(database, "select count(*) from idempotency_keys").await
}

async fn claim(store: &MysqlStore, tx: &mut Transaction<'_>, key: &str) -> Result<TxClaim, StoreError> {
    store.claim_in(tx, &op(key), &TxOptions::default()).await
}

#[track_caller]
fn mine(claim: TxClaim) -> TransactionClaim {
    match claim {
        TxClaim::Acquired(claim) => claim,
        other => panic!("not acquired: {other:?}"),
    }
}

fn waiting_for(seconds: u64) -> TxOptions {
    TxOptions { wait: Duration::from_secs(seconds), ..TxOptions::default() }
}

#[tokio::test]
async fn a_claim_its_work_and_its_reply_are_committed_together() {
    let (server, database, store) = shop().await;
    let mut conn = connect(&server.url(&database)).await;

    let mut tx = store.begin(&mut conn).await.unwrap();
    assert_eq!(mine(claim(&store, &mut tx, "k").await.unwrap()).attempt(), 1);
    order(&mut tx, "k").await.unwrap();
    drop(tx);
    conn.ping().await.unwrap();
    assert_eq!((&*orders(&server, &database).await, &*records(&server, &database).await), ("0", "0"));

    let mut tx = store.begin(&mut conn).await.unwrap();
    let acquired = mine(claim(&store, &mut tx, "k").await.unwrap());
    order(&mut tx, "k").await.unwrap();
    let pending = acquired.complete(&mut tx, Reply::new(201, "done")).await.unwrap();
    let unseen = server.sql(&database, "select count(*) from orders, idempotency_keys").await;
    assert_eq!(unseen, "0", "nobody sees either before the commit");
    tx.commit().await.unwrap();
    let stored = pending.after_commit();

    let mut tx = store.begin(&mut conn).await.unwrap();
    let TxClaim::Completed(again) = claim(&store, &mut tx, "k").await.unwrap() else { panic!() };
    assert_eq!((again.reply, again.completed_at), (stored.reply, stored.completed_at));
    let other = store.claim_in(&mut tx, &op_of("shop", "k", "other"), &TxOptions::default()).await.unwrap();
    assert!(matches!(other, TxClaim::Mismatch { .. }), "{other:?}");
    tx.rollback().await.unwrap();
    assert_eq!(orders(&server, &database).await, "1");
    // One record for both modes.
    assert_eq!(completed(store.claim(&op("k"), &take_over()).await.unwrap()).body(), "done");
}

#[tokio::test]
async fn a_leased_record_is_seen_by_transactions() {
    let (server, database, store) = shop().await;
    let (live, held) = (hold(), hold());
    acquired(store.claim(&op("live"), &live).await.unwrap());
    acquired(store.claim(&op("held"), &held).await.unwrap());
    store.mark_unknown(&op("held"), held.token).await.unwrap();
    let mut conn = connect(&server.url(&database)).await;
    let mut tx = store.begin(&mut conn).await.unwrap();
    let seen = claim(&store, &mut tx, "live").await.unwrap();
    assert!(matches!(seen, TxClaim::InProgress { lease_left, .. } if !lease_left.is_zero()), "{seen:?}");
    let seen = claim(&store, &mut tx, "held").await.unwrap();
    assert!(matches!(seen, TxClaim::Unknown { .. }), "{seen:?}");
    // Nobody's outcome is lost when somebody commits and forgets the reply.
    drop(mine(claim(&store, &mut tx, "forgotten").await.unwrap()));
    order(&mut tx, "forgotten").await.unwrap();
    tx.commit().await.unwrap();
    let seen = store.claim(&op("forgotten"), &take_over()).await.unwrap();
    assert!(matches!(seen, ClaimOutcome::Unknown { .. }), "{seen:?}");

    // What a dead owner left is taken over where both allow it, and a freed key is claimed anew.
    let gone = onlyonce_core::ClaimRequest { lease: Duration::ZERO, ..take_over() };
    acquired(store.claim(&op("gone"), &gone).await.unwrap());
    let mut tx = store.begin(&mut conn).await.unwrap();
    let taken = mine(claim(&store, &mut tx, "gone").await.unwrap());
    assert_eq!(taken.attempt(), 2);
    drop(taken.complete(&mut tx, Reply::ok("taken over")).await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(completed(store.claim(&op("gone"), &take_over()).await.unwrap()).body(), "taken over");
}

/// A connection to the server's other databases is as good: the record is in the same transaction.
#[tokio::test]
async fn a_connection_to_another_server_is_refused() {
    let (server, database, store) = shop().await;
    let other = Mariadb::private().await;
    other.sql("mysql", &format!("create database {database}")).await;
    for prepared in [false, true] {
        if prepared {
            drop(MysqlStore::open(&other.url(&database)).await.unwrap());
        }
        let mut conn = connect(&other.url(&database)).await;
        let mut tx = store.begin(&mut conn).await.unwrap();
        let error = claim(&store, &mut tx, "k").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
        assert!(error.to_string().contains("another server"), "{error}");
    }
    let elsewhere = server.database().await;
    let mut conn = connect(&server.url(&elsewhere)).await;
    let mut tx = store.begin(&mut conn).await.unwrap();
    drop(mine(claim(&store, &mut tx, "k").await.unwrap()).complete(&mut tx, Reply::ok("x")).await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(records(&server, &database).await, "1");
}

#[tokio::test]
async fn a_claim_whose_transaction_is_gone_cannot_be_completed() {
    let (server, database, store) = shop().await;
    let mut conn = connect(&server.url(&database)).await;
    let mut tx = store.begin(&mut conn).await.unwrap();
    let first = mine(claim(&store, &mut tx, "k").await.unwrap());
    tx.query_drop("rollback").await.unwrap();
    let error = first.complete(&mut tx, Reply::ok("x")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict, "{error}");
    assert!(order(&mut tx, "by itself").await.is_err(), "nothing commits by itself");
    drop(tx);
    // Neither in a later transaction.
    let mut tx = store.begin(&mut conn).await.unwrap();
    let first = mine(claim(&store, &mut tx, "k").await.unwrap());
    tx.rollback().await.unwrap();
    let mut tx = store.begin(&mut conn).await.unwrap();
    let error = first.complete(&mut tx, Reply::ok("x")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict, "{error}");
    tx.rollback().await.unwrap();
    assert_eq!((&*orders(&server, &database).await, &*records(&server, &database).await), ("0", "0"));
    acquired(store.claim(&op("k"), &take_over()).await.unwrap());
}

/// Many callers of one key, each on a connection of its own, under each isolation and one under all.
#[tokio::test(flavor = "multi_thread")]
async fn once_runs_once() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    for (round, isolations) in
        [[0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 1, 2]].into_iter().cycle().take(12).enumerate()
    {
        let key = format!("k{round}");
        let runs = (0..12).map(|n| {
            let (store, url, key) = (store.clone(), url.clone(), key.clone());
            tokio::spawn(async move {
                let mut conn = isolated(&url, ISOLATIONS[isolations[n % 3]]).await;
                let options = waiting_for(60);
                let operation = op(&key);
                let work = async move |tx: &mut Transaction<'_>| {
                    order(tx, &key).await?;
                    tx.query_drop("update stock set pieces = pieces - 1 where id = 1").await?;
                    Ok(Reply::new(201, format!("done by {n}")))
                };
                store.once_with(&mut conn, &operation, &options, work).await.unwrap()
            })
        });
        let outcomes = within("all of them", join_all(runs)).await;
        let (mut ran, mut replayed) = (Vec::new(), Vec::new());
        for outcome in outcomes {
            match outcome.unwrap() {
                OnceOutcome::Ran(stored) => ran.push(stored.reply),
                OnceOutcome::Replayed(stored) => replayed.push(stored.reply),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((ran.len(), replayed.len()), (1, 11), "{isolations:?}");
        assert!(replayed.iter().all(|reply| *reply == ran[0]), "one answer for all");
    }
    assert_eq!(orders(&server, &database).await, "12");
    assert_eq!(server.sql(&database, "select pieces from stock where id = 1").await, "88");
    let mut conn = connect(&url).await;
    let other = store.once(&mut conn, &op_of("shop", "k0", "other"), async |_| panic!("never run")).await;
    assert!(matches!(other.unwrap(), OnceOutcome::Mismatch { .. }));
}

#[tokio::test]
async fn a_definitive_failure_takes_the_work_back_and_keeps_the_reply() {
    let (server, database, store) = shop().await;
    let mut conn = connect(&server.url(&database)).await;
    let declined = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        Err(TxFailure::Definitive(Reply::failed("declined")))
    };
    let outcome = store.once(&mut conn, &op("k"), declined).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(stored) if stored.reply.status() == 422));
    let outcome = store.once(&mut conn, &op("k"), async |_| panic!("never run")).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Replayed(stored) if stored.reply.body() == "declined"));
    assert_eq!(orders(&server, &database).await, "0");
}

#[tokio::test]
async fn a_transient_failure_and_a_panic_leave_nothing() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    let mut conn = connect(&url).await;
    let refused = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        Err(TxFailure::transient("the warehouse does not answer"))
    };
    let outcome = store.once(&mut conn, &op("k"), refused).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Transient(cause) if cause.to_string().contains("warehouse")));
    let wrong = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        tx.query_drop("insert into no_such_table values (1)").await?;
        Ok(Reply::ok("never"))
    };
    let outcome = store.once(&mut conn, &op("k"), wrong).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Transient(cause) if cause.to_string().contains("no_such_table")));

    let (panicking, its) = (store.clone(), url.clone());
    let panicked = tokio::spawn(async move {
        let mut conn = connect(&its).await;
        let work = async |tx: &mut Transaction<'_>| {
            order(tx, "k").await?;
            panic!("a bug")
        };
        panicking.once(&mut conn, &op("k"), work).await.map(drop)
    });
    assert!(panicked.await.unwrap_err().is_panic());

    let again = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        Ok(Reply::ok("at last"))
    };
    let outcome = store.once(&mut conn, &op("k"), again).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "{outcome:?}");
    assert_eq!(orders(&server, &database).await, "1");
}

/// What ends the transaction under the work is told, and is never followed by a second run: a COMMIT keeps the claim with
/// it, so its outcome is unknown; a ROLLBACK leaves nothing.
#[tokio::test]
async fn work_that_ends_its_transaction_is_never_run_twice() {
    for (end, left, unknown) in
        [("commit", "1", true), ("create table extra (id int)", "1", true), ("rollback", "0", false)]
    {
        let (server, database, store) = shop().await;
        let mut conn = connect(&server.url(&database)).await;
        let mut runs = 0;
        let ends = async |tx: &mut Transaction<'_>| {
            runs += 1;
            order(tx, "before").await?;
            // Whatever it says, and whatever it makes of the answer.
            let _ = tx.query_drop(end).await;
            let _ = order(tx, "after, by itself").await;
            Ok(Reply::ok("x"))
        };
        let error = store.once(&mut conn, &op("k"), ends).await.unwrap_err();
        assert!(!error.retryable(), "{end}: {error}");
        assert_eq!((runs, &*orders(&server, &database).await), (1, left), "{end}");
        let after = store.once(&mut conn, &op("k"), async |_| Ok(Reply::ok("again"))).await.unwrap();
        match after {
            OnceOutcome::Unknown { .. } => assert!(unknown, "{end}"),
            OnceOutcome::Ran(_) => assert!(!unknown, "{end}"),
            other => panic!("{end}: {other:?}"),
        }
    }
}

/// Two transactions in a deadlock: the server rolls one of them back whole. `once` runs it again; by hand it is told, and
/// nothing that is sent afterwards commits by itself.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_deadlock_the_transaction_is_run_again() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    let (ready, mut go) = tokio::sync::mpsc::channel::<()>(1);
    // It has done more, so the server gives up the other one.
    let mut rival = connect(&url).await;
    rival.query_drop("start transaction").await.unwrap();
    rival.query_drop("update stock set pieces = pieces + 1 where id = 2").await.unwrap();
    rival
        .query_drop(format!("insert into orders values {}", vec!["('rival')"; 200].join(", ")))
        .await
        .unwrap();
    let (its, its_url) = (store.clone(), url.clone());
    let seen = Arc::new(AtomicUsize::new(0));
    let runs = Arc::clone(&seen);
    let once = tokio::spawn(async move {
        let mut conn = connect(&its_url).await;
        let work = async move |tx: &mut Transaction<'_>| {
            runs.fetch_add(1, Ordering::SeqCst);
            tx.query_drop("update stock set pieces = pieces - 1 where id = 1").await?;
            ready.send(()).await?;
            // Whatever the work makes of its error.
            let met = tx.query_drop("update stock set pieces = pieces - 1 where id = 2").await;
            if met.is_err() {
                assert!(order(tx, "by itself").await.is_err());
            }
            Ok(Reply::ok("done"))
        };
        its.once(&mut conn, &op("k"), work).await.unwrap()
    });
    go.recv().await.unwrap();
    let waits = "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'";
    wait_for("the work waits for the rival", async || {
        (server.sql(&database, waits).await != "0").then_some(())
    })
    .await;
    rival.query_drop("update stock set pieces = pieces + 1 where id = 1").await.unwrap();
    rival.query_drop("commit").await.unwrap();
    tokio::spawn(async move { while go.recv().await.is_some() {} });
    let outcome = within("the second run", once).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "{outcome:?}");
    assert_eq!(seen.load(Ordering::SeqCst), 2);
    let pieces = server.sql(&database, "select group_concat(pieces order by id) from stock").await;
    assert_eq!((&*pieces, &*orders(&server, &database).await), ("100,100", "200"));
}

/// The claim itself is the victim.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_in_a_deadlock_says_so() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    let (mut big, mut small) = (connect(&url).await, connect(&url).await);
    let mut big = store.begin(&mut big).await.unwrap();
    let owner = mine(claim(&store, &mut big, "k").await.unwrap());
    big.query_drop(format!("insert into orders values {}", vec!["('big')"; 200].join(", "))).await.unwrap();
    let its = store.clone();
    let (ready, mut go) = tokio::sync::mpsc::channel::<()>(1);
    let victim = async move {
        let mut small = its.begin(&mut small).await.unwrap();
        small.query_drop("update stock set pieces = pieces - 1 where id = 1").await.unwrap();
        ready.send(()).await.unwrap();
        // A store of its own, as in another process: the turn of this one is its own.
        let options = waiting_for(60);
        let told = its.claim_in(&mut small, &op("k"), &options).await.unwrap();
        assert!(matches!(told, TxClaim::RetryTransaction), "{told:?}");
        assert!(order(&mut small, "by itself").await.is_err(), "nothing commits by itself");
        let late = small.commit().await.unwrap_err();
        assert_eq!(late.kind(), StoreErrorKind::Conflict, "{late}");
    };
    let victim = tokio::spawn(victim);
    go.recv().await.unwrap();
    let waits = "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'";
    wait_for("the claim waits", async || (server.sql(&database, waits).await != "0").then_some(())).await;
    big.query_drop("update stock set pieces = pieces - 1 where id = 1").await.unwrap();
    within("the victim", victim).await.unwrap();
    drop(owner.complete(&mut big, Reply::ok("x")).await.unwrap());
    big.commit().await.unwrap();
    assert_eq!(orders(&server, &database).await, "200");
}

/// Whoever holds a key delays its duplicates up to their patience, and nobody else; under every isolation.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_delays_its_duplicates_alone() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    for isolation in ISOLATIONS {
        let key = isolation.replace(' ', "-");
        // One that is new, and one that a dead owner left.
        let gone = onlyonce_core::ClaimRequest { lease: Duration::ZERO, ..take_over() };
        acquired(store.claim(&op(&format!("{key}-gone")), &gone).await.unwrap());
        let mut conn = isolated(&url, isolation).await;
        let mut tx = store.begin(&mut conn).await.unwrap();
        let owner = mine(claim(&store, &mut tx, &key).await.unwrap());
        drop(mine(claim(&store, &mut tx, &format!("{key}-gone")).await.unwrap()));

        let mut waiting = isolated(&url, isolation).await;
        waiting.query_drop("set session innodb_lock_wait_timeout = 37").await.unwrap();
        let busy = store.once_with(&mut waiting, &op(&key), &waiting_for(1), async |_| panic!("never run"));
        let others = join_all((0..30).map(|n| {
            let (store, url, key) = (store.clone(), url.clone(), format!("{key}-{n}"));
            tokio::spawn(async move {
                let mut conn = isolated(&url, isolation).await;
                let operation = op(&key);
                let work = async move |tx: &mut Transaction<'_>| {
                    order(tx, &key).await?;
                    Ok(Reply::ok("x"))
                };
                // Behind the open transaction no patience would be enough; a slow server needs some.
                store.once_with(&mut conn, &operation, &waiting_for(10), work).await.unwrap()
            })
        }));
        let (busy, others) = within("the others", async { tokio::join!(busy, others) }).await;
        assert!(matches!(busy.unwrap(), OnceOutcome::InProgress { .. }), "{isolation}");
        for other in others {
            assert!(matches!(other, Ok(OnceOutcome::Ran(_))), "{isolation}: {other:?}");
        }
        let patience: u32 =
            waiting.query_first("select @@session.innodb_lock_wait_timeout").await.unwrap().unwrap();
        assert_eq!(patience, 37, "set back");

        // A crowd of duplicates in this process: one of them waits at the server, the rest behind it.
        let crowd = (0..10).map(|_| {
            let (store, url, key) = (store.clone(), url.clone(), key.clone());
            tokio::spawn(async move {
                let mut conn = isolated(&url, isolation).await;
                let options = waiting_for(60);
                store.once_with(&mut conn, &op(&key), &options, async |_| panic!("never run")).await.unwrap()
            })
        });
        let crowd: Vec<_> = crowd.collect();
        // Of this database alone: the server is shared.
        let waits = "select count(*) from information_schema.innodb_trx
            where trx_state = 'LOCK WAIT' and trx_query like concat('%', database(), '%')";
        wait_for("a duplicate waits", async || (server.sql(&database, waits).await == "1").then_some(()))
            .await;
        assert_eq!(server.sql(&database, waits).await, "1", "{isolation}: one alone");
        drop(owner.complete(&mut tx, Reply::ok("the owner's")).await.unwrap());
        tx.commit().await.unwrap();
        for duplicate in within("the crowd", join_all(crowd)).await {
            let outcome = duplicate.unwrap();
            assert!(
                matches!(&outcome, OnceOutcome::Replayed(stored) if stored.reply.body() == "the owner's")
            );
        }
    }
}

const ROLE: &str = "ONLYONCE_MYSQL_TX_TEST_STEP";
const URL: &str = "ONLYONCE_MYSQL_TX_TEST_URL";

const STEPS: [&str; 5] =
    ["before the claim", "after the claim", "in the work", "before the commit", "after the commit"];

/// Charges by hand, and stops for good at the step that another test of this file asks for; by itself it stops nowhere.
#[tokio::test]
async fn role() {
    match std::env::var(ROLE) {
        Ok(step) => charge(&std::env::var(URL).unwrap(), &step).await,
        Err(_) => {
            let (server, database, _store) = shop().await;
            charge(&server.url(&database), "nowhere").await;
            charge(&server.url(&database), "nowhere").await;
            assert_eq!(orders(&server, &database).await, "1");
        }
    }
}

async fn charge(url: &str, stop: &str) {
    let at = async |step: &str| {
        if step == stop {
            println!("\nat {step}");
            std::future::pending::<()>().await;
        }
    };
    let store = MysqlStore::open(url).await.unwrap();
    let mut conn = connect(url).await;
    let mut tx = store.begin(&mut conn).await.unwrap();
    at(STEPS[0]).await;
    let claim = match claim(&store, &mut tx, "k").await.unwrap() {
        TxClaim::Acquired(claim) => claim,
        TxClaim::Completed(stored) => return assert_eq!(stored.reply.body(), "charged"),
        other => panic!("{other:?}"),
    };
    at(STEPS[1]).await;
    order(&mut tx, "k").await.unwrap();
    at(STEPS[2]).await;
    let pending = claim.complete(&mut tx, Reply::ok("charged")).await.unwrap();
    at(STEPS[3]).await;
    tx.commit().await.unwrap();
    assert_eq!(pending.after_commit().reply.body(), "charged");
    at(STEPS[4]).await;
}

/// A process that stands at one step; killed when dropped.
struct Standing(Child);

impl Drop for Standing {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn standing_at(step: &str, url: &str) -> Standing {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, step).env(URL, url);
    let mut process = Standing(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let told = format!("at {step}");
    let output = BufReader::new(process.0.stdout.take().unwrap());
    assert!(output.lines().map_while(Result::ok).any(|line| line == told), "it does not come to {step}");
    process
}

/// The retry after a crash: one row of the business, one reply.
async fn retried(store: &MysqlStore, url: &str, committed: bool, what: &str) {
    let mut conn = connect(url).await;
    let options = waiting_for(60);
    let work = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        Ok(Reply::ok("charged"))
    };
    let outcome = within("the retry", store.once_with(&mut conn, &op("k"), &options, work)).await.unwrap();
    match outcome {
        OnceOutcome::Ran(_) => assert!(!committed, "{what}"),
        OnceOutcome::Replayed(stored) => assert!(committed && stored.reply.body() == "charged", "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_step_leaves_all_or_nothing() {
    for step in STEPS {
        let (server, database, store) = shop().await;
        let url = server.url(&database);
        drop(standing_at(step, &url));
        retried(&store, &url, step == STEPS[4], step).await;
        assert_eq!(orders(&server, &database).await, "1", "{step}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_killed_at_any_step_leaves_all_or_nothing() {
    let server = Mariadb::private().await;
    for step in STEPS {
        let database = server.database().await;
        let url = server.url(&database);
        let store = MysqlStore::open(&url).await.unwrap();
        open_shop(&server, &database).await;
        let process = standing_at(step, &url);
        server.kill_9().await;
        drop(process);
        server.start().await;
        retried(&store, &url, step == STEPS[4], step).await;
        assert_eq!(orders(&server, &database).await, "1", "{step}");
    }
}

/// The COMMIT arrived, its answer did not: that is told, and the same operation asked again gets the reply.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_the_commit_is_ambiguous_and_asked_again() {
    let (server, database, store) = shop().await;
    let network = FaultProxy::start(server.addr()).await;
    let url = format!("mysql://root@{}/{database}", network.addr());
    let mut conn = connect(&url).await;
    network.lose_reply_to("COMMIT");
    let work = async |tx: &mut Transaction<'_>| {
        order(tx, "k").await?;
        Ok(Reply::ok("charged"))
    };
    let lost = store.once(&mut conn, &op("k"), work).await.unwrap_err();
    assert!(lost.may_have_applied() && lost.kind() == StoreErrorKind::Unavailable, "{lost}");
    assert_eq!(network.lost_replies(), 1);
    retried(&store, &server.url(&database), true, "lost COMMIT").await;
    assert_eq!(orders(&server, &database).await, "1");

    // Cut in the work: nothing happened.
    let mut conn = connect(&url).await;
    let work = async |tx: &mut Transaction<'_>| {
        order(tx, "cut").await?;
        network.cut();
        order(tx, "cut again").await?;
        Ok(Reply::ok("never"))
    };
    let cut = store.once(&mut conn, &op("cut"), work).await.unwrap();
    assert!(matches!(cut, OnceOutcome::Transient(_)), "{cut:?}");
    assert_eq!(orders(&server, &database).await, "1");
}
