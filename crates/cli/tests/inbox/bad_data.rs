//! Messages that cannot be taken: told with file, line and column, and what was expected; nothing is changed.

use crate::{Fixture, exists, message};

#[test]
fn bad_data_is_exit_code_65_and_leaves_no_trace() {
    let inbox = Fixture::new();
    let cases: &[(&[u8], &str)] = &[
        (b"", "message.json:1:1: expected a value, found the end of the message"),
        (b"{\"msg_id\":\"M1\",\n  \"a\": [1,2", "message.json:2:12: expected a comma or ], found the end"),
        (
            b"{\"msg_id\":\"M1\",\r\n\r\n  a:1}",
            "message.json:3:3: expected a member name in double quotes, found 'a'",
        ),
        ("{\"주문\":\"한글\", \"msg_id\":}".as_bytes(), "message.json:1:22: expected a value, found '}'"),
        (b"{\"msg_id\":\"M1\",\"msg_id\":\"M2\"}", "message.json:1:16: expected each member once"),
        (b"{\"msg_id\":\"M1\",\"x\":{\"y\":1,\"\\u0079\":2}}", "1:27: expected each member once"),
        (b"{\"msg_id\":\"M\xff\"}", "message.json:1:13: expected UTF-8, found the byte 0xFF"),
        (b"\xff\xfe{\0", "message.json:1:1: expected UTF-8, found the byte 0xFF"),
        (b"{\"msg_id\":\"M1\"} {\"msg_id\":\"M2\"}", "1:17: expected the end of the text, found '{'"),
        (b"{\"msg_id\":\"M1\",\"x\":01}", "expected a comma or }, found '1'"),
        (b"{\"msg_id\":\"M1\",\"x\":NaN}", "expected a value, found 'N'"),
        (b"{\"msg_id\":\"M1\",}", "expected a member name in double quotes, found '}'"),
        (b"{'msg_id':1}", "expected a member name in double quotes, or }, found '\\''"),
        (b"{\"order_no\":\"O\"}", "as the key \"msg_id\", found no such member"),
        (b"{\"msg_id\":null}", "1:2: expected a string or a number as the key \"msg_id\", found null"),
        (b"{\"msg_id\":\"\"}", "found an empty string"),
        (b"{\"msg_id\":{\"a\":1}}", "found an object"),
        (b"{\"msg_id\":[\"M1\"]}", "found an array"),
        (b"{\"msg_id\":\"M\\u00001\"}", "a control character at byte 1"),
        (b"{\"msg_id\":\"M1\\n\"}", "a control character at byte 2"),
        (b"{\"MSG_ID\":\"M1\"}", "found no such member"),
        (b"[\"msg_id\"]", "found no such member"),
        (b"\"msg_id\"", "found no such member"),
        (b"null", "found no such member"),
        (
            b"{\"msg_id\":\"M1\",\"order_no\":[]}",
            "business key \"order_no\", found an array; choose another with --biz-key",
        ),
    ];
    for (text, expected) in cases {
        inbox.write("message.json", text);
        for command in ["apply", "verify", "race"] {
            let run = inbox.run(&[command, "inbox.db", "message.json"]).failed(65, expected);
            assert_eq!(run.stdout, "");
            assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        }
    }
    assert!(!exists(&inbox.path("inbox.db")));
    let deep = format!("{{\"msg_id\":\"M1\",\"x\":{}}}", "[".repeat(100_000));
    inbox.apply(&deep, &[]).failed(65, "expected at most 128 levels");
}

#[test]
fn a_key_has_255_bytes_at_most() {
    let inbox = Fixture::new();
    for key in ["k".repeat(255), "한".repeat(85)] {
        assert_eq!(inbox.apply(&message(&key, 1), &[]).ok().line(0), "applied");
        assert_eq!(inbox.apply(&message(&key, 1), &[]).ok().line(0), "duplicate");
    }
    for key in ["k".repeat(256), "한".repeat(86), "é".repeat(128)] {
        inbox.apply(&message(&key, 1), &[]).failed(65, "the limit is 255");
    }
    assert_eq!(inbox.log().len(), 2);
}

#[test]
fn a_message_over_the_limit_is_refused() {
    let inbox = Fixture::new();
    let long = "x".repeat(16 << 20);
    inbox.apply(&format!("{{\"msg_id\":\"M1\",\"x\":\"{long}\"}}"), &[]).failed(65, "at most 16777216 bytes");
    let fits = &long[..(16 << 20) - 100];
    inbox.apply(&format!("{{\"msg_id\":\"M1\",\"x\":\"{fits}\"}}"), &[]).ok();
}
