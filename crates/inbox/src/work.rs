//! What is done with a message that is new: nothing but its record, or work of the caller's.

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
}

impl Work {
    /// Whether it looks at the bodies of messages.
    pub(crate) fn needs_body(&self) -> bool {
        !matches!(self, Self::RecordAlone)
    }
}

/// Work on the database that holds the record.
pub trait TransactionWork: std::fmt::Debug + Send {
    /// Does the work, inside the transaction that records the message. What it wrote is kept where it answers
    /// [`Ending::Done`], and taken back otherwise.
    ///
    /// # Errors
    /// Those of infrastructure: nothing is recorded, and the message may be received again.
    fn run(&self, conn: &Connection, message: &Incoming<'_>) -> Result<Ending, InboxError>;
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
