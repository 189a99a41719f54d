//! What goes wrong only with time or size: idle upstream connections that are closed under us, large uploads.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::time::Duration;

use common::Gateway;
use futures_util::future::join_all;
use testkit::{Answer, Upstream};

/// An upstream that closes idle sockets after 1 s, and clients that pause for about that long: a keep-alive race would be
/// an unknown outcome, so no guarded request may be sent on a connection that is about to be closed.
#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_closes_idle_sockets_makes_no_hold_and_no_502() {
    const CLIENTS: u64 = 24;
    const MINUTES: f64 = 1.5;
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::options().idle_close(Duration::from_secs(1)).start(|_| Answer::ok("ok")).await;
    let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    let end = tokio::time::Instant::now() + Duration::from_secs_f64(MINUTES * 60.0);
    let sent = join_all((0..CLIENTS).map(|client| {
        let to = gateway.client();
        async move {
            let mut sent = 0;
            while tokio::time::Instant::now() < end {
                let answer = common::pay(to, &format!("{client}-{sent}")).await.expect("an answer");
                assert_eq!((answer.status, answer.text()), (200, "ok"), "client {client}, request {sent}");
                sent += 1;
                // 960 to 1060 ms, in steps that do not repeat between clients.
                tokio::time::sleep(Duration::from_millis(960 + (client * 37 + sent * 13) % 100)).await;
            }
            sent
        }
    }))
    .await;
    let sent: u64 = sent.iter().sum();
    assert_eq!(upstream.count() as u64, sent, "each ran once");
    let (ok, stats) = gateway.keys(&["stats", "--json"]).await;
    assert!(ok, "{stats}");
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["unknown"], 0, "{stats}");
    println!("requests={sent} upstream_connections={} holds=0 bad_gateways=0", upstream.connections());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_upload_on_an_unguarded_route_costs_little_memory() {
    const MIB: usize = 1 << 20;
    const SIZE: usize = 100 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::options().forget().start(|_| Answer::ok("stored")).await;
    let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    // The first request pays for what is allocated once.
    gateway.client().request(http::Method::PUT, "/small").body("x").send().await.unwrap();
    let before = gateway.process.peak_rss_bytes();
    let (sender, request) = gateway.client().request(http::Method::PUT, "/large").stream();
    let upload = tokio::spawn(request.send());
    let block = bytes::Bytes::from(vec![7; MIB / 4]);
    for _ in 0..SIZE / block.len() {
        sender.send(block.clone()).await.unwrap();
    }
    drop(sender);
    let answer = upload.await.unwrap().unwrap();
    assert_eq!((answer.status, answer.text()), (200, "stored"));
    assert!(upstream.body_bytes() >= SIZE, "{}", upstream.body_bytes());
    let grown = gateway.process.peak_rss_bytes().saturating_sub(before);
    assert!(grown <= 8 * MIB as u64, "memory grew by {grown} bytes");
    println!("uploaded={SIZE} memory_grew_by={grown}");
}
