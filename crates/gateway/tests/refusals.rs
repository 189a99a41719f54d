//! H23: every refusal is an answer that says why, also those of the HTTP implementation, and slow senders are cut.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Gateway;
use onlyonce_core::MemoryStore;
use onlyonce_gateway::GatewayOptions;
use testkit::{Answer, RawConnection, Upstream, within};

/// All that comes back until the gateway closes: status and code of its one answer.
async fn refusal(client: &mut RawConnection) -> (u16, String) {
    let back = String::from_utf8(client.read_to_end().await).unwrap();
    let (head, body) = back.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {back:?}"));
    assert!(head.starts_with("HTTP/1.1 "), "{back}");
    let lower = head.to_lowercase();
    assert!(lower.contains("\r\ncontent-type: application/problem+json"), "{back}");
    assert!(lower.contains("\r\nconnection: close") && lower.contains("\r\ndate: "), "{back}");
    assert!(lower.contains(&format!("\r\ncontent-length: {}", body.len())), "{back}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {back}"));
    assert_eq!(body["status"].as_u64().unwrap(), head[9..12].parse::<u64>().unwrap(), "{back}");
    (head[9..12].parse().unwrap(), body["code"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn what_the_http_implementation_refuses_is_a_problem_document() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let long = format!("GET / HTTP/1.1\r\nHost: h\r\nX-A: {}\r\n\r\n", "a".repeat(70_000));
    let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X-A: a\r\n".repeat(101));
    for (request, status, code) in [
        ("GET / HTTP/1.1\r\nHost: h\r\nX : 1\r\n\r\n", 400, "request-malformed"),
        ("GET / HTTP/9.1\r\nHost: h\r\n\r\n", 400, "request-malformed"),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\x7c", 400, "request-malformed"),
        ("GET /\x01 HTTP/1.1\r\nHost: h\r\n\r\n", 400, "request-malformed"),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400, "request-malformed"),
        (&long, 431, "head-too-large"),
        (&many, 431, "head-too-large"),
    ] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(request).await;
        assert_eq!(refusal(&mut client).await, (status, code.to_owned()), "{request:.80?}");
        // The same on a connection that has served others, which are answered first.
        let mut client = RawConnection::open(gateway.addr).await;
        client
            .write(format!("GET /1 HTTP/1.1\r\nHost: h\r\n\r\nHEAD /2 HTTP/1.1\r\nHost: h\r\n\r\n{request}"))
            .await;
        for _ in 0..2 {
            let head = client.read_head().await.unwrap();
            assert!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
        }
        assert_eq!(refusal(&mut client).await, (status, code.to_owned()), "kept: {request:.80?}");
    }
}

#[tokio::test]
async fn an_answer_that_looks_like_a_bare_refusal_is_not_touched() {
    let bare = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let upstream = Upstream::start(move |_| Answer::new(400, bare)).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let client = gateway.client();
    let mut connection = client.connect().await.unwrap();
    for _ in 0..3 {
        let response = connection.send(client.get("/")).await.unwrap();
        assert_eq!((response.status, response.text()), (400, bare));
    }
}

#[tokio::test]
async fn http_2_heads_past_the_limits_are_refused_with_a_problem_document() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::with(&upstream.url(), |options| options.max_header_bytes = 9000).await;
    let client = gateway.h2c();
    let long = client.get("/").header("x-a", "a".repeat(10_000)).send().await.unwrap();
    assert_eq!((long.status, long.code().as_str()), (431, "head-too-large"));
    let mut many = client.get("/");
    for n in 0..101 {
        many = many.header(&format!("x-{n}"), "1");
    }
    let many = many.send().await.unwrap();
    assert_eq!((many.status, many.code().as_str()), (431, "head-too-large"));
    let huge = client.get("/").header("x-a", "a".repeat(30_000)).send().await.unwrap();
    assert_eq!(huge.status, 431, "an answer, though a bare one");
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn slow_heads_are_cut_by_the_header_timeout_and_told() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway =
        Gateway::with(&upstream.url(), |options| options.header_timeout = Duration::from_millis(300)).await;
    for opening in ["P", "PRI", "G", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: h\r\n"] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(opening).await;
        assert_eq!(refusal(&mut client).await, (408, "head-timeout".into()), "{opening:?}");
    }
    // One that never stops, a byte at a time; on a connection that has served another.
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: h\r\n\r\nGET / HTTP/1.1\r\nX: ").await;
    assert!(client.read_head().await.unwrap().starts_with(b"HTTP/1.1 200"));
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(client.read_head().await.unwrap().starts_with(b"HTTP/1.1 200"));
    let drip = async {
        client.write("GET / HTTP/1.1\r\nX: ").await;
        while client.write("a").await {
            if client.read_until_quiet(Duration::from_millis(50)).await.1 {
                return;
            }
        }
    };
    within("the drip is cut", drip).await;
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn a_head_that_breaks_off_is_told() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    for opening in ["GET", "GET / HTTP/1.1\r\nHost: h\r\n"] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(opening).await;
        client.shutdown().await;
        assert_eq!(refusal(&mut client).await, (400, "request-malformed".into()), "{opening:?}");
    }
    let mut silent = RawConnection::open(gateway.addr).await;
    silent.shutdown().await;
    assert_eq!(silent.read_to_end().await, b"", "nothing was asked, nothing is answered");
}

#[tokio::test]
async fn a_client_that_writes_on_to_who_refused_it_reads_why() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::with(&upstream.url(), |options| options.max_requests = 0).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1200000\r\n\r\n").await;
    for _ in 0..12 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(client.write(vec![b'x'; 100_000]).await, "the connection was reset");
    }
    assert_eq!(refusal(&mut client).await, (503, "overloaded".into()));
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn slow_bodies_are_cut_by_the_body_timeout_and_told() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway =
        Gateway::with(&upstream.url(), |options| options.body_timeout = Duration::from_millis(300)).await;
    for head in ["Content-Length: 5000", "Transfer-Encoding: chunked"] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(format!("PUT / HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n")).await;
        assert_eq!(refusal(&mut client).await, (408, "body-timeout".into()), "{head}");
    }
    // A byte now and then is no progress.
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n").await;
    let drip = async {
        let mut back = Vec::new();
        loop {
            client.write("a").await;
            let (bytes, closed) = client.read_until_quiet(Duration::from_millis(50)).await;
            back.extend(bytes);
            if closed || !back.is_empty() {
                return String::from_utf8(back).unwrap();
            }
        }
    };
    let back = within("the drip is cut", drip).await;
    assert!(back.starts_with("HTTP/1.1 408") && back.contains("body-timeout"), "{back}");
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn a_guarded_refusal_that_ends_the_connection_says_so_and_another_keeps_it() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let store = Arc::new(MemoryStore::new());
    let soon = |options: &mut GatewayOptions| options.body_timeout = Duration::from_millis(300);
    let gateway = Gateway::guarded(&upstream.url(), store, soon, |b| b).await;
    let chunks = format!("186a0\r\n{}\r\n", "x".repeat(100_000)).repeat(15);
    for (lines, body, refused) in [
        ("Idempotency-Key: k\r\nContent-Length: 3000000", "", (413, "body-too-large")),
        ("Idempotency-Key: k\r\nTransfer-Encoding: chunked", &*chunks, (413, "body-too-large")),
        ("Idempotency-Key: k\r\nContent-Length: 50", "abc", (408, "body-timeout")),
        ("Idempotency-Key: k\r\nTransfer-Encoding: chunked", "3\r\nabc\r\n", (408, "body-timeout")),
        ("Expect: 100-continue\r\nContent-Length: 50", "", (400, "key-missing")),
        ("Content-Length: 3000000", "", (400, "key-missing")),
    ] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(format!("POST /pay HTTP/1.1\r\nHost: h\r\n{lines}\r\n\r\n{body}")).await;
        let (status, code) = refused;
        assert_eq!(refusal(&mut client).await, (status, code.to_owned()), "{lines}");
    }
    // One whose body is there is read over, and the connection serves the next.
    let mut client = RawConnection::open(gateway.addr).await;
    for _ in 0..3 {
        client.write("POST /pay HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc").await;
        let head = String::from_utf8(client.read_head().await.unwrap()).unwrap().to_lowercase();
        assert!(head.starts_with("http/1.1 400") && !head.contains("connection: close"), "{head}");
        let length: usize =
            head.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap();
        client.read_exact(length).await.unwrap();
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn a_body_that_keeps_coming_may_take_longer_than_the_body_timeout() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.len().to_string())).await;
    let gateway = Gateway::with(&upstream.url(), |options| {
        options.body_timeout = Duration::from_secs(2);
        options.upstream_timeout = Duration::from_secs(2);
    })
    .await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 20000\r\n\r\n").await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        client.write(vec![b'x'; 2000]).await;
    }
    let head = client.read_head().await.unwrap();
    assert!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
}
