//! Work with a message: statements, a command, a service. Done once, its answer kept.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use crate::{Fixture, Run, exists, message};

/// A service that gives one answer after another, the last one again and again.
struct Service {
    url: String,
    requests: Receiver<Request>,
}

struct Request {
    head: String,
    body: String,
}

impl Request {
    fn header(&self, name: &str) -> &str {
        let line = self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        });
        line.unwrap_or_default()
    }
}

impl Service {
    /// An answer is a status line's rest and a body; an empty status closes the connection.
    fn start(answers: Vec<(&'static str, String)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/orders?via=inbox", listener.local_addr().expect("an address"));
        let (seen, requests) = channel();
        thread::spawn(move || {
            let mut answers = answers.into_iter().peekable();
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let Some(request) = read_request(&stream) else { continue };
                let (status, body) = match answers.len() {
                    1 => answers.peek().cloned(),
                    _ => answers.next(),
                }
                .expect("an answer");
                if seen.send(request).is_err() {
                    return;
                }
                if !status.is_empty() {
                    let length = body.len();
                    let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
                }
            }
        });
        Self { url, requests }
    }

    fn count(&self) -> usize {
        self.requests.try_iter().count()
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let request = Request { head, body: String::new() };
    let mut body = vec![0; request.header("content-length").parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    Some(Request { body: String::from_utf8(body).ok()?, ..request })
}

/// How often the command of a test has run.
fn runs(inbox: &Fixture) -> usize {
    std::fs::read_to_string(inbox.path("ran")).unwrap_or_default().lines().count()
}

fn untouched(inbox: &Fixture) {
    for table in ["inbox_log", "inbox_leases", "inbox_deliveries"] {
        assert_eq!(inbox.sql::<i64>(&format!("SELECT count(*) FROM {table}")), 0, "{table}");
    }
}

#[test]
fn statements_and_the_record_are_one_transaction() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE orders (no TEXT PRIMARY KEY, amount, key, note, CHECK (amount < 100))");
    inbox.write(
        "book.sql",
        "-- a comment; with a semicolon\nINSERT INTO orders VALUES (:order_no, :amount, :msg_id, json_extract(:message, '$.note.text'));\n\
         SELECT json_object('booked', :amount, 'total', (SELECT sum(amount) FROM orders), 'by', :via, 'from', :source)",
    );
    let text = r#"{"msg_id":"M1","order_no":653247040368672768,"amount":5,"note":{"text":"한;"}}"#;
    let response = r#"{"booked":5,"total":5,"by":"manual","from":"message.json"}"#;
    for verdict in ["applied", "duplicate", "duplicate"] {
        let run = inbox.apply(text, &["--sql", "book.sql"]).ok();
        assert_eq!(run.stdout, format!("{verdict}\n{response}\n"));
    }
    assert_eq!(
        inbox.sql::<String>(
            "SELECT group_concat(no || ' ' || amount || ' ' || key || ' ' || note) FROM orders"
        ),
        "653247040368672768 5 M1 한;"
    );
    // What a constraint refuses leaves no trace, and the message is new when it comes again.
    let refused = r#"{"msg_id":"M2","order_no":"O-2","amount":500}"#;
    inbox.apply(refused, &["--sql", "book.sql"]).failed(65, "CHECK constraint failed");
    inbox.apply(r#"{"msg_id":"M2","order_no":"O-2"}"#, &["--sql", "book.sql"]).failed(65, ":amount");
    inbox
        .apply(r#"{"msg_id":"M2","order_no":"O-2","amount":[1]}"#, &["--sql", "book.sql"])
        .failed(65, "an array");
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_deliveries"), 3);
    assert_eq!((inbox.log().len(), inbox.sql::<i64>("SELECT count(*) FROM orders")), (1, 1));
    let fixed = inbox.apply(r#"{"msg_id":"M2","order_no":"O-2","amount":50}"#, &["--sql", "book.sql"]).ok();
    assert_eq!(fixed.line(0), "applied");
}

#[test]
fn statements_that_cannot_be_run_are_told_and_change_nothing() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE t (a)");
    for (sql, part) in [
        ("", "holds no statement"),
        ("INSERT INTO t VALUES (1); COMMIT; INSERT INTO t VALUES (2)", "COMMIT has no place in it"),
        ("PRAGMA synchronous = OFF", "PRAGMA has no place in it"),
        ("INSERT INTO t VALUES (?)", "a parameter has no name"),
        ("INSERT INTO t VALUES (1); INSERT INTO nowhere VALUES (2)", "no such table"),
        ("INSERT INTO t VALUES (1); SELECT 1, 2", "2 columns"),
        ("INSERT INTO t VALUES (1); SELEC 1", "syntax error"),
    ] {
        inbox.write("work.sql", sql);
        inbox.apply(&message("M1", 1), &["--sql", "work.sql"]).failed(65, part);
        let rows: i64 = inbox.sql("SELECT count(*) FROM t");
        assert_eq!(rows, 0, "{sql}");
    }
    untouched(&inbox);
    inbox.apply(&message("M1", 1), &["--sql", "nowhere.sql"]).failed(74, "nowhere.sql");
    // One that ends the transaction by way of a conflict clause is caught too.
    inbox.execute("CREATE TABLE u (a UNIQUE); INSERT INTO u VALUES (1)");
    inbox.write("work.sql", "INSERT INTO t VALUES (1); INSERT OR ROLLBACK INTO u VALUES (1)");
    inbox.apply(&message("M1", 1), &["--sql", "work.sql"]).failed(65, "UNIQUE");
    untouched(&inbox);
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM t"), 0);
}

#[test]
fn a_command_runs_once_and_its_output_is_the_response() {
    let inbox = Fixture::new();
    let command = "cat > seen; printf '%s %s\\n' \"$ONLYONCE_KEY\" \"$ONLYONCE_ATTEMPT\" >> ran; printf '{ \"no\" : 1.50,\\n \"s\":\"\\\\u00e9 b\" }\\n'";
    let text = "\u{feff}{ \"msg_id\": \"주문 'M1'\",\n \"order_no\": 7 }";
    for verdict in ["applied", "duplicate", "duplicate"] {
        let run = inbox.apply(text, &["--exec", command]).ok();
        assert_eq!(run.stdout, format!("{verdict}\n{{\"no\":1.50,\"s\":\"\\u00e9 b\"}}\n"));
    }
    assert_eq!(std::fs::read_to_string(inbox.path("ran")).unwrap(), "주문 'M1' 1\n");
    assert_eq!(std::fs::read_to_string(inbox.path("seen")).unwrap(), text);
    assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM inbox_leases"), 0);
    for (key, command, response) in [
        ("M2", "echo done", "\"done\""),
        ("M3", "true", "\"\""),
        ("M4", "printf 'two\\nlines'", "\"two\\nlines\""),
        // It need not read its input, and what it leaves running does not keep the answer.
        ("M5", "exec <&-; sleep 300 & echo 5", "5"),
    ] {
        let run = inbox.apply(&message(key, 1), &["--exec", command]).ok();
        assert_eq!(run.stdout, format!("applied\n{response}\n"), "{command}");
    }
    let verified = inbox.run(&["verify", "inbox.db", "message.json", "--exec", "echo no"]).ok();
    assert_eq!(verified.stdout, "replay=identical\n");
}

/// Longer than what fits in a pipe: whoever writes it there would be killed in the middle.
#[test]
fn a_command_is_given_the_message_whole_though_the_program_is_killed_at_once() {
    let inbox = Fixture::new();
    let message = format!("{{\"msg_id\":\"M1\",\"text\":\"{}\"}}", "x".repeat(1 << 20));
    inbox.write("m.json", &message);
    let command = "kill -9 $PPID; sleep 0.1; cat > part; mv part given";
    let killed = inbox.command(&["apply", "inbox.db", "m.json", "--exec", command]).status().unwrap();
    assert_eq!(killed.code(), None);
    wait_until("the command has read it", || inbox.path("given").exists());
    assert!(std::fs::read_to_string(inbox.path("given")).unwrap() == message, "all of it");
}

#[test]
fn an_answer_that_is_too_long_is_left_out_and_the_work_not_done_again() {
    let inbox = Fixture::new();
    let command = "echo x >> ran; head -c 3000000 /dev/zero | tr '\\0' x";
    for verdict in ["applied", "duplicate"] {
        let run = inbox.apply(&message("M1", 1), &["--exec", command]).ok();
        assert_eq!(run.line(0), verdict);
        assert!(run.line(1).contains("response_omitted"), "{}", run.line(1));
    }
    let service = Service::start(vec![("200 OK", "y".repeat(3_000_000))]);
    for _ in 0..2 {
        let run = inbox.apply(&message("M2", 1), &["--http", &service.url]).ok();
        assert!(run.line(1).contains("response_omitted"), "{}", run.line(1));
    }
    assert_eq!((runs(&inbox), service.count()), (1, 1));
}

#[test]
fn a_failure_for_good_is_recorded_and_every_other_leaves_no_record() {
    let inbox = Fixture::new();
    for (command, part) in [
        ("echo x >> ran; exit 1", "exit code 1"),
        ("echo x >> ran; exit 75", "exit code 75"),
        ("echo x >> ran; nowhere-to-be-found", "exit code 127"),
        ("echo x >> ran; kill -9 $$", "signal 9"),
        ("echo x >> ran; sleep 300", "did not end by itself within 0.3 s"),
        ("echo x >> ran; trap '' TERM; sleep 300 & wait; sleep 300", "did not end by itself"),
    ] {
        inbox.apply(&message("M1", 1), &["--exec", command, "--timeout", "300ms"]).failed(75, part);
        untouched(&inbox);
    }
    assert_eq!(runs(&inbox), 6);
    let command = "echo x >> ran; echo '{\"error\": \"no such order\"}'; exit 65";
    let failed = inbox.apply(&message("M1", 1), &["--exec", command]).failed(65, "the failure is recorded");
    assert_eq!(failed.stdout, "failed\n{\"error\":\"no such order\"}\n");
    let again = inbox.apply(&message("M1", 1), &["--exec", command]).ok();
    assert_eq!(again.stdout, "duplicate\n{\"error\":\"no such order\"}\n");
    assert_eq!(runs(&inbox), 7);
    assert_eq!(inbox.sql::<String>("SELECT status FROM inbox_log"), "failed");
    assert_eq!(inbox.sql::<String>("SELECT group_concat(verdict) FROM inbox_deliveries"), "failed,duplicate");
}

#[test]
fn what_the_table_would_refuse_is_refused_before_the_work() {
    let inbox = Fixture::new();
    inbox.execute(
        "CREATE TABLE inbox_log (msg_id TEXT NOT NULL PRIMARY KEY, biz_key TEXT NOT NULL, status, response CHECK (response <> ''),
            created_at)",
    );
    let refused = inbox.apply(r#"{"msg_id":"M1"}"#, &["--exec", "echo x >> ran; echo 1"]);
    refused.failed(65, "NOT NULL constraint failed");
    assert_eq!(runs(&inbox), 0);
    untouched(&inbox);
    let run = inbox.apply(&message("M1", 1), &["--exec", "echo x >> ran; echo 1"]).ok();
    assert_eq!(run.stdout, "applied\n1\n");
    inbox.write("work.sql", "SELECT 2");
    assert_eq!(inbox.apply(&message("M2", 1), &["--sql", "work.sql"]).ok().line(1), "2");
}

#[test]
fn a_full_disk_is_74_and_leaves_the_message_new() {
    let inbox = Fixture::new();
    inbox.apply(&message("M0", 1), &[]).ok();
    inbox.execute("CREATE TABLE t (a)");
    inbox.write("big.sql", "INSERT INTO t VALUES (zeroblob(1000000))");
    inbox.write("m.json", message("M1", 1));
    for work in ["--sql big.sql", "--exec 'echo x >> ran'"] {
        // In blocks of 512 bytes: for the command there is no room for a lease.
        let limit = if work.starts_with("--sql") { 400 } else { 8 };
        let script = format!("ulimit -f {limit}; exec \"$0\" inbox apply inbox.db m.json {work}");
        let output = std::process::Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_onlyonce")])
            .current_dir(inbox.folder.path())
            .output()
            .unwrap();
        let run = Run::of(output).failed(74, "inbox.db");
        assert!(!run.stderr.contains("rollback"), "{}", run.stderr);
        assert_eq!(inbox.sql::<i64>("SELECT count(*) FROM t"), 0);
        assert_eq!(inbox.log().len(), 1);
    }
    assert_eq!(runs(&inbox), 0);
    assert_eq!(inbox.apply(&message("M1", 1), &["--sql", "big.sql"]).ok().line(0), "applied");
}

#[test]
fn a_service_is_called_once_with_the_key() {
    let inbox = Fixture::new();
    let service = Service::start(vec![("201 Created", "{ \"id\": 653247040368672768 }".into())]);
    for verdict in ["applied", "duplicate", "duplicate"] {
        let run = inbox.apply(&message("M\\\"1", 1), &["--http", &service.url]).ok();
        assert_eq!(run.stdout, format!("{verdict}\n{{\"id\":653247040368672768}}\n"));
    }
    let requests: Vec<Request> = service.requests.try_iter().collect();
    assert_eq!(requests.len(), 1);
    assert!(requests[0].head.starts_with("POST /orders?via=inbox HTTP/1.1\r\n"), "{}", requests[0].head);
    assert_eq!(requests[0].header("idempotency-key"), "\"M\\\"1\"");
    assert_eq!(requests[0].header("content-type"), "application/json");
    assert_eq!(requests[0].body, message("M\\\"1", 1));
}

#[test]
fn what_a_service_answers_decides_what_is_recorded() {
    let inbox = Fixture::new();
    for status in [
        "408 Request Timeout",
        "425 Too Early",
        "429 Too Many Requests",
        "500 Internal Server Error",
        "503 Service Unavailable",
        "302 Found",
    ] {
        let service = Service::start(vec![(status, "{}".into())]);
        inbox
            .apply(&message("M1", 1), &["--http", &service.url])
            .failed(75, status.split(' ').next().unwrap());
        untouched(&inbox);
        assert_eq!(service.count(), 1);
    }
    let silent = Service::start(vec![("", String::new())]);
    inbox.apply(&message("M1", 1), &["--http", &silent.url]).failed(75, "gave no answer");
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", deaf.local_addr().unwrap());
    inbox.apply(&message("M1", 1), &["--http", &url, "--timeout", "200ms"]).failed(75, "within 0.2 s");
    drop(deaf);
    inbox.apply(&message("M1", 1), &["--http", &url]).failed(75, "no connection");
    untouched(&inbox);
    for (key, status) in
        [("M1", "400 Bad Request"), ("M2", "409 Conflict"), ("M3", "422 Unprocessable Content")]
    {
        let service = Service::start(vec![(status, "no".into())]);
        let failed = inbox.apply(&message(key, 1), &["--http", &service.url]).failed(65, "recorded");
        assert_eq!(failed.stdout, "failed\n\"no\"\n");
        assert_eq!(
            inbox.apply(&message(key, 1), &["--http", &service.url]).ok().stdout,
            "duplicate\n\"no\"\n"
        );
        assert_eq!(service.count(), 1);
    }
}

#[test]
fn a_second_copy_waits_for_the_first_or_is_busy() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    let command = "echo x >> ran; until [ -e go ]; do sleep 0.02; done; echo ok";
    let apply = ["apply", "inbox.db", "m.json", "--exec", command, "--busy-timeout", "60s"];
    thread::scope(|scope| {
        let first = scope.spawn(|| inbox.run(&apply));
        wait_until("the command runs", || runs(&inbox) == 1);
        let busy = ["apply", "inbox.db", "m.json", "--exec", command, "--busy-timeout", "100ms"];
        inbox.run(&busy).failed(75, "another process has been working on the message");
        // Without work of its own it waits as well: a record now would be a lie.
        inbox.run(&["apply", "inbox.db", "m.json", "--busy-timeout", "100ms"]).failed(75, "another process");
        inbox.run(&["load", "inbox.db", "m.json", "--busy-timeout", "100ms"]).failed(1, "another process");
        inbox.run(&["verify", "inbox.db", "m.json", "--busy-timeout", "100ms"]).failed(75, "another process");
        inbox.run(&["forget", "inbox.db", "M1", "--reason", "r"]).failed(1, "a handler works on the message");
        let purged = inbox.run(&["purge", "inbox.db", "0"]).ok();
        assert_eq!(purged.last(), "deleted=0 remain=0");
        let shown = inbox.run(&["show", "inbox.db", "M1"]).ok();
        assert!(
            shown.stdout.contains("attempt 1") && shown.stdout.contains("in progress"),
            "{}",
            shown.stdout
        );
        let json = inbox.run(&["show", "inbox.db", "M1", "--json"]).ok().json();
        assert_eq!((json["lease"]["attempt"].as_u64(), json["row"].is_null()), (Some(1), true));
        // Other messages are free meanwhile.
        assert_eq!(inbox.apply(&message("M2", 1), &["--exec", "true"]).ok().line(0), "applied");
        let second = scope.spawn(|| inbox.run(&apply));
        let plain = scope.spawn(|| inbox.run(&["apply", "inbox.db", "m.json", "--busy-timeout", "60s"]));
        thread::sleep(Duration::from_millis(100));
        inbox.write("go", "");
        assert_eq!(first.join().unwrap().ok().stdout, "applied\n\"ok\"\n");
        assert_eq!(second.join().unwrap().ok().stdout, "duplicate\n\"ok\"\n");
        assert_eq!(plain.join().unwrap().ok().stdout, "duplicate\n\"ok\"\n");
    });
    assert_eq!(runs(&inbox), 1);
}

#[test]
fn a_race_with_work_does_it_once() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE done (key)");
    inbox.write("work.sql", "INSERT INTO done VALUES (:msg_id)");
    inbox.write("sql.json", message("M1", 1));
    inbox.write("exec.json", message("M2", 1));
    for work in [["sql.json", "--sql", "work.sql"], ["exec.json", "--exec", "echo x >> ran; sleep 0.2"]] {
        let race = [&["race", "inbox.db"], &work[..], &["--busy-timeout", "120s"]].concat();
        let run = inbox.run(&race).ok();
        assert_eq!(run.line(0), "attempts=10 applied=1 duplicates=9 failed=0");
        assert_eq!(run.last(), "rows=1");
    }
    assert_eq!((inbox.sql::<i64>("SELECT count(*) FROM done"), runs(&inbox)), (1, 1));
}

#[test]
fn a_load_with_work_does_each_once_and_names_what_failed() {
    let inbox = Fixture::new();
    inbox.execute("CREATE TABLE booked (key, amount CHECK (amount < 100))");
    inbox.write("work.sql", "INSERT INTO booked VALUES (:msg_id, :amount) RETURNING amount");
    let lines =
        [message("A", 1), message("B", 2), message("A", 1), message("C", 500), message("D", 4)].join("\n");
    inbox.write("m.ndjson", &lines);
    let run = inbox.run(&["load", "inbox.db", "m.ndjson", "--sql", "work.sql"]).failed(1, "m.ndjson:4");
    assert_eq!(run.stdout, "files=1 applied=3 duplicates=1 conflicts=0 failed=1 rows=3\n");
    assert_eq!(inbox.sql::<String>("SELECT group_concat(key || amount) FROM booked"), "A1,B2,D4");
    assert_eq!(inbox.sql::<String>("SELECT response FROM inbox_log WHERE msg_id = 'B'"), "2");

    let other = Fixture::new();
    other.write("m.ndjson", &lines);
    let command = "echo \"$ONLYONCE_KEY\" >> ran; case $ONLYONCE_KEY in B) exit 65;; C) exit 1;; esac";
    let run = other.run(&["load", "inbox.db", "m.ndjson", "--exec", command]).failed(1, "exit code 1");
    assert_eq!(run.stdout, "files=1 applied=2 duplicates=1 conflicts=0 failed=2 rows=3\n");
    assert!(run.stderr.contains("m.ndjson:2: the work of \"B\" failed for good"), "{}", run.stderr);
    assert_eq!(std::fs::read_to_string(other.path("ran")).unwrap(), "A\nB\nC\nD\n");
    // Again: only what has no record is done once more.
    other.run(&["load", "inbox.db", "m.ndjson", "--exec", command]).failed(1, "exit code 1");
    assert_eq!(std::fs::read_to_string(other.path("ran")).unwrap(), "A\nB\nC\nD\nC\n");
}

#[test]
fn an_interrupt_ends_the_command_and_leaves_no_record() {
    for (signal, in_load) in [
        (rustix::process::Signal::INT, false),
        (rustix::process::Signal::TERM, false),
        (rustix::process::Signal::INT, true),
    ] {
        let inbox = Fixture::new();
        inbox.write("m.json", message("M1", 1));
        let command = "sleep 300 & echo $! > child; echo x >> ran; wait";
        let name = if in_load { "load" } else { "apply" };
        let child = inbox
            .command(&[name, "inbox.db", "m.json", "--exec", command])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("the command runs", || runs(&inbox) == 1);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        Run::of(child.wait_with_output().unwrap()).failed(75, "interrupted");
        untouched(&inbox);
        let pid = std::fs::read_to_string(inbox.path("child")).unwrap();
        // Gone, or a zombie that nobody reaps where there is no init.
        wait_until("its children are ended", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        });
        assert_eq!(inbox.apply(&message("M1", 1), &["--exec", "true"]).ok().line(0), "applied");
    }
}

#[test]
fn one_kind_of_work_at_a_time_and_sensible_ones() {
    let inbox = Fixture::new();
    inbox.write("m.json", message("M1", 1));
    for (args, part) in [
        (&["--exec", "true", "--sql", "x.sql"][..], "cannot be used with"),
        (&["--http", "ftp://host/"], "http:// or https://"),
        (&["--http", "http://ada:secret@host/"], "a user name in a URL"),
        (&["--exec", "true", "--timeout", "soon"], "--timeout"),
        (&["--exec", "true", "--lease", "10ms"], "between 1s and 1h"),
    ] {
        let run = inbox.run(&[&["apply", "inbox.db", "m.json"], args].concat()).failed(2, part);
        assert!(part.contains("user") || !run.stderr.contains("secret"), "{}", run.stderr);
    }
    assert!(!exists(&inbox.path("inbox.db")));
}

pub(crate) fn wait_until(what: &str, is: impl Fn() -> bool) {
    for _ in 0..3000 {
        if is() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("not within a minute: {what}");
}
