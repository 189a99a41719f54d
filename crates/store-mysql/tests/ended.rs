//! Work that ends its transaction by its own hand: what it committed is never told as if it had not happened, and never done
//! twice.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use common::*;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use onlyonce_core::{Reply, StoreErrorKind};
use onlyonce_store_mysql::{MysqlStore, OnceOutcome, Transaction, TxFailure, mysql_async};
use testkit::{Mariadb, wait_for};

async fn shop() -> (Mariadb, String, MysqlStore) {
    let (server, database, store) = store().await;
    server.sql(&database, "create table orders (id varchar(40) not null)").await;
    server.sql(&database, "create table stock (id int primary key, pieces int not null)").await;
    server.sql(&database, "insert into stock values (1, 100), (2, 100)").await;
    server.sql(&database, "create table extra (id int not null)").await;
    (server, database, store)
}

async fn connect(url: &str) -> Conn {
    Conn::from_url(format!("{url}?prefer_socket=false")).await.unwrap()
}

async fn orders(server: &Mariadb, database: &str) -> String {
    server.sql(database, "select count(*) from orders").await
}

/// How the work leaves, after it ended its transaction.
const LEAVES: [&str; 4] = ["transient", "by a refused statement", "definitive", "ok"];

fn leave(how: &str) -> Result<Reply, TxFailure> {
    match how {
        "definitive" => Err(TxFailure::Definitive(Reply::new(402, "no"))),
        "ok" => Ok(Reply::ok("done")),
        _ => Err(TxFailure::transient("later")),
    }
}

/// The claim is committed with the rows, and its reply is not: nobody knows, and nobody runs it again.
#[tokio::test]
async fn what_the_work_committed_is_never_told_as_nothing() {
    let ends = [
        "commit",
        "truncate table extra",
        // It fails, and commits all the same.
        "create table extra (id int)",
        "lock tables orders write",
        "begin",
        "call committing()",
        "set autocommit = 0; commit; insert into extra values (1)",
        "commit and chain",
    ];
    let (server, database, store) = shop().await;
    let committing = "create procedure committing() begin commit; insert into extra values (1); end";
    connect(&server.url(&database)).await.query_drop(committing).await.unwrap();
    for (n, end) in ends.into_iter().enumerate() {
        for how in LEAVES {
            // There the record is still its own, and completed with the work of both transactions.
            let goes_on = ["begin", "commit and chain"].contains(&end) || end.starts_with("set autocommit");
            if how == "ok" && goes_on {
                continue;
            }
            let key = format!("{n}-{how}");
            let mut conn = connect(&server.url(&database)).await;
            let mut runs = 0;
            let work = async |tx: &mut Transaction<'_>| {
                runs += 1;
                tx.exec_drop("insert into orders values (?)", (&key,)).await?;
                let _ = tx.query_drop(end).await;
                if how == "by a refused statement" {
                    tx.query_drop("insert into no_such_table values (1)").await?;
                }
                leave(how)
            };
            let told = store.once(&mut conn, &op(&key), work).await;
            assert!(
                matches!(&told, Err(error) if error.kind() == StoreErrorKind::Internal),
                "{end}, {how}: {told:?}"
            );
            assert_eq!(runs, 1, "{end}, {how}");
            drop(conn);
            let kept = format!("select count(*) from orders where id = '{key}'");
            wait_for("the lock of the tables is gone", async || {
                (server.sql(&database, &kept).await == "1").then_some(())
            })
            .await;
            let mut conn = connect(&server.url(&database)).await;
            let again = store.once(&mut conn, &op(&key), async |_| panic!("never run")).await.unwrap();
            assert!(matches!(again, OnceOutcome::Unknown { .. }), "{end}, {how}: {again:?}");
        }
    }
}

/// A procedure that takes all back, the claim too, and then writes by itself.
#[tokio::test]
async fn work_whose_procedure_rolled_back_is_run_once() {
    let (server, database, store) = shop().await;
    let refusing = "create procedure refusing() begin
        declare exit handler for sqlexception begin
            rollback; insert into orders values ('by itself'); select 'refused';
        end;
        insert into extra values (null); select 'ok';
    end";
    let mut conn = connect(&server.url(&database)).await;
    conn.query_drop(refusing).await.unwrap();
    for (n, how) in LEAVES.into_iter().enumerate() {
        let mut runs = 0;
        let work = async |tx: &mut Transaction<'_>| {
            runs += 1;
            let said: Option<String> = tx.query_first("call refusing()").await?;
            assert_eq!(said.as_deref(), Some("refused"));
            if how == "by a refused statement" {
                tx.query_drop("insert into no_such_table values (1)").await?;
            }
            leave(how)
        };
        let told = store.once(&mut conn, &op(how), work).await.unwrap_err();
        assert_eq!((told.kind(), runs), (StoreErrorKind::Internal, 1), "{how}: {told}");
        assert_eq!(orders(&server, &database).await, (n + 1).to_string(), "{how}");
    }
}

/// What does not end it is no reason to refuse: an own savepoint, a refused statement, a temporary table.
#[tokio::test]
async fn work_that_keeps_its_transaction_fails_as_ever() {
    let (server, database, store) = shop().await;
    let mut conn = connect(&server.url(&database)).await;
    for step in [
        "savepoint a",
        "insert into no_such_table values (1)",
        "create temporary table t (id int)",
        "select 1; insert into no_such_table values (1)",
        "set innodb_lock_wait_timeout = 1",
    ] {
        let work = async |tx: &mut Transaction<'_>| {
            tx.query_drop("insert into orders values ('a')").await?;
            let _ = tx.query_drop(step).await;
            Err(TxFailure::transient("later"))
        };
        let outcome = store.once(&mut conn, &op("k"), work).await.unwrap();
        assert!(matches!(outcome, OnceOutcome::Transient(_)), "{step}: {outcome:?}");
    }
    assert_eq!(orders(&server, &database).await, "0");
    assert_eq!(server.sql(&database, "select count(*) from idempotency_keys").await, "0");
}

/// A wait for a lock that takes the whole transaction back, where the server is told so, is no work's own hand.
#[tokio::test]
async fn a_lock_wait_that_takes_all_back_is_transient() {
    let server = Mariadb::options().setting("innodb-rollback-on-timeout=ON").start().await;
    let database = server.database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    server.sql(&database, "create table stock (id int primary key) as select 1 as id").await;
    let (mut conn, mut rival) =
        (connect(&server.url(&database)).await, connect(&server.url(&database)).await);
    rival.query_drop("begin").await.unwrap();
    rival.query_drop("select * from stock for update").await.unwrap();
    conn.query_drop("set innodb_lock_wait_timeout = 1").await.unwrap();
    let work = async |tx: &mut Transaction<'_>| {
        tx.query_drop("delete from stock").await?;
        Ok(Reply::ok("never"))
    };
    let outcome = store.once(&mut conn, &op("k"), work).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::Transient(_)), "{outcome:?}");
    assert_eq!(server.sql(&database, "select count(*) from idempotency_keys").await, "0");
}

/// A deadlock that comes among the rows, or with a later answer of one text, is one like any other: the work runs again.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_among_the_rows_runs_the_work_again() {
    let (server, database, store) = shop().await;
    let url = server.url(&database);
    for (n, reading) in
        ["select * from stock where id = 1 for update", "select 5; update stock set pieces = 1 where id = 1"]
            .into_iter()
            .enumerate()
    {
        let key = format!("k{n}");
        let mut conn = connect(&url).await;
        let mut runs = 0;
        let work = async |tx: &mut Transaction<'_>| {
            runs += 1;
            tx.query_drop("update stock set pieces = pieces + 1 where id = 2").await?;
            if runs == 1 {
                // It has done more, so the server gives up the work.
                let mut rival = connect(&url).await;
                rival.query_drop("begin").await?;
                let weight = vec!["(1)"; 200].join(", ");
                rival.query_drop(format!("insert into extra values {weight}")).await?;
                rival.query_drop("update stock set pieces = 7 where id = 1").await?;
                tokio::spawn(async move {
                    let _ = rival.query_drop("update stock set pieces = 7 where id = 2").await;
                    let _ = rival.query_drop("rollback").await;
                });
                let waits = "select count(*) from information_schema.processlist
                    where db = database() and info like 'update stock set pieces = 7 where id = 2%'";
                wait_for("the rival waits for the work", async || {
                    (server.sql(&database, waits).await != "0").then_some(())
                })
                .await;
            }
            let mut result = tx.query_iter(reading).await?;
            let _: Vec<mysql_async::Row> = result.collect().await?;
            result.drop_result().await?;
            Ok(Reply::ok("done"))
        };
        let outcome = store.once(&mut conn, &op(&key), work).await.unwrap();
        assert!(matches!(outcome, OnceOutcome::Ran(_)), "{reading}: {outcome:?}");
        assert_eq!(runs, 2, "{reading}");
    }
}
