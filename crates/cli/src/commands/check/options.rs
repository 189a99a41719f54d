//! The options of `onlyonce check`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::Method;
use onlyonce_check::{EffectSource, KeyStyle, Options, Profile, Target, catalogue};

use crate::commands::secret::Unrepeated;
use crate::commands::units::duration;
use crate::failure::Failure;

/// Point it at any API and know whether it is idempotent.
///
/// Sends the operation as clients do when the network fails them: again, at once, half, changed; and says which
/// promises hold. It really runs the operation, many times: point it at a test system. Requests go to the host of URL
/// and of --effect-url alone; redirects are not followed.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes:
  0   every promise that was seen holds
  1   one does not, or nothing was shown
  2   the command line is wrong, or the effect cannot be read
  3   the API cannot be reached
  74  a file or the terminal failed

Examples:
  onlyonce check http://127.0.0.1:8130/pay --body '{\"amount\":100}' --dry-run
  onlyonce check http://127.0.0.1:8130/pay --body '{\"amount\":100}' --other-body '{\"amount\":200}' \\
      --effect-cmd 'redis-cli get balance'
  onlyonce check https://test.example.com/charges --body @charge.json --header 'Authorization: Bearer …' \\
      --effect-url https://test.example.com/balance --effect-pointer /available --profile strict --html report.html")]
pub(crate) struct Check {
    /// Where the operation is
    #[arg(value_parser = Unrepeated(Target::parse))]
    url: Target,
    /// The body of the operation, or @FILE; {{unique}} in it is replaced by text that is new for each key
    #[arg(long, value_name = "BODY", default_value = "", hide_default_value = true)]
    body: String,
    /// The body of another operation that the API accepts
    #[arg(long, value_name = "BODY")]
    other_body: Option<String>,
    /// The method
    #[arg(long, value_name = "METHOD", default_value = "POST")]
    method: Method,
    /// A header of every request, such as the credentials; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(String, String)>,
    /// A header of another caller, in place of the one of the same name; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    other_header: Vec<(String, String)>,
    /// The header that carries the key
    #[arg(long, value_name = "NAME", default_value = "Idempotency-Key")]
    key_header: String,
    /// How keys are written
    #[arg(long, value_name = "STYLE", default_value = "auto")]
    key_style: KeyStyleArg,

    /// A URL whose answer shows the effect as a number: a balance, a count
    #[arg(long, value_name = "URL", value_parser = Unrepeated(Target::parse), help_heading = "The effect")]
    effect_url: Option<Target>,
    /// Where in the JSON of --effect-url the number is (RFC 6901), such as /balance; a list counts its entries
    #[arg(long, value_name = "POINTER", requires = "effect_url", help_heading = "The effect")]
    effect_pointer: Option<String>,
    /// A header of the request to --effect-url; those of --header go along only to the same host
    #[arg(long, value_name = "NAME: VALUE", value_parser = header, requires = "effect_url", help_heading = "The effect")]
    effect_header: Vec<(String, String)>,
    /// A shell command whose output has the number
    #[arg(long, value_name = "COMMAND", conflicts_with = "effect_url", help_heading = "The effect")]
    effect_cmd: Option<String>,
    /// How long an effect that should not come is waited for
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = duration, help_heading = "The effect")]
    settle: Duration,

    /// A body whose work takes a while, half a second or more: for what happens in flight
    #[arg(long, value_name = "BODY", help_heading = "More to try")]
    slow_body: Option<String>,
    /// A body that is refused for good
    #[arg(long, value_name = "BODY", help_heading = "More to try")]
    failing_body: Option<String>,
    /// A body whose work fails once for each key, and then succeeds
    #[arg(long, value_name = "BODY", help_heading = "More to try")]
    transient_body: Option<String>,
    /// The path of another operation that takes the same body
    #[arg(long, value_name = "PATH", help_heading = "More to try")]
    other_path: Option<String>,
    /// Another method that the URL takes; without it PATCH is tried, or POST instead of PATCH
    #[arg(long, value_name = "METHOD", help_heading = "More to try")]
    other_method: Option<Method>,
    /// A shell command that kills the server (kill -9), starts it again, and ends
    #[arg(long, value_name = "COMMAND", help_heading = "More to try")]
    restart_cmd: Option<String>,
    /// A file of more scenarios; may be repeated (the format: docs/check.md)
    #[arg(long, value_name = "FILE", help_heading = "More to try")]
    vectors: Vec<PathBuf>,

    /// What the API is held to
    #[arg(long, value_name = "PROFILE", default_value = "practice", help_heading = "What is tried")]
    profile: ProfileArg,
    /// These scenarios alone, and the baseline; may be repeated, or separated by commas
    #[arg(long, value_name = "ID", value_delimiter = ',', help_heading = "What is tried")]
    only: Vec<String>,
    /// Not these scenarios
    #[arg(long, value_name = "ID", value_delimiter = ',', help_heading = "What is tried")]
    skip: Vec<String>,
    /// Copies at once in a race
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = "What is tried")]
    concurrency: u32,
    /// Races
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = "What is tried")]
    rounds: u32,
    /// Say what would be sent, and send nothing
    #[arg(long, help_heading = "What is tried")]
    pub(super) dry_run: bool,

    /// For one request
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    timeout: Duration,
    /// How long a key may be "in progress" after a crash or a disconnect before it counts as stuck
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "Limits")]
    patience: Duration,
    /// For the whole run
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration, help_heading = "Limits")]
    max_time: Duration,
    /// Requests in the whole run
    #[arg(long, value_name = "N", default_value_t = 5000, help_heading = "Limits")]
    max_requests: u32,

    /// Print JSON instead of the summary: an array of `id`, `promise`, `source`, `verdict`, `sent`, `got`, `advice`
    #[arg(long, help_heading = "Reports")]
    pub(super) json: bool,
    /// Write a JUnit XML report
    #[arg(long, value_name = "FILE", help_heading = "Reports")]
    pub(super) junit: Option<PathBuf>,
    /// Write an HTML report, one file with all in it
    #[arg(long, value_name = "FILE", help_heading = "Reports")]
    pub(super) html: Option<PathBuf>,
    /// Show what was sent and what came back for what does not hold
    #[arg(long, short, help_heading = "Reports")]
    pub(super) verbose: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KeyStyleArg {
    /// Quoted, and bare where the API refuses quotes
    Auto,
    /// "abc", as the draft says
    Quoted,
    /// abc
    Bare,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileArg {
    /// What the IETF draft says
    Draft,
    /// And what well-kept APIs share
    Practice,
    /// Practice as Stripe documents it
    Stripe,
    /// And what makes clients simple: markers, Retry-After, problem documents
    Strict,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("write it as 'Name: value'")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

impl Check {
    /// The options of the library, files read.
    pub(super) fn options(&self) -> Result<Options, Failure> {
        let mut options = Options::new(self.url.clone());
        options.method = self.method.clone();
        options.headers.clone_from(&self.header);
        options.other_headers.clone_from(&self.other_header);
        options.body = body(&self.body)?;
        options.other_body = self.other_body.as_deref().map(body).transpose()?;
        options.slow_body = self.slow_body.as_deref().map(body).transpose()?;
        options.failing_body = self.failing_body.as_deref().map(body).transpose()?;
        options.transient_body = self.transient_body.as_deref().map(body).transpose()?;
        options.other_path.clone_from(&self.other_path);
        options.other_method.clone_from(&self.other_method);
        options.key_header.clone_from(&self.key_header);
        options.key_style = match self.key_style {
            KeyStyleArg::Auto => KeyStyle::Auto,
            KeyStyleArg::Quoted => KeyStyle::Quoted,
            KeyStyleArg::Bare => KeyStyle::Bare,
        };
        options.profile = match self.profile {
            ProfileArg::Draft => Profile::Draft,
            ProfileArg::Practice => Profile::Practice,
            ProfileArg::Stripe => Profile::Stripe,
            ProfileArg::Strict => Profile::Strict,
        };
        options.effect = self.effect();
        options.restart_command.clone_from(&self.restart_cmd);
        options.only = self.only.iter().cloned().collect();
        options.skip = self.skip.iter().cloned().collect();
        (options.concurrency, options.rounds) = (self.concurrency, self.rounds);
        (options.timeout, options.patience, options.settle) = (self.timeout, self.patience, self.settle);
        (options.time_max, options.requests_max) = (self.max_time, self.max_requests);
        for path in &self.vectors {
            let name = path.display();
            let text = std::fs::read_to_string(path)
                .map_err(|error| Failure::io(&format!("--vectors {name}"), &error))?;
            let more = catalogue::parse(&text, &options.scenarios)
                .map_err(|error| Failure::Usage(format!("--vectors {name}: {error}")))?;
            options.scenarios.extend(more);
        }
        Ok(options)
    }

    fn effect(&self) -> Option<EffectSource> {
        match (&self.effect_url, &self.effect_cmd) {
            (Some(url), _) => Some(EffectSource::Url {
                url: url.clone(),
                pointer: self.effect_pointer.clone(),
                headers: self.effect_header.clone(),
            }),
            (None, Some(command)) => Some(EffectSource::Command(command.clone())),
            (None, None) => None,
        }
    }
}

/// A body as given, or a file's text.
fn body(text: &str) -> Result<String, Failure> {
    match text.strip_prefix('@') {
        None => Ok(text.to_owned()),
        Some(path) => {
            std::fs::read_to_string(path).map_err(|error| Failure::io(&format!("the body {path}"), &error))
        }
    }
}
