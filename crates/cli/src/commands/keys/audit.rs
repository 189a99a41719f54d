//! `onlyonce keys audit`.

use std::io::{Write, stdout};

use onlyonce_core::{AuditEntry, Key, OperationId, StoreAdmin};
use serde::Serialize;

use super::parse_scope;
use crate::failure::Failure;
use crate::output::{self, AuditJson};
use crate::store_url::StoreArg;

/// Shows what operators changed: who, when, why; newest first
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys audit
  onlyonce keys audit order-7 --json")]
pub(super) struct Audit {
    /// Only changes of this key, in every scope; also of one that was purged since
    key: Option<String>,
    /// Only of this scope; needs KEY
    #[arg(long, requires = "key")]
    scope: Option<String>,
    /// At most this many; with KEY and no --scope, of the newest 10 000 changes
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=i64::from(ENTRIES_MAX)))]
    limit: u32,
    #[command(flatten)]
    store: StoreArg,
    /// Print JSON: `entries`
    #[arg(long)]
    json: bool,
}

const ENTRIES_MAX: u32 = 10_000;

#[derive(Serialize)]
struct EntriesJson<'a> {
    entries: Vec<AuditJson<'a>>,
}

impl Audit {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let store = self.store.open_reading().await?;
        let entries = self.entries(&*store).await?;
        let mut out = stdout().lock();
        match self.json {
            true => {
                let entries = entries.iter().map(AuditJson::from).collect();
                output::json(&mut out, &EntriesJson { entries })?;
            }
            false => print(&mut out, &entries)?,
        }
        Ok(())
    }

    async fn entries(&self, store: &dyn StoreAdmin) -> Result<Vec<AuditEntry>, Failure> {
        let Some(key) = &self.key else { return Ok(store.audit(None, self.limit).await?) };
        let key = Key::new(key).map_err(|error| Failure::Usage(format!("KEY: {error}")))?;
        if let Some(scope) = &self.scope {
            let id = OperationId { scope: parse_scope(scope)?, key };
            return Ok(store.audit(Some(&id), self.limit).await?);
        }
        let mut entries = store.audit(None, ENTRIES_MAX).await?;
        entries.retain(|entry| entry.id.key == key);
        entries.truncate(self.limit as usize);
        Ok(entries)
    }
}

fn print(out: &mut impl Write, entries: &[AuditEntry]) -> Result<(), Failure> {
    if entries.is_empty() {
        writeln!(out, "no changes by operators")?;
        return Ok(());
    }
    let mut table = output::table(&["AT", "ACTOR", "ACTION", "BEFORE", "AFTER", "KEY", "SCOPE", "REASON"]);
    table.add_rows(entries.iter().map(|entry| {
        [
            output::time(entry.at),
            output::visible(&entry.actor),
            output::visible(&entry.action),
            output::visible(&entry.before),
            output::visible(&entry.after),
            output::visible(entry.id.key.as_str()),
            output::scope(&entry.id),
            output::visible(&entry.reason),
        ]
    }));
    Ok(output::print_table(out, &mut table)?)
}
