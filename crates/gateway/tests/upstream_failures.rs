//! H25: what the client is told, and what the layer in between learns, when the upstream fails.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::Gateway;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use onlyonce_core::{Fingerprint, Key, Operation, Scope};
use onlyonce_engine::{Begin, Execution, Idempotency};
use onlyonce_gateway::{GatewayOptions, ProxyService};
use onlyonce_http::{Code, Ending};
use testkit::{Answer, RawUpstream, Upstream, free_addr, wait_until, within};
use tokio::time::Instant;
use tower_service::Service;

type Proxy = ProxyService<Full<Bytes>>;

fn proxy(upstream: &str, change: impl FnOnce(&mut GatewayOptions)) -> Proxy {
    let mut options = GatewayOptions::new(free_addr(), upstream.parse().unwrap());
    change(&mut options);
    ProxyService::new(&options)
}

const ANSWERED: Option<Ending> = None;
const NOT_SENT: Option<Ending> = Some(Ending::Transient(Some(Code::UpstreamUnreachable)));
const NO_ANSWER: Option<Ending> = Some(Ending::Unknown(Some(Code::OutcomeUnknown)));

/// The right to run an operation that nobody else knows.
async fn execution() -> Execution {
    let operation = Operation::new(Scope::new("s").unwrap(), Key::new("k").unwrap(), Fingerprint::of(b"hi"));
    match Idempotency::in_memory().begin(&operation).await.unwrap() {
        Begin::Acquired(execution) => execution,
        other => panic!("{other:?}"),
    }
}

/// Status, end, and body or the error in it, of a guarded or unguarded POST.
async fn post(proxy: &mut Proxy, guarded: bool) -> (u16, Option<Ending>, Result<String, hyper::Error>) {
    let mut request = Request::post("/pay").header("host", "h").body(Full::from("hi")).unwrap();
    // The owner is there as long as the call.
    let owner = if guarded { Some(execution().await) } else { None };
    if let Some(owner) = &owner {
        request.extensions_mut().insert(owner.context().clone());
    }
    let response =
        within("an answer", proxy.call(request)).await.unwrap_or_else(|never: Infallible| match never {});
    let end = response.extensions().get::<Ending>().copied();
    let status = response.status().as_u16();
    let body = within("the body", response.into_body().collect()).await;
    drop(owner);
    (status, end, body.map(|body| String::from_utf8(body.to_bytes().to_vec()).unwrap()))
}

fn code(body: &Result<String, hyper::Error>) -> &str {
    body.as_ref()
        .unwrap()
        .split("\"code\":\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .unwrap_or_default()
}

#[tokio::test]
async fn an_answer_is_answered_and_tells_the_attempt_only_when_guarded() {
    let upstream = Upstream::start(|_| Answer::new(503, "busy")).await;
    let mut proxy = proxy(&upstream.url(), |_| {});
    let (status, end, body) = post(&mut proxy, true).await;
    assert_eq!((status, end, body.unwrap().as_str()), (503, ANSWERED, "busy"));
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("1"));
    assert_eq!(post(&mut proxy, false).await.0, 503);
    assert_eq!(upstream.last().header("idempotency-attempt"), None);
}

#[tokio::test]
async fn an_owner_that_lost_its_lease_sends_nothing() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let mut proxy = proxy(&upstream.url(), |_| {});
    let owner = execution().await;
    let context = owner.context().clone();
    owner.release().await;
    let mut request = Request::post("/pay").header("host", "h").body(Full::from("hi")).unwrap();
    request.extensions_mut().insert(context);
    let response = proxy.call(request).await.unwrap();
    assert_eq!(response.status(), 409);
    let ending = response.extensions().get::<Ending>();
    assert_eq!(ending, Some(&Ending::Transient(Some(Code::Superseded))));
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn nobody_there_is_unreachable_and_not_sent() {
    for scheme in ["http", "h2c"] {
        let mut proxy = proxy(&format!("{scheme}://{}", free_addr()), |_| {});
        let (status, end, body) = post(&mut proxy, true).await;
        assert_eq!((status, end, code(&body)), (502, NOT_SENT, "upstream-unreachable"));
        assert!(body.unwrap().contains("\"retryable\":true"));
    }
    let mut unknown = proxy("http://no-such-host.invalid", |_| {});
    assert_eq!(post(&mut unknown, true).await.1, NOT_SENT);
}

#[tokio::test]
async fn a_connection_that_does_not_come_up_is_given_up() {
    // A listen queue that is full: the system drops what comes after.
    let listener = tokio::net::TcpSocket::new_v4().unwrap();
    listener.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let listener = listener.listen(1).unwrap();
    let addr = listener.local_addr().unwrap();
    let mut fill = Vec::new();
    while let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(300), tokio::net::TcpStream::connect(addr)).await
    {
        fill.push(stream);
        assert!(fill.len() < 1000, "the listen queue never fills");
    }
    let mut proxy =
        proxy(&format!("http://{addr}"), |options| options.connect_timeout = Duration::from_millis(100));
    let (status, end, body) = post(&mut proxy, true).await;
    assert_eq!((status, end, code(&body)), (502, NOT_SENT, "upstream-unreachable"));
}

#[tokio::test]
async fn a_connection_that_breaks_after_the_request_is_sent_without_an_answer() {
    let upstream = Upstream::start(|_| Answer::reset()).await;
    for scheme in ["http", "h2c"] {
        let before = upstream.count();
        let mut proxy = proxy(&format!("{scheme}://{}", upstream.addr()), |_| {});
        let (status, end, body) = post(&mut proxy, true).await;
        assert_eq!((status, end, code(&body)), (502, NO_ANSWER, "upstream-failed"), "{scheme}");
        assert_eq!(upstream.count(), before + 1, "never sent twice");
    }
    let upstream = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        connection.reset();
    })
    .await;
    let mut proxy = proxy(&upstream.url(), |_| {});
    let (status, end, body) = post(&mut proxy, false).await;
    assert_eq!((status, end, code(&body)), (502, NO_ANSWER, "upstream-failed"));
    assert!(body.unwrap().contains("\"retryable\":false"), "a POST is not safe to repeat");
    assert_eq!(upstream.received().len(), 1, "never sent twice");
}

#[tokio::test]
async fn silence_is_a_timeout_and_sent_without_an_answer() {
    let upstream = Upstream::start(|_| Answer::hang()).await;
    for scheme in ["http", "h2c"] {
        let mut proxy = proxy(&format!("{scheme}://{}", upstream.addr()), |options| {
            options.upstream_timeout = Duration::from_millis(200);
        });
        let start = Instant::now();
        let (status, end, body) = post(&mut proxy, true).await;
        assert!(start.elapsed() >= Duration::from_millis(200));
        assert_eq!((status, end, code(&body)), (504, NO_ANSWER, "upstream-timeout"));
    }
    wait_until("the hung connection is closed", || upstream.open_connections() <= 1).await;
    let gateway =
        Gateway::with(&upstream.url(), |options| options.upstream_timeout = Duration::from_millis(200)).await;
    let response = gateway.client().get("/").send().await.unwrap();
    assert_eq!((response.status, response.code().as_str()), (504, "upstream-timeout"));
    assert_eq!(response.header("content-type"), Some("application/problem+json"));
    assert_eq!(response.json()["type"], "urn:onlyonce:error:upstream-timeout");
    assert_eq!(response.json()["retryable"], true, "a GET is safe to repeat");
}

#[tokio::test]
async fn a_long_upload_is_not_a_silent_upstream() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.len().to_string())).await;
    let timeout = Duration::from_millis(1500);
    let gateway = Gateway::with(&upstream.url(), |options| options.upstream_timeout = timeout).await;
    let (sender, request) = gateway.client().post("/").stream();
    let start = Instant::now();
    let (response, ()) = tokio::join!(request.send(), async move {
        while start.elapsed() < 2 * timeout {
            sender.send(Bytes::from_static(b"x")).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert_eq!(response.unwrap().status, 200);
}

#[tokio::test]
async fn a_client_that_stops_in_its_upload_is_told_so() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway =
        Gateway::with(&upstream.url(), |options| options.body_timeout = Duration::from_millis(300)).await;
    let (sender, request) = gateway.client().post("/").stream();
    sender.send(Bytes::from_static(b"x")).await.unwrap();
    let response = request.send_streaming().await.unwrap();
    assert_eq!(response.status, 408);
    assert_eq!(upstream.count(), 0);
    drop(sender);
}

#[tokio::test]
async fn a_body_cut_short_is_answered_and_then_an_error() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/pay" => Answer::cut_short(100, "part"),
        _ => Answer::ok("whole"),
    })
    .await;
    let mut proxy = proxy(&upstream.url(), |_| {});
    let (status, end, body) = post(&mut proxy, true).await;
    assert_eq!((status, end), (200, ANSWERED));
    body.expect_err("a part was taken for the whole");
}

#[tokio::test]
async fn a_kept_connection_closed_meanwhile_is_replaced_unseen() {
    let upstream =
        Upstream::options().idle_close(Duration::from_millis(50)).start(|_| Answer::ok("ok")).await;
    let mut proxy = proxy(&upstream.url(), |options| {
        options.pool_idle = Duration::from_secs(60);
        options.pool_idle_guarded = Duration::from_secs(60);
    });
    for round in 1..=5 {
        for guarded in [true, false] {
            let (status, end, _) = post(&mut proxy, guarded).await;
            assert_eq!((status, end), (200, ANSWERED), "round {round}");
            wait_until("the upstream has closed its side", || upstream.open_connections() == 0).await;
        }
    }
    assert_eq!(upstream.count(), 10);
}

#[tokio::test]
async fn connections_are_kept_and_guarded_requests_only_use_fresh_ones() {
    let upstream = Upstream::start(|_| Answer::ok("ok")).await;
    let mut proxy = proxy(&upstream.url(), |options| {
        options.pool_idle = Duration::from_secs(60);
        options.pool_idle_guarded = Duration::ZERO;
    });
    for _ in 0..5 {
        assert_eq!(post(&mut proxy, false).await.0, 200);
    }
    assert_eq!(upstream.connections(), 1, "kept for the next request");
    for fresh in 2..=4 {
        assert_eq!(post(&mut proxy, true).await.0, 200);
        assert_eq!(upstream.connections(), fresh, "idle too long for a guarded request");
    }
}

#[tokio::test]
async fn idle_connections_are_few_and_do_not_stay() {
    let upstream = Upstream::start(|_| Answer::ok("ok").delay(Duration::from_millis(300))).await;
    let proxy = proxy(&upstream.url(), |options| {
        options.pool_idle_max = 3;
        options.pool_idle = Duration::from_secs(2);
    });
    let calls = (0..10).map(|_| {
        let mut proxy = proxy.clone();
        tokio::spawn(async move { post(&mut proxy, false).await.0 })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap(), 200);
    }
    wait_until("at most three are kept", || upstream.open_connections() <= 3).await;
    wait_until("none stays", || upstream.open_connections() == 0).await;
}

#[tokio::test]
async fn a_busy_upstream_that_closes_idle_connections_costs_nobody_anything() {
    // Long enough that a busy machine does not hold up a request for half of it.
    let idle = Duration::from_millis(600);
    let upstream = Upstream::options().idle_close(idle).forget().start(|_| Answer::ok("ok")).await;
    let proxy = proxy(&upstream.url(), |options| {
        (options.pool_idle, options.pool_idle_guarded) = (idle / 2, idle / 2);
    });
    let (sent, stop) = (Arc::new(AtomicUsize::new(0)), Instant::now() + Duration::from_secs(6));
    let callers = (0..8).map(|n| {
        let (mut proxy, sent) = (proxy.clone(), sent.clone());
        tokio::spawn(async move {
            let mut pause = 1 + n;
            while Instant::now() < stop {
                let (status, end, _) = post(&mut proxy, true).await;
                assert_eq!((status, end), (200, ANSWERED));
                sent.fetch_add(1, Ordering::SeqCst);
                pause = pause * 7 % 151;
                tokio::time::sleep(Duration::from_millis(pause * 6)).await;
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    assert_eq!(upstream.count(), sent.load(Ordering::SeqCst), "each reached the upstream once");
    assert!(upstream.connections() > 8, "connections were closed and replaced");
}

/// The server's side of HTTP/2, just enough to answer the head of the first stream with these bytes and then, if so asked,
/// to close the connection.
async fn h2_answering(frames: &'static [u8], close: bool) -> RawUpstream {
    RawUpstream::start(move |_, mut connection| async move {
        connection.read_exact(24).await;
        connection.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00").await;
        loop {
            let Some(head) = connection.read_exact(9).await else { return };
            let len = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            connection.read_exact(len).await;
            match head[3] {
                1 => {
                    connection.write(frames).await;
                    if close {
                        return;
                    }
                }
                4 if head[4] == 0 => drop(connection.write(b"\x00\x00\x00\x04\x01\x00\x00\x00\x00").await),
                _ => {}
            }
        }
    })
    .await
}

#[tokio::test]
async fn an_h2_upstream_that_says_it_did_not_touch_a_request_did_not_get_it() {
    let refused_stream = b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x07";
    // GOAWAY: no error, last stream 0; an internal error, last stream 0.
    let go_away = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    let go_away_in_error = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02";
    for (frames, close) in
        [(&refused_stream[..], false), (go_away, false), (go_away, true), (go_away_in_error, true)]
    {
        let upstream = h2_answering(frames, close).await;
        let mut proxy = proxy(&format!("h2c://{}", upstream.addr()), |_| {});
        let (status, end, body) = post(&mut proxy, true).await;
        assert_eq!((status, end, code(&body)), (502, NOT_SENT, "upstream-unreachable"), "{frames:?} {close}");
    }
}

#[tokio::test]
async fn an_h2_upstream_that_goes_away_after_it_took_the_request_may_have_run_it() {
    // GOAWAY, last stream 1: ours.
    let go_away = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00";
    let go_away_in_error = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x02";
    // The stream reset in error, and the connection just closed.
    let reset = b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x02";
    for (frames, close) in [(&go_away[..], true), (go_away_in_error, true), (reset, false), (b"", true)] {
        let upstream = h2_answering(frames, close).await;
        let mut proxy = proxy(&format!("h2c://{}", upstream.addr()), |_| {});
        let (status, end, body) = post(&mut proxy, true).await;
        assert_eq!((status, end, code(&body)), (502, NO_ANSWER, "upstream-failed"), "{frames:?} {close}");
    }
}

#[tokio::test]
async fn an_h2c_upstream_gets_http_2_with_the_clients_host() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.clone())).await;
    let gateway = Gateway::start(&format!("h2c://{}", upstream.addr())).await;
    for (client, h2c) in [(gateway.client(), false), (gateway.h2c(), true)] {
        let mut request =
            client.request(Method::PATCH, "/a?b=%2f").header("te", "trailers").header("x-a", "1");
        if !h2c {
            request = request.header("connection", "x-hop").header("x-hop", "1");
        }
        assert_eq!(request.body("hi").send().await.unwrap().text(), "hi");
        let seen = upstream.last();
        assert_eq!((seen.version, seen.path()), (http::Version::HTTP_2, "/a?b=%2f"));
        assert_eq!(seen.uri.authority().unwrap().as_str(), gateway.addr.to_string());
        assert_eq!(
            (seen.header("host"), seen.header("te"), seen.header("x-a")),
            (None, Some("trailers"), Some("1"))
        );
        assert_eq!((seen.header("connection"), seen.header("x-hop")), (None, None));
        assert_eq!(seen.header("x-forwarded-for"), Some("127.0.0.1"));
    }
    assert_eq!(upstream.connections(), 1, "one connection carries all streams");
}
