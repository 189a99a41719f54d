//! What an answer and the effect tell about what happened.

use std::time::Duration;

use serde_json::Value;

use crate::effect::Amount;
use crate::lab::Facts;
use crate::wire::Answer;

/// How far the effect moved while something was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effects {
    /// Nobody looked, or what was seen cannot be counted.
    Unseen,
    /// So many times.
    Count(i64),
    /// By this much, which is no whole number of operations.
    Odd(Amount),
}

impl Effects {
    pub(crate) fn of(step: Amount, unit: Option<Amount>) -> Self {
        if step.is_zero() {
            return Self::Count(0);
        }
        match unit.and_then(|unit| step.count(unit)) {
            Some(count) => Self::Count(count),
            None => Self::Odd(step),
        }
    }

    /// For people.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Unseen => "the effect was not looked at".into(),
            Self::Count(0) => "the effect did not move".into(),
            Self::Count(1) => "it took effect once".into(),
            Self::Count(n) => format!("it took effect {n} times"),
            Self::Odd(step) => format!("the effect moved by {step}, which is no whole number of operations"),
        }
    }

    /// Whether the effect is known to have moved.
    pub(crate) fn moved(self) -> bool {
        match self {
            Self::Unseen | Self::Count(0) => false,
            Self::Count(_) | Self::Odd(_) => true,
        }
    }

    pub(crate) fn is_seen(self) -> bool {
        matches!(self, Self::Count(_))
    }
}

/// Parts of an answer that may tell one run from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) status: bool,
    pub(crate) body: bool,
    pub(crate) location: bool,
}

impl Parts {
    pub(crate) const ALL: Self = Self { status: true, body: true, location: true };
    pub(crate) const NONE: Self = Self { status: false, body: false, location: false };

    /// Those in which two answers are alike.
    pub(crate) fn alike(one: &Answer, other: &Answer) -> Self {
        Self {
            status: one.status == other.status,
            body: one.body == other.body,
            location: one.headers.get("location") == other.headers.get("location"),
        }
    }

    pub(crate) fn without(self, others: Self) -> Self {
        Self {
            status: self.status && !others.status,
            body: self.body && !others.body,
            location: self.location && !others.location,
        }
    }
}

/// What a request did whose operation, or a like one, had been answered before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    /// It got the stored answer.
    Replayed,
    /// It ran.
    Ran,
    /// It was refused, and did not run.
    Refused,
    /// It was accepted, and whether it ran cannot be seen.
    Unclear,
}

/// Compares a later answer with an earlier one.
pub(crate) fn second(first: &Answer, later: &Answer, effects: Effects, facts: &Facts) -> Second {
    match effects {
        Effects::Count(n) if n != 0 => return Second::Ran,
        Effects::Odd(_) => return Second::Ran,
        _ if !later.is_accepted() => return Second::Refused,
        Effects::Count(_) => return Second::Replayed,
        Effects::Unseen => {}
    }
    match (facts.same_run(first, later), facts.tells()) {
        (true, true) => Second::Replayed,
        (false, true) => Second::Ran,
        (_, false) => Second::Unclear,
    }
}

impl Answer {
    /// 2xx or 3xx: the operation was taken. A redirect after a POST is an answer like any other.
    pub(crate) fn is_accepted(&self) -> bool {
        (200..400).contains(&self.status)
    }

    /// For how long to rest before the request is sent again: a limit on how many one may send (429), or a service that
    /// cannot serve anybody for the moment and says until when (503 with Retry-After, RFC 9110 §15.6.4).
    pub(crate) fn slow_down(&self) -> Option<Duration> {
        let seconds = self.header("retry-after").and_then(|value| value.trim().parse::<u64>().ok());
        let seconds = match self.status {
            429 => seconds.unwrap_or(1),
            503 => seconds?,
            _ => return None,
        };
        Some(Duration::from_secs(seconds.clamp(1, 10)))
    }

    /// "Come back later": the operation is in flight.
    pub(crate) fn is_in_progress(&self) -> bool {
        matches!(self.status, 409 | 423 | 425 | 429 | 503) && !self.is_outcome_unknown()
    }

    /// What a proxy says when nobody is behind it. An overloaded API says 503, which is "come back later".
    pub(crate) fn is_of_a_proxy(&self) -> bool {
        matches!(self.status, 502 | 504)
    }

    /// A 409 that says that nobody knows, and that trying again is of no use: an honest end after a crash.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        let Some(Value::Object(problem)) = self.json() else { return false };
        self.status == 409
            && problem.get("code").and_then(Value::as_str) == Some("outcome-unknown")
            && problem.get("retryable") == Some(&Value::Bool(false))
    }

    pub(crate) fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }

    /// One value of a header, as text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}
