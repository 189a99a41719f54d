//! What the options of `onlyonce serve` do, seen from a client.

use std::path::Path;
use std::time::Duration;

use testkit::{Answer, Authority, ClientResponse, TlsFront, Upstream, wait_until};

use crate::common::{Gateway, pay};
use crate::{held, numbered};

/// A gateway on a folder of its own.
async fn gateway(upstream: &Upstream, options: &[&str]) -> (Gateway, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (Gateway::start(&upstream.url(), folder.path(), options).await, folder)
}

/// POST /pay with key `k`, body `1` and one header more.
async fn with(gateway: &Gateway, name: &str, value: &str) -> ClientResponse {
    gateway.client().post("/pay").key("k").header(name, value).body("1").send().await.unwrap()
}

fn is_replay(answer: &ClientResponse) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guard_is_required_optional_or_off() {
    let upstream = numbered(Duration::ZERO).await;
    let (required, _a) = gateway(&upstream, &[]).await;
    let without = |gateway: &Gateway| gateway.client().post("/pay").body("1").send();
    assert_eq!(without(&required).await.unwrap().code(), "key-missing");
    let (optional, _b) = gateway(&upstream, &["--optional"]).await;
    let answer = without(&optional).await.unwrap();
    assert_eq!((answer.status, answer.header("idempotency-status")), (201, Some("ignored")));
    assert!(!is_replay(&pay(optional.client(), "k").await.unwrap()));
    assert!(is_replay(&pay(optional.client(), "k").await.unwrap()));
    let before = upstream.count();
    let (off, _c) = gateway(&upstream, &["--unguarded"]).await;
    for _ in 0..2 {
        let answer = pay(off.client(), "k").await.unwrap();
        assert_eq!((answer.status, is_replay(&answer)), (201, false));
    }
    assert_eq!(upstream.count(), before + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scope_is_what_the_options_say() {
    let upstream = numbered(Duration::ZERO).await;
    for (options, name, alice, bob) in [
        (&[][..], "authorization", "Basic alice", "Basic bob"),
        (&["--scope-header", "X-Account"], "x-account", "alice", "bob"),
        (&["--scope-cookie", "sid"], "cookie", "theme=dark; sid=alice", "sid=bob"),
    ] {
        let (gateway, _folder) = gateway(&upstream, options).await;
        let first = with(&gateway, name, alice).await;
        let other = with(&gateway, name, bob).await;
        assert!(first.status == 201 && other.status == 201 && !is_replay(&other), "{options:?}");
        assert_ne!(first.text(), other.text(), "{options:?}");
        assert_eq!(with(&gateway, name, alice).await.text(), first.text(), "{options:?}");
        let nobody = with(&gateway, "x-other", "1").await;
        match options {
            [] => assert_eq!(nobody.status, 201, "anonymous"),
            [option, ..] => {
                assert_eq!(nobody.code(), "scope-missing", "{options:?}");
                assert!(nobody.status == 400 && !option.is_empty());
            }
        }
    }
    let (shared, _folder) = gateway(&upstream, &["--scope-none"]).await;
    with(&shared, "authorization", "Basic alice").await;
    assert!(is_replay(&with(&shared, "authorization", "Basic bob").await));
    let (default, _folder) = gateway(&upstream, &[]).await;
    assert_eq!(with(&default, "cookie", "sid=alice").await.code(), "scope-missing");
    assert_eq!(with(&default, "authorization", "DPoP abc").await.code(), "scope-unstable");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_makes_other_scopes() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "0123456789abcdef0123456789abcdef\n").unwrap();
    let secret = secret.to_str().unwrap();
    let plain = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    let keyed = Gateway::start(&upstream.url(), folder.path(), &["--scope-secret-file", secret]).await;
    for gateway in [&plain, &keyed, &plain, &keyed] {
        assert_eq!(with(gateway, "authorization", "Basic alice").await.status, 201);
    }
    assert_eq!(upstream.count(), 2);
    let (_, listed) = plain.keys(&["list", "--json"]).await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let scopes: Vec<&str> = listed["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["scope"].as_str().unwrap())
        .collect();
    assert!(scopes.len() == 2 && scopes.iter().all(|scope| scope.len() == 64), "{scopes:?}");
    std::fs::write(folder.path().join("short"), "0123456789").unwrap();
    let short = folder.path().join("short").display().to_string();
    let short = ["--scope-secret-file", &short];
    let started = Gateway::start_on("127.0.0.1:0", &upstream.url(), folder.path(), &short).await;
    let said = started.err().expect("a short secret is refused").to_string();
    assert!(said.contains("at least 16 bytes") && !said.contains("0123456789"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn presets_expiry_links_and_fingerprints_reach_the_client() {
    let upstream = Upstream::start(|seen| {
        let status = seen.header("x-status").unwrap_or("201").parse().unwrap();
        Answer::new(status, format!("run {}", seen.number))
    })
    .await;
    let (stripe, _a) = gateway(&upstream, &["--preset", "stripe"]).await;
    let first = with(&stripe, "x-status", "500").await;
    let replay = with(&stripe, "x-status", "500").await;
    assert_eq!((replay.status, replay.text()), (500, first.text()), "a 500 is stored");
    assert_eq!((replay.header("idempotent-replayed"), is_replay(&replay)), (Some("true"), false));
    let (strict, _b) = gateway(&upstream, &["--preset", "strict"]).await;
    assert_eq!(with(&strict, "x-status", "500").await.status, 500);
    assert_eq!(with(&strict, "x-status", "500").await.code(), "outcome-unknown");
    let (success, _c) = gateway(&upstream, &["--preset", "success-only"]).await;
    assert_ne!(
        with(&success, "x-status", "404").await.text(),
        with(&success, "x-status", "404").await.text()
    );

    let docs = ["--expires", "--docs-url", "https://docs.example/{code}", "--fingerprint", "json"];
    let (other, _d) = gateway(&upstream, &docs).await;
    let refused = other.client().post("/pay").send().await.unwrap();
    assert_eq!(refused.header("link"), Some("<https://docs.example/key-missing>; rel=\"describedby\""));
    let json = |body: &'static str| {
        other.client().post("/pay").key("k").header("content-type", "application/json").body(body).send()
    };
    let first = json(r#"{"a": 1, "b": 2}"#).await.unwrap();
    let expires = first.header("idempotency-key-expires").expect("a date").to_owned();
    assert!(expires.ends_with(" GMT"), "{expires}");
    let replay = json(r#"{"b":2,"a":1}"#).await.unwrap();
    assert!(is_replay(&replay), "{replay:?}");
    assert_eq!(replay.header("idempotency-key-expires"), Some(&*expires));
    assert_eq!(json(r#"{"b":2,"a":2}"#).await.unwrap().code(), "key-reused");
}

#[tokio::test(flavor = "multi_thread")]
async fn past_each_bound_there_is_an_answer() {
    let upstream = Upstream::start(|seen| match seen.header("x-slow") {
        Some(_) => Answer::hang(),
        None => Answer::new(201, vec![b'x'; seen.header("x-len").map_or(1, |len| len.parse().unwrap())]),
    })
    .await;
    let bounds = ["--max-request-body", "100", "--max-stored-body", "100", "--max-in-flight", "1"];
    let (gateway, _folder) = gateway(&upstream, &[&bounds[..], &["--upstream-timeout", "5s"]].concat()).await;
    let long = gateway.client().post("/pay").key("long").body(vec![b'x'; 101]).send().await.unwrap();
    assert_eq!((long.status, long.code().as_str()), (413, "body-too-large"));
    let send = |key: &str, name: &str, value: &str| {
        gateway.client().post("/pay").key(key).header(name, value).send()
    };
    assert_eq!(send("reply", "x-len", "101").await.unwrap().body.len(), 101);
    let omitted = send("reply", "x-len", "101").await.unwrap();
    assert_eq!((omitted.status, omitted.body.len()), (201, 0));
    assert_eq!((omitted.header("idempotency-replay"), is_replay(&omitted)), (Some("omitted"), true));

    let before = upstream.count();
    let slow = tokio::spawn(send("slow", "x-slow", "1"));
    wait_until("the slow one runs", || upstream.count() == before + 1).await;
    let refused = send("one-too-many", "x-len", "1").await.unwrap();
    assert_eq!((refused.status, refused.code().as_str()), (503, "overloaded"));
    let after: u64 = refused.header("retry-after").expect("a Retry-After").parse().unwrap();
    assert!((1..=5).contains(&after), "{after}");
    assert_eq!(refused.json()["retryable"], true);
    // Replays need no place.
    assert!(is_replay(&send("reply", "x-len", "101").await.unwrap()));
    let unknown = slow.await.unwrap().unwrap();
    assert_eq!((unknown.status, unknown.code().as_str()), (504, "outcome-unknown"), "--upstream-timeout");
    assert_eq!(send("one-too-many", "x-len", "1").await.unwrap().status, 201);
    assert_eq!(upstream.count(), before + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_while_it_runs_is_a_503_or_runs_unguarded_as_asked() {
    let upstream = numbered(Duration::ZERO).await;
    for (options, open) in
        [(&["--cache-bytes", "0"][..], false), (&["--cache-bytes", "0", "--fail-open"], true)]
    {
        let (gateway, folder) = gateway(&upstream, options).await;
        let first = pay(gateway.client(), "k").await.unwrap();
        assert_eq!(first.status, 201);
        let file = folder.path().join("onlyonce.db");
        let aside = folder.path().join("aside.db");
        rename(&file, &aside);
        let before = upstream.count();
        let answer = pay(gateway.client(), "k").await.unwrap();
        if open {
            assert_eq!((answer.status, answer.header("idempotency-status")), (201, Some("degraded")));
            assert_eq!(upstream.count(), before + 1);
        } else {
            assert_eq!((answer.status, answer.code().as_str()), (503, "store-unavailable"));
            assert!(answer.header("retry-after").is_some());
            assert_eq!(upstream.count(), before);
        }
        rename(&aside, &file);
        let replay = pay(gateway.client(), "k").await.unwrap();
        assert_eq!((replay.text(), is_replay(&replay)), (first.text(), true), "nothing is lost");
    }
}

fn rename(from: &Path, to: &Path) {
    std::fs::rename(from, to).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_with_tls_is_known_by_its_authority() {
    let upstream = numbered(Duration::ZERO).await;
    let authority = Authority::new();
    let front = TlsFront::start(upstream.addr(), &authority.identity("IP:127.0.0.1"), None, true).await;
    let folder = tempfile::tempdir().unwrap();
    let ca = authority.path().display().to_string();
    for scheme in ["https", "h2"] {
        let gateway = Gateway::start(&front.url(scheme), folder.path(), &["--upstream-ca", &ca]).await;
        let answer = pay(gateway.client(), scheme).await.unwrap();
        assert_eq!(answer.status, 201, "{scheme}: {answer:?}");
        assert!(gateway.process.stderr().contains(&format!("upstream  {}", front.url(scheme))));
    }
    std::fs::write(folder.path().join("empty"), "").unwrap();
    let empty = folder.path().join("empty").display().to_string();
    for (options, said) in [
        (&["--upstream-ca", "/nowhere/ca.pem"][..], "/nowhere/ca.pem"),
        (&["--upstream-ca", &empty], "there is no certificate in it"),
        (&["--upstream-cert", &ca], "--upstream-key"),
    ] {
        let started = Gateway::start_on("127.0.0.1:0", &front.url("https"), folder.path(), options).await;
        let text = started.err().expect("it is refused").to_string();
        assert!(text.contains(said), "{options:?}: {text}");
    }
    assert_eq!(upstream.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_waits_for_the_result_through_another_gateway() {
    let (upstream, first_run) = held().await;
    let folder = tempfile::tempdir().unwrap();
    let one = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    let two = Gateway::start(&upstream.url(), folder.path(), &["--wait", "20s"]).await;
    let first = tokio::spawn(pay(one.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    let told = pay(one.client(), "k").await.unwrap();
    assert_eq!((told.status, told.code().as_str()), (409, "in-progress"), "without --wait");
    let waiting = tokio::spawn(pay(two.client(), "k"));
    // Long enough for it to ask the store, most of the time; when it asks later, it waits less.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    drop(first_run);
    let waited = waiting.await.unwrap().unwrap();
    assert_eq!((waited.status, waited.text(), is_replay(&waited)), (201, "run 1", true));
    assert_eq!(first.await.unwrap().unwrap().text(), "run 1");
    assert_eq!(upstream.count(), 1);
}
