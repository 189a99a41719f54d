//! What is checked, made and refused at the start.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use common::*;
use onlyonce_core::{Store, StoreAdmin, StoreErrorKind};
use onlyonce_store_postgres::PostgresStore;
use testkit::{Authority, PgBouncer, PoolMode, Postgres};

#[tokio::test(flavor = "multi_thread")]
async fn ten_instances_that_start_at_once_make_one_set_of_tables() {
    let place = place().await;
    let stores = futures_util::future::join_all((0..10).map(|_| PostgresStore::open(&place.url))).await;
    for store in stores {
        let store = store.unwrap();
        pair(&store, &format!("{:?}", token().as_bytes())).await.unwrap();
    }
    let tables = "select count(*) from pg_class where relname like 'idempotency%' and relkind = 'r'";
    assert_eq!(place.psql(tables).await, "3");
    assert_eq!(place.psql("select schema_version, min_reader_version from idempotency_meta").await, "3|1");
    assert_eq!(place.psql("select count(*) from idempotency_keys").await, "10");
}

#[tokio::test]
async fn the_table_is_read_by_people() {
    let place = place().await;
    pair(&place.open().await, "order-7 ü").await.unwrap();
    let row = place
        .psql(
            "select scope, key, left(request_hash, 7), status, response_code, convert_from(response_body, 'UTF8'),
                locked_until > now(), created_at <= now(), expires_at > now() + interval '23 hours', attempt
             from idempotency_keys",
        )
        .await;
    assert_eq!(row, "shop|order-7 ü|sha256:|completed|200|order-7 ü|t|t|t|1");
}

#[tokio::test]
async fn wrong_tables_are_refused_with_the_reason_and_left_alone() {
    let good = "create table idempotency_keys (scope text collate \"C\" not null, key text collate \"C\" not null,
        request_hash text not null, status text not null, response_code integer, response_headers bytea,
        response_body bytea, locked_until timestamptz not null, created_at timestamptz not null,
        claimed_at timestamptz not null, completed_at timestamptz, expires_at timestamptz, token uuid not null,
        attempt bigint not null, on_lease_end text not null, origin text, primary key (scope, key))";
    let unlogged = good.replace("create table", "create unlogged table");
    let short = good.replace("key text collate", "key varchar(64) collate");
    let nullable = good.replace("created_at timestamptz not null", "created_at timestamptz");
    let keyless = good.replace(", primary key (scope, key)", "");
    let other_key = good.replace("primary key (scope, key)", "primary key (key)");
    let deferrable = good.replace("primary key (scope, key)", "primary key (scope, key) deferrable");
    let by_language = good.replace("key text collate \"C\"", "key text");
    let folded =
        "create collation folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false); "
            .to_owned()
            + &good.replace("key text collate \"C\"", "key text collate folded");
    let partitioned = good.to_owned() + " partition by hash (scope, key)";
    let more_unique = good.to_owned() + "; create unique index once on idempotency_keys (key)";
    let triggered = good.to_owned()
        + "; create function f() returns trigger language plpgsql as 'begin return null; end';
            create trigger t before insert on idempotency_keys for each row execute function f()";
    let hidden = good.to_owned() + "; alter table idempotency_keys enable row level security";
    let checked = good.replace(
        "key text collate \"C\" not null",
        "key text collate \"C\" not null check (length(key) < 9)",
    );
    let of_documents =
        "create table idempotency_keys (scope text collate \"C\" not null, key text collate \"C\" not null,
        request_hash text not null, status text not null, response_code int, response_body bytea,
        locked_until timestamptz not null, created_at timestamptz not null, primary key (scope, key))";
    for (sql, reason) in [
        (short.as_str(), "column key holds 64 characters"),
        (&nullable, "column created_at may be NULL"),
        (&keyless, "has no primary key"),
        (&other_key, "primary key is not (scope, key)"),
        (&deferrable, "DEFERRABLE"),
        (&by_language, "collation default, which does not go by bytes"),
        (&folded, "nondeterministic collation folded"),
        (&partitioned, "partitioned"),
        (&unlogged, "UNLOGGED"),
        (&more_unique, "index once makes more unique"),
        (&triggered, "triggers"),
        (&hidden, "row level security"),
        (&checked, "does not take every name"),
        (of_documents, "column response_headers is missing"),
        ("create view idempotency_keys as select 1", "it is a view"),
    ] {
        let place = place().await;
        place.psql(sql).await;
        let error = PostgresStore::open(&place.url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{}", chain(&error));
        assert!(error.to_string().contains(reason), "{reason}: {}", chain(&error));
        let ours = "select count(*) from pg_class where relname like 'idempotency_meta%'";
        assert_eq!(place.psql(ours).await, "0", "{reason}: nothing was made");
    }
    // The same by hand is taken.
    let place = place().await;
    place.psql(good).await;
    pair(&place.open().await, "k").await.unwrap();
}

#[tokio::test]
async fn other_releases_are_read_or_refused() {
    let place = place().await;
    pair(&place.open().await, "k").await.unwrap();
    place
        .psql("update idempotency_meta set schema_version = 9; alter table idempotency_keys add x int")
        .await;
    let store = place.open().await;
    completed(store.claim(&op("k"), &hold()).await.unwrap());
    assert_eq!(place.psql("select schema_version from idempotency_meta").await, "9");
    place.psql("update idempotency_meta set min_reader_version = 9").await;
    let error = PostgresStore::open(&place.url).await.unwrap_err();
    assert!(error.to_string().contains("newer release"), "{error}");
    // What cannot be read is never absent.
    place.psql("update idempotency_keys set status = 'paused'").await;
    let error = store.claim(&op("k"), &hold()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreadable);
    assert!(!error.to_string().contains("shop"), "{error}");
    acquired(store.claim(&op("another"), &hold()).await.unwrap());
}

#[tokio::test]
async fn an_operators_command_makes_nothing() {
    let place = place().await;
    let error = PostgresStore::open_existing(&place.url).await.unwrap_err();
    assert!(error.to_string().contains("there are no records"), "{error}");
    assert_eq!(place.psql("select count(*) from pg_class where relname like 'idempotency%'").await, "0");
    drop(place.open().await);
    let stats = PostgresStore::open_existing(&place.url).await.unwrap().stats().await.unwrap();
    assert_eq!(stats.completed, 0);
}

#[tokio::test]
async fn schemas_keep_their_records_apart() {
    let place = place().await;
    place.psql("create schema one; create schema \"The \"\"2nd\"\"\"").await;
    let one = PostgresStore::open(&format!("{}?schema=one", place.url)).await.unwrap();
    let two = PostgresStore::open(&format!("{}?schema=The%20%222nd%22", place.url)).await.unwrap();
    pair(&one, "k").await.unwrap();
    pair(&two, "k").await.unwrap();
    assert_eq!(place.psql("select count(*) from one.idempotency_keys").await, "1");
    assert!(one.capabilities().location.ends_with("?schema=one"));
    let error = PostgresStore::open(&format!("{}?schema=none", place.url)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{}", chain(&error));
    // Where search_path finds them.
    let found = format!("{}?options=-c%20search_path%3Done", place.url);
    let store = PostgresStore::open(&found).await.unwrap();
    completed(store.claim(&op("k"), &hold()).await.unwrap());
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_or_refuses_says_so_without_the_password() {
    let server = Postgres::options()
        .hba("host all ann 127.0.0.1/32 scram-sha-256")
        .setting("password_encryption = 'scram-sha-256'")
        .start()
        .await;
    let addr = server.addr();
    server.psql("postgres", "create role ann login password 'hunter2'").await;
    server.psql("postgres", "create database shop owner ann").await;
    let url = |password: &str, rest: &str| format!("postgres://ann:{password}@{addr}/{rest}");
    let store = PostgresStore::open(&url("hunter2", "shop")).await.unwrap();
    let shown = format!("{store:?} {:?}", store.capabilities());
    assert!(!shown.contains("hunter2") && !shown.contains("ann"), "{shown}");
    let free = testkit::free_addr();
    for (url, kind, reason) in [
        (url("hunter3", "shop"), StoreErrorKind::Unfit, "refused the user or the password"),
        (url("hunter2", "none"), StoreErrorKind::Unfit, "create it first"),
        (format!("postgres://ann:hunter2@{free}/shop"), StoreErrorKind::Unavailable, "cannot be reached"),
    ] {
        let error = PostgresStore::open(&url).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{}", chain(&error));
        let said = chain(&error);
        assert!(said.contains(reason) && !said.contains("hunter"), "{said}");
    }
    // A user who may not create tables uses those that are there.
    server
        .psql(
            "shop",
            "create role bob login password 'b'; grant select, insert, update, delete on all tables in schema public to bob;
             alter table idempotency_audit owner to bob",
        )
        .await;
    let bob = PostgresStore::open(&format!("postgres://bob:b@{addr}/shop")).await.unwrap();
    pair(&bob, "k").await.unwrap();
    let error = PostgresStore::open(&format!("postgres://bob:b@{addr}/postgres")).await.unwrap_err();
    assert!(error.to_string().contains("the tables cannot be made"), "{}", chain(&error));
}

#[tokio::test]
async fn what_a_crash_would_lose_is_said() {
    let server = Postgres::options().setting("fsync = off").start().await;
    let store = PostgresStore::open(&server.url("postgres")).await.unwrap();
    let capabilities = store.capabilities();
    assert!(!capabilities.durable && capabilities.network);
    assert!(capabilities.hazard.unwrap().contains("fsync is off"));
    assert!(place().await.open().await.capabilities().durable);
}

#[tokio::test]
async fn commits_are_synchronous_whatever_the_user_or_the_database_has() {
    let place = place().await;
    for (set, expected) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "on"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ] {
        let database = &place.database;
        place.psql(&format!("alter database {database} set synchronous_commit = {set}")).await;
        place.psql("create table if not exists seen (setting text)").await;
        for prepare in ["on", "off"] {
            let store = PostgresStore::open(&format!("{}?prepare={prepare}", place.url)).await.unwrap();
            // Written down by the very transactions of the store.
            place
                .psql(
                    "truncate seen; create or replace function note() returns trigger language plpgsql as
                     'begin insert into seen values (current_setting(''synchronous_commit'')); return new; end';
                     create or replace trigger note after insert or update on idempotency_keys for each row
                     execute function note()",
                )
                .await;
            pair(&store, &format!("{set} {prepare}")).await.unwrap();
            place.psql("drop trigger note on idempotency_keys").await;
            let found = place.psql("select distinct setting from seen").await;
            assert_eq!(found, expected, "{set}, prepare={prepare}");
        }
    }
}

#[tokio::test]
async fn behind_a_transaction_pooler_with_prepare_off_everything_works() {
    let place = place().await;
    let pooler = PgBouncer::start(&place.server, PoolMode::Transaction).await;
    let url = format!("{}?prepare=off", pooler.url(&place.database));
    let store = PostgresStore::open(&url).await.unwrap();
    let second = PostgresStore::open(&url).await.unwrap();
    // More callers than the pooler has connections.
    let pairs = (0..200).map(|n| {
        let store = if n % 2 == 0 { store.clone() } else { second.clone() };
        tokio::spawn(async move { pair(&store, &format!("k{n}")).await.unwrap() })
    });
    for pair in pairs.collect::<Vec<_>>() {
        pair.await.unwrap();
    }
    let again = completed(second.claim(&op("k0"), &hold()).await.unwrap());
    assert_eq!(again.body(), "k0");
    assert_eq!(store.stats().await.unwrap().completed, 200);
    assert_eq!(store.list(&Default::default()).await.unwrap().records.len(), 100);
    store.purge(&Default::default()).await.unwrap();
    // Nothing of ours stays behind on a connection that is lent to the next one.
    let sql = "select current_setting('lock_timeout'), current_setting('enable_seqscan'), count(*)
        from pg_prepared_statements";
    let mut psql = place.server.tool("psql").unwrap();
    psql.args(["-XAt", "-d", &pooler.url(&place.database), "-c", sql]);
    assert_eq!(String::from_utf8(psql.output().unwrap().stdout).unwrap().trim(), "0|on|0");
}

/// Poolers of today may know prepared statements and pass them on; one that does not must not be a riddle.
#[tokio::test]
async fn prepared_statements_behind_a_transaction_pooler_work_or_fail_with_the_advice() {
    let place = place().await;
    let pooler = PgBouncer::start(&place.server, PoolMode::Transaction).await;
    let mut done = 0;
    for n in 0..20 {
        let outcomes = async {
            let store = PostgresStore::open(&pooler.url(&place.database)).await?;
            let keys: Vec<_> = (0..50).map(|k| format!("{n} {k}")).collect();
            let pairs = futures_util::future::join_all(keys.iter().map(|key| pair(&store, key))).await;
            pairs.into_iter().collect::<Result<Vec<_>, _>>()
        };
        match outcomes.await {
            Ok(pairs) => done += pairs.len(),
            Err(error) => {
                assert!(error.retryable(), "{}", chain(&error));
                assert!(error.to_string().contains("prepare=off"), "{}", chain(&error));
                return;
            }
        }
    }
    assert_eq!(done, 1000, "prepared statements are passed on");
}

#[tokio::test]
async fn tls_is_what_sslmode_says() {
    let authority = Authority::new();
    let identity = authority.identity("DNS:localhost");
    let server = Postgres::options()
        .setting("ssl = on")
        .setting("ssl_cert_file = 'server.crt'")
        .setting("ssl_key_file = 'server.key'")
        .file("server.crt", &identity.cert)
        .file("server.key", &identity.key)
        .hba("hostnossl all plain 127.0.0.1/32 trust")
        .hba("hostssl all plain 127.0.0.1/32 reject")
        .hba("hostnossl all secret 127.0.0.1/32 reject")
        .start()
        .await;
    server.psql("postgres", "create role plain login superuser; create role secret login superuser").await;
    let port = server.addr().port();
    let (ours, foreign) = (authority.path(), Authority::new());
    let (ours, foreign) = (ours.display().to_string(), foreign.path().display().to_string());
    let open = async |user: &str, host: &str, rest: String| {
        let url = format!("postgres://{user}@{host}:{port}/postgres?{rest}");
        PostgresStore::open(&url).await.map_err(|error| chain(&error))
    };
    for (user, host, rest) in [
        ("secret", "localhost", String::new()),
        ("secret", "localhost", "sslmode=require".into()),
        ("secret", "127.0.0.1", format!("sslmode=require&sslrootcert={ours}")),
        ("secret", "127.0.0.1", format!("sslmode=verify-ca&sslrootcert={ours}")),
        ("secret", "localhost", format!("sslmode=verify-full&sslrootcert={ours}")),
        ("plain", "localhost", "sslmode=disable".into()),
    ] {
        let opened = open(user, host, rest.clone()).await;
        assert!(opened.is_ok(), "{user} {host} {rest}: {opened:?}");
        pair(&opened.unwrap(), &format!("{:?}", token().as_bytes())).await.unwrap();
    }
    for (user, host, rest) in [
        ("secret", "127.0.0.1", format!("sslmode=verify-full&sslrootcert={ours}")),
        ("secret", "localhost", format!("sslmode=verify-full&sslrootcert={foreign}")),
        ("secret", "localhost", format!("sslmode=verify-ca&sslrootcert={foreign}")),
        ("secret", "localhost", format!("sslmode=require&sslrootcert={foreign}")),
        // The system's own roots have never heard of it.
        ("secret", "localhost", "sslmode=verify-full".into()),
        ("secret", "localhost", "sslmode=verify-full&sslrootcert=/no/such/file".into()),
        ("secret", "localhost", "sslmode=disable".into()),
    ] {
        let opened = open(user, host, rest.clone()).await;
        assert!(opened.is_err(), "{user} {host} {rest}");
    }
    let error = open("secret", "localhost", "sslmode=verify-full&sslrootcert=/no/such/file".into()).await;
    assert!(error.unwrap_err().contains("/no/such/file"));
    // A server that has no TLS.
    let place = place().await;
    let error = PostgresStore::open(&format!("{}?sslmode=require", place.url)).await.unwrap_err();
    assert!(chain(&error).contains("TLS") || chain(&error).contains("tls"), "{}", chain(&error));
}
