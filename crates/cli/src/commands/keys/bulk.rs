//! Many decisions from a file: `onlyonce keys resolve --file`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write, stdin, stdout};
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use onlyonce_core::{Key, OperationId, OperatorAction, OperatorOutcome, Reply, Scope, StoreAdmin};
use serde::{Deserialize, Serialize};

use super::resolve::{BODY_BYTES_MAX, header_pair, may_have_body};
use super::{alone, done};
use crate::commands::operator::one_line;
use crate::failure::Failure;
use crate::output;

/// One line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    key: String,
    scope: Option<String>,
    status: u16,
    #[serde(default)]
    headers: Vec<(String, String)>,
    #[serde(default)]
    body: String,
    #[serde(default)]
    body_encoding: Encoding,
    reason: Option<String>,
}

#[derive(Clone, Copy, Default, Deserialize)]
enum Encoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
}

/// What a line decides, checked.
struct Decision {
    line: usize,
    key: Key,
    scope: Option<Scope>,
    reply: Reply,
    reason: Option<String>,
}

/// What came of a file.
#[derive(Default, Serialize)]
struct Outcome {
    resolved: usize,
    already: usize,
    refused: Vec<RefusedJson>,
}

#[derive(Serialize)]
struct RefusedJson {
    line: usize,
    key: String,
    why: String,
}

const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Every decision of a file; nothing is decided unless all of its lines can be read.
pub(super) struct Bulk(Vec<Decision>);

impl Bulk {
    /// Reads a file of JSON documents, one on a line; `-` is standard input.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let mut text = String::new();
        let read = match path.to_str() {
            Some("-") => stdin().lock().take(FILE_BYTES_MAX + 1).read_to_string(&mut text),
            _ => File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)),
        };
        read.map_err(|error| Failure::io(&format!("--file {}", path.display()), &error))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(Failure::Usage(format!(
                "--file is over the limit of {FILE_BYTES_MAX} bytes; split it"
            )));
        }
        // As programs for Windows begin a file.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let mut decisions: Vec<Decision> = Vec::new();
        let mut seen: HashMap<(Option<Scope>, Key), usize> = HashMap::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |why: String| {
                Failure::Data(format!("line {} of the file: {why}; nothing was changed", at + 1))
            };
            let decision = decision(at + 1, line).map_err(wrong)?;
            let id = (decision.scope.clone(), decision.key.clone());
            if let Some(first) = seen.insert(id, decision.line) {
                return Err(wrong(format!("it decides the same record as line {first}")));
            }
            decisions.push(decision);
        }
        if decisions.is_empty() {
            return Err(Failure::Data("there is no line in the file; nothing was changed".into()));
        }
        Ok(Self(decisions))
    }

    /// Applies them one by one. What is refused does not keep the rest from being done; the same file may be given again.
    pub(super) async fn apply(
        self,
        store: &dyn StoreAdmin,
        retention: Duration,
        action: &OperatorAction,
        json: bool,
    ) -> Result<(), Failure> {
        let mut outcome = Outcome::default();
        let all = self.0.len();
        for decision in self.0 {
            let reason = decision.reason.clone().unwrap_or_else(|| action.reason.clone());
            let action = OperatorAction { reason, ..action.clone() };
            match resolve(store, &decision, retention, &action).await {
                Ok(true) => outcome.resolved += 1,
                Ok(false) => outcome.already += 1,
                Err(Failure::Refused(why)) => {
                    let key = decision.key.as_str().to_owned();
                    outcome.refused.push(RefusedJson { line: decision.line, key, why });
                }
                Err(failure) => {
                    let so_far = outcome.resolved + outcome.already + outcome.refused.len();
                    return Err(Failure::Io(format!(
                        "after {so_far} of {all} lines: {failure}; give the same file again, what is done stays done"
                    )));
                }
            }
        }
        outcome.print(json)?;
        match outcome.refused.len() {
            0 => Ok(()),
            refused => {
                Err(Failure::Refused(format!("{refused} of {all} lines were refused; the others are done")))
            }
        }
    }
}

/// Whether it was done now; false when the record has this very reply already.
async fn resolve(
    store: &dyn StoreAdmin,
    decision: &Decision,
    retention: Duration,
    action: &OperatorAction,
) -> Result<bool, Failure> {
    let id = match &decision.scope {
        Some(scope) => OperationId { scope: scope.clone(), key: decision.key.clone() },
        None => alone(store, decision.key.clone()).await?,
    };
    let outcome = store.resolve(&id, &decision.reply, retention, action).await?;
    if outcome == OperatorOutcome::Completed {
        let record = store.show(&id).await?;
        if record.and_then(|record| record.reply).as_ref() == Some(&decision.reply) {
            return Ok(false);
        }
    }
    done(outcome, &id).map(|_| true)
}

fn decision(line: usize, text: &str) -> Result<Decision, String> {
    let Line { key, scope, status, headers, body, body_encoding, reason } =
        serde_json::from_str(text).map_err(|error| unplaced(&error))?;
    if !(200..=599).contains(&status) {
        return Err(format!("status {status} is none of 200 to 599"));
    }
    let body = match body_encoding {
        Encoding::Utf8 => Bytes::from(body),
        Encoding::Base64 => BASE64.decode(body).map_err(|error| format!("body: {error}"))?.into(),
    };
    if body.len() as u64 > BODY_BYTES_MAX {
        return Err(format!("the body is over the limit of {BODY_BYTES_MAX} bytes"));
    }
    let mut reply = Reply::new(status, body);
    may_have_body(&reply)?;
    for (name, value) in headers {
        let (name, value) = header_pair(&name, &value)?;
        reply = reply.with_header(name, value);
    }
    Ok(Decision {
        line,
        key: Key::new(key).map_err(|error| format!("key: {error}"))?,
        scope: scope.map(Scope::new).transpose().map_err(|error| format!("scope: {error}"))?,
        reply,
        reason: reason.as_deref().map(one_line).transpose().map_err(|error| format!("reason: {error}"))?,
    })
}

/// What is wrong and in which column: the line of the file is said, and the document has but one.
fn unplaced(error: &serde_json::Error) -> String {
    let (text, column) = (error.to_string(), error.column());
    match text.strip_suffix(&format!(" at line {} column {column}", error.line())) {
        Some(why) => format!("{why}, at column {column}"),
        None => text,
    }
}

impl Outcome {
    fn print(&self, json: bool) -> Result<(), Failure> {
        let mut out = stdout().lock();
        if json {
            return Ok(output::json(&mut out, self)?);
        }
        for RefusedJson { line, why, .. } in &self.refused {
            writeln!(out, "line {line}: {}", output::visible(why))?;
        }
        let Self { resolved, already, refused } = self;
        Ok(writeln!(out, "resolved {resolved}, already so {already}, refused {}", refused.len())?)
    }
}
