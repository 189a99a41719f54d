//! Purge: by period alone.

use crate::{Fixture, message};

fn aged(inbox: &Fixture, rows: &[(&str, &str)]) {
    inbox.apply(&message("new", 1), &[]).ok();
    for (key, date) in rows {
        inbox.execute(&format!("INSERT INTO inbox_log VALUES ('{key}', NULL, 'done', '{{}}', {date})"));
    }
}

#[test]
fn only_what_is_older_than_the_period_goes() {
    let inbox = Fixture::new();
    aged(
        &inbox,
        &[
            ("old-1", "datetime('now', '-31 days')"),
            ("old-2", "datetime('now', '-30 days', '-1 minute')"),
            ("young", "datetime('now', '-30 days', '+1 minute')"),
            ("iso", "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-40 days')"),
            ("zone", "strftime('%Y-%m-%d %H:%M:%S', 'now', '-40 days') || '+09:00'"),
            ("future", "datetime('now', '+1 day')"),
        ],
    );
    let dry = inbox.run(&["purge", "inbox.db", "30", "--dry-run"]).warned("dry run");
    assert_eq!(dry.stdout, "deleted=4 remain=3\n");
    assert_eq!(inbox.log().len(), 7);
    assert_eq!(inbox.run(&["purge", "inbox.db", "30"]).ok().stdout, "deleted=4 remain=3\n");
    let left: Vec<String> = inbox.log().into_iter().map(|row| row.0).collect();
    assert_eq!(left, ["future", "new", "young"]);
    assert_eq!(inbox.run(&["purge", "inbox.db", "30"]).ok().last(), "deleted=0 remain=3");
    let json = inbox.run(&["purge", "inbox.db", "0.5", "--json"]).ok().json();
    assert_eq!((json["deleted"].as_u64(), json["remain"].as_u64()), (Some(1), Some(2)));
}

#[test]
fn rows_whose_date_cannot_be_read_are_kept_and_told() {
    let inbox = Fixture::new();
    let dates = [
        "NULL",
        "''",
        "'yesterday'",
        "'2026-13-01'",
        "'01/02/2020'",
        "'12:30'",
        "'now'",
        "'20200101'",
        "x'ff'",
        "1577836800",
    ];
    let rows: Vec<(String, &str)> =
        dates.iter().enumerate().map(|(n, date)| (format!("r{n}"), *date)).collect();
    aged(&inbox, &rows.iter().map(|(key, date)| (key.as_str(), *date)).collect::<Vec<_>>());
    let run = inbox.run(&["purge", "inbox.db", "1"]).warned("10 rows have a created_at that cannot be read");
    assert_eq!(run.stdout, "deleted=0 remain=11\n");
    assert!(run.stderr.contains("\"r0\""), "{}", run.stderr);
}

#[test]
fn a_large_table_is_purged_in_steps_to_the_last_row() {
    let inbox = Fixture::new();
    aged(&inbox, &[]);
    inbox.execute(
        "WITH RECURSIVE n (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < 9000)
         INSERT INTO inbox_log SELECT 'k' || value, NULL, 'done', '{}',
            datetime('now', CASE WHEN value % 3 = 0 THEN '-2 days' ELSE '-50 days' END) FROM n",
    );
    assert_eq!(inbox.run(&["purge", "inbox.db", "30"]).ok().stdout, "deleted=6000 remain=3001\n");
}

#[test]
fn a_period_shorter_than_the_retries_seen_is_warned_of() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    inbox.apply(&message("M1", 1), &[]).ok();
    inbox.run(&["purge", "inbox.db", "1"]).ok();
    inbox.execute(
        "UPDATE inbox_deliveries SET received_at = datetime('now', '-5 days') WHERE verdict = 'applied'",
    );
    inbox.run(&["purge", "inbox.db", "3"]).warned("3 days are shorter than the longest time");
    inbox.run(&["purge", "inbox.db", "6"]).ok();
}

#[test]
fn the_totals_of_the_delivery_log_outlive_a_purge() {
    let inbox = Fixture::new();
    for (key, count) in [("M1", 3), ("M2", 2)] {
        for _ in 0..count {
            inbox.apply(&message(key, 1), &["--via", "retry"]).ok();
        }
    }
    inbox.apply(&message("M1", 2), &["--via", "queue"]).warned("conflict");
    let totals = || inbox.run(&["duplicates", "inbox.db", "--json"]).ok().json()["by_path"].clone();
    inbox.execute(
        "UPDATE inbox_log SET created_at = datetime('now', '-40 days') WHERE msg_id = 'M1';
         UPDATE inbox_deliveries SET received_at = datetime('now', '-40 days') WHERE msg_id = 'M1' AND id < 3",
    );
    let before = totals();
    assert_eq!(inbox.run(&["purge", "inbox.db", "30"]).warned("shorter").stdout, "deleted=1 remain=1\n");
    assert_eq!(totals(), before);
    // What was as old as the row is added up, what is younger is still there, and so is the warning.
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries"), 4);
    assert_eq!(inbox.sql::<i64>("SELECT sum(deliveries) FROM inbox_totals"), 2);
    // A copy that comes after the purge is new: a defined answer.
    assert_eq!(inbox.apply(&message("M1", 1), &[]).ok().line(0), "applied");
}
