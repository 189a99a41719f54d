//! H23: bodies stream both ways, framed right, whatever their form.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{Gateway, QUIET};
use http::{HeaderMap, HeaderValue, Method};
use http_body::Frame;
use parking_lot::Mutex;
use testkit::upstream::pattern;
use testkit::{Answer, RawConnection, RawUpstream, Upstream, send_raw, wait_until, within};

#[tokio::test]
async fn an_event_arrives_while_the_stream_goes_on() {
    let (events, answer) = Answer::channel();
    let answer = Mutex::new(Some(answer.header("content-type", "text/event-stream")));
    let upstream = Upstream::start(move |_| answer.lock().take().unwrap()).await;
    let gateway = Gateway::start(&upstream.url()).await;
    events.send(Bytes::from_static(b"data: 1\n\n")).unwrap();
    let mut response = gateway.client().get("/events").send_streaming().await.unwrap();
    assert_eq!(response.headers["content-type"], "text/event-stream");
    for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
        assert_eq!(response.chunk().await.unwrap().unwrap(), event);
        // The next one exists only after this one has arrived.
        events
            .send(Bytes::from_static(if event.contains('1') { b"data: 2\n\n" } else { b"data: 3\n\n" }))
            .unwrap();
    }
    drop(events);
    while response.chunk().await.unwrap().is_some() {}
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_frees_the_upstream() {
    let (events, answer) = Answer::channel();
    let answer = Mutex::new(Some(answer));
    let upstream = Upstream::start(move |_| answer.lock().take().unwrap()).await;
    let gateway = Gateway::start(&upstream.url()).await;
    events.send(Bytes::from_static(b"x")).unwrap();
    let mut response = gateway.client().get("/").send_streaming().await.unwrap();
    response.chunk().await.unwrap();
    drop(response);
    wait_until("the upstream connection is closed", || {
        // The upstream notices when it writes.
        let _ = events.send(Bytes::from_static(b"x"));
        upstream.open_connections() == 0
    })
    .await;
}

#[tokio::test]
async fn a_big_upload_streams_at_the_pace_of_a_slow_upstream() {
    const PIECE: usize = 256 * 1024;
    const PIECES: usize = 64;
    let upstream =
        Upstream::options().read_pause(Duration::from_millis(2)).forget().start(|_| Answer::ok("done"));
    let upstream = upstream.await;
    let gateway = Gateway::start(&upstream.url()).await;
    for client in [gateway.client(), gateway.h2c()] {
        let before = upstream.body_bytes();
        let (sender, request) = client.post("/upload").stream();
        let upload = tokio::spawn(async move {
            for _ in 0..PIECES {
                sender.send(Bytes::from(vec![b'x'; PIECE])).await.unwrap();
            }
        });
        let response = tokio::spawn(request.send());
        wait_until("the first bytes are through before the last are sent", || upstream.body_bytes() > before)
            .await;
        within("the upload is over", upload).await.unwrap();
        assert_eq!(response.await.unwrap().unwrap().text(), "done");
        assert_eq!(upstream.body_bytes() - before, PIECE * PIECES);
    }
}

#[tokio::test]
async fn an_upstream_that_does_not_read_holds_the_upload_back() {
    let upstream = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        // Reads no more.
        std::future::pending::<()>().await;
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    let (sender, request) = gateway.client().post("/").stream();
    let response = tokio::spawn(request.send());
    let mut taken = 0;
    // Sockets and windows of both connections hold a few megabytes at most; a gateway that buffers takes all.
    while let Ok(sent) =
        tokio::time::timeout(Duration::from_secs(2), sender.send(Bytes::from(vec![0; 1 << 20]))).await
    {
        sent.unwrap();
        taken += 1;
        assert!(taken < 100, "{taken} MiB went into a gateway whose upstream reads nothing");
    }
    response.abort();
}

#[tokio::test]
async fn a_big_response_comes_whole_and_a_chunked_one_stays_chunked() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/big" => Answer::bytes(5_000_000),
        _ => Answer::chunks((0..200).map(|i| pattern(i * 37)), Duration::ZERO),
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    for client in [gateway.client(), gateway.h2c()] {
        let response = client.get("/big").send().await.unwrap();
        assert_eq!(response.header("content-length"), Some("5000000"));
        assert_eq!(response.body, pattern(5_000_000));
        let response = client.get("/chunked").send().await.unwrap();
        assert_eq!(response.header("content-length"), None);
        let whole: Vec<u8> = (0..200).flat_map(|i| pattern(i * 37)).collect();
        assert_eq!(response.body, whole);
    }
}

#[tokio::test]
async fn chunked_requests_are_forwarded_for_every_method() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.clone())).await;
    let gateway = Gateway::start(&upstream.url()).await;
    for method in [Method::GET, Method::POST, Method::DELETE] {
        let (sender, request) =
            gateway.client().request(method.clone(), "/").header("transfer-encoding", "chunked").stream();
        let (response, ()) = tokio::join!(request.send(), async move {
            sender.send(Bytes::from_static(b"ab")).await.unwrap();
            sender.send(Bytes::from_static(b"cd")).await.unwrap();
        });
        assert_eq!(response.unwrap().text(), "abcd", "{method}");
        assert_eq!(upstream.last().header("transfer-encoding"), Some("chunked"));
        assert_eq!(upstream.last().header("content-length"), None);
    }
}

#[tokio::test]
async fn trailers_go_both_ways() {
    let upstream = Upstream::start(|seen| {
        let sum = seen.trailers.get("sum").map_or("none", |v| v.to_str().unwrap());
        Answer::chunks(["x"], Duration::ZERO).trailer("sum", sum)
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    for client in [gateway.client(), gateway.h2c()] {
        let (sender, request) = client.post("/").header("te", "trailers").header("trailer", "sum").frames();
        let (response, ()) = tokio::join!(request.send(), async move {
            sender.send(Frame::data(Bytes::from_static(b"x"))).await.unwrap();
            let trailers = HeaderMap::from_iter([("sum".parse().unwrap(), HeaderValue::from_static("42"))]);
            sender.send(Frame::trailers(trailers)).await.unwrap();
        });
        let response = response.unwrap();
        assert_eq!((response.text(), response.trailers.get("sum").unwrap().to_str().unwrap()), ("x", "42"));
        assert_eq!(upstream.last().header_all("te"), ["trailers"]);
    }
    // A client that did not ask gets none, and a whole body.
    let response = gateway.client().get("/").send().await.unwrap();
    assert_eq!((response.text(), response.trailers.len()), ("x", 0));
}

#[tokio::test]
async fn bodiless_responses_are_right_and_keep_the_connection() {
    let upstream = RawUpstream::start(|_, mut connection| async move {
        while let Some(head) = connection.read_head().await {
            let head = String::from_utf8(head).unwrap();
            let answer = match head.split(' ').nth(1).unwrap() {
                "/204" => "HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n",
                "/304" => "HTTP/1.1 304 Not Modified\r\netag: \"e\"\r\ncontent-length: 77\r\n\r\n",
                "/205" => "HTTP/1.1 205 Reset Content\r\ncontent-length: 0\r\n\r\n",
                "/empty" => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
                "/empty-chunked" => "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                _ => "HTTP/1.1 200 OK\r\ncontent-length: 12345\r\n\r\n",
            };
            connection.write(answer).await;
        }
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    let client = gateway.client();
    let mut connection = client.connect().await.unwrap();
    for _ in 0..3 {
        for (path, status) in
            [("/204", 204), ("/304", 304), ("/205", 205), ("/empty", 200), ("/empty-chunked", 200)]
        {
            let response = connection.send(client.get(path)).await.unwrap();
            assert_eq!((response.status, response.body.len()), (status, 0), "{path}");
        }
        let response = connection.send(client.request(Method::HEAD, "/head")).await.unwrap();
        assert_eq!((response.status, response.header("content-length")), (200, Some("12345")));
        let response = connection.send(client.get("/304")).await.unwrap();
        assert_eq!(response.header("etag"), Some("\"e\""));
    }
    assert_eq!(upstream.received().len(), 1, "one upstream connection carried them all");
}

#[tokio::test]
async fn informational_responses_are_skipped_and_a_100_is_not_taken_for_the_answer() {
    let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n\
                  HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok";
    let upstream = RawUpstream::answering(answer).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let response = gateway.client().get("/").send().await.unwrap();
    assert_eq!((response.status, response.text()), (201, "ok"));
}

#[tokio::test]
async fn expect_is_answered_here_and_not_forwarded() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.body.clone())).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    let head = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n";
    client.write(head).await;
    assert_eq!(client.read_head().await.unwrap(), b"HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(upstream.count(), 0);
    client.write("hi").await;
    let back = client.read_to_end().await;
    assert!(back.starts_with(b"HTTP/1.1 200") && back.ends_with(b"\r\n\r\nhi"));
    assert_eq!(upstream.last().header("expect"), None);
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn a_refused_request_is_not_told_to_continue() {
    let upstream = Upstream::start(|_| Answer::ok("")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let request =
        "POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n";
    let back = send_raw(gateway.addr, request, QUIET).await;
    assert!(back.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&back));
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_upload_comes_through() {
    let upstream = Upstream::options().answer_first().start(|_| Answer::new(413, "too big")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let (sender, request) = gateway.client().post("/").stream();
    sender.send(Bytes::from_static(b"first")).await.unwrap();
    let response = request.send_streaming().await.unwrap();
    assert_eq!(response.status, 413);
    drop(sender);
}

#[tokio::test]
async fn a_client_that_breaks_off_its_upload_never_completes_it_upstream() {
    for head in ["Content-Length: 10\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"] {
        let upstream = Upstream::start(|_| Answer::ok("")).await;
        let gateway = Gateway::start(&upstream.url()).await;
        let mut client = RawConnection::open(gateway.addr).await;
        client.write(format!("POST / HTTP/1.1\r\nHost: h\r\n{head}")).await;
        wait_until("the piece is at the upstream", || upstream.body_bytes() == 3).await;
        drop(client);
        wait_until("the upstream connection is closed", || upstream.open_connections() == 0).await;
        assert_eq!(upstream.count(), 0, "a part was taken for the whole");
    }
}

#[tokio::test]
async fn a_response_cut_short_is_cut_short_for_the_client() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/length" => Answer::cut_short(100, "part"),
        _ => Answer::cut_chunked("part"),
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    for path in ["/length", "/chunked"] {
        for client in [gateway.client(), gateway.h2c()] {
            let error = client.get(path).send().await.expect_err("a part was taken for the whole");
            assert!(!error.to_string().contains("in time"), "{error}");
        }
    }
}
