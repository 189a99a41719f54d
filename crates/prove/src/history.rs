//! What was sent and what came back.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// One request and its end. Times are since the run began, by one clock of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// The operation's number.
    pub operation: usize,
    /// Which gateway it went to. For an inbox: 0 for a delivery in bulk, which is told nothing of the single message.
    pub gateway: usize,
    /// What was sent.
    pub sent: Sent,
    /// When it was sent.
    #[serde(serialize_with = "millis")]
    pub began: Duration,
    /// When it ended.
    #[serde(serialize_with = "millis")]
    pub ended: Duration,
    /// What came back.
    pub answer: Answer,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sent {
    /// The operation.
    Original,
    /// Its key, with another amount.
    Changed,
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The upstream's reply: at first hand, or replayed.
    Reply {
        /// Its status.
        status: u16,
        /// Its body.
        body: String,
        /// Whether it was said to be a replay.
        replayed: bool,
        /// Whether it was said that the store did not take it.
        unrecorded: bool,
    },
    /// A refusal of the gateway, by its code.
    Refused {
        /// Its status.
        status: u16,
        /// Its code, such as `in-progress`.
        code: String,
    },
    /// No whole answer: a broken connection, or the client gave up.
    Lost(String),
}

impl Answer {
    /// Whether it is this refusal.
    pub fn is_code(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code, .. } if code == wanted)
    }

    /// Whether it is the upstream's reply.
    pub fn is_reply(&self) -> bool {
        matches!(self, Self::Reply { .. })
    }
}

/// One execution, as the ledger wrote it down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Execution {
    /// The operation that the body named.
    pub operation: usize,
    /// Which execution of all it was.
    pub number: usize,
    /// Whether it was of the original amount.
    pub sent: Sent,
    /// When it arrived.
    #[serde(serialize_with = "millis")]
    pub at: Duration,
    /// What was answered.
    pub body: String,
}

/// Everything that was seen.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// What clients sent and got, in the order in which it ended.
    pub events: Vec<Event>,
    /// What the ledger wrote down. `None` for a target that shows no ledger.
    pub executions: Option<Vec<Execution>>,
    /// Whether what nobody knows of is run again on purpose: then an operation may run more than once.
    pub retried: bool,
    /// Whether effect and record are one transaction: then there is nothing that nobody knows of.
    pub exactly_once: bool,
    /// When everything was healed. What is sent after it must converge.
    pub healed: Duration,
    /// What an inbox keeps of itself. `None` where there is no inbox.
    pub kept: Option<Kept>,
}

/// What is in the tables of an inbox at the end, by the number of the operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// How many records.
    pub records: BTreeMap<usize, usize>,
    /// How many deliveries are logged.
    pub deliveries: BTreeMap<usize, usize>,
}

fn millis<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64() * 1e3)
}
