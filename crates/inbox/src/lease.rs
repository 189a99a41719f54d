//! Work outside of the database: a lease is kept in the file while it runs, and the row appears only when it is done.
//!
//! A lease names its owner by a random token. Renewing, completing and releasing need it, so that an owner whose lease was
//! taken over changes nothing any more. Times are those of the boot clock: no step of the wall clock moves a lease, and
//! after a restart of the machine all leases are over, for whoever held them is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use onlyonce_core::{Clock, CrashPoint, SystemClock, crash_point};
use onlyonce_store_sqlite::file::BootTime;
use onlyonce_store_sqlite::rusqlite::{self, Connection, OptionalExtension, params};
use serde::Serialize;

use crate::error::InboxError;
use crate::inbox::{Inbox, InboxOptions};
use crate::receive::{Incoming, Receipt, Verdict};
use crate::table;
use crate::work::{Call, Ending, Leased, Stop};

/// Between two looks at a lease that another process holds.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How long the end of a handler's work is tried to be recorded while others hold the database.
const RECORDING_PATIENCE: Duration = Duration::from_secs(60);

/// A row of `inbox_leases`, for people and programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaseView {
    /// The key.
    pub msg_id: String,
    /// How often a handler was started since the last row or release: 1 for the first time.
    pub attempt: u32,
    /// When this attempt began: UTC.
    pub taken_at: String,
    /// How long it still holds, in milliseconds: 0 when it is over and the next delivery takes over.
    pub left_ms: u64,
}

/// A lease as it is stored.
#[derive(Debug)]
pub(crate) struct Stored {
    attempt: u32,
    digest: Vec<u8>,
    boot_id: String,
    until_boot_ms: i64,
    taken_at: String,
}

/// A lease of ours.
#[derive(Clone, Debug)]
struct Held {
    key: String,
    token: [u8; 16],
    attempt: u32,
}

enum Claim {
    Known(Receipt),
    Acquired(Held),
    /// Somebody else works on it.
    Taken,
}

impl Stored {
    /// How long it still holds.
    pub(crate) fn left(&self, now: &BootTime) -> Duration {
        let left = self.until_boot_ms.saturating_sub(now.ms).max(0).unsigned_abs();
        Duration::from_millis(if self.boot_id == now.boot_id { left } else { 0 })
    }

    pub(crate) fn view(&self, key: &str, now: &BootTime) -> LeaseView {
        let left_ms = u64::try_from(self.left(now).as_millis()).unwrap_or(u64::MAX);
        LeaseView { msg_id: key.into(), attempt: self.attempt, taken_at: self.taken_at.clone(), left_ms }
    }
}

/// The lease of a key. The table may be missing in a file that was only looked at.
pub(crate) fn find(conn: &Connection, key: &str) -> rusqlite::Result<Option<Stored>> {
    if table::object_type(conn, "inbox_leases")?.is_none() {
        return Ok(None);
    }
    let sql =
        "SELECT attempt, digest, boot_id, until_boot_ms, taken_at FROM main.inbox_leases WHERE msg_id = ?1";
    conn.prepare_cached(sql)?
        .query_row([key], |row| {
            Ok(Stored {
                attempt: row.get(0)?,
                digest: row.get(1)?,
                boot_id: row.get(2)?,
                until_boot_ms: row.get(3)?,
                taken_at: row.get(4)?,
            })
        })
        .optional()
}

/// Removes the lease of a key, whoever holds it.
pub(crate) fn remove(conn: &Connection, key: &str) -> rusqlite::Result<()> {
    conn.prepare_cached("DELETE FROM main.inbox_leases WHERE msg_id = ?1")?.execute([key]).map(|_| ())
}

impl Inbox {
    /// Waits for its turn, runs the handler under a lease, records how it ended.
    pub(crate) fn receive_leased(
        &self,
        message: &Incoming<'_>,
        work: &Leased,
    ) -> Result<Receipt, InboxError> {
        let started = SystemClock.boot();
        let held = loop {
            if work.stop.load(Ordering::Relaxed) {
                return Err(self.interrupted(message));
            }
            match self.claim(message, work)? {
                Claim::Known(receipt) => return Ok(receipt),
                Claim::Acquired(held) => break held,
                Claim::Taken => self.wait_for_lease(message, started, &work.stop)?,
            }
        };
        let ended = self.run_under_lease(message, work, &held);
        match ended {
            Ok(Ending::Done(response)) => self.finish(message, &held, Verdict::Applied, &response),
            Ok(Ending::Failed(response)) => self.finish(message, &held, Verdict::Failed, &response),
            Ok(Ending::Transient(reason)) => {
                self.release(&held)?;
                Err(InboxError::Transient { source_name: message.source.into(), reason })
            }
            Err(error) => {
                self.release(&held)?;
                Err(error)
            }
        }
    }

    /// Sees to it that no handler works on a message that is about to be recorded without one. Inside a write transaction.
    pub(crate) fn heed_lease(&self, conn: &Connection, message: &Incoming<'_>) -> Result<(), InboxError> {
        let key = message.envelope.key.as_str();
        let Some(lease) = find(conn, key).map_err(self.at("cannot be read"))? else { return Ok(()) };
        if !lease.left(&BootTime::now(self.path())?).is_zero() {
            return Err(self.taken(message));
        }
        check_digest(&lease, message)?;
        remove(conn, key).map_err(self.at("cannot be written"))
    }

    /// Waits until nobody works on the message any more, as long as the patience lasts.
    pub(crate) fn wait_for_lease(
        &self,
        message: &Incoming<'_>,
        since: Duration,
        stop: &AtomicBool,
    ) -> Result<(), InboxError> {
        let key = message.envelope.key.as_str();
        loop {
            // A look at the file and not at its lock: forty that wait do not keep the one that works from its record.
            let left = find(&self.conn, key)
                .map_err(self.at("cannot be read"))?
                .map(|lease| Ok::<_, InboxError>(lease.left(&BootTime::now(self.path())?)))
                .transpose()?;
            if left.is_none_or(|left| left.is_zero()) {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                return Err(self.interrupted(message));
            }
            if SystemClock.boot().saturating_sub(since) >= self.busy_timeout() {
                return Err(self.taken(message));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn claim(&self, message: &Incoming<'_>, work: &Leased) -> Result<Claim, InboxError> {
        let key = message.envelope.key.as_str();
        self.write(|conn| {
            let now = table::now(conn).map_err(self.at("cannot be read"))?;
            // Tried and taken back: the constraint decides whether it is new, and a row that the table would refuse is
            // refused before the work is done, not after.
            conn.execute_batch("SAVEPOINT inbox_try").map_err(self.at("cannot be written"))?;
            let is_new = self.insert(conn, message, "done", &message.envelope.default_response(), &now);
            if conn.is_autocommit() {
                // Rolled back by SQLite: a full disk, for example.
                is_new?;
                return Err(self.at("cannot be written")(rusqlite::Error::InvalidQuery));
            }
            conn.execute_batch("ROLLBACK TO inbox_try; RELEASE inbox_try")
                .map_err(self.at("cannot be written"))?;
            if !is_new? {
                let receipt = self.known(conn, message)?;
                self.log(conn, message, receipt.verdict, &now)?;
                return Ok(Claim::Known(receipt));
            }
            let boot = BootTime::now(self.path())?;
            let last = find(conn, key).map_err(self.at("cannot be read"))?;
            if let Some(lease) = &last {
                if !lease.left(&boot).is_zero() {
                    return Ok(Claim::Taken);
                }
                check_digest(lease, message)?;
            }
            let attempt = last.map_or(1, |lease| lease.attempt.saturating_add(1));
            let held = Held { key: key.into(), token: token()?, attempt };
            let row = params![
                key,
                held.token.as_slice(),
                attempt,
                message.envelope.digest.as_bytes().as_slice(),
                boot.boot_id,
                until(&boot, work.lease),
                now
            ];
            conn.prepare_cached(
                "INSERT INTO main.inbox_leases (msg_id, token, attempt, digest, boot_id, until_boot_ms, taken_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
                 ON CONFLICT (msg_id) DO UPDATE SET token = excluded.token, attempt = excluded.attempt,
                    boot_id = excluded.boot_id, until_boot_ms = excluded.until_boot_ms, taken_at = excluded.taken_at",
            )
            .and_then(|mut claim| claim.execute(row))
            .map_err(self.at("cannot be written"))?;
            Ok(Claim::Acquired(held))
        })
    }

    // The handler runs on this thread, the lease is renewed on another.
    fn run_under_lease(
        &self,
        message: &Incoming<'_>,
        work: &Leased,
        held: &Held,
    ) -> Result<Ending, InboxError> {
        let lost = Arc::new(AtomicBool::new(false));
        let (done, is_done) = channel::<()>();
        let heart = self.heart(held.clone(), work.lease, Arc::clone(&lost))?;
        let beating = thread::spawn(move || heart.beat(&is_done));
        let stop = Stop { asked: &work.stop, lost: &lost };
        let call = Call { message, attempt: held.attempt, stop };
        crash_point(CrashPoint::InboxHandlerBefore);
        let ended = work.handler.handle(&call);
        crash_point(CrashPoint::InboxHandlerAfter);
        end(done, beating);
        if work.stop.load(Ordering::Relaxed) && matches!(ended, Ok(Ending::Transient(_))) {
            return Err(self.interrupted(message));
        }
        ended
    }

    fn heart(&self, held: Held, lease: Duration, lost: Arc<AtomicBool>) -> Result<Heart, InboxError> {
        // A connection of its own: the handler's thread has the other one.
        let patience = (lease / 6).min(self.busy_timeout());
        let inbox = InboxOptions::default().existing().busy_timeout(patience).open(self.path())?;
        Ok(Heart { inbox, held, lease, lost })
    }

    fn finish(
        &self,
        message: &Incoming<'_>,
        held: &Held,
        verdict: Verdict,
        response: &str,
    ) -> Result<Receipt, InboxError> {
        let started = SystemClock.boot();
        loop {
            let recorded = self.complete(message, held, verdict, response);
            match recorded {
                // The work is done: what is lost now is done once more.
                Err(InboxError::Busy { .. })
                    if SystemClock.boot().saturating_sub(started) < RECORDING_PATIENCE => {}
                Err(source) => {
                    return Err(InboxError::NotRecorded {
                        source_name: message.source.into(),
                        source: Box::new(source),
                    });
                }
                Ok(Some(receipt)) => return Ok(receipt),
                Ok(None) => {
                    let reason = "the work was done, but its lease was over and another process has taken the message over; \
                                  this result is not recorded, that one's will be";
                    return Err(InboxError::Transient {
                        source_name: message.source.into(),
                        reason: reason.into(),
                    });
                }
            }
        }
    }

    // `None` when another process has taken over.
    fn complete(
        &self,
        message: &Incoming<'_>,
        held: &Held,
        verdict: Verdict,
        response: &str,
    ) -> Result<Option<Receipt>, InboxError> {
        let status = if verdict == Verdict::Failed { "failed" } else { "done" };
        self.write(|conn| {
            let now = table::now(conn).map_err(self.at("cannot be read"))?;
            // Whose lease is gone may record all the same: the work was done. Whose lease is another's may not.
            let is_ours = delete(conn, held).map_err(self.at("cannot be written"))?;
            let is_taken = !is_ours && find(conn, &held.key).map_err(self.at("cannot be read"))?.is_some();
            if is_taken {
                return Ok(None);
            }
            let receipt = match self.insert(conn, message, status, response, &now)? {
                true => Receipt { verdict, response: response.as_bytes().to_vec() },
                false => self.known(conn, message)?,
            };
            self.log(conn, message, receipt.verdict, &now)?;
            Ok(Some(receipt))
        })
    }

    // No record: the message is as new as it was. A lease that cannot be removed ends by itself.
    fn release(&self, held: &Held) -> Result<(), InboxError> {
        match self.write(|conn| delete(conn, held).map_err(self.at("cannot be written"))) {
            Ok(_) | Err(InboxError::Busy { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn taken(&self, message: &Incoming<'_>) -> InboxError {
        InboxError::Taken {
            source_name: message.source.into(),
            key: message.envelope.key.as_str().into(),
            patience: self.busy_timeout(),
        }
    }

    fn interrupted(&self, message: &Incoming<'_>) -> InboxError {
        InboxError::Interrupted { source_name: message.source.into() }
    }
}

/// Renews a lease until the work has ended.
struct Heart {
    inbox: Inbox,
    held: Held,
    lease: Duration,
    lost: Arc<AtomicBool>,
}

impl Heart {
    fn beat(&self, is_done: &std::sync::mpsc::Receiver<()>) {
        // Nobody works on a dead lease: counted from before the renewal that was answered last.
        let mut alive_from = SystemClock.boot();
        loop {
            match is_done.recv_timeout(self.lease / 3) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
            let sent = SystemClock.boot();
            match self.renew() {
                Ok(true) => alive_from = sent,
                Ok(false) => return self.lost.store(true, Ordering::Relaxed),
                Err(_) if SystemClock.boot().saturating_sub(alive_from) < self.lease * 2 / 3 => {}
                Err(_) => return self.lost.store(true, Ordering::Relaxed),
            }
        }
    }

    fn renew(&self) -> Result<bool, InboxError> {
        let inbox = &self.inbox;
        inbox.write(|conn| {
            let boot = BootTime::now(inbox.path())?;
            let sql = "UPDATE main.inbox_leases SET until_boot_ms = ?3 WHERE msg_id = ?1 AND token = ?2";
            conn.prepare_cached(sql)
                .and_then(|mut renew| {
                    renew.execute(params![
                        self.held.key,
                        self.held.token.as_slice(),
                        until(&boot, self.lease)
                    ])
                })
                .map(|rows| rows == 1)
                .map_err(inbox.at("cannot be written"))
        })
    }
}

fn end(done: Sender<()>, beating: thread::JoinHandle<()>) {
    drop(done);
    beating.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

// The work of a message may have been done, though nobody saw its end: another message under its key is none that may
// take over.
fn check_digest(lease: &Stored, message: &Incoming<'_>) -> Result<(), InboxError> {
    if lease.digest == message.envelope.digest.as_bytes() {
        return Ok(());
    }
    Err(InboxError::OtherBody {
        source_name: message.source.into(),
        key: message.envelope.key.as_str().into(),
        taken_at: lease.taken_at.clone(),
    })
}

fn delete(conn: &Connection, held: &Held) -> rusqlite::Result<bool> {
    conn.prepare_cached("DELETE FROM main.inbox_leases WHERE msg_id = ?1 AND token = ?2")?
        .execute(params![held.key, held.token.as_slice()])
        .map(|rows| rows == 1)
}

fn until(now: &BootTime, lease: Duration) -> i64 {
    now.ms.saturating_add(i64::try_from(lease.as_millis()).unwrap_or(i64::MAX))
}

fn token() -> Result<[u8; 16], InboxError> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| {
        InboxError::file(
            std::path::Path::new("the system's random source"),
            "failed",
            std::io::Error::other(error),
        )
    })?;
    Ok(token)
}
