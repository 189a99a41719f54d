//! The WAL while records are written: copied back beside the writer, used again from its start, gone at the end.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::path::{Path, PathBuf};

use common::*;
use onlyonce_core::Store;
use onlyonce_store_sqlite::SqliteStore;
use tokio::task::JoinSet;

const BODY_BYTES: usize = 64 << 10;
/// Of one round: 25 MiB, some more than what is copied back at once.
const OPERATIONS: usize = 400;
const CALLERS: usize = 16;
const MIB: u64 = 1 << 20;

async fn write(store: &SqliteStore, round: usize) {
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let store = store.clone();
        callers.spawn(async move {
            for number in (caller..OPERATIONS).step_by(CALLERS) {
                let (operation, request) = (op(&format!("{round}-{number}")), take_over());
                acquired(store.claim(&operation, &request).await.unwrap());
                store.complete(&operation, &done(request.token, vec![7; BODY_BYTES])).await.unwrap();
            }
        });
    }
    callers.join_all().await;
}

async fn assert_kept(store: &SqliteStore, rounds: usize) {
    for key in (0..rounds).flat_map(|round| [format!("{round}-0"), format!("{round}-{}", OPERATIONS - 1)]) {
        let reply = completed(store.claim(&op(&key), &take_over()).await.unwrap());
        assert_eq!(reply.body().len(), BODY_BYTES, "{key}");
    }
}

fn wal(path: &Path) -> PathBuf {
    path.with_extension("db-wal")
}

fn wal_mib(path: &Path) -> u64 {
    std::fs::metadata(wal(path)).unwrap().len() / MIB
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_used_again_however_much_is_written_and_is_gone_at_the_end() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    for round in 0..5 {
        write(&store, round).await;
    }
    assert!(wal_mib(&path) < 60, "{} MiB of 125", wal_mib(&path));
    drop(store);
    assert!(!wal(&path).exists());
    assert_kept(&SqliteStore::open_existing(&path).await.unwrap(), 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_an_old_state_holds_nobody_up_and_the_wal_shrinks_into_use_when_it_goes() {
    let (_folder, path) = place();
    let store = SqliteStore::open(&path).await.unwrap();
    let reader = beside(&path);
    let count = || -> i64 {
        reader.query_row("SELECT count(*) FROM idempotency_keys", [], |row| row.get(0)).unwrap()
    };
    reader.execute_batch("BEGIN").unwrap();
    assert_eq!(count(), 0);
    for round in 0..2 {
        write(&store, round).await;
    }
    let held = wal_mib(&path);
    assert!(held >= 45, "{held} MiB: the reader held nothing");
    assert_eq!(count(), 0);
    reader.execute_batch("COMMIT").unwrap();
    for round in 2..6 {
        write(&store, round).await;
    }
    assert!(wal_mib(&path) < held + 40, "{} MiB, {held} of them while there was a reader", wal_mib(&path));
    assert_kept(&store, 6).await;
}
