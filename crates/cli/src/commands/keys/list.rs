//! `onlyonce keys list`.

use std::io::{Write, stdout};
use std::time::Duration;

use clap::ValueEnum;
use onlyonce_core::{Clock, Key, ListPage, ListQuery, OperationId, RecordView, StateName, SystemClock};
use serde::Serialize;

use super::parse_scope;
use super::scope::Whose;
use crate::commands::units::duration;
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Lists records, of everybody or of one caller, in the order of scope and key
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys list
  onlyonce keys list --state unknown --older-than 10m --json
  onlyonce keys list --scope-of 'Bearer sk_live_…' --older-than 1h
  onlyonce keys list --key order-7 --store sqlite:/var/lib/onlyonce/keys.db")]
pub(super) struct List {
    #[command(flatten)]
    store: StoreArg,
    /// Only records in this state
    #[arg(long)]
    state: Option<StateArg>,
    #[command(flatten)]
    whose: Whose,
    /// Only records with this key
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// Only records created at least this long ago, such as 90s, 15m or 2d
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    older_than: Option<Duration>,
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// Only records after this one: where the last page ended
    #[arg(long, num_args = 2, value_names = ["SCOPE", "KEY"], allow_hyphen_values = true)]
    after: Option<Vec<String>>,
    /// Print JSON: `records`, and `next` with the scope and key for --after, or null at the end
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
enum StateArg {
    InProgress,
    Completed,
    Unknown,
    Freed,
}

#[derive(Serialize)]
struct PageJson {
    records: Vec<RecordJson>,
    next: Option<NextJson>,
}

#[derive(Serialize)]
struct NextJson {
    scope: String,
    key: String,
}

impl List {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let query = ListQuery {
            state: self.state.map(StateName::from),
            scope: self.whose.scope()?,
            key: self.key.as_deref().map(key).transpose()?,
            older_than: self.older_than,
            after: self.after.as_deref().map(after).transpose()?,
            limit: self.limit,
        };
        let page = self.store.open_reading().await?.list(&query).await?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &PageJson::from(&page))?,
            false => print(&mut out, &page)?,
        }
        Ok(())
    }
}

fn key(text: &str) -> Result<Key, Failure> {
    Key::new(text).map_err(|error| Failure::Usage(format!("key: {error}")))
}

fn after(pair: &[String]) -> Result<OperationId, Failure> {
    match pair {
        [scope, name] => Ok(OperationId { scope: parse_scope(scope)?, key: key(name)? }),
        _ => Err(Failure::Usage("--after takes a scope and a key".into())),
    }
}

fn print(out: &mut impl Write, page: &ListPage) -> Result<(), Failure> {
    if page.records.is_empty() {
        writeln!(out, "no records")?;
        return Ok(());
    }
    let mut table = output::table(&["STATE", "ATTEMPT", "AGE", "LEASE LEFT", "KEY", "SCOPE"]);
    table.add_rows(page.records.iter().map(row));
    output::print_table(out, &mut table)?;
    if let Some(next) = &page.next {
        writeln!(out, "more: --after {} {}", quoted(next.scope.as_str()), quoted(next.key.as_str()))?;
    }
    Ok(())
}

pub(super) fn row(record: &RecordView) -> [String; 6] {
    let age = SystemClock.wall().duration_since(record.created_at).unwrap_or_default();
    [
        output::state(record).into(),
        record.attempt.to_string(),
        output::duration(Duration::from_secs(age.as_secs())),
        record.lease_left.map(output::duration).unwrap_or_default(),
        output::visible(record.id.key.as_str()),
        output::scope(&record.id),
    ]
}

// For a shell. Keys and scopes have no control characters.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

impl From<StateArg> for StateName {
    fn from(state: StateArg) -> Self {
        match state {
            StateArg::InProgress => Self::InProgress,
            StateArg::Completed => Self::Completed,
            StateArg::Unknown => Self::Unknown,
            StateArg::Freed => Self::Freed,
        }
    }
}

impl From<&ListPage> for PageJson {
    fn from(page: &ListPage) -> Self {
        let next =
            page.next.as_ref().map(|id| NextJson { scope: id.scope.to_string(), key: id.key.to_string() });
        Self { records: page.records.iter().map(RecordJson::from).collect(), next }
    }
}
