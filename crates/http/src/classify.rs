//! How a call ended: what its reply says about the operation.

use std::fmt;
use std::sync::Arc;

use http::response::Parts;

use crate::headers::IDEMPOTENCY_OUTCOME;
use crate::problem::Code;

/// How an operation ended. A service may say it by putting one into the extensions of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is decided, as success or as failure: the reply is stored and replayed.
    Definitive,
    /// Surely nothing happened: the key is released. With a code the client gets that problem instead of the reply.
    Transient(Option<Code>),
    /// It may have happened: the policy decides what a retry gets. With a code the client gets that problem instead
    /// of the reply.
    Unknown(Option<Code>),
    /// It is decided, and the reply holds a secret: only its status is stored, a replay has no body.
    NoStore,
}

/// What a status says, where nothing better is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preset {
    /// 2xx, 3xx and most 4xx are stored; what says "not now" is released; 502 and 504 are unknown.
    #[default]
    Default,
    /// Like the default, but every 5xx except 503 is unknown.
    Strict,
    /// Like the default, but every 5xx is stored; replays carry `Idempotent-Replayed`.
    Stripe,
    /// Only 2xx is stored, the rest is released.
    SuccessOnly,
}

/// Says how a call ended; `None` leaves it to the reply itself and the preset. The second argument is the attempt.
pub type EndingFn = Arc<dyn Fn(&Parts, u32) -> Option<Ending> + Send + Sync>;

/// Who says how a call ended: the service by extension, a function, the service by header, the preset, in this order.
#[derive(Clone, Default)]
pub(crate) struct Classifier {
    pub(crate) preset: Preset,
    pub(crate) function: Option<EndingFn>,
}

impl fmt::Debug for Classifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = self.function.as_ref().map(|_| "…");
        f.debug_struct("Classifier").field("preset", &self.preset).field("function", &function).finish()
    }
}

impl Classifier {
    /// How a call that gave a reply ended. The reply still has its `Idempotency-Outcome` header.
    pub(crate) fn classify(&self, reply: &Parts, attempt: u32) -> Ending {
        if let Some(ending) = reply.extensions.get::<Ending>() {
            return *ending;
        }
        if let Some(ending) = self.function.as_ref().and_then(|function| function(reply, attempt)) {
            return ending;
        }
        said(reply).unwrap_or_else(|| self.preset.ending(reply.status.as_u16(), attempt))
    }
}

/// What the reply says in its header.
fn said(reply: &Parts) -> Option<Ending> {
    let value = reply.headers.get(IDEMPOTENCY_OUTCOME)?;
    match &value.as_bytes().to_ascii_lowercase()[..] {
        b"definitive" => Some(Ending::Definitive),
        b"transient" => Some(Ending::Transient(None)),
        b"unknown" => Some(Ending::Unknown(None)),
        b"no-store" => Some(Ending::NoStore),
        _ => {
            tracing::warn!(
                "an Idempotency-Outcome that is none of definitive, transient, unknown, no-store is ignored"
            );
            None
        }
    }
}

impl Preset {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::Default, Self::Strict, Self::Stripe, Self::SuccessOnly];

    /// As in options: `default`, `strict`, `stripe`, `success-only`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Strict => "strict",
            Self::Stripe => "stripe",
            Self::SuccessOnly => "success-only",
        }
    }

    /// What this status says on this attempt.
    pub fn ending(self, status: u16, attempt: u32) -> Ending {
        use Ending::*;
        match (self, status) {
            // An upgrade or an interim answer is no reply that could be recorded.
            (_, ..200) => Unknown(None),
            (Self::SuccessOnly, 200..300) => Definitive,
            (Self::SuccessOnly, _) => Transient(None),
            (Self::Stripe, 500..600) => Definitive,
            (Self::Strict, 500..503 | 504..600) => Unknown(None),
            (_, 401 | 403 | 407 | 408 | 425 | 429) => Transient(None),
            // On a later attempt these may mean that the earlier one still runs.
            (_, 409 | 423) if attempt > 1 => Transient(None),
            (_, 502 | 504) => Unknown(None),
            (_, 500..) => Transient(None),
            (_, 200..500) => Definitive,
        }
    }
}

impl std::str::FromStr for Preset {
    type Err = UnknownPreset;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|preset| preset.as_str() == text).ok_or(UnknownPreset)
    }
}

/// No such preset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the presets are default, strict, stripe and success-only")]
pub struct UnknownPreset;

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderValue, Response};

    const STORED: Ending = Ending::Definitive;
    const RELEASED: Ending = Ending::Transient(None);
    const UNKNOWN: Ending = Ending::Unknown(None);

    #[test]
    fn every_status_has_its_ending() {
        for status in 100..1000 {
            let default = match status {
                ..200 => UNKNOWN,
                401 | 403 | 407 | 408 | 425 | 429 | 500 | 501 | 503 | 505.. => RELEASED,
                502 | 504 => UNKNOWN,
                _ => STORED,
            };
            assert_eq!(Preset::Default.ending(status, 1), default, "{status}");
            let strict = if matches!(status, 500..600) && status != 503 { UNKNOWN } else { default };
            assert_eq!(Preset::Strict.ending(status, 1), strict, "{status}");
            let stripe = if matches!(status, 500..600) { STORED } else { default };
            assert_eq!(Preset::Stripe.ending(status, 1), stripe, "{status}");
            let success_only = match status {
                ..200 => UNKNOWN,
                200..300 => STORED,
                _ => RELEASED,
            };
            assert_eq!(Preset::SuccessOnly.ending(status, 1), success_only, "{status}");
            // On a later attempt a conflict may mean that the earlier one still runs; nothing else changes.
            for (preset, first) in [Preset::Default, Preset::Strict, Preset::Stripe, Preset::SuccessOnly]
                .into_iter()
                .zip([default, strict, stripe, success_only])
            {
                let later = if matches!(status, 409 | 423) { RELEASED } else { first };
                for attempt in [2, 3, u32::MAX] {
                    assert_eq!(preset.ending(status, attempt), later, "{preset:?} {status} {attempt}");
                }
            }
        }
    }

    #[test]
    fn who_knows_better_is_heard() {
        let reply = |outcome: Option<&'static str>, ending: Option<Ending>| {
            let (mut parts, ()) = Response::new(()).into_parts();
            if let Some(outcome) = outcome {
                parts.headers.insert(IDEMPOTENCY_OUTCOME, HeaderValue::from_static(outcome));
            }
            ending.map(|ending| parts.extensions.insert(ending));
            parts
        };
        let plain = Classifier::default();
        assert_eq!(plain.classify(&reply(None, None), 1), STORED);
        assert_eq!(plain.classify(&reply(Some("transient"), None), 1), RELEASED);
        assert_eq!(plain.classify(&reply(Some("unknown"), None), 1), UNKNOWN);
        assert_eq!(plain.classify(&reply(Some("Unknown"), None), 1), UNKNOWN);
        assert_eq!(plain.classify(&reply(Some("no-store"), None), 1), Ending::NoStore);
        assert_eq!(plain.classify(&reply(Some("nonsense"), None), 1), STORED);
        let function: EndingFn =
            Arc::new(|reply, attempt| (reply.status == 200 && attempt == 1).then_some(Ending::Unknown(None)));
        let with_function = Classifier { function: Some(function), ..Classifier::default() };
        assert_eq!(with_function.classify(&reply(Some("transient"), None), 1), UNKNOWN);
        assert_eq!(with_function.classify(&reply(Some("transient"), None), 2), RELEASED);
        assert_eq!(with_function.classify(&reply(None, Some(Ending::NoStore)), 1), Ending::NoStore);
    }

    #[test]
    fn names_come_back() {
        for preset in Preset::ALL {
            assert_eq!(preset.as_str().parse(), Ok(preset));
        }
        assert_eq!("Strict".parse::<Preset>(), Err(UnknownPreset));
    }
}
