//! Batches, locks and bounds on a real server.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, PurgeRequest, ReleaseOutcome, RenewOutcome, Reply, StateName, Store,
    StoreAdmin, StoreErrorKind,
};
use onlyonce_store_postgres::{PostgresStore, tokio_postgres};
use testkit::{wait_for, within};

/// A session beside the store, as another program has.
async fn beside(place: &Place) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(&place.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn commits(place: &Place) -> u64 {
    // A session reports when it goes idle, at most once a second; reading it flushes its own.
    let sql = format!(
        "select pg_stat_force_next_flush(), xact_commit from pg_stat_database where datname = '{}'",
        place.database
    );
    place.server.psql("postgres", &sql).await.trim_start_matches('|').parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_caller_costs_one_batch_and_a_thousand_at_most_fifty() {
    let place = place().await;
    let store = place.open().await;
    let before = store.counters();
    acquired(store.claim(&op("one"), &hold()).await.unwrap());
    let one = store.counters();
    assert_eq!((one.batches - before.batches, one.operations - before.operations), (1, 1));
    let claims = (0..1000).map(|n| {
        let store = store.clone();
        tokio::spawn(async move { store.claim(&op(&format!("k{n}")), &hold()).await.unwrap() })
    });
    for claim in claims.collect::<Vec<_>>() {
        acquired(claim.await.unwrap());
    }
    let batches = store.counters().batches - one.batches;
    assert!(batches <= 50, "{batches} batches");
    let sql = "select count(distinct xmin::text) from idempotency_keys";
    let transactions: u64 = place.psql(sql).await.parse().unwrap();
    assert!(transactions <= 51, "{transactions} transactions");
    assert!(commits(&place).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_locked_for_a_moment_stops_nobody_afterwards() {
    let place = place().await;
    let store = place.open().await;
    acquired(store.claim(&op("before"), &hold()).await.unwrap());
    let mut beside = beside(&place).await;
    // As CREATE INDEX does. Statements that nobody prepared yet fail in the middle of their transaction.
    let lock = beside.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE idempotency_keys IN SHARE MODE").await.unwrap();
    let during = store.claim(&op("during"), &hold()).await;
    assert!(!matches!(during, Ok(ClaimOutcome::Acquired(_))), "{during:?}");
    lock.rollback().await.unwrap();
    for n in 0..20 {
        acquired(store.claim(&op(&format!("after {n}")), &hold()).await.unwrap());
    }
    let aborted = "select count(*) from pg_stat_activity where state like '%(aborted)'";
    assert_eq!(place.psql(aborted).await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_found_by_its_key_and_by_no_index_of_the_purge() {
    let place = place().await;
    drop(place.open().await);
    // All but a few are completed, so that the index of the others looks as if it were the shorter way to any of them.
    place
        .psql(
            "insert into idempotency_keys select 's', gen_random_uuid()::text, repeat('0', 64), 'completed', 201, '', '',
                now(), now(), now(), now(), now() + interval '1 day', gen_random_uuid(), 1, 'hold', null
             from generate_series(1, 20000)",
        )
        .await;
    place.psql("vacuum analyze idempotency_keys").await;
    let store = place.open().await;
    for n in 0..20 {
        let [stored, freed, marked] = ["stored", "freed", "marked"].map(|name| op(&format!("{name}{n}")));
        for operation in [&stored, &freed, &marked] {
            let lease = acquired(store.claim(operation, &hold()).await.unwrap());
            let renewed = store.renew(operation, lease.token, Duration::from_secs(30)).await.unwrap();
            assert_eq!(renewed, RenewOutcome::Renewed);
            if operation == &stored {
                let completed = store.complete(operation, &done(lease.token, "done")).await.unwrap();
                assert!(matches!(completed, CompleteOutcome::Stored(_)), "{completed:?}");
                let again = store.claim(operation, &hold()).await.unwrap();
                assert!(matches!(again, ClaimOutcome::Completed(_)), "{again:?}");
            } else if operation == &freed {
                store.release(operation, lease.token).await.unwrap();
            } else {
                store.mark_unknown(operation, lease.token).await.unwrap();
            }
        }
        let mut client = beside(&place).await;
        let work = async move |_: &mut tokio_postgres::Transaction<'_>| Ok(Reply::new(201, "done"));
        store.once(&mut client, &op(&format!("once{n}")), work).await.unwrap();
    }
    store.close().await;
    let sql = "select coalesce(sum(idx_scan), 0) from pg_stat_user_indexes
        where indexrelname in ('idempotency_keys_lease', 'idempotency_keys_expiry')";
    let by_key = "select idx_scan from pg_stat_user_indexes where indexrelname = 'idempotency_keys_pkey'";
    // What a session did is counted when it is idle, or at its end.
    wait_for("the server has counted", async || {
        (place.psql(by_key).await.parse::<u64>().unwrap() > 200).then_some(())
    })
    .await;
    assert_eq!(place.psql(sql).await, "0", "scans of the indexes of the purge");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_everything_answers_each() {
    let place = place().await;
    let store = place.open().await;
    // Forty operations in each state, then every question to each of them at once, again and again.
    let request = take_over();
    for round in 0..5 {
        let name = |kind: &str, n: usize| format!("{round} {kind} {n}");
        let jobs = (0..40).map(|n| {
            let (store, request) = (store.clone(), request.clone());
            let names = ["a", "b", "c", "d"].map(|kind| name(kind, n));
            tokio::spawn(async move {
                let ops = names.map(|name| op(&name));
                let claims = ops.iter().map(|op| store.claim(op, &request));
                for outcome in futures_util::future::join_all(claims).await {
                    acquired(outcome.unwrap());
                }
                let completion = done(request.token, format!("reply {n}"));
                let [a, b, c, d] = &ops;
                let (completed_now, renewed, marked, released) = tokio::join!(
                    store.complete(a, &completion),
                    store.renew(b, request.token, LEASE),
                    store.mark_unknown(c, request.token),
                    store.release(d, request.token),
                );
                assert!(matches!(completed_now.unwrap(), CompleteOutcome::Stored(_)));
                assert_eq!(renewed.unwrap(), RenewOutcome::Renewed);
                assert_eq!(marked.unwrap(), ReleaseOutcome::Applied);
                assert_eq!(released.unwrap(), ReleaseOutcome::Applied);
                let other = take_over();
                let claims = ops.iter().map(|op| store.claim(op, &other));
                let outcomes = futures_util::future::join_all(claims).await;
                let [a, b, c, d] = <[_; 4]>::try_from(outcomes).unwrap().map(Result::unwrap);
                assert_eq!(completed(a).body(), format!("reply {n}").as_bytes());
                assert!(matches!(b, ClaimOutcome::InProgress { .. }), "{b:?}");
                assert!(matches!(c, ClaimOutcome::Unknown { .. }), "{c:?}");
                acquired(d);
            })
        });
        for job in jobs.collect::<Vec<_>>() {
            job.await.unwrap();
        }
    }
}

/// Whoever inserts, changes or merely locks a record in an open transaction, and knows nothing of this store.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_on_one_operation_delays_nobody_else() {
    let place = place().await;
    let store = place.open().await;
    let (owner, other) = (take_over(), take_over());
    acquired(store.claim(&op("changed"), &owner).await.unwrap());
    acquired(store.claim(&op("locked"), &owner).await.unwrap());
    let client = beside(&place).await;
    client
        .batch_execute(
            "begin;
             insert into idempotency_keys (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
                attempt, on_lease_end)
                select scope, 'inserted', request_hash, status, locked_until, created_at, claimed_at, token, attempt,
                    on_lease_end from idempotency_keys where key = 'changed';
             update idempotency_keys set origin = 'somebody' where key = 'changed';
             select * from idempotency_keys where key = 'locked' for update;",
        )
        .await
        .unwrap();
    // All of this happens while that transaction is open: nobody ends it.
    for round in 0..20 {
        let pairs = (0..50).map(|n| {
            let store = store.clone();
            tokio::spawn(async move { pair(&store, &format!("{round} {n}")).await.unwrap() })
        });
        let pairs: Vec<_> = pairs.collect();
        let (inserted, changed) = (op("inserted"), op("changed"));
        let (a, b) = tokio::join!(store.claim(&inserted, &other), store.claim(&changed, &other));
        assert!(matches!(a.unwrap(), ClaimOutcome::InProgress { .. }));
        assert!(matches!(b.unwrap(), ClaimOutcome::InProgress { .. }));
        for pair in pairs {
            within("a pair on another key", pair).await.unwrap();
        }
    }
    // An owner's own operation waits for a while, and is told to come again.
    let error = store.complete(&op("locked"), &done(owner.token, "done")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{}", chain(&error));
    assert!(error.retryable());
    client.batch_execute("rollback").await.unwrap();
    let stored = store.complete(&op("locked"), &done(owner.token, "done")).await.unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_)));
    assert_eq!(store.renew(&op("changed"), owner.token, LEASE).await.unwrap(), RenewOutcome::Renewed);
    acquired(
        wait_for("it is free", async || {
            let outcome = store.claim(&op("inserted"), &other).await.unwrap();
            matches!(outcome, ClaimOutcome::Acquired(_)).then_some(outcome)
        })
        .await,
    );
}

/// A transaction that holds the lock of an operation, as the transactional mode does before it inserts anything.
#[tokio::test(flavor = "multi_thread")]
async fn who_holds_the_lock_of_an_operation_is_not_waited_for() {
    let place = place().await;
    let store = place.open().await;
    let held = op_of("merchant-1", "order-7", "body");
    let client = beside(&place).await;
    client.batch_execute(&format!("begin; select pg_advisory_xact_lock({LOCK_OF_ORDER_7})")).await.unwrap();
    let request = take_over();
    let (claim, others) = tokio::join!(
        store.claim(&held, &request),
        futures_util::future::join_all((0..200).map(|n| {
            let store = store.clone();
            async move { pair(&store, &format!("k{n}")).await }
        }))
    );
    assert!(matches!(claim.unwrap(), ClaimOutcome::InProgress { .. }));
    others.into_iter().for_each(|pair| pair.unwrap());
    assert_eq!(place.psql("select count(*) from idempotency_keys where key = 'order-7'").await, "0");
    client.batch_execute("commit").await.unwrap();
    acquired(store.claim(&held, &request).await.unwrap());
    // A stored reply is answered though somebody holds the lock.
    store.complete(&held, &done(request.token, "done")).await.unwrap();
    client.batch_execute(&format!("begin; select pg_advisory_xact_lock({LOCK_OF_ORDER_7})")).await.unwrap();
    completed(store.claim(&held, &take_over()).await.unwrap());
}

/// What an owner asks while somebody holds its lock is done once that one is gone, and the same as at any other time.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_waited_for_its_lock_gets_what_it_asked_for() {
    let place = place().await;
    let options = PostgresStore::options(&place.url).unwrap();
    let store = options.patience(Duration::from_secs(60)).open().await.unwrap();
    let client = beside(&place).await;
    let begin = format!("begin; select pg_advisory_xact_lock({LOCK_OF_ORDER_7})");
    let waiters = "select from pg_locks where locktype = 'advisory' and not granted
        and database = (select oid from pg_database where datname = current_database())";
    // Begins the holder's transaction, and ends it when it is waited for.
    let lock = async || client.batch_execute(&begin).await.unwrap();
    let until_waited = async || {
        wait_for("the owner waits", async || {
            (!client.query(waiters, &[]).await.unwrap().is_empty()).then_some(())
        })
        .await;
        client.batch_execute("commit").await.unwrap();
    };
    let op = op_of("merchant-1", "order-7", "body");
    let view = async || store.show(op.id()).await.unwrap().unwrap();

    let given_back = take_over();
    acquired(store.claim(&op, &given_back).await.unwrap());
    lock().await;
    let (released, ()) = tokio::join!(store.release(&op, given_back.token), until_waited());
    assert_eq!(released.unwrap(), ReleaseOutcome::Applied);
    assert_eq!(store.show(op.id()).await.unwrap(), None);

    let owner = take_over();
    acquired(store.claim(&op, &owner).await.unwrap());
    let claimed = view().await;
    lock().await;
    let (renewed, ()) = tokio::join!(store.renew(&op, owner.token, LEASE * 10), until_waited());
    assert_eq!(renewed.unwrap(), RenewOutcome::Renewed);
    let renewed = view().await;
    assert_eq!((renewed.state, renewed.created_at), (StateName::InProgress, claimed.created_at));
    assert!(renewed.lease_left.unwrap() > LEASE * 5, "{renewed:?}");

    lock().await;
    let (marked, ()) = tokio::join!(store.mark_unknown(&op, owner.token), until_waited());
    assert_eq!(marked.unwrap(), ReleaseOutcome::Applied);
    let marked = view().await;
    assert_eq!(marked.state, StateName::Unknown);
    assert!(marked.locked_until < renewed.locked_until - LEASE * 5, "since it was marked: {marked:?}");
    // It is unknown since the first mark.
    lock().await;
    let (again, ()) = tokio::join!(store.mark_unknown(&op, owner.token), until_waited());
    assert_eq!((again.unwrap(), view().await), (ReleaseOutcome::Applied, marked));

    let (completion, late) = (done(owner.token, "done"), done(owner.token, "again"));
    lock().await;
    let (stored, ()) = tokio::join!(store.complete(&op, &completion), until_waited());
    let CompleteOutcome::Stored(stored) = stored.unwrap() else { panic!("stored") };
    assert_eq!(stored.reply.body(), "done");
    assert_eq!(completed(store.claim(&op, &hold()).await.unwrap()), stored.reply);
    lock().await;
    let (again, ()) = tokio::join!(store.complete(&op, &late), until_waited());
    assert!(matches!(again.unwrap(), CompleteOutcome::AlreadyStored(first) if first.reply == stored.reply));
    let ended = view().await;
    assert_eq!((ended.created_at, ended.expires_at), (claimed.created_at, Some(stored.expires_at)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_and_a_dropped_claim_is_not_made() {
    let place = place().await;
    let options = PostgresStore::options(&place.url).unwrap();
    let store = options.lanes(1).queue_max(5).patience(Duration::from_secs(60)).open().await.unwrap();
    let client = beside(&place).await;
    // The lane stands: its statement waits for the table.
    client.batch_execute("begin; lock table idempotency_keys in access exclusive mode").await.unwrap();
    let claims: Vec<_> = (0..20)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.claim(&op(&format!("k{n}")), &hold()).await })
        })
        .collect();
    let refused = wait_for("claims are refused", async || {
        let refused = claims.iter().filter(|claim| claim.is_finished()).count();
        (refused > 0).then_some(refused)
    })
    .await;
    assert!(refused < 20);
    // Their callers give up, those that were sent aside.
    claims.iter().for_each(tokio::task::JoinHandle::abort);
    client.batch_execute("rollback").await.unwrap();
    for claim in claims {
        if let Ok(Err(error)) = claim.await {
            assert_eq!(error.kind(), StoreErrorKind::Overloaded);
            assert!(!error.may_have_applied());
        }
    }
    // Those who gave up leave their places when it is their turn.
    wait_for("there is room again", async || pair(&store, "afterwards").await.ok()).await;
    let made: u64 = place.psql("select count(*) from idempotency_keys").await.parse().unwrap();
    assert!(made <= 8, "{made} claims were made");
}

#[tokio::test]
async fn long_replies_fit_many_to_a_batch() {
    let place = place().await;
    let store = place.open().await;
    let request = take_over();
    let ops: Vec<_> = (0..40).map(|n| op(&format!("k{n}"))).collect();
    for claim in futures_util::future::join_all(ops.iter().map(|op| store.claim(op, &request))).await {
        acquired(claim.unwrap());
    }
    let long: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let completion = done(request.token, long.clone());
    let stored = futures_util::future::join_all(ops.iter().map(|op| store.complete(op, &completion))).await;
    assert!(stored.into_iter().all(|stored| matches!(stored.unwrap(), CompleteOutcome::Stored(_))));
    let other = take_over();
    for claim in futures_util::future::join_all(ops.iter().map(|op| store.claim(op, &other))).await {
        assert_eq!(completed(claim.unwrap()).body(), &long);
    }
}

#[tokio::test]
async fn retentions_and_leases_of_ten_years_do_not_overflow() {
    let place = place().await;
    let store = place.open().await;
    let ten_years = Duration::from_secs(10 * 365 * 24 * 3600);
    let request = onlyonce_core::ClaimRequest { lease: ten_years, ..take_over() };
    acquired(store.claim(&op("k"), &request).await.unwrap());
    let completion =
        onlyonce_core::Completion { retention: ten_years, reply: Reply::ok("x"), ..done(request.token, "") };
    let CompleteOutcome::Stored(stored) = store.complete(&op("k"), &completion).await.unwrap() else {
        panic!("stored")
    };
    let years =
        place.psql("select extract(year from expires_at) - extract(year from now()) from idempotency_keys");
    assert!(["9", "10"].contains(&years.await.as_str()));
    let ClaimOutcome::Completed(again) = store.claim(&op("k"), &take_over()).await.unwrap() else {
        panic!("completed")
    };
    assert_eq!((again.completed_at, again.expires_at), (stored.completed_at, stored.expires_at));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_skips_what_is_locked_and_says_exactly_whether_more_is_left() {
    let place = place().await;
    let store = place.open().await;
    for n in 0..12 {
        pair(&store, &format!("k{n:02}")).await.unwrap();
    }
    place.psql("update idempotency_keys set expires_at = now() - interval '1 hour' where key < 'k10'").await;
    let client = beside(&place).await;
    client
        .batch_execute("begin; select * from idempotency_keys where key in ('k00', 'k01') for update")
        .await
        .unwrap();
    let purge = async |limit| {
        let request = PurgeRequest { limit, ..PurgeRequest::default() };
        let purged = store.purge(&request).await.unwrap();
        (purged.removed, purged.more)
    };
    assert_eq!(purge(3).await, (3, true));
    assert_eq!(purge(100).await, (5, false), "what is locked is not waited for");
    client.batch_execute("rollback").await.unwrap();
    assert_eq!(purge(2).await, (2, false));
    assert_eq!(purge(2).await, (0, false));
    assert_eq!(place.psql("select string_agg(key, ',' order by key) from idempotency_keys").await, "k10,k11");
}
