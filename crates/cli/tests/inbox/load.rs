//! Many messages.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::process::Stdio;

use crate::{Fixture, Run, message};

#[test]
fn a_folder_is_loaded_and_every_duplicate_is_listed() {
    let inbox = Fixture::new();
    for (name, text) in [
        ("01.json", message("b", 1)),
        ("02.json", message("a", 1)),
        ("03.json", format!("\u{feff}{}", message("b", 1))),
        ("04.json", "{\r\n \"amount\": 1,\r\n \"order_no\": \"O-1\",\r\n \"msg_id\": \"b\"\r\n}\r\n".into()),
        ("05.json", message("a", 2)),
        ("06.json", message("주문", 1)),
        ("07.JSON", message("Z", 1)),
        ("08.json", message("주문", 1)),
        ("readme.txt", "not a message".into()),
        (".hidden.json", message("hidden", 1)),
        ("sub/09.json", message("below", 1)),
    ] {
        inbox.write(&format!("in/{name}"), text);
    }
    let run =
        inbox.run(&["load", "inbox.db", "in", "--duplicates", "dup.txt"]).warned("in/05.json: conflict");
    assert_eq!(run.stdout, "files=8 applied=4 duplicates=4 conflicts=1 failed=0 rows=4\n");
    assert!(
        run.stderr.contains("1 files that are not .json") && run.stderr.contains("1 hidden"),
        "{}",
        run.stderr
    );
    assert_eq!(fs::read_to_string(inbox.path("dup.txt")).unwrap(), "a\nb\n주문\n");
    let again =
        inbox.run(&["load", "inbox.db", "in", "--duplicates", "dup.txt", "--json"]).warned("conflict");
    assert_eq!(
        again.json(),
        serde_json::json!({"files": 8, "messages": 8, "applied": 0, "duplicates": 8, "conflicts": 1, "failed": 0, "rows": 4})
    );
    assert_eq!(fs::read_to_string(inbox.path("dup.txt")).unwrap(), "Z\na\nb\n주문\n");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries WHERE path = 'batch'"), 16);
    inbox.run(&["load", "inbox.db", "in", "--on-conflict", "fail"]).failed(65, "1 conflicts");
}

#[test]
fn those_that_fail_are_named_and_the_others_are_loaded() {
    let inbox = Fixture::new();
    inbox.write("in/1.json", message("M1", 1));
    inbox.write("in/2.json", "{\"msg_id\":\n");
    inbox.write("in/3.json", b"\xff");
    inbox.write("in/4.json", "{\"msg_id\":\"\"}");
    inbox.write("in/5.json/x", "");
    inbox.write("in/6.json", message("M6", 1));
    let run =
        inbox.run(&["load", "inbox.db", "in", "--duplicates", "dup.txt"]).failed(1, "4 of 6 messages failed");
    assert_eq!(run.stdout, "files=6 applied=2 duplicates=0 conflicts=0 failed=4 rows=2\n");
    for part in [
        "in/2.json:2:1: expected a value",
        "in/3.json:1:1: expected UTF-8",
        "in/4.json:1:2:",
        "in/5.json: cannot be read",
    ] {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
    assert_eq!(fs::read_to_string(inbox.path("dup.txt")).unwrap(), "");
}

#[test]
fn patterns_lines_and_standard_input_are_loaded() {
    let inbox = Fixture::new();
    inbox.write("in/a/1.json", message("M1", 1));
    inbox.write("in/b/2.json", message("M2", 1));
    let lines =
        format!("\u{feff}{}\r\n\n{}\n{{bad\n{}", message("M3", 1), message("M1", 1), message("M4", 1));
    inbox.write("more.ndjson", &lines);
    let pattern = inbox.run(&["load", "inbox.db", "in/*/*.json"]).ok();
    assert_eq!(pattern.stdout, "files=2 applied=2 duplicates=0 conflicts=0 failed=0 rows=2\n");
    let file =
        inbox.run(&["load", "inbox.db", "more.ndjson"]).failed(1, "more.ndjson:4:2: expected a member name");
    assert_eq!(file.stdout, "files=1 applied=2 duplicates=1 conflicts=0 failed=1 rows=4\n");
    assert_eq!(
        inbox.sql::<String>("SELECT source FROM inbox_deliveries WHERE msg_id = 'M4'"),
        "more.ndjson:5"
    );

    let mut child = inbox
        .command(&["load", "inbox.db", "-", "in/**/*.json", "--via", "queue"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{}\n", message("M5", 1)).as_bytes()).unwrap();
    let run = Run::of(child.wait_with_output().unwrap()).ok();
    assert_eq!(run.stdout, "files=3 applied=1 duplicates=2 conflicts=0 failed=0 rows=5\n");
    assert_eq!(
        inbox.sql::<String>("SELECT source || path FROM inbox_deliveries WHERE msg_id = 'M5'"),
        "stdin:1queue"
    );
    // What the name says is not always so.
    inbox.write("lines.json", format!("{}\n{}\n", message("M6", 1), message("M7", 1)));
    inbox.run(&["load", "inbox.db", "lines.json"]).failed(1, "lines.json:2:1: expected the end of the text");
    let run = inbox.run(&["load", "inbox.db", "lines.json", "--format", "ndjson"]).ok();
    assert_eq!(run.stdout, "files=1 applied=2 duplicates=0 conflicts=0 failed=0 rows=7\n");
}

#[test]
fn a_message_is_shown_while_standard_input_is_still_open() {
    let inbox = Fixture::new();
    let mut child = inbox
        .command(&["load", "inbox.db", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(format!("{}\n", message("M1", 1)).as_bytes()).unwrap();
    let mut seen = false;
    for _ in 0..3000 {
        if inbox.path("inbox.db").exists()
            && inbox.db().query_row("SELECT count(*) FROM inbox_log", [], |row| row.get(0)) == Ok(1)
        {
            seen = true;
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(seen, "a slow stream is received as it comes");
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_line_over_the_limit_is_told_and_the_next_one_is_loaded() {
    let inbox = Fixture::new();
    for more in [1, 1 << 20] {
        let long = "x".repeat((16 << 20) + more);
        inbox.write("m.ndjson", format!("{}\n{long}\n{}\n", message("M1", 1), message("M3", 1)));
        let run = inbox
            .run(&["load", "inbox.db", "m.ndjson"])
            .failed(1, "m.ndjson:2:1: expected a message of at most");
        assert!(run.stdout.contains(" failed=1 rows=2"), "{}", run.stdout);
    }
}

#[test]
fn an_empty_folder_is_a_load_of_nothing() {
    let inbox = Fixture::new();
    fs::create_dir(inbox.path("in")).unwrap();
    let run = inbox.run(&["load", "inbox.db", "in", "--duplicates", "dup.txt"]).ok();
    assert_eq!(run.stdout, "files=0 applied=0 duplicates=0 conflicts=0 failed=0 rows=0\n");
    inbox.run(&["load", "inbox.db", "in/*.json"]).failed(74, "no file matches");
}

#[test]
fn a_list_of_duplicates_that_cannot_be_written_is_found_out_first() {
    let inbox = Fixture::new();
    inbox.write("in/1.json", message("M1", 1));
    inbox.run(&["load", "inbox.db", "in", "--duplicates", "nowhere/dup.txt"]).failed(74, "nowhere/dup.txt");
    inbox.run(&["load", "inbox.db", "in", "--duplicates", "in"]).failed(74, "it is a folder");
    assert!(!inbox.path("inbox.db").exists());
    let run = inbox.run(&["load", "inbox.db", "in", "in", "--duplicates", "/dev/stdout"]).ok();
    assert_eq!(run.stdout, "M1\nfiles=2 applied=1 duplicates=1 conflicts=0 failed=0 rows=1\n");
}

// Whichever reader is faster, the first in the order of names is the one that is applied, as one by one.
#[test]
fn in_bulk_and_one_by_one_come_to_the_same() {
    let (bulk, single) = (Fixture::new(), Fixture::new());
    let mut distinct = BTreeSet::new();
    for number in 0..300 {
        let key = format!("M{}", (number * 37) % 101);
        let text = format!(r#"{{"msg_id":"{key}","order_no":"O-{number}"}}"#);
        bulk.write(&format!("in/{number:04}.json"), &text);
        distinct.insert(key);
        if number % 5 == 0 {
            single.apply(&text, &[]);
        }
    }
    let run = bulk.run(&["load", "inbox.db", "in"]).warned("conflict");
    assert_eq!(run.stdout, "files=300 applied=101 duplicates=199 conflicts=199 failed=0 rows=101\n");
    assert_eq!(distinct.len(), 101);
    let lines: String =
        (0..300).map(|n| fs::read_to_string(bulk.path(&format!("in/{n:04}.json"))).unwrap() + "\n").collect();
    let stream = Fixture::new();
    stream.write("all.ndjson", lines);
    stream.run(&["load", "inbox.db", "all.ndjson"]).warned("conflict");
    assert_eq!(stream.log(), bulk.log());
    // Of the files that both took, those applied first one by one are those applied first in bulk.
    for number in (0..300).step_by(5).filter(|number| *number < 100) {
        let key = format!("M{}", (number * 37) % 101);
        let of = |inbox: &Fixture| inbox.log().into_iter().find(|row| row.0 == key).map(|row| row.1);
        assert_eq!(of(&bulk), of(&single), "{key}");
    }
}

// A hundredth comes again, a thousandth with another body: none of them is lost in the crowd.
#[test]
fn of_many_messages_every_copy_and_every_conflict_is_reported() {
    let inbox = Fixture::new();
    let (mut lines, mut again, mut conflicts) = (String::new(), BTreeSet::new(), BTreeSet::new());
    for number in 0..50_000 {
        let of = if number % 100 == 99 { number / 2 / 100 * 100 } else { number };
        let amount = if number % 1000 == 999 { 2 } else { 1 };
        lines += &format!("{}\n", message(&format!("M{of:05}"), amount));
        if of != number {
            again.insert(format!("M{of:05}"));
        }
        if amount == 2 {
            conflicts.insert(format!("m.ndjson:{}", number + 1));
        }
    }
    inbox.write("m.ndjson", lines);
    let run = inbox.run(&["load", "inbox.db", "m.ndjson", "--duplicates", "dup.txt"]).warned("conflict");
    assert_eq!(run.stdout, "files=1 applied=49500 duplicates=500 conflicts=50 failed=0 rows=49500\n");
    let told: BTreeSet<String> = run
        .stderr
        .lines()
        .filter_map(|line| Some(line.strip_prefix("warning: ")?.split(": ").next()?.into()))
        .collect();
    assert_eq!(told, conflicts);
    let listed = fs::read_to_string(inbox.path("dup.txt")).unwrap();
    assert!(listed.lines().eq(again.iter()), "{listed}");
    let csv = inbox.run(&["duplicates", "inbox.db", "--csv"]).ok().stdout;
    assert!(csv.lines().skip(1).map(|line| line.split(',').next().unwrap()).eq(again.iter()), "{csv}");
    let times: u64 =
        csv.lines().skip(1).map(|line| line.split(',').nth(1).unwrap().parse::<u64>().unwrap() - 1).sum();
    assert_eq!(times, 500);
    let different = csv.lines().filter(|line| line.ends_with(",different")).count();
    let keys: i64 =
        inbox.sql("SELECT count(DISTINCT msg_id) FROM inbox_deliveries WHERE verdict = 'conflict'");
    assert_eq!((different as i64, keys > 0), (keys, true));
}

#[test]
fn progress_is_drawn_on_a_terminal_and_nowhere_else() {
    let inbox = Fixture::new();
    for number in 0..200 {
        inbox.write(&format!("in/{number:03}.json"), message(&format!("M{number}"), 1));
    }
    let program = env!("CARGO_BIN_EXE_onlyonce");
    let line = format!("{program} inbox load inbox.db in");
    let output = std::process::Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(inbox.folder.path())
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()
        .expect("script (of util-linux) gives it a terminal");
    let drawn = String::from_utf8_lossy(&output.stdout);
    assert!(drawn.contains("200/200 files") && drawn.contains("200 applied"), "{drawn:?}");
    assert!(drawn.contains("files=200 applied=200"), "{drawn:?}");
    // Without one nothing but what there is to say.
    assert_eq!(inbox.run(&["load", "inbox.db", "in"]).ok().stderr, "");
}
