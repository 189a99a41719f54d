//! The status of a key, for the client that sent it: asked for, never run.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use onlyonce_core::{
    Key, OnLeaseEnd, OperationId, RecordView, StateName, StoreAdmin, StoreError, StoreErrorKind,
};
use onlyonce_engine::{EngineError, Idempotency, Policy};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::answer;
use crate::body::{ReplyBody, Whole};
use crate::cors;
use crate::fingerprint::original_uri;
use crate::key::check_key;
use crate::origin::RequestOrigin;
use crate::problem::{Code, Ours, Problem};
use crate::settings::Settings;

/// Where keys are looked up: the key follows, percent-encoded.
pub const LOOKUP_PREFIX: &str = "/.well-known/idempotency/";

/// Look-ups at once; past it 503. Each is a question to the store, which has its work to do.
const AT_ONCE_MAX: usize = 64;

/// Answers what became of a key in the caller's own scope.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    store: Arc<dyn StoreAdmin>,
    places: Arc<Semaphore>,
}

impl Lookup {
    pub(crate) fn new(store: Arc<dyn StoreAdmin>) -> Self {
        Self { store, places: Arc::new(Semaphore::new(AT_ONCE_MAX)) }
    }

    /// Whether the request asks for the status of a key, or whether a page may ask for it.
    pub(crate) fn is_for(parts: &Parts, settings: &Settings) -> bool {
        let asks = matches!(parts.method, Method::GET | Method::HEAD)
            || (settings.cors.is_some() && cors::is_preflight(parts));
        asks && original_uri(parts).path().starts_with(LOOKUP_PREFIX)
    }

    pub(crate) async fn answer<B>(
        self,
        parts: Parts,
        idem: Idempotency,
        settings: Arc<Settings>,
    ) -> Response<ReplyBody<B>> {
        if cors::is_preflight(&parts) {
            let mut response = Response::new(ReplyBody::whole(Whole::default(), None));
            *response.status_mut() = StatusCode::NO_CONTENT;
            cors::allow_to_read(&parts, response.headers_mut());
            response.extensions_mut().insert(Ours);
            return response;
        }
        match self.status(&parts, &idem, &settings).await {
            Ok(status) => {
                let whole = Whole { data: Bytes::from(status.to_string()), trailers: None };
                let mut response = Response::new(ReplyBody::whole(whole, None));
                let headers = response.headers_mut();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
                response.extensions_mut().insert(Ours);
                response
            }
            Err(problem) => answer::refuse(problem, &settings),
        }
    }

    async fn status(&self, parts: &Parts, idem: &Idempotency, settings: &Settings) -> Result<Value, Problem> {
        let written = &original_uri(parts).path()[LOOKUP_PREFIX.len()..];
        let malformed = |why: String| Problem::new(Code::KeyMalformed).detail(why);
        let key =
            percent_decoded(written).ok_or_else(|| malformed("the key is not percent-encoded".into()))?;
        let key = check_key(&key).map_err(|error| malformed(error.to_string()))?;
        let scope = settings.scope.scope(parts)?;
        let _place = self.places.try_acquire().map_err(|_| answer::overloaded())?;
        let id = OperationId { scope, key };
        let patience = idem.limits().store_timeout;
        let found = match timeout(patience, self.store.show(&id)).await {
            Ok(found) => found,
            Err(_) => Err(StoreError::new(StoreErrorKind::Timeout, "show")),
        };
        let found = found.map_err(|error| {
            tracing::warn!(error = %error, "the status of a key cannot be looked up");
            answer::of_engine_error(&EngineError::from(error))
        })?;
        Ok(describe(&id.key, found.as_ref(), idem.policy(), idem.clock().wall()))
    }
}

fn describe(key: &Key, record: Option<&RecordView>, policy: &Policy, now: SystemTime) -> Value {
    let over = |record: &&RecordView| record.expires_at.is_some_and(|end| end <= now);
    let known = record.filter(|record| !over(record) && record.state != StateName::Freed);
    let Some(record) = known else { return json!({ "key": key.as_str(), "state": "absent" }) };
    let mut status = match record.state {
        StateName::Completed => json!({
            "state": "completed",
            "status": record.reply.as_ref().map(|reply| reply.status()),
            "expires": record.expires_at.map(time),
        }),
        StateName::Unknown => json!({
            "state": "unknown",
            "since": time(record.locked_until),
            // The record's policy and ours, as a claim has it.
            "retryable": record.on_lease_end == OnLeaseEnd::TakeOver && answer::runs_again(policy, record.attempt),
        }),
        StateName::InProgress | StateName::Freed => {
            json!({ "state": "in-progress", "since": time(record.created_at) })
        }
    };
    status["key"] = key.as_str().into();
    status["attempt"] = record.attempt.into();
    if let Some(id) =
        record.origin.as_ref().and_then(RequestOrigin::decode).as_ref().and_then(RequestOrigin::request_id)
    {
        status["original_request"] = id.into();
    }
    status
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at.max(SystemTime::UNIX_EPOCH)).to_string()
}

/// Percent-decodes one segment; `None` where a `%` stands alone, or a `/` shows that there are more.
fn percent_decoded(segment: &str) -> Option<Vec<u8>> {
    let mut bytes = segment.bytes();
    let mut decoded = Vec::with_capacity(segment.len());
    let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'/' => return None,
            b'%' => (digit(bytes.next())? << 4 | digit(bytes.next())?) as u8,
            byte => byte,
        });
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_segment_is_decoded_or_refused() {
        for (written, key) in [
            ("order-7", Some("order-7")),
            ("a%2Fb%20c", Some("a/b c")),
            ("%22", Some("\"")),
            ("+", Some("+")),
        ] {
            assert_eq!(percent_decoded(written).as_deref(), key.map(str::as_bytes), "{written}");
        }
        for wrong in ["a/b", "%", "%2", "%zz", "a%2g"] {
            assert_eq!(percent_decoded(wrong), None, "{wrong}");
        }
    }
}
