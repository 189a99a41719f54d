//! What a layer is told: the settings of one route, one router or one gateway.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, Method};

use crate::budget::Budget;
use crate::classify::Classifier;
use crate::cors::Cors;
use crate::fingerprint::FingerprintRule;
use crate::headers::OurNames;
use crate::key::KeyRule;
use crate::lookup::Lookup;
use crate::origin::X_REQUEST_ID;
use crate::problem::DocsUrl;
use crate::report::ReportFn;
use crate::scope::ScopeRule;

/// Whether a request is guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// No: it runs, its key is not looked at, nothing is stored.
    No,
    /// When it has a key; otherwise it runs and the answer says that nothing was guarded.
    Optional,
    /// Yes, and it must have a key.
    Required,
}

/// Says whether a request is guarded, by its head.
pub type GuardFn = Arc<dyn Fn(&Parts) -> Guarded + Send + Sync>;

/// What to do when the store cannot be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStoreFailure {
    /// Refuse with 503: nothing runs that could run twice.
    #[default]
    FailClosed,
    /// Run unguarded, and say so (`Idempotency-Status: degraded`). A retry may run again.
    RunUnguarded,
}

#[derive(Clone)]
pub(crate) enum Guard {
    Methods { methods: Vec<Method>, guarded: Guarded },
    Function(GuardFn),
}

/// All settings of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) guard: Guard,
    pub(crate) key: KeyRule,
    pub(crate) scope: ScopeRule,
    pub(crate) fingerprint: FingerprintRule,
    pub(crate) classifier: Classifier,
    pub(crate) request_bytes_max: usize,
    pub(crate) stored_bytes_max: usize,
    pub(crate) body_timeout: Duration,
    pub(crate) budget: Budget,
    pub(crate) on_store_failure: OnStoreFailure,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) advertise_expiry: bool,
    pub(crate) names: OurNames,
    pub(crate) request_id: HeaderName,
    pub(crate) joins_traces: bool,
    pub(crate) not_stored: Vec<HeaderName>,
    pub(crate) report: Option<ReportFn>,
    pub(crate) cors: Option<Cors>,
    pub(crate) lookup: Option<Lookup>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            guard: Guard::Methods { methods: vec![Method::POST, Method::PATCH], guarded: Guarded::Required },
            key: KeyRule::default(),
            scope: ScopeRule::default(),
            fingerprint: FingerprintRule::default(),
            classifier: Classifier::default(),
            request_bytes_max: 1 << 20,
            stored_bytes_max: 1 << 20,
            body_timeout: Duration::from_secs(60),
            budget: Budget::new(64 << 20),
            on_store_failure: OnStoreFailure::default(),
            docs: None,
            advertise_expiry: false,
            names: OurNames::default(),
            request_id: X_REQUEST_ID,
            joins_traces: false,
            not_stored: Vec::new(),
            report: None,
            cors: None,
            lookup: None,
        }
    }
}

impl Guard {
    pub(crate) fn decide(&self, parts: &Parts) -> Guarded {
        match self {
            // Methods are case-sensitive, but many a service takes `post` for POST: no way around the guard.
            Self::Methods { methods, guarded }
                if methods.iter().any(|one| one.as_str().eq_ignore_ascii_case(parts.method.as_str())) =>
            {
                *guarded
            }
            Self::Methods { .. } => Guarded::No,
            Self::Function(function) => function(parts),
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Methods { methods, guarded } => write!(f, "{methods:?} {guarded:?}"),
            Self::Function(_) => f.write_str("Function(…)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_spelling_of_a_method_passes_the_guard_by() {
        let guard = &Settings::default().guard;
        for (method, guarded) in [
            ("POST", Guarded::Required),
            ("post", Guarded::Required),
            ("pAtCh", Guarded::Required),
            ("POSTS", Guarded::No),
            ("GET", Guarded::No),
        ] {
            let request = http::Request::builder().method(method).body(()).unwrap();
            assert_eq!(guard.decide(&request.into_parts().0), guarded, "{method}");
        }
    }
}
