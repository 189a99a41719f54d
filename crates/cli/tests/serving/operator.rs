//! `onlyonce keys` on the store of a gateway that is at work.

use std::time::Duration;

use serde_json::Value;
use testkit::{Answer, Upstream, wait_for, wait_until};

use crate::common::{Gateway, pay};
use crate::{held, numbered};

async fn json(gateway: &Gateway, args: &[&str]) -> Value {
    let (ok, said) = gateway.keys(&[args, &["--json"]].concat()).await;
    assert!(ok, "{said}");
    serde_json::from_str(&said).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_lease_is_seen_and_refused_and_by_force_its_owner_is_fenced() {
    let (upstream, first_run) = held().await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &["--lease", "2s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "order-7"));
    wait_until("the upstream runs", || upstream.count() == 1).await;

    let listed = json(&gateway, &["list"]).await;
    assert_eq!(
        (&listed["records"][0]["key"], &listed["records"][0]["state"]),
        (&"order-7".into(), &"in_progress".into())
    );
    assert_eq!(json(&gateway, &["stats"]).await["in_progress"], 1);
    assert_eq!(json(&gateway, &["show", "order-7"]).await["attempt"], 1);
    let release = ["release", "order-7", "--reason", "the service says it refused"];
    let resolve = ["resolve", "order-7", "--status", "200", "--body", "x", "--reason", "r"];
    for refused in [&release[..], &resolve] {
        let (ok, said) = gateway.keys(refused).await;
        assert!(!ok && said.contains("is being worked on") && said.contains("--force"), "{said}");
    }
    let (ok, said) = gateway.keys(&[&release[..], &["--force"]].concat()).await;
    assert!(ok, "{said}");

    // The owner learns of it with its next renewal; from then on a retry runs.
    let second = wait_for("a retry runs", async || {
        let answer = pay(gateway.client(), "order-7").await.unwrap();
        (answer.status == 201).then_some(answer)
    })
    .await;
    assert_eq!((second.text(), second.header("idempotency-replayed")), ("run 2", None));
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"));
    drop(first_run);
    let first = first.await.unwrap().unwrap();
    assert_eq!(
        (first.status, first.text()),
        (201, "run 2"),
        "the fenced owner answers with the record's reply"
    );
    assert_eq!(pay(gateway.client(), "order-7").await.unwrap().text(), "run 2");
    assert_eq!(upstream.count(), 2);
    let audit = json(&gateway, &["audit"]).await;
    let entry = &audit["entries"][0];
    assert_eq!((&entry["action"], &entry["before"]), (&"release".into(), &"in_progress".into()));
    assert_eq!(entry["reason"], "the service says it refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_is_resolved_or_released_under_the_running_gateway() {
    let upstream = Upstream::start(|seen| match seen.number {
        1 | 2 => Answer::reset(),
        run => Answer::new(201, format!("run {run}")),
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    for key in ["happened", "did-not"] {
        let answer = pay(gateway.client(), key).await.unwrap();
        assert_eq!((answer.status, answer.code().as_str()), (504, "outcome-unknown"));
        let retry = pay(gateway.client(), key).await.unwrap();
        assert_eq!((retry.status, retry.code().as_str()), (409, "outcome-unknown"));
    }
    assert_eq!(json(&gateway, &["list", "--state", "unknown"]).await["records"].as_array().unwrap().len(), 2);
    std::fs::write(folder.path().join("reply.json"), "{\"charge\": \"ch_81\"}\n").unwrap();
    let body = format!("@{}", folder.path().join("reply.json").display());
    let resolve = ["resolve", "happened", "--status", "201", "--body", &body, "--reason", "ch_81"];
    assert!(gateway.keys(&resolve).await.0);
    assert!(gateway.keys(&["release", "did-not", "--reason", "no charge"]).await.0);
    for _ in 0..2 {
        let retry = pay(gateway.client(), "happened").await.unwrap();
        assert_eq!((retry.status, retry.text()), (201, "{\"charge\": \"ch_81\"}\n"), "exactly these bytes");
        assert_eq!(retry.header("idempotency-replayed"), Some("true"));
    }
    let retry = pay(gateway.client(), "did-not").await.unwrap();
    assert_eq!((retry.status, retry.text(), retry.header("idempotency-replayed")), (201, "run 3", None));
    assert_eq!(upstream.count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_are_given_up_by_force_and_purged_when_they_have_expired() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &["--cache-bytes", "0"]).await;
    assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "run 1");
    let release = ["release", "k", "--reason", "r"];
    let (ok, said) = gateway.keys(&release).await;
    assert!(!ok && said.contains("has a reply already"), "{said}");
    assert!(gateway.keys(&[&release[..], &["--force"]].concat()).await.0);
    assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "run 2");

    let brief = ["--lease", "500ms", "--retention", "1s", "--cache-bytes", "0"];
    let brief = Gateway::start(&upstream.url(), folder.path(), &brief).await;
    assert_eq!(pay(brief.client(), "brief").await.unwrap().text(), "run 3");
    let removed = wait_for("it expires", async || {
        json(&gateway, &["purge"]).await["removed"].as_u64().filter(|removed| *removed > 0)
    })
    .await;
    assert_eq!(removed, 1);
    assert_eq!(pay(brief.client(), "brief").await.unwrap().text(), "run 4");
    assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "run 2", "this one has not expired");
}

/// A gateway replays from its memory for `--cache-time` at most, which is at most the 60 s that the command tells.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_reply_is_gone_from_running_gateways_within_their_cache_time() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let options = ["--cache-time", "4s"];
    let first = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let second = Gateway::start(&upstream.url(), folder.path(), &options).await;
    assert_eq!(pay(first.client(), "k").await.unwrap().text(), "run 1");
    assert_eq!(pay(second.client(), "k").await.unwrap().text(), "run 1", "in the memory of both");
    let (ok, said) = first.keys(&["forget", "k", "--reason", "charged back"]).await;
    assert!(ok && said.contains("runs again") && said.contains("up to 60 seconds"), "{said}");
    let ran = wait_for("the first gateway has forgotten", async || {
        let answer = pay(first.client(), "k").await.unwrap();
        // Asked again and again: being asked must not keep a reply in memory.
        (answer.text() != "run 1").then_some(answer)
    })
    .await;
    assert_eq!((ran.status, ran.text(), ran.header("idempotency-replayed")), (201, "run 2", None));
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"));
    wait_for("and the other one", async || {
        (pay(second.client(), "k").await.unwrap().text() == "run 2").then_some(())
    })
    .await;
    assert_eq!(upstream.count(), 2);
    let audit = json(&first, &["audit"]).await;
    assert_eq!(
        (&audit["entries"][0]["action"], &audit["entries"][0]["before"]),
        (&"forget".into(), &"completed 201".into())
    );
}

/// What an operator has of a caller is the token that it sends.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_found_by_what_its_caller_sends() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), "0123456789abcdef0123456789abcdef\n").unwrap();
    let secret = folder.path().join("secret").display().to_string();
    let as_of = [
        (&[][..], ("authorization", "Bearer tok-1"), &["Bearer tok-1"][..]),
        (&["--scope-secret-file", &secret], ("authorization", "Bearer tok-1"), &["Bearer tok-1"]),
        (&["--scope-header", "X-Account"], ("x-account", "acme"), &["X-Account: acme"]),
        (&["--scope-cookie", "sid"], ("cookie", "theme=dark; sid=s-1"), &["Cookie: sid=s-1"]),
    ];
    for (number, (options, (name, value), credential)) in as_of.into_iter().enumerate() {
        let gateway = Gateway::start(&upstream.url(), folder.path(), options).await;
        for (caller, key) in [(value, "k"), ("Bearer other", "k")] {
            let request = gateway.client().post("/pay").key(key).header(name, caller).body("x");
            // Without its cookie it is nobody's.
            let status = request.send().await.unwrap().status;
            assert_eq!(status, if name == "cookie" && caller != value { 400 } else { 201 });
        }
        let mut find = vec!["find", "k", "--scope-of", credential[0]];
        if let [name @ "--scope-secret-file", file] = options {
            find.extend([*name, *file]);
        }
        let found = json(&gateway, &find).await;
        let records = found["records"].as_array().unwrap();
        assert_eq!(records.len(), 1, "{options:?}: {found}");
        assert_eq!(records[0]["reply"]["status"], 201);
        assert!(json(&gateway, &["find", "k"]).await["records"].as_array().unwrap().len() > number);
    }
}

/// Page by page, with every other condition, and nothing of anybody else's.
#[tokio::test(flavor = "multi_thread")]
async fn what_one_caller_has_is_listed_by_what_it_sends() {
    let upstream = Upstream::start(|seen| match seen.header("authorization") {
        Some("Bearer tok-1") if seen.header("idempotency-key") != Some("k-4") => Answer::reset(),
        _ => Answer::new(201, "paid"),
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    for (caller, keys) in
        [("Bearer tok-1", ["k-1", "k-2", "k-3", "k-4"].as_slice()), ("Bearer tok-2", &["k-2", "k-5"])]
    {
        for key in keys {
            let request = gateway.client().post("/pay").key(key).header("authorization", caller);
            let status = request.body("x").send().await.unwrap().status;
            assert_eq!(status, if caller == "Bearer tok-1" && *key != "k-4" { 504 } else { 201 });
        }
    }
    std::fs::write(folder.path().join("token"), "Bearer tok-1\n").unwrap();
    let from_file = format!("@{}", folder.path().join("token").display());
    let page = async |more: &[&str]| {
        let options = ["list", "--scope-of", &from_file, "--state", "unknown", "--limit", "2"];
        json(&gateway, &[&options[..], more].concat()).await
    };
    let keys = |page: &Value| {
        let records = page["records"].as_array().unwrap().iter();
        records.map(|record| record["key"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // Old enough as soon as they are there, and never so old.
    let first = page(&["--older-than", "1ms"]).await;
    assert_eq!(keys(&first), ["k-1", "k-2"]);
    assert_eq!(keys(&page(&["--older-than", "1h"]).await), Vec::<String>::new());
    let next = [&first["next"]["scope"], &first["next"]["key"]].map(|text| text.as_str().unwrap().to_owned());
    let second = page(&["--older-than", "1ms", "--after", &next[0], &next[1]]).await;
    assert_eq!((keys(&second), &second["next"]), (vec!["k-3".to_owned()], &Value::Null));
    let all = json(&gateway, &["list", "--scope-of", "Bearer tok-1"]).await;
    assert_eq!(keys(&all), ["k-1", "k-2", "k-3", "k-4"]);
    assert_eq!(keys(&json(&gateway, &["list", "--scope-of", "Bearer tok-2"]).await), ["k-2", "k-5"]);
    assert_eq!(keys(&json(&gateway, &["list", "--scope-of", "Bearer nobody"]).await), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_request_that_ran_is_named_to_clients_operators_and_the_upstream() {
    let upstream = numbered(Duration::ZERO).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &["--log", "json"]).await;
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for client in [gateway.client(), testkit::Client::h2c(gateway.addr)] {
        let send = |id: &str| {
            let request = client.post("/pay").key("k").header("x-request-id", id).body("1");
            request.header("traceparent", parent).send()
        };
        send("req-1").await.unwrap();
        let replay = send("req-2").await.unwrap();
        assert_eq!(replay.header("idempotency-original-request"), Some("req-1"));
        assert_eq!(replay.header("idempotency-original-traceparent"), Some(parent));
    }
    let onward = upstream.last().header("traceparent").unwrap().to_owned();
    assert_eq!((&onward[..36], &onward[52..]), (&parent[..36], "-01"), "the same trace");
    assert_ne!(onward, parent, "in a span of the gateway's");
    assert_eq!(upstream.last().header("x-request-id"), Some("req-1"));

    let shown = json(&gateway, &["show", "k"]).await;
    assert_eq!((&shown["request_id"], &shown["traceparent"]), (&"req-1".into(), &parent.into()));
    let (_, text) = gateway.keys(&["show", "k"]).await;
    assert!(text.contains("request id    req-1\n") && text.contains(parent), "{text}");
    let line = wait_for("the line of the last replay", async || {
        let said = gateway.process.stderr();
        let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["verdict"] == "replayed").nth(2)
    })
    .await;
    assert_eq!((&line["request_id"], &line["original_request_id"]), (&"req-2".into(), &"req-1".into()));
    assert_eq!(
        (&line["trace_id"], &line["original_trace_id"]),
        (&parent[3..35].into(), &parent[3..35].into())
    );
    assert_eq!(upstream.count(), 1);
}
