//! Copies that meet an open transaction.

use std::time::Duration;

use futures_util::future::join_all;
use onlyonce_core::{ClaimOutcome, OnceOutcome, Operation, Reply, Store};
use onlyonce_store_postgres::tokio_postgres::Transaction;
use onlyonce_store_postgres::{TxClaim, TxFailure, TxOptions};
use testkit::{wait_for, within};

use crate::common::*;
use crate::{Shop, has_no_savepoint, place_order, ran, replayed, setting, shop, wait};

impl Shop {
    /// Until a transaction waits for another one.
    pub(crate) async fn waits_for_a_lock(&self) {
        self.waiting(1).await;
    }

    async fn waiting(&self, count: usize) {
        wait_for("a transaction waits at the server", async || (self.waiters().await >= count).then_some(()))
            .await;
    }

    async fn waiters(&self) -> usize {
        let sql = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        self.place.psql(sql).await.parse().unwrap()
    }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_waits_for_the_transaction_and_replays_or_runs_in_its_place() {
    let shop = shop().await;
    for commits in [true, false] {
        let op = op(if commits { "commits" } else { "rolls back" });
        let (mut first, mut second) = (shop.client().await, shop.client().await);
        let mut tx = first.transaction().await.unwrap();
        let claimed = shop.store.claim_in(&mut tx, &op, &TxOptions::default()).await.unwrap();
        let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
        let copy = async {
            let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("second"));
            shop.store.once_with(&mut second, &op, &wait(LONG), work).await.unwrap()
        };
        let ends = async {
            shop.waits_for_a_lock().await;
            drop(claim.complete(&mut tx, Reply::ok("first")).await.unwrap());
            match commits {
                true => tx.commit().await.unwrap(),
                false => tx.rollback().await.unwrap(),
            }
        };
        match (commits, tokio::join!(copy, ends).0) {
            (true, outcome) => assert_eq!(replayed(outcome).body(), "first"),
            (false, outcome) => assert_eq!(ran(outcome).body(), "second"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn past_the_wait_a_copy_is_busy_and_its_transaction_goes_on() {
    let shop = shop().await;
    let (mut first, mut second) = (shop.client().await, shop.client().await);
    let mut tx = first.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("k"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    for time in [Duration::ZERO, Duration::from_millis(50)] {
        let mut other = second.transaction().await.unwrap();
        other.execute("insert into orders (item) values ('mine')", &[]).await.unwrap();
        let claimed = shop.store.claim_in(&mut other, &op("k"), &wait(time)).await.unwrap();
        assert!(matches!(claimed, TxClaim::InProgress { lease_left: Duration::ZERO, .. }), "{claimed:?}");
        other.commit().await.unwrap();
    }
    assert_eq!(shop.count("mine").await, 2);
    // The leased mode is told the same.
    let leased = shop.store.claim(&op("k"), &hold()).await.unwrap();
    assert!(matches!(leased, ClaimOutcome::InProgress { .. }), "{leased:?}");
    drop(claim.complete(&mut tx, Reply::ok("first")).await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(replayed(shop.order(&mut second, &op("k")).await.unwrap()).body(), "first");
}

/// Whoever waited at the server: what it set for that is set back, and its savepoint is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_waited_has_the_callers_settings() {
    let shop = shop().await;
    let (mut first, mut second) = (shop.client().await, shop.client().await);
    for commits in [true, false] {
        let op = op(if commits { "commits" } else { "rolls back" });
        let mut tx = first.transaction().await.unwrap();
        let claimed = shop.store.claim_in(&mut tx, &op, &TxOptions::default()).await.unwrap();
        let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
        let ends = async {
            shop.waits_for_a_lock().await;
            drop(claim.complete(&mut tx, Reply::ok("first")).await.unwrap());
            match commits {
                true => tx.commit().await.unwrap(),
                false => tx.rollback().await.unwrap(),
            }
        };
        let mut copy = second.transaction().await.unwrap();
        copy.batch_execute("set local lock_timeout = '3s'").await.unwrap();
        let options = wait(LONG);
        match (commits, tokio::join!(shop.store.claim_in(&mut copy, &op, &options), ends).0.unwrap()) {
            (true, TxClaim::Completed(stored)) => assert_eq!(stored.reply.body(), "first"),
            (false, TxClaim::Acquired(_)) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(setting(&copy).await, "3s|on");
        has_no_savepoint(copy).await;
    }
}

/// A definitive failure takes back what the work did, and no more, also where the claim waited or took over.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_waited_or_took_over_is_taken_back_alone() {
    let shop = shop().await;
    let (mut first, mut second) = (shop.client().await, shop.client().await);
    let mut declined = async |op: &Operation| {
        let work = async |tx: &mut Transaction<'_>| {
            place_order(tx, op.key().as_str()).await?;
            Err(TxFailure::Definitive(Reply::new(402, "declined")))
        };
        let reply = ran(shop.store.once_with(&mut second, op, &wait(LONG), work).await.unwrap());
        let key = op.key().as_str();
        assert_eq!((reply.status(), shop.count(key).await), (402, 0));
        assert_eq!(shop.record(key).await, "completed");
    };
    let mut tx = first.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("waited"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    let ends = async {
        shop.waits_for_a_lock().await;
        drop(claim);
        tx.rollback().await.unwrap();
    };
    let waited = op("waited");
    tokio::join!(declined(&waited), ends);
    shop.dead_owner(&op("dead")).await;
    declined(&op("dead")).await;
}

/// A row that is held by somebody who takes no notice of our locks.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_a_stranger_inserted_and_did_not_commit_is_not_waited_for_without_end() {
    let shop = shop().await;
    let (mut stranger, mut ours) = (shop.client().await, shop.client().await);
    let tx = stranger.transaction().await.unwrap();
    tx.execute(
        "insert into idempotency_keys (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
            attempt, on_lease_end) values ('shop', 'k', 'x', 'freed', now(), now(), now(), gen_random_uuid(), 1, 'hold')",
        &[],
    )
    .await
    .unwrap();
    let options = wait(Duration::from_millis(50));
    let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("ours"));
    let outcome = shop.store.once_with(&mut ours, &op("k"), &options, work).await.unwrap();
    assert!(matches!(outcome, OnceOutcome::InProgress { .. }), "{outcome:?}");
    // The caller's own transaction goes on.
    let mut going_on = ours.transaction().await.unwrap();
    going_on.execute("insert into orders (item) values ('mine')", &[]).await.unwrap();
    let claimed = shop.store.claim_in(&mut going_on, &op("k"), &options).await.unwrap();
    assert!(matches!(claimed, TxClaim::InProgress { .. }), "{claimed:?}");
    going_on.commit().await.unwrap();
    assert_eq!(shop.count("mine").await, 1);
    tx.rollback().await.unwrap();
    ran(shop.store.once_with(&mut ours, &op("k"), &options, work).await.unwrap());
}

/// A stranger who has the whole table, such as a migration: the caller's own limit holds for what is only read.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_a_stranger_locked_is_not_waited_for_without_end() {
    let shop = shop().await;
    let (stranger, mut ours) = (shop.client().await, shop.client().await);
    let op = op_of("merchant-1", "order-7", "body");
    // With the lock of the operation nothing is inserted; without it an insert is tried.
    for lock in [format!("select pg_advisory_xact_lock({LOCK_OF_ORDER_7})"), "select 1".into()] {
        let whole = format!("begin; {lock}; lock table idempotency_keys in access exclusive mode");
        stranger.batch_execute(&whole).await.unwrap();
        let mut tx = ours.transaction().await.unwrap();
        tx.execute("insert into orders (item) values ('mine')", &[]).await.unwrap();
        tx.batch_execute("set local lock_timeout = '50ms'").await.unwrap();
        let claimed = shop.store.claim_in(&mut tx, &op, &wait(Duration::from_millis(50))).await.unwrap();
        assert!(matches!(claimed, TxClaim::InProgress { .. }), "{claimed:?}");
        tx.commit().await.unwrap();
        stranger.batch_execute("rollback").await.unwrap();
    }
    assert_eq!(shop.count("mine").await, 2);
    ran(shop.order(&mut ours, &op).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_process_one_copy_waits_at_the_server() {
    let shop = shop().await;
    let mut first = shop.client().await;
    let mut tx = first.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("k"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    let copies = (0..20).map(|_| async {
        let mut client = shop.client().await;
        let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("again"));
        shop.store.once_with(&mut client, &op("k"), &wait(LONG), work).await.unwrap()
    });
    let ends = async {
        wait_for("all copies have a transaction", async || {
            let sql = "select count(*) from pg_stat_activity where datname = current_database() and xact_start is not null
                and pid <> pg_backend_pid()";
            (shop.place.psql(sql).await == "21").then_some(())
        })
        .await;
        shop.waits_for_a_lock().await;
        let most = shop.waiters().await;
        drop(claim.complete(&mut tx, Reply::ok("first")).await.unwrap());
        tx.commit().await.unwrap();
        most
    };
    let (copies, most) = tokio::join!(join_all(copies), ends);
    assert_eq!(most, 1);
    for copy in copies {
        assert_eq!(replayed(copy).body(), "first");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_delays_no_other_key_in_either_mode() {
    let shop = shop().await;
    let mut first = shop.client().await;
    let mut tx = first.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("open"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    let mut blocked = shop.client().await;
    let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("copy"));
    let (op_open, options) = (op("open"), wait(LONG));
    let copy = shop.store.once_with(&mut blocked, &op_open, &options, work);
    let others = async {
        shop.waits_for_a_lock().await;
        // All of them while it is open: were one of them held up by it, this would not end.
        let pairs = (0..200).map(|n| {
            let (store, key) = (&shop.store, format!("leased {n}"));
            async move { pair(store, &key).await.unwrap() }
        });
        within("claims of other keys", join_all(pairs)).await;
        let mut client = shop.client().await;
        for n in 0..50 {
            ran(within("other transactions", shop.order(&mut client, &op(&format!("tx {n}"))))
                .await
                .unwrap());
        }
        drop(claim.complete(&mut tx, Reply::ok("first")).await.unwrap());
        tx.commit().await.unwrap();
    };
    let (copy, ()) = tokio::join!(copy, others);
    assert_eq!(replayed(copy.unwrap()).body(), "first");
}
