//! `onlyonce inbox` against what a careful programmer does by hand: a loop of prepared statements, and the `sqlite3` shell.
//!
//! Both sides write the same rows to the same tables, in WAL mode with `synchronous=FULL`. The loop by hand reads and parses
//! nothing: its rows are made as they are needed.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use onlyonce_inbox::Inbox;
use rusqlite::{Connection, params};

use crate::Plan;
use crate::measure::{Comparison, Sample, Stretch, Subject, Target, now, series};
use crate::report::Report;

/// What to load, and the programs to measure.
#[derive(Clone, Debug, Args)]
pub(crate) struct InboxPlan {
    /// The program, as a release build. Default: `onlyonce` beside this one.
    #[arg(long = "inbox-program")]
    program: Option<PathBuf>,
    /// Messages of one load; --quick takes a fiftieth.
    #[arg(long, default_value_t = 1_000_000)]
    messages: u64,
}

/// Of so many messages one comes again.
const DUPLICATE_EVERY: u64 = 100;
/// Of so many messages one comes again with another body.
const CONFLICT_EVERY: u64 = 1000;
/// Rows of one transaction by hand.
const BATCH: u64 = 10_000;

const INSERT_ROW: &str = "INSERT INTO inbox_log (msg_id, biz_key, status, response, created_at)
    VALUES (?1, ?2, 'done', ?3, ?4) ON CONFLICT (msg_id) DO NOTHING";
const INSERT_DELIVERY: &str = "INSERT INTO inbox_deliveries (msg_id, verdict, path, source, digest, received_at) VALUES (?1, ?2, 'batch', ?3, ?4, ?5)";
const FIRST_DIGEST: &str =
    "SELECT digest FROM inbox_deliveries WHERE msg_id = ?1 AND verdict = 'applied' ORDER BY id DESC LIMIT 1";

pub(crate) fn run(plan: &Plan, inbox: &InboxPlan, report: &mut Report) -> Result<()> {
    let folder = plan.folder()?;
    let program = match &inbox.program {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("onlyonce"),
    };
    load(plan, inbox, &program, folder.path(), report)?;
    apply(plan, &program, folder.path(), report)
}

fn load(plan: &Plan, inbox: &InboxPlan, program: &Path, folder: &Path, report: &mut Report) -> Result<()> {
    let messages = if plan.quick { inbox.messages.div_ceil(50) } else { inbox.messages };
    let lines = folder.join("messages.ndjson");
    write_lines(&lines, messages).context("the messages")?;
    let [by_hand, by_us] = ["by hand, 10000 a transaction, nothing parsed", "inbox load, ndjson"];
    let fresh = |name: &str| -> Result<PathBuf> {
        let path = folder.join(name);
        for end in ["", "-wal", "-shm"] {
            let _ = fs::remove_file(folder.join(format!("{name}{end}")));
        }
        Ok(path)
    };
    let subjects = vec![
        Subject::new(by_hand, |_| {
            let path = fresh("hand.db")?;
            drop(Inbox::open(&path)?);
            let stretch = Stretch::start();
            insert_by_hand(&path, messages)?;
            Ok(sample(messages, &stretch))
        }),
        Subject::new(by_us, |_| {
            let path = fresh("load.db")?;
            let stretch = Stretch::start();
            let output = Command::new(program)
                .args(["inbox", "load"])
                .args([&path, &lines])
                .stderr(Stdio::null())
                .output()?;
            let sample = sample(messages, &stretch);
            ensure!(output.status.success(), "inbox load: {}", output.status);
            let said = String::from_utf8(output.stdout)?;
            let expected = format!(
                "files=1 applied={} duplicates={} conflicts={} failed=0",
                messages - again(messages),
                again(messages),
                messages / CONFLICT_EVERY
            );
            ensure!(said.starts_with(&expected), "{said:?} is not {expected:?}");
            every_copy_is_reported(program, &path, messages)?;
            Ok(sample)
        }),
    ];
    series(plan, report, "inbox load", subjects, &[Comparison::new(by_us, by_hand, Target::Rate(0.7, 1.0))])
}

fn every_copy_is_reported(program: &Path, db: &Path, messages: u64) -> Result<()> {
    let output = Command::new(program).args(["inbox", "duplicates", "--csv"]).arg(db).output()?;
    let listed = String::from_utf8(output.stdout)?;
    let (copies, conflicts) = (listed.lines().count() - 1, listed.matches(",different\n").count());
    let expected = (again(messages), messages / CONFLICT_EVERY);
    ensure!(
        (copies as u64, conflicts as u64) == expected,
        "{copies} and {conflicts} listed, not {expected:?}"
    );
    Ok(())
}

fn apply(plan: &Plan, program: &Path, folder: &Path, report: &mut Report) -> Result<()> {
    let [shell, by_us] = ["sqlite3 shell, the same rows", "inbox apply"];
    let make = |name: &str| -> Result<PathBuf> {
        let path = folder.join(name);
        drop(Inbox::open(&path)?);
        Ok(path)
    };
    let (shell_db, our_db) = (make("shell.db")?, make("apply.db")?);
    let message = folder.join("message.json");
    let (mut shell_next, mut our_next) = (0, 0);
    let subjects = vec![
        Subject::new(shell, |time| {
            for_a_while(time, || {
                shell_next += 1;
                let key = key_of(shell_next);
                let sql = format!(
                    "BEGIN IMMEDIATE;
                     INSERT INTO inbox_log (msg_id, biz_key, status, response, created_at)
                        VALUES ('{key}', 'O-1', 'done', '{}', datetime('now')) ON CONFLICT (msg_id) DO NOTHING;
                     INSERT INTO inbox_deliveries (msg_id, verdict, path, source, digest, received_at)
                        VALUES ('{key}', 'applied', 'manual', 'message.json', randomblob(33), datetime('now'));
                     COMMIT;",
                    response(&key)
                );
                let status = Command::new("sqlite3").arg(&shell_db).arg(sql).stdout(Stdio::null()).status();
                ensure!(status.context("sqlite3")?.success(), "sqlite3 failed");
                Ok(())
            })
        }),
        Subject::new(by_us, |time| {
            for_a_while(time, || {
                our_next += 1;
                // Written before the clock starts would be fairer still; it is a small file.
                fs::write(&message, line(our_next, 0))?;
                let output =
                    Command::new(program).args(["inbox", "apply"]).args([&our_db, &message]).output()?;
                ensure!(output.status.success() && output.stdout.starts_with(b"applied\n"), "{output:?}");
                Ok(())
            })
        }),
    ];
    series(plan, report, "inbox apply", subjects, &[Comparison::new(by_us, shell, Target::Time(2.0, 1.0))])
}

fn for_a_while(time: Duration, mut once: impl FnMut() -> Result<()>) -> Result<Sample> {
    let stretch = Stretch::start();
    let mut times = Vec::new();
    while stretch.elapsed() < time {
        let begun = now();
        once()?;
        times.push(now() - begun);
    }
    Sample::new(times, &stretch)
}

fn sample(messages: u64, stretch: &Stretch) -> Sample {
    let elapsed = stretch.elapsed().as_secs_f64();
    let each_us = elapsed * 1e6 / messages as f64;
    Sample { rate: messages as f64 / elapsed, p50_us: each_us, p99_us: each_us, cpu_us: 0.0 }
}

fn insert_by_hand(path: &Path, messages: u64) -> Result<()> {
    let conn = Connection::open(path)?;
    conn.execute_batch("PRAGMA synchronous = FULL; PRAGMA cache_size = -65536")?;
    let mut row = conn.prepare(INSERT_ROW)?;
    let mut delivery = conn.prepare(INSERT_DELIVERY)?;
    let mut first = conn.prepare(FIRST_DIGEST)?;
    let digest = [1_u8; 33];
    for batch in 0..messages.div_ceil(BATCH) {
        conn.execute_batch("BEGIN IMMEDIATE")?;
        let at: String = conn.query_row("SELECT datetime('now')", [], |row| row.get(0))?;
        for number in batch * BATCH..((batch + 1) * BATCH).min(messages) {
            let key = key_of(named(number));
            let is_new = row.execute(params![key, "O-1", response(&key), at])? == 1;
            if !is_new {
                first.query_row([&key], |row| row.get::<_, Vec<u8>>(0))?;
            }
            let verdict = if is_new { "applied" } else { "duplicate" };
            delivery.execute(params![key, verdict, format!("messages.ndjson:{number}"), digest, at])?;
        }
        conn.execute_batch("COMMIT")?;
    }
    Ok(())
}

fn write_lines(path: &Path, messages: u64) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    for number in 0..messages {
        writeln!(out, "{}", line(named(number), amount(number)))?;
    }
    Ok(out.flush()?)
}

/// Which message comes at that place: mostly one of its own, now and then the one before it.
fn named(number: u64) -> u64 {
    if is_again(number) { number - 1 } else { number }
}

fn is_again(number: u64) -> bool {
    number % DUPLICATE_EVERY == DUPLICATE_EVERY - 1
}

fn amount(number: u64) -> u64 {
    u64::from(number % CONFLICT_EVERY == CONFLICT_EVERY - 1)
}

fn again(messages: u64) -> u64 {
    messages / DUPLICATE_EVERY
}

fn line(number: u64, amount: u64) -> String {
    format!(
        r#"{{"msg_id":"{}","order_no":"O-1","sender":"WMS-04","type":"ORDER_CHANGED","sent_at":"2026-11-30T09:15:27+09:00","amount":{amount},"items":[{{"sku":"A-1009","qty":3}},{{"sku":"B-77","qty":1}}]}}"#,
        key_of(number)
    )
}

/// In no order, as identifiers are: they touch random pages of the index.
fn key_of(number: u64) -> String {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{mixed:016x}-{number:08}")
}

fn response(key: &str) -> String {
    format!(r#"{{"msg_id":"{key}","biz_key":"O-1","result":"applied"}}"#)
}
