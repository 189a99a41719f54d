//! The report as a page: one file, nothing loaded from anywhere, no script.

use std::fmt::Write as _;

use super::{Report, Verdict, Verified};

const PAGE: &str = include_str!("page.html");

impl Report {
    /// A page of HTML, with all that it needs in it; light or dark as the reader's system is.
    pub fn html(&self) -> String {
        let (outcome, headline) = self.headline();
        let facts = format!(
            "profile {} · {} scenarios · {} requests · {:.1} s",
            self.profile,
            self.results.len(),
            self.requests,
            self.elapsed.as_secs_f64()
        );
        let parts = [
            ("title", escape(&format!("onlyonce check {}", self.target))),
            ("target", escape(&self.target)),
            ("facts", escape(&facts)),
            ("outcome", class(outcome)),
            ("headline", escape(&headline)),
            ("bar", self.bar()),
            ("counts", self.counts_html()),
            ("sections", self.sections()),
        ];
        fill(PAGE, &parts)
    }

    fn bar(&self) -> String {
        let shown = Verdict::ALL.into_iter().filter(|verdict| self.count(*verdict) > 0);
        shown.map(|v| format!("<i class=\"{}\" style=\"flex:{}\"></i>", class(v), self.count(v))).collect()
    }

    fn counts_html(&self) -> String {
        let shown = Verdict::ALL.into_iter().filter(|verdict| self.count(*verdict) > 0);
        shown
            .map(|v| format!("<li class=\"{}\"><b>{}</b> {}</li>", class(v), self.count(v), v.as_str()))
            .collect()
    }

    fn sections(&self) -> String {
        let mut out = String::new();
        for verdict in Verdict::ALL {
            let count = self.count(verdict);
            if count == 0 {
                continue;
            }
            let _ = writeln!(out, "<section><h2>{} <small>{count}</small></h2>", heading(verdict));
            self.of(verdict).for_each(|result| scenario(&mut out, result));
            out.push_str("</section>\n");
        }
        out
    }
}

fn heading(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "Pass",
        Verdict::Fail => "Fail",
        Verdict::Warn => "Warnings",
        Verdict::NotObservable => "Not observable",
        Verdict::NotApplicable => "Not applicable",
    }
}

fn class(verdict: Verdict) -> String {
    verdict.as_str().replace(' ', "-")
}

fn scenario(out: &mut String, result: &Verified) {
    let open = if result.verdict == Verdict::Fail { " open" } else { "" };
    let _ = writeln!(
        out,
        "<details class=\"{}\" id=\"{id}\"{open}><summary><code>{id}</code><span>{}</span><span class=\"source\">{}</span>",
        class(result.verdict),
        escape(&result.promise),
        escape(&result.source),
        id = escape(&result.id),
    );
    if !result.reason.is_empty() {
        let _ = writeln!(out, "<span class=\"reason\">{}</span>", escape(&result.reason));
    }
    out.push_str("</summary><div class=\"inner\">");
    if !result.advice.is_empty() {
        let _ = writeln!(out, "<p class=\"advice\">{}</p>", escape(&result.advice));
    }
    exchanges(out, result);
    out.push_str("</div></details>\n");
}

fn exchanges(out: &mut String, result: &Verified) {
    if result.sent.is_empty() {
        out.push_str("<p>Nothing was sent.</p>");
        return;
    }
    out.push_str("<table><tr><th>sent</th><th>got</th></tr>");
    let reason_lines = usize::from(!result.reason.is_empty());
    for (sent, got) in result.sent.lines().zip(result.got.lines().skip(reason_lines)) {
        let got = got.split_once(". ").map_or(got, |(_, text)| text);
        let _ = write!(out, "<tr><td>{}</td><td>{}</td></tr>", escape(sent), escape(got));
    }
    out.push_str("</table>");
}

/// Puts each part in its place, once: what a server said is never read as a place.
fn fill(page: &str, parts: &[(&str, String)]) -> String {
    let mut out = String::with_capacity(page.len() + parts.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut rest = page;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").expect("each place in the page is closed");
        out.push_str(before);
        let part = parts.iter().find(|(given, _)| *given == name);
        out.push_str(&part.expect("each place in the page has its part").1);
        rest = after;
    }
    out + rest
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
