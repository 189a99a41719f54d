//! H15 to H18: what a replay is.

use std::time::{Duration, SystemTime};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::StreamBody;
use onlyonce_http::Preset;
use testkit::{Client, send_raw};

use crate::harness::{Hit, Server, TestStore, assert_replay_of, on_every_store, reply, with};

on_every_store! {
    h15_trailers_go_to_those_who_take_them,
    h15_empty_bodies_and_lengths_are_right,
    h16_a_replay_is_the_first_answer,
    h16_the_marker_cannot_be_forged,
    h16_trailers_cannot_forge_it_either,
    h16_the_marker_has_a_configurable_name,
    h17_what_is_of_the_moment_is_not_stored,
    h18_the_expiry_is_advertised_by_option,
}

async fn h15_trailers_go_to_those_who_take_them(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer,
        |_: Hit| async {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", HeaderValue::from_static("9f"));
            let frames = [Frame::data(Bytes::from("body")), Frame::trailers(trailers)];
            reply(
                200,
                Body::new(StreamBody::new(futures_util::stream::iter(frames.map(Ok::<_, std::io::Error>)))),
            )
        },
    )
    .await;
    for key in ["h1", "h2", "h1"] {
        let client = if key == "h2" { Client::h2c(server.addr()) } else { server.client() };
        let with_trailers = client.post("/x").key(key).header("te", "trailers").send().await.unwrap();
        assert_eq!(
            (with_trailers.text(), with_trailers.trailers.get("x-sum").unwrap().as_bytes()),
            ("body", &b"9f"[..])
        );
        assert_eq!(with_trailers.header("content-length"), None);
    }
    let without = server.client().post("/x").key("h1").send().await.unwrap();
    assert_eq!(
        (without.text(), without.trailers.len(), without.header("content-length")),
        ("body", 0, Some("4"))
    );
    assert_eq!(without.header("trailer"), None);
    assert_eq!(server.runs(), 2);
}

async fn h15_empty_bodies_and_lengths_are_right(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer,
        |hit: Hit| async move {
            let status = hit.uri.path()[1..].parse().unwrap();
            let body = match hit.headers.contains_key("x-chunked") {
                true => {
                    Body::from_stream(futures_util::stream::iter(["ab", "c"].map(Ok::<_, std::io::Error>)))
                }
                false if status == 200 => Body::from("abc"),
                false => Body::empty(),
            };
            reply(status, body)
        },
    )
    .await;
    for (status, chunked) in [(200, false), (200, true), (201, false), (204, false), (304, false)] {
        let chunked = if chunked { "x-chunked: 1\r\n" } else { "" };
        let request = format!(
            "POST /{status} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nidempotency-key: {status}{}\r\n{chunked}content-length: 0\r\n\r\n",
            chunked.len()
        );
        for (copy, replayed) in [false, true, true].into_iter().enumerate() {
            let answer = send_raw(server.addr(), &request, Duration::from_secs(30)).await;
            let answer = String::from_utf8(answer).unwrap().to_lowercase();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(&format!("http/1.1 {status} ")), "{head}");
            assert_eq!(head.contains("idempotency-replayed: true"), replayed, "{copy}: {head}");
            assert!(!head.contains("transfer-encoding"), "{head}");
            match status {
                200 => assert!(head.contains("content-length: 3") && body == "abc", "{answer}"),
                201 => assert!(head.contains("content-length: 0") && body.is_empty(), "{answer}"),
                _ => assert!(!head.contains("content-length") && body.is_empty(), "{answer}"),
            }
        }
    }
}

async fn h16_a_replay_is_the_first_answer(store: TestStore) {
    let binary: Bytes = (0..=255).collect();
    let body = binary.clone();
    let server = Server::start(
        &store,
        |layer| layer,
        move |_: Hit| {
            let body = body.clone();
            async move {
                let mut response = reply(202, body);
                for value in ["1", "2", "3"] {
                    response = with(response, "x-many", value);
                }
                let latin = HeaderValue::from_bytes(b"caf\xe9").unwrap();
                response.headers_mut().append("x-latin", latin);
                for (name, value) in [
                    ("location", "/charges/1"),
                    ("etag", "\"1\""),
                    ("content-type", "application/octet-stream"),
                    ("content-encoding", "x-own"),
                    ("link", "</a>; rel=next"),
                ] {
                    response = with(response, name, value);
                }
                response
            }
        },
    )
    .await;
    let first = server.pay("k", "1").await;
    // Another process reads it back from the store.
    let other = Server::counting(&store, |layer| layer).await;
    for server in [&server, &server, &other, &other] {
        let replay = server.pay("k", "1").await;
        assert_replay_of(&replay, &first);
        assert_eq!(replay.body, binary);
        assert_eq!(replay.header_all("x-many"), ["1", "2", "3"]);
        assert_eq!(replay.headers["x-latin"].as_bytes(), b"caf\xe9");
        let mut headers = replay.headers.clone();
        headers.remove("idempotency-replayed");
        headers.remove("date");
        let mut expected = first.headers.clone();
        expected.remove("date");
        assert_eq!(headers, expected);
    }
    assert_eq!((server.runs(), other.runs()), (1, 0));
}

async fn h16_the_marker_cannot_be_forged(store: TestStore) {
    let forge = [
        "idempotency-replayed",
        "idempotent-replayed",
        "idempotency-replay",
        "idempotency-status",
        "idempotency-key-expires",
        "idempotency-attempt",
    ];
    let server = Server::start(
        &store,
        |layer| layer.optional(),
        move |hit: Hit| async move {
            for name in forge {
                assert!(!hit.headers.contains_key(name), "{name} reached the service behind");
            }
            forge.into_iter().fold(reply(200, "x"), |response, name| with(response, name, "true"))
        },
    )
    .await;
    let send = async |method: &str, key: Option<&str>| {
        let mut request = server.client().request(method.parse().unwrap(), "/x");
        for name in forge {
            request = request.header(name, "true");
        }
        if let Some(key) = key {
            request = request.key(key);
        }
        request.send().await.unwrap()
    };
    for answer in [send("POST", Some("k")).await, send("GET", None).await, send("POST", None).await] {
        assert_eq!(answer.status, 200);
        for name in forge {
            let expected = if name == "idempotency-status" {
                answer.header(name).filter(|v| *v == "ignored")
            } else {
                None
            };
            assert_eq!(answer.header(name), expected, "{name}");
        }
    }
    let replay = send("POST", Some("k")).await;
    assert_eq!(replay.header_all("idempotency-replayed"), ["true"]);
    assert_eq!(server.hits()[0].headers["idempotency-key"], "k");
}

async fn h16_trailers_cannot_forge_it_either(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer.max_stored_body(10),
        |hit: Hit| async move {
            let mut trailers = HeaderMap::new();
            for name in ["x-sum", "idempotency-replayed", "idempotency-status", "set-cookie"] {
                trailers.insert(name, HeaderValue::from_static("1"));
            }
            let body = if hit.uri.path() == "/long" { "longer than it may be" } else { "short" };
            let frames = [Frame::data(Bytes::from(body)), Frame::trailers(trailers)];
            let frames = futures_util::stream::iter(frames.map(Ok::<_, std::io::Error>));
            reply(200, Body::new(StreamBody::new(frames)))
        },
    )
    .await;
    let send = |path: &'static str| Client::h2c(server.addr()).post(path).key(path).send();
    let names = |answer: &testkit::ClientResponse| {
        let mut names: Vec<_> = answer.trailers.keys().map(|name| name.as_str().to_owned()).collect();
        names.sort();
        names
    };
    for path in ["/short", "/long"] {
        assert_eq!(names(&send(path).await.unwrap()), ["set-cookie", "x-sum"], "{path}");
    }
    // What is of the moment is not stored as a trailer either.
    assert_eq!(names(&send("/short").await.unwrap()), ["x-sum"]);
    assert!(names(&send("/long").await.unwrap()).is_empty());
    assert_eq!(server.runs(), 2);
}

async fn h16_the_marker_has_a_configurable_name(store: TestStore) {
    let own = HeaderName::from_static("x-replayed");
    let named = Server::counting(&store, |layer| layer.replayed_header(own)).await;
    let stripe = Server::counting(&store, |layer| layer.preset(Preset::Stripe)).await;
    for (server, name) in [(&named, "x-replayed"), (&stripe, "idempotent-replayed")] {
        assert_eq!(server.pay(name, "1").await.header(name), None);
        let replay = server.pay(name, "1").await;
        assert_eq!((replay.header(name), replay.header("idempotency-replayed")), (Some("true"), None));
    }
}

async fn h17_what_is_of_the_moment_is_not_stored(store: TestStore) {
    let of_the_moment = [
        ("set-cookie", "sid=1"),
        ("set-cookie", "b=2"),
        ("www-authenticate", "Basic"),
        ("proxy-authenticate", "Basic"),
        ("alt-svc", "clear"),
        ("keep-alive", "timeout=5"),
        ("x-nominated", "1"),
        ("x-denied", "1"),
    ];
    let denied = HeaderName::from_static("x-denied");
    let server = Server::start(
        &store,
        |layer| layer.not_stored([denied]),
        move |_: Hit| async move {
            let response = with(reply(200, "x"), "connection", "x-nominated");
            let response = with(response, "date", "Thu, 01 Jan 2026 00:00:00 GMT");
            of_the_moment.into_iter().fold(response, |response, (name, value)| with(response, name, value))
        },
    )
    .await;
    let first = server.pay("k", "1").await;
    assert_eq!(first.header_all("set-cookie"), ["sid=1", "b=2"]);
    assert_eq!(first.header("www-authenticate"), Some("Basic"));
    for _ in 0..2 {
        let replay = server.pay("k", "1").await;
        assert_replay_of(&replay, &first);
        for (name, _) in of_the_moment {
            assert_eq!(replay.header(name), None, "{name}");
        }
        assert_ne!(replay.header("date"), first.header("date"), "a date of its own");
    }
    let records = store.admin.list(&Default::default()).await.unwrap().records;
    let stored = store.admin.show(&records[0].id).await.unwrap().unwrap().reply.unwrap();
    assert!(stored.headers().is_empty(), "{stored:?}");
}

async fn h18_the_expiry_is_advertised_by_option(store: TestStore) {
    let silent = Server::counting(&store, |layer| layer).await;
    assert_eq!(silent.pay("silent", "1").await.header("idempotency-key-expires"), None);
    let server = Server::counting(&store, |layer| layer.advertise_expiry()).await;
    let day = Duration::from_secs(24 * 3600);
    #[allow(clippy::disallowed_methods, reason = "the test compares with the wall clock")]
    let earliest = SystemTime::now() + day - Duration::from_secs(1);
    let first = server.pay("k", "1").await;
    #[allow(clippy::disallowed_methods, reason = "the test compares with the wall clock")]
    let latest = SystemTime::now() + day;
    let date = first.header("idempotency-key-expires").expect("a date");
    let expires = httpdate::parse_http_date(date).unwrap();
    assert!((earliest..=latest).contains(&expires), "{date}");
    let replay = server.pay("k", "1").await;
    assert_eq!(replay.header("idempotency-key-expires"), Some(date));
    let read_back = Server::counting(&store, |layer| layer.advertise_expiry()).await;
    let replay = read_back.pay("k", "1").await;
    let again = httpdate::parse_http_date(replay.header("idempotency-key-expires").unwrap()).unwrap();
    let apart = again.duration_since(expires).or_else(|_| expires.duration_since(again)).unwrap();
    assert!(apart <= Duration::from_secs(1), "{apart:?}");
}
