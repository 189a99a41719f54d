//! From what the server and the driver say to what a caller needs to know.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mysql_async::{DriverError, Error, IoError, ServerError};
use onlyonce_core::{StoreError, StoreErrorKind};

/// What went wrong inside the store, before it is known which operations it hits.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    kind: StoreErrorKind,
    detail: String,
    source: Option<Arc<dyn StdError + Send + Sync>>,
    code: u16,
    may_have_applied: bool,
    splits: bool,
    breaks_connection: bool,
}

/// Codes of the server that steer what happens next.
pub(crate) mod code {
    pub(crate) const DUPLICATE: u16 = 1062;
    pub(crate) const LOCK_WAIT: u16 = 1205;
    pub(crate) const DEADLOCK: u16 = 1213;
    /// MariaDB with `innodb_snapshot_isolation`: the row changed after the snapshot of the transaction.
    pub(crate) const CHANGED_SINCE_SNAPSHOT: u16 = 1020;
    pub(crate) const NO_DATABASE: u16 = 1049;
    pub(crate) const NO_TABLE: u16 = 1146;
    pub(crate) const NO_RIGHT: u16 = 1142;
    /// SAVEPOINT … does not exist: the transaction that it was in is over.
    pub(crate) const NO_SAVEPOINT: u16 = 1305;
}

impl Fault {
    pub(crate) fn new(kind: StoreErrorKind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            source: None,
            code: 0,
            may_have_applied: false,
            splits: false,
            breaks_connection: false,
        }
    }

    pub(crate) fn unfit(detail: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unfit, detail)
    }

    /// A record that this release cannot read. Neither scope nor key are named: they may be personal.
    pub(crate) fn unreadable(column: &str) -> Self {
        let detail = format!("a record whose {column} this release cannot read");
        Self { splits: true, ..Self::new(StoreErrorKind::Unreadable, detail) }
    }

    /// Something that cannot be.
    pub(crate) fn internal(detail: &str) -> Self {
        Self { splits: true, ..Self::new(StoreErrorKind::Internal, detail) }
    }

    /// No answer in time: what was sent may be done all the same.
    pub(crate) fn silence(time: Duration) -> Self {
        let detail = format!("no answer within {time:?}");
        Self { may_have_applied: true, breaks_connection: true, ..Self::new(StoreErrorKind::Timeout, detail) }
    }

    /// What was sent was given up, and its answer is not known.
    pub(crate) fn unanswered(detail: impl Into<String>) -> Self {
        let fault = Self::new(StoreErrorKind::Unavailable, detail);
        Self { may_have_applied: true, breaks_connection: true, ..fault }
    }

    /// A deadlock and its like: the whole transaction is gone, and worth another try.
    pub(crate) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Conflict, detail)
    }

    fn no_tls() -> Self {
        let why = "no TLS with the server: its certificate was not accepted, or it speaks another version";
        Self { breaks_connection: true, ..Self::unfit(why) }
    }

    #[must_use]
    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// Nothing that changes anything had been sent yet.
    #[must_use]
    pub(crate) fn before_sending(mut self) -> Self {
        self.may_have_applied = false;
        self
    }

    /// A conflict that another try would not mend.
    #[must_use]
    pub(crate) fn for_good(mut self) -> Self {
        self.kind = StoreErrorKind::Internal;
        self
    }

    pub(crate) fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// The code of the server; 0 when it did not come from there.
    pub(crate) fn code(&self) -> u16 {
        self.code
    }

    /// Whether the connection is of no more use.
    pub(crate) fn breaks_connection(&self) -> bool {
        self.breaks_connection
    }

    /// Whether the transaction is over, and can be run again from its start.
    pub(crate) fn is_conflict(&self) -> bool {
        self.kind == StoreErrorKind::Conflict
    }

    pub(crate) fn is_lock_wait(&self) -> bool {
        self.code == code::LOCK_WAIT
    }

    /// With the place where it was met before its detail.
    #[must_use]
    pub(crate) fn at(mut self, location: &str) -> Self {
        self.detail = format!("{location}: {}", self.detail);
        self
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
        Fault::is_lock_wait(self)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            Error::Server(said) => said.into(),
            Error::Io(IoError::Tls(error)) => Self::no_tls().with_source(error),
            Error::Io(IoError::Io(error))
                if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) =>
            {
                Self::no_tls().with_source(error)
            }
            Error::Io(error) => Self {
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(StoreErrorKind::Unavailable, "the connection to the database broke")
            }
            .with_source(error),
            Error::Driver(error @ DriverError::NoClientSslFlagFromServer) => Self {
                breaks_connection: true,
                ..Self::unfit("the server offers no TLS, and ssl-mode of the URL asks for it")
            }
            .with_source(error),
            Error::Driver(
                error @ (DriverError::UnknownAuthPlugin { .. }
                | DriverError::MysqlOldPasswordDisabled
                | DriverError::CleartextPluginDisabled),
            ) => Self {
                breaks_connection: true,
                ..Self::unfit("the user of the URL authenticates in a way that is not supported")
            }
            .with_source(error),
            Error::Driver(error @ DriverError::ConnectionClosed) => Self {
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(StoreErrorKind::Unavailable, "the server ended the connection")
            }
            .with_source(error),
            // What the driver does not understand it may have half read. Its packets are not kept: they hold values.
            Error::Driver(_) | Error::Other(_) | Error::Url(_) => Self {
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(StoreErrorKind::Internal, "the answer of the database was not understood")
            },
        }
    }
}

impl From<DriverError> for Fault {
    fn from(error: DriverError) -> Self {
        Error::from(error).into()
    }
}

impl From<ServerError> for Fault {
    fn from(said: ServerError) -> Self {
        use StoreErrorKind::*;
        let fault = match said.code {
            code::LOCK_WAIT => Self::new(Timeout, "somebody holds the record locked in an open transaction"),
            code::DEADLOCK => {
                Self::conflict("the transaction met another one in a deadlock and was rolled back")
            }
            code::CHANGED_SINCE_SNAPSHOT => Self::conflict("the record changed after the transaction began"),
            // Written whole by nobody: a statement that is ended is rolled back. Not so a COMMIT.
            1053 | 1077..=1080 | 1152 | 1154..=1161 | 1184 | 1317 | 1927 | 3169 => Self {
                may_have_applied: true,
                breaks_connection: true,
                ..Self::new(Unavailable, "the server ended the statement or the connection")
            },
            1969 | 3024 => Self::new(Timeout, "the statement took longer than the server allows"),
            1040 | 1203 | 1226 => Self {
                breaks_connection: true,
                ..Self::new(Overloaded, "the server takes no more connections")
            },
            1037..=1038 | 1041 => Self::new(Overloaded, "the server has no memory left"),
            1021 | 1114 => Self { splits: true, ..Self::new(Full, "no room left for the table") },
            // Said of many options; of --read-only and --super-read-only as below.
            1290 if !said.message.contains("read-only") => Self {
                splits: true,
                ..Self::new(Internal, "the server runs with an option that refuses the statement")
            },
            1290 | 1792 | 1836 => Self {
                breaks_connection: true,
                ..Self::new(Unavailable, "this server is read-only: a replica, or it was failed over")
            },
            1047 => Self {
                breaks_connection: true,
                ..Self::new(Unavailable, "this server is not ready: its cluster has no quorum")
            },
            1045 | 1130 | 1251 | 1524 | 1698 => Self {
                breaks_connection: true,
                ..Self::unfit("the server refused the user or the password of the URL")
            },
            1044 => Self::unfit("the user of the URL may not use this database"),
            code::NO_DATABASE => Self::unfit("there is no such database; create it first"),
            1142 | 1143 | 1227 | 1370 => Self::unfit(
                "the user of the URL lacks a right; grant SELECT, INSERT, UPDATE and DELETE on its tables",
            ),
            code::NO_TABLE | 1054 => Self::unfit("its tables were changed while it ran"),
            1665 => Self::unfit(
                "the server's binlog_format is STATEMENT, which refuses READ COMMITTED; set it to MIXED or ROW",
            ),
            1153 | 3170 => Self {
                breaks_connection: true,
                splits: true,
                ..Self::new(Internal, "larger than the server's max_allowed_packet; raise it")
            },
            _ => Self { splits: true, ..Self::new(Internal, "the database refused the statement") },
        };
        let code = said.code;
        Self { code, ..fault }.with_source(Said::from(said))
    }
}

/// What the server said. Messages about values are left out: they repeat keys.
#[derive(Debug)]
struct Said {
    code: u16,
    state: String,
    message: Option<String>,
}

impl From<ServerError> for Said {
    fn from(said: ServerError) -> Self {
        let ServerError { code, message, state } = said;
        // 22: data, 23: constraints. A syntax error repeats the statement.
        let of_values = state.starts_with("22") || state.starts_with("23") || code == 1064;
        Self { code, state, message: (!of_values).then_some(message) }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.message.as_deref().unwrap_or("a value was refused");
        write!(f, "{message} (error {}, SQLSTATE {})", self.code, self.state)
    }
}

impl StdError for Said {}

/// One cause, kept whole by each of the operations that it hit.
#[derive(Debug)]
struct Shared(Arc<dyn StdError + Send + Sync>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Shared {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_is_read_only_is_called_a_replica() {
        for (option, kind) in [
            ("--read-only", StoreErrorKind::Unavailable),
            ("--super-read-only", StoreErrorKind::Unavailable),
            ("--max-session-mem-used=8192", StoreErrorKind::Internal),
        ] {
            let message =
                format!("The server is running with the {option} option so it cannot execute this statement");
            let said = ServerError { code: 1290, message, state: "HY000".to_owned() };
            assert_eq!(Fault::from(said).kind(), kind, "{option}");
        }
    }
}
