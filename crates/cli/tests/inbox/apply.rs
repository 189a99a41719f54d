//! One message: new, known, known with another body.

use std::io::Write;
use std::process::Stdio;

use crate::{Fixture, Run, exists, message};

const RESPONSE: &str = r#"{"msg_id":"M1","biz_key":"O-1","result":"applied"}"#;

#[test]
fn three_sends_are_applied_duplicate_duplicate_and_answered_alike() {
    let inbox = Fixture::new();
    for (via, expected) in [("manual", "applied"), ("retry", "duplicate"), ("queue", "duplicate")] {
        let run = inbox.apply(&message("M1", 5), &["--via", via]).ok();
        assert_eq!(run.stdout, format!("{expected}\n{RESPONSE}\n"));
    }
    assert_eq!(inbox.log(), [("M1".into(), Some("O-1".into()), "done".into(), RESPONSE.into())]);
    let deliveries: String = inbox
        .sql("SELECT group_concat(verdict || ' ' || path || ' ' || source, ', ' ORDER BY id) FROM inbox_deliveries");
    assert_eq!(
        deliveries,
        "applied manual message.json, duplicate retry message.json, duplicate queue message.json"
    );
    let age: f64 = inbox.sql("SELECT julianday('now') - julianday(created_at) FROM inbox_log");
    assert!((0.0..0.01).contains(&age), "{age}");
    let text: String = inbox.sql("SELECT typeof(created_at) || length(created_at) FROM inbox_log");
    assert_eq!(text, "text19");
}

#[test]
fn the_table_has_exactly_its_columns() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 5), &[]).ok();
    let columns: String = inbox.sql("SELECT group_concat(name) FROM pragma_table_info('inbox_log')");
    assert_eq!(columns, "msg_id,biz_key,status,response,created_at");
    let key: String = inbox
        .sql("SELECT type || \"notnull\" || pk FROM pragma_table_info('inbox_log') WHERE name = 'msg_id'");
    assert_eq!(key, "TEXT11");
}

#[test]
fn a_known_key_with_another_body_is_a_conflict_on_record() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 5), &[]).ok();
    let warned = inbox.apply(&message("M1", 6), &[]).warned("conflict: the key \"M1\" is known");
    assert_eq!(warned.stdout, format!("duplicate\n{RESPONSE}\n"));
    let failed = inbox.apply(&message("M1", 7), &["--on-conflict", "fail"]).failed(65, "conflict");
    assert_eq!(failed.stdout, format!("conflict\n{RESPONSE}\n"));
    // The same body is no conflict, whatever came meanwhile.
    inbox.apply(&message("M1", 5), &["--on-conflict", "fail"]).ok();
    let verdicts: String = inbox.sql("SELECT group_concat(verdict) FROM inbox_deliveries");
    assert_eq!(verdicts, "applied,conflict,conflict,duplicate");
    assert_eq!(inbox.log().len(), 1);
}

#[test]
fn another_layout_of_the_same_message_is_the_same_message() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 5), &[]).ok();
    for same in [
        "\u{feff}{\"msg_id\":\"M1\",\"order_no\":\"O-1\",\"amount\":5}",
        "{\r\n    \"amount\": 5,\r\n    \"order_no\": \"O-1\",\r\n    \"msg_id\": \"M\\u0031\"\r\n}\r\n",
    ] {
        let run = inbox.apply(same, &["--on-conflict", "fail"]).ok();
        assert_eq!(run.line(0), "duplicate");
    }
}

#[test]
fn keys_are_exact() {
    let inbox = Fixture::new();
    let texts = [
        r#""A""#,
        r#""a""#,
        r#"" a""#,
        r#""a ""#,
        r#""é""#,
        r#""e\u0301""#,
        r#""ß""#,
        r#""ss""#,
        r#""007""#,
        "7",
        "7.0",
        "7e0",
        "-0",
        "653247040368672768",
        "653247040368672769",
        "1e400",
        r#""주문-1""#,
        "true",
        r#""NULL""#,
        r#""😀""#,
        r#""😁""#,
    ];
    for text in texts {
        let run = inbox.apply(&format!("{{\"msg_id\":{text}}}"), &[]).ok();
        assert_eq!(run.line(0), "applied", "{text}");
    }
    assert_eq!(inbox.log().len(), texts.len());
    let numerals: i64 = inbox
        .sql("SELECT count(*) FROM inbox_log WHERE msg_id IN ('653247040368672768', '7.0', '007', '1e400')");
    assert_eq!(numerals, 4);
    // A number and its text are one key: the text is what is kept.
    let run = inbox.apply(r#"{"msg_id":"7"}"#, &[]);
    assert_eq!((run.code, run.line(0)), (0, "duplicate"));
    let biz: Option<String> = inbox.sql("SELECT biz_key FROM inbox_log LIMIT 1");
    assert_eq!(biz, None);
}

#[test]
fn a_key_may_be_composed_and_its_parts_never_run_into_each_other() {
    let inbox = Fixture::new();
    let key = ["--key", "{sender}/{date}/{/header/seq}", "--biz-key", "/header/order"];
    let text = |sender: &str, date: &str, seq: u32| {
        format!(r#"{{"sender":"{sender}","date":"{date}","header":{{"seq":{seq},"order":"O-9"}}}}"#)
    };
    for (sender, date, seq, expected) in [
        ("WMS", "20260101", 1, "applied"),
        ("WMS", "20260102", 1, "applied"),
        ("WMS", "20260101", 1, "duplicate"),
        ("WMS/2026", "0101", 1, "applied"),
        ("WMS", "2026/0101", 1, "applied"),
    ] {
        assert_eq!(
            inbox.apply(&text(sender, date, seq), &key).ok().line(0),
            expected,
            "{sender} {date} {seq}"
        );
    }
    let keys: Vec<String> = inbox.log().into_iter().map(|row| row.0).collect();
    assert_eq!(keys, ["WMS%2F2026/0101/1", "WMS/2026%2F0101/1", "WMS/20260101/1", "WMS/20260102/1"]);
    assert!(inbox.log().iter().all(|row| row.1.as_deref() == Some("O-9")));
    inbox.apply("{}", &["--key", "{a"]).failed(2, "braces");
    inbox.apply("{}", &["--key", ""]).failed(2, "--key");
}

#[test]
fn standard_input_and_pipes_are_read() {
    let inbox = Fixture::new();
    let mut child = inbox
        .command(&["apply", "inbox.db", "-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(message("M1", 5).as_bytes()).unwrap();
    let run = Run::of(child.wait_with_output().unwrap()).ok();
    assert_eq!(
        run.json(),
        serde_json::json!({"verdict": "applied", "msg_id": "M1", "body": "new", "response": RESPONSE})
    );
    let json = inbox.apply(&message("M1", 6), &["--json"]).warned("conflict").json();
    assert_eq!((json["verdict"].as_str(), json["body"].as_str()), (Some("duplicate"), Some("different")));
}

#[test]
fn the_stored_response_comes_back_byte_for_byte() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 5), &[]).ok();
    for (stored, expected) in [
        (r#"'{ "b" : 1.50,  "a":"\u00e9 한" } '"#, "{ \"b\" : 1.50,  \"a\":\"\\u00e9 한\" } "),
        ("x'00ff'", "\u{0}\u{fffd}"),
        ("''", ""),
        ("17", "17"),
    ] {
        inbox.execute(&format!("UPDATE inbox_log SET response = {stored}"));
        let output = inbox.command(&["apply", "inbox.db", "message.json"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("duplicate\n{expected}\n"), "{stored}");
    }
}

#[test]
fn verify_replays_and_compares() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 5));
    assert_eq!(inbox.run(&["verify", "inbox.db", "m.json"]).ok().stdout, "replay=identical\n");
    let json = inbox.run(&["verify", "inbox.db", "m.json", "--json"]).ok().json();
    assert_eq!(json, serde_json::json!({"replay": "identical", "first": "duplicate", "second": "duplicate"}));
    // One whose row is gone between the two is no replay.
    inbox.execute("CREATE TRIGGER gone AFTER INSERT ON inbox_deliveries BEGIN DELETE FROM inbox_log; END");
    let different = inbox.run(&["verify", "inbox.db", "m.json"]).failed(1, "not the first one");
    assert_eq!(different.stdout, "replay=different\n");
}

#[test]
fn nothing_is_made_for_a_message_that_is_not_there() {
    let inbox = Fixture::new();
    inbox.run(&["apply", "inbox.db", "nope.json"]).failed(74, "nope.json");
    inbox.run(&["verify", "inbox.db", "nope.json"]).failed(74, "nope.json");
    inbox.run(&["race", "inbox.db", "nope.json"]).failed(74, "nope.json");
    inbox.run(&["load", "inbox.db", "nope"]).failed(74, "nope");
    assert!(!exists(&inbox.path("inbox.db")));
}
