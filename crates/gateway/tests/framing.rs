//! H23: shapes in which two readers could see two requests. The upstream never gets more than the one request that
//! was read, and the connection closes after a doubtful one.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Gateway, QUIET};
use onlyonce_core::MemoryStore;
use testkit::{RawConnection, RawUpstream, send_raw};

const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";

/// What the client got, and what reached the upstream.
async fn attempt(request: &str) -> (String, String) {
    let upstream = RawUpstream::start(|_, mut connection| async move {
        while let Some(head) = connection.read_head().await {
            // Reads the body by its own light, as a simple upstream does.
            let head = String::from_utf8(head).unwrap().to_lowercase();
            if head.contains("transfer-encoding: chunked") {
                connection.read_until(b"0\r\n\r\n").await;
            } else if let Some((_, rest)) = head.split_once("content-length: ") {
                let len = rest.lines().next().unwrap().trim().parse().unwrap();
                connection.read_exact(len).await;
            }
            connection.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        }
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    let back = send_raw(gateway.addr, request, QUIET).await;
    (String::from_utf8_lossy(&back).into_owned(), upstream.text())
}

fn answers(back: &str) -> usize {
    back.split("HTTP/1.1 ").skip(1).filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())).count()
}

#[tokio::test]
async fn refused_shapes_never_reach_the_upstream_and_close_the_connection() {
    let shapes = [
        ("two lengths", "Content-Length: 0\r\nContent-Length: 40\r\n\r\n"),
        ("a list of lengths", "Content-Length: 0, 40\r\n\r\n"),
        ("a signed length", "Content-Length: +3\r\n\r\nabc"),
        ("a negative length", "Content-Length: -1\r\n\r\n"),
        ("a hexadecimal length", "Content-Length: 0x3\r\n\r\nabc"),
        ("a huge length", "Content-Length: 99999999999999999999\r\n\r\nabc"),
        ("an empty length", "Content-Length: \r\n\r\nabc"),
        ("an unknown coding", "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
        ("chunked, then another", "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
        ("another, then chunked", "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n"),
        ("gzip, then chunked", "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        ("chunked twice", "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
        ("two lines", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("two lines, one odd", "Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n"),
        ("a space before the colon", "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
        ("a folded line", "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
        ("a vertical tab", "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
        ("a quoted coding", "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
        ("a NUL", "X-A: a\0b\r\n\r\n"),
        ("a bare CR", "X-A: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("two hosts", "Host: other\r\n\r\n"),
        ("a host with a path", "\r\n"),
        ("a header without a name", ": x\r\n\r\n"),
    ];
    for (what, rest) in shapes {
        let host = if what == "a host with a path" { "h/x" } else { "h" };
        let request = format!("POST /outer HTTP/1.1\r\nHost: {host}\r\n{rest}{SMUGGLED}");
        let (back, sent) = attempt(&request).await;
        assert!(back.starts_with("HTTP/1.1 400") && answers(&back) == 1, "{what}: {back:?}");
        assert_eq!(sent, "", "{what}");
    }
    let (back, sent) = attempt(&format!("POST / HTTP/1.1\r\n\r\n{SMUGGLED}")).await;
    assert!(back.starts_with("HTTP/1.1 400") && answers(&back) == 1 && sent.is_empty(), "no host: {back}");
    let chunked_1_0 = format!("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{SMUGGLED}");
    let (back, sent) = attempt(&chunked_1_0).await;
    assert!(back.starts_with("HTTP/1.1 400") && answers(&back) == 1 && sent.is_empty(), "HTTP/1.0: {back}");
}

#[tokio::test]
async fn length_and_chunks_together_are_read_as_chunks_reframed_and_the_connection_closed() {
    for head in [
        "Content-Length: 44\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 44",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nContent-Length: 44",
    ] {
        let (back, sent) = attempt(&format!(
            "POST /outer HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n3\r\nabc\r\n0\r\n\r\n{SMUGGLED}"
        ))
        .await;
        assert!(back.starts_with("HTTP/1.1 200") && answers(&back) == 1, "{head}: {back}");
        assert!(!sent.contains("smuggled"), "{head}: {sent}");
        let lower = sent.to_lowercase();
        assert!(!lower.contains("content-length") && lower.contains("transfer-encoding: chunked"), "{sent}");
        assert!(sent.ends_with("\r\n\r\n3\r\nabc\r\n0\r\n\r\n"), "{sent}");
    }
}

#[tokio::test]
async fn bad_chunks_never_complete_at_the_upstream() {
    for (what, chunks) in [
        ("no hexadecimal size", "zz\r\nabc\r\n0\r\n\r\n"),
        ("a signed size", "+3\r\nabc\r\n0\r\n\r\n"),
        ("a prefixed size", "0x3\r\nabc\r\n0\r\n\r\n"),
        ("a size too big for 64 bits", "10000000000000003\r\nabc\r\n0\r\n\r\n"),
        ("too short", "5\r\nabc\r\n0\r\n\r\n"),
        ("too long", "2\r\nabc\r\n0\r\n\r\n"),
        ("a bare LF after the size", "3\nabc\r\n0\r\n\r\n"),
        ("a negative size", "-3\r\nabc\r\n0\r\n\r\n"),
    ] {
        let request = format!(
            "POST /outer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}{SMUGGLED}"
        );
        let (back, sent) = attempt(&request).await;
        assert!(back.starts_with("HTTP/1.1 400 ") && back.contains("request-malformed"), "{what}: {back}");
        assert!(!sent.contains("\r\n0\r\n\r\n"), "{what}: {sent}");
        assert!(!sent.contains("GET /smuggled"), "{what}: {sent}");
    }
}

#[tokio::test]
async fn bad_chunks_of_a_guarded_request_run_nothing_and_are_no_lost_body() {
    let upstream = RawUpstream::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let store = Arc::new(MemoryStore::new());
    let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |builder| builder).await;
    for (chunks, code) in [("zz\r\nabc\r\n", "request-malformed"), ("3\r\nab", "body-incomplete")] {
        let mut client = RawConnection::open(gateway.addr).await;
        let head = "POST / HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n";
        client.write(format!("{head}{chunks}")).await;
        client.shutdown().await;
        let (back, _) = client.read_until_quiet(QUIET).await;
        let back = String::from_utf8_lossy(&back);
        assert!(back.starts_with("HTTP/1.1 400 ") && back.contains(code), "{chunks}: {back}");
    }
    assert_eq!(upstream.text(), "");
}

#[tokio::test]
async fn a_whole_url_without_a_path_asks_for_the_root() {
    for (url, target) in [("http://h", "/"), ("http://h#x", "/"), ("http://h?q", "/?q"), ("http://h/#x", "/")]
    {
        let (_, sent) = attempt(&format!("GET {url} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")).await;
        assert!(sent.starts_with(&format!("GET {target} HTTP/1.1\r\n")), "{url}: {sent}");
    }
}

#[tokio::test]
async fn chunk_extensions_end_here() {
    let (back, sent) = attempt(
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3;a=\"b\";c\r\nabc\r\n0;x\r\n\r\n",
    )
    .await;
    assert!(back.starts_with("HTTP/1.1 200"), "{back}");
    assert!(sent.ends_with("\r\n\r\n3\r\nabc\r\n0\r\n\r\n"), "{sent}");
}

#[tokio::test]
async fn the_same_length_twice_is_one_length() {
    let (back, sent) = attempt(
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
    )
    .await;
    // Either reading is safe: refused, or forwarded with one length.
    assert!(
        back.starts_with("HTTP/1.1 400") || sent.to_lowercase().matches("content-length").count() == 1,
        "{sent}"
    );
}

#[tokio::test]
async fn a_body_that_looks_like_a_request_stays_a_body() {
    let request =
        format!("POST /outer HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{SMUGGLED}", SMUGGLED.len());
    let (back, sent) = attempt(&request).await;
    assert_eq!(answers(&back), 1, "{back}");
    assert_eq!(sent.matches("x-forwarded-for").count(), 1, "{sent}");
}

#[tokio::test]
async fn pipelined_requests_are_each_forwarded_once_and_answered_in_order() {
    let one = |n| format!("GET /{n} HTTP/1.1\r\nHost: h\r\n\r\n");
    let (back, sent) = attempt(&(one(1) + &one(2) + &one(3))).await;
    assert_eq!(answers(&back), 3, "{back}");
    let at = |n: u8| sent.find(&format!("GET /{n} ")).unwrap();
    assert!(at(1) < at(2) && at(2) < at(3), "{sent}");
}

#[tokio::test]
async fn an_upstream_that_says_more_than_its_answer_poisons_nobody() {
    let upstream = RawUpstream::start(|number, mut connection| async move {
        connection.read_head().await;
        let answer =
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil";
        connection
            .write(if number == 0 { answer } else { "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood" })
            .await;
        connection.read_head().await;
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    assert_eq!(gateway.client().get("/").send().await.unwrap().text(), "ok");
    assert_eq!(gateway.client().get("/").send().await.unwrap().text(), "good");
}

#[tokio::test]
async fn an_upstream_answer_framed_twice_is_framed_once_for_the_client() {
    let answer =
        "HTTP/1.1 200 OK\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
    let upstream = RawUpstream::answering(answer).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let request = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    let back = send_raw(gateway.addr, request, Duration::from_secs(20)).await;
    let back = String::from_utf8(back).unwrap().to_lowercase();
    assert!(!back.contains("content-length") && back.ends_with("2\r\nok\r\n0\r\n\r\n"), "{back}");
}

#[tokio::test]
async fn upstream_nonsense_is_a_502() {
    for answer in [
        "garbage\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
    ] {
        let upstream = RawUpstream::answering(answer).await;
        let gateway = Gateway::start(&upstream.url()).await;
        let response = gateway.client().get("/").send().await.unwrap();
        assert_eq!((response.status, response.code().as_str()), (502, "upstream-failed"), "{answer}");
    }
}

#[tokio::test]
async fn an_upstream_head_is_held_to_the_limits_of_a_head() {
    let long = format!("X-A: {}\r\n", "a".repeat(70_000));
    let many = "X-A: a\r\n".repeat(101);
    for lines in [long, many] {
        let answer = format!("HTTP/1.1 204 No Content\r\n{lines}\r\n");
        let upstream = RawUpstream::answering(answer).await;
        let tight = Gateway::start(&upstream.url()).await;
        let response = tight.client().get("/").send().await.unwrap();
        assert_eq!((response.status, response.code().as_str()), (502, "upstream-failed"));
        let wide = Gateway::with(&upstream.url(), |options| {
            options.max_headers = 200;
            options.max_header_bytes = 128 * 1024;
        })
        .await;
        // By hand: a client's own limits are not the matter.
        let back = send_raw(wide.addr, "GET / HTTP/1.1\r\nHost: h\r\n\r\n", QUIET).await;
        assert!(back.starts_with(b"HTTP/1.1 204 "), "{}", String::from_utf8_lossy(&back));
    }
}

#[tokio::test]
async fn limits_past_all_reason_are_taken_for_the_highest() {
    let upstream = RawUpstream::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let gateway = Gateway::with(&upstream.url(), |options| {
        options.max_headers = usize::MAX;
        options.max_header_bytes = usize::MAX;
        options.max_connections = usize::MAX;
    })
    .await;
    for client in [gateway.client(), gateway.h2c()] {
        assert_eq!(client.get("/").send().await.unwrap().status, 204);
    }
}

#[tokio::test]
async fn a_head_past_the_limits_is_431() {
    let upstream = RawUpstream::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let gateway = Gateway::start(&upstream.url()).await;
    let long = format!("GET / HTTP/1.1\r\nHost: h\r\nX-A: {}\r\n\r\n", "a".repeat(70_000));
    let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X-A: a\r\n".repeat(101));
    for request in [long, many] {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(request).await;
        let head = client.read_head().await.unwrap();
        assert!(head.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&head));
    }
    assert_eq!(upstream.text(), "");
}
