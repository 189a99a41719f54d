//! Whether a server is fit to keep records: its version, its role, whether it throws keys away, whether it keeps them.

use onlyonce_core::StoreErrorKind;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Pipeline, Value};

use crate::error::Fault;
use crate::open::{Address, Kind, Options, Purpose};

/// What a server said of itself when the connection was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fitness {
    /// Whether records may be thrown away when memory is full; only where that was allowed.
    pub(crate) may_evict: bool,
    pub(crate) durability: Durability,
}

/// What a crash of the server loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Durability {
    /// Every write is synced before it is answered.
    Always,
    /// There is an append-only file, synced later.
    Later,
    /// It did not say.
    Unknown,
    /// Nothing is written before a snapshot.
    Nothing,
}

/// Asks the server, and refuses one that is not fit. Costs one round trip.
pub(crate) async fn check(
    connection: &mut MultiplexedConnection,
    options: &Options,
    address: &Address,
) -> Result<Fitness, Fault> {
    let mut questions = Pipeline::new();
    questions.cmd("HELLO").cmd("INFO").cmd("CONFIG").arg("GET").arg("maxmemory-policy");
    questions.cmd("CONFIG").arg("GET").arg("appendfsync");
    let answers = connection.req_packed_commands(&questions, 0, 4).await.map_err(Fault::unreachable)?;
    let [hello, info, policy, fsync] = answers.as_slice() else {
        return Err(Fault::strange("another number of answers than of commands"));
    };
    if let Value::ServerError(error) = info
        && matches!(error.code(), "LOADING" | "NOAUTH" | "MASTERDOWN" | "BUSY")
    {
        return Err(Fault::refused(error));
    }
    Answers { hello: pairs(hello), info: text(info), policy: pairs(policy), fsync: pairs(fsync) }
        .judge(options, address)
}

struct Answers {
    hello: Vec<(String, String)>,
    // A user without the right to ask gets nothing.
    info: Option<String>,
    policy: Vec<(String, String)>,
    fsync: Vec<(String, String)>,
}

impl Answers {
    fn judge(&self, options: &Options, address: &Address) -> Result<Fitness, Fault> {
        self.check_version(address)?;
        self.check_part(options, address)?;
        let may_evict = self.may_evict(options, address)?;
        Ok(Fitness { may_evict, durability: self.durability() })
    }

    fn check_version(&self, address: &Address) -> Result<(), Fault> {
        let Some(version) = find(&self.hello, "version").or_else(|| self.info("redis_version")) else {
            return Err(Fault::unfit(format!("{address} does not say which version of Redis it is")));
        };
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= 7) {
            return Ok(());
        }
        let why = format!("{address} is Redis {version}; 7.0 or later is needed (SET with NX and GET)");
        Err(Fault::unfit(why))
    }

    /// Whether it is what the URL says.
    fn check_part(&self, options: &Options, address: &Address) -> Result<(), Fault> {
        let mode = find(&self.hello, "mode").or_else(|| self.info("redis_mode")).unwrap_or("standalone");
        let role = find(&self.hello, "role").or_else(|| self.info("role")).unwrap_or("master");
        let why = match (mode, &options.kind) {
            ("cluster", Kind::Single) => "a node of a cluster: write `redis+cluster://`",
            ("cluster", Kind::Sentinel(_)) => {
                "a node of a cluster, which has no Sentinels: write `redis+cluster://`"
            }
            ("sentinel", _) => "a Sentinel, not a server: write `redis+sentinel://…/NAME`",
            ("cluster", Kind::Cluster) => return Ok(()),
            (_, Kind::Cluster) => "not a node of a cluster: write `redis://`",
            _ if role == "master" => return Ok(()),
            (_, Kind::Sentinel(_)) => {
                // The Sentinels have not all heard of the failover yet.
                let why = format!("{address} is not the master any more");
                return Err(Fault::new(StoreErrorKind::Unavailable, why));
            }
            _ => "a replica, which takes no writes: give the master, or `redis+sentinel://`",
        };
        Err(Fault::unfit(format!("{address} is {why}")))
    }

    fn may_evict(&self, options: &Options, address: &Address) -> Result<bool, Fault> {
        let policy = self.info("maxmemory_policy").or_else(|| find(&self.policy, "maxmemory-policy"));
        let why = match policy {
            Some("noeviction") => return Ok(false),
            _ if options.allow_eviction || options.purpose == Purpose::Look => return Ok(true),
            Some(policy) => format!(
                "{address} has maxmemory-policy {policy}: it may throw away a record, and its operation would run \
                 twice. Set noeviction, or say allow_eviction=true"
            ),
            None => format!(
                "{address} does not say whether it evicts keys: give its user INFO (or CONFIG GET), or say \
                 allow_eviction=true; an evicted record is a second run"
            ),
        };
        Err(Fault::unfit(why))
    }

    fn durability(&self) -> Durability {
        match (self.info("aof_enabled"), find(&self.fsync, "appendfsync")) {
            (Some("0"), _) => Durability::Nothing,
            (Some("1"), Some("always")) => Durability::Always,
            (Some("1"), Some(_)) => Durability::Later,
            _ => Durability::Unknown,
        }
    }

    fn info(&self, field: &str) -> Option<&str> {
        let lines = self.info.as_deref()?.lines();
        lines
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| *name == field)
            .map(|(_, value)| value.trim())
    }
}

fn find<'a>(pairs: &'a [(String, String)], wanted: &str) -> Option<&'a str> {
    pairs.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
}

fn pairs(value: &Value) -> Vec<(String, String)> {
    let flat: Vec<String> = match value {
        Value::Array(items) => items.iter().map(|item| text(item).unwrap_or_default()).collect(),
        Value::Map(items) => {
            items.iter().flat_map(|(a, b)| [a, b]).map(|item| text(item).unwrap_or_default()).collect()
        }
        _ => Vec::new(),
    };
    flat.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}
