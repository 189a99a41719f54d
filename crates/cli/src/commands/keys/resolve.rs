//! `onlyonce keys resolve`.

use std::fs::File;
use std::io::{Read, Write, stdout};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::header::TRAILER;
use http::{HeaderName, HeaderValue};
use onlyonce_core::Reply;
use onlyonce_http::headers::is_never_stored;

use super::bulk::Bulk;
use super::scope::Whose;
use super::{Which, Why, done};
use crate::commands::units::reply_retention;
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Stores a reply for a key whose outcome is unknown: the next retry gets exactly these bytes
///
/// Only when you know what happened. A returning owner is fenced. Refused on a record whose owner is at work or
/// that has a reply already, unless --force is given. Written on the audit table.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys resolve order-7 --status 201 --body @reply.json \\
      --header 'Content-Type: application/json' --reason 'the bank shows charge ch_81'
  onlyonce keys resolve order-7 --status 402 --body 'card declined' --reason 'the bank declined it'

Many at once, from a file with a JSON document on each line:
  {\"key\": \"order-7\", \"scope\": \"…\", \"status\": 201, \"headers\": [[\"content-type\", \"application/json\"]], \"body\": \"{}\"}
  onlyonce keys resolve --file decided.ndjson --reason 'as the bank has it'")]
pub(super) struct Resolve {
    /// The idempotency key, byte for byte
    #[arg(required_unless_present = "file")]
    key: Option<String>,
    #[command(flatten)]
    whose: Whose,
    /// The status of the reply
    #[arg(long, required_unless_present = "file", value_parser = clap::value_parser!(u16).range(200..=599))]
    status: Option<u16>,
    /// The body of the reply: text, or @FILE for the bytes of a file (at most 16 MiB)
    #[arg(long, required_unless_present = "file", value_name = "TEXT|@FILE")]
    body: Option<String>,
    /// Many at once: a file with a JSON document on each line: `key`, `status`, and where needed `scope`, `headers`, `body`,
    /// `body_encoding` (utf-8, or base64), `reason`; - is standard input. All lines are read before anything is changed; one that is refused does
    /// not stop the others; the same file may be given again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key", "scope", "scope_of", "status", "body", "headers"])]
    file: Option<PathBuf>,
    /// A header of the reply; may be given several times
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// How long the reply is kept, at least 1m: after it the next request with the key runs again
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = reply_retention)]
    retention: Duration,
    #[command(flatten)]
    why: Why,
    #[command(flatten)]
    store: StoreArg,
    /// Print the record as JSON; with --file `resolved`, `already` and `refused`
    #[arg(long)]
    json: bool,
}

pub(super) const BODY_BYTES_MAX: u64 = 16 * 1024 * 1024;

impl Resolve {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let (Some(key), Some(status), Some(text)) = (self.key, self.status, &self.body) else {
            let Some(file) = &self.file else {
                return Err(Failure::Usage("give KEY, --status and --body, or --file".into()));
            };
            let decisions = Bulk::read(file)?;
            let store = self.store.open_existing().await?;
            return decisions.apply(&*store, self.retention, &self.why.action(), self.json).await;
        };
        let mut reply = Reply::new(status, body(text)?);
        may_have_body(&reply).map_err(|why| Failure::Usage(format!("--body: {why}")))?;
        for (name, value) in self.headers {
            reply = reply.with_header(name, value);
        }
        let store = self.store.open_existing().await?;
        let id = Which { key, whose: self.whose }.find(&*store).await?;
        let record = done(store.resolve(&id, &reply, self.retention, &self.why.action()).await?, &id)?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &RecordJson::from(&*record))?,
            false => writeln!(
                out,
                "resolved {}: every retry within {} gets status {} and a body of {} bytes{}",
                output::visible(id.key.as_str()),
                output::duration(self.retention),
                reply.status(),
                reply.body().len(),
                self.why.caveat()
            )?,
        }
        Ok(())
    }
}

fn body(text: &str) -> Result<Bytes, Failure> {
    let Some(path) = text.strip_prefix('@') else { return Ok(Bytes::copy_from_slice(text.as_bytes())) };
    let doing = format!("--body: reading {path:?}");
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(BODY_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|error| Failure::io(&doing, &error))?;
    if bytes.len() as u64 > BODY_BYTES_MAX {
        return Err(Failure::Usage(format!("--body: {path:?} is over the limit of {BODY_BYTES_MAX} bytes")));
    }
    Ok(bytes.into())
}

/// No reply with one of these statuses has content (RFC 9110 §15.3.5, §15.3.6, §15.4.5): no client would get it.
pub(super) fn may_have_body(reply: &Reply) -> Result<(), String> {
    match reply.status() {
        status @ (204 | 205 | 304) if !reply.body().is_empty() => {
            Err(format!("a reply with status {status} has no body; give an empty one"))
        }
        _ => Ok(()),
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("write it as 'Name: value'")?;
    header_pair(name, value)
}

/// A header that a stored reply may have.
pub(super) fn header_pair(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), String> {
    let name =
        HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("{name:?} is not a header name"))?;
    let value = HeaderValue::from_str(value.trim())
        .map_err(|_| format!("the value of {name} is not visible ASCII"))?;
    if is_never_stored(&name) || name == TRAILER || name.as_str().starts_with("idempotency-") {
        return Err(format!("{name} is made anew for each answer and never stored"));
    }
    Ok((name, value))
}
