//! H13 and H14, and the byte budget: what is too large to be held.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt;
use onlyonce_core::StateName;
use parking_lot::Mutex;
use std::sync::Arc;
use testkit::{ClientResponse, send_raw, wait_until};
use tokio::sync::mpsc;

use crate::harness::{
    Gate, Hit, Server, ServerOptions, TestStore, assert_problem, on_every_store, reply, with,
};

on_every_store! {
    h13_a_long_reply_is_recorded_first_and_streams_through,
    h13_a_stream_is_recorded_first_and_streams_through,
    h13_a_long_reply_is_read_to_its_end_when_the_client_goes,
    h13_a_reply_without_an_end_is_not_read_for_ever_for_nobody,
    h13_a_long_reply_that_breaks_off_is_broken_off,
    h13_a_long_reply_that_panics_is_broken_off,
    h13_a_transient_stream_is_released,
    h14_a_long_request_is_refused_before_anything_runs,
    past_the_byte_budget_requests_are_refused,
}

/// What describes a body, and would be wrong on a replay without one.
const OF_THE_BODY: [(&str, &str); 7] = [
    ("content-encoding", "identity"),
    ("etag", "\"1\""),
    ("content-range", "bytes 0-9/10"),
    ("digest", "sha-256=x"),
    ("content-digest", "sha-256=:x:"),
    ("repr-digest", "sha-256=:x:"),
    ("content-md5", "x"),
];

#[track_caller]
fn assert_omitted(replay: &ClientResponse, status: u16) {
    assert_eq!((replay.status, replay.body.len()), (status, 0));
    assert_eq!(replay.header("idempotency-replay"), Some("omitted"));
    assert_eq!(replay.header("idempotency-replayed"), Some("true"));
    for (name, _) in OF_THE_BODY {
        assert_eq!(replay.header(name), None, "{name}");
    }
    assert!(matches!(replay.header("content-length"), None | Some("0")));
}

async fn h13_a_long_reply_is_recorded_first_and_streams_through(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer.max_stored_body(1000),
        |hit: Hit| async move {
            let body = testkit::upstream::pattern(hit.uri.path()[1..].parse().unwrap());
            // With its length declared, and in pieces whose sum is seen at the end.
            let body = match hit.headers.contains_key("x-pieces") {
                false => Body::from(body),
                true => {
                    let pieces: Vec<_> = body
                        .chunks(300)
                        .map(|p| Ok::<_, std::io::Error>(Bytes::copy_from_slice(p)))
                        .collect();
                    Body::from_stream(futures_util::stream::iter(pieces))
                }
            };
            let response = with(reply(201, body), "location", "/x/1");
            OF_THE_BODY.into_iter().fold(response, |response, (name, value)| with(response, name, value))
        },
    )
    .await;
    for (runs, (len, pieces)) in
        [(1000, false), (1000, true), (1001, false), (1001, true), (300_000, true)].into_iter().enumerate()
    {
        let key = format!("{len}-{pieces}");
        let send = async || {
            let mut request = server.client().post(&format!("/{len}")).key(&key);
            if pieces {
                request = request.header("x-pieces", "1");
            }
            request.send().await.unwrap()
        };
        let first = send().await;
        assert_eq!((first.status, &first.body), (201, &testkit::upstream::pattern(len)));
        for (name, value) in OF_THE_BODY {
            assert_eq!(first.header(name), Some(value));
        }
        for _ in 0..2 {
            let replay = send().await;
            assert_eq!(replay.header("location"), Some("/x/1"));
            match len {
                ..=1000 => assert_eq!((&replay.body, replay.header("etag")), (&first.body, Some("\"1\""))),
                _ => assert_omitted(&replay, 201),
            }
        }
        assert_eq!(server.runs(), runs + 1);
    }
}

/// A server whose reply is what the test sends.
async fn streaming(
    options: ServerOptions,
    head: impl Fn() -> http::response::Builder + Clone + Send + Sync + 'static,
) -> (Server, mpsc::Sender<std::io::Result<Bytes>>) {
    let (sender, receiver) = mpsc::channel(1);
    let receiver = Arc::new(Mutex::new(Some(receiver)));
    let server = options
        .start(
            |layer| layer.max_stored_body(1000),
            move |_: Hit| {
                let (receiver, head) = (receiver.clone(), head.clone());
                async move {
                    let receiver: mpsc::Receiver<std::io::Result<Bytes>> =
                        receiver.lock().take().expect("it runs once");
                    let stream = futures_util::stream::unfold(receiver, async |mut receiver| {
                        receiver.recv().await.map(|piece| (piece, receiver))
                    });
                    head().body(Body::from_stream(stream)).unwrap()
                }
            },
        )
        .await;
    (server, sender)
}

fn event_stream() -> http::response::Builder {
    http::Response::builder()
        .header("content-type", "text/event-stream; charset=utf-8")
        .header("etag", "\"1\"")
}

async fn h13_a_stream_is_recorded_first_and_streams_through(store: TestStore) {
    let (server, events) = streaming(ServerOptions::new(&store), event_stream).await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    assert_eq!(first.status, 200);
    // The head is out, so the record is complete, though nothing of the body is there.
    let records = store.admin.list(&Default::default()).await.unwrap().records;
    assert_eq!(records[0].state, StateName::Completed);
    for event in ["data: 1\n\n", "data: 2\n\n"] {
        events.send(Ok(event.into())).await.unwrap();
        assert_eq!(first.chunk().await.unwrap().unwrap(), event);
        let replay = server.client().post("/watch").key("k").body("1").send().await.unwrap();
        assert_omitted(&replay, 200);
        assert_eq!(replay.header("content-type"), Some("text/event-stream; charset=utf-8"));
    }
    drop(events);
    assert_eq!(first.chunk().await.unwrap(), None);
    assert_eq!(server.runs(), 1);
}

async fn h13_a_long_reply_is_read_to_its_end_when_the_client_goes(store: TestStore) {
    let (server, pieces) = streaming(ServerOptions::new(&store), event_stream).await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    pieces.send(Ok("1".into())).await.unwrap();
    first.chunk().await.unwrap();
    drop(first);
    // More than any queue between holds: somebody reads it.
    let piece = Bytes::from(vec![0; 64 << 10]);
    for _ in 0..200 {
        testkit::within("the rest is read", pieces.send(Ok(piece.clone()))).await.unwrap();
    }
    drop(pieces);
    assert_eq!(server.runs(), 1);
}

async fn h13_a_reply_without_an_end_is_not_read_for_ever_for_nobody(store: TestStore) {
    let options =
        ServerOptions::new(&store).policy(|policy| policy.work_timeout = Duration::from_millis(300));
    let (server, pieces) = streaming(options, event_stream).await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    // A client that listens may do so for as long as it likes.
    tokio::time::sleep(Duration::from_millis(600)).await;
    pieces.send(Ok("1".into())).await.unwrap();
    assert_eq!(first.chunk().await.unwrap().unwrap(), "1");
    drop(first);
    testkit::within("it is given up", pieces.closed()).await;
    assert_omitted(&server.client().post("/watch").key("k").body("1").send().await.unwrap(), 200);
}

async fn h13_a_long_reply_that_breaks_off_is_broken_off(store: TestStore) {
    let (server, pieces) = streaming(ServerOptions::new(&store), event_stream).await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    pieces.send(Ok("1".into())).await.unwrap();
    assert_eq!(first.chunk().await.unwrap().unwrap(), "1");
    pieces.send(Err(std::io::Error::other("broken on purpose"))).await.unwrap();
    assert!(first.chunk().await.is_err(), "the end of a broken stream must not look like its end");
    assert_omitted(&server.client().post("/watch").key("k").body("1").send().await.unwrap(), 200);
}

async fn h13_a_long_reply_that_panics_is_broken_off(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer,
        |_: Hit| async {
            let pieces = futures_util::stream::iter(0..).then(async |piece| {
                // What was sent so far is flushed while the stream is quiet.
                tokio::time::sleep(Duration::from_millis(50)).await;
                assert!(piece < 2, "broken on purpose");
                Ok::<_, std::io::Error>("data: 1\n\n")
            });
            with(reply(200, Body::from_stream(pieces)), "content-type", "text/event-stream")
        },
    )
    .await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    let mut text = Vec::new();
    let end = loop {
        match first.chunk().await {
            Ok(Some(piece)) => text.extend(piece),
            end => break end,
        }
    };
    assert!(end.is_err(), "the end of a broken stream must not look like its end");
    assert_eq!(text, b"data: 1\n\ndata: 1\n\n");
    assert_omitted(&server.client().post("/watch").key("k").body("1").send().await.unwrap(), 200);
}

async fn h13_a_transient_stream_is_released(store: TestStore) {
    let (server, pieces) = streaming(ServerOptions::new(&store), || event_stream().status(503)).await;
    let mut first = server.client().post("/watch").key("k").body("1").send_streaming().await.unwrap();
    assert_eq!((first.status.as_u16(), store.records().await), (503, 0));
    pieces.send(Ok("busy".into())).await.unwrap();
    assert_eq!(first.chunk().await.unwrap().unwrap(), "busy");
}

async fn h14_a_long_request_is_refused_before_anything_runs(store: TestStore) {
    let server = Server::counting(&store, |layer| layer.max_request_body(1000)).await;
    // By its declared length, before a byte of it is read.
    let head = "POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1001\r\n\r\n";
    let refused = String::from_utf8(send_raw(server.addr(), head, Duration::from_millis(500)).await).unwrap();
    assert!(refused.starts_with("HTTP/1.1 413 ") && refused.contains("body-too-large"), "{refused}");
    // By what came.
    let (body, request) = server.client().post("/pay").key("k").stream();
    let answer = tokio::spawn(request.send());
    for _ in 0..3 {
        let _ = body.send(Bytes::from(vec![b'x'; 400])).await;
    }
    assert_problem(&answer.await.unwrap().unwrap(), 413, "body-too-large");
    assert_eq!((server.runs(), store.records().await), (0, 0));
    let longest = server.client().post("/pay").key("k").body(vec![b'x'; 1000]).send().await.unwrap();
    assert_eq!((longest.status, server.hits()[0].body.len()), (201, 1000));
    // Unguarded requests have no such limit.
    let put =
        server.client().request(http::Method::PUT, "/x").body(vec![b'x'; 100_000]).send().await.unwrap();
    assert_eq!((put.status, server.hits()[1].body.len()), (201, 100_000));
}

async fn past_the_byte_budget_requests_are_refused(store: TestStore) {
    let gate = Gate::closed();
    let at = gate.clone();
    let server = Server::start(
        &store,
        |layer| layer.max_buffered(100_000),
        move |_: Hit| {
            let at = at.clone();
            async move {
                at.pass().await;
                reply(200, "done")
            }
        },
    )
    .await;
    let send = |key: &str, bytes: usize| server.client().post("/pay").key(key).body(vec![b'x'; bytes]).send();
    let first = tokio::spawn(send("a", 60_000));
    wait_until("it runs", || server.runs() == 1).await;
    let refused = send("b", 60_000).await.unwrap();
    assert_problem(&refused, 503, "overloaded");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!((server.runs(), store.records().await), (1, 1));
    gate.open();
    assert_eq!(first.await.unwrap().unwrap().status, 200);
    let retry = testkit::wait_for("room", async || {
        let answer = send("b", 60_000).await.unwrap();
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert_eq!(retry.text(), "done");
}
