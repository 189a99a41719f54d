//! Guarded requests for handlers that claim in a transaction of their own.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use http_body_util::Full;
use onlyonce_core::{OnceOutcome, Operation, StoreError, StoreErrorKind, StoredReply, TxOptions};
use onlyonce_engine::Policy;

use crate::answer::{self, ClientTraits};
use crate::body::{BoxError, ReplyBody};
use crate::budget::Permit;
use crate::fingerprint::Comparison;
use crate::headers::strip_ours;
use crate::origin::RequestOrigin;
use crate::problem::{Code, Problem};
use crate::service::{Admission, admit, read_body};
use crate::settings::{Guarded, Settings};

/// Reads requests and answers them as an [`IdempotencyLayer`](crate::IdempotencyLayer) does, for handlers that put
/// claim, work and reply into one transaction of their own database. Made by
/// [`IdempotencyLayer::transactional`](crate::IdempotencyLayer::transactional).
///
/// The handler is not detached: when the client goes, the server may drop it, and its transaction is rolled back.
///
/// With the feature `axum`, [`Keyed`] is an extractor for every state that a `Transactional` can be taken from (`FromRef`).
#[derive(Clone, Debug)]
pub struct Transactional {
    settings: Arc<Settings>,
    policy: Policy,
}

/// A request with its operation, read whole. Cheap to clone, so that work can own it.
#[derive(Clone, Debug)]
pub struct Keyed(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rules: Transactional,
    parts: Parts,
    body: Bytes,
    operation: Operation,
    client: ClientTraits,
    // Its share of the buffers, until it is answered.
    _permit: Permit,
}

/// What goes out.
type Answer = Response<ReplyBody<Full<Bytes>>>;

impl Transactional {
    pub(crate) fn new(settings: Arc<Settings>, policy: Policy) -> Self {
        Self { settings, policy }
    }

    /// Reads a request: its key, its scope, its body and the fingerprint of all. Every request needs a key, whatever its
    /// method.
    ///
    /// # Errors
    /// The answer that refuses it.
    pub async fn read<B>(&self, request: Request<B>) -> Result<Keyed, Answer>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let settings = &*self.settings;
        let (mut parts, body) = request.into_parts();
        strip_ours(&mut parts.headers, &settings.names);
        let read = async {
            let (scope, key, mut permit) = match admit(settings, &parts, &body, Guarded::Required)? {
                Admission::Guarded(scope, key, permit) => (scope, key, permit),
                Admission::Ignored => return Err(Problem::new(Code::KeyMissing)),
            };
            let body = read_body(settings, body, &mut permit).await?.data;
            let fingerprint = settings.fingerprint.of(&parts, &body);
            let fingerprint = fingerprint
                .map_err(|error| Problem::new(Code::BodyMalformed).detail(format!("The body is {error}.")))?;
            let origin = RequestOrigin::of(&parts.headers, &settings.request_id).encode();
            Ok((Operation::new(scope, key, fingerprint).with_origin(origin), body, permit))
        };
        match read.await {
            Ok((operation, body, _permit)) => {
                let client = ClientTraits::of(parts.version, &parts.headers);
                let rules = self.clone();
                Ok(Keyed(Arc::new(Inner { rules, parts, body, operation, client, _permit })))
            }
            Err(problem) => Err(answer::refuse(problem, settings)),
        }
    }
}

impl Keyed {
    /// What a store is asked to run once.
    pub fn operation(&self) -> &Operation {
        &self.0.operation
    }

    /// How its claim behaves, by the policy of the layer.
    pub fn options(&self) -> TxOptions {
        let Policy { retention, wait, on_lease_end, max_attempts, .. } = self.0.rules.policy;
        TxOptions { retention, wait, on_lease_end, max_attempts }
    }

    /// A key for one step downstream, the same on every attempt: see [`onlyonce_engine::Context::downstream_key`].
    pub fn downstream_key(&self, step: &str) -> String {
        onlyonce_engine::downstream_key(&self.0.operation, step)
    }

    /// The head of the request.
    pub fn parts(&self) -> &Parts {
        &self.0.parts
    }

    /// The headers of the request.
    pub fn headers(&self) -> &HeaderMap {
        &self.0.parts.headers
    }

    /// The whole body.
    pub fn body(&self) -> &Bytes {
        &self.0.body
    }

    /// The answer: the reply, its replay, or the refusal with a problem document. A transient failure is a 503 that is
    /// worth a retry; to say it better, look at the outcome first.
    pub fn answer(&self, outcome: Result<OnceOutcome, StoreError>) -> Answer {
        let settings = &*self.0.rules.settings;
        let problem = match outcome {
            Ok(OnceOutcome::Ran(stored)) => return self.first(&stored),
            Ok(OnceOutcome::Replayed(stored)) => return answer::replay(&stored, settings, self.0.client),
            Ok(OnceOutcome::Transient(cause)) => {
                tracing::warn!(error = %cause, "a guarded request failed for the moment; nothing happened");
                let detail = "It failed for the moment and nothing happened. Send the same request again.";
                Problem::new(Code::Overloaded).detail(detail).retry_after(answer::SOON)
            }
            Ok(OnceOutcome::InProgress { lease_left, origin, .. }) => Problem::new(Code::InProgress)
                .retry_after(lease_left.clamp(answer::SOON, answer::SOON * 5))
                .of_request(origin),
            Ok(OnceOutcome::Mismatch { stored, origin }) => {
                let code = match settings.fingerprint.compare(&stored, &self.0.parts, &self.0.body) {
                    Comparison::Other => Code::KeyReused,
                    // Made under another definition than the layer's: it may well be the same request.
                    Comparison::Same(_) | Comparison::UnknownDefinition => Code::FingerprintUnknown,
                };
                Problem::new(code).of_request(origin)
            }
            Ok(OnceOutcome::Unknown { origin, .. }) => Problem::new(Code::OutcomeUnknown).of_request(origin),
            Err(error) => {
                tracing::warn!(error = %error, "a guarded request is refused");
                of_store_error(&error)
            }
        };
        answer::refuse(problem, settings)
    }

    fn first(&self, stored: &StoredReply) -> Answer {
        let mut response = answer::recorded(&stored.reply, self.0.client);
        answer::mark_expiry(response.headers_mut(), stored, &self.0.rules.settings);
        response
    }
}

/// A retry is always right: when it may have happened, its record tells.
fn of_store_error(error: &StoreError) -> Problem {
    let problem = match error.kind() {
        StoreErrorKind::Unreadable => Problem::new(Code::RecordUnreadable),
        StoreErrorKind::Overloaded | StoreErrorKind::Conflict => Problem::new(Code::Overloaded),
        _ => Problem::new(Code::StoreUnavailable),
    };
    let problem = problem.retry_after(answer::SOON);
    match error.may_have_applied() {
        true => problem
            .detail("It may have happened. Send the same request again with the same key: it runs once."),
        false => problem,
    }
}

#[cfg(feature = "axum")]
mod extract {
    use axum::extract::{FromRef, FromRequest, Request};
    use axum::response::{IntoResponse, Response};

    use super::{Keyed, Transactional};

    /// The body is read here, so it comes last among a handler's arguments.
    impl<S> FromRequest<S> for Keyed
    where
        S: Send + Sync,
        Transactional: FromRef<S>,
    {
        type Rejection = Response;

        async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
            Transactional::from_ref(state).read(request).await.map_err(IntoResponse::into_response)
        }
    }
}
