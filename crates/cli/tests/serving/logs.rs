//! The log: one line for each guarded request, in each form, and no secret in any.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use testkit::{Answer, Upstream};

use crate::common::Gateway;

const SECRETS: [&str; 6] =
    ["S3CR3T-TOKEN", "S3CR3T-KEY", "S3CR3T-BODY", "S3CR3T-QUERY", "S3CR3T-REPLY", "S3CR3T-COOKIE"];

/// Seven requests, each with secrets wherever one can be, an ignored one besides; then the whole log.
async fn logged(folder: &Path, form: &str) -> String {
    let upstream = Upstream::start(|seen| {
        let status = seen.header("x-status").unwrap_or("201").parse().unwrap();
        Answer::new(status, "S3CR3T-REPLY").header("set-cookie", "sid=S3CR3T-COOKIE")
    })
    .await;
    let mut gateway = Gateway::start(&upstream.url(), folder, &["--log", form]).await;
    for (key, body, status) in [
        ("S3CR3T-KEY", "S3CR3T-BODY", "201"),
        ("S3CR3T-KEY", "S3CR3T-BODY", "201"),
        ("S3CR3T-KEY", "other", "201"),
        ("S3CR3T-KEY-2", "S3CR3T-BODY", "503"),
        ("S3CR3T-KEY-3", "S3CR3T-BODY", "502"),
        ("S3CR3T KEY", "S3CR3T-BODY", "201"),
    ] {
        let request = gateway.client().post("/pay?token=S3CR3T-QUERY").key(key).body(body);
        let request = request.header("authorization", "Bearer S3CR3T-TOKEN").header("x-status", status);
        request.header("cookie", "sid=S3CR3T-COOKIE").send().await.unwrap();
    }
    gateway.client().post("/pay").send().await.unwrap();
    gateway.client().get("/not-guarded").send().await.unwrap();
    gateway.process.sigterm().unwrap();
    assert!(gateway.process.wait_exit().await.unwrap().success());
    // The pipe is read to its end by then or a little later.
    testkit::wait_until("the end of the log", || gateway.process.stderr().contains("stopping:")).await;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let log = gateway.process.stderr() + &gateway.process.stdout();
    for secret in SECRETS {
        assert!(!log.contains(secret), "{secret} is in the log:\n{log}");
    }
    log
}

/// What each of the seven is called, and its status and attempt.
const VERDICTS: [(&str, u64, Option<u64>); 7] = [
    ("ran", 201, Some(1)),
    ("replayed", 201, None),
    ("key-reused", 422, None),
    ("released", 503, Some(1)),
    ("unknown", 502, Some(1)),
    ("key-malformed", 400, None),
    ("key-missing", 400, None),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_json_line_tells_verdict_key_hash_attempt_and_times() {
    let folder = tempfile::tempdir().unwrap();
    let log = logged(folder.path(), "json").await;
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let said = |message: &str| {
        let line = lines.iter().find(|line| line["message"].as_str().is_some_and(|m| m.starts_with(message)));
        line.unwrap_or_else(|| panic!("no {message:?} in {log}"))
    };
    assert_eq!(lines[0]["message"], "starting");
    assert!(lines[0]["upstream"].as_str().unwrap().starts_with("http://"), "{}", lines[0]);
    assert!(lines[0]["store"].as_str().unwrap().ends_with("onlyonce.db (durable)"), "{}", lines[0]);
    for line in [said("starting"), said("listening on http://127.0.0.1:"), said("stopping: ")] {
        assert_eq!((&line["level"], &line["target"]), (&"INFO".into(), &"onlyonce::serve".into()), "{line}");
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
    }
    let lines: Vec<&Value> = lines.iter().filter(|line| line["target"] == "onlyonce::request").collect();
    let seen: Vec<_> = lines
        .iter()
        .map(|line| {
            (line["verdict"].as_str().unwrap(), line["status"].as_u64().unwrap(), line["attempt"].as_u64())
        })
        .collect();
    assert_eq!(seen, VERDICTS);
    for line in &lines {
        let time = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"));
        assert!(time("upstream_ms") >= 0.0 && time("store_ms") >= 0.0, "{line}");
        assert!(time("total_ms") >= time("upstream_ms"), "{line}");
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
    }
    let hashes: Vec<_> = lines[..5].iter().map(|line| line["key_hash"].as_str().unwrap()).collect();
    assert!(
        hashes.iter().all(|hash| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit())),
        "{hashes:?}"
    );
    assert!(hashes[0] == hashes[1] && hashes[1] == hashes[2], "one key, one hash: {hashes:?}");
    assert_eq!(hashes.iter().collect::<BTreeSet<_>>().len(), 3, "{hashes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_line_tells_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let log = logged(folder.path(), "text").await;
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("onlyonce::request")).collect();
    assert_eq!(lines.len(), VERDICTS.len(), "{log}");
    for (line, (verdict, status, attempt)) in lines.iter().zip(VERDICTS) {
        let fields = [
            format!("verdict={verdict} "),
            format!("status={status} "),
            "upstream_ms=".into(),
            "store_ms=".into(),
        ];
        for field in fields.iter().map(String::as_str).chain(["total_ms="]) {
            assert!(line.contains(field), "{field} is not in {line}");
        }
        if let Some(attempt) = attempt {
            assert!(line.contains(&format!("attempt={attempt} ")) && line.contains("key_hash="), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quiet_log_has_what_went_wrong_alone() {
    let folder = tempfile::tempdir().unwrap();
    let log = logged(folder.path(), "quiet").await;
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("onlyonce::request")).collect();
    assert!(lines.len() == 1 && lines[0].contains("verdict=unknown"), "{log}");
}

/// H5: with Bearer tokens as scopes the operator is told once what a refreshed token means.
#[tokio::test(flavor = "multi_thread")]
async fn bearer_tokens_as_scopes_are_warned_of_once() {
    let upstream = Upstream::start(|_| Answer::ok("ok")).await;
    for (options, scheme, warnings) in
        [(&[][..], "Bearer", 1), (&[][..], "Basic", 0), (&["--scope-header", "X-Account"][..], "Bearer", 0)]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut gateway = Gateway::start(&upstream.url(), folder.path(), options).await;
        for n in 0..3 {
            let request = gateway.client().post("/pay").key(&format!("k{n}")).header("x-account", "a");
            let answer = request.header("authorization", format!("{scheme} t{n}")).send().await.unwrap();
            assert_eq!(answer.status, 200);
        }
        gateway.process.sigterm().unwrap();
        gateway.process.wait_exit().await.unwrap();
        testkit::wait_until("the end of the log", || {
            gateway.process.stderr().matches("verdict=ran").count() == 3
        })
        .await;
        let log = gateway.process.stderr();
        assert_eq!(
            log.matches("a refreshed token is a new scope").count(),
            warnings,
            "{options:?} {scheme}\n{log}"
        );
    }
}
