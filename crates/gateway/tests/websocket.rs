//! H23: WebSocket goes through; no other upgrade does.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::time::Duration;

use common::{Gateway, QUIET};
use onlyonce_gateway::Drained;
use testkit::{RawConnection, RawUpstream, send_raw, wait_until};

const HANDSHAKE: &str = "GET /chat?x=1 HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
                         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// Switches and echoes; says hello first, in the same segment as its answer.
async fn echo() -> RawUpstream {
    RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nhello";
        connection.write(answer).await;
        while let Some(bytes) = connection.read_exact(4).await {
            connection.write(bytes).await;
        }
        connection.write("bye!").await;
    })
    .await
}

#[tokio::test]
async fn a_websocket_tunnels_both_ways_and_each_side_ends_on_its_own() {
    let upstream = echo().await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    // The first bytes may come with the handshake.
    client.write(format!("{HANDSHAKE}\x00\x01\x02\x03")).await;
    let head = String::from_utf8(client.read_head().await.unwrap()).unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    for line in [
        "connection: upgrade\r\n",
        "upgrade: websocket\r\n",
        "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=",
    ] {
        assert!(head.contains(line), "{line} not in {head}");
    }
    assert_eq!(client.read_exact(9).await.unwrap(), b"hello\x00\x01\x02\x03");
    for round in 0..100u8 {
        let message = [round, 0xff, 0, 13];
        client.write(message).await;
        assert_eq!(client.read_exact(4).await.unwrap(), message);
    }
    client.shutdown().await;
    assert_eq!(client.read_to_end().await, b"bye!");
    let sent = upstream.text();
    assert!(sent.starts_with("GET /chat?x=1 HTTP/1.1\r\n"), "{sent}");
    let lower = sent.to_lowercase();
    for line in [
        "connection: upgrade\r\n",
        "upgrade: websocket\r\n",
        "sec-websocket-version: 13\r\n",
        "x-forwarded-for: 127.0.0.1\r\n",
    ] {
        assert!(lower.contains(line), "{line} not in {lower}");
    }
}

#[tokio::test]
async fn a_refused_websocket_is_a_plain_answer() {
    let upstream = RawUpstream::answering("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await;
    let gateway = Gateway::start(&upstream.url()).await;
    let back = String::from_utf8(send_raw(gateway.addr, HANDSHAKE, QUIET).await).unwrap();
    assert!(back.starts_with("HTTP/1.1 403") && back.ends_with("\r\n\r\nno"), "{back}");
    // What follows is a request of its own again, on another upstream connection.
    let both = format!("{HANDSHAKE}GET /next HTTP/1.1\r\nHost: h\r\n\r\n");
    let back = String::from_utf8(send_raw(gateway.addr, both, QUIET).await).unwrap();
    assert_eq!(back.matches("HTTP/1.1 403").count(), 2, "{back}");
    let last = upstream.received().pop().unwrap();
    assert!(last.starts_with(b"GET /next"), "{}", String::from_utf8_lossy(&last));
}

#[tokio::test]
async fn every_other_upgrade_is_forwarded_without() {
    let plain = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    for request in [
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\nx",
        "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: TLS/1.0\r\n\r\n",
    ] {
        let upstream = RawUpstream::answering(plain).await;
        let gateway = Gateway::start(&upstream.url()).await;
        let back = String::from_utf8(send_raw(gateway.addr, request, QUIET).await).unwrap();
        assert!(back.starts_with("HTTP/1.1 200") && back.ends_with("\r\n\r\nok"), "{request}: {back}");
        let sent = upstream.text().to_lowercase();
        assert!(!sent.contains("upgrade") && !sent.contains("http2-settings"), "{request}: {sent}");
    }
}

#[tokio::test]
async fn a_shutdown_lets_a_tunnel_run_and_cuts_it_at_the_bound() {
    let upstream = echo().await;
    let mut gateway =
        Gateway::with(&upstream.url(), |options| options.shutdown_timeout = Duration::from_secs(1)).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(HANDSHAKE).await;
    client.read_head().await.unwrap();
    client.read_exact(5).await.unwrap();
    gateway.signal();
    wait_until("no connection is accepted", || std::net::TcpStream::connect(gateway.addr).is_err()).await;
    client.write("ping").await;
    assert_eq!(client.read_exact(4).await.unwrap(), b"ping");
    assert_eq!(gateway.drained().await, Drained { connections_cut: 1, operations_left: 0 });
    assert_eq!(client.read_exact(1).await, None, "the tunnel is cut");
}
