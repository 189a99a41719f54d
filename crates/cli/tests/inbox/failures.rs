//! Databases that are busy, full, read-only, or none.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use onlyonce_store_sqlite::rusqlite::Connection;

use crate::{Fixture, Run, exists, message};

#[test]
fn busy_past_the_wait_is_75_and_nothing_is_changed() {
    for mode in ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"] {
        let inbox = Fixture::new();
        inbox.apply(&message("M1", 1), &[]).ok();
        let other = inbox.db();
        other.execute_batch(mode).unwrap();
        for wait in ["100ms", "100"] {
            inbox
                .apply(&message("M2", 1), &["--busy-timeout", wait])
                .failed(75, "another process held it for 100 ms");
        }
        inbox
            .run(&["load", "inbox.db", "message.json", "--busy-timeout", "100ms"])
            .failed(75, "run it again");
        inbox.run(&["purge", "inbox.db", "1", "--busy-timeout", "100ms"]).failed(75, "busy");
        other.execute_batch("ROLLBACK").unwrap();
        assert_eq!(inbox.log().len(), 1);
        assert_eq!(inbox.apply(&message("M2", 1), &[]).ok().line(0), "applied");
    }
}

#[test]
fn a_lock_that_is_freed_in_time_is_waited_for() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    let other = inbox.db();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| inbox.apply(&message("M2", 1), &["--busy-timeout", "60s"]));
        std::thread::sleep(Duration::from_millis(300));
        other.execute_batch("COMMIT").unwrap();
        assert_eq!(waiting.join().unwrap().ok().line(0), "applied");
    });
}

#[test]
fn a_full_database_is_74_and_stays_as_it_was() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    let text = "x".repeat(200);
    for number in 0..200 {
        inbox.write(&format!("in/{number:03}.json"), message(&format!("{text}{number}"), 1));
    }
    // As on a full disk, writes past the limit fail.
    let limit = "ulimit -f 40; exec \"$0\" inbox load inbox.db in";
    let run = std::process::Command::new("sh")
        .args(["-c", limit, env!("CARGO_BIN_EXE_onlyonce")])
        .current_dir(inbox.folder.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(74), "{stderr}");
    assert!(stderr.contains("inbox.db"), "{stderr}");
    assert_eq!(inbox.sql::<String>("PRAGMA integrity_check"), "ok");
    assert_eq!(inbox.log().len(), 1);
    let run = inbox.run(&["load", "inbox.db", "in"]).ok();
    assert_eq!(run.stdout, "files=200 applied=200 duplicates=0 conflicts=0 failed=0 rows=201\n");
}

#[test]
fn a_folder_a_text_and_a_missing_file_are_no_database() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    inbox.write("folder/x", "");
    inbox.write("notes.txt", "these are my notes, and not a database ".repeat(100));
    inbox.write("short.txt", "short");
    inbox.run(&["apply", "folder", "m.json"]).failed(74, "it is a folder");
    inbox.run(&["apply", "nowhere/inbox.db", "m.json"]).failed(74, "folders are not created");
    inbox.run(&["apply", "inbox.db", "folder"]).failed(74, "folder");
    for text in ["notes.txt", "short.txt"] {
        let before = std::fs::read(inbox.path(text)).unwrap();
        inbox.run(&["apply", text, "m.json"]).failed(65, "not an SQLite database");
        inbox.run(&["duplicates", text]).failed(65, "not an SQLite database");
        assert_eq!(std::fs::read(inbox.path(text)).unwrap(), before);
    }
    for command in [
        &["purge", "inbox.db", "30"][..],
        &["duplicates", "inbox.db"],
        &["show", "inbox.db", "M1"],
        &["forget", "inbox.db", "M1", "--reason", "r"],
    ] {
        inbox.run(command).failed(74, "inbox.db");
        assert!(!exists(&inbox.path("inbox.db")), "{command:?}");
    }
    // A database without the table is not given one by a look.
    inbox.execute("CREATE TABLE orders (id)");
    inbox.run(&["duplicates", "inbox.db"]).failed(65, "holds no table inbox_log");
    inbox.run(&["purge", "inbox.db", "1"]).failed(65, "holds no table inbox_log");
    inbox.run(&["forget", "inbox.db", "M1", "--reason", "r"]).failed(65, "holds no table inbox_log");
}

// What a user without the right to write meets; the tests may run as one with every right.
#[test]
fn a_database_that_cannot_be_written_is_74() {
    let inbox = Fixture::new();
    inbox.apply(&message("M1", 1), &[]).ok();
    std::fs::create_dir(inbox.path("inbox.db-wal")).unwrap();
    inbox.apply(&message("M2", 1), &[]).failed(74, "inbox.db");
    inbox.run(&["load", "inbox.db", "message.json"]).failed(74, "inbox.db");
    std::fs::remove_dir(inbox.path("inbox.db-wal")).unwrap();
    assert_eq!(inbox.log().len(), 1);
    assert_eq!(inbox.apply(&message("M2", 1), &[]).ok().line(0), "applied");
}

// Permission bits do not bind root, so the program runs as nobody when the tests run as root.
#[test]
fn a_file_or_a_folder_that_this_user_may_not_write_is_74_and_says_what_to_do() {
    let inbox = Fixture::new();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set(inbox.folder.path(), 0o755);
    let program = inbox.path("program");
    fs::copy(env!("CARGO_BIN_EXE_onlyonce"), &program).unwrap();
    set(&program, 0o755);
    let message = inbox.path(&inbox.write("message.json", message("M1", 1)));
    set(&message, 0o644);
    let run = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.current_dir(inbox.folder.path()).arg("inbox").args(args).stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        Run::of(command.output().unwrap())
    };
    for mode in ["WAL", "DELETE"] {
        let folder = inbox.path(mode);
        fs::create_dir(&folder).unwrap();
        let file = folder.join("inbox.db");
        let db = Connection::open(&file).unwrap();
        db.execute_batch(&format!("PRAGMA journal_mode = {mode}")).unwrap();
        drop(db);
        let path = format!("{mode}/inbox.db");
        inbox.run(&["apply", &path, "message.json"]).ok();
        for (file_mode, folder_mode) in [(0o444, 0o777), (0o666, 0o555), (0o444, 0o555)] {
            set(&file, file_mode);
            set(&folder, folder_mode);
            for args in [
                &["apply", &path, "message.json"][..],
                &["load", &path, "message.json"],
                &["forget", &path, "M1", "--reason", "r"],
            ] {
                let failed = run(args).failed(74, &path);
                assert!(
                    failed.stderr.contains("make both writable for this user"),
                    "{args:?}: {}",
                    failed.stderr
                );
                assert_eq!(failed.stdout, "", "{args:?}");
            }
            set(&folder, 0o777);
            set(&file, 0o666);
            let db = Connection::open(&file).unwrap();
            let rows: i64 =
                db.query_row("SELECT count(*) FROM inbox_deliveries", [], |row| row.get(0)).unwrap();
            assert_eq!(rows, 1, "nothing was changed");
        }
    }
    // Where there is no file yet.
    let folder = inbox.path("closed");
    fs::create_dir(&folder).unwrap();
    set(&folder, 0o555);
    run(&["apply", "closed/inbox.db", "message.json"]).failed(74, "closed/inbox.db");
    assert!(!exists(&folder.join("inbox.db")));
}

#[test]
fn wrong_command_lines_are_2() {
    let inbox = Fixture::new();
    for (args, part) in [
        (&["purge", "inbox.db", "-1"][..], "-1"),
        (&["purge", "inbox.db", "soon"], "a number of days"),
        (&["purge", "inbox.db", "NaN"], "a number of days"),
        (&["purge", "inbox.db", "inf"], "a number of days"),
        (&["purge", "inbox.db"], "DAYS"),
        (&["apply", "inbox.db"], "JSON"),
        (&["apply", "inbox.db", "m.json", "--via", "pigeon"], "pigeon"),
        (&["apply", "inbox.db", "m.json", "--busy-timeout", "soon"], "--busy-timeout"),
        (&["race", "inbox.db", "m.json", "--attempts", "0"], "--attempts"),
        (&["race", "inbox.db", "-"], "a race needs a file"),
        (&["forget", "inbox.db", "M1"], "--reason"),
        (&["forget", "inbox.db", "M1", "--reason", " "], "must not be empty"),
        (&["duplicates", "inbox.db", "--json", "--csv"], "--csv"),
    ] {
        inbox.run(args).failed(2, part);
    }
    assert!(!exists(&inbox.path("inbox.db")));
}
