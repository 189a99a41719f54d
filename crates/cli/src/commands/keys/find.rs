//! `onlyonce keys find`.

use std::io::{Write, stdout};
use std::time::Duration;

use onlyonce_core::{Clock, Key, ListQuery, OperationId, RecordView, StoreAdmin, SystemClock};
use onlyonce_http::RequestOrigin;
use serde::Serialize;

use super::scope::Whose;
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Finds a key in every scope, or in that of one caller, with what became of it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys find order-7
  onlyonce keys find order-7 --scope-of 'Bearer sk_live_…'
  onlyonce keys find order-7 --scope-of 'X-Account: acme' --json")]
pub(super) struct Find {
    /// The idempotency key, byte for byte
    key: String,
    #[command(flatten)]
    whose: Whose,
    /// At most this many records
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    #[command(flatten)]
    store: StoreArg,
    /// Print JSON: `records`, each as `keys show` has it, and `more`, whether there are more than --limit
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct FoundJson {
    records: Vec<RecordJson>,
    more: bool,
}

impl Find {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let key = Key::new(&self.key).map_err(|error| Failure::Usage(format!("KEY: {error}")))?;
        let scope = self.whose.scope()?;
        let store = self.store.open_reading().await?;
        let (records, more) = match scope {
            Some(scope) => {
                let id = OperationId { scope, key: key.clone() };
                (store.show(&id).await?.into_iter().collect(), false)
            }
            None => everywhere(&*store, key.clone(), self.limit).await?,
        };
        if records.is_empty() {
            let whose = if self.whose.scope_of.is_empty() { "" } else { " of that caller" };
            return Err(Failure::Refused(format!(
                "no record{whose} has the key {:?}: it was never claimed, was released, or has expired and was purged{}",
                self.key,
                super::elsewhere(&*store, &key).await?
            )));
        }
        let mut out = stdout().lock();
        if self.json {
            let records = records.iter().map(RecordJson::from).collect();
            output::json(&mut out, &FoundJson { records, more })?;
            return Ok(());
        }
        print(&mut out, &records)?;
        if more {
            writeln!(out, "more: raise --limit")?;
        }
        Ok(())
    }
}

async fn everywhere(
    store: &dyn StoreAdmin,
    key: Key,
    limit: u32,
) -> Result<(Vec<RecordView>, bool), Failure> {
    let page = store.list(&ListQuery { key: Some(key), limit, ..ListQuery::default() }).await?;
    let mut records = Vec::with_capacity(page.records.len());
    for record in page.records {
        // With its reply, which a list leaves out; purged since: as the list had it.
        let whole = store.show(&record.id).await?;
        records.push(whole.unwrap_or(record));
    }
    Ok((records, page.next.is_some()))
}

fn print(out: &mut impl Write, records: &[RecordView]) -> Result<(), Failure> {
    let mut table = output::table(&["STATE", "STATUS", "ATTEMPT", "AGE", "REQUEST ID", "SCOPE"]);
    table.add_rows(records.iter().map(row));
    Ok(output::print_table(out, &mut table)?)
}

fn row(record: &RecordView) -> [String; 6] {
    let age = SystemClock.wall().duration_since(record.created_at).unwrap_or_default();
    let origin = record.origin.as_ref().and_then(RequestOrigin::decode).unwrap_or_default();
    [
        output::state(record).into(),
        record.reply.as_ref().map_or_else(|| "-".into(), |reply| reply.status().to_string()),
        record.attempt.to_string(),
        output::duration(Duration::from_secs(age.as_secs())),
        origin.request_id().map_or_else(|| "-".into(), output::visible),
        output::scope(&record.id),
    ]
}
