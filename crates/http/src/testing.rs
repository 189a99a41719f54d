//! For the tests of services behind the layer.

use std::fmt::Debug;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt, Full};
pub use onlyonce_core::TestClock;
use tower_service::Service;

use crate::body::BoxError;
use crate::headers::{IDEMPOTENCY_REPLAYED, IDEMPOTENT_REPLAYED};

/// Copies that are sent at once.
const COPIES: usize = 10;

/// Sends ten copies of a request at once and then one more, and checks that it ran once: one answer of the ten is no
/// replay, the last one is, and all replays equal the first answer in status and body. Copies that meet one in flight may
/// be told so (409 `in-progress`).
///
/// The request must have a key of its own that was not used before. Returns the first answer.
///
/// # Panics
/// When anything else happens; a service that fails is such a thing.
///
/// ```
/// # use axum::{Router, body::Body, routing::post};
/// use http::Request;
/// use onlyonce_engine::Idempotency;
/// use onlyonce_http::{IdempotencyLayer, testing::assert_runs_once};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let router: Router = Router::new()
///     .route("/charges", post(async || "charged"))
///     .layer(IdempotencyLayer::new(&Idempotency::in_memory()));
/// let request = Request::post("/charges").header("idempotency-key", "order-42").body("100 EUR".into()).unwrap();
/// let answer = assert_runs_once(router.into_service::<http_body_util::Full<bytes::Bytes>>(), request).await;
/// assert_eq!(answer.body(), "charged");
/// # }
/// ```
pub async fn assert_runs_once<S, RB>(service: S, request: Request<Bytes>) -> Response<Bytes>
where
    S: Service<Request<Full<Bytes>>, Response = Response<RB>> + Clone,
    S::Error: Debug,
    RB: Body<Data = Bytes>,
    RB::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    let send = async || {
        let request = Request::from_parts(parts.clone(), Full::new(body.clone()));
        send(service.clone(), request).await
    };
    let (mut ran, mut replays) = (Vec::new(), Vec::new());
    for copy in join_all((0..COPIES).map(|_| send())).await {
        if is_replay(copy.headers()) {
            replays.push(copy);
        } else if !is_in_progress(&copy) {
            ran.push(copy);
        }
    }
    assert!(ran.len() <= 1, "{} of {COPIES} copies ran: {ran:?}", ran.len());
    let first = ran.pop().expect("one of the copies runs; or was the key used before?");
    let retry = send().await;
    let (status, body) = (retry.status(), retry.body());
    assert!(is_replay(retry.headers()), "the retry is no replay, it was answered {status} {body:?}");
    for replay in replays.iter().chain([&retry]) {
        let (replayed, original) = ((replay.status(), replay.body()), (first.status(), first.body()));
        assert_eq!(replayed, original, "a replay is not the first answer");
    }
    first
}

fn is_in_progress(answer: &Response<Bytes>) -> bool {
    answer.status() == StatusCode::CONFLICT && answer.headers().contains_key(header::RETRY_AFTER)
}

fn is_replay(headers: &HeaderMap) -> bool {
    headers.contains_key(IDEMPOTENCY_REPLAYED) || headers.contains_key(IDEMPOTENT_REPLAYED)
}

async fn send<S, RB>(mut service: S, request: Request<Full<Bytes>>) -> Response<Bytes>
where
    S: Service<Request<Full<Bytes>>, Response = Response<RB>>,
    S::Error: Debug,
    RB: Body<Data = Bytes>,
    RB::Error: Into<BoxError>,
{
    std::future::poll_fn(|cx| service.poll_ready(cx)).await.expect("the service is ready");
    let response = service.call(request).await.expect("the service answers");
    let (parts, body) = response.into_parts();
    let body = body.collect().await.map_err(Into::into).expect("the answer has a whole body");
    Response::from_parts(parts, body.to_bytes())
}
