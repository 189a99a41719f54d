//! The HTTP side: `POST /pay`, and a balance to look at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use onlyonce::fingerprint::Material;
use onlyonce::http::headers::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_EXPIRES, IDEMPOTENCY_REPLAYED};
use onlyonce::http::{Code, KeyRule, Problem};
use onlyonce::redis::OnceOutcome;
use onlyonce::{Definition, Key, Operation, Scope, StoredReply};
use serde_json::json;

use crate::amount::Amount;
use crate::ledger::Ledger;

/// A charge is a few dozen bytes.
const BODY_BYTES_MAX: usize = 64 * 1024;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// When a client may try again after a failure that passes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

const CHARGED_ONCE: &str = " Send the same request again after Retry-After: it is not charged twice.";
/// Without keys.
const MAYBE_CHARGED: &str =
    " Nobody knows whether it was charged, and the same request sent again charges again (--unprotected).";

struct Service {
    ledger: Ledger,
    unprotected: bool,
    fail_next: AtomicBool,
}

type Shared = State<Arc<Service>>;

pub(crate) fn router(ledger: Ledger, unprotected: bool, fail_next: bool) -> Router {
    let service = Service { ledger, unprotected, fail_next: AtomicBool::new(fail_next) };
    Router::new()
        .route("/pay", post(pay).fallback(async || not_allowed("POST")))
        .route("/balance", get(balance).fallback(async || not_allowed("GET, HEAD")))
        .fallback(async || {
            refusal(StatusCode::NOT_FOUND, "not-found", "There is nothing here", "POST /pay or GET /balance")
        })
        .with_state(Arc::new(service))
}

async fn balance(State(service): Shared) -> Response {
    match service.ledger.balance().await {
        Ok(balance) => json_response(StatusCode::OK, json!({ "balance": balance }).to_string()),
        Err(error) => unavailable(&error, ""),
    }
}

async fn pay(State(service): Shared, request: Request) -> Response {
    charge(&service, request).await.unwrap_or_else(|refused| refused)
}

/// Everything that can be refused is refused before Redis is asked: a key is not used up by a request that is no charge.
async fn charge(service: &Service, request: Request) -> Result<Response, Response> {
    let (parts, body) = request.into_parts();
    let key = if service.unprotected { None } else { Some(key(&parts.headers).map_err(problem)?) };
    let body = whole(body).await?;
    let amount = Amount::read(&body).map_err(|why| {
        refusal(StatusCode::BAD_REQUEST, "charge-malformed", "This is no charge", &why.to_string())
    })?;
    let Some(key) = key else {
        let (status, body) = service
            .ledger
            .charge_each_time(amount)
            .await
            .map_err(|error| unavailable(&error, MAYBE_CHARGED))?;
        return Ok(json_response(
            StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            body,
        ));
    };
    // The whole request: the same key with another amount, or as another request, is not a retry.
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let material = Material {
        leading: &[parts.method.as_str().as_bytes(), target.as_bytes()],
        headers: &parts.headers,
        body: &body,
        body_is_json: true,
    };
    let fingerprint =
        Definition::raw().fingerprint(&material).map_err(|_| problem(Problem::new(Code::BodyMalformed)))?;
    // One shop, one scope. A service with customers puts the customer here.
    let operation = Operation::new(Scope::anonymous(), key, fingerprint);
    Ok(once(service, &operation, amount).await)
}

async fn once(service: &Service, operation: &Operation, amount: Amount) -> Response {
    // Of several at once one has the fault; where nothing was to be charged, such as in a replay, it waits for the next.
    let fault =
        service.fail_next.swap(false, Ordering::SeqCst).then_some("the charge timed out (--fail-next)");
    let charged = service.ledger.charge(operation, amount, fault).await;
    if fault.is_some() && !matches!(charged, Ok(OnceOutcome::Transient(_))) {
        service.fail_next.store(true, Ordering::SeqCst);
    }
    match charged {
        Ok(OnceOutcome::Ran(stored)) => answer(&stored, false),
        Ok(OnceOutcome::Replayed(stored)) => answer(&stored, true),
        Ok(OnceOutcome::Transient(why)) => {
            tracing::warn!(%why, "nothing was charged, and the key is free");
            let detail =
                "Nothing was charged, and the key is free: send the same request again after Retry-After.";
            let mut refused = refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                "not-charged",
                "The charge failed for the moment",
                detail,
            );
            refused.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER.as_secs()));
            refused
        }
        Ok(OnceOutcome::Mismatch { .. }) => problem(Problem::new(Code::KeyReused)),
        Ok(OnceOutcome::InProgress { lease_left, .. }) => {
            problem(Problem::new(Code::InProgress).retry_after(lease_left))
        }
        Ok(OnceOutcome::Unknown { .. }) => problem(Problem::new(Code::OutcomeUnknown)),
        Err(error) => unavailable(&error.into(), CHARGED_ONCE),
    }
}

fn key(headers: &HeaderMap) -> Result<Key, Problem> {
    match KeyRule::default().read(headers) {
        Ok(Some(key)) => Ok(key),
        Ok(None) => Err(Problem::new(Code::KeyMissing)),
        Err(why) => Err(Problem::new(Code::KeyMalformed).detail(format!("{IDEMPOTENCY_KEY}: {why}."))),
    }
}

async fn whole(body: Body) -> Result<Bytes, Response> {
    let body = match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(body) => body,
        Err(_) => return Err(problem(Problem::new(Code::BodyTimeout))),
    };
    body.map_err(|error| {
        let too_large = std::error::Error::source(&error)
            .is_some_and(|source| source.to_string().contains("length limit"));
        let code = if too_large { Code::BodyTooLarge } else { Code::BodyIncomplete };
        problem(Problem::new(code))
    })
}

fn answer(stored: &StoredReply, replayed: bool) -> Response {
    let reply = &stored.reply;
    let mut response = Response::new(Body::from(reply.body().clone()));
    *response.status_mut() =
        StatusCode::from_u16(reply.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    *response.headers_mut() = reply.headers().clone();
    // A client that comes back later than this is charged anew; it should know.
    if let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(stored.expires_at)) {
        response.headers_mut().insert(IDEMPOTENCY_KEY_EXPIRES, date);
    }
    if replayed {
        response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    }
    response
}

fn unavailable(error: &anyhow::Error, then: &str) -> Response {
    tracing::error!("{error:#}");
    let detail = format!("Redis does not answer as it should.{then}");
    problem(Problem::new(Code::StoreUnavailable).detail(detail).retry_after(RETRY_AFTER))
}

fn problem(problem: Problem) -> Response {
    problem.into_response(None).map(Body::from)
}

/// A refusal of this service's own, in the form of the others.
fn refusal(status: StatusCode, code: &str, title: &str, detail: &str) -> Response {
    let body = json!({
        "type": format!("urn:pay:error:{code}"),
        "title": title,
        "status": status.as_u16(),
        "detail": detail,
        "code": code,
        "retryable": status == StatusCode::SERVICE_UNAVAILABLE,
    });
    let mut response = json_response(status, body.to_string());
    let kind = HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn not_allowed(allowed: &'static str) -> Response {
    let mut response = refusal(
        StatusCode::METHOD_NOT_ALLOWED,
        "method-not-allowed",
        "Another method is needed here",
        allowed,
    );
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

fn json_response(status: StatusCode, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
