//! Many processes, one message, one moment.

use crate::{Fixture, message};

#[test]
fn forty_processes_at_once_apply_it_once() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    let first = inbox.run(&["race", "inbox.db", "m.json", "--attempts", "40", "--busy-timeout", "120s"]).ok();
    assert_eq!(first.line(0), "attempts=40 applied=1 duplicates=39 failed=0");
    assert_eq!(first.last(), "rows=1");
    let again = inbox.run(&["race", "inbox.db", "m.json", "--busy-timeout", "120s"]).ok();
    assert_eq!(again.line(0), "attempts=10 applied=0 duplicates=10 failed=0");
    assert_eq!(again.last(), "rows=1");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries"), 50);
    let together = again.line(1).strip_prefix("active_together_max=").unwrap().parse::<u32>().unwrap();
    assert!((1..=10).contains(&together), "{together}");
    let json =
        inbox.run(&["race", "inbox.db", "m.json", "--attempts", "3", "--json", "--via", "queue"]).ok().json();
    assert_eq!((json["rows"].as_u64(), json["duplicates"].as_u64()), (Some(1), Some(3)));
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries WHERE path = 'queue'"), 3);
}

// As a file of the old mode, where readers and writers shut each other out.
#[test]
fn a_race_on_a_file_with_a_rollback_journal_is_won_once() {
    let inbox = Fixture::new();
    inbox.execute(
        "CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY, biz_key, status, response, created_at)",
    );
    inbox.write("m.json", message("M1", 1));
    let run = inbox.run(&["race", "inbox.db", "m.json", "--attempts", "20", "--busy-timeout", "120s"]).ok();
    assert_eq!(run.line(0), "attempts=20 applied=1 duplicates=19 failed=0");
}

// The processes must be able to tell a lock they could not get: a race that only ever succeeds proves nothing.
#[test]
fn racers_that_get_no_answer_are_counted_as_failed() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    let other = inbox.db();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let run = inbox.run(&["race", "inbox.db", "message.json", "--attempts", "3", "--busy-timeout", "50ms"]);
    let run = run.failed(1, "3 of 3 processes failed");
    assert_eq!(run.line(0), "attempts=3 applied=0 duplicates=0 failed=3");
    assert_eq!(run.last(), "rows=1");
}
