//! What the server is asked to do, by its own count.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::HashMap;

use common::*;
use futures_util::future::join_all;
use onlyonce_core::{ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Store};
use onlyonce_store_mysql::MysqlStore;
use testkit::Mariadb;

/// Statements by kind, on a server that nobody else uses.
struct Counted {
    server: Mariadb,
    before: HashMap<String, u64>,
}

impl Counted {
    async fn start(server: Mariadb) -> Self {
        let before = counts(&server).await;
        Self { server, before }
    }

    async fn since(&mut self) -> impl Fn(&str) -> u64 + use<> {
        let after = counts(&self.server).await;
        let before = std::mem::replace(&mut self.before, after.clone());
        move |kind| after[kind] - before[kind]
    }
}

async fn counts(server: &Mariadb) -> HashMap<String, u64> {
    let rows = server
        .sql(
            "mysql",
            "show global status where variable_name like 'Com\\_%' or variable_name = 'Handler_commit'",
        )
        .await;
    let row = |line: &str| {
        let (name, count) = line.split_once('\t').unwrap();
        (name.to_owned(), count.parse().unwrap())
    };
    rows.lines().map(row).collect()
}

/// In the usual case an operation is one statement, which is its own transaction, and nothing is read.
#[tokio::test(flavor = "multi_thread")]
async fn one_caller_makes_one_statement_an_operation() {
    for query in ["", "?prepare=off"] {
        let server = Mariadb::private().await;
        let database = server.database().await;
        let store = MysqlStore::open(&format!("{}{query}", server.url(&database))).await.unwrap();
        let mut counted = Counted::start(server).await;
        const TIMES: u64 = 20;
        for n in 0..TIMES {
            let (operation, mine) = (op(&format!("done {n}")), take_over());
            acquired(store.claim(&operation, &mine).await.unwrap());
            assert_eq!(store.renew(&operation, mine.token, LEASE).await.unwrap(), RenewOutcome::Renewed);
            assert_eq!(store.mark_unknown(&operation, mine.token).await.unwrap(), ReleaseOutcome::Applied);
            let stored = store.complete(&operation, &done(mine.token, "x")).await.unwrap();
            assert!(matches!(stored, CompleteOutcome::Stored(_)));
            let (operation, mine) = (op(&format!("released {n}")), take_over());
            acquired(store.claim(&operation, &mine).await.unwrap());
            assert_eq!(store.release(&operation, mine.token).await.unwrap(), ReleaseOutcome::Applied);
        }
        let count = counted.since().await;
        assert_eq!(count("Com_insert"), 3 * TIMES, "claims and completions {query}");
        assert_eq!(count("Com_update"), 2 * TIMES, "renewals and marks {query}");
        assert_eq!(count("Com_delete_multi"), TIMES, "releases {query}");
        assert_eq!((count("Com_select"), count("Com_begin"), count("Com_commit")), (0, 0, 0), "{query}");

        // A replay is a claim that changed nothing, and one look; of a young reply also a commit, which waits for its log.
        for (age, written) in [("0", TIMES), ("2", 0)] {
            let ago = format!(
                "update idempotency_keys set completed_at = completed_at - interval {age} minute,
                    expires_at = expires_at - interval {age} minute where status = 'completed'"
            );
            counted.server.sql(&database, &ago).await;
            drop(counted.since().await);
            for n in 0..TIMES {
                completed(store.claim(&op(&format!("done {n}")), &take_over()).await.unwrap());
            }
            let count = counted.since().await;
            assert_eq!(
                (count("Com_insert"), count("Com_select"), count("Com_begin"), count("Com_commit")),
                (TIMES + written, TIMES, written, written),
                "{query} after {age} minutes"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_callers_share_few_commits() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    let mut counted = Counted::start(server).await;
    let tokens: Vec<_> = (0..1000).map(|_| take_over()).collect();
    let claims = tokens.iter().enumerate().map(|(n, mine)| {
        let store = store.clone();
        async move { store.claim(&op(&format!("k{n}")), mine).await.unwrap() }
    });
    for claim in join_all(claims).await {
        assert!(matches!(claim, ClaimOutcome::Acquired(_)));
    }
    let count = counted.since().await;
    assert!(count("Com_insert") <= 50, "{} statements for a thousand claims", count("Com_insert"));
    let completions = tokens.iter().enumerate().map(|(n, mine)| {
        let store = store.clone();
        async move { store.complete(&op(&format!("k{n}")), &done(mine.token, "x")).await.unwrap() }
    });
    for completion in join_all(completions).await {
        assert!(matches!(completion, CompleteOutcome::Stored(_)));
    }
    let count = counted.since().await;
    assert!(count("Com_insert") <= 50, "{} statements for a thousand completions", count("Com_insert"));
    assert_eq!(count("Com_select"), 0);
}

/// Of claims that are asked at once, those that are usual are done by the one statement, whatever the others meet.
#[tokio::test]
async fn who_meets_nobody_is_done_whatever_others_of_the_batch_meet() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    acquired(store.claim(&op("k7"), &take_over()).await.unwrap());
    let mut counted = Counted::start(server).await;
    // Asked in one go on one thread, they are one batch.
    let all: Vec<_> = (0..20).map(|n| (op(&format!("k{n}")), take_over())).collect();
    let claims = join_all(all.iter().map(|(operation, mine)| store.claim(operation, mine))).await;
    for (n, claim) in claims.into_iter().enumerate() {
        match claim.unwrap() {
            ClaimOutcome::InProgress { .. } => assert_eq!(n, 7),
            other => assert_eq!((acquired(other).attempt, n == 7), (1, false)),
        }
    }
    let count = counted.since().await;
    let asked = ["Com_insert", "Com_select", "Com_begin"].map(count);
    assert_eq!(asked, [1, 1, 0], "one look for all, and nothing is written again");
}

/// Of completions that are asked at once each is told what became of it.
#[tokio::test]
async fn completions_of_one_batch_are_each_told_what_became_of_them() {
    let (_server, _database, store) = store().await;
    let all: Vec<_> = (0..20).map(|n| (op(&format!("k{n}")), take_over())).collect();
    for (n, (operation, mine)) in all.iter().enumerate() {
        if n != 3 {
            acquired(store.claim(operation, mine).await.unwrap());
        }
    }
    store.complete(&all[7].0, &done(all[7].1.token, "first")).await.unwrap();
    let batches = store.counters().batches;
    let completions: Vec<_> =
        all.iter().map(|(operation, mine)| (operation, done(mine.token, "second"))).collect();
    let ends = join_all(completions.iter().map(|(operation, done)| store.complete(operation, done))).await;
    assert_eq!(store.counters().batches, batches + 1);
    for (n, end) in ends.into_iter().enumerate() {
        match (n, end.unwrap()) {
            (3, CompleteOutcome::StoredAnew(stored)) => assert_eq!(stored.reply.body(), "second"),
            (7, CompleteOutcome::AlreadyStored(stored)) => assert_eq!(stored.reply.body(), "first"),
            (n, CompleteOutcome::Stored(stored)) if n != 3 && n != 7 => {
                assert_eq!(stored.reply.body(), "second");
            }
            (n, other) => panic!("{n}: {other:?}"),
        }
    }
}
