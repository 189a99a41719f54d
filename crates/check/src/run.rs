//! A run: every scenario in its order, each judged by the profile.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::catalogue::Scenario;
use crate::effect::Probe;
use crate::lab::Lab;
use crate::options::{EffectSource, Options};
use crate::profile::Level;
use crate::report::{Report, Verdict, Verified};
use crate::stop::Stop;
use crate::target::Target;
use crate::trials::{Finding, Trial};
use crate::wire::{Budget, Exhausted, NoAnswer, TlsSetup, Wire};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The options do not fit together.
    #[error("{0}")]
    Usage(String),
    /// The API, or the URL of its effect, cannot be reached.
    #[error("{url} cannot be reached: {reason}")]
    Unreachable {
        /// What was to be reached.
        url: String,
        /// Why not.
        reason: String,
    },
}

/// What a run is at.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A scenario begins: the `index`th of `total`, from 0.
    Begins {
        /// Its place.
        index: usize,
        /// How many there are.
        total: usize,
        /// Which.
        scenario: &'a Scenario,
    },
    /// It has ended.
    Ended(&'a Verified),
}

/// Runs what the options say, and tells `observer` how far it is.
///
/// Requests go to the host of the URL, and to that of the effect URL, and to no other: redirects are not followed.
///
/// # Errors
/// [`CheckError::Usage`] before anything is sent; [`CheckError::Unreachable`] when nobody answers at all.
///
/// # Cancellation
/// Dropping the future stops it at once: requests under way are cut off.
pub async fn check(
    options: &Options,
    observer: &mut (dyn FnMut(Event<'_>) + Send),
) -> Result<Report, CheckError> {
    if let Some(fault) = options.fault() {
        return Err(CheckError::Usage(fault));
    }
    let budget = Arc::new(Budget::new(options.time_max, options.requests_max));
    let wire = wire(&options.url, options, &budget)?;
    let probe = probe(options, &wire, &budget)?;
    reach(&wire, &options.url).await?;
    if let Some(probe) = &probe {
        first_reading(probe, options).await?;
    }
    let lab = Lab::new(options, wire, probe);
    let mut run =
        Run { lab: &lab, failed: BTreeMap::new(), exhausted: None, unreachable: None, shows: false };
    let mut results = Vec::new();
    let total = options.scenarios.len();
    for (index, scenario) in options.scenarios.iter().enumerate() {
        observer(Event::Begins { index, total, scenario });
        let result = run.one(scenario).await;
        observer(Event::Ended(&result));
        results.push(result);
        if let Some(why) = run.unreachable.take() {
            return Err(unreachable(&options.url, &why));
        }
    }
    Ok(Report::new(options, results, lab.budget().sent(), lab.budget().elapsed(), run.exhausted.is_some()))
}

fn wire(target: &Target, options: &Options, budget: &Arc<Budget>) -> Result<Wire, CheckError> {
    let endpoint = target.endpoint.clone();
    let tls = match endpoint.https {
        false => None,
        true => Some(TlsSetup::new(endpoint.dial_host()).map_err(CheckError::Usage)?),
    };
    Ok(Wire::new(endpoint, tls, options.timeout, budget.clone()))
}

fn probe(options: &Options, wire: &Wire, budget: &Arc<Budget>) -> Result<Option<Probe>, CheckError> {
    let Some(source) = &options.effect else { return Ok(None) };
    Ok(Some(match source {
        EffectSource::Command(_) => Probe::new(source, None, &[], options.timeout),
        // Credentials are for the host that they were given for.
        EffectSource::Url { url, .. } if url.endpoint == options.url.endpoint => {
            Probe::new(source, Some(wire.clone()), &options.headers, options.timeout)
        }
        EffectSource::Url { url, .. } => {
            Probe::new(source, Some(self::wire(url, options, budget)?), &[], options.timeout)
        }
    }))
}

async fn reach(wire: &Wire, target: &Target) -> Result<(), CheckError> {
    wire.reach().await.map_err(|why| unreachable(target, &why))
}

/// With the advice that fits what is seen most when a URL is new.
fn unreachable(target: &Target, why: &NoAnswer) -> CheckError {
    let mut reason = why.to_string();
    let advice = match (target.endpoint.https, why) {
        (false, NoAnswer::Closed(_)) => "; does that port speak TLS? Then the URL begins with https://",
        (true, NoAnswer::Connect(_)) if reason.contains("InvalidContentType") => {
            "; that port does not speak TLS: the URL begins with http://"
        }
        (true, NoAnswer::Connect(_)) if reason.contains("CaUsedAsEndEntity") => {
            "; its certificate is an authority's own (CA:TRUE): have the authority sign one for the server"
        }
        (true, NoAnswer::Connect(_)) if reason.contains("invalid peer certificate") => {
            "; the roots of the file that SSL_CERT_FILE names are trusted, or else those of the system"
        }
        _ => "",
    };
    reason.push_str(advice);
    CheckError::Unreachable { url: target.to_string(), reason }
}

async fn first_reading(probe: &Probe, options: &Options) -> Result<(), CheckError> {
    match probe.read().await {
        Ok(_) => Ok(()),
        Err(why) => match &options.effect {
            Some(EffectSource::Url { url, .. }) if why.is_unreachable() => {
                Err(CheckError::Unreachable { url: url.to_string(), reason: why.to_string() })
            }
            _ => Err(CheckError::Usage(why.to_string())),
        },
    }
}

struct Run<'a> {
    lab: &'a Lab<'a>,
    /// Scenarios whose promise is broken.
    failed: BTreeMap<String, String>,
    exhausted: Option<Exhausted>,
    unreachable: Option<NoAnswer>,
    /// The baseline held: runs can be told apart.
    shows: bool,
}

impl Run<'_> {
    async fn one(&mut self, scenario: &Scenario) -> Verified {
        if let Some(reason) = self.left_out(scenario) {
            return Verified::without_trial(scenario, Verdict::NotApplicable, reason);
        }
        if let Some(exhausted) = self.exhausted {
            return Verified::without_trial(scenario, Verdict::NotObservable, exhausted.to_string());
        }
        // A trial that was cut off by a limit has told half a story.
        self.lab.take_story();
        let left = self.lab.budget().time_left();
        let tried = tokio::time::timeout(left, Box::pin(scenario.trial.run(self.lab)));
        let tried = tried.await.unwrap_or(Err(Stop::Exhausted(Exhausted::Time)));
        let story = self.lab.take_story();
        let finding = match tried {
            Ok(finding) => finding,
            Err(Stop::Exhausted(exhausted)) => {
                self.exhausted = Some(exhausted);
                Finding::NotObservable(exhausted.to_string())
            }
            Err(Stop::Silent(why)) if matches!(scenario.trial, Trial::TwoKeys) => {
                self.unreachable = Some(why.clone());
                Finding::Broken(why.to_string())
            }
            Err(Stop::Silent(why)) => Finding::Broken(why.to_string()),
            Err(Stop::Missing(why)) => Finding::NotApplicable(why),
            Err(why @ (Stop::Unseen(_) | Stop::Probe(_) | Stop::Unfit(_))) => {
                Finding::NotObservable(why.to_string())
            }
        };
        let profile = self.lab.options.profile;
        let is_baseline = matches!(scenario.trial, Trial::TwoKeys);
        let finding = match finding {
            // Where a run and a replay look alike, only a refusal tells anything.
            Finding::Held if !is_baseline && !self.shows && !scenario.trial.is_shown_by_refusal() => {
                Finding::NotObservable("nothing shows whether the operation ran".into())
            }
            finding => finding,
        };
        self.shows |= is_baseline && finding == Finding::Held;
        let (verdict, reason) = match finding {
            Finding::Held => (Verdict::Pass, String::new()),
            Finding::Broken(reason) => {
                self.failed.insert(scenario.id.clone(), reason.clone());
                (Verdict::of(scenario.level.under(profile)), reason)
            }
            Finding::Weak(reason) => (Verdict::of(scenario.form.under(profile)), reason),
            Finding::NotObservable(reason) => (Verdict::NotObservable, reason),
            Finding::NotApplicable(reason) => (Verdict::NotApplicable, reason),
        };
        Verified::new(scenario, verdict, reason, &story)
    }

    fn left_out(&self, scenario: &Scenario) -> Option<String> {
        let options = self.lab.options;
        let is_baseline = matches!(scenario.trial, Trial::TwoKeys);
        let profile = options.profile;
        if !is_baseline && !options.only.is_empty() && !options.only.contains(&scenario.id) {
            return Some("left out: not among --only".into());
        }
        if !is_baseline && options.skip.contains(&scenario.id) {
            return Some("left out by --skip".into());
        }
        if scenario.level.under(profile) == Level::Off && scenario.form.under(profile) == Level::Off {
            return Some(format!("not part of the profile {profile}"));
        }
        let broken = scenario.after.iter().find(|id| self.failed.contains_key(*id))?;
        Some(format!("{broken} does not hold, and this rests on it"))
    }
}
