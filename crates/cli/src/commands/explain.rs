//! `onlyonce explain`: what an error code means, and what to do.

use std::ffi::OsStr;
use std::io::{Write, stdout};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command};
use onlyonce_http::Code;
use serde::Serialize;

use crate::failure::Failure;
use crate::output;

/// Explains an error code: what it means, and what client and operator should do
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  onlyonce explain outcome-unknown
  onlyonce explain urn:onlyonce:error:outcome-unknown
  onlyonce explain --list")]
pub(crate) struct Explain {
    /// The member `code` of the problem document, or its `type`
    #[arg(hide_possible_values = true, required_unless_present = "list")]
    #[arg(value_parser = CodeParser(PossibleValuesParser::new(PAGES.iter().map(|page| page.code))))]
    code: Option<String>,
    /// List all codes
    #[arg(long, conflicts_with = "code")]
    list: bool,
    /// Print JSON: an object, or with --list an array, of `code`, `status`, `retryable`, `title`
    #[arg(long)]
    json: bool,
}

/// A code as it stands in either member.
#[derive(Clone)]
struct CodeParser(PossibleValuesParser);

impl TypedValueParser for CodeParser {
    type Value = String;

    fn parse_ref(&self, cmd: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        let code = value.to_str().and_then(|text| text.strip_prefix("urn:onlyonce:error:"));
        self.0.parse_ref(cmd, arg, code.map_or(value, OsStr::new))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

/// A page of docs/errors, part of the binary so that it fits the release.
#[derive(Debug)]
struct Page {
    code: &'static str,
    text: &'static str,
}

macro_rules! pages {
    ($($code:literal)*) => {
        &[$(Page { code: $code, text: include_str!(concat!("../../../../docs/errors/", $code, ".md")) },)*]
    };
}

// A test holds this list, the pages and the table of codes together.
const PAGES: &[Page] = pages! {
    "body-incomplete"
    "body-malformed"
    "body-timeout"
    "body-too-large"
    "fingerprint-unknown"
    "handler-panicked"
    "head-timeout"
    "head-too-large"
    "in-progress"
    "key-malformed"
    "key-missing"
    "key-reused"
    "outcome-unknown"
    "overloaded"
    "record-unreadable"
    "request-malformed"
    "scope-missing"
    "scope-unstable"
    "shutting-down"
    "store-unavailable"
    "superseded"
    "upstream-failed"
    "upstream-timeout"
    "upstream-unreachable"
};

#[derive(Serialize)]
struct CodeJson {
    code: &'static str,
    status: u16,
    retryable: bool,
    title: &'static str,
}

impl From<Code> for CodeJson {
    fn from(code: Code) -> Self {
        let entry = code.entry();
        Self { code: entry.code, status: entry.status, retryable: entry.retryable, title: entry.title }
    }
}

impl Explain {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut out = stdout().lock();
        match &self.code {
            Some(code) => explain(&mut out, code, self.json),
            None => list(&mut out, self.json),
        }
    }
}

fn explain(out: &mut impl Write, code: &str, as_json: bool) -> Result<(), Failure> {
    let page =
        PAGES.iter().find(|page| page.code == code).expect("the parser admits codes with a page alone");
    let code: Code = code.parse().expect("each page has a code");
    if as_json {
        return Ok(output::json(out, &CodeJson::from(code))?);
    }
    let entry = code.entry();
    writeln!(out, "{}: {}", entry.code, entry.title)?;
    writeln!(
        out,
        "status {}, {}",
        entry.status,
        if entry.retryable { "retryable" } else { "not retryable" }
    )?;
    // The head of the page says the same as the lines above.
    let start = page.text.find("## ").unwrap_or(0);
    for line in page.text[start..].lines() {
        match line.strip_prefix("## ") {
            Some(heading) => writeln!(out, "\n{heading}:")?,
            None if line.is_empty() => {}
            None => writeln!(out, "  {line}")?,
        }
    }
    Ok(())
}

fn list(out: &mut impl Write, as_json: bool) -> Result<(), Failure> {
    if as_json {
        let all: Vec<CodeJson> = Code::ALL.iter().copied().map(CodeJson::from).collect();
        return Ok(output::json(out, &all)?);
    }
    let mut table = output::table(&["CODE", "STATUS", "RETRYABLE", "MEANING"]);
    table.add_rows(Code::ALL.iter().map(|code| {
        let entry = code.entry();
        let retryable = if entry.retryable { "yes" } else { "no" };
        [entry.code.to_owned(), entry.status.to_string(), retryable.to_owned(), entry.title.to_owned()]
    }));
    Ok(output::print_table(out, &mut table)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_code_has_a_page_and_every_page_a_code() {
        let codes: BTreeSet<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
        let embedded: BTreeSet<&str> = PAGES.iter().map(|page| page.code).collect();
        assert_eq!(embedded, codes);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        let files: BTreeSet<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .map(|name| name.strip_suffix(".md").unwrap_or_else(|| panic!("{name} is not a page")).to_owned())
            .collect();
        assert_eq!(files.iter().map(String::as_str).collect::<BTreeSet<_>>(), codes);
    }

    #[test]
    fn a_code_is_read_from_either_member() {
        let parser = CodeParser(PossibleValuesParser::new(PAGES.iter().map(|page| page.code)));
        let read = |text: &str| parser.parse_ref(&Command::new("explain"), None, OsStr::new(text)).ok();
        for text in ["key-reused", "urn:onlyonce:error:key-reused"] {
            assert_eq!(read(text).as_deref(), Some("key-reused"), "{text}");
        }
        assert_eq!((read("urn:onlyonce:error:nonsense"), read("urn:other:key-reused")), (None, None));
    }

    #[test]
    fn each_page_says_what_the_table_says() {
        for page in PAGES {
            assert_eq!(faults(page), Vec::<String>::new(), "docs/errors/{}.md", page.code);
        }
    }

    #[test]
    fn a_page_that_says_something_else_is_found() {
        let good = PAGES.iter().find(|page| page.code == "in-progress").unwrap();
        for (from, to) in [
            ("| 409 |", "| 408 |"),
            ("| yes |", "| no |"),
            ("# `in-progress`", "# `in-flight`"),
            ("## What the client should do", "## What to do"),
            (Code::InProgress.entry().title, "Something else"),
        ] {
            let text = good.text.replace(from, to);
            assert_ne!(text, good.text, "{from:?} is not on the page");
            let broken = Page { code: good.code, text: text.leak() };
            assert_eq!(faults(&broken).len(), 1, "{from:?} -> {to:?}");
        }
    }

    fn faults(page: &Page) -> Vec<String> {
        let entry = page.code.parse::<Code>().unwrap().entry();
        let retryable = if entry.retryable { "yes" } else { "no" };
        let wanted = [
            format!("# `{}`", entry.code),
            "| status | retryable | title |".into(),
            format!("| {} | {retryable} | {} |", entry.status, entry.title),
            "## What it means".into(),
            "## What the client should do".into(),
            "## What the operator should do".into(),
        ];
        wanted.into_iter().filter(|line| !page.text.lines().any(|found| found == line)).collect()
    }
}
