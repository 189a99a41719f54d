//! A payment service on axum.
//!
//! ```sh
//! cargo run -p onlyonce --features axum --example axum -- pay.db
//! curl -i 127.0.0.1:3000/charges -H 'idempotency-key: "order-42"' -H 'x-merchant: m1' -d '{"amount":100}' -H 'content-type: application/json'
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use onlyonce::fingerprint::Definition;
use onlyonce::{Context, Idempotency, IdempotencyLayer, SqliteStore};
use serde_json::{Value, json};

/// The account that charges are taken from.
#[derive(Clone)]
pub(crate) struct Account(Arc<AtomicI64>);

impl Account {
    /// One with this balance.
    pub(crate) fn new(balance: i64) -> Self {
        Self(Arc::new(AtomicI64::new(balance)))
    }
}

/// Sent twice, a charge happens once.
async fn charge(
    State(account): State<Account>,
    Extension(context): Extension<Context>,
    Json(order): Json<Value>,
) -> (StatusCode, Json<Value>) {
    let Some(amount) = order["amount"].as_i64().filter(|amount| *amount > 0) else {
        // Decided: every retry gets the same refusal.
        return (StatusCode::UNPROCESSABLE_ENTITY, Json(json!({"error": "an amount is needed"})));
    };
    // A provider gets this key: the same on every attempt, so that it sees one charge too.
    let provider_key = context.downstream_key("charge");
    let balance = account.0.fetch_sub(amount, Ordering::SeqCst) - amount;
    (StatusCode::CREATED, Json(json!({"charged": amount, "balance": balance, "provider_key": provider_key})))
}

/// All routes. Only what is under the layer needs a key.
pub(crate) fn router(idem: &Idempotency, account: Account) -> Router {
    let layer = IdempotencyLayer::new(idem)
        .scope(|parts| Some(parts.headers.get("x-merchant")?.to_str().ok()?.to_owned()))
        .fingerprint(Definition::canonical_json())
        .wait(Duration::from_secs(2));
    let balance = async |State(account): State<Account>| account.0.load(Ordering::SeqCst).to_string();
    Router::new()
        .route("/charges", post(charge).layer(layer))
        .route("/balance", get(balance))
        .with_state(account)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).unwrap_or_else(|| "onlyonce.db".into());
    let idem = Idempotency::builder(SqliteStore::open(file).await?).build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, router(&idem, Account::new(10_000))).await?;
    Ok(())
}
