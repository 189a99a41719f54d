//! What is refused says what is wrong and what to do, by its exit code too.

use onlyonce_core::{ClaimOutcome, Reply};

use crate::{Fixture, HOUR, run, text};

#[tokio::test]
async fn a_live_lease_and_a_completed_record_are_left_alone() {
    let fixture = Fixture::new().await;
    let live = fixture.in_progress("m1", "live").await;
    let done = fixture.completed("m1", "done", Reply::new(200, "x"), HOUR).await;
    for (key, why) in [("live", "is being worked on"), ("done", "has a reply already")] {
        let release = fixture.keys(&["release", key, "--reason", "r"]);
        release.failed(1, &[key, why, "--force"]);
        let resolve =
            fixture.keys(&["resolve", key, "--status", "200", "--body", "y", "--reason", "r", "--json"]);
        resolve.failed(1, &[key, why, "--force"]);
    }
    assert!(matches!(fixture.retry(&live).await, ClaimOutcome::InProgress { .. }));
    assert!(
        matches!(fixture.retry(&done).await, ClaimOutcome::Completed(s) if s.reply == Reply::new(200, "x"))
    );
    assert_eq!(fixture.keys(&["audit"]).ok().stdout, "no changes by operators\n");
}

#[tokio::test]
async fn an_ambiguous_key_names_its_scopes() {
    let fixture = Fixture::new().await;
    fixture.unknown("m1", "k1").await;
    fixture.unknown("m 2", "k1").await;
    fixture.unknown("", "k1").await;
    let commands: [&[&str]; 3] = [
        &["show", "k1"],
        &["release", "k1", "--reason", "r"],
        &["resolve", "k1", "--status", "200", "--body", "y", "--reason", "r"],
    ];
    for command in commands {
        fixture
            .keys(command)
            .failed(1, &["several scopes have the key \"k1\"", "--scope", r#""", "m 2", "m1""#]);
    }
    assert!(fixture.keys(&["show", "k1", "--scope", ""]).ok().stdout.contains("(anonymous)"));
    assert!(fixture.keys(&["show", "k1", "--scope", "m 2"]).ok().stdout.contains("m 2"));

    for number in 0..12 {
        fixture.unknown(&format!("s{number:02}"), "k2").await;
    }
    let refused = fixture.keys(&["show", "k2"]);
    refused.failed(1, &["\"s00\"", "\"s09\", …"]);
    assert!(!refused.stderr.contains("s10"), "{}", refused.stderr);
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    let fixture = Fixture::new().await;
    fixture.unknown("m1", "k1").await;
    fixture.keys(&["show", "nope"]).failed(1, &["no record has the key \"nope\"", "keys list"]);
    fixture.keys(&["show", "k1", "--scope", "m9"]).failed(1, &["\"k1\" in the scope \"m9\""]);
    fixture.keys(&["release", "k1", "--scope", "m9", "--reason", "r"]).failed(1, &["in the scope \"m9\""]);
    // A prefix or another case is another key.
    fixture.keys(&["show", "K1"]).failed(1, &["\"K1\""]);
}

#[tokio::test]
async fn a_wrong_command_line_is_exit_code_2() {
    let fixture = Fixture::new().await;
    fixture.unknown("m1", "k1").await;
    let resolve = |more: &[&str]| {
        fixture.keys(&[&["resolve", "k1", "--status", "200", "--body", "x", "--reason", "r"], more].concat())
    };
    fixture.keys(&["release", "k1"]).failed(2, &["--reason"]);
    fixture.keys(&["release", "k1", "--reason", " "]).failed(2, &["--reason", "must not be empty"]);
    fixture.keys(&["release", "k1", "--reason", "a\nb"]).failed(2, &["one line"]);
    fixture.keys(&["release", "", "--reason", "r"]).failed(2, &["KEY", "must not be empty"]);
    fixture.keys(&["show", &"k".repeat(256)]).failed(2, &["256 bytes long, the limit is 255"]);
    fixture.keys(&["list", "--older-than", "soon"]).failed(2, &["--older-than"]);
    resolve(&["--retention", "100000y"]).failed(2, &["ten years"]);
    fixture
        .keys(&["resolve", "k1", "--status", "204", "--body", "x", "--reason", "r"])
        .failed(2, &["status 204 has no body"]);
    for short in ["0", "59s"] {
        resolve(&["--retention", short]).failed(2, &["at least 1m", "runs again"]);
    }
    fixture.keys(&["list", "--limit", "0"]).failed(2, &["--limit"]);
    resolve(&["--header", "nocolon"]).failed(2, &["Name: value"]);
    resolve(&["--header", "a b: c"]).failed(2, &["not a header name"]);
    for name in ["Set-Cookie", "Content-Length", "Transfer-Encoding", "Idempotency-Replayed"] {
        resolve(&["--header", &format!("{name}: 1")]).failed(2, &["never stored"]);
    }
    run(&["keys", "resolve", "k1", "--status", "99", "--body", "x", "--reason", "r"])
        .failed(2, &["200..=599"]);
    run(&["keys", "list", "--store", "onlyonce.db"]).failed(2, &["write `sqlite:onlyonce.db`"]);
    let secret = run(&["keys", "list", "--store", "oracle://u:hunter2@h/db"]);
    secret.failed(2, &["`oracle:` is not supported by this release; supported: sqlite:FILE"]);
    assert!(!secret.stderr.contains("hunter2"), "{}", secret.stderr);
    for command in [
        &["serve", "--upstream", "http://u:hunter2@h"][..],
        &["serve", "--upstream", "ftp://u:hunter2@h"],
        &["check", "http://u:hunter2@h/pay"],
        &["inbox", "apply", "--http", "http://u:hunter2@h/pay"],
    ] {
        let refused = run(command);
        assert!(refused.code == 2 && !refused.stderr.contains("hunter2"), "{command:?}: {}", refused.stderr);
    }
    for slip in ["redis//u:hunter2@h", "post gres://u:hunter2@h/db", ""] {
        let refused = run(&["keys", "list", "--store", slip]);
        refused.failed(2, &["a store needs a scheme", "sqlite:FILE"]);
        assert!(!refused.stderr.contains("hunter2"), "{}", refused.stderr);
    }
    run(&["nonsense"]).failed(2, &["nonsense"]);
    assert!(matches!(fixture.retry(&crate::operation("m1", "k1")).await, ClaimOutcome::Unknown { .. }));
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_is_named_and_not_created() {
    let fixture = Fixture::new().await;
    let missing = fixture.path("missing.db");
    for command in [&["list"][..], &["stats"], &["purge"], &["audit"], &["show", "k"]] {
        let store = format!("sqlite:{}", missing.display());
        run(&[&["keys"], command, &["--store", &store]].concat()).failed(74, &[text(&missing)]);
        assert!(!missing.exists(), "{command:?} made {}", missing.display());
    }
    let other = fixture.path("notes.txt");
    std::fs::write(&other, "these are my notes, and not a database ".repeat(100)).unwrap();
    let before = std::fs::read(&other).unwrap();
    run(&["keys", "list", "--store", &format!("sqlite:{}", other.display())]).failed(74, &[text(&other)]);
    assert_eq!(std::fs::read(&other).unwrap(), before);
}

#[tokio::test]
async fn a_body_file_that_cannot_be_read_changes_nothing() {
    let fixture = Fixture::new().await;
    let operation = fixture.unknown("m1", "k1").await;
    let body = format!("@{}", text(&fixture.path("missing.json")));
    fixture
        .keys(&["resolve", "k1", "--status", "200", "--body", &body, "--reason", "r"])
        .failed(74, &["--body", "missing.json"]);
    let big = fixture.path("big.bin");
    std::fs::File::create(&big).unwrap().set_len(16 * 1024 * 1024 + 1).unwrap();
    let body = format!("@{}", text(&big));
    fixture
        .keys(&["resolve", "k1", "--status", "200", "--body", &body, "--reason", "r"])
        .failed(2, &["over the limit of 16777216 bytes"]);
    assert!(matches!(fixture.retry(&operation).await, ClaimOutcome::Unknown { .. }));
}

#[tokio::test]
async fn an_address_that_is_none_is_answered_with_one() {
    for wrong in [":8080", "localhost:8080", "127.0.0.1"] {
        let serve = run(&["serve", "--upstream", "http://127.0.0.1:1", "--listen", wrong]);
        serve.failed(2, &["--listen", "127.0.0.1:8080"]);
    }
}

#[tokio::test]
async fn a_gateway_that_could_serve_nothing_does_not_start() {
    for option in ["--max-in-flight", "--max-connections"] {
        run(&["serve", "--upstream", "http://127.0.0.1:1", option, "0"]).failed(2, &[option, "1"]);
    }
}
