//! What a batch does with records that somebody holds, or makes while it looks.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use futures_util::future::{join, join_all};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use onlyonce_core::{ClaimOutcome, ClaimRequest, Operation, RenewOutcome, Store, StoreError, StoreErrorKind};
use onlyonce_store_mysql::{MysqlStore, mysql_async};
use testkit::{FaultProxy, Mariadb, within};

async fn connect(server: &Mariadb, database: &str) -> Conn {
    Conn::from_url(format!("{}?prefer_socket=false", server.url(database))).await.unwrap()
}

/// How often the store began to look at rows that it locks.
async fn looks(conn: &mut Conn) -> u64 {
    let (_, count): (String, u64) =
        conn.query_first("show global status like 'Com_begin'").await.unwrap().unwrap();
    count
}

/// Asked in one go on one thread, they are one batch.
async fn claim_all(
    store: &MysqlStore,
    claims: &[(Operation, ClaimRequest)],
) -> Vec<Result<ClaimOutcome, StoreError>> {
    join_all(claims.iter().map(|(operation, request)| store.claim(operation, request))).await
}

fn claims(keys: &[String]) -> Vec<(Operation, ClaimRequest)> {
    keys.iter().map(|key| (op(key), take_over())).collect()
}

/// What an owner asks is never answered as if its record were gone, whatever somebody did to it and may take back.
#[tokio::test]
async fn a_record_that_somebody_holds_is_not_taken_for_gone() {
    let (server, database, store) = store().await;
    let owner = take_over();
    for key in ["updated", "deleted", "locked"] {
        acquired(store.claim(&op(key), &owner).await.unwrap());
    }
    let mut somebody = connect(&server, &database).await;
    for statement in [
        "set session transaction isolation level read committed",
        "start transaction",
        "update idempotency_keys set attempt = 7 where `key` = 'updated'",
        "delete from idempotency_keys where `key` = 'deleted'",
        "select * from idempotency_keys where `key` = 'locked' for update",
        "insert into idempotency_keys select scope, 'inserted', request_hash, status, response_code, response_headers, \
         response_body, locked_until, created_at, claimed_at, completed_at, expires_at, token, attempt, on_lease_end, \
         origin from idempotency_keys where `key` = 'locked'",
    ] {
        somebody.query_drop(statement).await.unwrap();
    }
    let all = ["inserted", "updated", "deleted", "locked"].map(op);
    let renew = || join_all(all.iter().map(|operation| store.renew(operation, owner.token, LEASE)));
    for (operation, renewed) in all.iter().zip(within("renewals", renew()).await) {
        let error = renewed.expect_err(operation.id().key.as_str());
        assert_eq!((error.kind(), error.may_have_applied()), (StoreErrorKind::Timeout, false), "{error}");
    }
    somebody.query_drop("rollback").await.unwrap();
    let renewed: Vec<_> = within("renewals", renew()).await.into_iter().map(Result::unwrap).collect();
    use RenewOutcome::{Gone, Renewed};
    assert_eq!(renewed, [Gone, Renewed, Renewed, Renewed]);
}

/// One of the batch cannot be written: the others are found by halves, and it alone goes on beside them, at an easy pace.
#[tokio::test]
async fn a_batch_is_halved_until_one_job_alone_meets_a_lock() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    for key in ["a", "z"] {
        acquired(store.claim(&op(key), &take_over()).await.unwrap());
    }
    let (mut somebody, mut watcher) = (connect(&server, &database).await, connect(&server, &database).await);
    // No record is there, so a look shows nothing.
    for statement in [
        "set session transaction isolation level repeatable read",
        "start transaction",
        "select * from idempotency_keys where scope = 'shop' and `key` between 'c' and 'm' for update",
    ] {
        somebody.query_drop(statement).await.unwrap();
    }
    let before = looks(&mut watcher).await;
    let all = claims(&["A1", "A2", "A3", "A4", "g"].map(str::to_owned));
    let answers = within("claims", claim_all(&store, &all)).await;
    for ((operation, _), answer) in all.iter().zip(answers) {
        match answer.unwrap() {
            ClaimOutcome::InProgress { .. } => assert_eq!(operation.id().key.as_str(), "g"),
            other => drop(acquired(other)),
        }
    }
    assert_eq!(store.counters().alone, 1);
    // Five, then three, two and one of them meet it twice each, and the three parts that do not meet it are done at once.
    // By itself it is looked for within half a second, with pauses up to 20 ms.
    let (of_the_batch, alone) = (11, 5 + 24);
    let looked = looks(&mut watcher).await - before;
    assert!(looked <= of_the_batch + alone, "{looked} looks");
    somebody.query_drop("rollback").await.unwrap();
    acquired(store.claim(&op("g"), &take_over()).await.unwrap());
}

/// Somebody makes one of the records after the batch looked and before it writes: all are looked at once more, that one is
/// seen, and nobody is sent to wait alone.
#[tokio::test]
async fn a_record_made_between_look_and_write_is_found_by_the_next_look() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let network = FaultProxy::start(server.addr()).await;
    let url = format!("mysql://root@{}/{database}", network.addr());
    let store = MysqlStore::options(&url).unwrap().look_first().open().await.unwrap();
    let other = MysqlStore::open(&server.url(&database)).await.unwrap();
    let mut watcher = connect(&server, &database).await;
    for round in 0..20 {
        let all = claims(&["a", "b", "c", "d"].map(|key| format!("{key}{round}")));
        // Its connection is there, so that nothing but the look is under way.
        acquired(store.claim(&op(&format!("e{round}")), &take_over()).await.unwrap());
        let (before, alone) = (looks(&mut watcher).await, store.counters().alone);
        network.hold_replies(Duration::from_millis(300));
        let come_in_between = async {
            while looks(&mut watcher).await == before {}
            let came = other.claim(&all[1].0, &take_over()).await.unwrap();
            network.hold_replies(Duration::ZERO);
            matches!(came, ClaimOutcome::Acquired(_))
        };
        let (answers, came) = join(claim_all(&store, &all), come_in_between).await;
        // On a busy machine it may have been written by then.
        if !came {
            continue;
        }
        for (n, answer) in answers.into_iter().enumerate() {
            match answer.unwrap() {
                ClaimOutcome::InProgress { .. } => assert_eq!(n, 1),
                other => drop(acquired(other)),
            }
        }
        assert_eq!(looks(&mut watcher).await - before, 2);
        assert_eq!(store.counters().alone, alone);
        return;
    }
    panic!("the records are always written before anybody comes in between");
}
