//! A fake payment provider. Like the real ones it takes a key with each charge and charges once for each.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::routing::post;
use axum::{Router, body::Bytes};
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// More than anybody has.
const AMOUNT_MAX: u64 = 1000;

#[derive(Default)]
struct Ledger {
    calls: usize,
    /// By key: the charge's number.
    charges: HashMap<String, usize>,
}

type Shared = Arc<Mutex<Ledger>>;

pub(crate) fn router() -> Router {
    Router::new().route("/charges", post(charge).get(charges)).with_state(Shared::default())
}

async fn charges(State(ledger): State<Shared>) -> String {
    let ledger = ledger.lock();
    json!({ "calls": ledger.calls, "charges": ledger.charges.len() }).to_string()
}

async fn charge(State(ledger): State<Shared>, headers: HeaderMap, body: Bytes) -> (StatusCode, String) {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let amount = serde_json::from_slice::<Value>(&body).ok().and_then(|body| body["amount"].as_u64());
    let (Some(key), Some(amount)) = (key, amount) else {
        return (StatusCode::BAD_REQUEST, json!({ "error": "a key and an amount are needed" }).to_string());
    };
    let mut ledger = ledger.lock();
    ledger.calls += 1;
    if amount > AMOUNT_MAX {
        return (StatusCode::PAYMENT_REQUIRED, json!({ "error": "declined" }).to_string());
    }
    let next = ledger.charges.len() + 1;
    let number = *ledger.charges.entry(key.to_owned()).or_insert(next);
    (StatusCode::CREATED, json!({ "charge": format!("ch_{number}") }).to_string())
}
