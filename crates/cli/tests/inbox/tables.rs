//! Tables made by hand: taken when they keep keys as they must, refused with the reason otherwise.

use crate::{Fixture, message};

const REST: &str = "biz_key, status, response, created_at";

#[test]
fn tables_made_by_hand_are_taken_when_they_tell_keys_apart() {
    for table in [
        format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY, {REST})"),
        format!("CREATE TABLE inbox_log (msg_id TEXT PRIMARY KEY, {REST})"),
        format!("CREATE TABLE inbox_log (msg_id VARCHAR(40) UNIQUE NOT NULL, {REST})"),
        format!("CREATE TABLE inbox_log (msg_id BLOB NOT NULL UNIQUE, {REST})"),
        format!("CREATE TABLE inbox_log (msg_id NOT NULL UNIQUE, {REST})"),
        format!("CREATE TABLE INBOX_LOG ({REST}, MSG_ID TEXT, UNIQUE (msg_id))"),
        format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY, {REST}) WITHOUT ROWID"),
        format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL, {REST}); CREATE UNIQUE INDEX k ON inbox_log (msg_id)"),
        format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL UNIQUE ON CONFLICT REPLACE, {REST})"),
        "CREATE TABLE inbox_log (msg_id ANY NOT NULL PRIMARY KEY, biz_key TEXT, status TEXT, response TEXT, created_at TEXT) STRICT"
            .into(),
        "CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY, biz_key TEXT, status TEXT DEFAULT 'done', response TEXT,
            created_at TEXT DEFAULT (datetime('now')))"
            .into(),
    ] {
        let inbox = Fixture::new();
        inbox.execute(&table);
        inbox.execute("INSERT INTO inbox_log (msg_id, response, created_at) VALUES ('M0', 'by hand', '2020-01-01 00:00:00')");
        for (key, expected) in [("M1", "applied"), ("m1", "applied"), ("M1", "duplicate"), ("007", "applied"), ("7", "applied")] {
            assert_eq!(inbox.apply(&message(key, 1), &[]).ok().line(0), expected, "{table}");
        }
        // Nobody knows what the first M0 said.
        let by_hand = inbox.apply(&message("M0", 1), &["--on-conflict", "fail"]).ok();
        assert_eq!(by_hand.stdout, "duplicate\nby hand\n", "{table}");
        // SQLite ignores the length of a VARCHAR, and so do we: a long key is one key.
        let long = "k".repeat(200);
        assert_eq!(inbox.apply(&message(&(long.clone() + "1"), 1), &[]).ok().line(0), "applied", "{table}");
        assert_eq!(inbox.apply(&message(&(long + "2"), 1), &[]).ok().line(0), "applied", "{table}");
        assert_eq!(inbox.apply(&message("M0", 1), &["--json"]).json()["body"], "unknown");
        let rows: i64 = inbox.sql("SELECT count(*) FROM inbox_log");
        assert_eq!(rows, 7, "{table}");
        let mode: String = inbox.sql("PRAGMA journal_mode");
        assert_eq!(mode, "delete", "the mode of somebody's file is theirs");
        assert_eq!(inbox.run(&["purge", "inbox.db", "30"]).ok().stdout, "deleted=1 remain=6\n", "{table}");
    }
}

#[test]
fn tables_that_would_take_two_keys_for_one_are_refused_with_the_reason() {
    for (table, reason) in [
        (
            format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY COLLATE NOCASE, {REST})"),
            "compares by NOCASE",
        ),
        (
            format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL COLLATE RTRIM UNIQUE, {REST})"),
            "compares by RTRIM",
        ),
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT NOT NULL UNIQUE, {REST}); CREATE UNIQUE INDEX k ON inbox_log (msg_id COLLATE NOCASE)"
            ),
            "compares by NOCASE",
        ),
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT NOT NULL COLLATE NOCASE, {REST}); CREATE UNIQUE INDEX k ON inbox_log (msg_id COLLATE BINARY)"
            ),
            "compares by NOCASE",
        ),
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT NOT NULL UNIQUE, {REST}); CREATE UNIQUE INDEX k ON inbox_log (lower(msg_id))"
            ),
            "makes an expression unique",
        ),
        (
            format!("CREATE TABLE inbox_log (msg_id INTEGER NOT NULL PRIMARY KEY, {REST})"),
            "INTEGER affinity, so that different keys such as 007 and 7",
        ),
        (format!("CREATE TABLE inbox_log (msg_id INT NOT NULL UNIQUE, {REST})"), "INTEGER affinity"),
        (format!("CREATE TABLE inbox_log (msg_id STRING NOT NULL UNIQUE, {REST})"), "NUMERIC affinity"),
        (format!("CREATE TABLE inbox_log (msg_id REAL NOT NULL UNIQUE, {REST})"), "REAL affinity"),
        (format!("CREATE TABLE inbox_log (msg_id TEXT NOT NULL, {REST})"), "nothing makes msg_id unique"),
        (
            format!("CREATE TABLE inbox_log (msg_id TEXT, {REST}, UNIQUE (msg_id, biz_key))"),
            "nothing makes msg_id unique",
        ),
        // A copy after midnight would be new.
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT NOT NULL, {REST}, PRIMARY KEY (msg_id, created_at))"
            ),
            "nothing makes msg_id unique",
        ),
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT NOT NULL, {REST}); CREATE INDEX k ON inbox_log (msg_id)"
            ),
            "nothing makes msg_id unique",
        ),
        (
            format!(
                "CREATE TABLE inbox_log (msg_id TEXT, {REST}); CREATE UNIQUE INDEX k ON inbox_log (msg_id) WHERE status = 'done'"
            ),
            "index k is partial",
        ),
        (
            "CREATE TABLE inbox_log (msg_id TEXT PRIMARY KEY, status, response, created_at)".into(),
            "no column biz_key",
        ),
        (format!("CREATE TABLE inbox_log (msg_id TEXT PRIMARY KEY, {REST}, extra)"), "a column extra"),
        (
            format!(
                "CREATE TABLE t (msg_id TEXT PRIMARY KEY, {REST}); CREATE VIEW inbox_log AS SELECT * FROM t"
            ),
            "it is a view",
        ),
    ] {
        let inbox = Fixture::new();
        inbox.execute(&table);
        let schema = "SELECT group_concat(sql) FROM sqlite_schema";
        let before: String = inbox.sql(schema);
        for command in ["apply", "load", "race"] {
            inbox.write("message.json", message("M1", 1));
            let run = inbox.run(&[command, "inbox.db", "message.json"]);
            let run = run.failed(65, reason);
            assert!(run.stdout.is_empty(), "{run:?}");
        }
        let after: String = inbox.sql(schema);
        assert_eq!(after, before, "{table}");
    }
}

#[test]
fn what_the_table_itself_refuses_is_told_and_not_swallowed() {
    let inbox = Fixture::new();
    inbox.execute(
        "CREATE TABLE inbox_log (msg_id TEXT PRIMARY KEY CHECK (length(msg_id) < 5), biz_key TEXT NOT NULL, status, response,
            created_at)",
    );
    inbox.apply(&message("M-too-long", 1), &[]).failed(65, "CHECK constraint failed");
    inbox.apply(r#"{"msg_id":"M1"}"#, &[]).failed(65, "NOT NULL constraint failed: inbox_log.biz_key");
    let (rows, deliveries): (i64, i64) =
        (inbox.sql("SELECT count(*) FROM inbox_log"), inbox.sql("SELECT count(*) FROM inbox_deliveries"));
    assert_eq!((rows, deliveries), (0, 0));
    // In a load the others go on.
    inbox.write("in/1.json", message("M-too-long", 1));
    inbox.write("in/2.json", message("M2", 1));
    let run =
        inbox.run(&["load", "inbox.db", "in"]).failed(1, "in/1.json: the table inbox_log does not take it");
    assert_eq!(run.stdout, "files=2 applied=1 duplicates=0 conflicts=0 failed=1 rows=1\n");

    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    inbox.execute("CREATE TRIGGER t BEFORE INSERT ON inbox_log BEGIN SELECT RAISE(IGNORE); END");
    inbox.apply(&message("M2", 1), &[]).failed(65, "a trigger ignored it");
}

#[test]
fn a_database_in_utf_16_keeps_keys_and_responses_too() {
    let inbox = Fixture::new();
    inbox.execute(&format!(
        "PRAGMA encoding = 'UTF-16'; CREATE TABLE inbox_log (msg_id TEXT PRIMARY KEY, {REST})"
    ));
    let first = inbox.apply(&message("주문-1", 1), &[]).ok();
    let second = inbox.apply(&message("주문-1", 1), &["--on-conflict", "fail"]).ok();
    assert_eq!((first.line(0), second.line(0)), ("applied", "duplicate"));
    assert_eq!(first.line(1), second.line(1));
}

#[test]
fn a_file_with_other_tables_keeps_them() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE orders (id); INSERT INTO orders VALUES (1); PRAGMA user_version = 7");
    inbox.apply(&message("M1", 1), &[]).ok();
    let kept: i64 = inbox.sql("SELECT count(*) FROM orders");
    let version: i64 = inbox.sql("PRAGMA user_version");
    assert_eq!((kept, version), (1, 7));
}
