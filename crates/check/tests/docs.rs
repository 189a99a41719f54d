//! docs/check.md says what the catalogue says.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::fmt::Write as _;
use std::path::Path;

use onlyonce_check::{Level, Levels, Profile, catalogue};

fn page() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check.md")).unwrap()
}

fn between<'a>(page: &'a str, start: &str, end: &str) -> &'a str {
    page.split_once(start).unwrap().1.split_once(end).unwrap().0.trim()
}

fn levels(levels: &Levels) -> Vec<&'static str> {
    Profile::ALL
        .iter()
        .map(|profile| match levels.under(*profile) {
            Level::Must => "must",
            Level::Should => "should",
            Level::Off => "–",
        })
        .collect()
}

/// The table of the scenarios. Set `ONLYONCE_WRITE_DOCS=1` to have the test write it.
fn table() -> String {
    let mut table = String::from(
        "| id | promise | source | draft | practice | stripe | strict |\n|---|---|---|---|---|---|---|\n",
    );
    for scenario in catalogue::built_in() {
        let (level, form) = (levels(&scenario.level), levels(&scenario.form));
        let cells = level.iter().zip(form).map(|(level, form)| match form {
            "–" => (*level).to_owned(),
            form => format!("{level} / {form}"),
        });
        let cells = cells.collect::<Vec<_>>().join(" | ");
        writeln!(table, "| `{}` | {} | {} | {cells} |", scenario.id, scenario.promise, scenario.source)
            .unwrap();
    }
    table.trim().to_owned()
}

#[test]
fn the_page_lists_the_catalogue() {
    let (page, table) = (page(), table());
    let found = between(&page, "<!-- catalogue -->", "<!-- /catalogue -->");
    if found != table && std::env::var_os("ONLYONCE_WRITE_DOCS").is_some() {
        let (before, rest) = page.split_once("<!-- catalogue -->").unwrap();
        let after = rest.split_once("<!-- /catalogue -->").unwrap().1;
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check.md");
        std::fs::write(path, format!("{before}<!-- catalogue -->\n{table}\n<!-- /catalogue -->{after}"))
            .unwrap();
        return;
    }
    assert_eq!(found, table, "run this test with ONLYONCE_WRITE_DOCS=1");
}

#[test]
fn the_example_of_the_page_is_one() {
    let page = page();
    let example = between(&page, "<!-- example -->", "<!-- /example -->");
    let example = example.strip_prefix("```json").unwrap().strip_suffix("```").unwrap();
    assert_eq!(catalogue::parse(example, &catalogue::built_in()).unwrap().len(), 2);
}
