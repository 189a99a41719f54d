//! What is over leaves, in bounded batches, while everything else goes on.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use onlyonce_core::{ClaimOutcome, PurgeRequest, Store, StoreAdmin};
use onlyonce_store_mysql::{MysqlStore, mysql_async};

/// Records by the thousand, all alike but for their keys.
const FILL: &str = "insert into idempotency_keys (scope, `key`, request_hash, status, response_code, response_headers,
    response_body, locked_until, created_at, claimed_at, completed_at, expires_at, token, attempt, on_lease_end)
    select 'shop', concat('old ', md5(seq)), concat('sha256:', repeat('0', 16), ':', repeat('0', 64)), 'completed', 200,
    ':onlyonce 1\\n', 'x', utc_timestamp(6), utc_timestamp(6), utc_timestamp(6), utc_timestamp(6),
    utc_timestamp(6) - interval 1 day, repeat('t', 16), 1, 'hold' from seq_1_to_";

#[tokio::test(flavor = "multi_thread")]
async fn the_index_is_walked_and_not_the_table() {
    let (server, database, store) = store().await;
    server.sql(&database, &format!("{FILL}20000; update idempotency_keys set expires_at = utc_timestamp(6) + interval 1 day where `key` >= 'old 1'; analyze table idempotency_keys")).await;
    let over = server.sql(&database, "select count(*) from idempotency_keys where `key` < 'old 1'").await;
    let over: u64 = over.lines().last().unwrap().parse().unwrap();
    assert!((500..3000).contains(&over), "{over}");
    let limit = 400;
    let request = PurgeRequest { limit, ..PurgeRequest::default() };
    let first = store.purge(&request).await.unwrap();
    assert_eq!((first.removed, first.more), (limit.into(), true));
    let mut removed = first.removed;
    loop {
        let purged = store.purge(&request).await.unwrap();
        removed += purged.removed;
        if !purged.more {
            break;
        }
    }
    assert_eq!(removed, over);
    assert_eq!(store.stats().await.unwrap().completed, 20_000 - over);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_holds_is_passed_over_and_left_for_the_next() {
    let (server, database, store) = store().await;
    server.sql(&database, &format!("{FILL}600")).await;
    let mut somebody =
        Conn::from_url(format!("{}?prefer_socket=false", server.url(&database))).await.unwrap();
    somebody.query_drop("start transaction").await.unwrap();
    let held: Vec<String> =
        somebody
        .query("select `key` from idempotency_keys force index (primary) order by scope, `key` limit 5 for update")
        .await
        .unwrap();
    let request = PurgeRequest { limit: 10_000, ..PurgeRequest::default() };
    let first = store.purge(&request).await.unwrap();
    assert_eq!((first.removed, first.more), (595, false), "it does not turn around the rest");
    let left = server.sql(&database, "select `key` from idempotency_keys order by `key`").await;
    assert_eq!(left.lines().collect::<Vec<_>>(), held);
    somebody.query_drop("rollback").await.unwrap();
    assert_eq!(store.purge(&request).await.unwrap().removed, 5);
}

/// Several instances purge at once and share the work.
#[tokio::test(flavor = "multi_thread")]
async fn purges_of_several_instances_share_the_work() {
    let (server, database, store) = store().await;
    server.sql(&database, &format!("{FILL}5000")).await;
    let mut purgers = Vec::new();
    for _ in 0..4 {
        let store = MysqlStore::open(&server.url(&database)).await.unwrap();
        purgers.push(tokio::spawn(async move {
            let mut removed = 0;
            while let purged = store.purge(&PurgeRequest::default()).await.unwrap()
                && purged.more
            {
                removed += purged.removed;
            }
            removed
        }));
    }
    // New work goes on meanwhile.
    for n in 0..200 {
        acquired(store.claim(&op(&format!("new {n}")), &take_over()).await.unwrap());
    }
    let mut removed = 0;
    for purger in purgers {
        removed += purger.await.unwrap();
    }
    removed += store.purge(&PurgeRequest { limit: 10_000, ..PurgeRequest::default() }).await.unwrap().removed;
    let left = server.sql(&database, "select count(*) from idempotency_keys").await;
    assert_eq!(left, "200");
    assert!(removed <= 5000, "{removed}");
    assert!(matches!(
        store.claim(&op("new 0"), &take_over()).await.unwrap(),
        ClaimOutcome::InProgress { .. }
    ));
    let held = PurgeRequest { hold_retention: Duration::from_secs(3600), ..PurgeRequest::default() };
    assert_eq!(store.purge(&held).await.unwrap().removed, 0, "live leases stay");
}
