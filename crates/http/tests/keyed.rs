//! Handlers that claim in a transaction of their own: how a request is read, and what each outcome is answered with.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use onlyonce_core::{
    Fingerprint, OnceOutcome, Origin, Reply, StoreError, StoreErrorKind, StoredReply, TxFailure,
};
use onlyonce_engine::Idempotency;
use onlyonce_http::testing::assert_runs_once;
use onlyonce_http::{IdempotencyLayer, Keyed, Transactional};
use onlyonce_store_sqlite::SqliteStore;
use serde_json::Value;

fn rules() -> Transactional {
    layer().transactional()
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(&Idempotency::in_memory()).wait(Duration::from_secs(7)).advertise_expiry()
}

fn request(key: Option<&str>, body: &'static str) -> Request<Full<Bytes>> {
    let request = Request::put("/orders/7?x=1").header("x-request-id", "req-1");
    let request = key.map_or(Request::put("/orders/7"), |key| request.header("idempotency-key", key));
    request.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
}

async fn read(key: &str, body: &'static str) -> Keyed {
    rules().read(request(Some(key), body)).await.unwrap_or_else(|answer| panic!("{}", answer.status()))
}

/// Status, Retry-After, the code of the problem document.
async fn problem<B>(answer: http::Response<B>) -> (u16, bool, String)
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = answer.into_parts();
    let retry = parts.headers.contains_key(header::RETRY_AFTER);
    let document: Value = serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
    (parts.status.as_u16(), retry, document["code"].as_str().unwrap_or_default().to_owned())
}

fn stored(reply: Reply) -> StoredReply {
    let completed_at = SystemTime::UNIX_EPOCH;
    let retention = Duration::from_secs(3600);
    StoredReply {
        reply,
        completed_at,
        expires_at: completed_at + retention,
        remaining: retention,
        origin: None,
    }
}

#[tokio::test]
async fn a_request_is_read_with_its_operation_whatever_its_method() {
    let keyed = read("k-1", r#"{"item":"tea"}"#).await;
    assert_eq!(keyed.operation().key().as_str(), "k-1");
    assert_eq!(keyed.body(), r#"{"item":"tea"}"#);
    assert_eq!(
        (keyed.parts().uri.path(), keyed.headers()["x-request-id"].as_bytes()),
        ("/orders/7", &b"req-1"[..])
    );
    assert_eq!(keyed.options().wait, Duration::from_secs(7));
    assert!(keyed.operation().origin().is_some());
    // The same request is the same operation, another body or another caller is not.
    let again = read("k-1", r#"{"item":"tea"}"#).await;
    assert_eq!(again.operation().fingerprint(), keyed.operation().fingerprint());
    assert_eq!(again.downstream_key("pay"), keyed.downstream_key("pay"));
    assert_ne!(again.downstream_key("pay"), again.downstream_key("mail"));
    assert_ne!(
        read("k-1", r#"{"item":"jam"}"#).await.operation().fingerprint(),
        keyed.operation().fingerprint()
    );
    let layer = IdempotencyLayer::new(&Idempotency::in_memory()).scope(|parts| {
        parts.headers.get("x-merchant").and_then(|name| name.to_str().ok()).map(str::to_owned)
    });
    let mut of_another = request(Some("k-1"), "");
    of_another.headers_mut().insert("x-merchant", HeaderValue::from_static("m-2"));
    let of_another = layer.transactional().read(of_another).await.unwrap();
    assert_ne!(of_another.operation().id(), read("k-1", "").await.operation().id());
}

#[tokio::test]
async fn what_cannot_be_guarded_is_refused_with_its_problem() {
    let refused = async |request| problem(rules().read(request).await.unwrap_err()).await;
    assert_eq!(refused(request(None, "")).await, (400, false, "key-missing".into()));
    assert_eq!(refused(request(Some(""), "")).await, (400, false, "key-malformed".into()));
    let mut two = request(Some("a"), "");
    two.headers_mut().append("idempotency-key", HeaderValue::from_static("b"));
    assert_eq!(refused(two).await, (400, false, "key-malformed".into()));
    let small = layer().max_request_body(3).transactional();
    let answer = small.read(request(Some("k"), "four")).await.unwrap_err();
    assert_eq!(problem(answer).await, (413, false, "body-too-large".into()));
}

#[tokio::test]
async fn replies_go_out_as_they_are_stored_and_replays_are_marked() {
    let reply =
        Reply::new(201, "ordered").with_header(header::LOCATION, HeaderValue::from_static("/orders/7"));
    for (replays, outcome) in [
        (false, OnceOutcome::Ran(stored(reply.clone()))),
        (true, OnceOutcome::Replayed(stored(reply.clone()))),
    ] {
        let answer = read("k", "").await.answer(Ok(outcome));
        assert_eq!(answer.status(), StatusCode::CREATED);
        assert_eq!(answer.headers()[header::LOCATION], "/orders/7");
        assert_eq!(answer.headers().contains_key("idempotency-replayed"), replays);
        assert!(answer.headers().contains_key("idempotency-key-expires"));
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "ordered");
    }
}

#[tokio::test]
async fn every_other_outcome_is_a_problem_that_says_whether_to_retry() {
    let keyed = read("k", "").await;
    let origin = || Some(Origin::new("req-0").unwrap());
    let in_progress =
        OnceOutcome::InProgress { lease_left: Duration::ZERO, age: Duration::ZERO, origin: origin() };
    // Its fingerprint is one of the layer's own definition, of another request; or of none.
    let other = *read("k", "other").await.operation().fingerprint();
    let strange = Fingerprint::of("strange");
    let unknown = OnceOutcome::Unknown { since: SystemTime::UNIX_EPOCH, origin: origin() };
    let failed = |kind| Err(StoreError::new(kind, "once"));
    for (outcome, expected) in [
        (Ok(in_progress), (409, true, "in-progress")),
        (Ok(OnceOutcome::Mismatch { stored: other, origin: origin() }), (422, false, "key-reused")),
        (Ok(OnceOutcome::Mismatch { stored: strange, origin: None }), (422, false, "key-reused")),
        (Ok(unknown), (409, false, "outcome-unknown")),
        (Ok(OnceOutcome::Transient("the bank is closed".into())), (503, true, "overloaded")),
        (failed(StoreErrorKind::Unavailable), (503, true, "store-unavailable")),
        (failed(StoreErrorKind::Timeout), (503, true, "store-unavailable")),
        (failed(StoreErrorKind::Conflict), (503, true, "overloaded")),
        (failed(StoreErrorKind::Unreadable), (503, true, "record-unreadable")),
    ] {
        let said = format!("{outcome:?}");
        let (status, retry, code) = expected;
        assert_eq!(problem(keyed.answer(outcome)).await, (status, retry, code.to_owned()), "{said}");
    }
    // Where it may have happened the answer says so, and nothing of the cause.
    let error = StoreError::new(StoreErrorKind::Unavailable, "once").with_detail("10.0.0.7").ambiguous();
    let body = keyed.answer(Err(error)).into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert!(text.contains("It may have happened") && !text.contains("10.0.0.7"), "{text}");
}

/// A service whose record and effect are one transaction.
#[derive(Clone)]
struct Shop {
    transactional: Transactional,
    store: SqliteStore,
    runs: Arc<AtomicUsize>,
}

impl FromRef<Shop> for Transactional {
    fn from_ref(shop: &Shop) -> Self {
        shop.transactional.clone()
    }
}

async fn order(State(shop): State<Shop>, request: Keyed) -> Response {
    let (runs, item) = (Arc::clone(&shop.runs), request.body().clone());
    let work = move |_: &onlyonce_store_sqlite::rusqlite::Transaction<'_>| {
        runs.fetch_add(1, Ordering::Relaxed);
        if item == "sold out" {
            return Err(TxFailure::Definitive(Reply::new(409, "sold out")));
        }
        Ok(Reply::new(201, item))
    };
    let outcome = shop.store.once_with(request.operation(), request.options(), work).await;
    request.answer(outcome).into_response()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_in_three_lines_runs_once_and_replays() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("shop.db")).await.unwrap();
    let shop = Shop { transactional: rules(), store, runs: Arc::default() };
    let router = Router::new().route("/orders", any(order)).with_state(shop.clone());
    for (body, status) in [("tea", StatusCode::CREATED), ("sold out", StatusCode::CONFLICT)] {
        let request = Request::post("/orders")
            .header("idempotency-key", format!("key-of-{}", body.len()))
            .body(Bytes::from(body));
        let service = router.clone().into_service::<Full<Bytes>>();
        let answer = assert_runs_once(service, request.unwrap()).await;
        assert_eq!((answer.status(), &answer.body()[..]), (status, body.as_bytes()));
    }
    assert_eq!(shop.runs.load(Ordering::Relaxed), 2);
    // Refused before the handler.
    let request = Request::get("/orders").body(Full::<Bytes>::default()).unwrap();
    let mut service = router.into_service::<Full<Bytes>>();
    let answer = tower_service::Service::call(&mut service, request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
}
