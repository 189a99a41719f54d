//! From what PostgreSQL says to what a caller needs to know.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{StoreError, StoreErrorKind};
use tokio_postgres::error::SqlState;

/// What went wrong inside the store, before it is known which operations it hits.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    kind: StoreErrorKind,
    detail: String,
    source: Option<Arc<Cause>>,
    may_have_applied: bool,
    splits: bool,
    lock_wait: bool,
    breaks_connection: bool,
}

#[derive(Debug)]
enum Cause {
    Server(ServerSaid),
    Driver(tokio_postgres::Error),
    Other(Box<dyn StdError + Send + Sync>),
}

impl Fault {
    pub(crate) fn new(kind: StoreErrorKind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            source: None,
            may_have_applied: false,
            splits: false,
            lock_wait: false,
            breaks_connection: false,
        }
    }

    /// A record that this release cannot read. Neither scope nor key are named: they may be personal.
    pub(crate) fn unreadable(column: &str) -> Self {
        let detail = format!("a record whose {column} this release cannot read");
        Self { splits: true, ..Self::new(StoreErrorKind::Unreadable, detail) }
    }

    /// Something that cannot be, about one record.
    pub(crate) fn internal(detail: &str) -> Self {
        Self { splits: true, ..Self::new(StoreErrorKind::Internal, detail) }
    }

    /// No answer within this time: what was sent may be done all the same.
    pub(crate) fn silence(time: Duration) -> Self {
        let detail = format!("no answer within {time:?}");
        Self { may_have_applied: true, breaks_connection: true, ..Self::new(StoreErrorKind::Timeout, detail) }
    }

    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(Arc::new(Cause::Other(source.into())));
        self
    }

    /// Says where: the store's location, without secrets.
    pub(crate) fn at(mut self, location: &str) -> Self {
        self.detail = format!("{location}: {}", self.detail);
        self
    }

    /// Nothing had been sent yet.
    pub(crate) fn before_sending(mut self) -> Self {
        self.may_have_applied = false;
        self
    }

    /// The failure of a COMMIT that was sent: unless the server said no, it may be done.
    pub(crate) fn in_commit(mut self) -> Self {
        self.may_have_applied |= self.breaks_connection;
        self
    }

    pub(crate) fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// A conflict that another try would not mend.
    pub(crate) fn for_good(self) -> Self {
        Self { kind: StoreErrorKind::Internal, ..self }
    }

    /// The server's code, where it said one.
    pub(crate) fn code(&self) -> Option<&str> {
        match self.source.as_deref() {
            Some(Cause::Server(said)) => Some(said.code.code()),
            _ => None,
        }
    }

    /// Another transaction went first: this one may be run again from its start.
    pub(crate) fn is_conflict(&self) -> bool {
        self.kind == StoreErrorKind::Conflict
    }

    /// The server says that the transaction is over, or another one than it was.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.code(), Some("25P01" | "3B001"))
    }

    /// Whether the connection is of no more use.
    pub(crate) fn breaks_connection(&self) -> bool {
        self.breaks_connection
    }

    pub(crate) fn into_error(self, operation: &'static str) -> StoreError {
        onlyonce_batch::Fault::error(&Arc::new(self), operation)
    }
}

impl onlyonce_batch::Fault for Fault {
    fn error(self: &Arc<Self>, operation: &'static str) -> StoreError {
        let mut error = StoreError::new(self.kind, operation).with_detail(self.detail.clone());
        if self.may_have_applied {
            error = error.ambiguous();
        }
        match &self.source {
            Some(source) => error.with_source(Shared(Arc::clone(source))),
            None => error,
        }
    }

    fn splits(&self) -> bool {
        self.splits && !self.may_have_applied
    }

    fn is_lock_wait(&self) -> bool {
        self.lock_wait
    }
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(said) => Self::from_server(said.code(), said.message()),
            None if error.is_closed() || is_io(&error) => Self {
                may_have_applied: true,
                breaks_connection: true,
                source: Some(Arc::new(Cause::Driver(error))),
                ..Self::new(StoreErrorKind::Unavailable, "the connection to PostgreSQL broke")
            },
            // Of our own making: a value that cannot be encoded, a column of another type.
            None => Self {
                splits: true,
                source: Some(Arc::new(Cause::Driver(error))),
                ..Self::new(StoreErrorKind::Internal, "PostgreSQL was not understood")
            },
        }
    }
}

#[cfg(feature = "sqlx")]
impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error::*;
        match &error {
            Database(said) => {
                let code = SqlState::from_code(&said.code().unwrap_or_default());
                Self::from_server(&code, said.message())
            }
            Io(_) | Tls(_) | Protocol(_) | PoolClosed | WorkerCrashed => Self {
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(StoreErrorKind::Unavailable, "the connection to PostgreSQL broke")
                    .with_source(error)
            },
            _ => Self { splits: true, ..Self::internal("PostgreSQL was not understood").with_source(error) },
        }
    }
}

impl Fault {
    fn from_server(code: &SqlState, message: &str) -> Self {
        use StoreErrorKind::*;
        let fault = match code.code() {
            "40001" | "40P01" => {
                Self { splits: true, ..Self::new(Conflict, "another transaction went first") }
            }
            "55P03" => Self {
                lock_wait: true,
                ..Self::new(Timeout, "somebody holds the record locked in an open transaction")
            },
            "57014" => Self::new(Timeout, "the statement took too long and was cancelled"),
            "25006" => Self {
                breaks_connection: true,
                ..Self::new(Unavailable, "this server is read-only: a standby, or it was failed over")
            },
            "53100" => Self { splits: true, ..Self::new(Full, "no room left on the server's disk") },
            "53200" => Self {
                splits: true,
                ..Self::new(
                    Overloaded,
                    "the server has no memory left; perhaps max_locks_per_transaction is low",
                )
            },
            "53300" => Self::new(Overloaded, "the server takes no more connections"),
            "26000" | "42P05" | "0A000" => Self {
                breaks_connection: true,
                ..Self::new(
                    Unavailable,
                    "a prepared statement is gone; behind a pooler that lends its connections by transaction add \
                     `prepare=off` to the URL",
                )
            },
            "42501" => Self::new(Unfit, format!("{}; grant this user what it needs", message)),
            "42P01" | "42703" | "3F000" => {
                Self::new(Unfit, format!("{}; its tables were changed while it ran", message))
            }
            "25P01" | "25P02" | "3B001" => {
                Self::new(Internal, "the transaction is over: a statement in it failed before, or ended it")
            }
            "3D000" => Self::new(Unfit, format!("{}; create it first", message)),
            text if text.starts_with("28") => {
                Self::new(Unfit, "the server refused the user or the password of the URL")
            }
            text if text.starts_with("57P") || text.starts_with("08") => Self {
                // The server goes away, and with it the answer whether it had committed.
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(Unavailable, "the server ended the connection")
            },
            text if text.starts_with("22") || text.starts_with("23") || text.starts_with("XX") => {
                Self { splits: true, ..Self::new(Internal, "PostgreSQL refused the statement") }
            }
            _ => Self::new(Internal, "PostgreSQL refused the statement"),
        };
        let said = ServerSaid { code: code.clone(), message: message.into() };
        Self { source: Some(Arc::new(Cause::Server(said))), ..fault }
    }
}

/// Whether an error of some work, or one of its causes, is that another transaction went first.
pub(crate) fn is_conflict(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let code = error.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::code);
        if code.is_some_and(|code| matches!(code.code(), "40001" | "40P01")) {
            return true;
        }
        #[cfg(feature = "sqlx")]
        if let Some(sqlx::Error::Database(said)) = error.downcast_ref()
            && said.code().is_some_and(|code| matches!(&*code, "40001" | "40P01"))
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// The message of the server with its code, without the detail: that holds values, such as keys.
#[derive(Debug)]
struct ServerSaid {
    code: SqlState,
    message: String,
}

impl fmt::Display for ServerSaid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.code.code())
    }
}

impl StdError for ServerSaid {}

fn is_io(error: &tokio_postgres::Error) -> bool {
    error.source().is_some_and(|source| source.is::<std::io::Error>())
}

/// One cause, kept whole by each of the operations that it hit.
#[derive(Debug)]
struct Shared(Arc<Cause>);

impl Shared {
    fn cause(&self) -> &(dyn StdError + 'static) {
        match &*self.0 {
            Cause::Server(said) => said,
            Cause::Driver(error) => error,
            Cause::Other(error) => error.as_ref(),
        }
    }
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.cause(), f)
    }
}

impl StdError for Shared {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause().source()
    }
}
