//! The report for people: what is wrong first, and readable in ten seconds.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

use super::{Report, Verdict, Verified};

const WIDTH: usize = 100;

fn style(verdict: Verdict) -> Style {
    match verdict {
        Verdict::Fail => AnsiColor::Red.on_default().bold(),
        Verdict::Warn => AnsiColor::Yellow.on_default().bold(),
        Verdict::Pass => AnsiColor::Green.on_default(),
        Verdict::NotObservable => AnsiColor::Magenta.on_default(),
        Verdict::NotApplicable => Style::new().dimmed(),
    }
}

impl Verdict {
    /// The verdict as a word in its colour, for a terminal.
    pub fn coloured(self) -> String {
        let style = style(self);
        format!("{style}{}{style:#}", self.as_str())
    }
}

impl Report {
    /// A summary in the colours of a terminal (escape sequences, to be stripped where there is none); with `details`
    /// what was sent and what came back for each scenario that did not pass.
    pub fn text(&self, details: bool) -> String {
        let mut out = String::new();
        for verdict in [Verdict::Fail, Verdict::Warn] {
            // Scenarios with one remedy are one problem.
            let mut groups: Vec<Vec<&Verified>> = Vec::new();
            for result in self.of(verdict) {
                match groups.iter_mut().find(|group| group[0].advice == result.advice) {
                    Some(group) => group.push(result),
                    None => groups.push(vec![result]),
                }
            }
            groups.iter().for_each(|group| problem(&mut out, group, details));
        }
        for (verdict, heading) in
            [(Verdict::NotObservable, "Not observable"), (Verdict::NotApplicable, "Not applicable")]
        {
            by_reason(&mut out, (verdict, heading), self.of(verdict), details);
        }
        self.passed(&mut out);
        self.counts(&mut out);
        self.conclusion(&mut out);
        out
    }

    fn passed(&self, out: &mut String) {
        let ids: Vec<&str> = self.of(Verdict::Pass).map(|result| result.id.as_str()).collect();
        if !ids.is_empty() {
            let style = style(Verdict::Pass);
            let _ = writeln!(out, "{style}Pass{style:#}");
            wrap(out, "  ", &ids.join(" "));
            out.push('\n');
        }
    }

    fn counts(&self, out: &mut String) {
        let counts =
            [Verdict::Pass, Verdict::Fail, Verdict::Warn, Verdict::NotObservable, Verdict::NotApplicable];
        let counts = counts.into_iter().filter(|verdict| self.count(*verdict) > 0).map(|verdict| {
            let style = style(verdict);
            format!("{style}{} {}{style:#}", self.count(verdict), verdict.as_str())
        });
        let _ = writeln!(
            out,
            "{}   ({} requests, {:.1} s)",
            counts.collect::<Vec<_>>().join(", "),
            self.requests,
            self.elapsed.as_secs_f64()
        );
    }

    fn conclusion(&self, out: &mut String) {
        let (verdict, text) = self.headline();
        let style = style(verdict).bold();
        let _ = writeln!(out, "{style}{text}{style:#}");
    }

    /// The whole report in a sentence.
    pub fn headline(&self) -> (Verdict, String) {
        let (failed, profile) = (self.count(Verdict::Fail), self.profile);
        let baseline = self.results.first();
        if let Some(baseline) = baseline.filter(|result| result.verdict != Verdict::Pass) {
            return (Verdict::Fail, format!("Nothing was shown: {}", baseline.reason));
        }
        if failed > 0 {
            let ids: Vec<&str> = self.of(Verdict::Fail).map(|result| result.id.as_str()).collect();
            let what = if failed == 1 { "One promise does".into() } else { format!("{failed} promises do") };
            return (Verdict::Fail, format!("{what} not hold (profile {profile}): {}", ids.join(", ")));
        }
        if self.is_cut_short {
            return (Verdict::Fail, "The run was cut short by its limits: what was tried holds.".into());
        }
        let unseen = self.count(Verdict::NotObservable);
        let rest = if unseen == 0 { String::new() } else { format!("; {unseen} could not be seen") };
        (Verdict::Pass, format!("Every promise that was seen holds (profile {profile}){rest}."))
    }
}

fn problem(out: &mut String, group: &[&Verified], details: bool) {
    let (bold, dim) = (Style::new().bold(), Style::new().dimmed());
    for result in group {
        let style = style(result.verdict);
        let word = if result.verdict == Verdict::Fail { "FAIL" } else { "warn" };
        let _ = writeln!(out, "{style}{word}{style:#}  {bold}{}{bold:#}  ({})", result.id, result.source);
        wrap(out, "      ", &result.promise);
        wrap(out, "      ✗ ", &result.reason);
        if details {
            for (sent, got) in result.sent.lines().zip(result.got.lines().skip(1)) {
                let got = got.split_once(". ").map_or(got, |(_, text)| text);
                let _ = writeln!(out, "      {dim}{sent}\n         ← {got}{dim:#}");
            }
        }
    }
    wrap(out, "      → ", &group[0].advice);
    out.push('\n');
}

fn by_reason<'a>(
    out: &mut String,
    (verdict, heading): (Verdict, &str),
    results: impl Iterator<Item = &'a Verified>,
    details: bool,
) {
    const IDS_MAX: usize = 8;
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for result in results {
        reasons.entry(result.reason.as_str()).or_default().push(result.id.as_str());
    }
    if reasons.is_empty() {
        return;
    }
    let style = style(verdict);
    let _ = writeln!(out, "{style}{heading}{style:#}");
    for (reason, ids) in reasons {
        let which = match ids.len() {
            many if many > IDS_MAX && !details => format!("{many} scenarios"),
            _ => ids.join(" "),
        };
        hang(out, "  ", "      ", &format!("{reason}: {which}"));
    }
    out.push('\n');
}

/// Breaks a text between words; the lines after the first are set in like it.
fn wrap(out: &mut String, indent: &str, text: &str) {
    hang(out, indent, &" ".repeat(indent.chars().count()), text);
}

/// The same, with another indent for the lines after the first.
fn hang(out: &mut String, indent: &str, hanging: &str, text: &str) {
    let mut line = indent.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            hanging.clone_into(&mut line);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(&line);
    out.push('\n');
}
