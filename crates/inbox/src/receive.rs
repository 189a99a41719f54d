//! Receiving one message: the insert decides whether it is new.

use std::fmt;
use std::sync::atomic::AtomicBool;

use onlyonce_core::{Clock, CrashPoint, SystemClock, crash_point};
use onlyonce_store_sqlite::rusqlite::{self, Connection, ErrorCode, OptionalExtension, params};

use crate::envelope::{BodyDigest, Envelope};
use crate::error::InboxError;
use crate::inbox::Inbox;
use crate::table::{self, INSERT_DELIVERY, INSERT_ROW};
use crate::work::{Ending, Work};

static NEVER: AtomicBool = AtomicBool::new(false);

/// A message on its way in.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'m> {
    /// What it says about itself.
    pub envelope: &'m Envelope,
    /// By which path it came. Told, never guessed.
    pub via: Via,
    /// The file that it was in, for people.
    pub source: &'m str,
    /// Its text as it came; empty in a bulk load whose work does not look at it.
    pub body: &'m [u8],
}

/// The path by which a message came: retry after a time-out, redelivery by a queue, sent again by hand, a batch run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// The sender saw no answer and sent again.
    Retry,
    /// A queue delivered it, perhaps again.
    Queue,
    /// Somebody sent it by hand.
    Manual,
    /// A batch sent it, perhaps run again.
    Batch,
    /// Nobody said.
    Unknown,
}

/// What holds for all messages of one write transaction.
pub(crate) struct Turn {
    /// Its time.
    now: String,
    /// Whether any message is being worked on. Nearly always none is, and nobody can begin meanwhile.
    has_leases: bool,
}

/// What became of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// New, known, or failed.
    pub verdict: Verdict,
    /// The stored response, byte for byte as the first delivery was answered.
    pub response: Vec<u8>,
}

/// Whether a message was new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// New, and done.
    Applied,
    /// New; the work failed for good, and that is recorded.
    Failed,
    /// Known: nothing was done.
    Duplicate(Body),
}

/// The body of a message whose key is known, against that of the first delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The same message again.
    Same,
    /// Another message under the same key: a conflict.
    Different,
    /// The first delivery is not in the log, so nobody can tell.
    Unknown,
}

impl Via {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Retry, Self::Queue, Self::Manual, Self::Batch, Self::Unknown];

    /// As it is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Queue => "queue",
            Self::Manual => "manual",
            Self::Batch => "batch",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Body {
    /// `same`, `different` or `unknown`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Different => "different",
            Self::Unknown => "unknown",
        }
    }
}

impl Verdict {
    /// As the delivery log has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Failed => "failed",
            Self::Duplicate(Body::Different) => "conflict",
            Self::Duplicate(_) => "duplicate",
        }
    }
}

impl Inbox {
    /// Receives a message with work of the caller's on the same database: the closure runs if the key is new, inside the
    /// transaction that records the message, and is not called for a copy.
    ///
    /// ```
    /// use onlyonce_inbox::{Ending, Envelope, Inbox, Incoming, Keys, Place, Receipt, Verdict, Via};
    ///
    /// type Error = Box<dyn std::error::Error>;
    ///
    /// /// Books a payment once, however often the message comes.
    /// fn book(inbox: &Inbox, text: &[u8]) -> Result<Receipt, Error> {
    ///     let envelope = Envelope::read(text, &Keys::default(), Place::start_of("queue"))?;
    ///     let message = Incoming { envelope: &envelope, via: Via::Queue, source: "queue", body: text };
    ///     inbox.receive(&message, |tx, message| {
    ///         let payment: serde_json::Value = serde_json::from_slice(message.body)?;
    ///         let amount = payment["amount"].as_i64().ok_or("no amount")?;
    ///         let booked = tx.execute(
    ///             "UPDATE accounts SET balance = balance - ?1 WHERE id = 1 AND balance >= ?1",
    ///             [amount],
    ///         )?;
    ///         Ok::<_, Error>(match booked {
    ///             1 => Ending::Done(format!(r#"{{"booked":{amount}}}"#)),
    ///             _ => Ending::Failed(r#"{"error":"not enough money"}"#.into()),
    ///         })
    ///     })
    /// }
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("bank.db");
    /// let inbox = Inbox::open(&path)?;
    /// # use onlyonce_store_sqlite::rusqlite;
    /// let bank = rusqlite::Connection::open(&path)?;
    /// bank.execute_batch("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER); INSERT INTO accounts VALUES (1, 150)")?;
    ///
    /// let text = br#"{"msg_id":"P-1","order_no":"O-7","amount":100}"#;
    /// let first = book(&inbox, text)?;
    /// let second = book(&inbox, text)?;
    /// assert_eq!(first.verdict, Verdict::Applied);
    /// assert!(matches!(second.verdict, Verdict::Duplicate(_)));
    /// assert_eq!(second.response, first.response);
    ///
    /// // A failure for good is recorded too, and nothing of its work is kept.
    /// let third = book(&inbox, br#"{"msg_id":"P-2","amount":100}"#)?;
    /// assert_eq!(third.verdict, Verdict::Failed);
    /// let balance: i64 = bank.query_row("SELECT balance FROM accounts", [], |row| row.get(0))?;
    /// assert_eq!(balance, 50);
    ///
    /// // An error leaves no record: the message is new when it comes again.
    /// assert!(book(&inbox, br#"{"msg_id":"P-3"}"#).is_err());
    /// assert_eq!(inbox.rows_of("P-3")?, 0);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Guarantees
    /// The constraint on `msg_id` decides, so that of any number of copies at once one is applied. The record, the delivery
    /// log and what the closure wrote are in one transaction, synced before this returns: all of it, or nothing. What it wrote is
    /// taken back where it answers [`Ending::Failed`] or [`Ending::Transient`]. It must leave the transaction open.
    ///
    /// # Errors
    /// Those of the closure, and [`InboxError`]; the database is as it was.
    pub fn receive<E: From<InboxError>>(
        &self,
        message: &Incoming<'_>,
        work: impl FnOnce(&Connection, &Incoming<'_>) -> Result<Ending, E>,
    ) -> Result<Receipt, E> {
        let since = SystemClock.boot();
        let mut work = Some(work);
        // Its errors pass through the transaction beside its own.
        let mut theirs = None;
        loop {
            let received = self.write(|conn| {
                let now = table::now(conn).map_err(self.at("cannot be read"))?;
                let receipt = self.record_with(
                    conn,
                    message,
                    |conn, message| match work.take().map(|work| work(conn, message)) {
                        Some(Ok(ending)) => Ok(ending),
                        Some(Err(error)) => {
                            theirs = Some(error);
                            Ok(Ending::Transient(String::new()))
                        }
                        None => Ok(Ending::Transient("its work was begun before".into())),
                    },
                    &now,
                )?;
                self.log(conn, message, receipt.verdict, &now)?;
                Ok(receipt)
            });
            match received {
                Err(InboxError::Taken { .. }) => self.wait_for_lease(message, since, &NEVER)?,
                received => {
                    return match theirs {
                        Some(error) => Err(error),
                        None => Ok(received?),
                    };
                }
            }
        }
    }

    /// Receives a message with work that is chosen at run time: applies it if its key is new, and answers with the stored
    /// response if it is not.
    ///
    /// # Guarantees
    /// The constraint on `msg_id` decides, so that of any number of copies at once one is applied. Record, delivery log and
    /// what [`Work::InTransaction`] wrote are in one transaction, synced before this returns. Of [`Work::Leased`] see
    /// [`Leased`](crate::Leased).
    ///
    /// # Errors
    /// [`InboxError`]; the database is as it was, unless it is [`InboxError::NotRecorded`].
    pub fn receive_with(&self, message: &Incoming<'_>, work: &Work) -> Result<Receipt, InboxError> {
        if let Work::Leased(work) = work {
            return self.receive_leased(message, work);
        }
        let since = SystemClock.boot();
        loop {
            let received = self.write(|conn| {
                let turn = self.turn(conn)?;
                self.receive_in(conn, message, work, &turn)
            });
            match received {
                // A handler works on it: its end is waited for outside of the transaction, which would keep it from it.
                Err(InboxError::Taken { .. }) => self.wait_for_lease(message, since, &NEVER)?,
                received => return received,
            }
        }
    }

    /// Looks, inside a write transaction, at what holds for all of its messages.
    pub(crate) fn turn(&self, conn: &Connection) -> Result<Turn, InboxError> {
        let now = table::now(conn).map_err(self.at("cannot be read"))?;
        let has_leases = conn
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM main.inbox_leases)")
            .and_then(|mut look| look.query_row([], |row| row.get(0)))
            .map_err(self.at("cannot be read"))?;
        Ok(Turn { now, has_leases })
    }

    /// The same inside the write transaction of `turn`, without work under a lease. After an error of the message alone
    /// ([`InboxError::is_of_the_message`]) the transaction is sound and the message left no trace in it.
    pub(crate) fn receive_in(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        work: &Work,
        turn: &Turn,
    ) -> Result<Receipt, InboxError> {
        let now = &turn.now;
        let receipt = match work {
            Work::InTransaction(work) => self.record_with(conn, message, |c, m| work.run(c, m), now)?,
            Work::RecordAlone | Work::Leased(_) if !turn.has_leases => self.record(conn, message, now)?,
            Work::RecordAlone | Work::Leased(_) => {
                let done = |_: &Connection, message: &Incoming<'_>| {
                    Ok(Ending::Done(message.envelope.default_response()))
                };
                self.record_with(conn, message, done, now)?
            }
        };
        self.log(conn, message, receipt.verdict, now)?;
        Ok(receipt)
    }

    fn record(&self, conn: &Connection, message: &Incoming<'_>, now: &str) -> Result<Receipt, InboxError> {
        let response = message.envelope.default_response();
        match self.insert(conn, message, "done", &response, now)? {
            true => Ok(Receipt { verdict: Verdict::Applied, response: response.into_bytes() }),
            false => self.known(conn, message),
        }
    }

    // The row comes first, so that the constraint decides before any work; its response follows.
    fn record_with(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        work: impl FnOnce(&Connection, &Incoming<'_>) -> Result<Ending, InboxError>,
        now: &str,
    ) -> Result<Receipt, InboxError> {
        let failed = || self.at("cannot be written");
        conn.execute_batch("SAVEPOINT inbox_message").map_err(failed())?;
        let received = self.work_in_savepoint(conn, message, work, now);
        if conn.is_autocommit() {
            let reason = "the work ended the transaction that it was given";
            let reason = format!("{reason}: what it wrote after that may be kept without a record");
            return Err(received.err().unwrap_or(InboxError::Unfit { path: self.path().into(), reason }));
        }
        if received.is_err() {
            conn.execute_batch("ROLLBACK TO inbox_message").map_err(failed())?;
        }
        conn.execute_batch("RELEASE inbox_message").map_err(failed())?;
        received
    }

    fn work_in_savepoint(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        work: impl FnOnce(&Connection, &Incoming<'_>) -> Result<Ending, InboxError>,
        now: &str,
    ) -> Result<Receipt, InboxError> {
        let failed = || self.at("cannot be written");
        if !self.insert(conn, message, "done", &message.envelope.default_response(), now)? {
            return self.known(conn, message);
        }
        self.heed_lease(conn, message)?;
        conn.execute_batch("SAVEPOINT inbox_work").map_err(failed())?;
        crash_point(CrashPoint::InboxRow);
        let worked = work(conn, message)?;
        crash_point(CrashPoint::InboxWork);
        let (verdict, status, response) = match worked {
            Ending::Done(response) => (Verdict::Applied, "done", response),
            Ending::Failed(response) => {
                conn.execute_batch("ROLLBACK TO inbox_work").map_err(failed())?;
                (Verdict::Failed, "failed", response)
            }
            Ending::Transient(reason) => {
                return Err(InboxError::Transient { source_name: message.source.into(), reason });
            }
        };
        let sql = "UPDATE main.inbox_log SET status = ?2, response = ?3 WHERE msg_id = ?1";
        let key = message.envelope.key.as_str();
        conn.prepare_cached(sql)
            .and_then(|mut update| update.execute(params![key, status, response]))
            .map_err(failed())?;
        conn.execute_batch("RELEASE inbox_work").map_err(failed())?;
        Ok(Receipt { verdict, response: response.into_bytes() })
    }

    /// Whether the row is new.
    pub(crate) fn insert(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        status: &str,
        response: &str,
        now: &str,
    ) -> Result<bool, InboxError> {
        let Envelope { key, biz_key, .. } = message.envelope;
        let inserted = conn
            .prepare_cached(INSERT_ROW)
            .and_then(|mut insert| insert.execute(params![key.as_str(), biz_key, status, response, now]));
        match inserted {
            Ok(rows) => Ok(rows == 1),
            Err(error) if is_of_the_row(&error) => {
                Err(InboxError::Constraint { source_name: message.source.into(), reason: error.to_string() })
            }
            Err(error) => Err(self.error("cannot be written", error)),
        }
    }

    /// The receipt of a message whose key is in the table.
    pub(crate) fn known(&self, conn: &Connection, message: &Incoming<'_>) -> Result<Receipt, InboxError> {
        let key = message.envelope.key.as_str();
        let read = || -> rusqlite::Result<_> {
            let sql = "SELECT response FROM main.inbox_log WHERE msg_id = ?1";
            let response =
                conn.prepare_cached(sql)?.query_row([key], |row| table::bytes(row, 0)).optional()?;
            Ok((response, first_digest(conn, key)?))
        };
        let (response, first) = read().map_err(self.at("cannot be read"))?;
        let Some(response) = response else {
            return Err(InboxError::Constraint {
                source_name: message.source.into(),
                reason: "a trigger ignored it".into(),
            });
        };
        let body = match first {
            None => Body::Unknown,
            Some(first) if first == message.envelope.digest.as_bytes() => Body::Same,
            Some(_) => Body::Different,
        };
        let response = response.unwrap_or_else(|| b"null".to_vec());
        Ok(Receipt { verdict: Verdict::Duplicate(body), response })
    }

    /// Adds the delivery to the log.
    pub(crate) fn log(
        &self,
        conn: &Connection,
        message: &Incoming<'_>,
        verdict: Verdict,
        now: &str,
    ) -> Result<(), InboxError> {
        let Envelope { key, digest, .. } = message.envelope;
        let digest: &BodyDigest = digest;
        let row = params![
            key.as_str(),
            verdict.as_str(),
            message.via.as_str(),
            message.source,
            digest.as_bytes().as_slice(),
            now
        ];
        conn.prepare_cached(INSERT_DELIVERY)
            .and_then(|mut insert| insert.execute(row))
            .map(|_| ())
            .map_err(self.at("cannot be written"))
    }
}

// Of the last delivery that made a row: an earlier one belongs to a row that was purged or forgotten.
fn first_digest(conn: &Connection, key: &str) -> rusqlite::Result<Option<Vec<u8>>> {
    conn.prepare_cached(
        "SELECT digest FROM main.inbox_deliveries WHERE msg_id = ?1 AND verdict IN ('applied', 'failed')
         ORDER BY id DESC LIMIT 1",
    )?
    .query_row([key], |row| row.get(0))
    .optional()
}

fn is_of_the_row(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig)
    )
}
