//! What a run would send, said before it does.

use std::collections::BTreeSet;

use crate::catalogue::Scenario;
use crate::options::{EffectSource, Options};
use crate::profile::Level;
use crate::run::CheckError;
use crate::trials::Trial;

/// What a run will do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The scenarios that will be tried.
    pub scenarios: Vec<Scenario>,
    /// Requests to the operation, at most; retries while a key is "in progress" come on top.
    pub requests: u32,
    /// Operations that really run on a right server.
    pub operations: u32,
    /// The hosts that are sent to.
    pub hosts: Vec<String>,
    /// Commands that are run.
    pub commands: Vec<String>,
}

impl Plan {
    /// The plan of these options.
    ///
    /// # Errors
    /// When they do not fit together.
    pub fn of(options: &Options) -> Result<Self, CheckError> {
        if let Some(fault) = options.fault() {
            return Err(CheckError::Usage(fault));
        }
        let scenarios: Vec<Scenario> =
            options.scenarios.iter().filter(|scenario| is_tried(scenario, options)).cloned().collect();
        let (mut requests, mut operations) = (0, 0);
        let mut counted = BTreeSet::new();
        for scenario in &scenarios {
            if scenario.trial.experiment().is_some_and(|shared| !counted.insert(shared)) {
                continue;
            }
            let (sends, runs) = scenario.trial.cost(options);
            requests += sends;
            operations += runs;
        }
        let mut hosts = vec![options.url.endpoint.to_string()];
        let mut commands = Vec::new();
        match &options.effect {
            Some(EffectSource::Url { url, .. }) if url.endpoint != options.url.endpoint => {
                hosts.push(url.endpoint.to_string());
            }
            Some(EffectSource::Command(command)) => commands.push(command.clone()),
            _ => {}
        }
        commands.extend(options.restart_command.clone());
        Ok(Self { scenarios, requests, operations, hosts, commands })
    }
}

fn is_tried(scenario: &Scenario, options: &Options) -> bool {
    if matches!(scenario.trial, Trial::TwoKeys) {
        return true;
    }
    let is_chosen = options.only.is_empty() || options.only.contains(&scenario.id);
    let profile = options.profile;
    let is_off = scenario.level.under(profile) == Level::Off && scenario.form.under(profile) == Level::Off;
    is_chosen && !options.skip.contains(&scenario.id) && !is_off && scenario.trial.has_what_it_needs(options)
}
