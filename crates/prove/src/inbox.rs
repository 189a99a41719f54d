//! The inbox: each delivery is a process, `onlyonce inbox apply` or `load`, which may be killed or stopped at any point.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use onlyonce_store_sqlite::rusqlite::{self, Connection, OpenFlags, Row};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::door::Door;
use crate::history::{Execution, Kept};
use crate::ledger::Order;
use crate::plan::{Inbox, Work};
use crate::random::Random;
use crate::run::ProveError;

const DATABASE: &str = "prove.db";
const BOOK: &str = "book.sql";
const HANDLER: &str = "handler.sh";
const LEDGER: &str = "ledger";

/// No uniqueness of its own: an execution is a row, whatever it is of.
const TABLE: &str =
    "CREATE TABLE executions (id INTEGER PRIMARY KEY AUTOINCREMENT, operation INTEGER, amount INTEGER)";
const STATEMENT: &str = "INSERT INTO executions (operation, amount) VALUES (:operation, :amount)
    RETURNING json_object('operation', operation, 'execution', id);";
/// The same as a command: written down when it begins, then at work for a while; some fail for good, some for now.
const SCRIPT: &str = r#"id=$$-$(date +%s%N)
read -r message
printf '%s %s\n' "$id" "$message" >> ledger
case $id in *7) sleep 1 ;; *[13]) sleep 0.1 ;; esac
printf '{"execution":"%s"}' "$id"
case $id in *00) exit 65 ;; *50) exit 1 ;; esac
"#;

pub(crate) struct Receivers {
    plan: Inbox,
    messages: AtomicUsize,
    running: Mutex<BTreeMap<usize, Arc<Mutex<Child>>>>,
    /// How far what was done has been read: a row's id, or bytes and lines.
    read: Mutex<(u64, usize)>,
}

#[derive(Serialize, Deserialize)]
struct Message<'m> {
    msg_id: &'m str,
    #[serde(flatten)]
    order: Order,
}

impl Door for Arc<Receivers> {
    fn count(&self) -> usize {
        Receivers::WAYS
    }

    fn telling(&self, random: &mut Random) -> usize {
        1 + random.below(Receivers::WAYS - 1)
    }

    /// One delivery, by one process; dropped, the process is killed.
    async fn exchange(&self, way: usize, key: &str, body: Bytes) -> Result<Response<Bytes>, String> {
        let order = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        let message = serde_json::to_string(&Message { msg_id: key, order }).unwrap_or_default();
        let number = self.messages.fetch_add(1, Ordering::SeqCst);
        let bulk = way == 0;
        let file = File(self.plan.folder.join(format!("{number}.{}", if bulk { "ndjson" } else { "json" })));
        let copies = if bulk { 3 } else { 1 };
        fs::write(&file.0, format!("{message}\n").repeat(copies)).map_err(|error| error.to_string())?;
        let ended = self.run(number, bulk, &file.0).await.map_err(|error| error.to_string())?;
        match ended.code {
            None => Err("the process was killed".into()),
            Some(_) if bulk => Err("in bulk: nothing is told of the single message".into()),
            Some(code) => Ok(ended.said(code)),
        }
    }
}

impl Receivers {
    /// Of ten deliveries one is in bulk: way 0.
    pub(crate) const WAYS: usize = 10;

    pub(crate) fn create(plan: &Inbox) -> Result<Self, ProveError> {
        let failed = |what: &Path, error: &dyn std::fmt::Display| {
            ProveError::Inbox(format!("{}: {error}", what.display()))
        };
        for (name, text) in [(BOOK, STATEMENT), (HANDLER, SCRIPT), (LEDGER, "")] {
            let file = plan.folder.join(name);
            fs::write(&file, text).map_err(|error| failed(&file, &error))?;
        }
        if plan.work == Work::Sql {
            let file = plan.folder.join(DATABASE);
            Connection::open(&file)
                .and_then(|conn| conn.execute_batch(TABLE))
                .map_err(|error| failed(&file, &error))?;
        }
        Ok(Self {
            plan: plan.clone(),
            messages: AtomicUsize::new(0),
            running: Mutex::default(),
            read: Mutex::default(),
        })
    }

    async fn run(&self, number: usize, bulk: bool, file: &Path) -> io::Result<Ended> {
        let mut command = Command::new(&self.plan.program);
        command.args(["inbox", if bulk { "load" } else { "apply" }, DATABASE]).arg(file);
        match self.plan.work {
            Work::Sql => command.args(["--sql", BOOK]),
            Work::Exec => {
                let lease = format!("{}ms", self.plan.lease.as_millis());
                command.args(["--exec", "sh ./handler.sh", "--lease", &lease])
            }
        };
        command.args(["--via", "retry", "--on-conflict", "fail"]).current_dir(&self.plan.folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
        let child = Arc::new(Mutex::new(child));
        self.running.lock().insert(number, Arc::clone(&child));
        // Forgotten first, and killed with its last handle.
        let _running = Running { number, of: self };
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let reading = async {
            tokio::try_join!(
                async {
                    if let Some(out) = &mut out { out.read_to_string(&mut stdout).await } else { Ok(0) }
                },
                async {
                    if let Some(err) = &mut err { err.read_to_string(&mut stderr).await } else { Ok(0) }
                },
            )
        };
        reading.await?;
        let status = loop {
            // Reaped under the lock: whoever sends a signal holds it, so that the id is still this child's.
            let ended = child.lock().try_wait()?;
            match ended {
                Some(status) => break status,
                None => sleep(Duration::from_millis(2)).await,
            }
        };
        Ok(Ended { code: status.code(), stdout, stderr })
    }

    /// Of the deliveries under way, the one that the number falls on. A handler that it runs goes on.
    fn pick(&self, number: usize) -> Option<Arc<Mutex<Child>>> {
        let running = self.running.lock();
        let count = running.len().max(1);
        running.values().nth(number % count).cloned()
    }

    pub(crate) async fn kill(&self, number: usize) {
        // There is always a next delivery, a moment later at most.
        for _ in 0..100 {
            if let Some(child) = self.pick(number) {
                return signal(&child, Signal::KILL);
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn pause(&self, number: usize, time: Duration) {
        let Some(child) = self.pick(number) else { return };
        signal(&child, Signal::STOP);
        sleep(time).await;
        signal(&child, Signal::CONT);
    }

    /// What was done since the last time that this was asked, by what the work itself left behind.
    pub(crate) fn take_executions(&self) -> Result<Vec<Execution>, ProveError> {
        let mut read_so_far = self.read.lock();
        let (place, count) = *read_so_far;
        match self.plan.work {
            Work::Sql => {
                let sql =
                    format!("SELECT id, operation, amount FROM executions WHERE id > {place} ORDER BY id");
                let found = self.ask(&sql, |row| {
                    let order = Order { operation: number(row, 1)?, amount: row.get::<_, u32>(2)?.into() };
                    let id = number(row, 0)?;
                    let body = format!("{{\"operation\":{},\"execution\":{id}}}", order.operation);
                    Ok(Some(execution(id, order, body)))
                })?;
                read_so_far.0 = found.last().map_or(place, |last| last.number as u64);
                Ok(found)
            }
            Work::Exec => {
                let mut text = String::new();
                fs::File::open(self.plan.folder.join(LEDGER))
                    .and_then(|mut file| {
                        file.seek(SeekFrom::Start(place))?;
                        file.read_to_string(&mut text)
                    })
                    .map_err(|error| ProveError::Inbox(error.to_string()))?;
                *read_so_far = (place + text.len() as u64, count + text.lines().count());
                let read = |(number, line): (usize, &str)| {
                    let (id, message) = line.split_once(' ')?;
                    let message: Message<'_> = serde_json::from_str(message).ok()?;
                    Some(execution(number, message.order, format!("{{\"execution\":\"{id}\"}}")))
                };
                let lines = (count..).zip(text.lines());
                let found: Option<Vec<_>> = lines.map(read).collect();
                found.ok_or_else(|| ProveError::Inbox("its ledger has a line that is none of ours".into()))
            }
        }
    }

    /// What the inbox itself keeps of these operations, by its tables.
    pub(crate) fn kept(&self, of: impl Fn(usize) -> bool) -> Result<Kept, ProveError> {
        let counted = |table: &str| -> Result<BTreeMap<usize, usize>, ProveError> {
            let sql = format!("SELECT msg_id, count(*) FROM {table} GROUP BY msg_id");
            let rows = self.ask(&sql, |row| {
                let id: String = row.get(0)?;
                let operation = id.rsplit('-').next().and_then(|number| number.parse().ok());
                Ok(operation.filter(|operation| of(*operation)).zip(Some(number(row, 1)?)))
            })?;
            Ok(rows.into_iter().collect())
        };
        Ok(Kept { records: counted("inbox_log")?, deliveries: counted("inbox_deliveries")? })
    }

    fn ask<T>(
        &self,
        sql: &str,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<Option<T>>,
    ) -> Result<Vec<T>, ProveError> {
        let file = self.plan.folder.join(DATABASE);
        let conn = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)
            .map_err(|error| unreadable(&error))?;
        let mut query = conn.prepare(sql).map_err(|error| unreadable(&error))?;
        let rows = query.query_map([], read).map_err(|error| unreadable(&error))?;
        rows.filter_map(Result::transpose).collect::<Result<_, _>>().map_err(|error| unreadable(&error))
    }
}

fn number(row: &Row<'_>, column: usize) -> rusqlite::Result<usize> {
    Ok(row.get::<_, i64>(column)?.try_into().unwrap_or_default())
}

fn unreadable(error: &rusqlite::Error) -> ProveError {
    ProveError::Inbox(error.to_string())
}

fn execution(number: usize, order: Order, body: String) -> Execution {
    // When it began is not known: the work keeps no time.
    Execution { operation: order.operation, number, sent: order.sent(), at: Duration::ZERO, body }
}

fn signal(child: &Mutex<Child>, signal: Signal) {
    let child = child.lock();
    if let Some(id) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        // It may have ended by now.
        let _ = kill_process(id, signal);
    }
}

/// A message's file, for as long as its delivery.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

struct Running<'r> {
    number: usize,
    of: &'r Receivers,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.of.running.lock().remove(&self.number);
    }
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    /// As a gateway would say it: a reply, first or replayed, or a problem with its code.
    fn said(&self, code: i32) -> Response<Bytes> {
        let mut lines = self.stdout.lines();
        let (verdict, response) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let refused = |status: u16, name: &str| {
            let problem = serde_json::json!({ "code": name }).to_string();
            answer(status, &[("content-type", "application/problem+json")], problem)
        };
        match (code, verdict) {
            // One status for the first delivery and its copies, whatever the verdict is called.
            (0, "applied") | (65, "failed") => answer(200, &[], response.to_owned()),
            (0, "duplicate") => answer(200, &[("idempotency-replayed", "true")], response.to_owned()),
            (65, "conflict") => refused(422, "key-reused"),
            (75, _) if self.stderr.contains("has been working on the message") => refused(409, "in-progress"),
            (75, _) if self.stderr.contains("busy") => refused(503, "store-unavailable"),
            (75, _) => refused(502, "upstream-failed"),
            _ => refused(500, &format!("exit code {code}, {verdict:?}: {}", self.stderr.trim())),
        }
    }
}

fn answer(status: u16, headers: &[(&'static str, &'static str)], body: String) -> Response<Bytes> {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    for (name, value) in headers {
        response.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Sent;

    #[test]
    fn what_a_process_says_is_said_as_a_gateway_would() {
        let said = |code, stdout: &str, stderr: &str| {
            let response =
                Ended { code: Some(code), stdout: stdout.into(), stderr: stderr.into() }.said(code);
            let is_replay = response.headers().contains_key("idempotency-replayed");
            (response.status().as_u16(), String::from_utf8_lossy(response.body()).into_owned(), is_replay)
        };
        let reply = |is_replay| (200, "{}".to_owned(), is_replay);
        assert_eq!(said(0, "applied\n{}\n", ""), reply(false));
        assert_eq!(said(0, "duplicate\n{}\n", "warning"), reply(true));
        assert_eq!(said(65, "failed\n{}\n", "for good"), reply(false));
        let refused = |status, code: &str| (status, format!("{{\"code\":\"{code}\"}}"), false);
        assert_eq!(said(65, "conflict\n{}\n", "known"), refused(422, "key-reused"));
        assert_eq!(said(75, "", "a: busy: another process held it"), refused(503, "store-unavailable"));
        let taken = "a: busy: another process has been working on the message";
        assert_eq!(said(75, "", taken), refused(409, "in-progress"));
        assert_eq!(said(75, "", "a: the command ended with 1"), refused(502, "upstream-failed"));
        // Anything else is an answer that nobody could make sense of.
        assert!(said(74, "", "disk").1.contains("disk"));
        assert!(said(0, "maybe\n", "").1.contains("maybe"));
    }

    #[test]
    fn a_message_names_its_operation() {
        let order = Order::new(7, Sent::Changed);
        let text = serde_json::to_string(&Message { msg_id: "prove-a-7", order }).expect("it is plain");
        assert_eq!(text, r#"{"msg_id":"prove-a-7","operation":7,"amount":101}"#);
    }
}
