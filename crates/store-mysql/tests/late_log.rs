//! A reply that was told survives a crash of the server, also when it was told to somebody who only saw it.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, OnceOutcome, Reply, Store};
use onlyonce_store_mysql::mysql_async::Conn;
use onlyonce_store_mysql::{MysqlStore, Transaction};
use testkit::{Mariadb, PATIENCE, wait_until};
use tokio::sync::Notify;

/// The server's log, written late: each write to it waits. Its commits are seen by others meanwhile.
struct LateLog(Child);

impl LateLog {
    async fn of(server: &Mariadb) -> Self {
        let home = server.socket().parent().unwrap().to_owned();
        let pid = std::fs::read_to_string(home.join("mariadbd.pid")).unwrap().trim().to_owned();
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-P"]).arg(home.join("data/ib_logfile0"));
        strace.args(["-e", "trace=pwrite64", "-e", "inject=pwrite64:delay_enter=1500000", "-p", &pid]);
        let strace = strace.stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let strace = Self(strace.expect("strace must be installed: it delays the server's writes"));
        let tasks = format!("/proc/{pid}/task");
        wait_until("strace to be attached to every thread", || {
            std::fs::read_dir(&tasks).unwrap().flatten().all(|task| {
                let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
                !status.contains("TracerPid:\t0")
            })
        })
        .await;
        strace
    }
}

impl Drop for LateLog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn open(server: &Mariadb, database: &str) -> MysqlStore {
    let options = MysqlStore::options(&server.url(database)).unwrap();
    options.statement_timeout(PATIENCE).open().await.unwrap()
}

async fn connect(server: &Mariadb, database: &str) -> Conn {
    Conn::from_url(server.url(database)).await.unwrap()
}

async fn restarted(server: &Mariadb, late: LateLog) {
    server.kill_9().await;
    drop(late);
    server.start().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_waits_for_the_log_of_the_commit_that_it_tells() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let (owner, other) = (open(&server, &database).await, open(&server, &database).await);
    let request = hold();
    acquired(owner.claim(&op("k"), &request).await.unwrap());
    let late = LateLog::of(&server).await;
    let completing = tokio::spawn({
        let completion = done(request.token, "the reply");
        async move { owner.complete(&op("k"), &completion).await }
    });
    loop {
        match other.claim(&op("k"), &hold()).await.unwrap() {
            ClaimOutcome::InProgress { .. } => tokio::time::sleep(Duration::from_millis(5)).await,
            ClaimOutcome::Completed(_) => break,
            outcome => panic!("{outcome:?}"),
        }
    }
    restarted(&server, late).await;
    let _ = completing.await.unwrap();
    let after = open(&server, &database).await;
    assert_eq!(completed(after.claim(&op("k"), &hold()).await.unwrap()).body(), &b"the reply"[..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_in_a_transaction_waits_for_the_log_of_the_commit_that_it_tells() {
    let server = Mariadb::private().await;
    let database = server.database().await;
    let (first, second) = (open(&server, &database).await, open(&server, &database).await);
    let (mut its, mut theirs) = (connect(&server, &database).await, connect(&server, &database).await);
    let late = LateLog::of(&server).await;
    let began = Arc::new(Notify::new());
    let running = tokio::spawn({
        let began = Arc::clone(&began);
        async move {
            let work = async move |_: &mut Transaction<'_>| {
                began.notify_one();
                // Time for the other one to stand before the row.
                tokio::time::sleep(Duration::from_millis(300)).await;
                Ok(Reply::ok("the reply"))
            };
            first.once(&mut its, &op("k"), work).await.map(drop)
        }
    });
    began.notified().await;
    let told = second.once(&mut theirs, &op("k"), async |_: &mut _| Ok(Reply::ok("another"))).await.unwrap();
    assert!(matches!(told, OnceOutcome::Replayed(_)), "{told:?}");
    restarted(&server, late).await;
    let _ = running.await.unwrap();
    let after = open(&server, &database).await;
    assert_eq!(completed(after.claim(&op("k"), &hold()).await.unwrap()).body(), &b"the reply"[..]);
}
