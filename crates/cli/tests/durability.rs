//! The record is on disk before the last byte of the reply is sent: shown by the order of the system calls, since the
//! page cache survives a kill -9 and would hide a missing sync.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Gateway, pay};
use testkit::{Answer, Process, Upstream};

/// One traced payment: whether a sync of the log came between the upstream's answer and the reply to the client.
async fn synced_before_the_reply(store: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::start(|_| Answer::ok("THE-UPSTREAM-ANSWER")).await;
    let trace = folder.path().join("trace");
    let mut command = tokio::process::Command::new("strace");
    command
        .current_dir(folder.path())
        .args([
            "-f",
            "-s",
            "512",
            "-e",
            "trace=fsync,fdatasync,sync_file_range,write,writev,sendto,sendmsg,recvfrom,read,readv,recvmsg",
        ])
        .arg("-o")
        .arg(&trace)
        .arg(common::PROGRAM)
        .args(["serve", "--listen", "127.0.0.1:0", "--upstream", &upstream.url(), "--store", store]);
    let process = Process::from_command(command).expect("strace is installed");
    let gateway = Gateway::ready(process, folder.path()).await.expect("the gateway starts under strace");
    let answer = pay(gateway.client(), "durable").await.unwrap();
    assert_eq!((answer.status, answer.text()), (200, "THE-UPSTREAM-ANSWER"));
    // The tracer is told, and ends its child: strace passes the signal on and writes the rest of its log.
    gateway.process.sigterm().unwrap();
    testkit::wait_for("the trace of the reply", async || reply_position(&trace).map(drop)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let lines = std::fs::read_to_string(&trace).unwrap();
    let lines: Vec<_> = lines.lines().collect();
    let is_read = |line: &str| line.contains("read") || line.contains("recv");
    let from = lines
        .iter()
        .position(|l| is_read(l) && l.contains("THE-UPSTREAM-ANSWER"))
        .expect("the answer was read");
    let to = reply_position(&trace).expect("the reply was written");
    assert!(from < to, "the upstream's answer is read before the reply is written");
    lines[from..to].iter().any(|line| line.contains("fdatasync") || line.contains("fsync"))
}

/// The line that writes the reply to the client.
fn reply_position(trace: &Path) -> Option<usize> {
    let text = std::fs::read_to_string(trace).ok()?;
    text.lines().position(|line| {
        let is_write = ["write(", "writev(", "sendto(", "sendmsg("].iter().any(|call| line.contains(call));
        is_write && line.contains("HTTP/1.1 200") && line.contains("THE-UPSTREAM-ANSWER")
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_is_synced_before_the_reply_is_sent() {
    assert!(synced_before_the_reply("sqlite:onlyonce.db").await);
}

/// The same check finds a store that does not sync: it can fail.
#[tokio::test(flavor = "multi_thread")]
async fn without_syncs_the_check_fails() {
    assert!(!synced_before_the_reply("sqlite:onlyonce.db?synchronous=off").await);
}
