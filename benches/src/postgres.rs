//! PostgreSQL: the store against two statements by hand, and one transaction against the business write alone.

use std::sync::Arc;

use anyhow::{Context, Result};
use onlyonce_core::{Reply, Store};
use onlyonce_store_postgres::PostgresStore;
use onlyonce_store_postgres::tokio_postgres::{Client, Error, NoTls, Statement, Transaction, connect};
use testkit::Postgres;

use crate::Plan;
use crate::callers::{CALLERS, Caller, on_connections, operation, ran};
use crate::growth::{self, Stores, of_store};
use crate::measure::{Comparison, Subject, Target, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::store::{REPLY_BODY, SCOPE};

const TABLES: &str = "create table orders (id bigint generated always as identity primary key, item text not null);
    create table accounts (id bigint primary key, balance bigint not null);
    insert into accounts select n, 1000000000 from generate_series(1, 64) as n;
    create table payments (id bigint generated always as identity primary key, order_id bigint not null references orders,
        amount bigint not null);
    create table by_hand (scope text not null, key text not null, request_hash text not null, status text not null,
        response_code int, response_body bytea, locked_until timestamptz, created_at timestamptz not null,
        primary key (scope, key))";
const INSERT: &str = "insert into by_hand (scope, key, request_hash, status, locked_until, created_at)
    values ($1, $2, $3, 'in_progress', now() + interval '30 s', now())";
const UPDATE: &str = "update by_hand set status = 'completed', response_code = 201, response_body = $3
    where scope = $1 and key = $2";
// The store's own table, so that the server's work on the rows is the same.
const RECORD: &str =
    "insert into idempotency_keys (scope, key, request_hash, status, locked_until, created_at,
    claimed_at, token, attempt, on_lease_end)
    values ($1, $2, repeat('0', 72), 'in_progress', now(), now(), now(), gen_random_uuid(), 1, 'hold')";
const RECORD_DONE: &str = "update idempotency_keys set status = 'completed', response_code = 201,
    response_headers = ':onlyonce 1', response_body = $3, completed_at = now(), expires_at = now() + interval '1 day'
    where scope = $1 and key = $2";
const ORDER: &str = "insert into orders (item) values ($1) returning id";
const PAY: &str = "update accounts set balance = balance - 1 where id = $1 and balance > 0";
const PAYMENT: &str = "insert into payments (order_id, amount) values ($1, 1)";

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

    for (business, level, callers) in [
        (Business::Write, "read committed", CALLERS),
        (Business::Write, "serializable", CALLERS),
        (Business::Write, "read committed", 1),
        (Business::Order, "read committed", CALLERS),
        (Business::Order, "read committed", 1),
    ] {
        let what = if business == Business::Write { "business write" } else { "order and payment" };
        let [alone, by_hand, both] = ["alone", "and a record by hand", "and record"]
            .map(|with| format!("{what} {with}, {level}, {callers}"));
        let url =
            format!("{url}?options=-c%20default_transaction_isolation%3D{}", level.replace(' ', "%5C%20"));
        let mut subjects = vec![
            by_hand_on(&alone, &url, callers, Work::Alone(business))?,
            by_hand_on(&both, &url, callers, Work::Once(business, store.clone()))?,
        ];
        let mut comparisons = vec![Comparison::new(&both, &alone, Target::Rate(0.6, 0.8))];
        // Under SERIALIZABLE a record by hand, found by its key, is a conflict with its neighbours.
        if level != "serializable" {
            // What the server makes of a record that one writes by hand, with prepared statements, is the limit.
            subjects.push(by_hand_on(&by_hand, &url, callers, Work::ByHand(business))?);
            comparisons.push(Comparison::new(&by_hand, &alone, Target::None));
            comparisons.push(Comparison::new(&both, &by_hand, Target::None));
        }
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

/// What a transaction is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Business {
    /// One insert: the least there can be.
    Write,
    /// An account pays, and an order and its payment are written down, as in `examples/orders`.
    Order,
}

/// What each connection does again and again.
#[derive(Clone)]
enum Work {
    /// A record alone, each statement for itself.
    TwoStatements,
    /// A transaction without a record.
    Alone(Business),
    /// A transaction with a record, as one would write it by hand.
    ByHand(Business),
    /// The same by the store.
    Once(Business, PostgresStore),
}

/// A connection with its statements.
struct ByHand {
    client: Client,
    of_record: [Statement; 2],
    of_business: Vec<Statement>,
    work: Work,
    account: i64,
}

impl ByHand {
    async fn some(url: &str, callers: usize, work: Work) -> Result<Vec<Self>> {
        let mut some = Vec::with_capacity(callers);
        for account in (1..).take(callers) {
            let (client, connection) = connect(url, NoTls).await.context("connect")?;
            tokio::spawn(connection);
            let [insert, update] = match work {
                Work::TwoStatements => [INSERT, UPDATE],
                _ => [RECORD, RECORD_DONE],
            };
            let of_record = [client.prepare(insert).await?, client.prepare(update).await?];
            let mut of_business = Vec::new();
            for sql in match work {
                Work::TwoStatements => &[][..],
                Work::Alone(business) | Work::ByHand(business) | Work::Once(business, _) => {
                    business.statements()
                }
            } {
                of_business.push(client.prepare(sql).await?);
            }
            some.push(Self { client, of_record, of_business, work: work.clone(), account });
        }
        Ok(some)
    }
}

impl Business {
    fn statements(self) -> &'static [&'static str] {
        match self {
            Self::Write => &[ORDER],
            Self::Order => &[PAY, ORDER, PAYMENT],
        }
    }

    /// `account` is the caller's own: nobody waits for a row.
    async fn run(self, tx: &Transaction<'_>, statements: &[Statement], account: i64) -> Result<(), Error> {
        match self {
            Self::Write => {
                tx.execute(&statements[0], &[&"tea"]).await?;
            }
            Self::Order => {
                tx.execute(&statements[0], &[&account]).await?;
                let order: i64 = tx.query_one(&statements[1], &[&"tea"]).await?.try_get(0)?;
                tx.execute(&statements[2], &[&order]).await?;
            }
        }
        Ok(())
    }
}

impl Caller for ByHand {
    async fn once(&mut self, key: String) -> Result<()> {
        let Self { client, of_record: [insert, update], of_business, work, account } = self;
        match work {
            Work::TwoStatements => {
                client.execute(&*insert, &[&SCOPE, &key, &REPLY_BODY]).await?;
                client.execute(&*update, &[&SCOPE, &key, &REPLY_BODY.as_bytes()]).await?;
            }
            Work::Alone(business) => {
                let tx = client.transaction().await?;
                business.run(&tx, of_business, *account).await?;
                tx.commit().await?;
            }
            Work::ByHand(business) => {
                let tx = client.transaction().await?;
                tx.execute(&*insert, &[&SCOPE, &key]).await?;
                business.run(&tx, of_business, *account).await?;
                tx.execute(&*update, &[&SCOPE, &key, &REPLY_BODY.as_bytes()]).await?;
                tx.commit().await?;
            }
            Work::Once(business, store) => {
                let (business, statements, account) = (*business, of_business.clone(), *account);
                let work = async move |tx: &mut Transaction<'_>| {
                    business.run(tx, &statements, account).await?;
                    Ok(Reply::new(201, REPLY_BODY))
                };
                ran(&store.once(client, &operation(key)?, work).await?)?;
            }
        }
        Ok(())
    }
}
