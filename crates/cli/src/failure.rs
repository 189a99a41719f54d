//! How a command fails: one line on standard error, and an exit code.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::io;
use std::process::ExitCode;

use onlyonce_core::{InvalidName, StoreError};
use onlyonce_inbox::{ErrorKind, InboxError};

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Refused or not found; nothing was changed. Exit code 1.
    Refused(String),
    /// The command line is wrong in a way that only the command can tell. Exit code 2.
    Usage(String),
    /// A check found that a promise does not hold; its report says which. Exit code 1, nothing more is said.
    Found,
    /// Nobody answers where a check was to send. Exit code 3.
    Unreachable(String),
    /// A message, a table or a file is not what it must be. Exit code 65, as `EX_DATAERR`.
    Data(String),
    /// Nothing was changed, and the next try may succeed. Exit code 75, as `EX_TEMPFAIL`.
    Transient(String),
    /// The store, a file or the terminal failed. Exit code 74, as `EX_IOERR` of sysexits.
    Io(String),
    /// Said already, in another form. With its exit code.
    Told(u8),
    /// Whoever read our output has had enough: not a failure.
    ReaderGone,
}

impl Failure {
    /// An I/O failure, with what was being done and every cause.
    pub(crate) fn io(doing: &str, error: &(dyn Error + 'static)) -> Self {
        Self::Io(format!("{doing}: {}", chain(error)))
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused(_) | Self::Found => 1,
            Self::Usage(_) => 2,
            Self::Data(_) => 65,
            Self::Transient(_) => 75,
            Self::Io(_) => 74,
            Self::Unreachable(_) => 3,
            Self::Told(code) => *code,
            Self::ReaderGone => 0,
        }
    }

    /// Prints the line and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        if !matches!(self, Self::Found | Self::Told(_) | Self::ReaderGone) {
            eprintln!("error: {self}");
        }
        ExitCode::from(self.code())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused(message)
            | Self::Usage(message)
            | Self::Data(message)
            | Self::Transient(message)
            | Self::Unreachable(message)
            | Self::Io(message) => message,
            Self::Found => "a promise does not hold",
            Self::Told(_) => "said before",
            Self::ReaderGone => "nobody reads the output",
        })
    }
}

// The error and each of its causes.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut message = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        write!(message, ": {cause}").expect("a String takes any text");
        next = cause.source();
    }
    message
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Io(chain(&error))
    }
}

impl From<InboxError> for Failure {
    fn from(error: InboxError) -> Self {
        let message = chain(&error);
        match error.kind() {
            ErrorKind::Data => Self::Data(message),
            ErrorKind::Io => Self::Io(message),
            ErrorKind::Transient => Self::Transient(message),
        }
    }
}

// The only plain I/O of a command is its output.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ReaderGone,
            _ => Self::io("standard output", &error),
        }
    }
}

impl From<InvalidName> for Failure {
    fn from(error: InvalidName) -> Self {
        Self::Usage(error.to_string())
    }
}
