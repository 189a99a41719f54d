//! The handler of `onlyonce-bench layer`, bare (`/bare`) and guarded by hand (`/charges`) with the crate `idempotent`.
//!
//! ```sh
//! cargo build --release --manifest-path benches/peer/Cargo.toml
//! onlyonce-bench layer --peer benches/peer/target/release/onlyonce-bench-peer
//! ```
//!
//! It takes the URL of a Redis server, listens on a free port, tells it on its standard output, and lives as long as its
//! standard input is open.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use bytes::Bytes;
use idempotent::entry::ExistingEntry;
use idempotent::fingerprint::{DefaultFingerprintStrategy, FingerprintStrategy};
use idempotent::store::valkey::ValkeyStore;
use idempotent::store::{IdempotencyStore, InsertResult};
use idempotent::{CachedResponse, IdempotencyEntry, IdempotencyKey, Metadata};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

const TTL: Duration = Duration::from_secs(24 * 3600);
const REPLY_BODY: &str = r#"{"id":"ch_0123456789abcdef","amount":100,"currency":"EUR","status":"succeeded"}"#;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).context("the URL of a Redis server is needed")?;
    let store = ValkeyStore::new(redis::Client::open(url)?).await?;
    let app =
        Router::new().route("/bare", post(bare)).route("/charges", post(guarded)).with_state(Arc::new(store));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let served = axum::serve(listener, app).into_future();
    let ended = async {
        let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    };
    tokio::select! { served = served => served?, () = ended => {} }
    Ok(())
}

async fn bare(body: Bytes) -> Response {
    charge(&body)
}

fn charge(body: &[u8]) -> Response {
    let status = if body.starts_with(b"{") { StatusCode::CREATED } else { StatusCode::BAD_REQUEST };
    reply(status, Bytes::from_static(REPLY_BODY.as_bytes()))
}

fn reply(status: StatusCode, body: Bytes) -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (LOCATION, HeaderValue::from_static("/charges/ch_0123456789abcdef")),
    ];
    (status, headers, body).into_response()
}

/// What the crate's documentation shows: claim, work, complete.
async fn guarded(State(store): State<Arc<ValkeyStore>>, headers: HeaderMap, body: Bytes) -> Response {
    match once(&store, &headers, &body).await {
        Ok(reply) => reply,
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}

async fn once(store: &ValkeyStore, headers: &HeaderMap, body: &[u8]) -> Result<Response> {
    let key = headers.get("idempotency-key").context("no key")?.to_str()?;
    let key = IdempotencyKey::new(key)?;
    let fingerprint = DefaultFingerprintStrategy.compute("POST /charges", body);
    let entry = IdempotencyEntry::new(fingerprint, TTL);
    match store.try_insert(&key, entry.clone()).await? {
        InsertResult::Claimed { fencing_token } => {
            let done = charge(body);
            let response = CachedResponse {
                status_code: done.status().as_u16(),
                metadata: Metadata::default(),
                body: Bytes::from_static(REPLY_BODY.as_bytes()),
            };
            store.complete(&key, entry.complete(response), fencing_token).await?;
            Ok(done)
        }
        InsertResult::Exists(ExistingEntry::Completed(stored)) if stored.fingerprint_matches(fingerprint) => {
            let stored = stored.into_response();
            Ok(reply(StatusCode::from_u16(stored.status_code)?, stored.body))
        }
        InsertResult::Exists(ExistingEntry::Completed(_)) => {
            Ok(StatusCode::UNPROCESSABLE_ENTITY.into_response())
        }
        InsertResult::Exists(ExistingEntry::Processing(_)) => Ok(StatusCode::CONFLICT.into_response()),
    }
}
