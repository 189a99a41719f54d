//! The listener: small, bounded, and apart from the one that clients use.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

use super::State;

/// Connections at once; more wait in the listen queue of the system.
const CONNECTIONS_MAX: usize = 64;

/// How long a connection may take for one request and its answer, and how long it may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The life of a connection: nobody keeps one of the few places for ever.
const LIFE_MAX: Duration = Duration::from_secs(300);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) async fn serve(listener: TcpListener, state: Arc<State>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "no connection to the admin listener can be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let state = state.clone();
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(|request: Request<Incoming>| {
                let state = state.clone();
                async move {
                    Ok::<_, Infallible>(
                        state.answer(request.method(), request.uri().path(), request.headers()).await,
                    )
                }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(16 << 10);
            // An error is the client's own.
            let _ = timeout(LIFE_MAX, builder.serve_connection(TokioIo::new(stream), service)).await;
        });
    }
}

impl State {
    async fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Full<Bytes>> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "GET is served, and HEAD\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        match path {
            "/healthz" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.readiness(headers).await,
            "/metrics" if self.knows(headers) => self.metrics().await,
            "/metrics" => {
                let mut response =
                    text(StatusCode::UNAUTHORIZED, "send the admin token: Authorization: Bearer TOKEN\n");
                response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                response
            }
            _ => text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
        }
    }

    /// Whether the request has the token, where there is one.
    fn knows(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        given
            .and_then(|given| given.split_at_checked(7))
            .is_some_and(|(scheme, given)| scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(given))
    }

    async fn readiness(&self, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let mut reasons = Vec::new();
        if self.stopping.load(Ordering::Relaxed) {
            reasons.push("it is stopping".to_owned());
        }
        if let Some(health) = &self.health
            && let Err(why) = health.store().await
        {
            reasons.push(format!("the store does not answer: {why}"));
        }
        let ready = reasons.is_empty();
        let mut body = json!({ "ready": ready });
        if !ready && self.knows(headers) {
            body["reasons"] = reasons.into();
        }
        let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        answer(status, "application/json", format!("{body}\n"))
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        if let Some(health) = &self.health {
            // What is wrong is among the metrics.
            let _ = health.store().await;
            health.count_unknown().await;
        }
        match self.metrics.encode() {
            Ok(metrics) => answer(StatusCode::OK, OPEN_METRICS, metrics),
            Err(error) => {
                warn!(%error, "the metrics cannot be written");
                text(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written\n")
            }
        }
    }
}

fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    answer(status, "text/plain; charset=utf-8", body.to_owned())
}

fn answer(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
