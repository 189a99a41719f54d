//! A store of many instances at size: pairs on a full table against an empty one, without the purge's indexes, and beside
//! the purge.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use onlyonce_core::{OnLeaseEnd, PurgeRequest, Store};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::Plan;
use crate::callers::CALLERS;
use crate::keys::Keys;
use crate::measure::{Comparison, Subject, Target, series};
use crate::report::Report;
use crate::store::pairs;

/// One store in four states.
pub(crate) struct Stores {
    /// Empty, without the indexes that serve the purge.
    pub(crate) bare: Arc<dyn Store>,
    pub(crate) empty: Arc<dyn Store>,
    /// With many records that live.
    pub(crate) filled: Arc<dyn Store>,
    /// With many records that are over.
    pub(crate) expired: Arc<dyn Store>,
}

/// Compares them. `database` is its name in the report.
pub(crate) fn compare(
    plan: &Plan,
    report: &mut Report,
    runtime: &Runtime,
    database: &str,
    rows: u64,
    stores: &Stores,
) -> Result<()> {
    let [none, with, many] = [
        &format!("{database}, empty, no index for the purge"),
        &format!("{database}, empty"),
        &format!("{database}, {rows} rows"),
    ];
    let subjects = vec![
        of_store(runtime, none, &stores.bare),
        of_store(runtime, with, &stores.empty),
        of_store(runtime, many, &stores.filled),
    ];
    let least = if rows > 1_000_000 { 0.5 } else { 0.8 };
    let comparisons = [
        Comparison::new(many, with, Target::Rate(least, 1.0)),
        Comparison::new(with, none, Target::Rate(0.9, 1.0)),
    ];
    series(plan, report, &format!("{database}, growth"), subjects, &comparisons)?;

    let quiet = format!("{database}, {rows} expired rows, no purge");
    let beside = format!("{database}, {rows} expired rows, beside their purge");
    let mut pairs = of_store(runtime, "", &stores.expired);
    let purging = |time: Duration| {
        let (stop, stopped) = watch::channel(false);
        let purge = runtime.spawn(purge_until(Arc::clone(&stores.expired), stopped));
        let sample = pairs.run(time);
        let _ = stop.send(true);
        let removed = runtime.block_on(purge)??;
        eprintln!("growth: {removed} records were purged meanwhile");
        sample
    };
    let subjects = vec![of_store(runtime, &quiet, &stores.expired), Subject::new(beside.clone(), purging)];
    let comparisons = [Comparison::new(beside, quiet, Target::Tail(2.0, 1.5))];
    series(plan, report, &format!("{database}, purge"), subjects, &comparisons)
}

async fn purge_until(store: Arc<dyn Store>, stopped: watch::Receiver<bool>) -> Result<u64> {
    let request = PurgeRequest { limit: 5_000, hold_retention: Duration::from_secs(3600) };
    let mut removed = 0;
    while !*stopped.borrow() {
        let purged = store.purge(&request).await?;
        removed += purged.removed;
        ensure!(purged.more || purged.removed > 0, "nothing is left to purge: more rows are needed");
    }
    Ok(removed)
}

/// Pairs of claim and completion by as many callers.
pub(crate) fn of_store<'a>(runtime: &'a Runtime, name: &str, store: &Arc<dyn Store>) -> Subject<'a> {
    let keys = Arc::new(Keys::unique());
    let store = Arc::clone(store);
    Subject::new(name, move |time| {
        runtime.block_on(pairs(&store, &keys, CALLERS, OnLeaseEnd::TakeOver, time))
    })
}
