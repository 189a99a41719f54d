//! PostgreSQL: the store against two statements by hand, and one transaction against the business write alone.

use std::sync::Arc;

use anyhow::{Context, Result};
use onlyonce_core::{Reply, Store};
use onlyonce_store_postgres::PostgresStore;
use onlyonce_store_postgres::tokio_postgres::{Client, NoTls, Statement, Transaction, connect};
use testkit::Postgres;

use crate::Plan;
use crate::callers::{CALLERS, Caller, on_connections, operation, ran};
use crate::growth::{self, Stores, of_store};
use crate::measure::{Comparison, Subject, Target, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::store::{REPLY_BODY, SCOPE};

const TABLES: &str = "create table orders (id bigint generated always as identity primary key, item text not null);
    create table by_hand (scope text not null, key text not null, request_hash text not null, status text not null,
        response_code int, response_body bytea, locked_until timestamptz, created_at timestamptz not null,
        primary key (scope, key))";
const INSERT: &str = "insert into by_hand (scope, key, request_hash, status, locked_until, created_at)
    values ($1, $2, $3, 'in_progress', now() + interval '30 s', now())";
const UPDATE: &str = "update by_hand set status = 'completed', response_code = 201, response_body = $3
    where scope = $1 and key = $2";
const ORDER: &str = "insert into orders (item) values ($1)";

/// The leased mode and one transaction, each against the same by hand.
pub(crate) fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let runtime = workers()?;
    let server = runtime.block_on(Postgres::private());
    let url = server.url("postgres");
    let store = runtime.block_on(PostgresStore::open(&url))?;
    runtime.block_on(server.psql("postgres", TABLES));

    let by_hand_on = |name: &str, url: &str, callers, work| -> Result<Subject<'_>> {
        Ok(on_connections(&runtime, name, runtime.block_on(ByHand::some(url, callers, work))?))
    };

    let [by_hand, ours] = ["by hand, two statements, 64 connections", "postgres, 64 callers"];
    let subjects = vec![
        by_hand_on(by_hand, &url, CALLERS, Work::TwoStatements)?,
        of_store(&runtime, ours, &(Arc::new(store.clone()) as Arc<dyn Store>)),
    ];
    let comparisons = [Comparison::new(ours, by_hand, Target::Rate(2.5, 4.0))];
    series(plan, report, "postgres, leased", subjects, &comparisons)?;

    for (level, callers) in [("read committed", CALLERS), ("serializable", CALLERS), ("read committed", 1)] {
        let alone = format!("business write alone, {level}, {callers}");
        let both = format!("business write and record, {level}, {callers}");
        let url =
            format!("{url}?options=-c%20default_transaction_isolation%3D{}", level.replace(' ', "%5C%20"));
        let subjects = vec![
            by_hand_on(&alone, &url, callers, Work::Order)?,
            by_hand_on(&both, &url, callers, Work::OrderOnce(store.clone()))?,
        ];
        let comparisons = [Comparison::new(&both, &alone, Target::Rate(0.6, 0.8))];
        series(plan, report, "postgres, one transaction", subjects, &comparisons)?;
    }
    Ok(())
}

/// Pairs on a table with `rows` records against an empty one, on one without the purge's indexes, and beside a purge.
pub(crate) fn growth(plan: &Plan, rows: u64, report: &mut Report) -> Result<()> {
    let runtime = workers()?;
    let server = runtime.block_on(Postgres::private());
    let open = |schema: &str| -> Result<Arc<dyn Store>> {
        runtime.block_on(server.psql("postgres", &format!("create schema {schema}")));
        let url = format!("{}?schema={schema}", server.url("postgres"));
        Ok(Arc::new(runtime.block_on(PostgresStore::open(&url))?))
    };
    let fill = |schema: &str, expires: &str| {
        eprintln!("growth: filling {rows} rows of PostgreSQL");
        let fill = format!(
            "insert into {schema}.idempotency_keys select '{SCOPE}', gen_random_uuid()::text, repeat('0', 64),
                'completed', 201, ':onlyonce 1'::bytea, '{REPLY_BODY}'::bytea, now(), now(), now(), now(), {expires},
                gen_random_uuid(), 1, 'hold', null
             from generate_series(1, {rows})"
        );
        runtime.block_on(server.psql("postgres", &fill));
        runtime.block_on(server.psql("postgres", &format!("vacuum analyze {schema}.idempotency_keys")));
    };
    let [bare, empty, filled, expired] = ["bare", "empty", "filled", "expired"].map(&open);
    let stores = Stores { bare: bare?, empty: empty?, filled: filled?, expired: expired? };
    fill("filled", "now() + interval '1 day'");
    fill("expired", "now() - random() * interval '1 day'");
    let drop = "drop index bare.idempotency_keys_expiry; drop index bare.idempotency_keys_lease";
    runtime.block_on(server.psql("postgres", drop));
    growth::compare(plan, report, &runtime, "postgres", rows, &stores)
}

/// What each connection does again and again.
#[derive(Clone)]
enum Work {
    TwoStatements,
    Order,
    OrderOnce(PostgresStore),
}

/// A connection with its statements.
struct ByHand {
    client: Client,
    statements: Vec<Statement>,
    work: Work,
}

impl ByHand {
    async fn some(url: &str, callers: usize, work: Work) -> Result<Vec<Self>> {
        let mut some = Vec::with_capacity(callers);
        for _ in 0..callers {
            let (client, connection) = connect(url, NoTls).await.context("connect")?;
            tokio::spawn(connection);
            let mut statements = Vec::new();
            for sql in match work {
                Work::TwoStatements => &[INSERT, UPDATE][..],
                Work::Order | Work::OrderOnce(_) => &[ORDER],
            } {
                statements.push(client.prepare(sql).await?);
            }
            some.push(Self { client, statements, work: work.clone() });
        }
        Ok(some)
    }
}

impl Caller for ByHand {
    async fn once(&mut self, key: String) -> Result<()> {
        let Self { client, statements, work } = self;
        match work {
            Work::TwoStatements => {
                client.execute(&statements[0], &[&SCOPE, &key, &REPLY_BODY]).await?;
                client.execute(&statements[1], &[&SCOPE, &key, &REPLY_BODY.as_bytes()]).await?;
            }
            Work::Order => {
                let tx = client.transaction().await?;
                tx.execute(&statements[0], &[&"tea"]).await?;
                tx.commit().await?;
            }
            Work::OrderOnce(store) => {
                let insert = statements[0].clone();
                let work = async move |tx: &mut Transaction<'_>| {
                    tx.execute(&insert, &[&"tea"]).await?;
                    Ok(Reply::new(201, REPLY_BODY))
                };
                ran(&store.once(client, &operation(key)?, work).await?)?;
            }
        }
        Ok(())
    }
}
