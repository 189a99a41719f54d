//! What must be on disk before a message leaves: the claim before the upstream is asked, the record before the last byte
//! of the reply. Shown by the order of the system calls, since the page cache survives a kill -9 and would hide a missing
//! sync.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Gateway, pay};
use testkit::{Answer, Process, Upstream};

/// The system calls of one payment through the gateway, in order.
async fn traced(store: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::start(|_| Answer::ok("THE-UPSTREAM-ANSWER")).await;
    let trace = folder.path().join("trace");
    let mut command = tokio::process::Command::new("strace");
    command
        .current_dir(folder.path())
        .args([
            // The tracer is a grandchild: the process that is signalled, waited for and killed is the gateway itself.
            "-D",
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
    let mut gateway = Gateway::ready(process, folder.path()).await.expect("the gateway starts under strace");
    let answer = pay(gateway.client(), "durable").await.unwrap();
    assert_eq!((answer.status, answer.text()), (200, "THE-UPSTREAM-ANSWER"));
    gateway.process.sigterm().unwrap();
    gateway.process.wait_exit().await.unwrap();
    testkit::wait_for("the trace of the reply", async || reply(&lines(&trace)).map(drop)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    lines(&trace)
}

fn lines(trace: &Path) -> Vec<String> {
    std::fs::read_to_string(trace).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn is_read(line: &str) -> bool {
    ["read(", "readv(", "recvfrom(", "recvmsg("].iter().any(|call| line.contains(call))
        || line.contains("read resumed")
        || line.contains("recvfrom resumed")
}

fn is_write(line: &str) -> bool {
    ["write(", "writev(", "sendto(", "sendmsg("].iter().any(|call| line.contains(call))
}

/// The call that writes the reply to the client.
fn reply(trace: &[String]) -> Option<usize> {
    trace.iter().position(|line| {
        is_write(line) && line.contains("HTTP/1.1 200") && line.contains("THE-UPSTREAM-ANSWER")
    })
}

/// Whether a sync came to its end between two calls.
fn synced(trace: &[String], from: Option<usize>, to: Option<usize>) -> bool {
    let (from, to) = (from.expect("the message came in"), to.expect("the message went out"));
    assert!(from < to, "in before out");
    // Ended, not only begun.
    trace[from..to].iter().any(|line| line.contains("sync") && line.ends_with("= 0"))
}

/// Between the request of the client and that to the upstream.
fn claim_is_synced(trace: &[String]) -> bool {
    let came = trace.iter().position(|line| is_read(line) && line.contains("POST /pay"));
    let sent = trace.iter().position(|line| is_write(line) && line.contains("POST /pay"));
    synced(trace, came, sent)
}

/// Between the upstream's answer and the reply to the client.
fn record_is_synced(trace: &[String]) -> bool {
    let came = trace.iter().position(|line| is_read(line) && line.contains("THE-UPSTREAM-ANSWER"));
    synced(trace, came, reply(trace))
}

#[tokio::test(flavor = "multi_thread")]
async fn claim_and_record_are_synced_before_the_messages_that_rest_on_them() {
    let trace = traced("sqlite:onlyonce.db").await;
    assert!(claim_is_synced(&trace), "the upstream was asked on a claim that a power cut could take back");
    assert!(record_is_synced(&trace), "the client was told of a record that a power cut could take back");
}

/// The same checks find a store that does not sync: they can fail.
#[tokio::test(flavor = "multi_thread")]
async fn without_syncs_the_checks_fail() {
    let trace = traced("sqlite:onlyonce.db?synchronous=off").await;
    assert!(!claim_is_synced(&trace) && !record_is_synced(&trace));
}
