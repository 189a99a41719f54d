//! What is to be done.

use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

/// A run, before it is made.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is put to the proof.
    pub target: Target,
    /// The number that decides all that is random.
    pub seed: u64,
    /// How long it is broken.
    pub breaking: Duration,
    /// How long it may take to converge afterwards.
    pub healing: Duration,
    /// After so much of it everything is healed, judged, and forgotten but for some operations, and goes on: a run of any
    /// length takes the memory of one round.
    pub round: Duration,
    /// Callers at work at the same time.
    pub callers: usize,
    /// So many operations are begun each second at most, by all callers together; as many as they can, if `None`.
    pub rate: Option<NonZeroU32>,
    /// With these faults; none of them: nothing is broken.
    pub faults: Vec<Fault>,
}

/// What is put to the proof.
#[derive(Clone, Debug)]
pub enum Target {
    /// Gateways that are started, on one store, before a ledger of our own.
    Gateways(Gateways),
    /// An inbox: each delivery is a process of its own, which is killed and stopped.
    Inbox(Inbox),
    /// A server that is there: only its answers are judged, and only clients misbehave.
    Server {
        /// Its authority, such as `127.0.0.1:8080`.
        authority: String,
        /// The path that is posted to.
        path: String,
    },
}

/// How gateways are started.
#[derive(Clone, Debug)]
pub struct Gateways {
    /// The program `onlyonce`.
    pub program: PathBuf,
    /// Where the work is done.
    pub work_at: WorkAt,
    /// The store, as `--store` takes it.
    pub store: String,
    /// How many.
    pub count: usize,
    /// The lease of each.
    pub lease: Duration,
    /// What they do with an outcome that nobody knows.
    pub on_unknown: OnUnknown,
    /// What their environment has on top.
    pub environment: Vec<(String, String)>,
    /// Where they run, and where a SQLite file without a folder is.
    pub folder: PathBuf,
    /// A shell command that restarts the store, or kills and starts it. [`Fault::RestartStore`] needs it.
    pub restart_store: Option<String>,
}

/// Where the work of a gateway is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkAt {
    /// At an upstream, before which the gateways are proxies: at most once, or with one answer for all.
    #[default]
    Upstream,
    /// In a transaction of the store's own database, by a server that is the program itself: exactly once.
    Transaction,
}

impl WorkAt {
    /// What a server is called, of which the work is done there.
    pub fn of(self) -> &'static str {
        match self {
            Self::Upstream => "gateway",
            Self::Transaction => "shop",
        }
    }
}

/// So many rows at once are read from servers that write them into the store's own database.
pub const LEDGER_PAGE: usize = 1000;

/// How messages are delivered to an inbox.
#[derive(Clone, Debug)]
pub struct Inbox {
    /// The program `onlyonce`.
    pub program: PathBuf,
    /// What is done with each message.
    pub work: Work,
    /// The lease of [`Work::Exec`].
    pub lease: Duration,
    /// Where the database and the messages are.
    pub folder: PathBuf,
}

/// What an inbox does with a new message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A statement, in the transaction of the record: exactly once.
    #[default]
    Sql,
    /// A command: at least once, with one response for all.
    Exec,
}

impl Work {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sql => "sql",
            Self::Exec => "exec",
        }
    }
}

/// What is done with an operation whose outcome nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnUnknown {
    /// It is not run again: at most once.
    #[default]
    Hold,
    /// It runs again after the lease: at least once, with one answer for all.
    Retry,
}

impl OnUnknown {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Retry => "retry",
        }
    }
}

/// What the nemesis does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// `kill -9` of a gateway, and a new one in its place; or of a process that delivers a message.
    Kill,
    /// A gateway, or a process that delivers a message, is stopped for longer than its lease, and goes on.
    Pause,
    /// The store is restarted.
    RestartStore,
    /// The connections of a gateway to its store break; or nothing passes, for longer than a lease.
    Cut,
    /// A change of the store is made, and its answer does not arrive.
    LoseReply,
    /// Everything between a gateway and its store takes longer.
    Slow,
}

impl Fault {
    /// Each of them.
    pub const ALL: [Self; 6] =
        [Self::Kill, Self::Pause, Self::RestartStore, Self::Cut, Self::LoseReply, Self::Slow];

    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::RestartStore => "restart-store",
            Self::Cut => "cut",
            Self::LoseReply => "lose-reply",
            Self::Slow => "slow",
        }
    }

    /// Whether it is a fault of the network to the store.
    pub fn is_of_network(self) -> bool {
        matches!(self, Self::Cut | Self::LoseReply | Self::Slow)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|fault| fault.name() == text);
        found.ok_or_else(|| format!("not a fault; there are {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// A plan that cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The store is a file or in memory: there is no network to break.
    #[error("{0} needs a store behind a network, with one address in its URL")]
    NoNetwork(Fault),
    /// Nobody knows how to restart the store.
    #[error("restart-store needs a command that restarts it")]
    NoRestart,
    /// The effect and the record have no transaction in common.
    #[error("a transaction of record and effect needs SQLite, PostgreSQL, MySQL or MariaDB")]
    NoTransaction,
    /// Records in memory are gone with their process.
    #[error("records in memory do not outlive a gateway, and are not shared: name another store")]
    NotShared,
    /// Of an inbox each delivery is a process, on a file.
    #[error("{0} is of no use with an inbox: there are kill and pause")]
    NotOfInbox(Fault),
    /// Against a server that is there nothing is broken but its clients.
    #[error("{0} is of use with gateways of our own alone")]
    NotOurs(Fault),
    /// A number that makes no sense.
    #[error("at least one gateway and one caller")]
    Nobody,
    /// Rounds in which nothing can happen.
    #[error("a round is a second or more")]
    ShortRound,
}

impl Plan {
    /// Whether it can be carried out.
    ///
    /// # Errors
    /// With the reason.
    pub fn check(&self) -> Result<(), PlanError> {
        if self.round < Duration::from_secs(1) {
            return Err(PlanError::ShortRound);
        }
        match &self.target {
            Target::Server { .. } => match self.faults.first() {
                Some(fault) => Err(PlanError::NotOurs(*fault)),
                None if self.callers == 0 => Err(PlanError::Nobody),
                None => Ok(()),
            },
            Target::Inbox(_) => {
                let other = self.faults.iter().find(|fault| !matches!(fault, Fault::Kill | Fault::Pause));
                match other {
                    Some(fault) => Err(PlanError::NotOfInbox(*fault)),
                    None if self.callers == 0 => Err(PlanError::Nobody),
                    None => Ok(()),
                }
            }
            Target::Gateways(gateways) => {
                if gateways.count == 0 || self.callers == 0 {
                    return Err(PlanError::Nobody);
                }
                if gateways.store.starts_with("memory:") {
                    return Err(PlanError::NotShared);
                }
                if gateways.work_at == WorkAt::Transaction && gateways.store.starts_with("redis") {
                    return Err(PlanError::NoTransaction);
                }
                let network = store_address(&gateways.store).is_some();
                for fault in &self.faults {
                    match fault {
                        fault if fault.is_of_network() && !network => {
                            return Err(PlanError::NoNetwork(*fault));
                        }
                        Fault::RestartStore if gateways.restart_store.is_none() => {
                            return Err(PlanError::NoRestart);
                        }
                        _ => {}
                    }
                }
                Ok(())
            }
        }
    }
}

/// The `host:port` of a store's URL, and where in the URL it is. `None` where there is none, or more than one.
pub(crate) fn store_address(url: &str) -> Option<(std::ops::Range<usize>, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let default = match scheme {
        "postgres" | "postgresql" => 5432,
        "mysql" | "mariadb" => 3306,
        "redis" | "rediss" => 6379,
        _ => return None,
    };
    let begin = scheme.len() + 3;
    let authority = &rest[..rest.find(['/', '?']).unwrap_or(rest.len())];
    let host_at = authority.rfind('@').map_or(0, |at| at + 1);
    let host = &authority[host_at..];
    if host.is_empty() || host.contains(',') {
        return None;
    }
    let has_port =
        host.rsplit_once(':').is_some_and(|(name, port)| !name.ends_with(':') && port.parse::<u16>().is_ok());
    let address = if has_port { host.to_owned() } else { format!("{host}:{default}") };
    Some((begin + host_at..begin + authority.len(), address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(store: &str, faults: &[Fault]) -> Plan {
        Plan {
            target: Target::Gateways(Gateways {
                program: "onlyonce".into(),
                work_at: WorkAt::Upstream,
                store: store.into(),
                count: 2,
                lease: Duration::from_secs(2),
                on_unknown: OnUnknown::Hold,
                environment: Vec::new(),
                folder: ".".into(),
                restart_store: None,
            }),
            seed: 1,
            breaking: Duration::from_secs(1),
            healing: Duration::from_secs(60),
            round: Duration::from_secs(60),
            callers: 4,
            rate: None,
            faults: faults.into(),
        }
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        assert_eq!(plan("sqlite:a.db", &[Fault::Kill, Fault::Pause]).check(), Ok(()));
        assert_eq!(plan("sqlite:a.db", &[Fault::Cut]).check(), Err(PlanError::NoNetwork(Fault::Cut)));
        assert_eq!(plan("memory:", &[]).check(), Err(PlanError::NotShared));
        assert_eq!(plan("redis://h", &[Fault::RestartStore]).check(), Err(PlanError::NoRestart));
        assert_eq!(plan("postgres://u@h/d", &[Fault::Cut, Fault::Slow]).check(), Ok(()));
        let nobody = Plan { callers: 0, ..plan("sqlite:a.db", &[]) };
        assert_eq!(nobody.check(), Err(PlanError::Nobody));
        let mut redis = plan("redis://h", &[]);
        let Target::Gateways(gateways) = &mut redis.target else { panic!() };
        gateways.work_at = WorkAt::Transaction;
        assert_eq!(redis.check(), Err(PlanError::NoTransaction));
        let short = Plan { round: Duration::ZERO, ..plan("sqlite:a.db", &[]) };
        assert_eq!(short.check(), Err(PlanError::ShortRound));
        let server = Target::Server { authority: "h:1".into(), path: "/".into() };
        let there = Plan { target: server, ..plan("sqlite:a.db", &[Fault::Kill]) };
        assert_eq!(there.check(), Err(PlanError::NotOurs(Fault::Kill)));
        let inbox = Inbox {
            program: "onlyonce".into(),
            work: Work::Sql,
            lease: Duration::from_secs(2),
            folder: ".".into(),
        };
        let inbox =
            |faults: &[Fault]| Plan { target: Target::Inbox(inbox.clone()), ..plan("sqlite:a.db", faults) };
        assert_eq!(inbox(&[Fault::Kill, Fault::Pause]).check(), Ok(()));
        assert_eq!(inbox(&[Fault::Slow]).check(), Err(PlanError::NotOfInbox(Fault::Slow)));
    }

    #[test]
    fn the_address_of_a_store_is_found_in_its_url() {
        let at = |url: &str| store_address(url).map(|(place, address)| (url[place].to_owned(), address));
        let found = |host: &str, address: &str| Some((host.to_owned(), address.to_owned()));
        assert_eq!(at("postgres://u:p%40@db:5433/shop?a=b"), found("db:5433", "db:5433"));
        assert_eq!(at("mysql://root@127.0.0.1/shop"), found("127.0.0.1", "127.0.0.1:3306"));
        assert_eq!(at("redis://db"), found("db", "db:6379"));
        assert_eq!(at("redis+cluster://a:1,b:2"), None);
        assert_eq!(at("postgres://a,b/shop"), None);
        assert_eq!(at("sqlite:a.db"), None);
    }

    #[test]
    fn a_fault_is_read_by_its_name() {
        for fault in Fault::ALL {
            assert_eq!(fault.name().parse(), Ok(fault));
        }
        assert!("kil".parse::<Fault>().is_err_and(|why| why.contains("kill, pause")));
    }
}
