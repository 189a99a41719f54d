//! The shop: order, payment and record in one transaction.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use onlyonce::http::{Keyed, Transactional};
use onlyonce::postgres::deadpool_postgres::{Manager, Object, Pool, Runtime};
use onlyonce::postgres::tokio_postgres::{Config, NoTls, Transaction};
use onlyonce::{
    Idempotency, IdempotencyLayer, OnceOutcome, PostgresStore, Reply, StoreError, StoreErrorKind, TxFailure,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// How long a provider may think. Its order's transaction is open meanwhile.
const PROVIDER_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(crate) struct Shop {
    store: PostgresStore,
    pool: Pool,
    transactional: Transactional,
    provider: SocketAddr,
    stop_before_commit: bool,
    // Removes records that are over.
    _engine: Idempotency,
}

/// What is ordered.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    item: String,
    amount: u32,
}

pub(crate) fn router(shop: Shop) -> Router {
    Router::new().route("/orders", post(order)).with_state(shop)
}

// The whole handler.
async fn order(State(shop): State<Shop>, request: Keyed) -> Response {
    let Ok(order) = serde_json::from_slice::<Order>(request.body()) else { return malformed() };
    let outcome = shop.place_once(&request, &order).await;
    request.answer(outcome).into_response()
}

impl FromRef<Shop> for Transactional {
    fn from_ref(shop: &Shop) -> Self {
        shop.transactional.clone()
    }
}

impl Shop {
    pub(crate) async fn open(url: &str, provider: SocketAddr, stop_before_commit: bool) -> Result<Self> {
        let store = PostgresStore::open(url).await.context("open the store")?;
        let config: Config = url.parse().ok().context("the URL of the database cannot be read")?;
        let pool = Pool::builder(Manager::new(config, NoTls))
            .max_size(16)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(Duration::from_secs(5)))
            .build()?;
        let tables = "select pg_advisory_xact_lock(8140);
            create table if not exists orders (
                id bigint generated always as identity primary key, item text not null, amount bigint not null);
            create table if not exists payments (
                order_id bigint primary key references orders, charge text not null unique)";
        pool.get().await.context("connect")?.batch_execute(tables).await.context("make the tables")?;
        let engine = Idempotency::builder(store.clone()).build();
        let layer = IdempotencyLayer::new(&engine).wait(Duration::from_secs(2)).advertise_expiry();
        let transactional = layer.transactional();
        Ok(Self { store, pool, transactional, provider, stop_before_commit, _engine: engine })
    }

    async fn client(&self) -> Result<Object, StoreError> {
        let client = self.pool.get().await;
        client.map_err(|error| StoreError::new(StoreErrorKind::Unavailable, "connect").with_source(error))
    }

    async fn place_once(&self, request: &Keyed, order: &Order) -> Result<OnceOutcome, StoreError> {
        let mut client = self.client().await?;
        // The work owns what it needs: borrowed, it could not move between threads.
        let (shop, its, order) = (self.clone(), request.clone(), order.clone());
        let work = async move |tx: &mut Transaction<'_>| shop.place(tx, &its, &order).await;
        self.store.once_with(&mut client, request.operation(), &request.options(), work).await
    }

    /// The order, its charge and its payment. What the database refuses is tried again by the client, with the same key.
    async fn place(
        &self,
        tx: &mut Transaction<'_>,
        request: &Keyed,
        order: &Order,
    ) -> Result<Reply, TxFailure> {
        let amount = i64::from(order.amount);
        let insert = "insert into orders (item, amount) values ($1, $2) returning id";
        let id: i64 = tx.query_one(insert, &[&order.item, &amount]).await?.get(0);
        // The same key on every attempt: a second one is told of the charge of the first.
        let charged = charge(self.provider, &request.downstream_key("charge"), order.amount).await;
        let charge = match charged.map_err(TxFailure::transient)? {
            Some(charge) => charge,
            // It always will be: the order is taken back, and this is the answer from now on.
            None => return Err(TxFailure::Definitive(json_reply(402, &json!({ "error": "declined" })))),
        };
        if self.stop_before_commit {
            println!("charged {charge}, and not committed");
            std::future::pending::<()>().await;
        }
        tx.execute("insert into payments (order_id, charge) values ($1, $2)", &[&id, &charge]).await?;
        Ok(json_reply(201, &json!({ "order": id, "charge": charge })))
    }
}

/// Charges at the provider; `None` when it declines for good.
async fn charge(provider: SocketAddr, key: &str, amount: u32) -> Result<Option<String>> {
    let request = Request::post("/charges")
        .header(header::HOST, provider.to_string())
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from(json!({ "amount": amount }).to_string())))?;
    let answer = async {
        let stream = TcpStream::connect(provider).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let (head, body) = sender.send_request(request).await?.into_parts();
        anyhow::Ok((head.status, body.collect().await?.to_bytes()))
    };
    let (status, body) =
        tokio::time::timeout(PROVIDER_PATIENCE, answer).await.context("the provider is silent")??;
    match status {
        StatusCode::PAYMENT_REQUIRED => Ok(None),
        StatusCode::CREATED => {
            let body: Value = serde_json::from_slice(&body)?;
            Ok(Some(body["charge"].as_str().context("a charge without a number")?.to_owned()))
        }
        other => bail!("the provider answers {other}"),
    }
}

fn json_reply(status: u16, body: &Value) -> Reply {
    let kind = [(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"))];
    Reply::new(status, body.to_string()).with_headers(kind.into_iter().collect())
}

/// Nothing ran, and the key is not used up.
fn malformed() -> Response {
    let body =
        json!({ "title": "This is no order", "detail": r#"{"item":"tea","amount":3}"#, "status": 400 });
    let kind = [(header::CONTENT_TYPE, "application/problem+json")];
    (StatusCode::BAD_REQUEST, kind, body.to_string()).into_response()
}
