//! An inbox: messages with a statement in the transaction of their record, and with a command under a lease.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use onlyonce_core::CrashPoint;

use crate::{Death, died, each, program};

const MESSAGES: [&str; 3] = ["m-1", "m-2", "m-3"];
const LEASE: &str = "1s";

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_is_carried_out_exactly_once() {
    let places = [
        CrashPoint::InboxRow,
        CrashPoint::InboxWork,
        CrashPoint::InboxCommitBefore,
        CrashPoint::InboxCommitAfter,
    ];
    each(places, async |death| {
        let inbox = Inbox::new(death, &["--sql", "book.sql"]);
        inbox.dies_and_goes_on().await;
        // No uniqueness of its own.
        assert_eq!(
            inbox.ask("SELECT group_concat(id, ' ') FROM (SELECT id FROM booked ORDER BY id)"),
            MESSAGES.join(" ")
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_carried_out_at_least_once_with_one_response() {
    let places = [
        CrashPoint::InboxHandlerBefore,
        CrashPoint::InboxHandlerAfter,
        CrashPoint::InboxCommitBefore,
        CrashPoint::InboxCommitAfter,
    ];
    each(places, async |death| {
        let inbox = Inbox::new(death, &["--exec", "sh ./handler.sh", "--lease", LEASE]);
        inbox.dies_and_goes_on().await;
        let book = fs::read_to_string(inbox.folder.path().join("book")).unwrap();
        let ran: Vec<_> = book.lines().map(str::to_owned).collect();
        // Every message, and one of them perhaps again: that whose end nobody saw.
        assert!(ran.len() <= MESSAGES.len() + 1, "{}: {ran:?}", death.name());
        let each: BTreeSet<_> =
            ran.iter().filter_map(|line| line.split_once(' ')).map(|(id, _)| id).collect();
        assert_eq!(each.into_iter().collect::<Vec<_>>(), MESSAGES, "{}", death.name());
        for id in MESSAGES {
            let response = inbox.ask(&format!("SELECT response FROM inbox_log WHERE msg_id = '{id}'"));
            assert!(ran.contains(&format!("{id} {response}")), "{}: {response} of {ran:?}", death.name());
        }
    })
    .await;
}

struct Inbox {
    death: Death,
    folder: tempfile::TempDir,
    work: &'static [&'static str],
}

impl Inbox {
    fn new(death: Death, work: &'static [&'static str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let inbox = Self { death, folder, work };
        inbox.write(
            "book.sql",
            "INSERT INTO booked (id) VALUES (:msg_id) RETURNING json_object('booked', id);",
        );
        // Written down before it is said, with a number of its own each time.
        inbox.write(
            "handler.sh",
            r#"read -r message
id=$(printf '%s' "$message" | sed 's/.*"msg_id":"\([^"]*\)".*/\1/')
printf '%s {"pid":%s}\n' "$id" $$ >> book
printf '{"pid":%s}' $$
"#,
        );
        for id in MESSAGES {
            inbox.write(&format!("{id}.json"), &format!("{{\"msg_id\":\"{id}\"}}\n"));
        }
        inbox.ask("CREATE TABLE booked (id TEXT)");
        inbox
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.path().join(name), text).unwrap();
    }

    /// One message after the other, until the process that has one dies; then all of them again, and once more.
    async fn dies_and_goes_on(&self) {
        let mut verdicts = Vec::new();
        // Each process comes there once at most or more often: what is a second time is a matter of the process.
        let mut process = program(self.folder.path(), &self.load(), Some(self.death), &[]);
        died(&mut process, self.death).await;
        for _ in 0..2 {
            for id in MESSAGES {
                verdicts.push(self.apply(id).await);
            }
        }
        let (first, again) = verdicts.split_at(MESSAGES.len());
        for (first, again) in first.iter().zip(again) {
            let (_, response) = first.split_once('\n').unwrap();
            assert_eq!(again, &format!("duplicate\n{response}"), "{}", self.death.name());
        }
    }

    fn load(&self) -> Vec<&str> {
        [&["inbox", "load", "inbox.db", ".", "--batch", "1"], self.work].concat()
    }

    async fn apply(&self, id: &str) -> String {
        let file = format!("{id}.json");
        let args = [&["inbox", "apply", "inbox.db", &*file, "--busy-timeout", "20s"], self.work].concat();
        let mut process = program(self.folder.path(), &args, None, &[]);
        let status = process.wait_exit().await.unwrap();
        assert!(status.success(), "{}: {id}: {}", self.death.name(), process.stderr());
        testkit::wait_for("what it said", async || {
            let said = process.stdout();
            (said.lines().count() == 2).then_some(said)
        })
        .await
    }

    fn ask(&self, sql: &str) -> String {
        sqlite(&self.folder.path().join("inbox.db"), sql)
    }
}

fn sqlite(file: &Path, sql: &str) -> String {
    let output = std::process::Command::new("sqlite3").arg(file).arg(sql).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}
