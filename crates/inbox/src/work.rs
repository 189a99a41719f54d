//! What is done with a message that is new: nothing but its record, or work of the caller's.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onlyonce_store_sqlite::rusqlite::Connection;

use crate::error::InboxError;
use crate::receive::Incoming;

/// What is done with a new message.
#[derive(Debug, Default)]
pub enum Work {
    /// Its record, and nothing else: the response is [`Envelope::default_response`](crate::Envelope::default_response).
    #[default]
    RecordAlone,
    /// Work in the same transaction as the record: both, or neither.
    InTransaction(Box<dyn TransactionWork>),
    /// Work elsewhere, at least once: under a lease, with a key to tell a second attempt by.
    Leased(Leased),
}

impl Work {
    /// Whether it looks at the bodies of messages.
    pub(crate) fn needs_body(&self) -> bool {
        !matches!(self, Self::RecordAlone)
    }
}

/// Work on the database that holds the record.
pub trait TransactionWork: fmt::Debug + Send {
    /// Does the work, inside the transaction that records the message. What it wrote is kept where it answers
    /// [`Ending::Done`], and taken back otherwise.
    ///
    /// # Errors
    /// Those of infrastructure: nothing is recorded, and the message may be received again.
    fn run(&self, conn: &Connection, message: &Incoming<'_>) -> Result<Ending, InboxError>;
}

/// Work outside of the database.
///
/// # Guarantees
/// One lease at a time, by the boot clock of the machine, under any number of processes. The row of `inbox_log` is written
/// when the work has ended, in the transaction that removes the lease. After a crash a later delivery takes over when the
/// lease has ended, with the same key: the handler may see a message twice, and has its key to know it by.
#[derive(Debug)]
pub struct Leased {
    pub(crate) handler: Box<dyn Handler>,
    pub(crate) lease: Duration,
    pub(crate) stop: Arc<AtomicBool>,
}

impl Leased {
    /// With a lease of 30 s, renewed while the handler runs.
    pub fn new(handler: impl Handler + 'static) -> Self {
        Self { handler: Box::new(handler), lease: Duration::from_secs(30), stop: Arc::default() }
    }

    /// How long a lease holds that nobody renews: after a crash a message waits as long. A second at least, an hour at most.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_secs(1), Duration::from_secs(3600));
        self
    }

    /// Once this is true, the handler that runs is ended and no other is started.
    #[must_use]
    pub fn stop_when(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }
}

/// Does the work of a message outside of the database.
pub trait Handler: fmt::Debug + Send {
    /// Does the work, and looks at [`Call::stop`] meanwhile.
    ///
    /// # Errors
    /// Those of infrastructure: nothing is recorded, and the message may be received again.
    fn handle(&self, call: &Call<'_>) -> Result<Ending, InboxError>;
}

/// One run of a handler.
#[derive(Debug)]
pub struct Call<'c> {
    /// The message. Its key is the same for every attempt.
    pub message: &'c Incoming<'c>,
    /// 1, and more when an attempt before this one was not seen to end.
    pub attempt: u32,
    /// Whether to go on.
    pub stop: Stop<'c>,
}

/// Whether a handler may go on.
#[derive(Debug)]
pub struct Stop<'c> {
    pub(crate) asked: &'c AtomicBool,
    pub(crate) lost: &'c AtomicBool,
}

impl Stop<'_> {
    /// Why to end at once; `None` as long as the work may go on.
    pub fn reason(&self) -> Option<&'static str> {
        match () {
            () if self.asked.load(Ordering::Relaxed) => Some("it was interrupted"),
            () if self.lost.load(Ordering::Relaxed) => Some("its lease could not be renewed"),
            () => None,
        }
    }
}

/// How work ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is done; every copy of the message is answered with this line.
    Done(String),
    /// It failed and always will: recorded as `failed`, and every copy is answered with this line.
    Failed(String),
    /// It may succeed another time: nothing is recorded. Why, for people.
    Transient(String),
}
