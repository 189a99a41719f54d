//! The trials: each tries one kind of promise at the API and says what it found.

mod apart;
mod baseline;
mod breakage;
mod crash;
mod failures;
mod in_flight;
mod keys;
mod mismatch;
mod race;
mod refusals;
mod replay;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::lab::{Lab, Shared};
use crate::options::{Options, path_fault};
use crate::stop::Step;
use crate::wire::{Answer, Call};

/// How a promise is tried. `docs/check.md` has each kind with its members.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Trial {
    /// Two keys, one request each: two effects.
    TwoKeys,
    /// A request without a key.
    MissingKey,
    /// An empty key: refused, or treated as none.
    EmptyKey {
        /// The value of each key header line.
        lines: Vec<String>,
    },
    /// A key that must be refused.
    MalformedKey {
        /// The value of each key header line.
        lines: Vec<String>,
    },
    /// Two keys that must not be taken for one.
    KeysApart {
        /// The value of the key header of the first request.
        first: String,
        /// And of the second.
        second: String,
    },
    /// Two spellings of one key.
    KeysSame {
        /// The value of the key header of the first request.
        first: String,
        /// And of the second.
        second: String,
    },
    /// The same request again and again.
    Once {
        /// How many times.
        sends: u32,
        /// How the request differs from the operation's own.
        #[serde(default)]
        request: RequestChange,
    },
    /// A retry of an answered request.
    Replay {
        /// What is looked at.
        aspect: ReplayAspect,
        /// How the request differs from the operation's own.
        #[serde(default)]
        request: RequestChange,
    },
    /// The first key of the run, once more.
    Remembered,
    /// A first request that claims to be a replay.
    ForgedMarker,
    /// Many copies at once.
    Race {
        /// What is looked at.
        aspect: RaceAspect,
    },
    /// Two requests at once with one key.
    RaceOfTwo,
    /// A used key with another request.
    AnotherRequest {
        /// How the other request differs.
        change: Change,
    },
    /// A refused mismatch, then the right request again.
    MismatchHarmless,
    /// Another request while the first is in flight.
    MismatchInFlight,
    /// A copy while the first is in flight.
    InFlight {
        /// What is looked at.
        aspect: FlightAspect,
    },
    /// A copy near the end of the work.
    LateCopy,
    /// Another key while one is in flight.
    OthersGoOn,
    /// The client goes away in the middle.
    Disconnect {
        /// What is looked at.
        aspect: BreakAspect,
    },
    /// Half a request, then the whole.
    HalfSent,
    /// One key of two principals.
    Principals,
    /// A refusal for good.
    DefinitiveFailure,
    /// A failure that passes.
    TransientFailure,
    /// A long body.
    BigBody,
    /// Refusals are problem documents.
    ProblemDocuments,
    /// Refusals link to documentation.
    ErrorLinks,
    /// The end of a key's life is said.
    Expiry,
    /// The server is killed in the middle of the work and started again.
    Crash {
        /// What is looked at.
        aspect: BreakAspect,
    },
    /// The server is killed after the answer and started again.
    Restart,
}

/// What is looked at in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplayAspect {
    /// It is answered, not refused.
    Answered,
    /// The status.
    Status,
    /// The body, where it is text.
    Text,
    /// The body, where it is not.
    Binary,
    /// The body and its Content-Encoding.
    Encoding,
    /// Headers that appear once.
    Headers,
    /// Headers that appear more than once.
    RepeatedHeaders,
    /// Set-Cookie.
    SetCookie,
    /// That it says so.
    Marker,
    /// That the first does not say so.
    FirstUnmarked,
}

/// What is looked at in a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RaceAspect {
    /// It took effect once.
    Once,
    /// The losers were answered sanely.
    Losers,
    /// A late retry gets the winner's answer.
    Late,
}

/// What is looked at while a request is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlightAspect {
    /// The copy does not run and is told so.
    Copy,
    /// It is told so by a conflict, at once.
    Conflict,
    /// It is told when to come back.
    RetryAfter,
    /// Afterwards it gets the answer.
    Settles,
}

/// What is looked at after something broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakAspect {
    /// The key is not stuck.
    Answered,
    /// It took effect once.
    Once,
}

/// How a request differs from the operation's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestChange {
    /// Another method.
    pub method: Option<String>,
    /// Another path, with its query.
    pub path: Option<String>,
    /// Another body.
    pub body: Option<String>,
    /// Headers on top, or in place of those of the same name.
    pub headers: BTreeMap<String, String>,
}

/// How another request differs from the one that used the key first.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Change {
    /// The body of `--other-body`.
    OtherBody,
    /// The same two bodies behind so much white space that only the end differs.
    LongBodyEnd,
    /// One more member in both bodies, a number over 2^53 that differs in its last digit.
    BigNumber,
    /// One more query parameter.
    Query(String),
    /// The path of `--other-path`, or else one below the operation's own.
    OtherPath,
    /// Another method.
    OtherMethod,
    /// Whatever the vector says.
    Request(RequestChange),
}

/// What a trial found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The promise is kept.
    Held,
    /// It is not, and how.
    Broken(String),
    /// It is kept, but not in the form.
    Weak(String),
    /// Nobody can tell, and why.
    NotObservable(String),
    /// There is nothing to tell about, and why.
    NotApplicable(String),
}

/// Experiments that several scenarios look at.
#[derive(Default)]
pub(crate) struct Cache {
    replays: Mutex<BTreeMap<RequestChange, Arc<Shared<replay::Replay>>>>,
    /// The first operation of the run, with its answer.
    earliest: Mutex<Option<(Call, Answer)>>,
    race: Shared<race::Race>,
    in_flight: Shared<in_flight::InFlight>,
    disconnect: Shared<breakage::Broken>,
    crash: Shared<breakage::Broken>,
}

impl Trial {
    /// Tries it.
    pub(crate) async fn run(&self, lab: &Lab<'_>) -> Step<Finding> {
        match self {
            Self::TwoKeys => baseline::two_keys(lab).await,
            Self::MissingKey => keys::missing(lab).await,
            Self::EmptyKey { lines } => keys::empty(lab, lines).await,
            Self::MalformedKey { lines } => keys::malformed(lab, lines).await,
            Self::KeysApart { first, second } => keys::apart(lab, first, second).await,
            Self::KeysSame { first, second } => keys::same(lab, first, second).await,
            Self::Once { sends, request } => replay::once(lab, *sends, request).await,
            Self::Remembered => replay::remembered(lab).await,
            Self::Replay { aspect, request } => replay::replay(lab, *aspect, request).await,
            Self::ForgedMarker => replay::forged_marker(lab).await,
            Self::Race { aspect } => race::race(lab, *aspect).await,
            Self::RaceOfTwo => race::of_two(lab).await,
            Self::AnotherRequest { change } => mismatch::another_request(lab, change).await,
            Self::MismatchHarmless => mismatch::harmless(lab).await,
            Self::MismatchInFlight => in_flight::mismatch(lab).await,
            Self::InFlight { aspect } => in_flight::copy(lab, *aspect).await,
            Self::LateCopy => in_flight::late_copy(lab).await,
            Self::OthersGoOn => in_flight::others_go_on(lab).await,
            Self::Disconnect { aspect } => breakage::disconnect(lab, *aspect).await,
            Self::HalfSent => breakage::half_sent(lab).await,
            Self::Principals => apart::principals(lab).await,
            Self::DefinitiveFailure => failures::definitive(lab).await,
            Self::TransientFailure => failures::transient(lab).await,
            Self::BigBody => apart::big_body(lab).await,
            Self::ProblemDocuments => refusals::problem_documents(lab).await,
            Self::ErrorLinks => refusals::links(lab).await,
            Self::Expiry => refusals::expiry(lab).await,
            Self::Crash { aspect } => crash::crash(lab, *aspect).await,
            Self::Restart => crash::restart(lab).await,
        }
    }

    /// Whether it passes by a refusal, which nobody gets from a server that always says the same.
    pub(crate) fn is_shown_by_refusal(&self) -> bool {
        matches!(
            self,
            Self::MissingKey
                | Self::EmptyKey { .. }
                | Self::AnotherRequest { .. }
                | Self::InFlight { .. }
                | Self::MismatchInFlight
                | Self::ProblemDocuments
                | Self::ErrorLinks
        )
    }

    /// What is wrong with its data.
    pub(crate) fn validate(&self) -> Result<(), String> {
        match self {
            Self::EmptyKey { lines } | Self::MalformedKey { lines } => {
                if lines.is_empty() || lines.len() > 10 {
                    return Err("1 to 10 key lines".into());
                }
                lines.iter().try_for_each(|line| line_fault(line))
            }
            Self::KeysApart { first, second } | Self::KeysSame { first, second } => {
                line_fault(first)?;
                line_fault(second)?;
                if !first.contains("{{unique}}") || !second.contains("{{unique}}") {
                    return Err("a key without {{unique}} would be used by an earlier run".into());
                }
                if first == second { Err("both keys are the same".into()) } else { Ok(()) }
            }
            Self::Once { sends, .. } if !(2..=100).contains(sends) => Err("2 to 100 sends".into()),
            Self::Once { request, .. }
            | Self::Replay { request, .. }
            | Self::AnotherRequest { change: Change::Request(request) } => request.validate(),
            Self::AnotherRequest { change: Change::Query(query) } => path_fault(&format!("/?{query}")),
            _ => Ok(()),
        }
    }

    /// The experiment that it shares with other scenarios, if it does.
    pub(crate) fn experiment(&self) -> Option<String> {
        match self {
            Self::Replay { request, .. } => Some(format!("replay {request:?}")),
            Self::Race { .. } => Some("race".into()),
            Self::InFlight { .. } => Some("in-flight".into()),
            Self::Disconnect { .. } => Some("disconnect".into()),
            Self::Crash { .. } => Some("crash".into()),
            _ => None,
        }
    }

    /// Requests that it sends, give or take retries, and operations that run on a right server.
    pub(crate) fn cost(&self, options: &Options) -> (u32, u32) {
        let Options { rounds, concurrency, .. } = *options;
        match self {
            Self::TwoKeys => (2, 2),
            Self::MissingKey | Self::MalformedKey { .. } => (1, 0),
            Self::EmptyKey { .. } => (3, 0),
            Self::KeysApart { .. } => (3, 2),
            Self::KeysSame { .. } | Self::Expiry => (2, 1),
            Self::Once { sends, .. } => (*sends, 1),
            Self::Remembered => (1, 0),
            Self::ForgedMarker => (1, 1),
            Self::Replay { .. } => (4, 2),
            Self::Race { .. } => (rounds * (concurrency + 1), rounds),
            Self::RaceOfTwo => (race::ROUNDS_OF_TWO * concurrency + 1, race::ROUNDS_OF_TWO + 1),
            Self::AnotherRequest { change: Change::LongBodyEnd } => (7, 3),
            Self::AnotherRequest { .. } => (3, 2),
            Self::MismatchHarmless => (5, 1),
            // With those that measure the slow body.
            Self::InFlight { .. } => (5, 3),
            Self::MismatchInFlight => (2, 1),
            Self::LateCopy => (2, 1),
            Self::OthersGoOn => (6, 6),
            Self::Disconnect { .. } => (3, 1),
            Self::HalfSent => (2, 1),
            Self::Principals => (3, 3),
            Self::DefinitiveFailure => (3, 0),
            Self::TransientFailure => (3, 1),
            Self::BigBody => (2, 1),
            Self::ProblemDocuments | Self::ErrorLinks => (3, 1),
            Self::Crash { .. } => (3, 1),
            Self::Restart => (2, 1),
        }
    }

    /// Whether the options have what it needs; the others say what to give.
    pub(crate) fn has_what_it_needs(&self, options: &Options) -> bool {
        let (other, slow) = (options.other_body.is_some(), options.slow_body.is_some());
        match self {
            Self::AnotherRequest { change: Change::OtherBody | Change::LongBodyEnd }
            | Self::MismatchHarmless
            | Self::RaceOfTwo => other,
            Self::MismatchInFlight => other && slow,
            Self::InFlight { .. } | Self::LateCopy | Self::OthersGoOn => slow,
            Self::Crash { .. } => slow && options.restart_command.is_some(),
            Self::Restart => options.restart_command.is_some(),
            Self::Principals => !options.other_headers.is_empty(),
            Self::DefinitiveFailure => options.failing_body.is_some(),
            Self::TransientFailure => options.transient_body.is_some(),
            _ => true,
        }
    }
}

impl RequestChange {
    fn validate(&self) -> Result<(), String> {
        if let Some(path) = &self.path {
            path_fault(path)?;
        }
        if let Some(method) = &self.method {
            http::Method::from_bytes(method.as_bytes()).map_err(|_| format!("{method:?} is not a method"))?;
        }
        for (name, value) in &self.headers {
            http::HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| format!("{name:?} is not a header name"))?;
            http::HeaderValue::from_str(value).map_err(|_| format!("the header {name} cannot be sent"))?;
            if ["host", "content-length", "transfer-encoding", "connection"]
                .contains(&name.to_lowercase().as_str())
            {
                return Err(format!("the header {name} is the checker's own"));
            }
        }
        Ok(())
    }
}

/// A line of the key header may have any byte but those that end it.
fn line_fault(line: &str) -> Result<(), String> {
    match line.chars().find(|c| matches!(c, '\r' | '\n') || u32::from(*c) > 0xff) {
        None => Ok(()),
        Some(c) => {
            Err(format!("a key line cannot have {c:?}: a character is a byte, and a line break ends it"))
        }
    }
}
