//! The same on connections of sqlx.

use onlyonce_core::{OnceOutcome, Reply};
use onlyonce_store_postgres::{TxClaim, TxFailure, TxOptions};
use sqlx::{Connection, PgConnection, Postgres, Row, Transaction};

use crate::common::*;
use crate::{ran, replayed, shop};

async fn place_order(tx: &mut Transaction<'_, Postgres>, item: &str) -> Result<Reply, TxFailure> {
    let insert = sqlx::query("insert into orders (item) values ($1) returning id").bind(item);
    let row = insert.fetch_one(&mut **tx).await?;
    Ok(Reply::new(201, row.try_get::<i64, _>(0)?.to_string()))
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sqlx_a_claim_its_work_and_its_reply_are_one_transaction() {
    let shop = shop().await;
    let mut connection = PgConnection::connect(&shop.place.url).await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("token"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    let reply = place_order(&mut tx, "token").await.unwrap();
    let pending = claim.complete(&mut tx, reply.clone()).await.unwrap();
    assert_eq!(shop.record("token").await, "");
    tx.commit().await.unwrap();
    assert_eq!(pending.after_commit().reply, reply);
    let mut order = async |key: &str, fails: bool| {
        let work = async |tx: &mut Transaction<'_, Postgres>| {
            let reply = place_order(tx, key).await?;
            if fails { Err(TxFailure::Definitive(Reply::new(402, "declined"))) } else { Ok(reply) }
        };
        shop.store.once_sqlx(&mut connection, &op(key), work).await.unwrap()
    };
    assert_eq!(replayed(order("token", false).await), reply);
    let first = ran(order("closure", false).await);
    assert_eq!(replayed(order("closure", false).await), first);
    assert_eq!(ran(order("declined", true).await).status(), 402);
    assert_eq!(replayed(order("declined", true).await).status(), 402);
    for (key, count) in [("token", 1), ("closure", 1), ("declined", 0)] {
        assert_eq!(shop.count(key).await, count, "{key}");
        let same = format!(
            "select count(*) from orders o join idempotency_keys k on k.key = o.item and k.xmin = o.xmin
             where o.item = '{key}' and k.status = 'completed'"
        );
        assert_eq!(shop.place.psql(&same).await, count.to_string());
    }
    // Both drivers meet in one record.
    let mut other = shop.client().await;
    assert_eq!(replayed(shop.order(&mut other, &op("closure")).await.unwrap()), first);
    // Transient, and a failed statement.
    for (key, statement) in [("transient", "select 1"), ("failed", "insert into nowhere values (1)")] {
        let work = async |tx: &mut Transaction<'_, Postgres>| {
            place_order(tx, key).await?;
            sqlx::query(statement).execute(&mut **tx).await?;
            Err(TxFailure::transient("closed"))
        };
        let outcome = shop.store.once_sqlx(&mut connection, &op(key), work).await.unwrap();
        assert!(matches!(outcome, OnceOutcome::Transient(_)), "{outcome:?}");
        assert_eq!((shop.count(key).await, shop.record(key).await.as_str()), (0, ""));
    }
}

/// A named statement would be the next borrower's behind a pooler.
#[tokio::test(flavor = "multi_thread")]
async fn with_sqlx_nothing_of_ours_stays_on_the_connection() {
    let shop = shop().await;
    let mut connection = PgConnection::connect(&shop.place.url).await.unwrap();
    for _ in 0..2 {
        let work = async |tx: &mut Transaction<'_, Postgres>| {
            sqlx::raw_sql("insert into orders (item) values ('tea')").execute(&mut **tx).await?;
            Ok(Reply::new(201, "ordered"))
        };
        shop.store.once_sqlx(&mut connection, &op("bare"), work).await.unwrap();
    }
    let left = sqlx::raw_sql("select statement from pg_prepared_statements").fetch_all(&mut connection).await;
    let left: Vec<String> = left.unwrap().iter().map(|row| row.get(0)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sqlx_an_old_snapshot_is_retried() {
    let shop = shop().await;
    let mut connection = PgConnection::connect(&shop.place.url).await.unwrap();
    sqlx::query("set session characteristics as transaction isolation level serializable")
        .execute(&mut connection)
        .await
        .unwrap();
    let mut tx = connection.begin().await.unwrap();
    sqlx::query("select * from orders").fetch_all(&mut *tx).await.unwrap();
    let mut other = shop.client().await;
    let reply = ran(shop.order(&mut other, &op("k")).await.unwrap());
    let claimed = shop.store.claim_in(&mut *tx, &op("k"), &TxOptions::default()).await.unwrap();
    assert!(matches!(claimed, TxClaim::RetryTransaction), "{claimed:?}");
    tx.rollback().await.unwrap();
    // A conflict in the work, seen by the code of the server.
    let mut runs = 0;
    let work = async |tx: &mut Transaction<'_, Postgres>| {
        runs += 1;
        let paid: i64 = sqlx::query_scalar("select count(*) from orders").fetch_one(&mut **tx).await?;
        if runs == 1 {
            shop.place.psql("update orders set paid = 1").await;
        }
        sqlx::query("update orders set paid = 2").execute(&mut **tx).await?;
        Ok(Reply::ok(paid.to_string()))
    };
    ran(shop.store.once_sqlx(&mut connection, &op("again"), work).await.unwrap());
    assert_eq!(runs, 2);
    assert_eq!(replayed(shop.order(&mut other, &op("k")).await.unwrap()), reply);
}
