//! What is refused at start, with the file's name and the reason, and what is not.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::*;
use onlyonce_core::{ClaimOutcome, Origin, Store, StoreError, StoreErrorKind};
use onlyonce_store_sqlite::{Durability, SqliteStore};

async fn refused(path: &Path) -> StoreError {
    let error = SqliteStore::open(path).await.expect_err("it must not open");
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    error
}

#[track_caller]
fn says(error: &StoreError, reason: &str) {
    assert!(error.to_string().contains(reason), "{error} does not say {reason:?}");
}

#[tokio::test]
async fn a_new_file_is_private() {
    let (folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    let mut seen = 0;
    for file in fs::read_dir(folder.path()).unwrap().map(Result::unwrap) {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", file.path());
        seen += 1;
    }
    assert_eq!(seen, 3, "the database, its -wal and its -shm");
    let capabilities = store.capabilities();
    assert!(capabilities.durable && capabilities.hazard.is_none() && !capabilities.network);
    assert!(capabilities.location.contains("onlyonce.db"));
    let (_other, path) = place();
    let unsafe_store = SqliteStore::options(&path).durability(Durability::Off).open().await.unwrap();
    assert!(!unsafe_store.capabilities().durable && unsafe_store.capabilities().hazard.is_some());
}

#[tokio::test]
async fn places_that_hold_no_file_are_refused_and_left_alone() {
    let (folder, path) = place();
    let missing = folder.path().join("no/such/onlyonce.db");
    says(&refused(&missing).await, "folders are not created");
    assert!(!folder.path().join("no").exists());
    says(&refused(folder.path()).await, "it is a folder");
    fs::write(&path, "x").unwrap();
    says(&refused(&path.join("under-a-file.db")).await, "not a folder");
    says(&refused(Path::new("/dev/null")).await, "not a regular file");
    for nowhere in ["", ":memory:"] {
        let error = SqliteStore::open(nowhere).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit);
        says(&error, "a path to a file is needed");
    }

    let absent = folder.path().join("absent.db");
    assert_eq!(SqliteStore::open_existing(&absent).await.unwrap_err().kind(), StoreErrorKind::Unfit);
    assert!(!absent.exists());
    beside(&absent).execute_batch("CREATE TABLE orders (id)").unwrap();
    says(&SqliteStore::open_existing(&absent).await.unwrap_err(), "no idempotency records");
}

#[tokio::test]
async fn other_programs_files_are_refused_and_left_alone() {
    let (_folder, path) = place();
    for content in
        [&b"hello"[..], &[7; 5000], b"SQLite format 3 but not quite, and long enough to look at it"]
    {
        fs::write(&path, content).unwrap();
        says(&refused(&path).await, "not an SQLite database");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[tokio::test]
async fn a_damaged_file_is_refused_and_left_alone() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let request = take_over();
    for n in 0..200 {
        acquired(store.claim(&op(&format!("key {n}")), &request).await.unwrap());
    }
    store.close().await;
    drop(store);
    let whole = fs::read(&path).unwrap();
    assert!(whole.len() > 5 * 4096);
    // Cut short.
    fs::write(&path, &whole[..2 * 4096]).unwrap();
    says(&refused(&path).await, "damaged");
    assert_eq!(fs::read(&path).unwrap(), whole[..2 * 4096]);
    // Scribbled over, all but the schema.
    let mut bad = whole.clone();
    bad[4096..].fill(0xa5);
    fs::write(&path, &bad).unwrap();
    says(&refused(&path).await, "damaged");
    assert_eq!(fs::read(&path).unwrap(), bad);
    // The same file whole again: nothing is lost.
    fs::write(&path, &whole).unwrap();
    let store = SqliteStore::open(&path).await.unwrap();
    let again = store.claim(&op("key 7"), &take_over()).await.unwrap();
    assert!(matches!(again, ClaimOutcome::InProgress { .. }), "{again:?}");
}

#[tokio::test]
async fn wrong_tables_are_refused_with_the_reason() {
    let good = good_table().await;
    let cases = [
        (good.replace("key TEXT NOT NULL", "key TEXT NOT NULL COLLATE NOCASE"), "key compares by NOCASE"),
        (good.replace("scope TEXT NOT NULL", "scope TEXT NOT NULL COLLATE RTRIM"), "scope compares by RTRIM"),
        (
            good.replace("scope TEXT NOT NULL", "scope TEXT").replace(" STRICT", ""),
            "column scope may be NULL",
        ),
        (good.replace("PRIMARY KEY (scope, key)", "CHECK (true)"), "primary key is not (scope, key)"),
        (good.replace("PRIMARY KEY (scope, key)", "PRIMARY KEY (key, scope)"), "primary key is not"),
        (good.replace("PRIMARY KEY (scope, key)", "PRIMARY KEY (scope)"), "primary key is not"),
        (good.replace("PRIMARY KEY (scope, key)", "PRIMARY KEY (scope, key), UNIQUE (key)"), "more unique"),
        (good.replace("response_body BLOB,", ""), "column response_body is missing"),
        (good.replace("response_body BLOB", "response_body TEXT"), "response_body is \"TEXT\""),
        (good.replace(" STRICT", ""), "not STRICT"),
        (good.replace("key TEXT NOT NULL", "key TEXT NOT NULL CHECK (length(key) < 64)"), "does not take"),
        ("CREATE VIEW idempotency_keys AS SELECT 1".into(), "it is a view"),
        (format!("{good}; CREATE TRIGGER t DELETE ON idempotency_keys BEGIN SELECT 1; END"), "triggers"),
    ];
    for (sql, reason) in cases {
        let (_folder, path) = place();
        assert_ne!(sql, good, "{reason}: the case changes nothing");
        beside(&path).execute_batch(&sql).unwrap_or_else(|error| panic!("{error}: {sql}"));
        let before = schema(&path);
        says(&refused(&path).await, reason);
        assert_eq!(schema(&path), before, "{reason}: nothing was added");
    }
    let (_folder, path) = place();
    beside(&path).execute_batch(&good).unwrap();
    SqliteStore::open(&path).await.expect("the table as it should be is taken");
}

async fn good_table() -> String {
    let (_folder, path) = place();
    drop(SqliteStore::open(&path).await.unwrap());
    let sql = "SELECT sql FROM sqlite_schema WHERE name = 'idempotency_keys'";
    beside(&path).query_row(sql, [], |row| row.get(0)).unwrap()
}

fn schema(path: &Path) -> Vec<String> {
    let conn = beside(path);
    let mut query = conn.prepare("SELECT coalesce(sql, name) FROM sqlite_schema ORDER BY name").unwrap();
    query.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
}

#[tokio::test]
async fn a_newer_schema_is_refused_unless_it_says_that_this_release_may_read_it() {
    let (_folder, path) = place();
    drop(SqliteStore::open(&path).await.unwrap());
    let set = |version: i64, min_reader: i64| {
        let sql = format!(
            "UPDATE idempotency_meta SET schema_version = {version}, min_reader_version = {min_reader}"
        );
        beside(&path).execute_batch(&sql).unwrap();
    };
    set(9, 9);
    says(&refused(&path).await, "newer release");
    set(3, 1);
    beside(&path).execute_batch("ALTER TABLE idempotency_keys ADD COLUMN extra TEXT").unwrap();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    let version: i64 =
        beside(&path).query_row("SELECT schema_version FROM idempotency_meta", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 3, "not turned back");
}

#[tokio::test]
async fn a_file_of_version_1_is_brought_up_to_date_and_keeps_its_records() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    drop(store);
    beside(&path)
        .execute_batch(
            "ALTER TABLE idempotency_keys DROP COLUMN origin; UPDATE idempotency_meta SET schema_version = 1",
        )
        .unwrap();
    let store = SqliteStore::open(&path).await.unwrap();
    let again = store.claim(&op("k"), &hold()).await.unwrap();
    assert!(matches!(again, ClaimOutcome::InProgress { origin: None, .. }), "{again:?}");
    let from = |name| op("new").with_origin(Some(Origin::new(name).unwrap()));
    acquired(store.claim(&from("the first"), &hold()).await.unwrap());
    // A release of version 1 may still write to the file, and its records have no origin.
    beside(&path).execute_batch("UPDATE idempotency_keys SET origin = NULL WHERE key = 'k'").unwrap();
    let again = store.claim(&from("a retry"), &hold()).await.unwrap();
    let ClaimOutcome::InProgress { origin: Some(origin), .. } = again else { panic!("{again:?}") };
    assert_eq!(origin.as_str(), "the first");
}

#[tokio::test]
async fn a_file_with_business_data_is_taken_and_its_user_version_left_alone() {
    let (_folder, path) = place();
    beside(&path).execute_batch("CREATE TABLE orders (id INTEGER); PRAGMA user_version = 41").unwrap();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    let version: i64 = beside(&path).query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 41);
}

#[tokio::test]
async fn a_file_that_was_removed_or_replaced_is_noticed() {
    let (folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    let aside = folder.path().join("aside.db");
    fs::rename(&path, &aside).unwrap();
    let error = store.claim(&op("l"), &hold()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit);
    says(&error, "removed or replaced");
    fs::write(&path, "").unwrap();
    assert_eq!(store.claim(&op("l"), &hold()).await.unwrap_err().kind(), StoreErrorKind::Unfit);
    fs::rename(&aside, &path).unwrap();
    acquired(store.claim(&op("l"), &hold()).await.unwrap());
    assert!(matches!(store.claim(&op("k"), &hold()).await.unwrap(), ClaimOutcome::InProgress { .. }));
}

#[tokio::test]
async fn no_room_is_an_error_of_those_who_need_it_and_passes() {
    let (_folder, path) = place();
    let store = SqliteStore::options(&path).pages_max(60).open().await.unwrap();
    let first = take_over();
    acquired(store.claim(&op("first"), &first).await.unwrap());
    store.complete(&op("first"), &done(first.token, "x")).await.unwrap();
    let last = take_over();
    acquired(store.claim(&op("last"), &last).await.unwrap());
    let big = vec![b'x'; 1 << 20];
    let error = store.complete(&op("last"), &done(last.token, big.clone())).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert!(error.retryable() && !error.may_have_applied());
    // In one batch with others: they are served.
    let (too_big, replay, fits) = {
        let (big, one) = (done(last.token, big), take_over());
        let (last, first, second) = (op("last"), op("first"), op("second"));
        let request = take_over();
        tokio::join!(store.complete(&last, &big), store.claim(&first, &one), store.claim(&second, &request))
    };
    assert_eq!(too_big.unwrap_err().kind(), StoreErrorKind::Full);
    completed(replay.unwrap());
    acquired(fits.unwrap());
    store.complete(&op("last"), &done(last.token, "small")).await.unwrap();
    assert_eq!(completed(store.claim(&op("last"), &take_over()).await.unwrap()).body(), "small");
    drop(store);
    // With room again.
    let store = SqliteStore::open(&path).await.unwrap();
    let next = take_over();
    acquired(store.claim(&op("next"), &next).await.unwrap());
    store.complete(&op("next"), &done(next.token, vec![0; 1 << 20])).await.unwrap();
}
