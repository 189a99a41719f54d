//! `onlyonce check`: whether any API is idempotent, seen from outside.

mod options;

use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use onlyonce_check::{CheckError, Event, Options, Plan, Report, Verdict};

pub(crate) use self::options::Check;
use crate::failure::Failure;

impl Check {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let options = self.options()?;
        announce(&options)?;
        if self.dry_run {
            return dry_run(&options);
        }
        // Found out before the run, not after it.
        for path in [&self.junit, &self.html].into_iter().flatten() {
            write(path, "")?;
        }
        let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
        let report = runtime.block_on(watched(&options))?;
        if let Some(path) = &self.junit {
            write(path, &report.junit())?;
        }
        if let Some(path) = &self.html {
            write(path, &report.html())?;
        }
        let printed = match self.json {
            true => stdout().lock().write_all(report.json().as_bytes()),
            false => anstream::stdout().lock().write_all(report.text(self.verbose).as_bytes()),
        };
        match printed.map_err(Failure::from) {
            // Whoever reads no further must still not take it for a success.
            Ok(()) | Err(Failure::ReaderGone) if !report.holds() => Err(Failure::Found),
            printed => printed,
        }
    }
}

/// What will be sent, before it is.
fn announce(options: &Options) -> Result<(), Failure> {
    let plan = Plan::of(options).map_err(failure)?;
    let mut err = anstream::AutoStream::auto(stderr());
    writeln!(err, "{} {}, profile {}", options.method, options.url, options.profile)?;
    writeln!(
        err,
        "{} scenarios: about {} requests, of which about {} really run the operation{}; to {} alone\n",
        plan.scenarios.len(),
        plan.requests,
        plan.operations,
        if options.effect.is_some() { ", and the effect is read in between" } else { "" },
        plan.hosts.join(" and "),
    )?;
    Ok(())
}

fn dry_run(options: &Options) -> Result<(), Failure> {
    let plan = Plan::of(options).map_err(failure)?;
    let mut out = stdout().lock();
    for scenario in &plan.scenarios {
        writeln!(out, "{:<24} {}", scenario.id, scenario.promise)?;
    }
    for command in &plan.commands {
        writeln!(out, "command: {command}")?;
    }
    writeln!(out, "\nNothing was sent (--dry-run).")?;
    Ok(())
}

async fn watched(options: &Options) -> Result<Report, Failure> {
    // Draws on a terminal alone.
    let bar = ProgressBar::new(options.scenarios.len() as u64);
    let style = ProgressStyle::with_template("{spinner} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.expect("a constant template is valid"));
    bar.enable_steady_tick(Duration::from_millis(100));
    let mut observer = |event: Event<'_>| match event {
        Event::Begins { scenario, .. } => bar.set_message(scenario.id.clone()),
        Event::Ended(result) => {
            bar.inc(1);
            if result.verdict == Verdict::Fail {
                bar.println(format!("{}  {}", result.verdict.coloured(), result.id));
            }
        }
        _ => {}
    };
    let report = onlyonce_check::check(options, &mut observer).await;
    bar.finish_and_clear();
    report.map_err(failure)
}

fn failure(error: CheckError) -> Failure {
    match error {
        CheckError::Unreachable { .. } => Failure::Unreachable(error.to_string()),
        other => Failure::Usage(other.to_string()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| Failure::io(&path.display().to_string(), &error))
}
