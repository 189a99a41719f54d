//! Answers: refusals, replays, first answers.

use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::response;
use http::{Response, StatusCode, Version};
use onlyonce_core::{OnLeaseEnd, Origin, Reply, StoreErrorKind, StoredReply};
use onlyonce_engine::{EngineError, Policy};

use crate::body::{ReplyBody, Whole};
use crate::budget::Permit;
use crate::headers::{
    IDEMPOTENCY_KEY_EXPIRES, IDEMPOTENCY_ORIGINAL_TRACEPARENT, IDEMPOTENCY_REPLAY, IDEMPOTENCY_STATUS,
    announce_trailers, strip_ours,
};
use crate::origin::RequestOrigin;
use crate::problem::{Code, Problem, retry_after_value};
use crate::settings::Settings;

/// When to come back to a store or a process that is in trouble.
pub(crate) const SOON: Duration = Duration::from_secs(1);

/// What an answer must know of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientTraits {
    pub(crate) accepts_trailers: bool,
}

impl ClientTraits {
    pub(crate) fn of(version: Version, headers: &HeaderMap) -> Self {
        // HTTP/2 and later have a place for trailers in any case; before, the client must ask (RFC 9110 §6.5.1).
        let asked = |value: &HeaderValue| {
            value.as_bytes().split(|b| *b == b',').any(|item| {
                item.split(|b| *b == b';')
                    .next()
                    .unwrap_or_default()
                    .trim_ascii()
                    .eq_ignore_ascii_case(b"trailers")
            })
        };
        Self { accepts_trailers: version > Version::HTTP_11 || headers.get_all(header::TE).iter().any(asked) }
    }
}

/// What happened to the guarantee, as `Idempotency-Status` says it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GuardStatus {
    Ignored,
    Degraded,
    NotRecorded,
}

impl GuardStatus {
    pub(crate) fn mark(self, headers: &mut HeaderMap) {
        let value = match self {
            Self::Ignored => "ignored",
            Self::Degraded => "degraded",
            Self::NotRecorded => "not-recorded",
        };
        headers.insert(IDEMPOTENCY_STATUS, HeaderValue::from_static(value));
    }
}

/// A refusal.
pub(crate) fn refuse<B>(problem: Problem, settings: &Settings) -> Response<ReplyBody<B>> {
    let original = problem.original().cloned();
    let mut response = problem
        .into_response(settings.docs.as_ref())
        .map(|data| ReplyBody::whole(Whole { data, trailers: None }, None));
    mark_original(response.headers_mut(), original.as_ref(), settings);
    response
}

/// Names the request whose run an answer is about, as its caller named it.
pub(crate) fn mark_original(headers: &mut HeaderMap, original: Option<&Origin>, settings: &Settings) {
    let Some(original) = original.and_then(RequestOrigin::decode) else { return };
    if let Some(id) = original.request_id().and_then(|id| HeaderValue::from_str(id).ok()) {
        headers.insert(settings.names.original_request.clone(), id);
    }
    if let Some(parent) = original.trace().and_then(|trace| HeaderValue::from_str(&trace.to_string()).ok()) {
        headers.insert(IDEMPOTENCY_ORIGINAL_TRACEPARENT, parent);
    }
}

/// The recorded reply, marked as a replay.
pub(crate) fn replay<B>(
    stored: &StoredReply,
    settings: &Settings,
    client: ClientTraits,
) -> Response<ReplyBody<B>> {
    let reply = &stored.reply;
    let mut response = recorded(reply, client);
    let headers = response.headers_mut();
    if reply.is_omitted() {
        headers.insert(IDEMPOTENCY_REPLAY, HeaderValue::from_static("omitted"));
    }
    headers.insert(settings.names.replayed.clone(), HeaderValue::from_static("true"));
    mark_original(headers, stored.origin.as_ref(), settings);
    mark_expiry(headers, stored, settings);
    response
}

/// What another copy was answered when it ended without a result, and when to come back.
pub(crate) fn of_another_copy<B>(
    reply: &Reply,
    retry_after: Duration,
    client: ClientTraits,
) -> Response<ReplyBody<B>> {
    let mut response = recorded(reply, client);
    response.headers_mut().insert(header::RETRY_AFTER, retry_after_value(retry_after));
    response
}

pub(crate) fn recorded<B>(reply: &Reply, client: ClientTraits) -> Response<ReplyBody<B>> {
    let trailers = (!reply.trailers().is_empty()).then(|| Box::new(reply.trailers().clone()));
    let whole = Whole { data: reply.body().clone(), trailers };
    let mut headers = reply.headers().clone();
    let whole = fit_trailers(whole, &mut headers, client);
    let mut response = Response::new(ReplyBody::whole(whole, None));
    *response.status_mut() =
        StatusCode::from_u16(reply.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    *response.headers_mut() = headers;
    response
}

/// The answer of the call itself, whole.
pub(crate) fn first<B>(
    mut parts: response::Parts,
    whole: Whole,
    client: ClientTraits,
    permit: Permit,
) -> Response<ReplyBody<B>> {
    let whole = fit_trailers(whole, &mut parts.headers, client);
    Response::from_parts(parts, ReplyBody::whole(whole, Some(permit)))
}

/// Says until when the key is known, where that is asked for.
pub(crate) fn mark_expiry(headers: &mut HeaderMap, stored: &StoredReply, settings: &Settings) {
    if settings.advertise_expiry
        && let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(stored.expires_at))
    {
        headers.insert(IDEMPOTENCY_KEY_EXPIRES, date);
    }
}

/// Trailers go out where the client takes them; a body with trailers has no Content-Length.
fn fit_trailers(mut whole: Whole, headers: &mut HeaderMap, client: ClientTraits) -> Whole {
    match &whole.trailers {
        Some(trailers) if client.accepts_trailers => {
            headers.remove(header::CONTENT_LENGTH);
            announce_trailers(headers, trailers);
        }
        Some(_) => {
            headers.remove(header::TRAILER);
            whole.trailers = None;
        }
        None => {}
    }
    whole
}

/// Takes what only we may say off the reply of the service behind.
pub(crate) fn clean(parts: &mut response::Parts, settings: &Settings) {
    strip_ours(&mut parts.headers, &settings.names);
}

/// The first answer of an operation whose outcome is unknown, in this attempt.
pub(crate) fn outcome_unknown(policy: &Policy, attempt: u32) -> Problem {
    unknown_under(Problem::new(Code::OutcomeUnknown).status(StatusCode::GATEWAY_TIMEOUT), policy, attempt)
}

/// The answer after a panic.
pub(crate) fn panicked(policy: &Policy, attempt: u32) -> Problem {
    unknown_under(Problem::new(Code::HandlerPanicked), policy, attempt)
}

/// Under takeover a retry runs again after the lease, so it is worth its while: but for the last attempt.
fn unknown_under(problem: Problem, policy: &Policy, attempt: u32) -> Problem {
    if !runs_again(policy, attempt) {
        return problem;
    }
    problem.retryable(true).retry_after(policy.lease).detail(
        "Nobody knows whether it happened. A retry with the same key runs it again once the lease is over.",
    )
}

/// Whether a retry is given an operation whose lease ended in this attempt.
pub(crate) fn runs_again(policy: &Policy, attempt: u32) -> bool {
    policy.on_lease_end == OnLeaseEnd::TakeOver && attempt < policy.max_attempts
}

/// The refusal that an engine error is.
pub(crate) fn of_engine_error(error: &EngineError) -> Problem {
    let code = match error {
        EngineError::Overloaded => Code::Overloaded,
        EngineError::ShuttingDown => Code::ShuttingDown,
        EngineError::Store(error) if error.kind() == StoreErrorKind::Unreadable => Code::RecordUnreadable,
        _ => Code::StoreUnavailable,
    };
    Problem::new(code).retry_after(SOON)
}

/// The refusal past the byte budget.
pub(crate) fn overloaded() -> Problem {
    Problem::new(Code::Overloaded).retry_after(SOON)
}

/// Whether the reply is a stream by its type.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let Some(content_type) = headers.get(header::CONTENT_TYPE) else { return false };
    let essence = content_type.as_bytes().split(|b| *b == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

/// Whether the reply declares another length than its body has: then it ended short.
pub(crate) fn is_short(headers: &HeaderMap, status: StatusCode, body: &Bytes) -> bool {
    let mut declared = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(length) = declared.next() else { return false };
    // They end with their head, whatever they declare: a 304 the length of the body that it does not repeat.
    let bodiless = matches!(status, StatusCode::NOT_MODIFIED | StatusCode::NO_CONTENT) && body.is_empty();
    let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
    !bodiless && length != Some(body.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailers_go_to_those_who_take_them() {
        let takes = |version, te: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            te.map(|te| headers.insert(header::TE, HeaderValue::from_static(te)));
            ClientTraits::of(version, &headers).accepts_trailers
        };
        assert!(takes(Version::HTTP_2, None));
        assert!(takes(Version::HTTP_11, Some("gzip, Trailers")));
        assert!(takes(Version::HTTP_11, Some("trailers;q=0.5")));
        assert!(!takes(Version::HTTP_11, None));
        assert!(!takes(Version::HTTP_11, Some("gzip")));
    }

    #[test]
    fn a_length_that_is_not_the_bodys_is_short() {
        let short = |length: Option<&'static str>, status, body: &'static str| {
            let mut headers = HeaderMap::new();
            length.map(|length| headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static(length)));
            is_short(&headers, status, &Bytes::from(body))
        };
        assert!(!short(None, StatusCode::OK, "abc"));
        assert!(!short(Some("3"), StatusCode::OK, "abc"));
        assert!(short(Some("4"), StatusCode::OK, "abc"));
        assert!(short(Some("x"), StatusCode::OK, "abc"));
        assert!(!short(Some("4"), StatusCode::NOT_MODIFIED, ""));
        assert!(!short(Some("4"), StatusCode::NO_CONTENT, ""));
        assert!(short(Some("4"), StatusCode::OK, ""));
    }
}
