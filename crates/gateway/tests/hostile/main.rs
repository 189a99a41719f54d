//! H23: hostile input. Shapes in which two readers could see two requests, behind a service that records each byte: it
//! never gets two requests from one, nor one that passes by a guard, and every refusal is an answer.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

#[path = "../common/mod.rs"]
mod common;
mod frames;
mod http1;
mod http2;
mod readers;

use std::sync::Arc;
use std::time::Duration;

use common::Gateway;
use onlyonce_core::MemoryStore;
use onlyonce_gateway::GatewayOptions;
use testkit::{RawConnection, RawUpstream};

use crate::readers::{Habits, requests};

/// Not to arrive at the service behind: a payment without a key, and it would come from nobody.
const SMUGGLED: &str = "POST /smuggled HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";

/// Answers each request with its own first line, so that an answer to another shows.
async fn service() -> RawUpstream {
    RawUpstream::start(|_, mut connection| async move {
        while let Some(head) = connection.read_head().await {
            let head = String::from_utf8_lossy(&head).into_owned();
            let lower = head.to_lowercase();
            if lower.contains("transfer-encoding: chunked") {
                read_chunks(&mut connection).await;
            } else if let Some((_, rest)) = lower.split_once("content-length: ") {
                let len = rest.lines().next().unwrap().trim().parse().unwrap();
                connection.read_exact(len).await;
            }
            let line = head.lines().next().unwrap_or_default();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{line}", line.len());
            connection.write(answer).await;
        }
    })
    .await
}

async fn read_chunks(connection: &mut RawConnection) -> Option<()> {
    loop {
        let line = connection.read_until(b"\r\n").await?;
        let size = usize::from_str_radix(std::str::from_utf8(&line).ok()?.trim(), 16).ok()?;
        if size == 0 {
            while connection.read_until(b"\r\n").await? != b"\r\n" {}
            return Some(());
        }
        connection.read_exact(size + 2).await?;
    }
}

/// The whole gateway: POST and PATCH need a key.
async fn gateway(upstream: &str, change: impl FnOnce(&mut GatewayOptions)) -> Gateway {
    Gateway::guarded(upstream, Arc::new(MemoryStore::new()), change, |builder| builder).await
}

/// The first lines of all requests that reached the service, on which readers of every habit agree.
fn arrived(service: &RawUpstream, what: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for connection in service.received() {
        let mut readings = Habits::all().map(|habits| requests(&connection, habits));
        let first = readings.next().unwrap();
        for other in readings {
            assert_eq!(first, other, "{what}: not the same to all readers");
        }
        lines.extend(first);
    }
    lines
}

/// Nobody else's answers are mixed up afterwards.
async fn still_serves(gateway: &Gateway, what: &str) {
    for n in 0..2 {
        let response = gateway.client().get(&format!("/after/{n}")).send().await;
        let text = response.unwrap_or_else(|error| panic!("{what}: {error:#}")).text().to_owned();
        assert_eq!(text, format!("GET /after/{n} HTTP/1.1"), "{what}");
    }
}

/// What comes back until the gateway closes or has nothing more to say.
async fn say(gateway: &Gateway, bytes: impl AsRef<[u8]>) -> String {
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(bytes).await;
    let (back, _) = client.read_until_quiet(Duration::from_millis(300)).await;
    String::from_utf8_lossy(&back).into_owned()
}
