//! `onlyonce inbox show`.

use std::io::{self, Write, stdout};

use onlyonce_inbox::RecordView;

use super::Database;
use crate::failure::Failure;
use crate::output;

/// Shows what is on record about one message: its row, its deliveries, what operators did
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox show inbox.db M-1
  onlyonce inbox show inbox.db M-1 --json")]
pub(super) struct Show {
    #[command(flatten)]
    database: Database,
    /// The key, byte for byte
    msg_id: String,
    /// Print JSON: `row`, `lease`, `deliveries`, `times`, `audit`
    #[arg(long)]
    json: bool,
}

impl Show {
    pub(super) fn run(self) -> Result<(), Failure> {
        let inbox = self.database.open_existing()?;
        let record = inbox.record_of(&self.msg_id)?.ok_or_else(|| not_found(&self.msg_id))?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &record)?,
            false => self.print(&mut out, &record)?,
        }
        Ok(())
    }

    fn print(&self, out: &mut impl Write, record: &RecordView) -> io::Result<()> {
        writeln!(out, "msg_id      {}", output::visible(&self.msg_id))?;
        match &record.row {
            Some(row) => {
                for (name, value) in [
                    ("biz_key", &row.biz_key),
                    ("status", &row.status),
                    ("response", &row.response),
                    ("created_at", &row.created_at),
                ] {
                    writeln!(out, "{name:<12}{}", output::visible(value.as_deref().unwrap_or("NULL")))?;
                }
            }
            None if record.lease.is_some() => {}
            None => writeln!(out, "status      no row (purged or forgotten): it is new when it comes again")?,
        }
        if let Some(lease) = &record.lease {
            let state = match lease.left_ms {
                0 => "not seen to end; the next delivery takes over".into(),
                left => format!("in progress, for {} s at least", left.div_ceil(1000)),
            };
            writeln!(out, "{:<12}attempt {}, begun {}: {state}", "lease", lease.attempt, lease.taken_at)?;
        }
        writeln!(out, "times       {}", record.times)?;
        let mut table = output::table(&["RECEIVED", "VERDICT", "PATH", "BODY", "SOURCE"]);
        table.add_rows(record.deliveries.iter().map(|delivery| {
            let digest = delivery.digest.get(2..14).unwrap_or_default();
            let source = output::visible(&delivery.source);
            [delivery.received_at.as_str(), &delivery.verdict, &delivery.path, digest, &source]
                .map(String::from)
        }));
        if !record.deliveries.is_empty() {
            writeln!(out)?;
            output::print_table(out, &mut table)?;
        }
        for entry in &record.audit {
            writeln!(
                out,
                "\n{} {} by {}: {}\n  before: {}",
                entry.at,
                entry.action,
                output::visible(&entry.actor),
                output::visible(&entry.reason),
                output::visible(&entry.before)
            )?;
        }
        Ok(())
    }
}

pub(super) fn not_found(key: &str) -> Failure {
    Failure::Refused(format!("no message has the key {key:?}"))
}
