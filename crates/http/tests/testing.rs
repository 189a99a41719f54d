//! The helper for the tests of others passes what is guarded and fails what is not.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use onlyonce_engine::Idempotency;
use onlyonce_http::IdempotencyLayer;
use onlyonce_http::testing::{TestClock, assert_runs_once};

fn request() -> Request<Bytes> {
    Request::post("/charges").header("idempotency-key", "order-42").body("100 EUR".into()).unwrap()
}

/// Answers with the number of its run, after a pause in which copies meet it in flight.
fn charges(runs: &Arc<AtomicUsize>, status: StatusCode) -> Router {
    let runs = runs.clone();
    let charge = async move || {
        let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
        (status, format!("run {run}"))
    };
    Router::new().route("/charges", post(charge))
}

async fn check(router: Router) {
    assert_runs_once(router.into_service::<Full<Bytes>>(), request()).await;
}

#[tokio::test]
async fn a_guarded_service_passes_whether_copies_wait_or_are_told() {
    for wait in [Duration::ZERO, Duration::from_secs(20)] {
        let runs = Arc::default();
        let layer = IdempotencyLayer::new(&Idempotency::in_memory()).wait(wait);
        check(charges(&runs, StatusCode::CREATED).layer(layer)).await;
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
#[should_panic(expected = "of 10 copies ran")]
async fn a_service_without_the_layer_fails() {
    check(charges(&Arc::default(), StatusCode::CREATED)).await;
}

#[tokio::test]
#[should_panic(expected = "the retry is no replay")]
async fn a_service_that_fails_and_is_released_fails() {
    let layer = IdempotencyLayer::new(&Idempotency::in_memory());
    check(charges(&Arc::default(), StatusCode::SERVICE_UNAVAILABLE).layer(layer)).await;
}

#[tokio::test]
#[should_panic(expected = "was the key used before?")]
async fn a_key_that_was_used_before_fails() {
    let router =
        charges(&Arc::default(), StatusCode::CREATED).layer(IdempotencyLayer::new(&Idempotency::in_memory()));
    check(router.clone()).await;
    check(router).await;
}

/// Leases and expiry in the tests of others: one clock for store and engine.
#[tokio::test]
async fn the_clock_of_a_test_moves_a_whole_service() {
    let clock = TestClock::new();
    let store = onlyonce_core::MemoryStore::with_clock(Arc::new(clock.clone()));
    let idem = Idempotency::builder(store).clock(Arc::new(clock.clone())).build();
    let runs = Arc::default();
    let router = charges(&runs, StatusCode::CREATED).layer(IdempotencyLayer::new(&idem));
    check(router.clone()).await;
    clock.advance(Duration::from_secs(24 * 3600));
    check(router).await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}
