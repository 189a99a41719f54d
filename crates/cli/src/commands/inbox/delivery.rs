//! What `apply`, `verify`, `race` and `load` share: how messages are read, by which path they came, what is done with a new one.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::ValueEnum;
use onlyonce_inbox::{
    Body, Envelope, Exec, Http, HttpUrl, Inbox, InboxError, Incoming, KeyExpression, Keys, Leased, Place,
    Receipt, Sql, Verdict, Via, Work, read_message,
};

use super::Database;
use crate::commands::secret::Unrepeated;
use crate::commands::tls;
use crate::failure::Failure;

/// One message that is delivered to an inbox.
#[derive(Debug, clap::Args)]
pub(super) struct Delivery {
    #[command(flatten)]
    pub(super) database: Database,
    /// The file with the message, in JSON; - is standard input
    #[arg(value_name = "JSON")]
    pub(super) message: PathBuf,
    #[command(flatten)]
    pub(super) reading: Reading,
    #[command(flatten)]
    pub(super) handling: Handling,
}

/// How messages are read, and what a conflict means.
#[derive(Debug, clap::Args)]
pub(super) struct Reading {
    /// What a message is known by: a member, a JSON pointer such as /header/id, or several, as in '{sender}/{date}/{seq}'
    #[arg(long, value_name = "EXPRESSION", default_value = "msg_id", value_parser = parse_expression)]
    key: KeyExpression,
    /// What a message is about, kept beside its key; NULL where it has none
    #[arg(long, value_name = "EXPRESSION", default_value = "order_no", value_parser = parse_expression)]
    biz_key: KeyExpression,
    /// What to do about a known key with another body: warn and take it for a duplicate, or fail with exit code 65
    #[arg(long, value_name = "WHAT", default_value = "warn")]
    pub(super) on_conflict: OnConflict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OnConflict {
    Warn,
    Fail,
}

/// What is done with a new message.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Work")]
pub(super) struct Handling {
    /// Run this command by `sh -c`: the message on its standard input, its key in ONLYONCE_KEY, its standard output is the
    /// response. Exit code 0 is done, 65 a failure for good; any other leaves no record
    #[arg(long, value_name = "COMMAND", group = "work")]
    exec: Option<String>,
    /// Post the message here, its key in the header Idempotency-Key; the answer's body is the response. 2xx is done, 4xx but
    /// 408, 425 and 429 a failure for good; anything else leaves no record
    #[arg(long, value_name = "URL", group = "work", value_parser = Unrepeated(str::parse::<HttpUrl>))]
    http: Option<HttpUrl>,
    /// A file of certificate authorities (PEM) that the certificate of an https URL must be from, instead of the system's
    #[arg(long, value_name = "FILE", requires = "http", conflicts_with_all = ["exec", "sql"])]
    http_ca: Option<PathBuf>,
    /// Run the statements of this file in the transaction that records the message. Parameters: :msg_id, :biz_key, :message,
    /// :via, :source, and :NAME for the member NAME
    #[arg(long, value_name = "FILE", group = "work")]
    sql: Option<PathBuf>,
    /// How long --exec and --http may take
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_timeout)]
    timeout: Duration,
    /// For how long nobody takes a message over whose --exec or --http was not seen to end; renewed while it runs
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_lease)]
    lease: Duration,
}

/// By which path messages came.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ViaArg {
    Retry,
    Queue,
    Manual,
    Batch,
    Unknown,
}

/// One message in a file.
pub(super) struct Message {
    pub(super) source: String,
    pub(super) envelope: Envelope,
    body: Vec<u8>,
}

impl Delivery {
    pub(super) fn read(&self) -> Result<Message, Failure> {
        Message::read(&self.message, &self.reading.keys())
    }
}

impl Reading {
    pub(super) fn keys(&self) -> Keys {
        Keys { key: self.key.clone(), biz_key: self.biz_key.clone() }
    }
}

impl Handling {
    /// Ready to be done; what is wrong with it is told before anything is changed. Ctrl-C and SIGTERM end a handler.
    pub(super) fn work(&self) -> Result<Work, Failure> {
        let leased = match (&self.exec, &self.http, &self.sql) {
            (Some(command), ..) => Leased::new(Exec::new(command).timeout(self.timeout)),
            (_, Some(url), _) => Leased::new(self.service(url)?.timeout(self.timeout)),
            (_, _, Some(file)) => return Ok(Work::InTransaction(Box::new(Sql::read(file)?))),
            (None, None, None) => return Ok(Work::RecordAlone),
        };
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
        {
            // The second one ends this process at once, whatever the handler does.
            signal_hook::flag::register_conditional_shutdown(signal, 75, Arc::clone(&stop))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
                .map_err(|error| Failure::io("signals", &error))?;
        }
        Ok(Work::Leased(leased.lease(self.lease).stop_when(stop)))
    }

    fn service(&self, url: &HttpUrl) -> Result<Http, Failure> {
        let tls = tls::trusting("--http-ca", self.http_ca.as_deref())?;
        Http::new(url.clone(), &tls).map_err(|error| tls::invalid("--http", &error))
    }
}

impl From<ViaArg> for Via {
    fn from(via: ViaArg) -> Self {
        match via {
            ViaArg::Retry => Self::Retry,
            ViaArg::Queue => Self::Queue,
            ViaArg::Manual => Self::Manual,
            ViaArg::Batch => Self::Batch,
            ViaArg::Unknown => Self::Unknown,
        }
    }
}

impl Message {
    pub(super) fn read(path: &Path, keys: &Keys) -> Result<Self, Failure> {
        let body = read_message(path)?;
        let source =
            if path.as_os_str() == OsStr::new("-") { "stdin".into() } else { path.to_string_lossy() };
        let source = source.into_owned();
        let envelope = Envelope::read(&body, keys, Place::start_of(&source)).map_err(InboxError::from)?;
        Ok(Self { source, envelope, body })
    }

    pub(super) fn receive(&self, inbox: &Inbox, via: Via, work: &Work) -> Result<Receipt, Failure> {
        let incoming = Incoming { envelope: &self.envelope, via, source: &self.source, body: &self.body };
        Ok(inbox.receive_with(&incoming, work)?)
    }
}

/// What line 1 says.
pub(super) fn verdict_line(verdict: Verdict, on_conflict: OnConflict) -> &'static str {
    match verdict {
        Verdict::Duplicate(Body::Different) if on_conflict == OnConflict::Fail => "conflict",
        Verdict::Duplicate(_) => "duplicate",
        other => other.as_str(),
    }
}

/// A conflict is told, and a failure where that was asked for.
pub(super) fn conflict(key: &str, source: &str) -> String {
    format!(
        "{source}: conflict: the key {key:?} is known, and this body is another one than the first: nothing was applied; \
         `onlyonce inbox show` has both deliveries"
    )
}

fn parse_expression(text: &str) -> Result<KeyExpression, String> {
    text.parse().map_err(|error: onlyonce_inbox::InvalidExpression| error.to_string())
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    parse_between(text, Duration::from_secs(1), Duration::from_secs(3600))
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    parse_between(text, Duration::from_millis(1), Duration::from_secs(24 * 3600))
}

fn parse_between(text: &str, min: Duration, max: Duration) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if (min..=max).contains(&duration) {
        return Ok(duration);
    }
    let [min, max] = [min, max].map(humantime::format_duration);
    Err(format!("it must be between {min} and {max}"))
}
