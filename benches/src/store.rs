//! Claim and completion, straight on the stores: pairs a second for many callers, the time of a pair for one.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, LeaseToken, MemoryStore,
    OnLeaseEnd, Operation, Reply, Scope, Store,
};
use onlyonce_store_sqlite::SqliteStore;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::Plan;
use crate::baseline::{ByHand, Indexes};
use crate::keys::Keys;
use crate::measure::{Comparison, Sample, Stretch, Subject, Target, now, series};
use crate::report::Report;
use crate::runtime::workers;

/// Whose keys they are.
pub(crate) const SCOPE: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";
/// What is stored.
pub(crate) const REPLY_BODY: &str = crate::upstream::REPLY_BODY;

/// The stores against a loop by hand. Each round starts on an empty file.
pub(crate) fn run(plan: &Plan, report: &mut Report) -> Result<()> {
    let (runtime, folder) = (workers()?, plan.folder()?);
    let sqlite = |name: &str, callers, policy| {
        callers_of(&runtime, name, callers, policy, || {
            open(&runtime, &empty_folder(&folder)?.join("store.db"))
        })
    };
    let by_hand = |name: &str, batch: usize, indexes| {
        let folder = &folder;
        Subject::new(name, move |time| {
            let by_hand = ByHand::create(&empty_folder(folder)?.join("by-hand.db"), indexes)?;
            match batch {
                1 => by_hand.one_durable_insert(time),
                batch => by_hand.pairs(batch, time),
            }
        })
    };
    use OnLeaseEnd::{Hold, TakeOver};

    let [insert, one, one_hold] =
        ["by hand, one durable insert", "sqlite, 1 caller, takeover", "sqlite, 1 caller, hold"];
    let subjects =
        vec![by_hand(insert, 1, Indexes::AsTheStore), sqlite(one, 1, TakeOver), sqlite(one_hold, 1, Hold)];
    let comparisons = [
        Comparison::new(one, insert, Target::Time(1.5, 1.2)),
        Comparison::new(one_hold, insert, Target::Time(2.2, 2.0)),
    ];
    series(plan, report, "one caller", subjects, &comparisons)?;

    for (callers, batch) in [(64, 32), (256, 100)] {
        let names = ["sqlite, takeover", "sqlite, hold"].map(|name| format!("{name}, {callers} callers"));
        let bare = format!("by hand, {batch} a transaction, primary key alone");
        let indexed = format!("by hand, {batch} a transaction, the store's indexes");
        let subjects = vec![
            by_hand(&bare, batch, Indexes::None),
            sqlite(&names[0], callers, TakeOver),
            by_hand(&indexed, batch, Indexes::AsTheStore),
            sqlite(&names[1], callers, Hold),
        ];
        let mut comparisons = Vec::new();
        for against in [bare, indexed] {
            let against = |name: &String| Comparison::new(name, &against, Target::Rate(0.9, 1.3));
            comparisons.extend(names.iter().map(against));
        }
        series(plan, report, &format!("{callers} callers"), subjects, &comparisons)?;
    }

    let memory = |callers| {
        let open = || Ok(Arc::new(MemoryStore::new().records_max(usize::MAX)) as Arc<dyn Store>);
        callers_of(&runtime, &format!("memory, {callers} callers"), callers, TakeOver, open)
    };
    series(plan, report, "memory", vec![memory(1), memory(64), memory(256)], &[])
}

/// Claims on a file with `rows` records against claims on an empty one.
pub(crate) fn growth(plan: &Plan, rows: u64, report: &mut Report) -> Result<()> {
    let (runtime, folder) = (workers()?, plan.folder()?);
    let (full, empty) = (folder.path().join("full.db"), folder.path().join("empty.db"));
    let store = open(&runtime, &full)?;
    runtime.block_on(pair(&*store, &Keys::unique(), OnLeaseEnd::TakeOver))?;
    eprintln!("growth: filling {rows} rows");
    fill(&full, rows)?;
    let names = [format!("sqlite, {rows} rows"), "sqlite, empty".to_owned()];
    let subject = |name: &str, store: Arc<dyn Store>| {
        callers_of(&runtime, name, 64, OnLeaseEnd::TakeOver, move || Ok(store.clone()))
    };
    let subjects = vec![subject(&names[1], open(&runtime, &empty)?), subject(&names[0], store)];
    let least = if rows > 1_000_000 { 0.5 } else { 0.8 };
    let [full, empty] = names;
    series(plan, report, "growth", subjects, &[Comparison::new(full, empty, Target::Rate(least, 1.0))])
}

fn open(runtime: &Runtime, file: &Path) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(runtime.block_on(SqliteStore::open(file))?))
}

/// A store in a file of its own, with so many records.
pub(crate) fn filled(file: &Path, rows: u64) -> Result<()> {
    let runtime = workers()?;
    let store = open(&runtime, file)?;
    runtime.block_on(pair(&*store, &Keys::unique(), OnLeaseEnd::TakeOver))?;
    fill(file, rows)
}

// Copies the one row, whatever its columns, under random keys.
fn fill(file: &Path, rows: u64) -> Result<()> {
    let conn = rusqlite::Connection::open(file)?;
    let columns: Vec<String> = conn
        .prepare("SELECT name FROM pragma_table_info('idempotency_keys')")?
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    let values: Vec<&str> = columns
        .iter()
        .map(|name| if name == "key" { "lower(hex(randomblob(18)))" } else { name.as_str() })
        .collect();
    conn.execute(
        &format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
             INSERT INTO idempotency_keys ({}) SELECT {} FROM n, (SELECT * FROM idempotency_keys LIMIT 1)",
            columns.join(", "),
            values.join(", ")
        ),
        [i64::try_from(rows)?],
    )
    .context("fill the table")?;
    Ok(())
}

// A new folder, in which nothing is; what earlier rounds left is removed.
fn empty_folder(folder: &TempDir) -> Result<PathBuf> {
    let folder = folder.path().join("round");
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    fs::create_dir(&folder)?;
    Ok(folder)
}

pub(crate) fn callers_of<'a>(
    runtime: &'a Runtime,
    name: &str,
    callers: usize,
    policy: OnLeaseEnd,
    open: impl Fn() -> Result<Arc<dyn Store>> + 'a,
) -> Subject<'a> {
    let keys = Arc::new(Keys::unique());
    Subject::new(name, move |time| {
        let store = open()?;
        runtime.block_on(pairs(&store, &keys, callers, policy, time))
    })
}

pub(crate) async fn pairs(
    store: &Arc<dyn Store>,
    keys: &Arc<Keys>,
    callers: usize,
    policy: OnLeaseEnd,
    time: Duration,
) -> Result<Sample> {
    let stretch = Stretch::start();
    let end = now() + time;
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (store, keys) = (store.clone(), keys.clone());
        tasks.spawn(async move {
            let mut times = Vec::new();
            let mut begun = now();
            while begun < end {
                pair(&*store, &keys, policy).await?;
                let ended = now();
                times.push(ended - begun);
                begun = ended;
                // A store in memory never waits, and the other callers would.
                tokio::task::coop::consume_budget().await;
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(done) = tasks.join_next().await {
        times.extend(done??);
    }
    Sample::new(times, &stretch)
}

async fn pair(store: &dyn Store, keys: &Keys, policy: OnLeaseEnd) -> Result<()> {
    let key = keys.next();
    let mut token = [0; 16];
    token.copy_from_slice(&key.as_bytes()[..16]);
    let token = LeaseToken::from_bytes(token);
    let operation = Operation::new(Scope::new(SCOPE)?, Key::new(key)?, Fingerprint::of(REPLY_BODY));
    let retention = Duration::from_secs(24 * 3600);
    let request = ClaimRequest {
        token,
        lease: Duration::from_secs(30),
        retention,
        on_lease_end: policy,
        takeover_now: true,
        max_attempts: 5,
    };
    let ClaimOutcome::Acquired(lease) = store.claim(&operation, &request).await? else {
        bail!("a new key is not acquired");
    };
    let reply =
        Reply::new(201, REPLY_BODY).with_header(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let completion = Completion { token, attempt: lease.attempt, reply, retention };
    let stored = store.complete(&operation, &completion).await?;
    ensure!(matches!(stored, CompleteOutcome::Stored(_)), "not stored: {stored:?}");
    Ok(())
}
