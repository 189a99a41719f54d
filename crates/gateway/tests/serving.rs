//! H23 and H26: the listener, its limits and its end.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::time::Duration;

use common::Gateway;
use onlyonce_gateway::{Counters, Drained};
use onlyonce_http::{Code, Cors};
use testkit::{Answer, RawConnection, Upstream, wait_for, wait_until};

#[tokio::test]
async fn http_1_1_keep_alive_and_h2c_share_a_port() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.path().to_owned())).await;
    let gateway = Gateway::start(&upstream.url()).await;
    for client in [gateway.client(), gateway.h2c()] {
        let mut connection = client.connect().await.unwrap();
        for n in 0..20 {
            let path = format!("/{n}");
            assert_eq!(connection.send(client.get(&path)).await.unwrap().text(), path);
        }
    }
    assert_eq!(upstream.connections(), 2, "each client's thread keeps its upstream connection");
    assert_eq!(upstream.last().header_all("via"), ["2 onlyonce"]);
    assert_eq!(upstream.last().header("host"), Some(gateway.addr.to_string().as_str()));
}

#[tokio::test]
async fn workers_share_the_clients_and_each_keeps_an_upstream_connection() {
    // At most one idle: that of the first worker. The others open one for each request.
    for (workers, idle_max, kept) in [(0, 64, 1), (1, 64, 1), (3, 64, 3), (3, 1, 1 + 16)] {
        let upstream = Upstream::start(|seen| Answer::ok(seen.path().to_owned())).await;
        let mut gateway = Gateway::with(&upstream.url(), |options| {
            options.workers = workers;
            options.pool_idle_max = idle_max;
        })
        .await;
        let client = gateway.client();
        let mut connections = Vec::new();
        for _ in 0..6 {
            connections.push(client.connect().await.unwrap());
            // Accepted, and so in the order of the workers.
            let last = connections.last_mut().unwrap();
            assert_eq!(last.send(client.get("/hello")).await.unwrap().text(), "/hello");
        }
        for _ in 0..3 {
            for connection in &mut connections {
                assert_eq!(connection.send(client.get("/again")).await.unwrap().text(), "/again");
            }
        }
        assert_eq!(upstream.connections(), kept, "{workers} workers, at most {idle_max} idle");
        drop(connections);
        gateway.signal();
        assert_eq!(gateway.drained().await, Drained::default());
    }
}

#[tokio::test]
async fn h2c_streams_run_side_by_side() {
    let upstream =
        Upstream::start(|seen| Answer::bytes(200_000 + seen.number).delay(Duration::from_millis(100))).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let client = gateway.h2c();
    let mut connection = client.connect().await.unwrap();
    let mut responses = Vec::new();
    let mut heads = Vec::new();
    for _ in 0..10 {
        heads.push(client.post("/").body("x").send_on(&mut connection).await.unwrap());
    }
    for head in heads {
        responses.push(head.whole().await.unwrap().body.len());
    }
    responses.sort_unstable();
    assert_eq!(responses, (200_001..=200_010).collect::<Vec<_>>());
}

#[tokio::test]
async fn split_h2_cookies_are_one_line_for_http_1_1() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    gateway.h2c().get("/").header("cookie", "a=1").header("cookie", "b=2").send().await.unwrap();
    assert_eq!(upstream.last().header_all("cookie"), ["a=1; b=2"]);
}

#[tokio::test]
async fn a_preface_in_pieces_is_still_http_2_and_a_lookalike_is_http_1() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    for piece in ["P", "RI * HT", "TP/2.0\r\n\r\nSM\r\n\r\n"] {
        client.write(piece).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    client.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00").await;
    assert_eq!(client.read_exact(9).await.unwrap()[3], 4, "a SETTINGS frame");
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("PROPFIND / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert!(client.read_head().await.unwrap().starts_with(b"HTTP/1.1 200"));
    assert_eq!(upstream.last().method, "PROPFIND");
}

#[tokio::test]
async fn connections_that_say_nothing_are_closed() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::with(&upstream.url(), |options| {
        options.client_idle_timeout = Duration::from_millis(200);
        options.header_timeout = Duration::from_millis(200);
    })
    .await;
    for opening in
        ["", "P", "PRI * HTTP/2", "GET / HTTP/1.1\r\nHost: h\r\n", "GET / HTTP/1.1\r\nHost: h\r\n\r\n"]
    {
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(opening).await;
        client.read_to_end().await;
    }
    assert_eq!(upstream.count(), 1, "the last one had said everything");
}

#[tokio::test]
async fn connections_past_the_bound_are_told_so_and_come_in_later() {
    let upstream = Upstream::start(|_| Answer::ok("ok")).await;
    let counters = Counters::default();
    let gateway = Gateway::with(&upstream.url(), |options| {
        (options.max_connections, options.counters) = (2, counters.clone());
    })
    .await;
    let client = gateway.client();
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut connection = client.connect().await.unwrap();
        connection.send(client.get("/")).await.unwrap();
        kept.push(connection);
    }
    for other in [gateway.client(), gateway.h2c()] {
        let refused = other.post("/late").key("k").body(vec![b'x'; 100_000]).send().await.unwrap();
        assert_eq!((refused.status, refused.code().as_str()), (503, "overloaded"));
        assert_eq!(refused.header("retry-after"), Some("1"));
    }
    assert_eq!(upstream.count(), 2);
    assert_eq!(counted(&counters, Code::Overloaded), 2);
    kept.pop();
    wait_for("a place", async || {
        let answer = client.get("/late").send().await.unwrap();
        (answer.status == 200).then_some(())
    })
    .await;
    drop(kept);
    wait_until("all are gone", || counters.connections() == 0 && counters.requests() == 0).await;
}

#[tokio::test]
async fn a_crowd_past_the_bound_is_answered_to_the_last() {
    let upstream = Upstream::start(|_| Answer::ok("ok")).await;
    let gateway = Gateway::with(&upstream.url(), |options| options.max_connections = 1).await;
    let client = gateway.client();
    let mut kept = client.connect().await.unwrap();
    kept.send(client.get("/")).await.unwrap();
    let crowd: Vec<_> = (0..600).map(|_| tokio::spawn(client.get("/late").send())).collect();
    for one in crowd {
        assert_eq!(one.await.unwrap().unwrap().code(), "overloaded");
    }
    assert_eq!(kept.send(client.get("/")).await.unwrap().status, 200, "who was there is served");
}

#[tokio::test]
async fn requests_past_the_bound_are_told_so_over_both_protocols() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/held" => Answer::hang(),
        _ => Answer::ok("ok"),
    })
    .await;
    let counters = Counters::default();
    let gateway = Gateway::with(&upstream.url(), |options| {
        (options.max_requests, options.counters) = (3, counters.clone());
        options.cors = Some(Cors::new(["https://app.example"], false).unwrap());
    })
    .await;
    let held: Vec<_> = [gateway.client(), gateway.h2c(), gateway.client()]
        .into_iter()
        .map(|client| tokio::spawn(client.get("/held").send()))
        .collect();
    wait_until("three requests", || counters.requests() == 3).await;
    for client in [gateway.client(), gateway.h2c()] {
        let refused = client.get("/more").send().await.unwrap();
        assert_eq!((refused.status, refused.code().as_str()), (503, "overloaded"));
        assert_eq!(refused.header("access-control-allow-origin"), None, "no page asked");
        let page = client.get("/more").header("origin", "https://app.example").send().await.unwrap();
        assert_eq!(page.header("access-control-allow-origin"), Some("https://app.example"));
        assert_eq!(page.header("access-control-expose-headers"), Some("retry-after"));
        assert_eq!(page.header("vary"), Some("Origin"));
        let other = client.get("/more").header("origin", "https://evil.example").send().await.unwrap();
        assert_eq!((other.status, other.header("access-control-allow-origin")), (503, None));
    }
    assert_eq!(counted(&counters, Code::Overloaded), 6);
    held.iter().for_each(tokio::task::JoinHandle::abort);
    wait_until("room", || counters.requests() == 0).await;
    assert_eq!(gateway.client().get("/more").send().await.unwrap().text(), "ok");
}

/// A head that cannot be read has no origin: only what holds for any page can be said.
#[tokio::test]
async fn a_refusal_of_an_unreadable_head_is_for_any_page_or_none() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    for (origin, told) in [("*", true), ("https://app.example", false)] {
        let gateway = Gateway::with(&upstream.url(), |options| {
            options.cors = Some(Cors::new([origin], false).unwrap());
        })
        .await;
        let mut connection = RawConnection::open(gateway.addr).await;
        connection.write("GET / HTTP/1.1\r\nHost: h\r\nOrigin : https://app.example\r\n\r\n").await;
        let head = String::from_utf8(connection.read_head().await.unwrap()).unwrap().to_lowercase();
        assert!(head.starts_with("http/1.1 400"), "{head}");
        assert_eq!(head.contains("access-control-allow-origin: *\r\n"), told, "{head}");
    }
}

fn counted(counters: &Counters, code: Code) -> u64 {
    counters.problems().find(|(one, _)| *one == code).map(|(_, count)| count).unwrap()
}

#[tokio::test]
async fn a_shutdown_finishes_what_runs_closes_what_is_idle_and_returns() {
    let upstream = Upstream::start(|_| {
        Answer::chunks(["a", "b"], Duration::from_millis(500)).delay(Duration::from_millis(500))
    })
    .await;
    for h2c in [false, true] {
        let mut gateway = Gateway::start(&upstream.url()).await;
        let client = if h2c { gateway.h2c() } else { gateway.client() };
        let before = upstream.count();
        let silent = RawConnection::open(gateway.addr).await;
        let mut idle = client.connect().await.unwrap();
        idle.send(client.get("/")).await.unwrap();
        let running = tokio::spawn(client.post("/").body("x").send());
        wait_until("the request runs", || upstream.count() == before + 2).await;
        gateway.signal();
        wait_until("the idle connection is closed", || idle.is_closed()).await;
        assert!(!running.is_finished(), "closed before the running request ended");
        assert!(client.get("/").send().await.is_err(), "no connection is accepted");
        let response = running.await.unwrap().unwrap();
        assert_eq!((response.status, response.text()), (200, "ab"));
        assert_eq!(gateway.drained().await, Drained::default());
        drop(silent);
    }
}

#[tokio::test]
async fn a_shutdown_has_an_end() {
    let upstream = Upstream::start(|_| Answer::hang()).await;
    let mut gateway =
        Gateway::with(&upstream.url(), |options| options.shutdown_timeout = Duration::from_millis(300)).await;
    let running = tokio::spawn(gateway.client().get("/").send());
    wait_until("the request runs", || upstream.count() == 1).await;
    gateway.signal();
    assert_eq!(gateway.drained().await, Drained { connections_cut: 1, operations_left: 0 });
    assert!(running.await.unwrap().is_err());
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_unguarded_call() {
    let upstream = Upstream::start(|_| Answer::hang()).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    wait_until("the request runs", || upstream.count() == 1).await;
    drop(client);
    wait_until("the upstream connection is closed", || upstream.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_never_stops_sending_is_cut_after_its_refusal() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n").await;
    let start = tokio::time::Instant::now();
    while client.write(vec![b'x'; 64 * 1024]).await {
        assert!(start.elapsed() < testkit::PATIENCE, "refused, and still read");
    }
    assert_eq!(upstream.count(), 0);
}
