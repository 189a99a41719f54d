//! MySQL's protocol, on MariaDB: the store against two statements by hand, and one transaction against the business write
//! alone.

use std::sync::Arc;

use anyhow::{Context, Result};
use onlyonce_core::{Reply, Store};
use onlyonce_store_mysql::mysql_async::prelude::Queryable;
use onlyonce_store_mysql::mysql_async::{Conn, Statement, TxOpts};
use onlyonce_store_mysql::{MysqlStore, Transaction};
use testkit::Mariadb;

use crate::Plan;
use crate::callers::{CALLERS, Caller, on_connections, operation, ran};
use crate::growth::{self, Stores, of_store};
use crate::measure::{Comparison, Subject, Target, series};
use crate::report::Report;
use crate::runtime::workers;
use crate::store::{REPLY_BODY, SCOPE};

const TABLES: &str = "create table orders (id bigint auto_increment primary key, item varchar(255) not null);
    create table by_hand (scope varbinary(255) not null, `key` varbinary(255) not null, request_hash varchar(96) not null,
        status varchar(16) not null, response_code int, response_body longblob, locked_until datetime(6),
        created_at datetime(6) not null, primary key (scope, `key`))";
const INSERT: &str = "insert into by_hand (scope, `key`, request_hash, status, locked_until, created_at)
    values (?, ?, ?, 'in_progress', now(6) + interval 30 second, now(6))";
const UPDATE: &str = "update by_hand set status = 'completed', response_code = 201, response_body = ?
    where scope = ? and `key` = ?";
// The store's own table, so that the server's work on the rows is the same.
const RECORD: &str =
    "insert into idempotency_keys (scope, `key`, request_hash, status, locked_until, created_at, claimed_at,
    token, attempt, on_lease_end)
    values (?, ?, ?, 'in_progress', utc_timestamp(6), utc_timestamp(6), utc_timestamp(6), ?, 1, 'hold')";
const RECORD_DONE: &str =
    "update idempotency_keys set status = 'completed', response_code = 201, response_headers = ?,
    response_body = ?, completed_at = utc_timestamp(6), expires_at = utc_timestamp(6) + interval 1 day
    where scope = ? and `key` = ? and token = ?";
const HASH: &str = "1:raw:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
const HEADERS: &str = ":onlyonce 1\ncontent-type: application/json\n";
const TOKEN: [u8; 16] = [7; 16];
const ORDER: &str = "insert into orders (item) values (?)";

/// The leased mode and one transaction, each against the same by hand.
pub(crate) fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let runtime = workers()?;
    let server = runtime.block_on(Mariadb::private());
    let database = runtime.block_on(server.database());
    let url = server.url(&database);
    let store = runtime.block_on(MysqlStore::open(&url))?;
    runtime.block_on(server.sql(&database, TABLES));
    let by_hand_on = |name: &str, level: Option<&str>, callers, work| -> Result<Subject<'_>> {
        Ok(on_connections(&runtime, name, runtime.block_on(ByHand::some(&url, level, callers, work))?))
    };

    let [by_hand, ours] = ["mysql, two statements by hand, 64 connections", "mysql, 64 callers"];
    let subjects = vec![
        by_hand_on(by_hand, None, CALLERS, Work::TwoStatements)?,
        of_store(&runtime, ours, &(Arc::new(store.clone()) as Arc<dyn Store>)),
    ];
    let comparisons = [Comparison::new(ours, by_hand, Target::Rate(2.5, 4.0))];
    series(plan, report, "mysql, leased", subjects, &comparisons)?;

    for (level, callers) in [("read committed", CALLERS), ("repeatable read", CALLERS), ("read committed", 1)]
    {
        let alone = format!("mysql, business write alone, {level}, {callers}");
        let by_hand = format!("mysql, the same record by hand, prepared, {level}, {callers}");
        let both = format!("mysql, business write and record, {level}, {callers}");
        let subjects = vec![
            by_hand_on(&alone, Some(level), callers, Work::Order)?,
            by_hand_on(&by_hand, Some(level), callers, Work::OrderAndRecord)?,
            by_hand_on(&both, Some(level), callers, Work::OrderOnce(store.clone()))?,
        ];
        let comparisons = [
            Comparison::new(&both, &alone, Target::Rate(0.6, 0.8)),
            Comparison::new(&by_hand, &alone, Target::None),
            Comparison::new(&both, &by_hand, Target::None),
        ];
        series(plan, report, "mysql, one transaction", subjects, &comparisons)?;
    }
    Ok(())
}

/// Pairs on a table with `rows` records against an empty one, on one without the purge's index, and beside a purge.
pub(crate) fn growth(plan: &Plan, rows: u64, report: &mut Report) -> Result<()> {
    let runtime = workers()?;
    let server = runtime.block_on(Mariadb::private());
    let open = |database: &str| -> Result<Arc<dyn Store>> {
        runtime.block_on(server.sql("mysql", &format!("create database {database}")));
        Ok(Arc::new(runtime.block_on(MysqlStore::open(&server.url(database)))?))
    };
    let fill = |database: &str, expires: &str| {
        eprintln!("growth: filling {rows} rows of MariaDB");
        let fill = format!(
            "insert into idempotency_keys (scope, `key`, request_hash, status, response_code, response_headers,
                response_body, locked_until, created_at, claimed_at, completed_at, expires_at, token, attempt,
                on_lease_end)
             select '{SCOPE}', md5(seq), repeat('0', 64), 'completed', 201, ':onlyonce 1', '{REPLY_BODY}',
                utc_timestamp(6), utc_timestamp(6), utc_timestamp(6), utc_timestamp(6), {expires}, unhex(md5(seq)), 1,
                'hold'
             from seq_1_to_{rows}"
        );
        runtime.block_on(server.sql(database, &fill));
    };
    let [bare, empty, filled, expired] = ["bare", "empty", "filled", "expired"].map(&open);
    let stores = Stores { bare: bare?, empty: empty?, filled: filled?, expired: expired? };
    fill("filled", "utc_timestamp(6) + interval 1 day");
    fill("expired", "utc_timestamp(6) - interval floor(rand() * 86400) second");
    runtime.block_on(server.sql("bare", "drop index idempotency_keys_over on idempotency_keys"));
    growth::compare(plan, report, &runtime, "mysql", rows, &stores)
}

/// What each connection does again and again.
#[derive(Clone)]
enum Work {
    TwoStatements,
    Order,
    /// What a transaction with a record costs at least: no wait but the session's, no savepoint, no copy is told anything.
    OrderAndRecord,
    OrderOnce(MysqlStore),
}

/// A connection with its statements.
struct ByHand {
    conn: Conn,
    statements: Vec<Statement>,
    work: Work,
}

impl ByHand {
    async fn some(url: &str, level: Option<&str>, callers: usize, work: Work) -> Result<Vec<Self>> {
        let mut some = Vec::with_capacity(callers);
        for _ in 0..callers {
            let mut conn = Conn::from_url(url).await.context("connect")?;
            if let Some(level) = level {
                conn.query_drop(format!("set session transaction isolation level {level}")).await?;
            }
            let mut statements = Vec::new();
            for sql in match work {
                Work::TwoStatements => &[INSERT, UPDATE][..],
                Work::OrderAndRecord => &[ORDER, RECORD, RECORD_DONE],
                Work::Order | Work::OrderOnce(_) => &[ORDER],
            } {
                statements.push(conn.prep(*sql).await?);
            }
            some.push(Self { conn, statements, work: work.clone() });
        }
        Ok(some)
    }
}

impl Caller for ByHand {
    async fn once(&mut self, key: String) -> Result<()> {
        let Self { conn, statements, work } = self;
        match work {
            Work::TwoStatements => {
                conn.exec_drop(&statements[0], (SCOPE, &key, REPLY_BODY)).await?;
                conn.exec_drop(&statements[1], (REPLY_BODY, SCOPE, &key)).await?;
            }
            Work::Order => {
                let mut tx = conn.start_transaction(TxOpts::default()).await?;
                tx.exec_drop(&statements[0], ("tea",)).await?;
                tx.commit().await?;
            }
            Work::OrderAndRecord => {
                let mut tx = conn.start_transaction(TxOpts::default()).await?;
                tx.exec_drop(&statements[1], (SCOPE, &key, HASH, &TOKEN[..])).await?;
                tx.exec_drop(&statements[0], ("tea",)).await?;
                tx.exec_drop(&statements[2], (HEADERS, REPLY_BODY, SCOPE, &key, &TOKEN[..])).await?;
                tx.commit().await?;
            }
            Work::OrderOnce(store) => {
                let insert = statements[0].clone();
                let work = async move |tx: &mut Transaction<'_>| {
                    tx.exec_drop(&insert, ("tea",)).await?;
                    Ok(Reply::new(201, REPLY_BODY))
                };
                ran(&store.once(conn, &operation(key)?, work).await?)?;
            }
        }
        Ok(())
    }
}
