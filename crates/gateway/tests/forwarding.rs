//! H23: what goes on to the upstream and back, header by header.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::time::Duration;

use common::{Gateway, QUIET};
use http::Method;
use testkit::{Answer, RawUpstream, Upstream, send_raw};

#[tokio::test]
async fn method_target_headers_and_body_go_on_untouched() {
    let upstream = Upstream::start(|seen| Answer::new(201, seen.body.clone()).header("x-up", "1")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let body: Vec<u8> = (0..=255).collect();
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"] {
        let path = "/a//b/../%2e%2E/%c3%a9/;x?q=1&q=2&empty&pct=%2F%zz?again";
        let request = gateway.client().request(Method::from_bytes(method.as_bytes()).unwrap(), path);
        let request = request.header("x-a", "1").header("x-a", "2").header("x-bin", b"\xe9\xff");
        let response = request.header("accept-encoding", "br").body(body.clone()).send().await.unwrap();
        assert_eq!((response.status, response.header("x-up")), (201, Some("1")));
        assert_eq!(response.body, body);
        let seen = upstream.last();
        assert_eq!((seen.method.as_str(), seen.path()), (method, path));
        assert_eq!(seen.header_all("x-a"), ["1", "2"]);
        assert_eq!(seen.headers["x-bin"].as_bytes(), b"\xe9\xff");
        assert_eq!(seen.header("accept-encoding"), Some("br"));
        assert_eq!(seen.body, body);
        assert_eq!(seen.header("content-length"), Some("256"));
    }
}

#[tokio::test]
async fn every_status_header_and_byte_of_the_response_comes_back() {
    let upstream = Upstream::start(|seen| {
        let status = seen.path()[1..].parse().unwrap();
        Answer::new(status, "body")
            .header("set-cookie", "a=1")
            .header("set-cookie", "b=2")
            .header("etag", "\"x\"")
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    for status in [200, 201, 202, 206, 301, 302, 307, 400, 404, 409, 418, 422, 429, 500, 502, 503, 504, 599] {
        let response = gateway.client().get(&format!("/{status}")).send().await.unwrap();
        assert_eq!((response.status, response.text()), (status, "body"));
        assert_eq!(response.header_all("set-cookie"), ["a=1", "b=2"]);
        assert_eq!((response.header("etag"), response.header("content-length")), (Some("\"x\""), Some("4")));
    }
}

#[tokio::test]
async fn the_peer_is_appended_and_proto_host_and_via_are_set() {
    let upstream = Upstream::start(|_| Answer::ok("").header("via", "1.1 inner")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let host = gateway.addr.to_string();

    let response = gateway.client().get("/").send().await.unwrap();
    let seen = upstream.last();
    assert_eq!(seen.header_all("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen.header_all("x-forwarded-proto"), ["http"]);
    assert_eq!(seen.header_all("x-forwarded-host"), [host.as_str()]);
    assert_eq!(seen.header_all("host"), [host.as_str()]);
    assert_eq!(seen.header_all("via"), ["1.1 onlyonce"]);
    assert_eq!(response.header_all("via"), ["1.1 inner", "1.1 onlyonce"]);

    let request = gateway.client().get("/").header("x-forwarded-for", "9.9.9.9, 8.8.8.8");
    let request = request.header("x-forwarded-for", "7.7.7.7").header("x-forwarded-proto", "https");
    request.header("x-forwarded-host", "forged").header("via", "1.0 first").send().await.unwrap();
    let seen = upstream.last();
    assert_eq!(seen.header_all("x-forwarded-for"), ["9.9.9.9, 8.8.8.8, 7.7.7.7, 127.0.0.1"]);
    assert_eq!(seen.header_all("x-forwarded-proto"), ["http"]);
    assert_eq!(seen.header_all("x-forwarded-host"), [host.as_str()]);
    assert_eq!(seen.header_all("via"), ["1.0 first", "1.1 onlyonce"]);
}

#[tokio::test]
async fn options_rewrite_the_host_and_trust_an_outer_proxy() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::with(&upstream.url(), |options| {
        options.rewrite_host = true;
        options.trusted_proxies = ["127.0.0.0/8".parse().unwrap()].into_iter().collect();
    })
    .await;
    let request =
        gateway.client().get("/").header("host", "api.example").header("x-forwarded-proto", "https");
    request.header("x-forwarded-host", "outer.example").send().await.unwrap();
    let seen = upstream.last();
    assert_eq!(seen.header("host"), Some(upstream.addr().to_string().as_str()));
    assert_eq!(seen.header("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.header("x-forwarded-host"), Some("outer.example"));
    gateway.client().get("/").header("host", "api.example").send().await.unwrap();
    assert_eq!(upstream.last().header("x-forwarded-host"), Some("api.example"));
    // Others than the trusted ones say nothing about where a request came from.
    let gateway = Gateway::with(&upstream.url(), |options| {
        options.trusted_proxies = ["10.0.0.0/8".parse().unwrap()].into_iter().collect();
    })
    .await;
    let request = gateway.client().get("/").header("x-forwarded-proto", "https");
    request.header("x-forwarded-for", "7.7.7.7").send().await.unwrap();
    let seen = upstream.last();
    assert_eq!(seen.header_all("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen.header("x-forwarded-proto"), Some("http"));
}

#[tokio::test]
async fn hop_by_hop_headers_end_here_both_ways() {
    let answer = "HTTP/1.1 200 OK\r\nConnection: x-back, keep-alive\r\nKeep-Alive: timeout=5\r\nX-Back: 1\r\n\
                  Proxy-Connection: x\r\nUpgrade: h2c\r\nX-Stays: 1\r\nContent-Length: 0\r\n\r\n";
    let upstream = RawUpstream::answering(answer).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let request = "POST /x HTTP/1.1\r\nHost: h\r\nConnection: X-Hop , close, host, Content-Length\r\n\
                   Connection: x-hop2,idempotency-key\r\nX-Hop: 1\r\nX-Hop2: 1\r\nKeep-Alive: 1\r\n\
                   Proxy-Connection: 1\r\nTE: gzip\r\nUpgrade: foo\r\nHTTP2-Settings: AAMAAABk\r\nX-Stays: 1\r\n\
                   Idempotency-Key: k\r\nIdempotency-Attempt: 99\r\nContent-Length: 2\r\n\r\nhi";
    let back = String::from_utf8(send_raw(gateway.addr, request, QUIET).await).unwrap().to_lowercase();
    assert!(back.starts_with("http/1.1 200"), "{back}");
    assert!(back.contains("x-stays: 1"), "{back}");
    for gone in ["x-back", "keep-alive:", "proxy-connection", "upgrade"] {
        assert!(!back.contains(gone), "{gone} in {back}");
    }
    let sent = upstream.text().to_lowercase();
    for stays in ["host: h\r\n", "x-stays: 1", "idempotency-key: k", "content-length: 2\r\n"] {
        assert!(sent.contains(stays), "{stays} not in {sent}");
    }
    for gone in ["x-hop", "keep-alive", "proxy-connection", "te:", "upgrade", "http2-settings", "attempt"] {
        assert!(!sent.contains(gone), "{gone} in {sent}");
    }
    assert!(sent.ends_with("\r\n\r\nhi"), "{sent}");
}

#[tokio::test]
async fn an_absolute_target_goes_on_as_a_path_with_its_host() {
    let upstream = RawUpstream::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    // One upstream connection, whose text is read on.
    let gateway = Gateway::with(&upstream.url(), |options| options.workers = 1).await;
    for (target, line) in [
        ("http://other.example:81/p%20?q=%2f", "GET /p%20?q=%2f HTTP/1.1"),
        ("http://other.example:81", "GET / HTTP/1.1"),
        ("http://user:pw@other.example:81/x", "GET /x HTTP/1.1"),
    ] {
        let before = upstream.text().len();
        let request = format!("GET {target} HTTP/1.1\r\nHost: wrong\r\nConnection: close\r\n\r\n");
        let back = send_raw(gateway.addr, request, Duration::from_secs(20)).await;
        assert!(back.starts_with(b"HTTP/1.1 204"), "{target}");
        let sent = upstream.text()[before..].to_lowercase();
        assert!(sent.starts_with(&line.to_lowercase()), "{sent}");
        assert!(sent.contains("\r\nhost: other.example:81\r\n"), "{sent}");
        assert!(!sent.contains("wrong") && !sent.contains("pw"), "{sent}");
    }
    let options = "OPTIONS * HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    send_raw(gateway.addr, options, Duration::from_secs(20)).await;
    assert!(upstream.text().contains("OPTIONS * HTTP/1.1\r\n"), "{}", upstream.text());
}

#[tokio::test]
async fn an_http_1_0_client_is_served() {
    let upstream = Upstream::start(|_| Answer::chunks(["a", "b"], Duration::ZERO)).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let back = send_raw(gateway.addr, "GET / HTTP/1.0\r\n\r\n", Duration::from_secs(20)).await;
    let back = String::from_utf8(back).unwrap().to_lowercase();
    assert!(back.starts_with("http/1.0 200"), "{back}");
    assert!(!back.contains("transfer-encoding") && back.ends_with("\r\n\r\nab"), "{back}");
    assert_eq!(upstream.last().header("via"), Some("1.0 onlyonce"));
    assert_eq!(upstream.last().header("host"), Some(upstream.addr().to_string().as_str()));
}

#[tokio::test]
async fn connect_is_refused() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let request = "CONNECT internal:22 HTTP/1.1\r\nHost: internal:22\r\n\r\n";
    let back = String::from_utf8(send_raw(gateway.addr, request, QUIET).await).unwrap();
    assert!(back.starts_with("HTTP/1.1 405") && back.contains("\"code\":\"request-malformed\""), "{back}");
    assert_eq!(upstream.count(), 0);
}
