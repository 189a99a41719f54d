//! H23: what passes through the gateway is what was sent. A corpus of requests and replies goes directly, through the
//! gateway and through nginx; each difference from the direct way has its reason, and stands in `docs/transparency.md`.
//!
//! `ONLYONCE_WRITE_DOCS=1` writes the page anew.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod case;
mod compare;
mod corpus;
mod h2;
mod page;
mod play;
mod reasons;
mod tunnels;
mod wire;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use onlyonce_core::MemoryStore;
use onlyonce_gateway::{GatewayOptions, engine, run};
use onlyonce_http::IdempotencyLayer;
use testkit::Nginx;
use tokio::net::TcpListener;

use crate::play::Origin;

/// Differences, each with the cases that show it.
type Found = BTreeMap<String, Vec<String>>;

/// The whole gateway; a request without a key passes, as it does for clients that know nothing of keys.
async fn gateway(upstream: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let options = GatewayOptions::new(addr, upstream.parse().unwrap());
    tokio::spawn(async move {
        let idem = engine(Arc::new(MemoryStore::new()), &options).build();
        let layer = IdempotencyLayer::new(&idem).optional();
        run(listener, &options, &idem, &layer, std::future::pending()).await
    });
    addr
}

#[tokio::test(flavor = "multi_thread")]
async fn every_difference_from_the_direct_way_has_its_reason() {
    let origin = Origin::start().await;
    let gateway = gateway(&origin.url()).await;
    let nginx = Nginx::proxy(origin.addr()).await;
    let (mut ours, mut theirs) = (Found::new(), Found::new());
    let mut groups = Vec::new();
    for (group, cases) in corpus::cases() {
        groups.push((group, cases.len()));
        for case in cases {
            let direct = origin.play(&case, origin.addr()).await;
            assert!(!direct.requests.is_empty(), "{}: nothing arrives on the direct way", case.name);
            // nginx may break off with a client that ends its side, or be quicker.
            let ways = if case.ends_early() { 1 } else { 2 };
            for (to, found) in [(gateway, &mut ours), (nginx.addr(), &mut theirs)].into_iter().take(ways) {
                let through = origin.play(&case, to).await;
                for difference in compare::differences(&direct, &through) {
                    found.entry(difference).or_default().push(case.name.clone());
                }
            }
        }
    }
    h2::play(&mut ours, &mut theirs).await;
    groups.push(("HTTP/2 on either side", h2::len() * h2::WAYS));
    tunnels::play(&mut ours, &mut theirs).await;
    groups.push(("WebSocket with HTTP/2 on either side", tunnels::len() * tunnels::WAYS));
    let total: usize = groups.iter().map(|(_, len)| len).sum();
    assert!(total >= 150, "{total} cases");
    let unexplained: Vec<_> =
        ours.iter().filter(|(difference, _)| reasons::reason(difference).is_none()).collect();
    assert!(unexplained.is_empty(), "without a reason: {unexplained:#?}");
    page::check(&groups, &ours, &theirs);
}
