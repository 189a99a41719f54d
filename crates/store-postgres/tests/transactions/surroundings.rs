//! What the transactional mode needs of its surroundings: rights, poolers, executors.

use futures_util::future::join_all;
use onlyonce_core::{OnceOutcome, Reply, StoreErrorKind};
use onlyonce_store_postgres::tokio_postgres::Transaction;
use onlyonce_store_postgres::tokio_postgres::types::Type;
use onlyonce_store_postgres::{PostgresStore, TxClaim, TxFailure, TxOptions};
use testkit::{PgBouncer, PoolMode};

use crate::common::*;
use crate::{Shop, place_order, ran, replayed, shop};

impl Shop {
    /// A URL for a role of its own, which may log in and use the business tables.
    async fn role(&self) -> (String, String) {
        let role = format!("app_{}", self.place.database);
        let grants = format!("create role {role} login; grant insert, select on orders to {role}");
        self.place.psql(&grants).await;
        (self.place.url.replacen("postgres@", &format!("{role}@"), 1), role)
    }

    /// Revokes what the role has, and removes it: roles are the whole server's.
    async fn drop_role(&self, role: &str) {
        self.place.psql(&format!("drop owned by {role}; drop role {role}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_user_of_the_connection_needs_the_documented_rights_and_no_more() {
    let shop = shop().await;
    let (url, role) = shop.role().await;
    let rights = ["select", "insert", "update"].map(|right| format!("{right} on idempotency_keys"));
    for right in &rights {
        shop.place.psql(&format!("grant {right} to {role}")).await;
    }
    let mut client = crate::client(&url).await;
    // Fresh, replayed, declined, taken over from the leased mode, and the token form.
    let reply = ran(shop.order(&mut client, &op("k")).await.unwrap());
    assert_eq!(replayed(shop.order(&mut client, &op("k")).await.unwrap()), reply);
    let declined = async |_: &mut Transaction<'_>| Err(TxFailure::Definitive(Reply::new(402, "no")));
    ran(shop.store.once(&mut client, &op("declined"), declined).await.unwrap());
    let expired = TxOptions { retention: std::time::Duration::from_millis(1), ..TxOptions::default() };
    for _ in 0..2 {
        let work = async |tx: &mut Transaction<'_>| place_order(tx, "expired").await;
        ran(shop.store.once_with(&mut client, &op("expired"), &expired, work).await.unwrap());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let mut tx = client.transaction().await.unwrap();
    let claimed = shop.store.claim_in(&mut tx, &op("token"), &TxOptions::default()).await.unwrap();
    let TxClaim::Acquired(claim) = claimed else { panic!("{claimed:?}") };
    drop(claim.complete(&mut tx, Reply::ok("")).await.unwrap());
    tx.commit().await.unwrap();
    // None of them is too many, and what is missing is said.
    for (n, right) in rights.iter().enumerate() {
        shop.place.psql(&format!("revoke {right} from {role}")).await;
        let mut client = crate::client(&url).await;
        let error = shop.order(&mut client, &op(&format!("without {n}"))).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unfit, "{right}: {}", chain(&error));
        assert!(error.to_string().contains("idempotency_keys"), "{right}: {error}");
        shop.place.psql(&format!("grant {right} to {role}")).await;
    }
    shop.drop_role(&role).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_rights_on_the_rows_alone_opens_a_store_that_was_made_before() {
    let shop = shop().await;
    let (url, role) = shop.role().await;
    let grants = format!(
        "grant select, insert, update, delete on idempotency_keys, idempotency_meta, idempotency_audit to {role}"
    );
    shop.place.psql(&grants).await;
    let store = PostgresStore::open(&url).await.unwrap();
    pair(&store, "leased").await.unwrap();
    let mut client = crate::client(&url).await;
    let work = async |tx: &mut Transaction<'_>| place_order(tx, "k").await;
    ran(store.once(&mut client, &op("k"), work).await.unwrap());
    store.close().await;
    // Functions that are missing cannot be made by this user, and by their owner they are.
    shop.place.psql("drop function idempotency_claim, idempotency_complete").await;
    let error = PostgresStore::open(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unfit, "{}", chain(&error));
    assert!(error.to_string().contains("functions"), "{error}");
    drop(shop.place.open().await);
    let store = PostgresStore::open(&url).await.unwrap();
    replayed(store.once(&mut client, &op("k"), work).await.unwrap());
    store.close().await;
    shop.drop_role(&role).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_the_release_before_get_the_functions() {
    let shop = shop().await;
    shop.place
        .psql("drop function idempotency_claim, idempotency_complete; update idempotency_meta set schema_version = 2")
        .await;
    let opened = join_all((0..10).map(|_| shop.place.open())).await;
    assert_eq!(shop.place.psql("select schema_version from idempotency_meta").await, "3");
    let mut client = shop.client().await;
    let work = async |tx: &mut Transaction<'_>| place_order(tx, "k").await;
    ran(opened[0].once(&mut client, &op("k"), work).await.unwrap());
    // A copy of the tables elsewhere is another store, whatever its functions said.
    shop.place.psql("update idempotency_meta set store_id = gen_random_uuid()").await;
    let store = shop.place.open().await;
    replayed(store.once(&mut client, &op("k"), work).await.unwrap());
    let error = shop.store.once(&mut client, &op("k"), work).await.unwrap_err();
    assert!(error.to_string().contains("another database"), "{}", chain(&error));
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_transaction_pooler_both_forms_work_and_leave_nothing() {
    let shop = shop().await;
    let pooler = PgBouncer::start(&shop.place.server, PoolMode::Transaction).await;
    let url = pooler.url(&shop.place.database);
    let store = PostgresStore::open(&format!("{url}?prepare=off")).await.unwrap();
    // More callers than the pooler has connections, each key twice.
    let callers = (0..40).map(|n| {
        let (store, url) = (&store, &url);
        async move {
            let mut client = crate::client(url).await;
            let op = op(&format!("k{}", n / 2));
            if n % 4 < 2 {
                // What a driver prepares is not for such a pooler, in the work neither.
                let work = async |tx: &mut Transaction<'_>| {
                    let item = op.key().as_str();
                    let sql = "insert into orders (item) values ($1) returning id";
                    let rows = tx.query_typed(sql, &[(&item, Type::TEXT)]).await?;
                    Ok(Reply::ok(rows[0].get::<_, i64>(0).to_string()))
                };
                let options = crate::wait(std::time::Duration::from_secs(60));
                match store.once_with(&mut client, &op, &options, work).await.unwrap() {
                    OnceOutcome::Ran(_) => 1,
                    OnceOutcome::Replayed(_) => 0,
                    other => panic!("{other:?}"),
                }
            } else {
                let options = crate::wait(std::time::Duration::from_secs(60));
                let mut tx = client.transaction().await.unwrap();
                match store.claim_in(&mut tx, &op, &options).await.unwrap() {
                    TxClaim::Acquired(claim) => {
                        drop(claim.complete(&mut tx, Reply::ok("token")).await.unwrap());
                        tx.commit().await.unwrap();
                        1
                    }
                    TxClaim::Completed(_) => 0,
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    let ran: u32 = join_all(callers).await.into_iter().sum();
    assert_eq!(ran, 20);
    assert_eq!(shop.place.psql("select count(*), count(distinct item) from orders").await, "10|10");
    let sql = "select current_setting('lock_timeout'), current_setting('enable_seqscan'), count(*)
        from pg_prepared_statements";
    let mut psql = shop.place.server.tool("psql").unwrap();
    psql.args(["-XAt", "-d", &url, "-c", sql]);
    assert_eq!(String::from_utf8(psql.output().unwrap().stdout).unwrap().trim(), "0|on|0");
}

/// Its future can be another task's: a handler of a web framework is one.
#[tokio::test(flavor = "multi_thread")]
async fn a_closure_form_that_owns_what_it_uses_can_be_spawned() {
    let shop = shop().await;
    let (store, url, mut client) = (shop.store.clone(), shop.place.url.clone(), shop.client().await);
    let task = tokio::spawn(async move {
        let item = String::from("spawned");
        let work = async move |tx: &mut Transaction<'_>| place_order(tx, &item).await;
        ran(store.once(&mut client, &op("spawned"), work).await.unwrap());
        let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(&url).await.unwrap();
        let work = async move |_: &mut sqlx::Transaction<'_, sqlx::Postgres>| Ok(Reply::ok("never"));
        store.once_sqlx(&mut connection, &op("spawned"), work).await.unwrap()
    });
    assert_ne!(replayed(task.await.unwrap()).body(), "never");
}
