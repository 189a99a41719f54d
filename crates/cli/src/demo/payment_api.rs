//! A payment API as they are: it charges whatever it is told, as often as it is told.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpListener;

/// What the account holds at the start.
pub(crate) const START_BALANCE: i64 = 10_000;

/// The longest that a caller may slow a payment down, in ms.
const LATENCY_MS_MAX: u64 = 10_000;

#[derive(Debug)]
pub(crate) struct PaymentApi {
    pub(crate) address: SocketAddr,
    balance: Arc<AtomicI64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Payment {
    amount: i64,
}

/// Starts it on a free port of the loopback interface.
pub(crate) async fn start() -> Result<PaymentApi> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("no free port for the payment API")?;
    let address = listener.local_addr()?;
    let balance = Arc::new(AtomicI64::new(START_BALANCE));
    let served = balance.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let balance = served.clone();
            let service = service_fn(move |request| answer(request, balance.clone()));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    Ok(PaymentApi { address, balance })
}

impl PaymentApi {
    /// Puts the account back to its start, between two parts of the story.
    pub(crate) fn reset(&self) {
        self.balance.store(START_BALANCE, Ordering::SeqCst);
    }
}

async fn answer(
    request: Request<Incoming>,
    balance: Arc<AtomicI64>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let latency =
        request.headers().get("x-demo-latency-ms").and_then(|value| value.to_str().ok()?.parse().ok());
    let path = request.uri().path().to_owned();
    Ok(match (request.method(), path.as_str()) {
        (&Method::GET, "/balance") => {
            json(StatusCode::OK, format!("{{\"balance\":{}}}", balance.load(Ordering::SeqCst)))
        }
        (&Method::POST, "/pay") => {
            let body = Limited::new(request.into_body(), 4096).collect().await.map(|body| body.to_bytes());
            let payment = body.ok().and_then(|body| serde_json::from_slice::<Payment>(&body).ok());
            match payment.filter(|payment| payment.amount > 0) {
                None => json(
                    StatusCode::BAD_REQUEST,
                    r#"{"error":"send {\"amount\": <positive whole number>}"}"#.into(),
                ),
                Some(payment) => pay(payment.amount, &balance, latency.unwrap_or(0)).await,
            }
        }
        _ => json(StatusCode::NOT_FOUND, r#"{"error":"POST /pay or GET /balance"}"#.into()),
    })
}

async fn pay(amount: i64, balance: &AtomicI64, latency_ms: u64) -> Response<Full<Bytes>> {
    let paid = balance
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| (held >= amount).then(|| held - amount));
    // The money is gone already; only the answer is slow. That is when clients time out and try again.
    tokio::time::sleep(Duration::from_millis(latency_ms.min(LATENCY_MS_MAX))).await;
    match paid {
        Ok(before) => {
            json(StatusCode::OK, format!("{{\"charged\":{amount},\"balance\":{}}}", before - amount))
        }
        Err(held) => json(
            StatusCode::PAYMENT_REQUIRED,
            format!("{{\"error\":\"insufficient balance\",\"balance\":{held}}}"),
        ),
    }
}

fn json(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}
