//! Statements and calls that are given up in the middle, as by a timeout: their answers are still to come, and would be taken
//! for those of the next statement.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use onlyonce_core::{Reply, StoreError, StoreErrorKind};
use onlyonce_store_mysql::{
    MysqlStore, OnceOutcome, Transaction, TxClaim, TxFailure, TxOptions, mysql_async,
};
use testkit::{Mariadb, wait_for};
use tokio::time::timeout;

const SOON: Duration = Duration::from_millis(100);

async fn shop() -> (Mariadb, String, MysqlStore) {
    let (server, database, store) = store().await;
    server.sql(&database, "create table orders (id varchar(40) not null)").await;
    (server, database, store)
}

async fn connect(url: &str) -> Conn {
    Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap()
}

/// What is committed: orders, and records.
async fn committed(server: &Mariadb, database: &str) -> String {
    let counts = "select concat((select count(*) from orders), ' ', (select count(*) from idempotency_keys))";
    server.sql(database, counts).await
}

async fn none_is_left(server: &Mariadb, database: &str) {
    let open = "select count(*) from information_schema.processlist
        where db = database() and info like '%sleep(%' and id <> connection_id()";
    wait_for("the server to see that the connection is closed", async || {
        (server.sql(database, open).await == "0").then_some(())
    })
    .await;
    assert_eq!(committed(server, database).await, "0 0");
}

/// Whatever the work makes of it: nothing is sent after it, so nothing is told that is not so.
#[tokio::test]
async fn a_statement_given_up_in_the_work_ends_the_transaction() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    for slow in ["do sleep(0.3)", "select sleep(0.3)", "select 1; select sleep(0.3)"] {
        for end in ["ok", "definitive", "transient", "by the timeout", "goes on"] {
            let mut conn = connect(&url).await;
            let work = async |tx: &mut Transaction<'_>| {
                tx.query_drop("insert into orders values ('a')").await?;
                let given_up = timeout(SOON, tx.query_drop(slow)).await;
                assert!(given_up.is_err(), "{slow}");
                match end {
                    "definitive" => return Err(TxFailure::Definitive(Reply::new(504, "too slow"))),
                    "transient" => return Err(TxFailure::transient("too slow")),
                    "by the timeout" => drop(given_up?),
                    "goes on" => {
                        assert!(tx.query_drop("insert into orders values ('b')").await.is_err());
                        assert!(tx.exec_drop("insert into orders values (?)", ("c",)).await.is_err());
                        assert!(tx.prep("select 1").await.is_err() && tx.ping().await.is_err());
                    }
                    _ => {}
                }
                Ok(Reply::new(201, "ok"))
            };
            let told = store.once(&mut conn, &op("k"), work).await.unwrap_err();
            assert_eq!(told.kind(), StoreErrorKind::Unavailable, "{slow}, {end}: {told}");
            assert!(told.may_have_applied() && told.to_string().contains("close the connection"), "{told}");
            assert!(conn.is_disconnected(), "nothing was sent after it, so the driver still knows");
            refused(&store, &mut conn).await;
            drop(conn);
            none_is_left(&server, &database).await;
        }
    }
}

async fn refused(store: &MysqlStore, conn: &mut Conn) {
    let again = async |_: &mut Transaction<'_>| panic!("never run");
    let told = store.once(conn, &op("another"), again).await.unwrap_err();
    assert_eq!(told.kind(), StoreErrorKind::Unavailable, "{told}");
    assert!(!told.may_have_applied() && told.to_string().contains("take a new one"), "{told}");
    let told = store.begin(conn).await.unwrap_err();
    assert!(told.to_string().contains("given up in the middle"), "{told}");
}

/// By hand: neither its completion nor its COMMIT is sent.
#[tokio::test]
async fn a_statement_given_up_by_hand_ends_the_transaction() {
    let (server, database, store) = shop().await;
    for commits in [false, true] {
        let mut conn = connect(&server.url(&database)).await;
        let mut tx = store.begin(&mut conn).await.unwrap();
        let claim = store.claim_in(&mut tx, &op("k"), &TxOptions::default()).await.unwrap();
        let TxClaim::Acquired(claim) = claim else { panic!("{claim:?}") };
        tx.query_drop("insert into orders values ('a')").await.unwrap();
        if commits {
            drop(claim.complete(&mut tx, Reply::ok("x")).await.unwrap());
            timeout(SOON, tx.query_drop("do sleep(0.3)")).await.unwrap_err();
            assert!(tx.commit().await.unwrap_err().may_have_applied());
        } else {
            timeout(SOON, tx.query_drop("do sleep(0.3)")).await.unwrap_err();
            let told = claim.complete(&mut tx, Reply::ok("x")).await.unwrap_err();
            assert_eq!(told.kind(), StoreErrorKind::Unavailable, "{told}");
            tx.rollback().await.unwrap_err();
        }
        assert!(conn.is_disconnected());
        refused(&store, &mut conn).await;
        drop(conn);
        none_is_left(&server, &database).await;
    }
}

/// The driver clears its mark where it first reads the rest of an earlier answer: the handle has one of its own.
#[tokio::test]
async fn a_statement_given_up_behind_a_half_read_answer_ends_the_transaction() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    let half_read = async |tx: &mut Transaction<'_>| -> Result<(), mysql_async::Error> {
        tx.query_drop("insert into orders values ('a')").await?;
        let mut result = tx.query_iter("select 1 union select 2; select 3; select 4").await?;
        result.next().await?.unwrap();
        Ok(())
    };
    let mut conn = connect(&url).await;
    let work = async |tx: &mut Transaction<'_>| {
        half_read(tx).await?;
        timeout(SOON, tx.query_drop("do sleep(0.3)")).await.unwrap_err();
        Ok(Reply::ok("x"))
    };
    let told = store.once(&mut conn, &op("k"), work).await.unwrap_err();
    assert_eq!(told.kind(), StoreErrorKind::Unavailable, "{told}");
    assert!(conn.is_disconnected());
    drop(conn);
    none_is_left(&server, &database).await;

    // And with the whole call.
    let mut conn = connect(&url).await;
    let work = async |tx: &mut Transaction<'_>| {
        half_read(tx).await?;
        tx.query_drop("do sleep(0.3)").await?;
        Ok(Reply::ok("x"))
    };
    timeout(SOON, store.once(&mut conn, &op("k"), work)).await.unwrap_err();
    assert!(conn.is_disconnected());
    refused(&store, &mut conn).await;
    drop(conn);
    none_is_left(&server, &database).await;

    // Read to its end by the store, it takes nothing from anybody.
    let mut conn = connect(&url).await;
    let work = async |tx: &mut Transaction<'_>| {
        half_read(tx).await?;
        Ok(Reply::ok("x"))
    };
    let outcome = store.once(&mut conn, &op("k"), work).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "{outcome:?}");
    assert_eq!(committed(&server, &database).await, "1 1");
}

/// A call given up as a whole, at any moment: what is told of the next one on that connection is so, and a pool of the driver
/// never hands it on.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_given_up_at_any_moment_misleads_nobody() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    let call = async |conn: &mut Conn, key: &str| -> Result<OnceOutcome, StoreError> {
        let key = key.to_owned();
        let operation = op(&key);
        let work = async move |tx: &mut Transaction<'_>| {
            tx.exec_drop("insert into orders values (?)", (&key,)).await?;
            Ok(Reply::ok("done"))
        };
        store.once(conn, &operation, work).await
    };
    let one = PoolOpts::default()
        .with_constraints(PoolConstraints::new(1, 1).unwrap())
        .with_reset_connection(false);
    let opts = Opts::from_url(&format!("{url}?prefer_socket=false")).unwrap();
    let pool = Pool::new(OptsBuilder::from_opts(opts).pool_opts(one));
    let (mut given_up, mut refusals) = (0, 0);
    for round in 0..80_u64 {
        let moment = Duration::from_micros(round * 60);
        let (first, second) = (format!("first-{round}"), format!("second-{round}"));
        let mut conn = connect(&url).await;
        if timeout(moment, call(&mut conn, &first)).await.is_ok() {
            continue;
        }
        given_up += 1;
        let left = conn.is_disconnected();
        match call(&mut conn, &second).await {
            Ok(OnceOutcome::Ran(_)) => {
                assert!(!left, "{round}");
                let seen = format!("select count(*) from orders where id = '{second}'");
                assert_eq!(server.sql(&database, &seen).await, "1", "{round}");
            }
            Err(error) => {
                refusals += 1;
                assert!(left && error.to_string().contains("take a new one"), "{round}: {error}");
            }
            other => panic!("{round}: {other:?}"),
        }
        drop(conn);
        let mut conn = pool.get_conn().await.unwrap();
        let _ = timeout(moment, call(&mut conn, &format!("pooled-{round}"))).await;
        drop(conn);
        let mut conn = pool.get_conn().await.unwrap();
        assert_eq!(conn.query_first("select 42").await.unwrap(), Some(42), "{round}");
    }
    assert!(given_up > 0 && refusals > 0, "{given_up}, {refusals}");
    pool.disconnect().await.unwrap();
}
