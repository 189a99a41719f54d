//! What a run is told.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Method;

use crate::catalogue::{Scenario, built_in};
use crate::profile::Profile;
use crate::target::Target;

/// How a key is written in its header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyStyle {
    /// Quoted, and bare when the API refuses quotes; under the profile `stripe` bare alone.
    #[default]
    Auto,
    /// As a string of structured fields: `"abc"`.
    Quoted,
    /// As it is: `abc`.
    Bare,
}

/// Where the effect of the operation can be read: a number that moves by the same step with each operation.
#[derive(Clone, Debug)]
pub enum EffectSource {
    /// A GET whose answer has the number: at the pointer (RFC 6901) into its JSON, or else the first one in its text.
    Url {
        /// What to get.
        url: Target,
        /// Where in the JSON: a number, a string that is one, or an array, whose length counts.
        pointer: Option<String>,
        /// Header lines of the GET. The operation's own are sent along only to the same host.
        headers: Vec<(String, String)>,
    },
    /// A command for `sh`, whose output has the number, the first one in it.
    Command(String),
}

/// What to check, and how. Made by [`Options::new`], then filled in.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Where the operation is.
    pub url: Target,
    /// Its method.
    pub method: Method,
    /// Header lines of every request, as the first principal.
    pub headers: Vec<(String, String)>,
    /// Those that differ for the second principal.
    pub other_headers: Vec<(String, String)>,
    /// The body of the operation. `{{unique}}` is replaced by text that is new for each key, in other bodies too.
    pub body: String,
    /// The body of another operation, which the API accepts as well.
    pub other_body: Option<String>,
    /// A body whose work takes a while: a second or so.
    pub slow_body: Option<String>,
    /// A body that is refused for good.
    pub failing_body: Option<String>,
    /// A body whose work fails once for each key, and then succeeds.
    pub transient_body: Option<String>,
    /// The path of another operation that takes the same body.
    pub other_path: Option<String>,
    /// Another method that the URL answers to; `PATCH`, or `POST` for a `PATCH`, where none is given.
    pub other_method: Option<Method>,
    /// The header that carries the key.
    pub key_header: String,
    /// How keys are written.
    pub key_style: KeyStyle,
    /// Where the effect can be seen.
    pub effect: Option<EffectSource>,
    /// A command for `sh` that kills the server, starts it again, and then ends.
    pub restart_command: Option<String>,
    /// What the API is held to.
    pub profile: Profile,
    /// These scenarios alone, when there are any. What they rest on runs too, where it must.
    pub only: BTreeSet<String>,
    /// Not these.
    pub skip: BTreeSet<String>,
    /// Copies in a race.
    pub concurrency: u32,
    /// Races.
    pub rounds: u32,
    /// For one request.
    pub timeout: Duration,
    /// How long a key may answer "in progress" after its work must be over, before it counts as stuck.
    pub patience: Duration,
    /// How long an effect that should not come is waited for.
    pub settle: Duration,
    /// For the whole run.
    pub time_max: Duration,
    /// For the whole run.
    pub requests_max: u32,
    /// What runs, in this order.
    pub scenarios: Vec<Scenario>,
}

impl Options {
    /// A POST without a body, the built-in scenarios, and everything else at its default.
    pub fn new(url: Target) -> Self {
        Self {
            url,
            method: Method::POST,
            headers: Vec::new(),
            other_headers: Vec::new(),
            body: String::new(),
            other_body: None,
            slow_body: None,
            failing_body: None,
            transient_body: None,
            other_path: None,
            other_method: None,
            key_header: "Idempotency-Key".into(),
            key_style: KeyStyle::Auto,
            effect: None,
            restart_command: None,
            profile: Profile::default(),
            only: BTreeSet::new(),
            skip: BTreeSet::new(),
            concurrency: 20,
            rounds: 20,
            timeout: Duration::from_secs(30),
            patience: Duration::from_secs(60),
            settle: Duration::from_millis(100),
            time_max: Duration::from_secs(600),
            requests_max: 5000,
            scenarios: built_in(),
        }
    }

    /// What is wrong with them, when something is.
    pub(crate) fn fault(&self) -> Option<String> {
        let known: BTreeSet<&str> = self.scenarios.iter().map(|scenario| scenario.id.as_str()).collect();
        if let Some(id) = self.only.iter().chain(&self.skip).find(|id| !known.contains(id.as_str())) {
            return Some(format!(
                "no scenario {id:?}; the ids are: {}",
                known.into_iter().collect::<Vec<_>>().join(", ")
            ));
        }
        let lines = self.headers.iter().chain(&self.other_headers);
        let effect_lines = match &self.effect {
            Some(EffectSource::Url { headers, .. }) => &headers[..],
            _ => &[],
        };
        for (name, value) in lines.chain(effect_lines) {
            if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
                return Some(format!("{name:?} is not a header name"));
            }
            if http::HeaderValue::from_str(value).is_err() {
                return Some(format!("the value of the header {name} cannot be sent"));
            }
            if name.eq_ignore_ascii_case(&self.key_header) {
                return Some(format!("the header {name} carries the key, which the checker makes itself"));
            }
            if ["content-length", "transfer-encoding", "connection"]
                .iter()
                .any(|own| name.eq_ignore_ascii_case(own))
            {
                return Some(format!("the header {name} is the checker's own"));
            }
        }
        if http::HeaderName::from_bytes(self.key_header.as_bytes()).is_err() {
            return Some(format!("{:?} is not a header name", self.key_header));
        }
        if let Some(EffectSource::Url { pointer: Some(pointer), .. }) = &self.effect
            && !pointer.is_empty()
            && !pointer.starts_with('/')
        {
            return Some(format!("the pointer {pointer:?} does not begin with a slash"));
        }
        if let Some(path) = &self.other_path
            && let Err(reason) = path_fault(path)
        {
            return Some(format!("the other path {path:?}: {reason}"));
        }
        if self.concurrency < 2 || self.concurrency > 1000 {
            return Some("a race has 2 to 1000 copies".into());
        }
        if self.rounds < 1 || self.rounds > 1000 {
            return Some("1 to 1000 rounds".into());
        }
        None
    }
}

/// A path that stays on its host, as it is sent.
pub(crate) fn path_fault(path: &str) -> Result<(), String> {
    if !path.starts_with('/') {
        return Err("a path begins with a slash and names no host".into());
    }
    if path.bytes().any(|byte| byte <= b' ' || byte >= 0x7f || byte == b'#') {
        return Err("it has bytes that a request line cannot carry".into());
    }
    Ok(())
}
