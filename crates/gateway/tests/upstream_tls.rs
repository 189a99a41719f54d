//! An upstream behind TLS, over HTTP/1.1 and HTTP/2: who is trusted, what is sent once, and what an end without a goodbye
//! means.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Gateway;
use onlyonce_core::MemoryStore;
use onlyonce_gateway::{ClientTls, GatewayOptions, InvalidTls, UpstreamUrl};
use testkit::{Answer, Authority, ClientResponse, RawUpstream, TlsFront, Upstream};

fn trusting(authority: &Authority) -> ClientTls {
    ClientTls::default().with_roots(authority.pem().as_bytes()).unwrap()
}

async fn guarded(url: &str, tls: ClientTls) -> Gateway {
    let quick = move |options: &mut GatewayOptions| {
        options.upstream_tls = tls;
        options.upstream_timeout = Duration::from_secs(5);
        options.workers = 1;
    };
    Gateway::guarded(url, Arc::new(MemoryStore::new()), quick, |b| b).await
}

async fn pay(gateway: &Gateway, key: &str) -> ClientResponse {
    gateway.client().post("/pay").key(key).body("amount=100").send().await.unwrap()
}

#[tokio::test]
async fn requests_go_on_in_tls_over_both_protocols_and_run_once() {
    let authority = Authority::new();
    // Over HTTP/1.1 the worker has one and the runtime of HTTP/2 clients has one.
    for (scheme, via, kept) in [("https", "1.1 onlyonce", 2), ("h2", "2 onlyonce", 1)] {
        let upstream = Upstream::start(|seen| Answer::new(201, format!("charge {}", seen.number))).await;
        let front = TlsFront::start(upstream.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
        let gateway = guarded(&front.url(scheme), trusting(&authority)).await;
        for client in [gateway.client(), gateway.h2c()] {
            for _ in 0..3 {
                let answer = client.post("/pay").key("k").body("x").send().await.unwrap();
                assert_eq!((answer.status, answer.text()), (201, "charge 1"), "{scheme}");
            }
            let passed = client.get("/x").send().await.unwrap();
            assert_eq!((passed.status, passed.header("via")), (201, Some(via)), "{scheme}");
        }
        assert_eq!(upstream.count(), 3, "{scheme}");
        assert_eq!(front.connections(), kept, "{scheme}: the connections are kept");
        let http2 = upstream.last().version == http::Version::HTTP_2;
        assert_eq!(http2, scheme == "h2");
        assert_eq!(upstream.last().header("x-forwarded-proto"), Some("http"), "as the client came");
    }
}

#[tokio::test]
async fn long_bodies_stream_both_ways_in_tls() {
    let authority = Authority::new();
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.clone())).await;
    let front = TlsFront::start(upstream.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    for scheme in ["https", "h2"] {
        let gateway = guarded(&front.url(scheme), trusting(&authority)).await;
        let body: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
        let put = gateway.client().request(http::Method::PUT, "/x").body(body.clone()).send().await.unwrap();
        assert!(put.status == 200 && put.body == body, "{scheme}");
    }
}

#[tokio::test]
async fn an_upstream_that_is_not_trusted_gets_nothing_and_the_key_is_free() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let upstream = Upstream::start(|_| Answer::new(201, "paid")).await;
    let own = TlsFront::start(upstream.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    let misnamed =
        TlsFront::start(upstream.addr(), &authority.identity("DNS:other.example"), None, true).await;
    for (front, trusted) in [(&own, &stranger), (&misnamed, &authority)] {
        for scheme in ["https", "h2"] {
            let gateway = guarded(&front.url(scheme), trusting(trusted)).await;
            for _ in 0..2 {
                let answer = pay(&gateway, "k").await;
                assert_eq!((answer.status, answer.code().as_str()), (502, "upstream-unreachable"));
                assert_eq!(answer.json()["retryable"], true);
            }
        }
    }
    // A server without TLS, and one that does not speak HTTP/2.
    let gateway = guarded(&format!("https://{}", upstream.addr()), trusting(&authority)).await;
    assert_eq!(pay(&gateway, "k").await.code(), "upstream-unreachable");
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn an_upstream_may_ask_for_our_certificate() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let upstream = Upstream::start(|_| Answer::new(201, "paid")).await;
    let server = authority.identity("IP:127.0.0.1");
    let front = TlsFront::start(upstream.addr(), &server, Some(&clients), true).await;
    let ours = clients.identity("DNS:gateway.example");
    let with = trusting(&authority).with_identity(ours.cert.as_bytes(), ours.key.as_bytes()).unwrap();
    let gateway = guarded(&front.url("https"), with).await;
    assert_eq!(pay(&gateway, "k").await.text(), "paid");
    let gateway = guarded(&front.url("https"), trusting(&authority)).await;
    // In TLS 1.3 the refusal may come after the request was sent: never taken for an answer.
    let refused = pay(&gateway, "k").await;
    assert!(matches!(refused.status, 502 | 504), "{refused:?}");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn an_end_without_a_goodbye_is_not_the_end_of_a_reply() {
    let authority = Authority::new();
    let identity = authority.identity("IP:127.0.0.1");
    let cut = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        connection.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf of it").await;
    })
    .await;
    let pay = async |gateway: &Gateway| gateway.client().post("/pay").key("k").send().await.unwrap();
    for (polite, whole) in [(true, true), (false, false)] {
        let front = TlsFront::start(cut.addr(), &identity, None, polite).await;
        let gateway = guarded(&front.url("https"), trusting(&authority)).await;
        let answer = pay(&gateway).await;
        if whole {
            assert_eq!((answer.status, answer.text()), (200, "half of it"));
        } else {
            assert_eq!((answer.status, answer.code().as_str()), (504, "outcome-unknown"), "{answer:?}");
            assert_eq!(pay(&gateway).await.code(), "outcome-unknown", "and it is not run again");
        }
    }
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_is_replaced_unseen() {
    let authority = Authority::new();
    let upstream = Upstream::start(|_| Answer::new(201, "paid").header("connection", "close")).await;
    let front = TlsFront::start(upstream.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    let gateway = guarded(&front.url("https"), trusting(&authority)).await;
    for n in 0..20 {
        let answer = pay(&gateway, &format!("k{n}")).await;
        assert_eq!((answer.status, answer.text()), (201, "paid"), "{n}");
    }
    assert_eq!(upstream.count(), 20);
}

#[tokio::test]
async fn what_cannot_be_set_up_says_why() {
    let authority = Authority::new();
    let refused = |error: Result<ClientTls, InvalidTls>| error.unwrap_err().to_string();
    assert!(refused(ClientTls::default().with_roots(b"nothing")).contains("no certificate in it"));
    let broken = b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
    assert!(refused(ClientTls::default().with_roots(broken)).contains("not a PEM file"));
    let (one, two) = (authority.identity("DNS:a"), authority.identity("DNS:b"));
    assert!(refused(ClientTls::default().with_identity(one.cert.as_bytes(), b"")).contains("not a PEM file"));
    let mixed = trusting(&authority).with_identity(one.cert.as_bytes(), two.key.as_bytes()).unwrap();
    let upstream: UpstreamUrl = "https://api.example".parse().unwrap();
    assert!(upstream.check_tls(&mixed).unwrap_err().to_string().contains("cannot be used"));
    assert!(upstream.check_tls(&trusting(&authority)).is_ok());
    let secret = format!("{:?}", trusting(&authority).with_identity(one.cert.as_bytes(), one.key.as_bytes()));
    assert!(!secret.contains("PRIVATE"), "{secret}");
}
