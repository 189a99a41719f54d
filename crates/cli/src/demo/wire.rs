//! The demo's client: one request, one connection, nothing hidden.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// What a payment is sent with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pay<'a> {
    pub(crate) key: Option<&'a str>,
    pub(crate) amount: i64,
    pub(crate) latency_ms: u64,
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
    pub(crate) replayed: bool,
}

impl Answer {
    /// The `code` of a problem document.
    pub(crate) fn code(&self) -> Option<String> {
        let problem: serde_json::Value = serde_json::from_str(&self.body).ok()?;
        Some(problem.get("code")?.as_str()?.to_owned())
    }
}

pub(crate) async fn pay(to: SocketAddr, pay: Pay<'_>) -> Result<Answer> {
    let mut request = Request::builder()
        .method(Method::POST)
        .uri("/pay")
        .header(header::HOST, to.to_string())
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = pay.key {
        request = request.header("idempotency-key", key);
    }
    if pay.latency_ms > 0 {
        request = request.header("x-demo-latency-ms", pay.latency_ms);
    }
    send(to, request.body(Full::from(format!("{{\"amount\":{}}}", pay.amount)))?).await
}

pub(crate) async fn balance(of: SocketAddr) -> Result<i64> {
    let request = Request::get("/balance").header(header::HOST, of.to_string()).body(Full::default())?;
    let answer = send(of, request).await?;
    let body: serde_json::Value = serde_json::from_str(&answer.body)
        .with_context(|| format!("GET /balance answered {} {}", answer.status, answer.body))?;
    match body["balance"].as_i64() {
        Some(balance) => Ok(balance),
        None => bail!("GET /balance answered {} {}", answer.status, answer.body),
    }
}

async fn send(to: SocketAddr, request: Request<Full<Bytes>>) -> Result<Answer> {
    timeout(PATIENCE, async {
        let stream = TcpStream::connect(to).await.with_context(|| format!("cannot connect to {to}"))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let replayed = response.headers().get("idempotency-replayed").is_some_and(|value| value == "true");
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        connection.abort();
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        Ok(Answer { status, body: String::from_utf8_lossy(&body).into_owned(), replayed })
    })
    .await
    .with_context(|| format!("{to} did not answer within {PATIENCE:?}"))?
}
