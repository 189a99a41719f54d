//! What a claim leaves behind for others: keys that nobody sent before wait for nobody, and a reply that cannot be stored is
//! told before it costs the connection.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use onlyonce_core::{Reply, Store, StoreErrorKind};
use onlyonce_store_mysql::{MysqlStore, OnceOutcome, Transaction, TxFailure, TxOptions, mysql_async};
use testkit::{wait_for, within};
use tokio::sync::oneshot;

async fn isolated(url: &str, isolation: &str) -> Conn {
    let mut conn = Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap();
    conn.query_drop(format!("set session transaction isolation level {isolation}")).await.unwrap();
    conn
}

fn waiting_for(seconds: u64) -> TxOptions {
    TxOptions { wait: Duration::from_secs(seconds), ..TxOptions::default() }
}

/// A copy that waited for a call that then failed holds its own key, and not the gap that it waited on.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_waited_for_a_failure_delays_no_other_key() {
    let (server, database, store) = store().await;
    let url = server.url(&database);
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let key = |n: u32| format!("order-{}-{n}", isolation.replace(' ', "-"));
        let (fail, failing) = oneshot::channel::<()>();
        let (begin, beginning) = oneshot::channel::<()>();
        let (its, its_url, operation) = (store.clone(), url.clone(), op(&key(1003)));
        let first = tokio::spawn(async move {
            let mut conn = isolated(&its_url, isolation).await;
            let mut steps = Some((begin, failing));
            let work = async move |_: &mut Transaction<'_>| {
                let (begin, failing) = steps.take().unwrap();
                begin.send(()).unwrap();
                failing.await?;
                Err(TxFailure::transient("later"))
            };
            its.once(&mut conn, &operation, work).await.unwrap()
        });
        within("the first works", beginning).await.unwrap();

        // A store of its own, as in another process: it waits at the server.
        let (its, its_url, operation) = (MysqlStore::open(&url).await.unwrap(), url.clone(), op(&key(1003)));
        let (works, working) = oneshot::channel::<()>();
        let (end, ending) = oneshot::channel::<()>();
        let copy = tokio::spawn(async move {
            let mut conn = isolated(&its_url, isolation).await;
            let mut steps = Some((works, ending));
            let work = async move |_: &mut Transaction<'_>| {
                let (works, ending) = steps.take().unwrap();
                works.send(()).unwrap();
                ending.await?;
                Ok(Reply::ok("the copy's"))
            };
            its.once_with(&mut conn, &operation, &waiting_for(60), work).await.unwrap()
        });
        // Not `innodb_trx`: who looks there too often, with the other tests, sees an old state.
        let waits = "select count(*) from information_schema.processlist
            where db = database() and id <> connection_id() and info like '%insert%idempotency_keys%'";
        wait_for("the copy waits", async || (server.sql(&database, waits).await == "1").then_some(())).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        fail.send(()).unwrap();
        assert!(matches!(within("the first", first).await.unwrap(), OnceOutcome::Transient(_)));
        within("the copy works", working).await.unwrap();

        for n in [1001, 1002, 1004, 1005, 9999] {
            let mut conn = isolated(&url, isolation).await;
            let outcome = store
                .once_with(&mut conn, &op(&key(n)), &waiting_for(2), async |_| Ok(Reply::ok("x")))
                .await
                .unwrap();
            assert!(matches!(outcome, OnceOutcome::Ran(_)), "{isolation}, {n}: {outcome:?}");
            acquired(store.claim(&op(&key(n + 10_000)), &take_over()).await.unwrap());
        }
        end.send(()).unwrap();
        assert!(matches!(within("the copy", copy).await.unwrap(), OnceOutcome::Ran(_)));
    }
}

/// A reply that no packet can carry is refused before it is sent, for good, and the connection goes on.
#[tokio::test]
async fn a_reply_larger_than_a_packet_is_refused_before_it_is_sent() {
    let (server, database, store) = store().await;
    let url = server.url(&database);
    let mut conn = isolated(&url, "repeatable read").await;
    let packet: usize = conn.query_first("select @@max_allowed_packet").await.unwrap().unwrap();
    server.sql(&database, "create table orders (id int)").await;
    let work = async |tx: &mut Transaction<'_>| {
        tx.query_drop("insert into orders values (1)").await?;
        Ok(Reply::ok(vec![7_u8; packet / 2 + 1]))
    };
    let told = store.once(&mut conn, &op("k"), work).await.unwrap_err();
    assert_eq!(told.kind(), StoreErrorKind::Unfit, "{told}");
    assert!(!told.retryable() && !told.may_have_applied(), "{told}");
    assert!(told.to_string().contains("max_allowed_packet"), "{told}");
    // Nothing happened, and the connection is as good as before.
    assert_eq!(server.sql(&database, "select count(*) from orders").await, "0");
    let fits = async |_: &mut Transaction<'_>| Ok(Reply::ok(vec![7_u8; packet / 2 - 8192]));
    let outcome = store.once(&mut conn, &op("k"), fits).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Ran(_)), "it does fit");
}

/// A right that the connection's user lacks is told as one.
#[tokio::test]
async fn a_missing_right_is_told() {
    let (server, database, store) = store().await;
    let user = format!("little_{database}");
    server.sql(&database, &format!("create user '{user}'@'%' identified by 'x'")).await;
    server.sql(&database, &format!("grant select, insert on {database}.* to '{user}'@'%'")).await;
    let url = format!("mysql://{user}:x@{}/{database}", server.addr());
    let mut conn = isolated(&url, "repeatable read").await;
    let told = store.once(&mut conn, &op("k"), async |_| panic!("never run")).await.unwrap_err();
    assert_eq!(told.kind(), StoreErrorKind::Unfit, "{told}");
    assert!(told.to_string().contains("lacks a right"), "{told}");
    let mut cause: &dyn std::error::Error = &told;
    while let Some(source) = cause.source() {
        cause = source;
    }
    assert!(cause.to_string().contains("UPDATE command denied"), "{cause}");
    server.sql(&database, &format!("drop user '{user}'@'%'")).await;
}
