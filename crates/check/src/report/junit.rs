//! The report for build servers: JUnit XML.

use std::fmt::Write as _;

use super::{Report, Verdict, Verified};

impl Report {
    /// A JUnit XML document: a failure is a failure; a warning is a test that passed with output; what was not observable
    /// or not applicable is skipped.
    pub fn junit(&self) -> String {
        let skipped = self.count(Verdict::NotObservable) + self.count(Verdict::NotApplicable);
        let counts = format!(
            "tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{skipped}\" time=\"{:.3}\"",
            self.results.len(),
            self.count(Verdict::Fail),
            self.elapsed.as_secs_f64()
        );
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let _ = writeln!(out, "<testsuites name=\"onlyonce check\" {counts}>");
        let name = escape(&format!("onlyonce check {} ({})", self.target, self.profile));
        let _ = writeln!(out, "  <testsuite name=\"{name}\" {counts}>");
        self.results.iter().for_each(|result| case(&mut out, result));
        out.push_str("  </testsuite>\n</testsuites>\n");
        out
    }
}

fn case(out: &mut String, result: &Verified) {
    let _ = write!(out, "    <testcase classname=\"onlyonce.check\" name=\"{}\"", escape(&result.id));
    let body = escape(&format!(
        "{}\nsource: {}\n\nsent:\n{}\n\ngot:\n{}\n\n{}",
        result.promise, result.source, result.sent, result.got, result.advice
    ));
    let reason = escape(&result.reason);
    let _ = match result.verdict {
        Verdict::Pass => writeln!(out, "/>"),
        Verdict::Fail => {
            writeln!(out, ">\n      <failure message=\"{reason}\">{body}</failure>\n    </testcase>")
        }
        Verdict::Warn => writeln!(out, ">\n      <system-out>warning: {body}</system-out>\n    </testcase>"),
        verdict @ (Verdict::NotObservable | Verdict::NotApplicable) => {
            writeln!(out, ">\n      <skipped message=\"{}: {reason}\"/>\n    </testcase>", verdict.as_str())
        }
    };
}

/// Text and attribute values. XML has no way to write most control characters.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
