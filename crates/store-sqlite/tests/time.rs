//! Leases and retention under steps of the wall clock and across reboots.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreErrorKind,
    TestClock,
};
use onlyonce_store_sqlite::SqliteStore;

const HOUR: Duration = Duration::from_secs(3600);

async fn open(path: &Path, clock: &TestClock, boot: &str) -> SqliteStore {
    SqliteStore::options(path).clock(Arc::new(clock.clone())).boot_id(boot).open().await.unwrap()
}

fn purge() -> PurgeRequest {
    PurgeRequest::default()
}

#[tokio::test]
async fn a_step_of_the_wall_clock_moves_no_lease() {
    for step in [TestClock::step_wall_forward, TestClock::step_wall_back] {
        let (_folder, path) = place();
        let clock = TestClock::new();
        let store = open(&path, &clock, "a").await;
        let (first, second) = (take_over(), take_over());
        acquired(store.claim(&op("k"), &first).await.unwrap());
        step(&clock, HOUR);
        // Another process that starts after the step agrees.
        let other = open(&path, &clock, "a").await;
        for store in [&store, &other] {
            assert!(matches!(
                store.claim(&op("k"), &second).await.unwrap(),
                ClaimOutcome::InProgress { lease_left, .. } if lease_left == LEASE
            ));
        }
        // No stuck lease either.
        clock.advance(LEASE);
        assert_eq!(acquired(other.claim(&op("k"), &second).await.unwrap()).attempt, 2);
        assert_eq!(store.renew(&op("k"), first.token, LEASE).await.unwrap(), RenewOutcome::Fenced);
        let stored = store.complete(&op("k"), &done(second.token, "x")).await.unwrap();
        assert!(matches!(stored, CompleteOutcome::Stored(_)));
    }
}

#[tokio::test]
async fn a_step_forward_expires_no_reply_and_pauses_the_purge() {
    let (_folder, path) = place();
    let clock = TestClock::new();
    let before = open(&path, &clock, "a").await;
    let first = take_over();
    acquired(before.claim(&op("of the boot before"), &first).await.unwrap());
    before.complete(&op("of the boot before"), &done(first.token, "x")).await.unwrap();
    drop(before);

    let store = open(&path, &clock, "b").await;
    let second = take_over();
    acquired(store.claim(&op("k"), &second).await.unwrap());
    store.complete(&op("k"), &done(second.token, "x")).await.unwrap();
    clock.step_wall_forward(100 * 24 * HOUR);
    let other = open(&path, &clock, "b").await;
    for store in [&store, &other] {
        completed(store.claim(&op("k"), &take_over()).await.unwrap());
        completed(store.claim(&op("of the boot before"), &take_over()).await.unwrap());
        let purged = store.purge(&purge()).await.unwrap();
        assert_eq!(purged, Purged { removed: 0, more: false, paused: true });
    }
    // Stepped back to where it was: nothing happened.
    clock.step_wall_back(100 * 24 * HOUR);
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged::default());
    // By the boot clock they do expire.
    clock.advance(RETENTION);
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged { removed: 2, more: false, paused: false });
}

#[tokio::test]
async fn the_purge_pauses_when_the_clocks_part_by_over_a_minute() {
    for step in [TestClock::step_wall_forward, TestClock::step_wall_back] {
        let (_folder, path) = place();
        let clock = TestClock::new();
        let store = open(&path, &clock, "a").await;
        step(&clock, Duration::from_secs(60));
        assert_eq!(store.purge(&purge()).await.unwrap(), Purged::default());
        step(&clock, Duration::from_millis(1));
        assert!(store.purge(&purge()).await.unwrap().paused);
    }
}

#[tokio::test]
async fn a_step_that_has_stood_for_an_hour_is_accepted_by_all() {
    let (_folder, path) = place();
    let clock = TestClock::new();
    let store = open(&path, &clock, "a").await;
    let other = open(&path, &clock, "a").await;
    let request = take_over();
    acquired(store.claim(&op("k"), &request).await.unwrap());
    store.complete(&op("k"), &done(request.token, "x")).await.unwrap();
    let old = take_over();
    acquired(store.claim(&op("old"), &old).await.unwrap());
    let kept = onlyonce_core::Completion { retention: 72 * HOUR, ..done(old.token, "x") };
    store.complete(&op("old"), &kept).await.unwrap();
    let long = onlyonce_core::ClaimRequest { lease: 3 * HOUR, ..take_over() };
    acquired(store.claim(&op("leased"), &long).await.unwrap());
    acquired(store.claim(&op("given up"), &long).await.unwrap());

    clock.step_wall_forward(48 * HOUR);
    assert!(store.purge(&purge()).await.unwrap().paused);
    clock.advance(HOUR);
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged::default());
    assert_eq!(other.purge(&purge()).await.unwrap(), Purged::default());
    // What was written in this boot lives on by the boot clock, on both scales.
    let fresh = take_over();
    acquired(other.claim(&op("fresh"), &fresh).await.unwrap());
    for store in [&store, &other] {
        completed(store.claim(&op("k"), &take_over()).await.unwrap());
        assert!(matches!(
            store.claim(&op("leased"), &take_over()).await.unwrap(),
            ClaimOutcome::InProgress { lease_left, age, .. } if lease_left == 2 * HOUR && age == HOUR
        ));
        assert!(matches!(
            store.claim(&op("fresh"), &take_over()).await.unwrap(),
            ClaimOutcome::InProgress { lease_left, .. } if lease_left == LEASE
        ));
    }
    // The owner of an older scale gives up, renews and completes.
    let given_up = store.mark_unknown(&op("given up"), long.token).await.unwrap();
    assert_eq!(given_up, ReleaseOutcome::Applied);
    let now = onlyonce_core::Clock::wall(&clock);
    assert!(matches!(
        other.claim(&op("given up"), &take_over()).await.unwrap(),
        ClaimOutcome::Unknown { since, .. } if since <= now
    ));
    assert_eq!(store.renew(&op("leased"), long.token, HOUR).await.unwrap(), RenewOutcome::Renewed);
    clock.advance(HOUR - Duration::from_millis(1));
    assert!(matches!(
        other.claim(&op("leased"), &take_over()).await.unwrap(),
        ClaimOutcome::InProgress { lease_left, .. } if lease_left == Duration::from_millis(1)
    ));
    assert!(matches!(
        store.complete(&op("leased"), &done(long.token, "x")).await.unwrap(),
        CompleteOutcome::Stored(_)
    ));
    clock.advance(22 * HOUR + Duration::from_millis(1));
    assert_eq!(store.purge(&purge()).await.unwrap().removed, 1);
    // After a reboot the corrected difference holds for what was written before the correction.
    let rebooted = open(&path, &clock, "b").await;
    completed(rebooted.claim(&op("leased"), &take_over()).await.unwrap());
    completed(rebooted.claim(&op("old"), &take_over()).await.unwrap());
    clock.advance(2 * HOUR);
    acquired(rebooted.claim(&op("leased"), &take_over()).await.unwrap());
}

#[tokio::test]
async fn a_reboot_ends_leases_and_keeps_replies() {
    let (_folder, path) = place();
    let clock = TestClock::new();
    let store = open(&path, &clock, "a").await;
    let (taken, held, finished) = (take_over(), hold(), take_over());
    acquired(store.claim(&op("taken"), &taken).await.unwrap());
    acquired(store.claim(&op("held"), &held).await.unwrap());
    acquired(store.claim(&op("finished"), &finished).await.unwrap());
    store.complete(&op("finished"), &done(finished.token, "x")).await.unwrap();
    drop(store);

    clock.advance(Duration::from_secs(1));
    let store = open(&path, &clock, "b").await;
    assert_eq!(acquired(store.claim(&op("taken"), &take_over()).await.unwrap()).attempt, 2);
    let now = onlyonce_core::Clock::wall(&clock);
    assert!(matches!(
        store.claim(&op("held"), &hold()).await.unwrap(),
        ClaimOutcome::Unknown { since, .. } if since <= now
    ));
    completed(store.claim(&op("finished"), &take_over()).await.unwrap());
    // A token that survived, in a process that was restored: its completion still counts.
    assert!(matches!(
        store.complete(&op("held"), &done(held.token, "late")).await.unwrap(),
        CompleteOutcome::Stored(_)
    ));
    assert_eq!(completed(store.claim(&op("held"), &hold()).await.unwrap()).body(), "late");
    clock.advance(RETENTION - Duration::from_secs(1));
    acquired(store.claim(&op("finished"), &take_over()).await.unwrap());
}

#[tokio::test]
async fn a_purge_walks_its_indexes_in_small_transactions() {
    let (_folder, path) = place();
    let clock = TestClock::new();
    let store = open(&path, &clock, "a").await;
    let all = (0..750).map(|n| {
        let store = store.clone();
        async move {
            let (op, request) = (op(&format!("k{n}")), take_over());
            acquired(store.claim(&op, &request).await.unwrap());
            store.complete(&op, &done(request.token, "x")).await.unwrap();
        }
    });
    futures_util::future::join_all(all).await;
    clock.advance(RETENTION);
    let before = store.counters().commits;
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged { removed: 500, more: true, paused: false });
    assert_eq!(store.counters().commits - before, 5);
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged { removed: 250, more: false, paused: false });
    assert_eq!(store.purge(&purge()).await.unwrap(), Purged::default());
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_never_acquired() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let changes = [
        "status = 'paused'",
        "request_hash = 'md5:0'",
        "token = x'00'",
        "on_lease_end = 'ask'",
        "attempt = -1",
        "clock = 77",
        "status = 'completed', expires_at = 9e15, completed_at = 0, response_code = 200,
            response_headers = CAST(':onlyonce 9' || char(10) AS BLOB), response_body = x''",
        "status = 'completed'",
    ];
    for (n, change) in changes.iter().enumerate() {
        let (bad, good) = (op(&format!("bad{n}")), op(&format!("good{n}")));
        let request = take_over();
        acquired(store.claim(&bad, &request).await.unwrap());
        let key = bad.key().as_str();
        let sql = format!("UPDATE idempotency_keys SET {change} WHERE key = '{key}'");
        assert_eq!(beside(&path).execute(&sql, []).unwrap(), 1, "{change}");
        let other = take_over();
        // In one batch with a good one, which it does not disturb.
        let (refused, fine) = tokio::join!(store.claim(&bad, &other), store.claim(&good, &request));
        assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Unreadable, "{change}");
        acquired(fine.unwrap());
    }
}
