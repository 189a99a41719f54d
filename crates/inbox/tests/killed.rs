//! A consumer in Rust that is killed by `kill -9` at each step of [`Inbox::receive`]: its message is applied exactly once.
//!
//! The consumer is this test binary, asked by an environment variable to receive one message.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use onlyonce_inbox::{Ending, Envelope, Inbox, InboxOptions, Incoming, Keys, Place, Receipt, Verdict, Via};
use onlyonce_store_sqlite::rusqlite::Connection;
use rustix::process::{Pid, Signal, kill_process};

const FOLDER: &str = "ONLYONCE_INBOX_TEST_FOLDER";
const PATIENCE: Duration = Duration::from_secs(120);
const TEXT: &[u8] = br#"{"msg_id":"P-1","order_no":"O-7","amount":100}"#;

type Error = Box<dyn std::error::Error>;

/// The consumer, where another test of this file asks for it; by itself it receives a message in this process.
#[test]
fn consumer() {
    match std::env::var_os(FOLDER) {
        Some(folder) => drop(consume(Path::new(&folder)).unwrap()),
        None => {
            let bank = Bank::new("WAL");
            for verdict in [Verdict::Applied, bank.duplicate(), bank.duplicate()] {
                assert_eq!(consume(bank.path()).unwrap().verdict, verdict);
            }
            assert_eq!(bank.state(), (50, 1, 3));
        }
    }
}

fn consume(folder: &Path) -> Result<Receipt, Error> {
    let inbox = InboxOptions::default().busy_timeout(PATIENCE).open(folder.join("bank.db"))?;
    let envelope = Envelope::read(TEXT, &Keys::default(), Place::start_of("queue"))?;
    let message = Incoming { envelope: &envelope, via: Via::Queue, source: "queue", body: TEXT };
    reach(folder, "open");
    let receipt = inbox.receive(&message, |tx, _| {
        tx.execute("UPDATE accounts SET balance = balance - 100 WHERE id = 1", [])?;
        reach(folder, "work");
        Ok::<_, Error>(Ending::Done(r#"{"booked":100}"#.into()))
    })?;
    reach(folder, "received");
    Ok(receipt)
}

/// Says that it is there, and goes no further where it is to be killed there.
fn reach(folder: &Path, step: &str) {
    fs::write(folder.join(step), "").unwrap();
    while fs::read_to_string(folder.join("stop")).is_ok_and(|stop| stop == step) {
        sleep(Duration::from_millis(10));
    }
}

/// A folder with a database of the consumer's own.
struct Bank(tempfile::TempDir);

impl Bank {
    fn new(mode: &str) -> Self {
        let bank = Self(tempfile::tempdir().unwrap());
        let tables = "CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER); INSERT INTO accounts VALUES (1, 150)";
        bank.db().execute_batch(&format!("PRAGMA journal_mode = {mode}; {tables}")).unwrap();
        drop(Inbox::open(bank.path().join("bank.db")).unwrap());
        bank
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn db(&self) -> Connection {
        let db = Connection::open(self.path().join("bank.db")).unwrap();
        db.busy_timeout(PATIENCE).unwrap();
        db
    }

    /// The balance, the rows and the deliveries.
    fn state(&self) -> (i64, i64, i64) {
        let sql = "SELECT (SELECT balance FROM accounts), (SELECT count(*) FROM inbox_log), (SELECT count(*) FROM inbox_deliveries)";
        self.db().query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap()
    }

    fn duplicate(&self) -> Verdict {
        Verdict::Duplicate(onlyonce_inbox::Body::Same)
    }

    fn start(&self, stop: &str) -> Child {
        for step in ["open", "work", "received"] {
            let _ = fs::remove_file(self.path().join(step));
        }
        fs::write(self.path().join("stop"), stop).unwrap();
        Command::new(std::env::current_exe().unwrap())
            .args(["consumer", "--exact", "--test-threads", "1"])
            .env(FOLDER, self.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn wait_for(&self, step: &str) {
        for _ in 0..6000 {
            if self.path().join(step).exists() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        panic!("not within a minute: {step}");
    }

    /// Delivered again after the kill, and once more, it is applied exactly once.
    fn is_applied_once(&self, was_committed: bool) {
        let before = if was_committed { (50, 1, 1) } else { (150, 0, 0) };
        assert_eq!(self.state(), before, "the work and its record: both, or neither");
        let _ = fs::remove_file(self.path().join("stop"));
        let verdict = if was_committed { self.duplicate() } else { Verdict::Applied };
        let receipt = consume(self.path()).unwrap();
        assert_eq!((receipt.verdict, receipt.response.as_slice()), (verdict, &br#"{"booked":100}"#[..]));
        assert_eq!(consume(self.path()).unwrap().verdict, self.duplicate());
        assert_eq!(self.state(), (50, 1, if was_committed { 3 } else { 2 }));
        let check: String = self.db().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(check, "ok");
    }
}

fn kill(mut child: Child) {
    assert!(child.try_wait().unwrap().is_none(), "it is still at its step");
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
}

#[test]
fn a_consumer_that_is_killed_before_its_work_in_it_or_after_it_applies_its_message_once() {
    for mode in ["WAL", "DELETE"] {
        for (step, was_committed) in [("open", false), ("work", false), ("received", true)] {
            let bank = Bank::new(mode);
            let child = bank.start(step);
            bank.wait_for(step);
            kill(child);
            bank.is_applied_once(was_committed);
        }
    }
}

#[test]
fn one_that_is_killed_while_it_waits_for_its_turn_has_done_nothing() {
    for mode in ["WAL", "DELETE"] {
        let bank = Bank::new(mode);
        let lock = bank.db();
        lock.execute_batch("BEGIN IMMEDIATE").unwrap();
        let child = bank.start("");
        bank.wait_for("open");
        sleep(Duration::from_millis(200));
        kill(child);
        lock.execute_batch("ROLLBACK").unwrap();
        bank.is_applied_once(false);
    }
}

#[test]
fn one_that_is_killed_between_its_work_and_the_commit_has_done_nothing() {
    for mode in ["WAL", "DELETE"] {
        let bank = Bank::new(mode);
        // The delivery is logged after the work: that takes long.
        bank.db()
            .execute_batch(
                "CREATE TRIGGER slow AFTER INSERT ON inbox_deliveries BEGIN
                    SELECT count(*) FROM (WITH RECURSIVE n (v) AS (SELECT 1 UNION ALL SELECT v + 1 FROM n) SELECT v FROM n);
                 END",
            )
            .unwrap();
        let child = bank.start("");
        bank.wait_for("work");
        sleep(Duration::from_millis(200));
        kill(child);
        bank.db().execute_batch("DROP TRIGGER slow").unwrap();
        bank.is_applied_once(false);
    }
}

/// With a rollback journal, a reader keeps the commit from its last step.
#[test]
fn one_that_is_killed_in_the_commit_has_done_nothing() {
    let bank = Bank::new("DELETE");
    let reader = bank.db();
    reader.execute_batch("BEGIN; SELECT count(*) FROM accounts").unwrap();
    let child = bank.start("");
    bank.wait_for("work");
    sleep(Duration::from_millis(300));
    assert!(bank.path().join("bank.db-journal").exists(), "the commit has begun");
    kill(child);
    reader.execute_batch("ROLLBACK").unwrap();
    bank.is_applied_once(false);
}

#[test]
fn one_that_is_killed_anywhere_applies_its_message_once() {
    for mode in ["WAL", "DELETE"] {
        let bank = Bank::new(mode);
        let mut kills = 0;
        for pause_us in [0, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000, 32_000, 64_000] {
            let mut child = bank.start("");
            sleep(Duration::from_micros(pause_us));
            kills += u32::from(child.try_wait().unwrap().is_none());
            let _ = kill_process(Pid::from_child(&child), Signal::KILL);
            child.wait().unwrap();
            let (balance, rows, deliveries) = bank.state();
            assert_eq!(
                (balance, rows),
                if deliveries == 0 { (150, 0) } else { (50, 1) },
                "{mode} {pause_us}"
            );
        }
        assert!(kills > 3, "only {kills} kills");
        let _ = fs::remove_file(bank.path().join("stop"));
        consume(bank.path()).unwrap();
        let (balance, rows, _) = bank.state();
        assert_eq!((balance, rows), (50, 1));
    }
}
