//! `kill -9` at every step of work: nothing is lost, and a later run takes over with the same key.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::work::wait_until;
use crate::{Fixture, message};

fn start(inbox: &Fixture, args: &[&str]) -> Child {
    inbox.command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
}

fn kill(mut child: Child) {
    kill_process(Pid::from_child(&child), Signal::KILL).expect("it was there");
    child.wait().expect("it ended");
}

fn attempts(inbox: &Fixture) -> String {
    std::fs::read_to_string(inbox.path("ran")).unwrap_or_default()
}

fn counts(inbox: &Fixture) -> (i64, i64) {
    (inbox.sql("SELECT count(*) FROM inbox_log"), inbox.sql("SELECT count(*) FROM inbox_leases"))
}

const RAN: &str = "echo \"$ONLYONCE_KEY $ONLYONCE_ATTEMPT\" >> ran; ";

#[test]
fn a_command_that_was_not_seen_to_end_is_taken_over_with_the_same_key() {
    // Before the effect and after it: the command ends the program that waits for it.
    for before_the_end in ["kill -9 $PPID; sleep 0.1", "echo effect >> effects; kill -9 $PPID; echo late"] {
        let inbox = Fixture::new();
        inbox.write("m.json", message("M1", 1));
        let killing = format!("{RAN}{before_the_end}");
        let mut first = start(&inbox, &["apply", "inbox.db", "m.json", "--exec", &killing, "--lease", "1s"]);
        assert!(!first.wait().unwrap().success());
        assert_eq!(counts(&inbox), (0, 1), "a lease and no row");
        // Another body under that key is not what takes over.
        let other = inbox.apply(&message("M1", 2), &["--exec", "true", "--busy-timeout", "60s"]);
        other.failed(65, "another body was begun");
        inbox.apply(&message("M1", 2), &["--busy-timeout", "60s"]).failed(65, "another body was begun");
        let working = format!("{RAN}echo done");
        let args = ["apply", "inbox.db", "m.json", "--exec", &working, "--busy-timeout", "60s"];
        assert_eq!(inbox.run(&args).ok().stdout, "applied\n\"done\"\n");
        assert_eq!(inbox.run(&args).ok().stdout, "duplicate\n\"done\"\n");
        assert_eq!(attempts(&inbox), "M1 1\nM1 2\n");
        assert_eq!(counts(&inbox), (1, 0));
        assert_eq!(
            inbox.sql::<String>("SELECT group_concat(verdict) FROM inbox_deliveries"),
            "applied,duplicate"
        );
    }
}

#[test]
fn a_kill_before_the_lease_and_one_before_the_record_lose_nothing() {
    let inbox = Fixture::new();
    inbox.apply(&message("M0", 1), &[]).ok();
    inbox.write("m.json", message("M1", 1));
    let command = format!("{RAN}until [ -e go ]; do sleep 0.02; done");
    let args = ["apply", "inbox.db", "m.json", "--exec", &command, "--lease", "3s", "--busy-timeout", "120s"];
    // It waits for the lock to take its lease.
    let lock = inbox.db();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let child = start(&inbox, &args);
    std::thread::sleep(Duration::from_millis(200));
    kill(child);
    lock.execute_batch("ROLLBACK").unwrap();
    assert_eq!((attempts(&inbox).as_str(), counts(&inbox)), ("", (1, 0)));
    // It waits for the lock to record what was done.
    let child = start(&inbox, &args);
    wait_until("the command runs", || attempts(&inbox) == "M1 1\n");
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    inbox.write("go", "");
    std::thread::sleep(Duration::from_millis(500));
    kill(child);
    lock.execute_batch("ROLLBACK").unwrap();
    assert_eq!(counts(&inbox), (1, 1));
    let run = inbox.run(&args).ok();
    assert_eq!(run.line(0), "applied");
    assert_eq!((attempts(&inbox).as_str(), counts(&inbox)), ("M1 1\nM1 2\n", (2, 0)));
}

#[test]
fn a_lease_is_renewed_while_the_command_runs_and_fenced_when_it_was_lost() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    let command = format!("{RAN}until [ -e go ]; do sleep 0.02; done; echo slow");
    let args = ["apply", "inbox.db", "m.json", "--exec", &command, "--lease", "1s", "--busy-timeout", "120s"];
    let child = inbox.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the command runs", || attempts(&inbox) == "M1 1\n");
    let first: i64 = inbox.sql("SELECT until_boot_ms FROM inbox_leases");
    wait_until("it is renewed", || inbox.sql::<i64>("SELECT until_boot_ms FROM inbox_leases") > first + 1500);
    // As if it had been away for so long that another took over: its token is not the stored one any more.
    inbox.execute("UPDATE inbox_leases SET token = x'00', until_boot_ms = until_boot_ms + 600000");
    let run = crate::Run::of(child.wait_with_output().unwrap());
    run.failed(75, "its lease could not be renewed");
    assert_eq!(counts(&inbox), (0, 1), "the lease of the other one stays");
    inbox
        .run(&["apply", "inbox.db", "m.json", "--exec", "true", "--busy-timeout", "50ms"])
        .failed(75, "another process");
}

#[test]
fn work_whose_lease_was_taken_over_is_not_recorded() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    // The command itself plays the one that takes over, just before it ends.
    let command = "sqlite3 inbox.db \".timeout 60000\" \"UPDATE inbox_leases SET token = x'00'\"; echo mine";
    inbox
        .run(&["apply", "inbox.db", "m.json", "--exec", command, "--lease", "1h"])
        .failed(75, "taken the message over");
    assert_eq!(counts(&inbox), (0, 1));
    // And one that records before us: its response is the one.
    inbox.execute("DELETE FROM inbox_leases");
    let command = "sqlite3 inbox.db \".timeout 60000\" \"INSERT INTO inbox_log VALUES ('M1', NULL, 'done', 'theirs', datetime())\"; echo mine";
    let run = inbox.run(&["apply", "inbox.db", "m.json", "--exec", command]).ok();
    assert_eq!(run.stdout, "duplicate\ntheirs\n");
    assert_eq!(counts(&inbox), (1, 0));
}

#[test]
fn a_lease_of_another_boot_is_over_and_operators_may_forget_one() {
    let inbox = Fixture::new();
    let kills = "kill -9 $PPID; sleep 0.1";
    for key in ["M1", "M2", "M3"] {
        inbox.write("m.json", message(key, 1));
        start(&inbox, &["apply", "inbox.db", "m.json", "--exec", kills, "--lease", "1h"]).wait().unwrap();
    }
    inbox.apply(&message("M1", 1), &["--busy-timeout", "50ms"]).failed(75, "another process");
    inbox.execute("UPDATE inbox_leases SET boot_id = 'before'");
    assert_eq!(inbox.apply(&message("M1", 1), &["--exec", "echo $ONLYONCE_ATTEMPT"]).ok().line(1), "2");
    let shown = inbox.run(&["show", "inbox.db", "M2"]).ok();
    assert!(shown.stdout.contains("the next delivery takes over"), "{}", shown.stdout);
    inbox.run(&["forget", "inbox.db", "M2", "--reason", "looked at it"]).ok();
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_audit WHERE msg_id = 'M2'"), 1);
    // Forgotten, it is another message's key as well, and the count starts anew.
    assert_eq!(inbox.apply(&message("M2", 9), &["--exec", "echo $ONLYONCE_ATTEMPT"]).ok().line(1), "1");
    inbox.execute("UPDATE inbox_leases SET taken_at = datetime('now', '-40 days')");
    inbox.run(&["purge", "inbox.db", "30", "--dry-run"]).warned("1 messages as old have no row");
    inbox.run(&["purge", "inbox.db", "30"]).warned("1 messages as old have no row");
    assert_eq!(counts(&inbox), (2, 0));
}

#[test]
fn a_call_that_was_not_seen_to_end_is_made_again_with_the_same_key() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let args = ["apply", "inbox.db", "m.json", "--http", &url, "--lease", "1s", "--busy-timeout", "60s"];
    let mut keys = Vec::new();
    // Killed before it has said anything to the end, and killed when it has.
    for answers in [false, true] {
        let child = start(&inbox, &args);
        let (mut stream, _) = listener.accept().unwrap();
        keys.push(read_key(&stream));
        if answers {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n").unwrap();
        }
        kill(child);
        assert_eq!(counts(&inbox), (0, 1));
    }
    std::thread::scope(|scope| {
        let run = scope.spawn(|| inbox.run(&args));
        let (mut stream, _) = listener.accept().unwrap();
        keys.push(read_key(&stream));
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        assert_eq!(run.join().unwrap().ok().stdout, "applied\n\"ok\"\n");
    });
    assert_eq!(keys, ["\"M1\""; 3]);
    assert_eq!(counts(&inbox), (1, 0));
}

fn read_key(stream: &std::net::TcpStream) -> String {
    use std::io::BufRead;
    let lines = std::io::BufReader::new(stream).lines();
    let key = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .find_map(|line| line.strip_prefix("idempotency-key: ").map(str::to_owned));
    key.expect("a key")
}

/// As on a full disk: nothing that this process writes to files is kept from here on.
fn fill_the_disk_of(child: &Child) {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(Pid::from_child(child)), Resource::Fsize, none).expect("it was there");
}

#[test]
fn a_disk_that_is_full_when_the_work_is_done_leaves_the_lease_and_says_so() {
    let inbox = Fixture::new();
    inbox.apply(&message("M0", 1), &[]).ok();
    inbox.write("m.json", message("M1", 1));
    let command = format!("{RAN}until [ -e go ]; do sleep 0.02; done; echo $ONLYONCE_ATTEMPT");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    for (work, key) in [(["--exec", &command], "M1"), (["--http", &url], "M2")] {
        inbox.write("m.json", message(key, 1));
        // Renewed by now and then: the test must be done in between.
        let args = [&["apply", "inbox.db", "m.json"], &work[..], &["--lease", "1h"]].concat();
        let child = inbox.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if key == "M1" {
            wait_until("the command runs", || attempts(&inbox) == "M1 1\n");
            fill_the_disk_of(&child);
            inbox.write("go", "");
        } else {
            let (mut stream, _) = listener.accept().unwrap();
            read_key(&stream);
            fill_the_disk_of(&child);
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").unwrap();
        }
        let run = crate::Run::of(child.wait_with_output().unwrap());
        // The work was done, and that is said; what is left is a lease, by which the next attempt is known as the second.
        run.failed(74, "the work was done, but it could not be recorded");
        assert_eq!(inbox.sql::<String>("PRAGMA integrity_check"), "ok");
        let left: String = inbox.sql("SELECT msg_id || ' ' || attempt FROM inbox_leases");
        assert_eq!(left, format!("{key} 1"));
        assert_eq!(inbox.sql::<i64>(&format!("SELECT count(*) FROM inbox_log WHERE msg_id = '{key}'")), 0);
        let busy = [&["apply", "inbox.db", "m.json"], &work[..], &["--busy-timeout", "50ms"]].concat();
        inbox.run(&busy).failed(75, "another process");
        // Nobody has to wait for its end who has looked: see docs/inbox.md.
        inbox.execute("UPDATE inbox_leases SET until_boot_ms = 0");
        let again = ["apply", "inbox.db", "m.json", "--exec", "echo $ONLYONCE_ATTEMPT"];
        assert_eq!(inbox.run(&again).ok().stdout, "applied\n2\n");
        assert_eq!(inbox.run(&again).ok().stdout, "duplicate\n2\n");
        assert_eq!(counts(&inbox).1, 0);
    }
    assert_eq!(attempts(&inbox), "M1 1\n");
}

#[test]
fn a_disk_that_is_full_at_the_commit_takes_the_statements_back() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE effects (key)");
    inbox.write(
        "work.sql",
        "INSERT INTO effects VALUES (:msg_id);
         WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < 3000000) SELECT count(*) FROM n",
    );
    inbox.apply(&message("M0", 1), &[]).ok();
    inbox.write("m.json", message("M1", 1));
    let args = ["apply", "inbox.db", "m.json", "--sql", "work.sql"];
    let lock = inbox.db();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let child = inbox.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fill_the_disk_of(&child);
    lock.execute_batch("ROLLBACK").unwrap();
    crate::Run::of(child.wait_with_output().unwrap()).failed(74, "inbox.db");
    assert_eq!((inbox.sql::<i64>("SELECT count(*) FROM effects"), counts(&inbox)), (0, (1, 0)));
    assert_eq!(inbox.run(&args).ok().line(0), "applied");
    assert_eq!((inbox.sql::<i64>("SELECT count(*) FROM effects"), counts(&inbox)), (1, (2, 0)));
}

#[test]
fn statements_that_are_killed_anywhere_are_done_once() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE effects (key)");
    // Slow enough to be met between the effect and the record.
    inbox.write(
        "work.sql",
        "INSERT INTO effects VALUES (:msg_id);
         WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n WHERE v < 300000) SELECT count(*) FROM n",
    );
    inbox.write("m.json", message("M1", 1));
    let args = ["apply", "inbox.db", "m.json", "--sql", "work.sql", "--busy-timeout", "60s"];
    let mut kills = 0;
    for pause_ms in [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048] {
        let mut child = start(&inbox, &args);
        std::thread::sleep(Duration::from_millis(pause_ms));
        if child.try_wait().unwrap().is_some() {
            break;
        }
        kill(child);
        kills += 1;
        let (rows, _) =
            if inbox.sql::<i64>("SELECT count(*) FROM sqlite_schema WHERE name = 'inbox_log'") == 1 {
                (inbox.sql::<i64>("SELECT count(*) FROM inbox_log"), 0)
            } else {
                (0, 0)
            };
        assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM effects"), rows, "after {pause_ms} ms");
    }
    assert!(kills > 3, "only {kills} kills");
    assert_eq!(inbox.run(&args).ok().line(1), "300000");
    assert_eq!(inbox.run(&args).ok().line(0), "duplicate");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM effects"), 1);
}

#[test]
fn a_load_with_a_command_that_is_killed_goes_on_where_it_was() {
    let inbox = Fixture::new();
    for number in 0..12 {
        inbox.write(&format!("in/{number:02}.json"), message(&format!("M{number}"), 1));
    }
    // The program is killed at the fifth message, once.
    let command = format!(
        "{RAN}if [ $ONLYONCE_KEY = M4 ] && [ $ONLYONCE_ATTEMPT = 1 ]; then kill -9 $PPID; sleep 0.1; fi; echo ok"
    );
    let args = ["load", "inbox.db", "in", "--exec", &command, "--lease", "1s", "--busy-timeout", "60s"];
    assert!(!start(&inbox, &args).wait().unwrap().success());
    assert_eq!(counts(&inbox), (4, 1));
    let run = inbox.run(&args).ok();
    assert_eq!(run.stdout, "files=12 applied=8 duplicates=4 conflicts=0 failed=0 rows=12\n");
    let ran: Vec<String> = attempts(&inbox).lines().map(str::to_owned).collect();
    assert_eq!(ran.len(), 13);
    assert_eq!(ran.iter().filter(|line| line.starts_with("M4 ")).count(), 2);
    assert_eq!(counts(&inbox), (12, 0));
}
