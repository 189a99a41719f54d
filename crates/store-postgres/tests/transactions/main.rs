//! The transactional mode: business rows and record, or neither.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod isolation;
mod on_sqlx;
mod outcomes;
mod surroundings;
mod waiting;

use std::time::Duration;

use common::{Place, acquired, place, take_over};
use onlyonce_core::{ClaimRequest, OnceOutcome, Operation, Reply, Store, StoreError};
use onlyonce_store_postgres::tokio_postgres::{Client, GenericClient, NoTls, Transaction, connect};
use onlyonce_store_postgres::{PostgresStore, TxFailure, TxOptions};

/// A database with business tables, and its store.
struct Shop {
    place: Place,
    store: PostgresStore,
}

async fn shop() -> Shop {
    let place = place().await;
    let store = place.open().await;
    place
        .psql("create table orders (id bigint generated always as identity, item text not null, paid int)")
        .await;
    Shop { place, store }
}

impl Shop {
    /// A connection of the business's own.
    async fn client(&self) -> Client {
        client(&self.place.url).await
    }

    async fn count(&self, item: &str) -> usize {
        let sql = format!("select count(*) from orders where item = '{item}'");
        self.place.psql(&sql).await.parse().unwrap()
    }

    async fn record(&self, key: &str) -> String {
        let sql = format!("select status from idempotency_keys where key = '{key}'");
        self.place.psql(&sql).await
    }

    /// Leaves the record of an owner of the leased mode that died.
    async fn dead_owner(&self, operation: &Operation) {
        let request = ClaimRequest { lease: Duration::from_millis(1), ..take_over() };
        acquired(self.store.claim(operation, &request).await.unwrap());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    async fn order(&self, client: &mut Client, operation: &Operation) -> Result<OnceOutcome, StoreError> {
        self.store.once(client, operation, async |tx| place_order(tx, operation.key().as_str()).await).await
    }
}

async fn client(url: &str) -> Client {
    let (client, connection) = connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Orders the item; the reply holds the order's number.
async fn place_order(tx: &mut Transaction<'_>, item: &str) -> Result<Reply, TxFailure> {
    let row = tx.query_one("insert into orders (item) values ($1) returning id", &[&item]).await?;
    Ok(Reply::new(201, row.get::<_, i64>(0).to_string()))
}

async fn setting(client: &impl GenericClient) -> String {
    let sql = "select current_setting('lock_timeout') || '|' || current_setting('synchronous_commit')";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// The claim's savepoint is gone; so is the transaction after this.
async fn has_no_savepoint(tx: Transaction<'_>) {
    let error = tx.batch_execute("rollback to savepoint onlyonce_claim").await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "3B001", "{error}");
}

fn wait(wait: Duration) -> TxOptions {
    TxOptions { wait, ..TxOptions::default() }
}

#[track_caller]
fn ran(outcome: OnceOutcome) -> Reply {
    match outcome {
        OnceOutcome::Ran(stored) => stored.reply,
        other => panic!("did not run: {other:?}"),
    }
}

#[track_caller]
fn replayed(outcome: OnceOutcome) -> Reply {
    match outcome {
        OnceOutcome::Replayed(stored) => stored.reply,
        other => panic!("no replay: {other:?}"),
    }
}
