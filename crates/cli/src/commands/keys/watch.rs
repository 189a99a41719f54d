//! `onlyonce keys watch`.

use std::io::{IsTerminal, Write, stdout};
use std::time::Duration;

use onlyonce_core::{Clock, ListQuery, RecordView, StateName, StoreAdmin, StoreStats, SystemClock};
use serde::Serialize;
use tokio::time::Instant;

use crate::commands::units::timeout;
use crate::failure::{self, Failure};
use crate::output::{self, RecordJson, StatsJson};
use crate::store_url::StoreArg;

/// Shows what is in progress and what is unknown, again and again, until Ctrl-C
///
/// On a terminal a table that is drawn anew; elsewhere a line for each look. A store that does not answer is told, and
/// asked again. Each look counts the records: on a large store the pause between two is at least four times what one took.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys watch
  onlyonce keys watch --every 10s --json | jq .stats.unknown")]
pub(super) struct Watch {
    #[command(flatten)]
    store: StoreArg,
    /// How long from one look to the next
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = timeout)]
    every: Duration,
    /// End after this many looks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Records that are shown, of each state
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print a JSON document on a line for each look: `at`, `stats`, `unknown`, `in_progress`, or `at` and `error`
    #[arg(long)]
    json: bool,
}

/// What the store shows in one look.
struct Look {
    stats: StoreStats,
    unknown: Vec<RecordView>,
    in_progress: Vec<RecordView>,
}

#[derive(Serialize)]
struct LookJson {
    at: String,
    #[serde(flatten)]
    what: WhatJson,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WhatJson {
    Seen { stats: StatsJson, unknown: Vec<RecordJson>, in_progress: Vec<RecordJson> },
    Failed { error: String },
}

/// How often a store that looks take long of may be asked.
const REST: u32 = 4;

impl Watch {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let store = self.store.open_reading().await?;
        let live = stdout().is_terminal() && !self.json;
        let _screen = live.then(Screen::enter).transpose()?;
        let looks = self.count.unwrap_or(u64::MAX);
        tokio::select! {
            done = self.watch(&*store, looks, live) => done,
            // Whoever stops it has seen enough.
            stopped = tokio::signal::ctrl_c() => stopped.map_err(|error| Failure::io("waiting for Ctrl-C", &error)),
        }
    }

    async fn watch(&self, store: &dyn StoreAdmin, looks: u64, live: bool) -> Result<(), Failure> {
        for number in 1..=looks {
            let start = Instant::now();
            let look = look(store, self.limit).await;
            let at = output::time(SystemClock.wall());
            let mut text = Vec::new();
            match (&look, self.json) {
                (look, true) => write_json(&mut text, at, look)?,
                (Ok(look), false) if live => draw(&mut text, &at, look)?,
                (Ok(look), false) => write_line(&mut text, &at, &look.stats)?,
                (Err(failure), false) => writeln!(text, "{at} the store does not answer: {failure}")?,
            }
            let mut out = stdout().lock();
            match live {
                true => Screen::draw(&mut out, &text)?,
                false => out.write_all(&text)?,
            }
            out.flush()?;
            drop(out);
            if number < looks {
                tokio::time::sleep_until((start + self.every).max(Instant::now() + start.elapsed() * REST))
                    .await;
            }
        }
        Ok(())
    }
}

async fn look(store: &dyn StoreAdmin, limit: u32) -> Result<Look, String> {
    let list = |state| {
        let query = ListQuery { state: Some(state), limit, ..ListQuery::default() };
        async move { store.list(&query).await }
    };
    let all = async {
        let stats = store.stats().await?;
        let unknown = list(StateName::Unknown).await?.records;
        Ok(Look { stats, unknown, in_progress: list(StateName::InProgress).await?.records })
    };
    all.await.map_err(|error: onlyonce_core::StoreError| failure::chain(&error))
}

fn write_json(out: &mut impl Write, at: String, look: &Result<Look, String>) -> Result<(), Failure> {
    let what = match look {
        Err(error) => WhatJson::Failed { error: error.clone() },
        Ok(look) => WhatJson::Seen {
            stats: StatsJson::from(&look.stats),
            unknown: look.unknown.iter().map(RecordJson::from).collect(),
            in_progress: look.in_progress.iter().map(RecordJson::from).collect(),
        },
    };
    serde_json::to_writer(&mut *out, &LookJson { at, what }).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}

fn write_line(out: &mut impl Write, at: &str, stats: &StoreStats) -> Result<(), Failure> {
    let StoreStats { in_progress, completed, unknown, freed, expired, .. } = stats;
    Ok(writeln!(
        out,
        "{at} in_progress={in_progress} completed={completed} unknown={unknown} freed={freed} expired={expired}"
    )?)
}

fn draw(out: &mut impl Write, at: &str, look: &Look) -> Result<(), Failure> {
    write_line(out, at, &look.stats)?;
    for (records, all, what) in [
        (&look.unknown, look.stats.unknown, "unknown"),
        (&look.in_progress, look.stats.in_progress, "in progress"),
    ] {
        if records.is_empty() {
            writeln!(out, "\nnothing {what}")?;
            continue;
        }
        writeln!(out)?;
        let mut table = output::table(&["STATE", "ATTEMPT", "AGE", "LEASE LEFT", "KEY", "SCOPE"]);
        table.add_rows(records.iter().map(super::list::row));
        output::print_table(out, &mut table)?;
        if all > records.len() as u64 {
            writeln!(out, "and {} more", all - records.len() as u64)?;
        }
    }
    Ok(writeln!(out, "\nCtrl-C ends it")?)
}

/// The terminal's other screen: what was there before is there again afterwards.
struct Screen;

impl Screen {
    fn enter() -> Result<Self, Failure> {
        stdout().lock().write_all(b"\x1b[?1049h\x1b[?25l")?;
        Ok(Self)
    }

    fn draw(out: &mut impl Write, text: &[u8]) -> Result<(), Failure> {
        let size = rustix::termios::tcgetwinsize(stdout());
        let (rows, columns) = size.map_or((0, 0), |size| (size.ws_row.into(), size.ws_col.into()));
        out.write_all(b"\x1b[H\x1b[2J")?;
        Ok(out.write_all(fitted(&String::from_utf8_lossy(text), rows, columns).as_bytes())?)
    }
}

/// As much of it as has room on a screen of this size, 0 where that is not known: what is scrolled away cannot be scrolled back
/// to, and a line that is broken takes the room of two.
fn fitted(text: &str, rows: usize, columns: usize) -> String {
    let rows = if rows == 0 { usize::MAX } else { rows.saturating_sub(1).max(1) };
    let columns = if columns == 0 { usize::MAX } else { columns };
    let cut = |line: &str| match line.char_indices().nth(columns) {
        Some(_) => line.chars().take(columns - 1).chain(['…']).collect(),
        None => line.to_owned(),
    };
    text.lines().take(rows).map(|line| cut(line) + "\n").collect()
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = stdout().lock();
        // A terminal that is gone needs nothing.
        let _ = out.write_all(b"\x1b[?25h\x1b[?1049l").and_then(|()| out.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_fits_the_screen() {
        let text = "one\ntwo and more\nthree\nfour\n";
        assert_eq!(fitted(text, 4, 7), "one\ntwo an…\nthree\n");
        assert_eq!(fitted(text, 1, 3), "one\n");
        assert_eq!(fitted(text, 0, 0), text);
        assert_eq!(fitted("é€ü\n", 9, 3), "é€ü\n");
    }
}
