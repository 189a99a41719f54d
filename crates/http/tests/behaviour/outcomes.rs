//! H11: what the end of a call says.

use std::time::Duration;

use onlyonce_core::{OperationId, StateName};
use onlyonce_http::{Code, Ending, Preset};
use testkit::PATIENCE;

use crate::harness::{
    Hit, Server, ServerOptions, TestStore, assert_problem, assert_replay_of, on_every_store, reply, with,
};

on_every_store! {
    h11_the_status_says_how_it_ended,
    h11_a_conflict_on_a_later_attempt_is_released,
    h11_the_service_may_say_better,
    h11_no_store_keeps_the_status_alone,
    h11_in_the_library_a_handler_or_a_function_decides,
    h11_an_ending_with_a_code_is_answered_with_that_problem,
    h11_no_whole_reply_is_unknown,
}

/// Answers with the status in the path, and the run in the body.
async fn by_path(hit: Hit) -> http::Response<axum::body::Body> {
    let status = hit.uri.path()[1..].parse().unwrap();
    let body = if status == 204 || status == 304 { String::new() } else { format!("run {}", hit.number) };
    let response = reply(status, body);
    match hit.headers.get("x-outcome") {
        Some(outcome) => with(response, "idempotency-outcome", outcome.to_str().unwrap()),
        None => response,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    Stored,
    Released,
    Unknown,
}
use Seen::*;

/// Sends a request twice: what the second answer says of the first.
async fn twice(server: &Server, status: u16, key: &str, outcome: Option<&str>) -> Seen {
    let send = async || {
        let mut request = server.client().post(&format!("/{status}")).key(key).body("1");
        if let Some(outcome) = outcome {
            request = request.header("x-outcome", outcome);
        }
        request.send().await.unwrap()
    };
    let before = server.runs();
    let first = send().await;
    // A whole reply is the client's in any case, and nothing of ours is in it.
    assert_eq!((first.status, first.header("idempotency-outcome")), (status, None));
    let second = send().await;
    match server.runs() - before {
        2 => Released,
        1 if second.code() == "outcome-unknown" => Unknown,
        1 => {
            assert_replay_of(&second, &first);
            Stored
        }
        _ => panic!("{second:?}"),
    }
}

async fn h11_the_status_says_how_it_ended(store: TestStore) {
    let expected = |preset, status| match (preset, status) {
        (Preset::SuccessOnly, 200..300) => Stored,
        (Preset::SuccessOnly, _) => Released,
        (Preset::Stripe, 500..) => Stored,
        (Preset::Strict, 500 | 501 | 502 | 504 | 505) => Unknown,
        (_, 401 | 403 | 407 | 408 | 425 | 429 | 500 | 501 | 503 | 505) => Released,
        (_, 502 | 504) => Unknown,
        _ => Stored,
    };
    for preset in Preset::ALL {
        let marker = http::HeaderName::from_static("idempotency-replayed");
        let server = ServerOptions::new(&store)
            .hold()
            .start(|layer| layer.preset(preset).replayed_header(marker), by_path)
            .await;
        for status in [
            200, 201, 202, 204, 301, 303, 304, 400, 401, 402, 403, 404, 407, 408, 409, 410, 422, 423, 425,
            429, 500, 501, 502, 503, 504, 505,
        ] {
            let key = format!("{}-{status}", preset.as_str());
            assert_eq!(twice(&server, status, &key, None).await, expected(preset, status), "{key}");
        }
    }
}

async fn h11_a_conflict_on_a_later_attempt_is_released(store: TestStore) {
    for conflict in [409, 423] {
        let server = ServerOptions::new(&store)
            .lease(Duration::from_secs(1))
            .start(
                |layer| layer.wait(PATIENCE),
                move |hit: Hit| async move {
                    // The first attempt gets no answer from behind; on the second the first one still runs there.
                    let status = [504, conflict, 200][hit.number - 1];
                    reply(status, format!("run {}", hit.number))
                },
            )
            .await;
        let key = conflict.to_string();
        for (status, text) in [(504, "run 1"), (conflict, "run 2"), (200, "run 3")] {
            let answer = server.pay(&key, "1").await;
            assert_eq!((answer.status, answer.text()), (status, text));
            assert_eq!(answer.header("idempotency-replayed"), None);
        }
        assert_eq!(server.pay(&key, "1").await.header("idempotency-replayed"), Some("true"));
    }
}

async fn h11_the_service_may_say_better(store: TestStore) {
    let server = ServerOptions::new(&store).hold().start(|layer| layer, by_path).await;
    for (outcome, status, expected) in [
        ("definitive", 503, Stored),
        ("definitive", 502, Stored),
        ("transient", 200, Released),
        ("transient", 504, Released),
        ("unknown", 200, Unknown),
        ("unknown", 503, Unknown),
        ("nonsense", 200, Stored),
        ("nonsense", 503, Released),
    ] {
        let key = format!("{outcome}-{status}");
        assert_eq!(twice(&server, status, &key, Some(outcome)).await, expected, "{key}");
    }
    // `Cache-Control: no-store` is about caches.
    let cached = Server::start(&store, |layer| layer, |hit: Hit| async move {
        with(reply(200, format!("run {}", hit.number)), "cache-control", "no-store")
    })
    .await;
    let first = cached.pay("cache-control", "1").await;
    assert_replay_of(&cached.pay("cache-control", "1").await, &first);
}

async fn h11_no_store_keeps_the_status_alone(store: TestStore) {
    let server = Server::start(
        &store,
        |layer| layer,
        |_: Hit| async {
            let response = with(reply(201, "card 4111"), "idempotency-outcome", "no-store");
            with(response, "x-secret", "cvv 123")
        },
    )
    .await;
    let first = server.pay("k", "1").await;
    assert_eq!((first.status, first.text(), first.header("x-secret")), (201, "card 4111", Some("cvv 123")));
    assert_eq!(first.header("idempotency-outcome"), None);
    let other = Server::counting(&store, |layer| layer).await;
    for server in [&server, &server, &other] {
        let replay = server.pay("k", "1").await;
        assert_eq!((replay.status, replay.text(), replay.header("x-secret")), (201, "", None));
        assert_eq!(replay.header("idempotency-replay"), Some("omitted"));
        assert_eq!(replay.header("idempotency-replayed"), Some("true"));
    }
    assert_eq!((server.runs(), other.runs()), (1, 0));
}

async fn h11_in_the_library_a_handler_or_a_function_decides(store: TestStore) {
    let server = ServerOptions::new(&store)
        .hold()
        .start(
            |layer| layer.classify(|reply, _| (reply.status == 418).then_some(Ending::Transient(None))),
            |hit: Hit| async move {
                let mut response = reply(if hit.uri.path() == "/418" { 418 } else { 200 }, "x");
                match hit.uri.path() {
                    "/unknown" => response.extensions_mut().insert(Ending::Unknown(None)),
                    "/transient" => response.extensions_mut().insert(Ending::Transient(None)),
                    _ => None,
                };
                response
            },
        )
        .await;
    let state = async |path: &str| {
        server.client().post(path).key(path).send().await.unwrap();
        let context = server.hits().last().unwrap().context.clone().unwrap();
        let id: &OperationId = context.operation().id();
        store.admin.show(id).await.unwrap().map(|record| record.state)
    };
    assert_eq!(state("/418").await, None);
    assert_eq!(state("/transient").await, None);
    assert_eq!(state("/unknown").await, Some(StateName::Unknown));
    assert_eq!(state("/other").await, Some(StateName::Completed));
}

async fn h11_an_ending_with_a_code_is_answered_with_that_problem(store: TestStore) {
    let server = ServerOptions::new(&store)
        .hold()
        .start(
            |layer| layer,
            |hit: Hit| async move {
                let mut response = reply(599, "never seen");
                response.extensions_mut().insert(match hit.uri.path() {
                    "/unsent" => Ending::Transient(Some(Code::UpstreamUnreachable)),
                    _ => Ending::Unknown(Some(Code::OutcomeUnknown)),
                });
                response
            },
        )
        .await;
    let send = |path: &'static str| server.client().post(path).key(path).send();
    for run in 1..=2 {
        let answer = send("/unsent").await.unwrap();
        assert_problem(&answer, 502, "upstream-unreachable");
        assert_eq!((&answer.json()["retryable"], answer.header("retry-after")), (&true.into(), Some("1")));
        assert_eq!(server.runs(), run);
    }
    assert_problem(&send("/sent").await.unwrap(), 504, "outcome-unknown");
    assert_problem(&send("/sent").await.unwrap(), 409, "outcome-unknown");
    assert_eq!(server.runs(), 3);
}

async fn h11_no_whole_reply_is_unknown(store: TestStore) {
    let server = ServerOptions::new(&store)
        .hold()
        .start(
            |layer| layer,
            |hit: Hit| async move {
                let pieces = [Ok("half"), Err(std::io::Error::other("broken on purpose"))];
                let broken = axum::body::Body::from_stream(futures_util::stream::iter(pieces));
                match hit.uri.path() {
                    "/breaks" => reply(200, broken),
                    _ => with(reply(200, "half"), "content-length", "8"),
                }
            },
        )
        .await;
    for (runs, path) in ["/breaks", "/short"].into_iter().enumerate() {
        let send = || server.client().post(path).key(path).send();
        assert_problem(&send().await.unwrap(), 504, "outcome-unknown");
        assert_problem(&send().await.unwrap(), 409, "outcome-unknown");
        assert_eq!(server.runs(), runs + 1);
    }
}
