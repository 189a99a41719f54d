//! Somebody's open transaction on one record, and everybody else.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::time::Duration;

use common::*;
use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder};
use onlyonce_core::{
    ClaimOutcome, Clock, CompleteOutcome, PurgeRequest, ReleaseOutcome, RenewOutcome, Reply, Store,
    StoreErrorKind, SystemClock,
};
use onlyonce_store_mysql::{MysqlStore, OnceOutcome, Options, Transaction, TxClaim, TxOptions, mysql_async};
use testkit::{Mariadb, within};

/// What somebody did to the record of `held`, and has not committed.
const HOLDS: [(&str, &str); 4] = [
    (
        "inserted",
        "insert into idempotency_keys select scope, 'held', request_hash, status, response_code, response_headers, \
         response_body, locked_until, created_at, claimed_at, completed_at, expires_at, token, attempt, on_lease_end, \
         origin from idempotency_keys where `key` = 'sample'",
    ),
    ("updated", "update idempotency_keys set attempt = 7 where `key` = 'held'"),
    ("deleted", "delete from idempotency_keys where `key` = 'held'"),
    ("locked", "select * from idempotency_keys where `key` = 'held' for update"),
];

async fn connect(server: &Mariadb, database: &str) -> Conn {
    let mut conn = Conn::from_url(format!("{}?prefer_socket=false", server.url(database))).await.unwrap();
    conn.query_drop("set session transaction isolation level read committed").await.unwrap();
    conn
}

async fn open(server: &Mariadb, database: &str, how: fn(Options) -> Options) -> MysqlStore {
    how(MysqlStore::options(&server.url(database)).unwrap()).open().await.unwrap()
}

/// Waiting for a lock takes the server's fifty seconds, far past every patience here.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_on_one_key_delays_no_other() {
    let ways: [fn(Options) -> Options; 2] = [|options| options, Options::look_first];
    for (how, (name, hold)) in ways.into_iter().flat_map(|how| HOLDS.map(|hold| (how, hold))) {
        let (server, database) = database().await;
        let store = open(&server, &database, how).await;
        acquired(store.claim(&op("sample"), &take_over()).await.unwrap());
        let owner = take_over();
        if name != "inserted" {
            acquired(store.claim(&op("held"), &owner).await.unwrap());
        }
        let mut somebody = connect(&server, &database).await;
        somebody.query_drop("start transaction").await.unwrap();
        somebody.query_drop(hold).await.unwrap();

        let (mine, others) = (op("held"), take_over());
        let on_held = store.claim(&mine, &others);
        let elsewhere = join_all((0..200).map(|n| {
            let store = store.clone();
            async move {
                let (operation, request) = (op(&format!("other {n}")), take_over());
                acquired(store.claim(&operation, &request).await.unwrap());
                assert_eq!(
                    store.renew(&operation, request.token, LEASE).await.unwrap(),
                    RenewOutcome::Renewed
                );
                match n % 3 {
                    0 => assert_eq!(
                        store.release(&operation, request.token).await.unwrap(),
                        ReleaseOutcome::Applied
                    ),
                    _ => {
                        let stored = store.complete(&operation, &done(request.token, "x")).await.unwrap();
                        assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
                    }
                }
            }
        }));
        let (on_held, _) =
            within("claims beside an open transaction", async { tokio::join!(on_held, elsewhere) }).await;
        assert!(matches!(on_held.unwrap(), ClaimOutcome::InProgress { .. }), "{name}");
        // Nor does a purge.
        within("a purge", store.purge(&PurgeRequest::default())).await.unwrap();
        let untouched =
            server.sql(&database, "select count(*) from idempotency_keys where `key` = 'held'").await;
        assert_eq!(untouched, if name == "inserted" { "0" } else { "1" }, "{name} is not committed");

        somebody.query_drop("rollback").await.unwrap();
        let again = store.claim(&op("held"), &take_over()).await.unwrap();
        match name {
            "inserted" => drop(acquired(again)),
            _ => {
                assert!(matches!(again, ClaimOutcome::InProgress { .. }), "{name}: {again:?}");
                let stored = store.complete(&op("held"), &done(owner.token, "x")).await.unwrap();
                assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
            }
        }
    }
}

/// The work of an owner is done: what it asks waits a little for whoever holds its record.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_waits_for_whoever_holds_its_record() {
    let (server, database, store) = store().await;
    let owner = take_over();
    acquired(store.claim(&op("held"), &owner).await.unwrap());
    let mut somebody = connect(&server, &database).await;
    somebody.query_drop("start transaction").await.unwrap();
    somebody.query_drop(HOLDS[3].1).await.unwrap();
    let completion = done(owner.token, "x");
    let (completing, completed) = (store.clone(), completion.clone());
    let completing = tokio::spawn(async move { completing.complete(&op("held"), &completed).await });
    // Long enough for the batch to have met the lock; if not, it meets none, and the answer is the same.
    tokio::time::sleep(Duration::from_millis(200)).await;
    somebody.query_drop("rollback").await.unwrap();
    let stored = within("the completion", completing).await.unwrap().unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");

    // But not for ever: then nothing was done, and it may be asked again.
    somebody.query_drop("start transaction").await.unwrap();
    let other = take_over();
    acquired(store.claim(&op("other"), &other).await.unwrap());
    somebody.query_drop("select * from idempotency_keys where `key` = 'other' for update").await.unwrap();
    let error =
        within("a completion", store.complete(&op("other"), &done(other.token, "x"))).await.unwrap_err();
    assert_eq!((error.kind(), error.may_have_applied()), (StoreErrorKind::Timeout, false), "{error}");
    assert!(error.retryable());
    somebody.query_drop("rollback").await.unwrap();
    let stored = store.complete(&op("other"), &done(other.token, "x")).await.unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
}

/// A stored reply is there for everybody, whoever has locked its row.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_reply_is_replayed() {
    let (server, database, store) = store().await;
    let owner = take_over();
    acquired(store.claim(&op("held"), &owner).await.unwrap());
    store.complete(&op("held"), &done(owner.token, "the reply")).await.unwrap();
    let mut somebody = connect(&server, &database).await;
    somebody.query_drop("start transaction").await.unwrap();
    somebody.query_drop(HOLDS[3].1).await.unwrap();
    for _ in 0..3 {
        let replayed = within("a replay", store.claim(&op("held"), &take_over())).await.unwrap();
        assert_eq!(completed(replayed).body(), "the reply");
    }
}

/// A range that somebody locked so that nothing may be inserted there, as REPEATABLE READ does.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_gap_is_told_and_nothing_waits() {
    let (server, database, store) = store().await;
    acquired(store.claim(&op("a"), &take_over()).await.unwrap());
    acquired(store.claim(&op("z"), &take_over()).await.unwrap());
    let mut somebody =
        Conn::from_url(format!("{}?prefer_socket=false", server.url(&database))).await.unwrap();
    somebody.query_drop("set session transaction isolation level repeatable read").await.unwrap();
    somebody.query_drop("start transaction").await.unwrap();
    let gap = "select * from idempotency_keys where scope = 'shop' and `key` between 'c' and 'm' for update";
    somebody.query_drop(gap).await.unwrap();
    let (inside, outside) = (op("g"), op_of("zzz", "g", "body"));
    let (first, second) = (take_over(), take_over());
    let claims = async { tokio::join!(store.claim(&inside, &first), store.claim(&outside, &second)) };
    let (inside_claim, outside_claim) = within("claims beside a locked gap", claims).await;
    assert!(matches!(inside_claim.unwrap(), ClaimOutcome::InProgress { .. }));
    acquired(outside_claim.unwrap());
    somebody.query_drop("rollback").await.unwrap();
    acquired(store.claim(&inside, &take_over()).await.unwrap());
}

/// In the transactional mode too. Here it is held by a duplicate that was told the reply and has not ended its transaction, as on
/// a slow network.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_reply_is_given_whoever_holds_its_row() {
    let (server, database, store) = store().await;
    let patient_for_a_second = TxOptions { wait: Duration::from_secs(1), ..TxOptions::default() };
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let key = isolation.replace(' ', "-");
        let (mut conn, mut holding) = (connect(&server, &database).await, connect(&server, &database).await);
        for conn in [&mut conn, &mut holding] {
            let level = format!("set session transaction isolation level {isolation}");
            conn.query_drop(level).await.unwrap();
        }
        let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("charged"));
        let ran = store.once(&mut conn, &op(&key), work).await.unwrap();
        assert!(matches!(ran, OnceOutcome::Ran(_)), "{ran:?}");
        let mut tx = store.begin(&mut holding).await.unwrap();
        let told = store.claim_in(&mut tx, &op(&key), &patient_for_a_second).await.unwrap();
        assert!(matches!(told, TxClaim::Completed(_)), "{told:?}");

        let mut ask = async |operation| {
            let never = async |_: &mut Transaction<'_>| panic!("never run");
            store.once_with(&mut conn, &operation, &patient_for_a_second, never).await.unwrap()
        };
        let OnceOutcome::Replayed(again) = ask(op(&key)).await else { panic!("{isolation}: not replayed") };
        assert_eq!(again.reply.body(), &b"charged"[..]);
        let other = ask(op_of("shop", &key, "another body")).await;
        assert!(matches!(other, OnceOutcome::Mismatch { .. }), "{isolation}");
        tx.rollback().await.unwrap();
    }
}

/// A connection of the caller's may count the rows that were found, have a clock of its own and wait for as long as it likes: a copy
/// is a copy, the times are the server's, and its wait is what it was.
#[tokio::test(flavor = "multi_thread")]
async fn settings_of_the_callers_session_change_nothing() {
    let (server, database, store) = store().await;
    let url = server.url(&database);
    let like_mysql = open(&server, &database, Options::look_first).await;
    let opts = OptsBuilder::from_opts(Opts::from_url(&url).unwrap()).client_found_rows(true);
    let mut conn = Conn::new(opts).await.unwrap();
    for (way, store) in [("one", &store), ("several", &like_mysql)] {
        for mode in
            ["", "SIMULTANEOUS_ASSIGNMENT", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES", "ORACLE", "STRICT_ALL_TABLES"]
        {
            let set = format!(
                "set session sql_mode = '{mode}', time_zone = '+11:00', timestamp = 1000000, innodb_lock_wait_timeout = 37"
            );
            conn.query_drop(set).await.unwrap();
            let key = format!("{way} {mode}").replace([' ', ','], "-");
            let began = SystemClock.wall();
            let work = async |_: &mut Transaction<'_>| Ok(Reply::ok("charged"));
            let OnceOutcome::Ran(ran) = store.once(&mut conn, &op(&key), work).await.unwrap() else {
                panic!()
            };
            let never = async |_: &mut Transaction<'_>| panic!("never run");
            let again = store.once(&mut conn, &op(&key), never).await.unwrap();
            let OnceOutcome::Replayed(again) = again else { panic!("{key}: {again:?}") };
            assert_eq!((ran.reply, ran.completed_at), (again.reply, again.completed_at), "{key}");
            // Two readings of one clock where the mode forbids the column's new value.
            let (first, second) =
                (ran.expires_at.min(again.expires_at), ran.expires_at.max(again.expires_at));
            let apart = second.duration_since(first).unwrap();
            let forbidden = ["SIMULTANEOUS_ASSIGNMENT", "ORACLE"].contains(&mode);
            let most = if forbidden { Duration::from_secs(1) } else { Duration::ZERO };
            assert!(apart <= most, "{key}: {apart:?}");
            let off = ran.completed_at.duration_since(began).unwrap_or_else(|early| early.duration());
            assert!(off < Duration::from_secs(300), "{key}: {off:?}");
            let wait: u32 =
                conn.query_first("select @@session.innodb_lock_wait_timeout").await.unwrap().unwrap();
            assert_eq!(wait, 37, "{key}");
        }
    }
}

/// In the token form the caller may ask for the last id of its own rows to the end.
#[tokio::test]
async fn a_completion_by_token_leaves_the_last_id_of_the_caller() {
    let (server, database, store) = store().await;
    server.sql(&database, "create table orders (id bigint auto_increment primary key, item int)").await;
    let mut conn = connect(&server, &database).await;
    let mut tx = store.begin(&mut conn).await.unwrap();
    tx.query_drop("insert into orders values (41, 1)").await.unwrap();
    tx.query_drop("insert into orders (item) values (1)").await.unwrap();
    let TxClaim::Acquired(claim) = store.claim_in(&mut tx, &op("k"), &TxOptions::default()).await.unwrap()
    else {
        panic!("a new key")
    };
    let last = async |tx: &mut Transaction<'_>| {
        tx.query_first::<u64, _>("select last_insert_id()").await.unwrap().unwrap()
    };
    assert_eq!(last(&mut tx).await, 42);
    drop(claim.complete(&mut tx, Reply::ok("x")).await.unwrap());
    assert_eq!(last(&mut tx).await, 42);
    tx.commit().await.unwrap();
}

/// A proxy may ask the server to count the rows that were found: then a record that was there counts as one that was written.
#[tokio::test]
async fn a_record_that_was_there_is_nobody_elses_however_rows_are_counted() {
    let (server, database) = database().await;
    let store = open(&server, &database, Options::count_found_rows).await;
    let (owner, copies) = (take_over(), [take_over(), take_over()]);
    acquired(store.claim(&op("k"), &owner).await.unwrap());
    for copy in copies {
        let again = store.claim(&op("k"), &copy).await.unwrap();
        assert!(matches!(again, ClaimOutcome::InProgress { .. }), "{again:?}");
    }
    let stored = store.complete(&op("k"), &done(owner.token, "the reply")).await.unwrap();
    assert!(matches!(stored, CompleteOutcome::Stored(_)), "{stored:?}");
    assert_eq!(completed(store.claim(&op("k"), &take_over()).await.unwrap()).body(), "the reply");
}
