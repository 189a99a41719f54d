//! The three isolation levels.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use onlyonce_core::{OnceOutcome, Reply};
use onlyonce_store_postgres::tokio_postgres::{IsolationLevel, Transaction};
use onlyonce_store_postgres::{TxClaim, TxOptions};

use crate::common::*;
use crate::{place_order, ran, replayed, shop};

const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];

#[tokio::test(flavor = "multi_thread")]
async fn under_each_isolation_copies_run_once_and_all_get_the_reply() {
    let shop = shop().await;
    for level in LEVELS {
        for round in 0..5 {
            let key = format!("{level} {round}");
            let (op, runs) = (op(&key), AtomicUsize::new(0));
            let copies = (0..8).map(|_| async {
                let mut client = shop.client().await;
                let set = format!("set session characteristics as transaction isolation level {level}");
                client.batch_execute(&set).await.unwrap();
                let work = async |tx: &mut Transaction<'_>| {
                    let reply = place_order(tx, &key).await?;
                    runs.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    Ok(reply)
                };
                let options = TxOptions { wait: Duration::from_secs(60), ..TxOptions::default() };
                match shop.store.once_with(&mut client, &op, &options, work).await.unwrap() {
                    OnceOutcome::Ran(stored) => (1, stored.reply),
                    OnceOutcome::Replayed(stored) => (0, stored.reply),
                    other => panic!("{other:?}"),
                }
            });
            let answers = join_all(copies).await;
            assert_eq!(answers.iter().map(|(ran, _)| ran).sum::<usize>(), 1, "{key}");
            assert!(answers.iter().all(|(_, reply)| *reply == answers[0].1));
            assert_eq!(shop.count(&key).await, 1, "{key}");
        }
    }
}

/// A snapshot that is older than the record's commit.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_snapshot_is_too_old_for_is_retry_transaction() {
    let shop = shop().await;
    for level in LEVELS {
        let (mut old, mut new) = (shop.client().await, shop.client().await);
        let mut tx = old.transaction().await.unwrap();
        tx.batch_execute(&format!("set transaction isolation level {level}")).await.unwrap();
        tx.query("select * from orders", &[]).await.unwrap();
        let reply = ran(shop.order(&mut new, &op(level)).await.unwrap());
        let claimed = shop.store.claim_in(&mut tx, &op(level), &TxOptions::default()).await.unwrap();
        match claimed {
            TxClaim::Completed(stored) if level == "read committed" => assert_eq!(stored.reply, reply),
            TxClaim::RetryTransaction if level != "read committed" => {}
            other => panic!("{level}: {other:?}"),
        }
        tx.rollback().await.unwrap();
        assert_eq!(replayed(shop.order(&mut old, &op(level)).await.unwrap()), reply);
        // The same when it waited for the other one.
        let key = format!("{level}, waited");
        let mut first = new.transaction().await.unwrap();
        let claimed = shop.store.claim_in(&mut first, &op(&key), &TxOptions::default()).await.unwrap();
        let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
        let waits = async {
            let mut tx = old.transaction().await.unwrap();
            tx.batch_execute(&format!("set transaction isolation level {level}")).await.unwrap();
            let options = TxOptions { wait: Duration::from_secs(60), ..TxOptions::default() };
            shop.store.claim_in(&mut tx, &op(&key), &options).await.unwrap()
        };
        let commits = async {
            shop.waits_for_a_lock().await;
            drop(claim.complete(&mut first, Reply::ok("first")).await.unwrap());
            first.commit().await.unwrap();
        };
        let (claimed, ()) = tokio::join!(waits, commits);
        match claimed {
            TxClaim::Completed(_) if level == "read committed" => {}
            TxClaim::RetryTransaction if level != "read committed" => {}
            other => panic!("{level}: {other:?}"),
        }
    }
}

/// Work whose transactions go before each other, and neighbours that have nothing to do with each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_serialization_failure_or_a_deadlock_in_the_work_runs_it_again() {
    let shop = shop().await;
    shop.place.psql("create table stock (item text primary key, left_over int not null)").await;
    shop.place.psql("insert into stock values ('tea', 100), ('jam', 100)").await;
    let runs = AtomicUsize::new(0);
    let buyers = (0..10).map(|n| {
        let (shop, runs) = (&shop, &runs);
        async move {
            let mut client = shop.client().await;
            let level = if n % 2 == 0 { "serializable" } else { "repeatable read" };
            let settings = format!(
                "set session characteristics as transaction isolation level {level}; set deadlock_timeout = '20ms'"
            );
            client.batch_execute(&settings).await.unwrap();
            let items = if n % 3 == 0 { ["tea", "jam"] } else { ["jam", "tea"] };
            let work = async |tx: &mut Transaction<'_>| {
                runs.fetch_add(1, Ordering::Relaxed);
                for item in items {
                    let row = tx.query_one("select left_over from stock where item = $1", &[&item]).await?;
                    let left = row.get::<_, i32>(0) - 1;
                    tx.execute("update stock set left_over = $2 where item = $1", &[&item, &left]).await?;
                }
                Ok(Reply::ok("sold"))
            };
            let op = op(&format!("buyer {n}"));
            // As a client does that is told to come again.
            loop {
                match shop.store.once(&mut client, &op, work).await {
                    Ok(OnceOutcome::Ran(_)) => break,
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => {
                        assert!(error.retryable() && !error.may_have_applied(), "{}", chain(&error));
                    }
                }
            }
        }
    });
    join_all(buyers).await;
    assert_eq!(shop.place.psql("select min(left_over), max(left_over) from stock").await, "90|90");
    assert!(runs.load(Ordering::Relaxed) > 10, "nobody met anybody");
}

/// Operations that have nothing to do with each other do not fail each other by standing on one page of an index.
#[tokio::test(flavor = "multi_thread")]
async fn under_serializable_neighbours_do_not_conflict() {
    let shop = shop().await;
    let claims = (0..8).map(|n| {
        let shop = &shop;
        async move {
            let mut client = shop.client().await;
            for round in 0..20 {
                let mut tx = client.build_transaction();
                tx = tx.isolation_level(IsolationLevel::Serializable);
                let mut tx = tx.start().await.unwrap();
                let op = op(&format!("{round} {n}"));
                let claimed = shop.store.claim_in(&mut tx, &op, &TxOptions::default()).await.unwrap();
                let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
                let pending = claim.complete(&mut tx, Reply::ok("")).await.unwrap();
                tx.commit().await.unwrap();
                pending.after_commit();
            }
        }
    });
    join_all(claims).await;
}
