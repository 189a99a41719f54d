//! `onlyonce keys` doing what it is asked.

use bytes::Bytes;
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use onlyonce_core::{ClaimOutcome, CompleteOutcome, ReleaseOutcome, Reply, Store};
use serde_json::json;

use crate::{Fixture, HOUR, TOKEN, text};

#[tokio::test]
async fn list_and_stats_tell_every_state() {
    let fixture = Fixture::new().await;
    fixture.completed("m1", "a-done", Reply::new(201, "x"), HOUR).await;
    fixture.in_progress("m1", "b-live").await;
    fixture.unknown("m2", "c-unknown").await;
    fixture.unknown("", "d-freed").await;
    fixture.keys(&["release", "d-freed", "--reason", "r"]).ok();

    let listed = fixture.keys(&["list", "--json"]).json();
    let records = listed["records"].as_array().unwrap();
    let brief: Vec<_> =
        records.iter().map(|r| json!([r["scope"], r["key"], r["state"], r["attempt"]])).collect();
    let expected = [
        json!(["", "d-freed", "freed", 1]),
        json!(["m1", "a-done", "completed", 1]),
        json!(["m1", "b-live", "in_progress", 1]),
        json!(["m2", "c-unknown", "unknown", 1]),
    ];
    assert_eq!((brief.as_slice(), &listed["next"]), (&expected[..], &json!(null)));
    let left = records[2]["lease_left_ms"].as_u64().unwrap();
    assert!(left <= 3_600_000 && left > 0, "{left}");

    let stats = fixture.keys(&["stats", "--json"]).json();
    for (state, count) in [("in_progress", 1), ("completed", 1), ("unknown", 1), ("freed", 1), ("expired", 0)]
    {
        assert_eq!(stats[state], count, "{state} in {stats}");
    }
    let table = fixture.keys(&["list"]).ok().stdout;
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..3], ["STATE", "ATTEMPT", "AGE"]);
    assert_eq!((lines[1][0], lines[1][lines[1].len() - 1]), ("freed", "(anonymous)"));
    assert_eq!((lines[4][0], lines[4][lines[4].len() - 1]), ("unknown", "m2"));
    assert!(fixture.keys(&["stats"]).ok().stdout.contains("\nunknown      1 "));
}

#[tokio::test]
async fn list_selects_and_pages() {
    let fixture = Fixture::new().await;
    for key in ["k1", "k2", "k3"] {
        fixture.unknown("m1", key).await;
    }
    fixture.unknown("m2", "k1").await;
    let keys = |args: &[&str]| {
        let page = fixture.keys(&[&["list", "--json"], args].concat()).json();
        let records = page["records"].as_array().unwrap().iter();
        let keys: Vec<_> = records.map(|r| format!("{}/{}", r["scope"], r["key"]).replace('"', "")).collect();
        (keys.join(" "), page["next"].clone())
    };
    let (first, next) = keys(&["--limit", "3"]);
    assert_eq!((first.as_str(), &next), ("m1/k1 m1/k2 m1/k3", &json!({"scope": "m1", "key": "k3"})));
    assert_eq!(keys(&["--after", "m1", "k3"]), ("m2/k1".into(), json!(null)));
    assert_eq!(keys(&["--key", "k1"]).0, "m1/k1 m2/k1");
    assert_eq!(keys(&["--scope", "m1", "--key", "k1"]).0, "m1/k1");
    assert_eq!(keys(&["--scope", "m2"]), ("m2/k1".into(), json!(null)));
    assert_eq!(keys(&["--scope", "m"]).0, "", "not a beginning of others");
    assert_eq!(keys(&["--state", "completed"]).0, "");
    assert_eq!(keys(&["--state", "unknown", "--limit", "1"]).0, "m1/k1");
    assert_eq!(keys(&["--older-than", "1h"]).0, "");
    // Keys that look like options.
    for key in ["-dash", "--json"] {
        fixture.keys(&["list", "--key", key]).ok();
        fixture.keys(&["list", "--after", "m1", key]).ok();
    }
    assert!(fixture.keys(&["list", "--limit", "3"]).ok().stdout.ends_with("\nmore: --after 'm1' 'k3'\n"));
    assert_eq!(fixture.keys(&["list", "--state", "freed"]).ok().stdout, "no records\n");
}

#[tokio::test]
async fn show_has_the_whole_reply() {
    let fixture = Fixture::new().await;
    let reply = Reply::json(201, &json!({"id": 7})).unwrap();
    fixture.completed("m1", "k1", reply, HOUR).await;
    let shown = fixture.keys(&["show", "k1", "--json"]).json();
    assert_eq!(
        shown["reply"],
        json!({
            "status": 201, "headers": [["content-type", "application/json"]],
            "body": "{\"id\":7}", "body_encoding": "utf-8", "trailers": [], "body_omitted": false,
        })
    );
    assert!(shown["fingerprint"].as_str().unwrap().starts_with("sha256:"));
    assert!(shown["expires_at"].as_str().unwrap().ends_with('Z'));
    let people = fixture.keys(&["show", "k1", "--scope", "m1"]).ok().stdout;
    assert!(people.ends_with("\n201\ncontent-type: application/json\n\n{\"id\":7}\n"), "{people}");

    fixture.completed("m1", "k2", Reply::new(200, Bytes::from_static(b"\xff\0")), HOUR).await;
    let shown = fixture.keys(&["show", "k2", "--json"]).json();
    assert_eq!(
        (&shown["reply"]["body"], &shown["reply"]["body_encoding"]),
        (&json!("/wA="), &json!("base64"))
    );
    assert!(
        fixture
            .keys(&["show", "k2"])
            .ok()
            .stdout
            .ends_with("(2 bytes, not text; --json has them in base64)\n")
    );
}

// What a client put in a key or a body cannot steer the operator's terminal.
#[tokio::test]
async fn hostile_text_is_escaped_for_people() {
    let fixture = Fixture::new().await;
    fixture.completed("m1", "k\u{202e}1", Reply::new(200, "a\u{1b}[2Jb\nc"), HOUR).await;
    assert!(fixture.keys(&["list"]).ok().stdout.contains("k\\u{202e}1"));
    let shown = fixture.keys(&["show", "k\u{202e}1"]).ok().stdout;
    assert!(shown.ends_with("\na\\u{1b}[2Jb\nc\n"), "{shown:?}");
}

#[tokio::test]
async fn resolve_gives_every_retry_exactly_these_bytes() {
    let fixture = Fixture::new().await;
    let operation = fixture.unknown("m1", "k1").await;
    std::fs::write(fixture.path("reply.bin"), b"\x00\xffjson\r\n").unwrap();
    let body = format!("@{}", text(&fixture.path("reply.bin")));
    let args =
        ["resolve", "k1", "--status", "201", "--body", &body, "--header", "Content-Type: text/x; a=\"b\""];
    let resolved =
        fixture.keys(&[&args[..], &["--reason", "the bank shows ch_81", "--actor", "eve"]].concat()).ok();
    assert_eq!(
        resolved.stdout,
        "resolved k1: every retry within 1day gets status 201 and a body of 8 bytes\n"
    );

    let ClaimOutcome::Completed(stored) = fixture.retry(&operation).await else { panic!("not completed") };
    let expected = Reply::new(201, Bytes::from_static(b"\x00\xffjson\r\n"))
        .with_header(CONTENT_TYPE, HeaderValue::from_static("text/x; a=\"b\""));
    assert_eq!(stored.reply, expected);
    // The owner that comes back late is fenced, and learns the reply.
    let late = fixture.complete(&operation, Reply::new(200, "mine"), HOUR).await;
    assert!(matches!(&late, CompleteOutcome::Fenced(Some(stored)) if stored.reply == expected), "{late:?}");

    let audit = fixture.keys(&["audit", "--json"]).json();
    let mut entry = audit["entries"][0].clone();
    assert!(entry["at"].as_str().unwrap().ends_with('Z'));
    entry["at"] = json!("");
    assert_eq!(
        entry,
        json!({
            "at": "", "actor": "eve", "action": "resolve", "scope": "m1", "key": "k1",
            "before": "unknown", "after": "completed 201", "reason": "the bank shows ch_81",
        })
    );
}

#[tokio::test]
async fn release_lets_the_next_retry_run() {
    let fixture = Fixture::new().await;
    let operation = fixture.unknown("", "k1").await;
    let released = fixture.keys(&["release", "k1", "--reason", "the bank shows no charge", "--json"]).json();
    assert_eq!((&released["state"], &released["key"]), (&json!("freed"), &json!("k1")));
    // The old owner is fenced while nobody has claimed it, and after.
    assert_eq!(fixture.store.release(&operation, TOKEN).await.unwrap(), ReleaseOutcome::Fenced);
    let ClaimOutcome::Acquired(lease) = fixture.retry(&operation).await else { panic!("not acquired") };
    assert_eq!(lease.attempt, 2);
    let late = fixture.complete(&operation, Reply::new(200, "mine"), HOUR).await;
    assert!(matches!(late, CompleteOutcome::Fenced(None)), "{late:?}");

    // Nobody named: the user of the process.
    let audit = fixture.keys(&["audit", "k1"]).ok().stdout;
    let line: Vec<&str> = audit.lines().nth(1).unwrap().split_whitespace().skip(1).collect();
    assert_eq!(line.join(" "), "ada release unknown freed k1 (anonymous) the bank shows no charge");
}

#[tokio::test]
async fn force_reaches_live_leases_and_completed_records() {
    let fixture = Fixture::new().await;
    let live = fixture.in_progress("m1", "live").await;
    let done = fixture.completed("m1", "done", Reply::new(200, "x"), HOUR).await;
    let resolve = ["resolve", "live", "--status", "409", "--body", "no", "--reason", "r", "--force"];
    fixture.keys(&resolve).ok();
    assert!(
        matches!(fixture.retry(&live).await, ClaimOutcome::Completed(s) if s.reply == Reply::new(409, "no"))
    );
    let released = fixture.keys(&["release", "done", "--reason", "r", "--force"]).ok();
    assert!(released.stdout.contains("for up to 60 seconds"), "{}", released.stdout);
    assert!(matches!(fixture.retry(&done).await, ClaimOutcome::Acquired(_)));
}

#[tokio::test]
async fn purge_removes_what_is_over_and_nothing_else() {
    let fixture = Fixture::new().await;
    fixture.in_progress("m1", "live").await;
    fixture.unknown("m1", "held").await;
    fixture.completed("m1", "kept", Reply::new(200, "x"), HOUR).await;
    for number in 0..3 {
        fixture
            .completed("m1", &format!("over{number}"), Reply::new(200, "x"), std::time::Duration::ZERO)
            .await;
    }
    assert_eq!(fixture.keys(&["purge", "--json"]).json(), json!({"removed": 3}));
    // Outcomes that nobody has decided are not forgotten by a slip.
    fixture.keys(&["purge", "--hold-retention", "0s"]).failed(2, &["keys list --state unknown", "--force"]);
    // No terminal, no drawing.
    let again = fixture.keys(&["purge", "--hold-retention", "0s", "--force"]).ok();
    assert_eq!(again.stdout, "removed 1\n");
    let left = fixture.keys(&["list", "--json"]).json();
    let left: Vec<_> = left["records"].as_array().unwrap().iter().map(|r| r["key"].clone()).collect();
    assert_eq!(left, ["kept", "live"]);
}

#[tokio::test]
async fn audit_selects_by_key_and_scope_and_outlives_the_record() {
    let fixture = Fixture::new().await;
    for scope in ["m1", "m2"] {
        fixture.unknown(scope, "k1").await;
        fixture.keys(&["release", "k1", "--scope", scope, "--reason", "r"]).ok();
    }
    fixture.unknown("m1", "k2").await;
    fixture.keys(&["release", "k2", "--reason", "r"]).ok();
    assert_eq!(fixture.keys(&["purge", "--hold-retention", "0s", "--force"]).ok().stdout, "removed 3\n");
    let entries = |args: &[&str]| {
        let audit = fixture.keys(&[&["audit", "--json"], args].concat()).json();
        let entries = audit["entries"].as_array().unwrap().iter();
        entries.map(|e| format!("{}/{}", e["scope"], e["key"]).replace('"', "")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(entries(&[]), "m1/k2 m2/k1 m1/k1");
    assert_eq!(entries(&["k1"]), "m2/k1 m1/k1");
    assert_eq!(entries(&["k1", "--limit", "1"]), "m2/k1");
    assert_eq!(entries(&["k1", "--scope", "m1"]), "m1/k1");
    assert_eq!(fixture.keys(&["audit", "k9"]).ok().stdout, "no changes by operators\n");
}
