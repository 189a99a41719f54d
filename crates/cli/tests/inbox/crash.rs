//! `kill -9` anywhere, purges meanwhile, and folders larger than memory should be.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::{Fixture, Run};

/// Lines with copies and conflicts far from their first ones.
fn lines(count: u32) -> String {
    let mut text = String::new();
    for number in 0..count {
        // Never one that is itself a copy.
        let of = if number % 10 == 9 { number / 20 * 10 } else { number };
        let amount = if number % 100 == 99 { 7 } else { 1 };
        // Long enough for many blocks.
        let spaces = " ".repeat(400);
        text +=
            &format!("{{\"msg_id\":\"M{of}\",\"order_no\":\"O-{}\",{spaces}\"amount\":{amount}}}\n", of % 97);
    }
    text
}

fn pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_child(child)
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary starts")
}

#[test]
fn a_load_that_is_killed_anywhere_and_run_again_ends_with_the_same_table() {
    let (whole, killed) = (Fixture::new(), Fixture::new());
    let text = lines(12_000);
    whole.write("m.ndjson", &text);
    killed.write("m.ndjson", &text);
    let complete = whole.run(&["load", "inbox.db", "m.ndjson"]).warned("conflict");

    let (mut kills, mut left) = (0, Vec::new());
    // Later and later, until one comes to its end.
    for pause_ms in [0, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120] {
        let mut child = start(killed.command(&["load", "inbox.db", "m.ndjson", "--batch", "300"]));
        std::thread::sleep(Duration::from_millis(pause_ms));
        if child.try_wait().expect("it can be asked").is_some() {
            break;
        }
        rustix::process::kill_process(pid(&child), rustix::process::Signal::KILL).expect("it was there");
        child.wait().expect("it ended");
        kills += 1;
        left.extend(
            killed.db().query_row("SELECT count(*) FROM inbox_log", [], |row| row.get::<_, i64>(0)).ok(),
        );
    }
    assert!(kills > 3, "only {kills} kills");
    println!("killed {kills} times, with {left:?} rows");
    assert!(left.iter().any(|rows| *rows > 0), "no kill met a load that was half done: {left:?}");
    assert_eq!(killed.sql::<String>("PRAGMA integrity_check"), "ok");
    killed.run(&["load", "inbox.db", "m.ndjson"]).warned("conflict");
    assert_eq!(killed.log(), whole.log());
    // Every row that is there is in the log as well, once as new: the two were written together.
    for inbox in [&whole, &killed] {
        let rows: i64 = inbox.sql("SELECT count(*) FROM inbox_log");
        let applied: i64 =
            inbox.sql("SELECT count(DISTINCT msg_id) FROM inbox_deliveries WHERE verdict = 'applied'");
        let all: i64 = inbox.sql("SELECT count(*) FROM inbox_deliveries WHERE verdict = 'applied'");
        assert_eq!((rows, all), (applied, applied));
    }
    assert!(complete.stdout.contains("conflicts=120 failed=0"), "{}", complete.stdout);
}

#[test]
fn a_purge_goes_on_beside_a_load_and_neither_is_kept_from_its_work() {
    let inbox = Fixture::new();
    inbox.write("m.ndjson", lines(12_000));
    inbox.apply(r#"{"msg_id":"first"}"#, &[]).ok();
    inbox.execute(
        "WITH RECURSIVE n (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < 9000)
         INSERT INTO inbox_log SELECT 'old-' || value, NULL, 'done', '{}', datetime('now', '-40 days') FROM n",
    );
    let load = start(inbox.command(&["load", "inbox.db", "m.ndjson", "--busy-timeout", "60s"]));
    let mut purged = 0;
    let mut runs = 0;
    loop {
        let run = inbox.run(&["purge", "inbox.db", "30", "--busy-timeout", "60s"]).ok();
        let deleted =
            run.last().split(['=', ' ']).nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number");
        purged += deleted;
        runs += 1;
        if deleted == 0 && runs > 1 {
            break;
        }
    }
    let loaded = Run::of(load.wait_with_output().expect("it ends"));
    assert_eq!(loaded.code, 0, "{loaded:?}");
    assert_eq!(purged, 9000);
    assert!(loaded.stdout.contains(" failed=0 "), "{loaded:?}");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_log WHERE msg_id LIKE 'old-%'"), 0);
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_log"), 10_801);
}

#[test]
fn memory_does_not_grow_with_what_is_loaded() {
    let inbox = Fixture::new();
    let peak_of = |messages: u32| {
        let mut child = inbox
            .command(&["load", "inbox.db", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let spaces = " ".repeat(8000);
        for number in 0..messages {
            writeln!(input, "{{\"msg_id\":\"{messages}-{number}\"{spaces}}}").unwrap();
        }
        // Still open: it runs, and all but the last block has gone through.
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        drop(input);
        let done = Run::of(child.wait_with_output().unwrap()).ok();
        assert!(done.stdout.contains(&format!("applied={messages} ")), "{done:?}");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    };
    let (little, much) = (peak_of(500), peak_of(6_000));
    println!("peak {little} MiB of 4 MB, {much} MiB of 48 MB");
    assert!(much < little + 24, "{little} MiB, then {much} MiB");
}
