//! `onlyonce serve` as an operator meets it: how it starts, what its options do, what it logs, how it stops, and the
//! `keys` commands on the store of a running gateway. Each test runs the real binary.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod admin;
mod clients;
#[path = "../common/mod.rs"]
mod common;
mod idle;
mod logs;
mod memory;
mod operator;
mod options;
mod routes;
mod start;
mod stop;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use testkit::{Answer, Upstream};
use tokio::sync::mpsc::UnboundedSender;

/// An upstream that answers 201 with the number of its run, `run N`, each after `delay`.
async fn numbered(delay: Duration) -> Upstream {
    let runs = AtomicUsize::new(0);
    Upstream::start(move |_| {
        Answer::new(201, format!("run {}", runs.fetch_add(1, Ordering::SeqCst) + 1)).delay(delay)
    })
    .await
}

/// The same, whose first run stays without an end until the sender is dropped.
async fn held() -> (Upstream, UnboundedSender<Bytes>) {
    let (body, first) = Answer::channel();
    body.send("run 1".into()).expect("the answer has the other end");
    let (runs, first) = (AtomicUsize::new(0), Mutex::new(Some(first.status(201))));
    let upstream = Upstream::start(move |_| {
        let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
        first.lock().take().unwrap_or_else(|| Answer::new(201, format!("run {run}")))
    });
    (upstream.await, body)
}
