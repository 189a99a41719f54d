//! H9, H13, H15, H24, H25 and H26 through the whole gateway, on memory and on SQLite: what runs once, what a failing upstream
//! means, and what a shutdown leaves.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Gateway;
use onlyonce_core::{MemoryStore, Store};
use onlyonce_engine::Limits;
use onlyonce_gateway::Drained;
use onlyonce_store_sqlite::SqliteStore;
use tempfile::TempDir;
use testkit::{
    Answer, ClientResponse, RawConnection, RawUpstream, Upstream, free_addr, wait_for, wait_until,
};

/// Both stores; the folder lives as long as the test.
async fn stores() -> ([(&'static str, Arc<dyn Store>); 2], TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let sqlite = SqliteStore::open(dir.path().join("keys.db")).await.unwrap();
    ([("memory", Arc::new(MemoryStore::new())), ("sqlite", Arc::new(sqlite))], dir)
}

async fn pay(gateway: &Gateway, key: &str) -> ClientResponse {
    gateway.client().post("/pay").key(key).body("amount=100").send().await.unwrap()
}

fn replayed(response: &ClientResponse) -> bool {
    response.header("idempotency-replayed") == Some("true")
}

#[tokio::test]
async fn a_keyed_request_runs_once_and_the_key_and_attempt_go_on() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|seen| Answer::new(201, format!("charge {}", seen.number))).await;
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        for client in [gateway.client(), gateway.h2c()] {
            for round in 0..3 {
                let request =
                    client.post("/pay").key("k1").header("idempotency-attempt", "77").body("amount=100");
                let response = request.send().await.unwrap();
                assert_eq!((response.status, response.text()), (201, "charge 1"), "{name} {round}");
            }
        }
        assert_eq!(upstream.count(), 1, "{name}");
        let seen = upstream.last();
        assert_eq!(seen.header_all("idempotency-key"), ["k1"]);
        assert_eq!(seen.header_all("idempotency-attempt"), ["1"]);
        assert_eq!((&seen.body[..], seen.header("x-forwarded-for")), (&b"amount=100"[..], Some("127.0.0.1")));
        assert!(replayed(&pay(&gateway, "k1").await), "{name}");
        assert!(!replayed(&pay(&gateway, "k2").await), "{name}");
    }
}

#[tokio::test]
async fn copies_at_once_run_once_and_get_one_body() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|seen| {
            Answer::new(201, format!("charge {}", seen.number)).delay(Duration::from_millis(20))
        })
        .await;
        let gateway =
            Gateway::guarded(&upstream.url(), store, |_| {}, |b| b.wait(Duration::from_secs(20))).await;
        for round in 1..=5usize {
            let key = format!("k{round}");
            let copies = (0..20).map(|_| {
                let request = gateway.client().post("/pay").key(&key).body("x");
                tokio::spawn(request.send())
            });
            for copy in copies.collect::<Vec<_>>() {
                let response = copy.await.unwrap().unwrap();
                assert_eq!(
                    (response.status, response.text()),
                    (201, format!("charge {round}").as_str()),
                    "{name}"
                );
            }
            assert_eq!(upstream.count(), round, "{name}");
        }
    }
}

#[tokio::test]
async fn an_upstream_that_is_not_there_frees_the_key() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let addr = free_addr();
        let gateway = Gateway::guarded(&format!("http://{addr}"), store, |_| {}, |b| b).await;
        for _ in 0..3 {
            let response = pay(&gateway, "k").await;
            assert_eq!((response.status, response.code().as_str()), (502, "upstream-unreachable"), "{name}");
            assert_eq!(response.json()["retryable"], true);
            assert!(response.header("retry-after").is_some());
        }
        let upstream = Upstream::options().start_on(addr, |_| Answer::new(201, "paid")).await;
        let response = pay(&gateway, "k").await;
        assert_eq!((response.status, response.text(), replayed(&response)), (201, "paid", false), "{name}");
        assert!(replayed(&pay(&gateway, "k").await));
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn an_answer_that_stalls_in_its_body_is_given_up_and_its_place_is_free_again() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let (sender, receiver) = std::sync::mpsc::channel();
        let upstream = Upstream::start(move |seen| {
            if seen.path() != "/pay" {
                return Answer::new(201, "paid");
            }
            let (body, stalls) = Answer::channel();
            body.send("a part".into()).unwrap();
            sender.send(body).unwrap();
            stalls
        })
        .await;
        let quick = |options: &mut onlyonce_gateway::GatewayOptions| {
            options.upstream_timeout = Duration::from_millis(200);
            options.connect_timeout = Duration::from_millis(500);
        };
        let limits = Limits { max_in_flight: 1, ..Limits::default() };
        let gateway = Gateway::guarded(&upstream.url(), store, quick, |b| b.limits(limits)).await;
        let first = pay(&gateway, "k").await;
        assert_eq!((first.status, first.code().as_str()), (504, "outcome-unknown"), "{name}");
        let _still_open = receiver.recv().unwrap();
        wait_for("the only place in flight", async || {
            let other = gateway.client().post("/other").key("other").body("x").send().await.unwrap();
            (other.status == 201).then_some(())
        })
        .await;
        let retry = pay(&gateway, "k").await;
        assert_eq!((retry.status, retry.code().as_str()), (409, "outcome-unknown"), "{name}");
        assert_eq!(upstream.count(), 2, "{name}");
    }
}

#[tokio::test]
async fn no_whole_answer_is_unknown_and_held_until_resolved() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|seen| match seen.header("idempotency-key").unwrap() {
            "reset" => Answer::reset(),
            "hang" => Answer::hang(),
            "cut" => Answer::cut_short(100, "part"),
            _ => Answer::cut_chunked("part"),
        })
        .await;
        let quick = |options: &mut onlyonce_gateway::GatewayOptions| {
            options.upstream_timeout = Duration::from_millis(500)
        };
        for scheme in ["http", "h2c"] {
            // Each scheme has its own keys, since both use one store.
            let url = format!("{scheme}://{}", upstream.addr());
            let gateway = Gateway::guarded(&url, store.clone(), quick, |b| b).await;
            for key in ["reset", "hang", "cut", "cut-chunked"] {
                let before = upstream.count();
                let send = async || {
                    let request = gateway.client().post(&format!("/{scheme}")).key(key);
                    request.header("authorization", scheme).body("x").send().await.unwrap()
                };
                let first = send().await;
                assert_eq!(
                    (first.status, first.code().as_str()),
                    (504, "outcome-unknown"),
                    "{name} {url} {key}"
                );
                assert_eq!(first.json()["retryable"], false);
                for _ in 0..2 {
                    let retry = send().await;
                    assert_eq!(
                        (retry.status, retry.code().as_str()),
                        (409, "outcome-unknown"),
                        "{name} {url} {key}"
                    );
                }
                assert_eq!(upstream.count(), before + 1, "{name} {url} {key}: it ran again");
            }
        }
    }
}

#[tokio::test]
async fn a_reply_whose_body_never_ends_is_given_up_and_never_run_again() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let (body, answer) = Answer::channel();
        body.send("half".into()).unwrap();
        let answer = parking_lot::Mutex::new(Some(answer));
        let upstream = Upstream::start(move |_| answer.lock().take().expect("it runs once")).await;
        let quick = |options: &mut onlyonce_gateway::GatewayOptions| {
            options.upstream_timeout = Duration::from_millis(200);
            options.connect_timeout = Duration::from_millis(500);
        };
        let lease = Duration::from_secs(1);
        let gateway = Gateway::guarded(&upstream.url(), store, quick, |b| b.lease(lease)).await;
        let first = pay(&gateway, "k").await;
        assert_eq!((first.status, first.code().as_str()), (504, "outcome-unknown"), "{name}");
        wait_for("nobody renews the lease any more", async || {
            let retry = pay(&gateway, "k").await;
            assert_eq!(retry.status, 409, "{name}: {retry:?}");
            (retry.code() == "outcome-unknown").then_some(())
        })
        .await;
        // The end comes after all: it resolves the record.
        drop(body);
        let replay = wait_for("the late end", async || {
            let retry = pay(&gateway, "k").await;
            (retry.status == 200).then_some(retry)
        })
        .await;
        assert_eq!((replay.text(), replayed(&replay)), ("half", true), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn under_retry_the_next_attempt_runs_after_the_lease() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|seen| match seen.number {
            1 => Answer::reset(),
            _ => Answer::new(201, "paid"),
        })
        .await;
        let lease = Duration::from_millis(400);
        let take_over = onlyonce_core::OnLeaseEnd::TakeOver;
        let build = |b: onlyonce_engine::Builder| b.lease(lease).on_lease_end(take_over);
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, build).await;
        let first = pay(&gateway, "k").await;
        assert_eq!((first.status, first.code().as_str()), (504, "outcome-unknown"), "{name}");
        let response = wait_for("the lease is over", async || {
            let response = pay(&gateway, "k").await;
            (response.status == 201).then_some(response)
        })
        .await;
        assert_eq!((response.text(), replayed(&response)), ("paid", false), "{name}");
        assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"), "{name}");
        assert!(replayed(&pay(&gateway, "k").await), "{name}");
        assert_eq!(upstream.count(), 2, "{name}");
    }
}

#[tokio::test]
async fn a_gateway_error_of_the_upstream_is_passed_on_once_and_then_held() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|_| Answer::new(502, "from behind")).await;
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        let first = pay(&gateway, "k").await;
        assert_eq!((first.status, first.text()), (502, "from behind"), "{name}");
        let retry = pay(&gateway, "k").await;
        assert_eq!((retry.status, retry.code().as_str()), (409, "outcome-unknown"), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_changes_nothing() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|_| Answer::new(201, "paid").delay(Duration::from_millis(300))).await;
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        let mut client = RawConnection::open(gateway.addr).await;
        let head = "POST /pay HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: 10\r\n\r\n";
        client.write(format!("{head}amount=100")).await;
        wait_until("the request runs", || upstream.count() == 1).await;
        client.reset();
        let response = wait_for("the reply is recorded", async || {
            let response = pay(&gateway, "k").await;
            assert!(response.status == 201 || response.code() == "in-progress", "{name}: {response:?}");
            (response.status == 201).then_some(response)
        })
        .await;
        assert_eq!((response.text(), replayed(&response)), ("paid", true), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn everything_else_passes_through_the_layer() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/sse" => Answer::sse(["1", "2"], Duration::from_millis(5)),
        _ => Answer::ok(seen.body.len().to_string()),
    })
    .await;
    let gateway = Gateway::guarded(&upstream.url(), Arc::new(MemoryStore::new()), |_| {}, |b| b).await;
    let client = gateway.client();
    assert_eq!(client.get("/sse").send().await.unwrap().text(), "data: 1\n\ndata: 2\n\n");
    let put = |body: usize| client.request(http::Method::PUT, "/").key("k").body(vec![0; body]).send();
    // Far past the limits of guarded bodies, and not stored: each one runs.
    for round in 0..2 {
        assert_eq!(put(5_000_000).await.unwrap().text(), "5000000", "{round}");
    }
    assert_eq!(upstream.last().header("idempotency-attempt"), None);
    assert_eq!(upstream.count(), 3);
    assert_eq!(client.post("/").body("x").send().await.unwrap().code(), "key-missing");
    let raw = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        connection
            .write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            .await;
        while let Some(bytes) = connection.read_exact(4).await {
            connection.write(bytes).await;
        }
    })
    .await;
    let gateway = Gateway::guarded(&raw.url(), Arc::new(MemoryStore::new()), |_| {}, |b| b).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").await;
    assert!(client.read_head().await.unwrap().starts_with(b"HTTP/1.1 101"));
    client.write("ping").await;
    assert_eq!(client.read_exact(4).await.unwrap(), b"ping");
}

#[tokio::test]
async fn a_body_too_large_is_refused_before_its_end_and_the_client_reads_why() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::guarded(&upstream.url(), Arc::new(MemoryStore::new()), |_| {}, |b| b).await;
    let mut client = RawConnection::open(gateway.addr).await;
    let head = "POST /pay HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: 3000000\r\n\r\n";
    client.write(head).await;
    // The client goes on sending: closing at once would reset the connection under the answer.
    client.write(vec![b'x'; 3_000_000]).await;
    let back = String::from_utf8(client.read_to_end().await).unwrap();
    assert!(back.starts_with("HTTP/1.1 413") && back.contains("body-too-large"), "{back}");
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn a_shutdown_waits_for_an_operation_whose_client_is_gone() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|_| Answer::new(201, "paid").delay(Duration::from_millis(500))).await;
        let mut gateway = Gateway::guarded(&upstream.url(), store.clone(), |_| {}, |b| b).await;
        let request = gateway.client().post("/pay").key("k").body("amount=100");
        let running = tokio::spawn(request.send());
        wait_until("the request runs", || upstream.count() == 1).await;
        running.abort();
        gateway.signal();
        assert_eq!(gateway.drained().await, Drained::default(), "{name}");
        let next = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        let response = pay(&next, "k").await;
        assert_eq!((response.text(), replayed(&response)), ("paid", true), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn an_operation_that_outlives_the_shutdown_keeps_its_lease() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|_| Answer::hang()).await;
        let quick = |options: &mut onlyonce_gateway::GatewayOptions| {
            options.shutdown_timeout = Duration::from_millis(300)
        };
        let mut gateway = Gateway::guarded(&upstream.url(), store.clone(), quick, |b| b).await;
        let request = gateway.client().post("/pay").key("k").body("amount=100");
        let running = tokio::spawn(request.send());
        wait_until("the request runs", || upstream.count() == 1).await;
        gateway.signal();
        assert_eq!(gateway.drained().await, Drained { connections_cut: 1, operations_left: 1 }, "{name}");
        assert!(running.await.unwrap().is_err());
        let next = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        let response = pay(&next, "k").await;
        assert_eq!((response.status, response.code().as_str()), (409, "in-progress"), "{name}");
        assert_eq!(upstream.count(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_long_reply_is_read_to_its_end_when_the_client_leaves_and_its_replay_is_empty() {
    // More than all sockets between hold: the upstream gets rid of it only when somebody reads.
    const PIECES: usize = 256;
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let (runs, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counters = (runs.clone(), ends.clone());
        let upstream = RawUpstream::start(move |_, mut connection| {
            let (runs, ends) = counters.clone();
            async move {
                connection.read_head().await;
                connection.read_exact(10).await;
                runs.fetch_add(1, Ordering::SeqCst);
                let length = PIECES * (64 << 10);
                let head = format!(
                    "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nX-Charge: 7\r\nContent-Length: {length}\r\n\r\n"
                );
                connection.write(head).await;
                for _ in 0..PIECES {
                    if !connection.write(vec![b'x'; 64 << 10]).await {
                        return;
                    }
                }
                ends.fetch_add(1, Ordering::SeqCst);
            }
        })
        .await;
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        let request = gateway.client().post("/pay").key("k").body("amount=100");
        let mut first = request.send_streaming().await.unwrap();
        assert_eq!((first.status.as_u16(), first.headers["etag"].as_bytes()), (200, &b"\"1\""[..]), "{name}");
        first.chunk().await.unwrap().expect("a piece of the body");
        drop(first);
        wait_until("the rest is read", || ends.load(Ordering::SeqCst) == 1).await;
        let replay = pay(&gateway, "k").await;
        assert_eq!((replay.status, replay.body.len(), replayed(&replay)), (200, 0, true), "{name}");
        assert_eq!(replay.header("idempotency-replay"), Some("omitted"));
        assert_eq!((replay.header("etag"), replay.header("x-charge")), (None, Some("7")));
        assert_eq!(runs.load(Ordering::SeqCst), 1, "{name}");
    }
}

#[tokio::test]
async fn trailers_empty_bodies_and_lengths_are_replayed_as_they_were() {
    let (stores, _dir) = stores().await;
    for (name, store) in stores {
        let upstream = Upstream::start(|seen| match seen.path() {
            "/trailers" => Answer::chunks(["bo", "dy"], Duration::ZERO).trailer("x-sum", "9f"),
            "/chunked" => Answer::chunks(["bo", "dy"], Duration::ZERO),
            "/empty" => Answer::new(201, ""),
            path => Answer::new(path[1..].parse().unwrap(), ""),
        })
        .await;
        let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |b| b).await;
        for (runs, (path, status, body, trailers)) in [
            ("/trailers", 200, "body", 1),
            ("/chunked", 200, "body", 0),
            ("/empty", 201, "", 0),
            ("/204", 204, "", 0),
            ("/304", 304, "", 0),
        ]
        .into_iter()
        .enumerate()
        {
            for (copy, client) in [gateway.client(), gateway.client(), gateway.h2c()].into_iter().enumerate()
            {
                let answer = client.post(path).key(path).header("te", "trailers").send().await.unwrap();
                let seen = (answer.status, answer.text(), answer.trailers.len(), replayed(&answer));
                assert_eq!(seen, (status, body, trailers, copy > 0), "{name} {path} {copy}");
                let length = body.len().to_string();
                match (status, trailers) {
                    (204 | 304, _) | (_, 1) => assert_eq!(answer.header("content-length"), None, "{path}"),
                    // HTTP/2 says by other means that nothing follows.
                    _ if body.is_empty() => {
                        assert!(matches!(answer.header("content-length"), None | Some("0")))
                    }
                    _ => assert_eq!(answer.header("content-length"), Some(&*length), "{name} {path} {copy}"),
                }
            }
            assert_eq!(upstream.count(), runs + 1, "{name} {path}");
        }
        let without = gateway.client().post("/trailers").key("/trailers").send().await.unwrap();
        assert_eq!((without.text(), without.trailers.len(), replayed(&without)), ("body", 0, true), "{name}");
        assert_eq!(without.header("content-length"), Some("4"), "{name}");
    }
}
