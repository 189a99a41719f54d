//! What one gateway does with requests: normative in its numbers, H1 to H26.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Method;
use testkit::{Answer, Client, ClientResponse, Upstream, wait_for, wait_until};

use crate::Place;
use crate::common::pay;

/// Answers 201 with the number of its run.
pub(crate) async fn numbered() -> Upstream {
    slow(Duration::ZERO).await
}

/// The same, each run after `delay`.
pub(crate) async fn slow(delay: Duration) -> Upstream {
    let runs = AtomicUsize::new(0);
    Upstream::start(move |_| {
        let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
        Answer::json(201, &serde_json::json!({ "run": run })).delay(delay)
    })
    .await
}

async fn post(client: &Client, path: &str, key: &str, body: &'static str) -> ClientResponse {
    client.post(path).key(key).body(body).send().await.unwrap()
}

fn is_replay(answer: &ClientResponse) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}

pub(crate) async fn h1_post_and_patch_are_guarded_and_nothing_else(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let client = gateway.client();
    for (method, runs) in
        [(Method::POST, 1), (Method::PATCH, 1), (Method::PUT, 2), (Method::DELETE, 2), (Method::GET, 2)]
    {
        let before = upstream.count();
        for _ in 0..2 {
            let answer = client.request(method.clone(), "/x").key(method.as_str()).send().await.unwrap();
            assert_eq!(answer.status, 201, "{method}: {}", answer.text());
        }
        assert_eq!(upstream.count() - before, runs, "{method}");
    }
}

pub(crate) async fn h2_a_key_is_the_same_quoted_and_bare(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let client = gateway.client();
    for (n, header) in ["\"order-7\"", "order-7", "\"order-7\";v=1", "\"order-7\""].iter().enumerate() {
        let answer = client.post("/x").header("idempotency-key", header).body("b").send().await.unwrap();
        assert_eq!((answer.status, is_replay(&answer)), (201, n > 0), "{header}: {}", answer.text());
    }
    // Compared byte for byte.
    for header in ["\"Order-7\"", "\"order-7 \"", "\" order-7\""] {
        let answer = client.post("/x").header("idempotency-key", header).body("b").send().await.unwrap();
        assert!(!is_replay(&answer), "{header}");
    }
    assert_eq!(upstream.count(), 4);
}

pub(crate) async fn h3_a_missing_key_is_refused_or_runs_unguarded(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let answer = gateway.client().post("/x").body("b").send().await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (400, "key-missing"));
    assert_eq!(upstream.count(), 0);
    let optional = place.gateway(&upstream, &["--optional"]).await;
    for _ in 0..2 {
        let answer = optional.client().post("/x").body("b").send().await.unwrap();
        assert_eq!((answer.status, answer.header("idempotency-status")), (201, Some("ignored")));
    }
    assert_eq!(upstream.count(), 2);
}

pub(crate) async fn h4_a_malformed_key_is_refused(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let long = format!("\"{}\"", "k".repeat(256));
    for header in ["", "\"\"", "\"open", "\"a\", \"b\"", "a b", "\"\u{e9}\"", &long] {
        let request = gateway.client().post("/x").header("idempotency-key", header).body("b");
        let answer = request.send().await.unwrap();
        assert_eq!((answer.status, answer.code().as_str()), (400, "key-malformed"), "{header:?}");
    }
    let longest = "k".repeat(255);
    for n in 0..2 {
        let answer = post(&gateway.client(), "/x", &longest, "b").await;
        assert_eq!((answer.status, is_replay(&answer)), (201, n == 1));
    }
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h5_keys_of_two_callers_never_meet(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let mut answers = Vec::new();
    for caller in ["Bearer ann", "Bearer bob", "Bearer ann", "Bearer bob", "Bearer Ann"] {
        let request = gateway.client().post("/x").key("k").header("authorization", caller).body("b");
        answers.push(request.send().await.unwrap().text().to_owned());
    }
    assert_eq!(answers[0], answers[2]);
    assert_eq!(answers[1], answers[3]);
    assert_eq!(upstream.count(), 3);
    let cookie = gateway.client().post("/x").key("k").header("cookie", "session=1").body("b");
    let answer = cookie.send().await.unwrap();
    assert_eq!((answer.status, answer.code().as_str()), (400, "scope-missing"));
}

pub(crate) async fn h6_path_query_and_body_make_the_request(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let client = gateway.client();
    assert_eq!(post(&client, "/pay?dry=1", "k", "b").await.status, 201);
    for (path, body) in [("/pay?dry=0", "b"), ("/pay", "b"), ("/paid?dry=1", "b"), ("/pay?dry=1", "c")] {
        let answer = post(&client, path, "k", body).await;
        assert_eq!((answer.status, answer.code().as_str()), (422, "key-reused"), "{path} {body}");
    }
    assert!(is_replay(&post(&client, "/pay?dry=1", "k", "b").await));
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h7_another_request_is_refused_and_changes_nothing(place: Place) {
    let upstream = slow(Duration::from_millis(700)).await;
    let gateway = place.gateway(&upstream, &[]).await;
    let client = gateway.client();
    let first = tokio::spawn(pay(client, "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    // While it is in flight, and once it is done.
    for _ in 0..2 {
        let other = post(&client, "/pay", "k", "{\"amount\":200}").await;
        assert_eq!((other.status, other.code().as_str()), (422, "key-reused"));
        assert_eq!(other.json()["retryable"], false);
        wait_until("the first is answered", || first.is_finished()).await;
    }
    let first = first.await.unwrap().unwrap();
    let again = pay(client, "k").await.unwrap();
    assert_eq!((again.text(), is_replay(&again)), (first.text(), true));
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h8_a_copy_in_flight_is_told_to_wait_or_waits(place: Place) {
    let upstream = slow(Duration::from_millis(1200)).await;
    let gateway = place.gateway(&upstream, &[]).await;
    let first = tokio::spawn(pay(gateway.client(), "told"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    let copy = pay(gateway.client(), "told").await.unwrap();
    assert_eq!((copy.status, copy.code().as_str()), (409, "in-progress"));
    assert_eq!(copy.json()["retryable"], true);
    let after: u64 = copy.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=5).contains(&after), "{after}");
    assert_eq!(first.await.unwrap().unwrap().status, 201);

    let waiting = place.gateway(&upstream, &["--wait", "20s"]).await;
    let first = tokio::spawn(pay(waiting.client(), "waits"));
    wait_until("the upstream runs", || upstream.count() == 2).await;
    let copy = pay(waiting.client(), "waits").await.unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!((copy.status, copy.text(), is_replay(&copy)), (201, first.text(), true));
    assert_eq!(upstream.count(), 2);
}

pub(crate) async fn h9_a_client_that_left_finds_its_answer(place: Place) {
    let upstream = slow(Duration::from_millis(500)).await;
    let gateway = place.gateway(&upstream, &["--wait", "20s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    first.abort();
    let again = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((again.status, again.text(), is_replay(&again)), (201, "{\"run\":1}", true));
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h11_the_end_of_the_call_decides(place: Place) {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/402" => Answer::new(402, "declined"),
        "/503" => Answer::new(503, "later"),
        "/504" => Answer::new(504, "who knows"),
        "/reset" => Answer::reset(),
        "/told" => Answer::new(500, "final").header("idempotency-outcome", "definitive"),
        _ => Answer::new(200, "secret").header("idempotency-outcome", "no-store"),
    })
    .await;
    let gateway = place.gateway(&upstream, &[]).await;
    let client = gateway.client();
    // The path, the first answer, the second one, and how often it ran.
    for (path, first, second, runs) in [
        ("/402", 402, (402, ""), 1),
        ("/503", 503, (503, ""), 2),
        ("/504", 504, (409, "outcome-unknown"), 1),
        ("/reset", 504, (409, "outcome-unknown"), 1),
        ("/told", 500, (500, ""), 1),
        ("/no-store", 200, (200, ""), 1),
    ] {
        let before = upstream.count();
        let answer = post(&client, path, path, "b").await;
        assert_eq!(answer.status, first, "{path}: {}", answer.text());
        assert_eq!(answer.header("idempotency-outcome"), None);
        let again = post(&client, path, path, "b").await;
        assert_eq!(again.status, second.0, "{path}: {}", again.text());
        if !second.1.is_empty() {
            assert_eq!(again.code(), second.1, "{path}");
        }
        assert_eq!(upstream.count() - before, runs, "{path}");
    }
}

pub(crate) async fn h13_a_long_reply_is_omitted_and_never_run_again(place: Place) {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/long" => Answer::bytes(3 << 20),
        _ => Answer::sse(["1", "2"], Duration::from_millis(5)),
    })
    .await;
    let gateway = place.gateway(&upstream, &[]).await;
    for (path, length) in [("/long", 3 << 20), ("/stream", "data: 1\n\ndata: 2\n\n".len())] {
        let before = upstream.count();
        let first = post(&gateway.client(), path, path, "b").await;
        assert_eq!((first.status, first.body.len()), (200, length), "{path}");
        let again = post(&gateway.client(), path, path, "b").await;
        assert_eq!((again.status, again.body.len()), (200, 0), "{path}");
        assert_eq!(again.header("idempotency-replay"), Some("omitted"));
        assert_eq!(upstream.count() - before, 1);
    }
    // The longest that is kept.
    let whole = Upstream::start(|_| Answer::bytes(1 << 20)).await;
    let gateway = place.gateway(&whole, &[]).await;
    let first = post(&gateway.client(), "/whole", "whole", "b").await;
    let again = post(&gateway.client(), "/whole", "whole", "b").await;
    assert_eq!((again.body.len(), is_replay(&again)), (1 << 20, true));
    assert_eq!(first.body, again.body);
}

pub(crate) async fn h14_a_body_that_is_too_large_runs_nothing(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    let large = gateway.client().post("/x").key("k").body(vec![b'a'; (1 << 20) + 1]).send().await.unwrap();
    assert_eq!((large.status, large.code().as_str()), (413, "body-too-large"));
    assert_eq!(upstream.count(), 0);
    let fits = gateway.client().post("/x").key("k").body(vec![b'a'; 1 << 20]).send().await.unwrap();
    assert_eq!(fits.status, 201);
}

pub(crate) async fn h15_empty_replies_and_trailers_come_back(place: Place) {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/empty" => Answer::new(200, ""),
        "/204" => Answer::new(204, ""),
        _ => Answer::chunks(["a", "b"], Duration::ZERO).trailer("sum", "9"),
    })
    .await;
    let gateway = place.gateway(&upstream, &[]).await;
    for path in ["/empty", "/204", "/trailers"] {
        let mut answers = Vec::new();
        for _ in 0..2 {
            let request = gateway.client().post(path).key(path).header("te", "trailers").body("b");
            answers.push(request.send().await.unwrap());
        }
        let [first, again] = &answers[..] else { unreachable!() };
        assert_eq!(
            (first.status, &first.body, &first.trailers),
            (again.status, &again.body, &again.trailers)
        );
        assert!(is_replay(again), "{path}");
    }
    assert_eq!(upstream.count(), 3);
}

pub(crate) async fn h16_a_replay_is_the_first_answer_byte_for_byte(place: Place) {
    let upstream = Upstream::start(|_| {
        let every_byte: Vec<u8> = (0..=255).cycle().take(5000).collect();
        Answer::new(201, every_byte)
            .header("location", "/charges/1")
            .header("x-a", "1")
            .header("x-b", "2")
            .header("x-a", "3")
            .header("idempotency-replayed", "true")
    })
    .await;
    let gateway = place.gateway(&upstream, &[]).await;
    let send =
        || gateway.client().post("/x").key("k").header("idempotency-replayed", "true").body("b").send();
    let (first, again) = (send().await.unwrap(), send().await.unwrap());
    assert_eq!(first.header("idempotency-replayed"), None, "nobody forges it");
    assert!(is_replay(&again));
    assert_eq!(first.body, again.body);
    for name in ["location", "x-a", "x-b", "content-length"] {
        assert_eq!(first.header_all(name), again.header_all(name), "{name}");
    }
    assert_eq!(again.header_all("x-a"), ["1", "3"]);
    assert_eq!(upstream.last().header("idempotency-replayed"), None);
}

pub(crate) async fn h17_what_is_of_the_moment_is_not_stored(place: Place) {
    let upstream = Upstream::start(|_| {
        Answer::new(201, "x")
            .header("set-cookie", "session=secret")
            .header("alt-svc", "clear")
            .header("etag", "\"1\"")
    })
    .await;
    let gateway = place.gateway(&upstream, &[]).await;
    let (first, again) =
        (post(&gateway.client(), "/x", "k", "b").await, post(&gateway.client(), "/x", "k", "b").await);
    assert_eq!(first.header("set-cookie"), Some("session=secret"));
    assert!(is_replay(&again));
    assert_eq!((again.header("set-cookie"), again.header("alt-svc")), (None, None));
    assert_eq!(again.header("etag"), Some("\"1\""));
}

pub(crate) async fn h18_the_expiry_is_told_where_asked(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &["--expires"]).await;
    let (first, again) =
        (pay(gateway.client(), "k").await.unwrap(), pay(gateway.client(), "k").await.unwrap());
    let told = first.header("idempotency-key-expires").expect("a date");
    assert_eq!(again.header("idempotency-key-expires"), Some(told));
}

pub(crate) async fn h19_a_refusal_is_a_problem_document(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &[]).await;
    pay(gateway.client(), "k").await.unwrap();
    let refused = post(&gateway.client(), "/pay", "k", "other").await;
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    let problem = refused.json();
    assert_eq!(problem["type"], "urn:onlyonce:error:key-reused");
    assert_eq!((&problem["status"], &problem["code"]), (&422.into(), &"key-reused".into()));
    assert!(problem["title"].is_string() && problem["detail"].is_string());
}

pub(crate) async fn h26_sigterm_finishes_what_runs(place: Place) {
    let upstream = slow(Duration::from_millis(700)).await;
    let mut gateway = place.gateway(&upstream, &[]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.sigterm().unwrap();
    let answer = first.await.unwrap().expect("it is answered");
    assert_eq!((answer.status, answer.text()), (201, "{\"run\":1}"));
    assert!(gateway.process.wait_exit().await.unwrap().success());
}

pub(crate) async fn fifty_copies_run_once(place: Place) {
    let upstream = slow(Duration::from_millis(100)).await;
    let gateway = place.gateway(&upstream, &["--wait", "20s"]).await;
    for round in 0..5 {
        let key = format!("k{round}");
        let copies: Vec<_> = (0..50)
            .map(|_| {
                let (client, key) = (gateway.client(), key.clone());
                tokio::spawn(async move { pay(client, &key).await.unwrap() })
            })
            .collect();
        let mut firsts = 0;
        for copy in copies {
            let answer = copy.await.unwrap();
            assert_eq!((answer.status, answer.text()), (201, format!("{{\"run\":{}}}", round + 1).as_str()));
            firsts += usize::from(!is_replay(&answer));
        }
        assert_eq!((firsts, upstream.count()), (1, round + 1));
    }
    wait_for("the upstream stays at five", async || (upstream.count() == 5).then_some(())).await;
}
