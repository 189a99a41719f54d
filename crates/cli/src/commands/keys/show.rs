//! `onlyonce keys show`.

use std::io::{Write, stdout};

use onlyonce_core::{RecordView, Reply};
use onlyonce_http::RequestOrigin;

use super::Which;
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Shows one record with its stored reply
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys show order-7
  onlyonce keys show order-7 --scope merchant-1 --json")]
pub(super) struct Show {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    store: StoreArg,
    /// Print the record as JSON
    #[arg(long)]
    json: bool,
}

/// Of a body on a terminal; `--json` has it whole.
const BODY_BYTES_SHOWN: usize = 4096;

impl Show {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let store = self.store.open_reading().await?;
        let id = self.which.find(&*store).await?;
        let record = match store.show(&id).await? {
            Some(record) => record,
            None => {
                return Err(Failure::Refused(format!(
                    "no record has the key {:?} in the scope {:?}, or it has expired{}",
                    id.key.as_str(),
                    id.scope.as_str(),
                    super::elsewhere(&*store, &id.key).await?
                )));
            }
        };
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &RecordJson::from(&record))?,
            false => print(&mut out, &record)?,
        }
        Ok(())
    }
}

fn print(out: &mut impl Write, record: &RecordView) -> Result<(), Failure> {
    let mut line = |name: &str, value: String| writeln!(out, "{name:<13} {value}");
    line("key", output::visible(record.id.key.as_str()))?;
    line("scope", output::scope(&record.id))?;
    line("state", output::state(record).into())?;
    line("attempt", record.attempt.to_string())?;
    line("on lease end", output::policy(record.on_lease_end).into())?;
    line("created", output::time(record.created_at))?;
    match record.lease_left {
        Some(left) => line(
            "locked until",
            format!("{} ({} left)", output::time(record.locked_until), output::duration(left)),
        )?,
        None => line("locked until", output::time(record.locked_until))?,
    }
    if let Some(end) = record.expires_at {
        line("expires", output::time(end))?;
    }
    line("fingerprint", record.fingerprint.to_string())?;
    if let Some(origin) = &record.origin {
        match RequestOrigin::decode(origin) {
            Some(request) => {
                request.request_id().map_or(Ok(()), |id| line("request id", output::visible(id)))?;
                request.trace().map_or(Ok(()), |trace| line("traceparent", trace.to_string()))?;
            }
            None => line("origin", output::visible(origin.as_str()))?,
        }
    }
    match &record.reply {
        Some(reply) => print_reply(out, reply),
        None => Ok(()),
    }
}

fn print_reply(out: &mut impl Write, reply: &Reply) -> Result<(), Failure> {
    writeln!(out, "\n{}", reply.status())?;
    for (name, value) in output::fields(reply.headers()) {
        writeln!(out, "{name}: {}", output::visible(&value))?;
    }
    writeln!(out)?;
    let body = reply.body();
    match std::str::from_utf8(body) {
        _ if reply.is_omitted() => writeln!(out, "(the body was left out when it was recorded)")?,
        Err(_) => writeln!(out, "({} bytes, not text; --json has them in base64)", body.len())?,
        Ok(text) => {
            let shown = &text[..text.floor_char_boundary(BODY_BYTES_SHOWN)];
            for line in shown.lines() {
                writeln!(out, "{}", output::visible(line))?;
            }
            if shown.len() < text.len() {
                writeln!(out, "({} more bytes; --json has them all)", text.len() - shown.len())?;
            }
        }
    }
    Ok(())
}
