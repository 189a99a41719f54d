//! What is refused at start, with its reason, and what is not.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use common::*;
use futures_util::future::join_all;
use onlyonce_core::{ClaimOutcome, Store, StoreAdmin, StoreErrorKind};
use onlyonce_store_mysql::MysqlStore;
use testkit::Mariadb;

/// A table as it must be, in which a test changes one thing.
const TABLE: &str = "create table idempotency_keys (
    scope varbinary(255) not null,
    `key` varbinary(255) not null,
    request_hash varchar(96) character set ascii collate ascii_bin not null,
    status varchar(16) character set ascii collate ascii_bin not null,
    response_code smallint unsigned null,
    response_headers longblob null,
    response_body longblob null,
    locked_until datetime(6) not null,
    created_at datetime(6) not null,
    claimed_at datetime(6) not null,
    completed_at datetime(6) null,
    expires_at datetime(6) null,
    token binary(16) not null,
    attempt int unsigned not null,
    on_lease_end varchar(16) character set ascii collate ascii_bin not null,
    origin varbinary(255) null,
    primary key (scope, `key`),
    key idempotency_keys_over (expires_at, locked_until)
) engine=innodb";

async fn refused(server: &Mariadb, database: &str) -> String {
    let error = MysqlStore::open(&server.url(database)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    error.to_string()
}

#[tokio::test]
async fn each_wrong_table_is_refused_with_its_reason() {
    for (instead, of, reason) in [
        (
            "`key` varchar(255) character set utf8mb4 collate utf8mb4_general_ci not null",
            "`key` varbinary(255) not null",
            "column key is varchar compared by utf8mb4_general_ci, so that different keys are one",
        ),
        (
            "`key` varchar(255) character set utf8mb4 collate utf8mb4_bin not null",
            "`key` varbinary(255) not null",
            "compared by utf8mb4_bin",
        ),
        (
            "`key` varchar(64) not null",
            "`key` varbinary(255) not null",
            "column key holds 64 characters or bytes, and needs 255",
        ),
        ("`key` varbinary(64) not null", "`key` varbinary(255) not null", "column key holds 64"),
        ("", "primary key (scope, `key`),", "its primary key is not (scope, key)"),
        ("primary key (`key`),", "primary key (scope, `key`),", "its primary key is not (scope, key)"),
        (
            "primary key (scope, `key`(10)),",
            "primary key (scope, `key`),",
            "its primary key holds a part of key alone",
        ),
        ("key (scope, `key`),", "primary key (scope, `key`),", "its primary key is not (scope, key)"),
        ("response_body mediumblob null", "response_body longblob null", "response_body is mediumblob"),
        ("locked_until datetime not null", "locked_until datetime(6) not null", "holds 0 digits of a second"),
        ("token binary(16) null", "token binary(16) not null", "column token may be NULL"),
        ("", "attempt int unsigned not null,", "column attempt is missing"),
        ("engine=myisam", "engine=innodb", "its engine is MyISAM, which has no transactions"),
        (
            "key other (expires_at, locked_until)",
            "key idempotency_keys_over (expires_at, locked_until)",
            "idempotency_keys_over",
        ),
        (
            "unique key more (`key`), key idempotency_keys_over (expires_at, locked_until)",
            "key idempotency_keys_over (expires_at, locked_until)",
            "its index more makes more unique",
        ),
    ] {
        let (server, database) = database().await;
        assert!(TABLE.contains(of), "{of}");
        server.sql(&database, &TABLE.replace(of, instead)).await;
        let said = refused(&server, &database).await;
        assert!(
            said.contains("idempotency_keys is not fit for records") && said.contains(reason),
            "{instead}: {said}"
        );
        // Refused before anything of ours was built.
        assert_eq!(server.sql(&database, "show tables").await, "idempotency_keys");
    }
}

/// A primary key is never NULL, so a nullable name comes with none.
#[tokio::test]
async fn a_table_with_a_nullable_name_is_refused() {
    let (server, database) = database().await;
    let table = TABLE.replace("scope varbinary(255) not null", "scope varbinary(255) null");
    server
        .sql(&database, &table.replace("primary key (scope, `key`)", "unique key names (scope, `key`)"))
        .await;
    let said = refused(&server, &database).await;
    assert!(said.contains("column scope may be NULL"), "{said}");
}

#[tokio::test]
async fn triggers_and_views_are_refused() {
    let (server, database) = database().await;
    server.sql(&database, TABLE).await;
    server
        .sql(&database, "create trigger t before insert on idempotency_keys for each row set new.attempt = 1")
        .await;
    assert!(refused(&server, &database).await.contains("it has triggers"));
    let (server, database) = common::database().await;
    server.sql(&database, "create view idempotency_keys as select 1 as scope").await;
    assert!(refused(&server, &database).await.contains("it is a view"));
}

#[tokio::test]
async fn a_table_that_somebody_made_for_us_is_used() {
    let (server, database) = database().await;
    server.sql(&database, TABLE).await;
    let store = MysqlStore::open(&server.url(&database)).await.unwrap();
    acquired(store.claim(&op("k"), &take_over()).await.unwrap());
    // The probe left nothing.
    assert_eq!(server.sql(&database, "select `key` from idempotency_keys").await, "k");
}

#[tokio::test]
async fn a_newer_schema_is_refused_unless_it_can_be_read() {
    let (server, database, store) = store().await;
    acquired(store.claim(&op("k"), &take_over()).await.unwrap());
    server.sql(&database, "update idempotency_meta set schema_version = 9, min_reader_version = 1").await;
    MysqlStore::open(&server.url(&database)).await.unwrap();
    server.sql(&database, "update idempotency_meta set min_reader_version = 9").await;
    let said = refused(&server, &database).await;
    assert!(said.contains("written by a newer release (schema 9, readable from 9 on"), "{said}");
    assert_eq!(server.sql(&database, "select schema_version from idempotency_meta").await, "9");
}

#[tokio::test]
async fn a_record_of_a_newer_release_is_an_error_and_never_absent() {
    let (server, database, store) = store().await;
    let mine = take_over();
    acquired(store.claim(&op("k"), &mine).await.unwrap());
    acquired(store.claim(&op("other"), &take_over()).await.unwrap());
    server.sql(&database, "update idempotency_keys set status = 'paused' where `key` = 'k'").await;
    let error = store.claim(&op("k"), &take_over()).await.unwrap_err();
    assert_eq!((error.kind(), error.retryable()), (StoreErrorKind::Unreadable, false));
    assert!(error.to_string().contains("status") && !error.to_string().contains("'k'"), "{error}");
    let error = store.complete(&op("k"), &done(mine.token, "x")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreadable);
    // In one batch with readable ones.
    let (unreadable, other) = (op("k"), op("other"));
    let (bad, good) = (take_over(), take_over());
    let (bad, good) = tokio::join!(store.claim(&unreadable, &bad), store.claim(&other, &good));
    assert_eq!(bad.unwrap_err().kind(), StoreErrorKind::Unreadable);
    assert!(matches!(good.unwrap(), ClaimOutcome::InProgress { .. }));
    assert_eq!(
        server.sql(&database, "select status from idempotency_keys where `key` = 'k'").await,
        "paused"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_instances_start_at_once() {
    for round in 0..3 {
        let (server, database) = database().await;
        let url = server.url(&database);
        let opened = join_all((0..10).map(|_| {
            let url = url.clone();
            tokio::spawn(async move { MysqlStore::open(&url).await })
        }));
        let mut stores = Vec::new();
        for store in opened.await {
            stores.push(store.unwrap().unwrap());
        }
        let claims = stores.iter().map(|store| async { store.claim(&op("k"), &take_over()).await.unwrap() });
        let won =
            join_all(claims).await.iter().filter(|claim| matches!(claim, ClaimOutcome::Acquired(_))).count();
        assert_eq!(won, 1, "round {round}");
        assert_eq!(
            server.sql(&database, "select count(*), max(schema_version) from idempotency_meta").await,
            "1\t1"
        );
    }
}

#[tokio::test]
async fn an_instance_that_died_while_it_made_the_tables_is_followed_by_the_next() {
    let (server, database) = database().await;
    // Everything but the version, which is written last.
    MysqlStore::open(&server.url(&database)).await.unwrap().close().await;
    for lost in ["delete from idempotency_meta", "drop table idempotency_audit, idempotency_meta"] {
        server.sql(&database, lost).await;
        let store = MysqlStore::open(&server.url(&database)).await.unwrap();
        acquired(store.claim(&op(lost), &take_over()).await.unwrap());
        assert!(store.audit(None, 10).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_database_without_records_is_not_opened_for_an_operator() {
    let (server, database) = database().await;
    let error = MysqlStore::open_existing(&server.url(&database)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit);
    assert!(error.to_string().contains("holds no idempotency records"), "{error}");
    assert_eq!(server.sql(&database, "show tables").await, "");
    MysqlStore::open(&server.url(&database)).await.unwrap();
    MysqlStore::open_existing(&server.url(&database)).await.unwrap();
}

#[tokio::test]
async fn who_may_not_enter_is_told_why_and_no_password_is() {
    let (server, database) = database().await;
    let user = format!("u{database}");
    let grant = format!("create user {user}@'127.0.0.1' identified by 'hunter2'");
    server.sql(&database, &grant).await;
    let url = |password: &str| format!("mysql://{user}:{password}@{}/{database}", server.addr());
    let said = |error: onlyonce_core::StoreError| {
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
        let text = format!("{error} {error:?}");
        assert!(!text.contains("hunter2") && !text.contains("swordfish"), "{text}");
        error.to_string()
    };
    let wrong = said(MysqlStore::open(&url("swordfish")).await.unwrap_err());
    assert!(wrong.contains("refused the user or the password"), "{wrong}");
    let nothing = said(MysqlStore::open(&url("hunter2")).await.unwrap_err());
    assert!(nothing.contains("may not use this database"), "{nothing}");
    server
        .sql(
            &database,
            &format!("grant select, insert, update, delete on {database}.* to {user}@'127.0.0.1'"),
        )
        .await;
    let no_create = said(MysqlStore::open(&url("hunter2")).await.unwrap_err());
    assert!(no_create.contains("may not create it; grant CREATE"), "{no_create}");
    // Once the tables are there, the four rights are enough for everything.
    MysqlStore::open(&server.url(&database)).await.unwrap();
    let store = MysqlStore::open(&url("hunter2")).await.unwrap();
    let mine = take_over();
    acquired(store.claim(&op("k"), &mine).await.unwrap());
    store.complete(&op("k"), &done(mine.token, "x")).await.unwrap();
    store.purge(&onlyonce_core::PurgeRequest::default()).await.unwrap();
    store.stats().await.unwrap();
    let shown = format!("{store:?} {:?}", store.capabilities());
    assert!(!shown.contains("hunter2") && !shown.contains(&user), "{shown}");
    let missing = format!("mysql://root@{}/no_such_database", server.addr());
    assert!(said(MysqlStore::open(&missing).await.unwrap_err()).contains("no such database"));
}

#[tokio::test]
async fn what_a_power_cut_may_lose_is_said() {
    for (settings, expected) in [
        (&[][..], None),
        (&["log_bin", "sync_binlog=1", "server_id=1"], None),
        (&["log_bin", "sync_binlog=0", "server_id=1"], Some("log_bin with sync_binlog=0")),
        (&["innodb_flush_log_at_trx_commit=2"], Some("innodb_flush_log_at_trx_commit=2")),
        (&["innodb_flush_log_at_trx_commit=0"], Some("innodb_flush_log_at_trx_commit=0")),
    ] {
        let server = settings
            .iter()
            .fold(Mariadb::options(), |options, setting| options.setting(setting))
            .start()
            .await;
        let database = server.database().await;
        let store = MysqlStore::open(&server.url(&database)).await.unwrap();
        let capabilities = store.capabilities();
        assert_eq!(capabilities.durable, expected.is_none(), "{settings:?}");
        match expected {
            None => assert_eq!(capabilities.hazard, None),
            Some(setting) => {
                let said = capabilities.hazard.unwrap();
                assert!(said.contains(setting) && said.contains("loses acknowledged completions"), "{said}");
            }
        }
    }
}

#[tokio::test]
async fn a_server_that_cannot_serve_is_refused_with_the_reason() {
    for (settings, reason) in [
        (&["read_only=1"][..], "the server is read-only; name the primary"),
        (&["max_allowed_packet=1048576"], "max_allowed_packet is 1048576; 4194304 is needed"),
        (&["log_bin", "server_id=1", "binlog_format=STATEMENT"], "binlog_format is STATEMENT"),
    ] {
        let server = settings
            .iter()
            .fold(Mariadb::options(), |options, setting| options.setting(setting))
            .start()
            .await;
        let database = server.database().await;
        let said = refused(&server, &database).await;
        assert!(said.contains(reason), "{settings:?}: {said}");
    }
}
