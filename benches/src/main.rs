//! Benchmarks: every figure is one thing against another in the same run.
//!
//! ```text
//! cargo build --release -p onlyonce-cli -p onlyonce-benches
//! target/release/onlyonce-bench all              the whole table, as in docs/performance.md
//! target/release/onlyonce-bench all --quick      a second each: shows that everything still runs
//! target/release/onlyonce-bench store --json
//! target/release/onlyonce-bench soak --for 1h    whether memory and descriptors of a gateway stay
//! target/release/onlyonce-bench memory           how much memory it holds with 1000 connections and a million records
//! ```
//!
//! Exits non-zero on any error (a reply that is not 2xx, a claim that is not acquired), never on speed.

mod baseline;
mod callers;
mod gateway;
mod growth;
mod http1;
mod inbox;
mod keys;
mod layer;
mod load;
mod measure;
mod memory;
mod mysql;
mod postgres;
mod redis;
mod report;
mod runtime;
mod soak;
mod store;
mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use tempfile::TempDir;

use crate::report::Report;

#[derive(Debug, Parser)]
#[command(name = "onlyonce-bench", about = "Measures one thing against another in the same run.")]
struct Cli {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    plan: Plan,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Claims and completions, straight on the stores.
    Store,
    /// The same claims on an empty SQLite file and on a full one.
    Growth {
        /// Records in the full one.
        #[arg(long, default_value_t = 1_000_000)]
        rows: u64,
    },
    /// The Redis store against redis-benchmark.
    Redis,
    /// PostgreSQL, on a private server: the store, and one transaction with a business write.
    Postgres,
    /// PostgreSQL with many records, and beside their purge.
    PostgresGrowth {
        /// Records.
        #[arg(long, default_value_t = 1_000_000)]
        rows: u64,
    },
    /// MariaDB, on a private server: the store, and one transaction with a business write.
    Mysql,
    /// MariaDB with many records, and beside their purge.
    MysqlGrowth {
        /// Records.
        #[arg(long, default_value_t = 1_000_000)]
        rows: u64,
    },
    /// An axum handler, bare and behind the layer.
    Layer(layer::LayerPlan),
    /// `onlyonce serve` against nginx and against itself.
    Gateway(gateway::Programs),
    /// `onlyonce inbox` against a loop by hand and the `sqlite3` shell.
    Inbox(inbox::InboxPlan),
    /// `onlyonce serve` under mixed load for an hour: whether memory and descriptors stay.
    Soak(soak::SoakPlan),
    /// How much memory `onlyonce serve` holds with many connections at work on a store of many records.
    Memory(memory::MemoryPlan),
    /// All but growth, soak and memory; --quick shows that the last two run.
    All(All),
}

#[derive(Debug, Args)]
struct All {
    #[command(flatten)]
    programs: gateway::Programs,
    #[command(flatten)]
    inbox: inbox::InboxPlan,
}

/// How to measure.
#[derive(Clone, Debug, Args)]
struct Plan {
    /// Rounds after the warm-up; every subject runs once in each.
    #[arg(long, global = true, default_value_t = 7)]
    rounds: usize,
    /// Seconds each subject runs in one round.
    #[arg(long, global = true, default_value_t = 2.0)]
    seconds: f64,
    /// One round of a second in all, for each set of subjects: shows that everything runs, not how fast.
    #[arg(long, global = true)]
    quick: bool,
    /// JSON on stdout in place of the tables.
    #[arg(long, global = true)]
    json: bool,
    /// Only subjects whose names contain this: for profiling.
    #[arg(long, global = true)]
    only: Option<String>,
    /// Where the files go; on a real file system, or a sync costs nothing. Default: the system's temporary folder.
    #[arg(long, global = true)]
    dir: Option<PathBuf>,
}

impl Plan {
    fn rounds(&self) -> usize {
        if self.quick { 1 } else { self.rounds.max(1) }
    }

    /// How long one subject of `subjects` runs in one round.
    fn time(&self, subjects: usize) -> Duration {
        // The warm-up is a round too.
        let seconds = if self.quick { 0.5 / subjects.max(1) as f64 } else { self.seconds };
        Duration::from_secs_f64(seconds.clamp(0.05, 3600.0))
    }

    /// A folder of this run's own, removed at its end.
    fn folder(&self) -> Result<TempDir> {
        let mut builder = tempfile::Builder::new();
        builder.prefix("onlyonce-bench-");
        match &self.dir {
            Some(dir) => builder.tempdir_in(dir),
            None => builder.tempdir(),
        }
        .context("a folder for the files")
    }
}

fn main() -> Result<()> {
    let Cli { what, plan } = Cli::parse();
    let mut report = Report::default();
    match what {
        What::Store => store::run(&plan, &mut report)?,
        What::Growth { rows } => store::growth(&plan, rows, &mut report)?,
        What::Redis => redis::run(&plan, &mut report)?,
        What::Postgres => postgres::run(&plan, &mut report)?,
        What::PostgresGrowth { rows } => postgres::growth(&plan, rows, &mut report)?,
        What::Mysql => mysql::run(&plan, &mut report)?,
        What::MysqlGrowth { rows } => mysql::growth(&plan, rows, &mut report)?,
        What::Layer(layer) => layer::run(&plan, &layer, &mut report)?,
        What::Gateway(programs) => gateway::run(&plan, &programs, &mut report)?,
        What::Inbox(inbox) => inbox::run(&plan, &inbox, &mut report)?,
        What::Soak(soak) => return soak::run(&plan, &soak)?.print(plan.json),
        What::Memory(memory) => return memory::run(&plan, &memory),
        What::All(All { programs, inbox }) => {
            store::run(&plan, &mut report)?;
            redis::run(&plan, &mut report)?;
            postgres::run(&plan, &mut report)?;
            mysql::run(&plan, &mut report)?;
            layer::run(&plan, &layer::LayerPlan::default(), &mut report)?;
            gateway::run(&plan, &programs, &mut report)?;
            inbox::run(&plan, &inbox, &mut report)?;
            if plan.quick {
                soak::run(&plan, &soak::SoakPlan::quick(programs.onlyonce.clone()))?;
                memory::run(&plan, &memory::MemoryPlan::quick(programs.onlyonce))?;
            }
        }
    }
    if plan.json { report.print_json() } else { report.print_tables() }
}
