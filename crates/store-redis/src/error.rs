//! From what Redis and its driver say to a [`StoreError`].

use std::borrow::Cow;

use onlyonce_core::{StoreError, StoreErrorKind};
use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind};

use crate::open::Address;
use crate::rights::NEEDED;
use crate::row::Unreadable;

/// A failure on the way, not yet tied to a method of the store.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: StoreErrorKind,
    detail: Cow<'static, str>,
    source: Option<RedisError>,
    /// Whether the command may have been carried out.
    pub(crate) sent: bool,
}

impl Fault {
    pub(crate) fn new(kind: StoreErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, detail: detail.into(), source: None, sent: false }
    }

    pub(crate) fn unfit(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StoreErrorKind::Unfit, detail)
    }

    /// An answer that makes no sense.
    pub(crate) fn strange(what: &'static str) -> Self {
        Self::new(StoreErrorKind::Internal, format!("an answer that makes no sense: {what}"))
    }

    /// The connection failed; what was sent on it may have been carried out.
    pub(crate) fn lost(error: RedisError) -> Self {
        let kind = if error.is_timeout() { StoreErrorKind::Timeout } else { StoreErrorKind::Unavailable };
        Self { kind, detail: "the connection failed".into(), source: Some(error), sent: true }
    }

    /// No connection came about, so nothing was sent.
    pub(crate) fn unreachable(error: RedisError) -> Self {
        let kind = match error.kind() {
            ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => StoreErrorKind::Unfit,
            ErrorKind::Server(ServerErrorKind::NoPerm) => StoreErrorKind::Unfit,
            _ => StoreErrorKind::Unavailable,
        };
        Self { kind, detail: "no connection".into(), source: Some(error), sent: false }
    }

    /// The server carried nothing out, and said why.
    pub(crate) fn refused(error: &ServerError) -> Self {
        use StoreErrorKind::{Full, Internal, Unavailable, Unfit, Unreadable};
        // A script that may not call a command fails with a code that says nothing.
        let acl = error
            .details()
            .is_some_and(|said| said.contains("ACL failure") || said.contains("user executing"));
        if acl || error.code() == "NOPERM" {
            let why =
                format!("the Redis user lacks a permission that the store needs; in all it needs {NEEDED}");
            return Self { source: Some(error.clone().into()), ..Self::unfit(why) };
        }
        let (kind, detail) = match error.code() {
            "OOM" => (Full, "Redis has no memory left (maxmemory): raise it, or shorten the retention"),
            "WRONGTYPE" => (Unreadable, "a key of ours holds something that is no record"),
            "NOAUTH" | "WRONGPASS" => (Unfit, "Redis wants another user or password"),
            "MISCONF" => (Unavailable, "Redis takes no writes, for it cannot save to its disk"),
            "NOREPLICAS" => (Unavailable, "Redis takes no writes, for it has too few replicas"),
            "LOADING" => (Unavailable, "Redis is loading its data"),
            "READONLY" => (Unavailable, "the server is a replica now"),
            "CLUSTERDOWN" | "TRYAGAIN" | "MASTERDOWN" | "MOVED" | "ASK" => {
                (Unavailable, "the cluster does not serve this slot at the moment")
            }
            "NOSCRIPT" => {
                (Unavailable, "somebody takes the scripts of Redis away again and again (SCRIPT FLUSH)")
            }
            "UNBLOCKED" => (Unavailable, "Redis gave up waiting for its replicas"),
            "BUSY" => (Unavailable, "Redis is busy with a script of somebody"),
            "CROSSSLOT" => (Unfit, "the keys are not in one slot of the cluster"),
            _ => (Internal, "Redis refused a command"),
        };
        Self { kind, detail: detail.into(), source: Some(error.clone().into()), sent: false }
    }

    /// What is wrong, in words.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// Says which server it is about.
    pub(crate) fn at(self, address: &Address) -> Self {
        let server = address.to_string();
        if self.detail.contains(&server) {
            return self;
        }
        Self { detail: format!("{server}: {}", self.detail).into(), ..self }
    }

    /// Says whether the command may have been carried out.
    pub(crate) fn with_sent(self, sent: bool) -> Self {
        Self { sent, ..self }
    }

    /// Whether it may go away by itself.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable | StoreErrorKind::Timeout)
    }

    pub(crate) fn unreadable(name: &str, why: &Unreadable) -> Self {
        let detail = match why {
            Unreadable::Foreign => format!("{name:?} holds something that is no record of ours"),
            Unreadable::Version(version) => {
                format!("{name:?} was written in form {version}, which this release does not know")
            }
            Unreadable::Broken(part) => format!("the record {name:?} cannot be read: {part}"),
            Unreadable::Another => format!("{name:?} holds the record of another operation"),
            Unreadable::NoTtl => {
                format!("the record {name:?} has no time to live any more; give it one by PEXPIRE")
            }
        };
        Self::new(StoreErrorKind::Unreadable, detail)
    }

    pub(crate) fn into_error(self, operation: &'static str, location: &str) -> StoreError {
        let mut error =
            StoreError::new(self.kind, operation).with_detail(format!("{location}: {}", self.detail));
        if let Some(source) = self.source {
            error = error.with_source(Said::of(&source));
        }
        if self.sent { error.ambiguous() } else { error }
    }
}

/// A cause in one line. The driver's own errors name what is below them, and have it below them once more; where the
/// other side is no Redis they are its parser's notes.
#[derive(Debug)]
struct Said(String);

impl Said {
    fn of(error: &RedisError) -> Self {
        match error.kind() {
            ErrorKind::Parse => Self("what answers there does not speak the protocol of Redis".into()),
            _ => Self(error.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ")),
        }
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Said {}
