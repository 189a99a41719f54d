//! A client that may send twice: one operation, one key, as many tries as it takes. See `docs/clients.md`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

/// How long one try may take.
const TRY: Duration = Duration::from_secs(30);
/// The first pause is up to so long, each further one up to twice the one before.
const PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// One operation. Keep both, in one transaction with what it is for, before the first try: after a crash the next run of the
/// program goes on with them.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Made once: a random UUID, or a name that the operation has anyway.
    pub key: String,
    /// The bytes that every try sends.
    pub body: Bytes,
}

/// Sends the operation until it has a result, for at most `patience`.
///
/// # Errors
/// When there is none by then: go on later, with the same key.
pub async fn send(url: &Uri, operation: &Operation, patience: Duration) -> Result<(StatusCode, Bytes)> {
    let (end, mut pause) = (Instant::now() + patience, PAUSE);
    loop {
        // No answer: it may have happened, and the key makes it safe to ask again.
        let mut wait = Duration::ZERO;
        if let Ok(Ok((status, headers, body))) = timeout(TRY, attempt(url, operation)).await {
            if !is_retryable(status, &body) {
                return Ok((status, body));
            }
            wait = retry_after(&headers);
        }
        let wait = wait.max(pause.mul_f64(random()?));
        if Instant::now() + wait > end {
            bail!("no result yet; go on later with the same key {}", operation.key);
        }
        sleep(wait).await;
        pause = (2 * pause).min(PAUSE_MAX);
    }
}

/// One try, on a connection of its own: none that the other side may have closed.
async fn attempt(url: &Uri, operation: &Operation) -> Result<(StatusCode, HeaderMap, Bytes)> {
    let authority = url.authority().context("a host")?;
    let stream = TcpStream::connect((authority.host(), authority.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::post(url.path_and_query().map_or("/", |path| path.as_str()))
        .header("host", authority.as_str())
        .header("content-type", "application/json")
        .header("idempotency-key", format!("\"{}\"", operation.key))
        .body(Full::new(operation.body.clone()))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    Ok((head.status, head.headers, body.collect().await?.to_bytes()))
}

/// Whether the same request may have a result later. A refusal says so itself.
fn is_retryable(status: StatusCode, body: &[u8]) -> bool {
    let said =
        serde_json::from_slice::<serde_json::Value>(body).ok().and_then(|body| body["retryable"].as_bool());
    let passing = matches!(status.as_u16(), 408 | 425 | 429 | 500 | 502 | 503);
    !status.is_success() && said.unwrap_or(passing)
}

fn retry_after(headers: &HeaderMap) -> Duration {
    let seconds = headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

/// From 0 to 1: clients that failed together do not come back together.
fn random() -> Result<f64> {
    Ok(f64::from(getrandom::u32().context("random bytes")?) / f64::from(u32::MAX))
}
