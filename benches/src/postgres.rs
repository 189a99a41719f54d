//! PostgreSQL: the store against two statements by hand, and one transaction against the business write alone.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use onlyonce_core::{
    Fingerprint, Key, OnLeaseEnd, OnceOutcome, Operation, PurgeRequest, Reply, Scope, Store,
};
use onlyonce_store_postgres::PostgresStore;
use onlyonce_store_postgres::tokio_postgres::{Client, NoTls, Statement, Transaction, connect};
use testkit::Postgres;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::Plan;
use crate::keys::Keys;
use crate::measure::{Comparison, Sample, Stretch, Subject, Target, now, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::store::{REPLY_BODY, SCOPE, pairs};

/// Callers, each with a connection where it works by hand.
const CALLERS: usize = 64;

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

    let [by_hand, ours] = ["by hand, two statements, 64 connections", "postgres, 64 callers"];
    let subjects = vec![
        on_connections(&runtime, by_hand, &url, CALLERS, Work::TwoStatements)?,
        of_store(&runtime, ours, &store),
    ];
    let comparisons = [Comparison::new(ours, by_hand, Target::Rate(2.5, 4.0))];
    series(plan, report, "postgres, leased", subjects, &comparisons)?;

    for (level, callers) in [("read committed", CALLERS), ("serializable", CALLERS), ("read committed", 1)] {
        let alone = format!("business write alone, {level}, {callers}");
        let both = format!("business write and record, {level}, {callers}");
        let url =
            format!("{url}?options=-c%20default_transaction_isolation%3D{}", level.replace(' ', "%5C%20"));
        let subjects = vec![
            on_connections(&runtime, &alone, &url, callers, Work::Order)?,
            on_connections(&runtime, &both, &url, callers, Work::OrderOnce(store.clone()))?,
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
    let open = |schema: &str| -> Result<PostgresStore> {
        runtime.block_on(server.psql("postgres", &format!("create schema {schema}")));
        Ok(runtime.block_on(PostgresStore::open(&format!("{}?schema={schema}", server.url("postgres"))))?)
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
    let (empty, full, bare, expired) = (open("empty")?, open("filled")?, open("bare")?, open("expired")?);
    fill("filled", "now() + interval '1 day'");
    fill("expired", "now() - random() * interval '1 day'");
    let drop = "drop index bare.idempotency_keys_expiry; drop index bare.idempotency_keys_lease";
    runtime.block_on(server.psql("postgres", drop));

    let [none, with, many] =
        ["postgres, empty, no index for the purge", "postgres, empty", &format!("postgres, {rows} rows")];
    let subjects = vec![
        of_store(&runtime, none, &bare),
        of_store(&runtime, with, &empty),
        of_store(&runtime, many, &full),
    ];
    let least = if rows > 1_000_000 { 0.5 } else { 0.8 };
    let comparisons = [
        Comparison::new(many, with, Target::Rate(least, 1.0)),
        Comparison::new(with, none, Target::Rate(0.9, 1.0)),
    ];
    series(plan, report, "postgres, growth", subjects, &comparisons)?;

    let quiet = format!("postgres, {rows} expired rows, no purge");
    let beside = format!("postgres, {rows} expired rows, beside their purge");
    let mut pairs = of_store(&runtime, "", &expired);
    let purging = |time: Duration| {
        let (stop, stopped) = watch::channel(false);
        let purge = runtime.spawn(purge_until(expired.clone(), stopped));
        let sample = pairs.run(time);
        let _ = stop.send(true);
        let removed = runtime.block_on(purge)??;
        eprintln!("growth: {removed} records were purged meanwhile");
        sample
    };
    let subjects = vec![of_store(&runtime, &quiet, &expired), Subject::new(beside.clone(), purging)];
    series(
        plan,
        report,
        "postgres, purge",
        subjects,
        &[Comparison::new(beside, quiet, Target::Tail(2.0, 1.5))],
    )
}

async fn purge_until(store: PostgresStore, stopped: watch::Receiver<bool>) -> Result<u64> {
    let request = PurgeRequest { limit: 5_000, hold_retention: Duration::from_secs(3600) };
    let mut removed = 0;
    while !*stopped.borrow() {
        let purged = store.purge(&request).await?;
        removed += purged.removed;
        ensure!(purged.more || purged.removed > 0, "nothing is left to purge: more rows are needed");
    }
    Ok(removed)
}

fn of_store<'a>(runtime: &'a Runtime, name: &str, store: &PostgresStore) -> Subject<'a> {
    let keys = Arc::new(Keys::unique());
    let store: Arc<dyn Store> = Arc::new(store.clone());
    Subject::new(name, move |time| {
        runtime.block_on(pairs(&store, &keys, CALLERS, OnLeaseEnd::TakeOver, time))
    })
}

/// What each connection does again and again.
#[derive(Clone)]
enum Work {
    TwoStatements,
    Order,
    OrderOnce(PostgresStore),
}

/// A connection with its statements.
struct Caller {
    client: Client,
    statements: Vec<Statement>,
}

fn on_connections<'a>(
    runtime: &'a Runtime,
    name: &str,
    url: &str,
    callers: usize,
    work: Work,
) -> Result<Subject<'a>> {
    let mut idle = runtime.block_on(async {
        let mut idle = Vec::with_capacity(callers);
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
            idle.push(Caller { client, statements });
        }
        anyhow::Ok(idle)
    })?;
    let keys = Arc::new(Keys::unique());
    Ok(Subject::new(name, move |time| {
        runtime.block_on(async {
            let stretch = Stretch::start();
            let end = now() + time;
            let mut tasks = JoinSet::new();
            for mut caller in idle.drain(..) {
                let (keys, work) = (keys.clone(), work.clone());
                tasks.spawn(async move {
                    let mut times = Vec::new();
                    let mut begun = now();
                    while begun < end {
                        caller.once(&work, keys.next()).await?;
                        let ended = now();
                        times.push(ended - begun);
                        begun = ended;
                    }
                    anyhow::Ok((caller, times))
                });
            }
            let mut times = Vec::new();
            while let Some(done) = tasks.join_next().await {
                let (caller, its) = done??;
                idle.push(caller);
                times.extend(its);
            }
            Sample::new(times, &stretch)
        })
    }))
}

impl Caller {
    async fn once(&mut self, work: &Work, key: String) -> Result<()> {
        match work {
            Work::TwoStatements => {
                self.client.execute(&self.statements[0], &[&SCOPE, &key, &REPLY_BODY]).await?;
                self.client.execute(&self.statements[1], &[&SCOPE, &key, &REPLY_BODY.as_bytes()]).await?;
            }
            Work::Order => {
                let tx = self.client.transaction().await?;
                tx.execute(&self.statements[0], &[&"tea"]).await?;
                tx.commit().await?;
            }
            Work::OrderOnce(store) => {
                let operation =
                    Operation::new(Scope::new(SCOPE)?, Key::new(key)?, Fingerprint::of(REPLY_BODY));
                let insert = self.statements[0].clone();
                let work = async move |tx: &mut Transaction<'_>| {
                    tx.execute(&insert, &[&"tea"]).await?;
                    Ok(Reply::new(201, REPLY_BODY))
                };
                let outcome = store.once(&mut self.client, &operation, work).await?;
                if !matches!(outcome, OnceOutcome::Ran(_)) {
                    bail!("a new key did not run: {outcome:?}");
                }
            }
        }
        Ok(())
    }
}
