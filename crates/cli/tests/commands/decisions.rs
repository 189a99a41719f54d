//! What operators do in an incident: find, decide many at once, forget, watch.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::io::Read;
use std::process::{Child, Command, Stdio};

use onlyonce_core::{ClaimOutcome, Reply};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};

use crate::{Fixture, HOUR, binary, run, text};

#[tokio::test]
async fn find_looks_in_every_scope_and_tells_what_became_of_the_key() {
    let fixture = Fixture::new().await;
    fixture.completed("m1", "k1", Reply::new(201, "x"), HOUR).await;
    fixture.unknown("m2", "k1").await;
    fixture.unknown("m2", "k2").await;
    let found = fixture.keys(&["find", "k1", "--json"]).json();
    let brief: Vec<_> = found["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| json!([r["scope"], r["state"], r["reply"]["status"]]))
        .collect();
    assert_eq!(brief, [json!(["m1", "completed", 201]), json!(["m2", "unknown", null])]);
    assert_eq!(found["more"], false);
    assert_eq!(fixture.keys(&["find", "k1", "--limit", "1", "--json"]).json()["more"], true);
    let people = fixture.keys(&["find", "k1"]).ok().stdout;
    let lines: Vec<Vec<&str>> = people.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines[1][0], lines[1][1], lines[2][0], lines[2][1]), ("completed", "201", "unknown", "-"));
    assert_eq!(
        fixture.keys(&["find", "k1", "--scope", "m2", "--json"]).json()["records"][0]["state"],
        "unknown"
    );
    fixture.keys(&["find", "k9"]).failed(1, &["no record has the key \"k9\""]);
    fixture
        .keys(&["find", "k1", "--scope-of", "Bearer hunter2"])
        .failed(1, &["no record of that caller", "other scopes have the key: \"m1\""]);
    fixture.keys(&["find", "k1", "--scope-of", "x", "--scope", "m1"]).failed(2, &["cannot be used with"]);
    fixture.keys(&["find", "k1", "--scope-secret-file", "x"]).failed(2, &["--scope-of"]);
}

#[tokio::test]
async fn a_credential_may_be_kept_out_of_the_command_line() {
    let fixture = Fixture::new().await;
    fixture.unknown("m1", "k1").await;
    std::fs::write(fixture.path("token"), "Bearer tok-1\n").unwrap();
    let file = format!("@{}", text(&fixture.path("token")));
    let by_file = fixture.keys(&["find", "k1", "--scope-of", &file]);
    let by_value = fixture.keys(&["find", "k1", "--scope-of", "Bearer tok-1"]);
    assert_eq!((by_file.code, &by_file.stderr), (by_value.code, &by_value.stderr));
    by_file.failed(1, &["no record of that caller", "other scopes have the key: \"m1\""]);
    fixture.keys(&["find", "k1", "--scope-of", "@/nonexistent"]).failed(74, &["--scope-of"]);
    fixture
        .keys(&["find", "k1", "--scope-of", "Digest hunter2"])
        .failed(2, &["--scope-of", "change with every request"]);
    fixture.keys(&["find", "k1", "--scope-of", "-"]).failed(2, &["nothing to read"]);
    fixture.keys(&["find", "k1", "--scope-of", "tok-1"]).failed(2, &["write 'Bearer TOKEN'"]);
}

#[tokio::test]
async fn forget_gives_up_a_reply_and_nothing_else() {
    let fixture = Fixture::new().await;
    let done = fixture.completed("m1", "done", Reply::new(201, "x"), HOUR).await;
    let live = fixture.in_progress("m1", "live").await;
    let unknown = fixture.unknown("m1", "unknown").await;
    let forget = |key: &str| fixture.keys(&["forget", key, "--reason", "charged back"]);
    forget("live").failed(1, &["is being worked on"]);
    forget("unknown").failed(1, &["has no reply that could be forgotten", "keys release"]);
    forget("never").failed(1, &["no record has the key"]);
    let said = forget("done").ok().stdout;
    assert!(said.starts_with("forgot done: the next request with it runs again"), "{said}");
    assert!(said.contains("up to 60 seconds"), "{said}");
    forget("done").failed(1, &["is free already", "nothing was changed"]);
    assert!(matches!(fixture.retry(&done).await, ClaimOutcome::Acquired(lease) if lease.attempt == 2));
    assert!(matches!(fixture.retry(&live).await, ClaimOutcome::InProgress { .. }));
    assert!(matches!(fixture.retry(&unknown).await, ClaimOutcome::Unknown { .. }));
    let audit = fixture.keys(&["audit", "--json"]).json();
    let [entry] = &audit["entries"].as_array().unwrap()[..] else { panic!("{audit}") };
    assert_eq!((&entry["action"], &entry["actor"]), (&json!("forget"), &json!("ada")));
}

fn decided(fixture: &Fixture, lines: &[Value]) -> String {
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(fixture.path("decided.ndjson"), lines).unwrap();
    text(&fixture.path("decided.ndjson")).to_owned()
}

#[tokio::test]
async fn many_are_resolved_from_a_file_that_may_be_given_again() {
    let fixture = Fixture::new().await;
    let first = fixture.unknown("m1", "k1").await;
    fixture.unknown("m2", "k2").await;
    fixture.unknown("m2", "k1").await;
    let live = fixture.in_progress("m1", "live").await;
    let file = decided(
        &fixture,
        &[
            json!({"key": "k1", "scope": "m1", "status": 201, "body": "{}", "headers": [["content-type", "application/json"]], "reason": "ch_81"}),
            json!({"key": "k2", "status": 402, "body": "/wA=", "body_encoding": "base64"}),
            json!({"key": "live", "status": 200}),
            json!({"key": "k1", "status": 200}),
            json!({"key": "never", "status": 200}),
        ],
    );
    let resolve = ["resolve", "--file", &file, "--reason", "as the bank has it"];
    let run = fixture.keys(&resolve);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert_eq!(run.stderr, "error: 3 of 5 lines were refused; the others are done\n");
    for part in [
        "line 3: \"live\" is being worked on",
        "line 4: several scopes",
        "line 5: no record",
        "resolved 2, already so 0, refused 3\n",
    ] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    let ClaimOutcome::Completed(stored) = fixture.retry(&first).await else { panic!("not resolved") };
    assert_eq!(
        (stored.reply.status(), &stored.reply.body()[..], stored.reply.headers().len()),
        (201, &b"{}"[..], 1)
    );
    let shown = fixture.keys(&["show", "k2", "--json"]).json();
    assert_eq!((&shown["reply"]["body"], &shown["reply"]["status"]), (&json!("/wA="), &json!(402)));
    assert!(matches!(fixture.retry(&live).await, ClaimOutcome::InProgress { .. }));
    let audit = fixture.keys(&["audit", "--json"]).json();
    let reasons: Vec<_> =
        audit["entries"].as_array().unwrap().iter().map(|entry| entry["reason"].clone()).collect();
    assert_eq!(reasons, [json!("as the bank has it"), json!("ch_81")]);

    let again = fixture.keys(&[&resolve[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!((again.code, &said["resolved"], &said["already"]), (1, &json!(0), &json!(2)));
    assert_eq!((&said["refused"][0]["line"], &said["refused"][0]["key"]), (&json!(3), &json!("live")));
    assert_eq!(fixture.keys(&["audit", "--json"]).json(), audit, "nothing was changed");
}

#[tokio::test]
async fn a_file_with_one_wrong_line_changes_nothing() {
    let fixture = Fixture::new().await;
    let good = json!({"key": "k1", "status": 201});
    let operation = fixture.unknown("m1", "k1").await;
    for (wrong, why) in [
        (json!({"key": "k2", "status": 99}), "200 to 599"),
        (json!({"key": "k2"}), "status"),
        (json!({"key": "k2", "status": 200, "boddy": "x"}), "boddy"),
        (json!({"key": "", "status": 200}), "key"),
        (json!({"key": "k2", "status": 200, "headers": [["set-cookie", "a=1"]]}), "never stored"),
        (json!({"key": "k2", "status": 200, "body": "!", "body_encoding": "base64"}), "body"),
        (json!({"key": "k1", "status": 200}), "the same record as line 1"),
    ] {
        let file = decided(&fixture, &[good.clone(), wrong]);
        let run = fixture.keys(&["resolve", "--file", &file, "--reason", "r"]);
        run.failed(65, &["line 2 of the file", why, "nothing was changed"]);
        assert!(!run.stderr.contains("line 1 column"), "one line is named: {}", run.stderr);
    }
    let file = decided(&fixture, &[json!({"key": "k2", "status": 200, "headers": [["x-a", "\u{1}"]]})]);
    fixture
        .keys(&["resolve", "--file", &file, "--reason", "r"])
        .failed(65, &["the value of x-a is not visible"]);
    std::fs::write(fixture.path("bom"), "\u{feff}{\"key\": \"k9\", \"status\": 200}\n").unwrap();
    let bom = fixture.path("bom");
    let run = fixture.keys(&["resolve", "--file", text(&bom), "--reason", "r"]);
    assert!(
        run.code == 1 && run.stdout.contains("line 1: no record has the key"),
        "{} {}",
        run.stdout,
        run.stderr
    );
    let file = decided(&fixture, &[]);
    fixture.keys(&["resolve", "--file", &file, "--reason", "r"]).failed(65, &["no line"]);
    fixture.keys(&["resolve", "k1", "--file", &file, "--reason", "r"]).failed(2, &["cannot be used with"]);
    fixture.keys(&["resolve", "--reason", "r"]).failed(2, &["--status"]);
    assert!(matches!(fixture.retry(&operation).await, ClaimOutcome::Unknown { .. }));
}

#[tokio::test]
async fn watch_writes_a_line_for_each_look_where_there_is_no_terminal() {
    let fixture = Fixture::new().await;
    fixture.completed("m1", "done", Reply::new(201, "x"), HOUR).await;
    fixture.unknown("m1", "k1").await;
    let watch = ["watch", "--every", "50ms", "--count", "3"];
    let lines = fixture.keys(&watch).ok().stdout;
    assert_eq!(lines.lines().count(), 3, "{lines}");
    for line in lines.lines() {
        assert!(line.ends_with("Z in_progress=0 completed=1 unknown=1 freed=0 expired=0"), "{line}");
    }
    let documents = fixture.keys(&[&watch[..], &["--json"]].concat()).ok().stdout;
    for line in documents.lines() {
        let look: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&look["stats"]["unknown"], &look["unknown"][0]["key"]), (&json!(1), &json!("k1")));
    }
    assert_eq!(documents.lines().count(), 3);
    run(&["keys", "watch", "--every", "0"]).failed(2, &["--every"]);
}

struct Watching {
    child: Child,
    screen: std::fs::File,
    seen: String,
}

impl Watching {
    /// `onlyonce keys watch` on a terminal of its own.
    fn start(fixture: &Fixture) -> Self {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let end = std::fs::OpenOptions::new().read(true).write(true).open(name).unwrap();
        let store = format!("sqlite:{}", text(&fixture.path("keys.db")));
        let mut command: Command = binary();
        command.args(["keys", "watch", "--every", "100ms", "--store", &store]);
        let child =
            command.stdout(end.try_clone().unwrap()).stderr(end).stdin(Stdio::null()).spawn().unwrap();
        Self { child, screen: std::fs::File::from(terminal), seen: String::new() }
    }

    fn until(&mut self, text: &str) {
        let mut buffer = [0; 4096];
        // It draws ten times a second.
        for _ in 0..1000 {
            if self.seen.contains(text) {
                return;
            }
            let read = self.screen.read(&mut buffer).expect("the terminal");
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..read]));
        }
        panic!("no {text:?} in {:?}", self.seen);
    }
}

#[tokio::test]
async fn watch_draws_a_live_table_and_leaves_the_terminal_as_it_was() {
    let fixture = Fixture::new().await;
    fixture.unknown("m1", "order-7").await;
    let mut watching = Watching::start(&fixture);
    watching.until("\u{1b}[?1049h");
    watching.until("order-7");
    watching.until("nothing in progress");
    fixture.in_progress("m1", "order-8").await;
    watching.until("order-8");
    let pid = Pid::from_child(&watching.child);
    kill_process(pid, Signal::INT).unwrap();
    watching.until("\u{1b}[?25h\u{1b}[?1049l");
    assert_eq!(watching.child.wait().unwrap().code(), Some(0), "Ctrl-C is how it ends");
}

/// Each command of the page, up to the store: a word that is none would be refused before.
#[tokio::test]
async fn every_command_of_the_operations_page_is_one() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    let page = std::fs::read_to_string(page).unwrap();
    let blocks = page.split("\n```sh\n").skip(1).map(|block| block.split("\n```").next().unwrap());
    let commands: Vec<&str> =
        blocks.flat_map(str::lines).filter(|line| line.starts_with("onlyonce ")).collect();
    assert!(commands.len() >= 9, "{commands:?}");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("token.txt"), "Bearer tok-1\n").unwrap();
    std::fs::write(folder.path().join("reply.json"), "{}").unwrap();
    let line = page.split("\n```json\n").nth(1).unwrap().split("\n```").next().unwrap();
    std::fs::write(folder.path().join("decided.ndjson"), line).unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_onlyonce")).parent().unwrap();
    for command in commands {
        let path = format!("{}:/usr/bin:/bin", program.display());
        let mut shell = Command::new("sh");
        shell
            .args(["-c", command])
            .current_dir(folder.path())
            .env_clear()
            .env("PATH", path)
            .env("USER", "ada");
        let output = shell.env("ONLYONCE_STORE", "sqlite:missing.db").stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(74) && said.contains("missing.db"), "{command}: {said}");
    }
}
