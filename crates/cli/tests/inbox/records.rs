//! What is on record: one message, and all that came more than once.

use crate::{Fixture, message};

#[test]
fn duplicates_are_listed_with_times_paths_and_bodies() {
    let inbox = Fixture::new();
    inbox.write("in/1.json", message("B-same", 1));
    inbox.write("in/2.json", message("A-other", 1));
    inbox.write("in/3.json", message("once", 1));
    inbox.run(&["load", "inbox.db", "in"]).ok();
    assert_eq!(inbox.run(&["duplicates", "inbox.db"]).ok().stdout, "no duplicates\n");
    inbox.execute("INSERT INTO inbox_log VALUES ('C-hand', NULL, 'done', 'x', '2026-01-02 03:04:05')");
    inbox.apply(&message("B-same", 1), &["--via", "retry"]).ok();
    inbox.apply(&message("B-same", 1), &["--via", "retry"]).ok();
    inbox.apply(&message("B-same", 1), &["--via", "queue"]).ok();
    inbox.apply(&message("A-other", 2), &[]).warned("conflict");
    inbox.apply(&message("C-hand", 2), &["--via", "unknown"]).ok();

    let json = inbox.run(&["duplicates", "inbox.db", "--json"]).ok().json();
    let rows = json["duplicates"].as_array().unwrap();
    let row = |row: &serde_json::Value| {
        format!(
            "{} {} {} {}",
            row["msg_id"].as_str().unwrap(),
            row["times"],
            row["path"].as_str().unwrap(),
            row["body"].as_str().unwrap()
        )
    };
    assert_eq!(
        rows.iter().map(row).collect::<Vec<_>>(),
        ["A-other 2 manual different", "B-same 4 retry,queue same", "C-hand 2 unknown unknown"]
    );
    assert_eq!(rows[2]["first_seen"], "2026-01-02 03:04:05");
    let totals = json["by_path"].as_array().unwrap();
    let count =
        |path: &str| totals.iter().find(|t| t["path"] == path).map(|t| t["duplicates"].as_u64().unwrap());
    assert_eq!(
        [count("retry"), count("queue"), count("manual"), count("batch"), count("unknown")],
        [Some(2), Some(1), Some(1), Some(0), Some(1)]
    );

    let table = inbox.run(&["duplicates", "inbox.db"]).ok();
    let words: Vec<&str> = table.line(2).split_whitespace().collect();
    assert_eq!(
        (words[0], words[1], words[2], *words.last().unwrap()),
        ("B-same", "4", "retry,queue", "same")
    );
    let csv = inbox.run(&["duplicates", "inbox.db", "--csv"]).ok();
    assert_eq!(csv.line(0), "msg_id,times,path,first_seen,last_seen,body");
    assert!(csv.line(2).starts_with("B-same,4,\"retry,queue\","), "{}", csv.stdout);
    let by_path = inbox.run(&["duplicates", "inbox.db", "--csv", "--by-path"]).ok();
    assert!(by_path.stdout.contains("\nretry,2,0,"), "{}", by_path.stdout);
}

#[test]
fn one_message_is_shown_with_its_deliveries() {
    let inbox = Fixture::new();
    inbox.apply(&message("M\\u202e1", 1), &[]).ok();
    inbox.apply(&message("M\\u202e1", 2), &["--via", "retry"]).warned("conflict");
    let shown = inbox.run(&["show", "inbox.db", "M\u{202e}1"]).ok().stdout;
    for part in ["M\\u{202e}1", "O-1", "done", "applied", "conflict  retry", "times       2"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let json = inbox.run(&["show", "inbox.db", "M\u{202e}1", "--json"]).ok().json();
    assert_eq!(json["row"]["biz_key"], "O-1");
    assert_eq!(json["deliveries"].as_array().unwrap().len(), 2);
    inbox.run(&["show", "inbox.db", "m1"]).failed(1, "no message has the key \"m1\"");
}

#[test]
fn a_forgotten_message_is_new_again_and_the_reason_is_kept() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    inbox.apply(&message("M1", 1), &[]).ok();
    assert_eq!(
        inbox.run(&["forget", "inbox.db", "M1", "--reason", "wrong file"]).ok().stdout,
        "forgotten M1\n"
    );
    inbox.run(&["forget", "inbox.db", "M1", "--reason", "again"]).failed(1, "no message");
    let shown = inbox.run(&["show", "inbox.db", "M1"]).ok().stdout;
    assert!(shown.contains("no row") && shown.contains("forget by ada: wrong file"), "{shown}");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries"), 2);
    assert!(inbox.sql::<String>("SELECT before FROM inbox_audit").contains("\"status\":\"done\""));
    // Its body is what is compared from now on.
    assert_eq!(inbox.apply(&message("M1", 2), &[]).ok().line(0), "applied");
    assert_eq!(inbox.apply(&message("M1", 2), &["--on-conflict", "fail"]).ok().line(0), "duplicate");
    inbox.apply(&message("M1", 1), &[]).warned("conflict");
}
