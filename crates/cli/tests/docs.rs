//! The documentation holds together: each relative link leads to a file, and each promise to the tests that show it.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every Markdown file of the repository, build output and hidden folders left out.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository is readable") {
        let path = entry.expect("a folder entry is readable").path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with('.') || name == "target" || name == "node_modules" {
            continue;
        }
        if path.is_dir() {
            pages(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// Targets of `](…)` that lead to no file. Links into the web and within the page are not looked at.
fn dead_links(page: &Path, text: &str) -> Vec<String> {
    let folder = page.parent().expect("a file is in a folder");
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .filter(|target| !folder.join(target.split('#').next().unwrap_or_default()).exists())
        .map(|target| format!("{}: {target}", page.display()))
        .collect()
}

#[test]
fn every_relative_link_leads_to_a_file() {
    let mut found = Vec::new();
    pages(&root(), &mut found);
    for expected in ["README.md", "ARCHITECTURE.md", "docs/when-not.md"] {
        assert!(found.iter().any(|page| page.ends_with(expected)), "{expected} is not among {found:?}");
    }
    let dead: Vec<String> = found
        .iter()
        .flat_map(|page| dead_links(page, &fs::read_to_string(page).expect("a page is readable UTF-8")))
        .collect();
    assert_eq!(dead, Vec::<String>::new());
}

#[test]
fn a_dead_link_is_found() {
    let page = root().join("README.md");
    let text = "[a](LICENSE-MIT) [b](https://example.com/x) [c](#limits) [d](docs/nope.md#x)";
    assert_eq!(dead_links(&page, text), [format!("{}: docs/nope.md#x", page.display())]);
}

/// The rows of `docs/promises.md` by their first cell, each with the files and the tests in them that it names.
fn promises(text: &str) -> Vec<(&str, Vec<(&str, &str)>)> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let rows = rows.filter(|(name, _)| name.len() <= 3);
    rows.map(|(name, row)| {
        let mut named = Vec::new();
        for part in row.split("](").skip(1) {
            let (file, tests) = part.split_once(')').expect("a link has an end");
            // Every second piece between backticks, up to the next link.
            let tests = tests.split('[').next().unwrap_or_default();
            named.extend(tests.split('`').skip(1).step_by(2).map(|test| (file, test)));
        }
        (name, named)
    })
    .collect()
}

/// Names of tests that are not in the file that they are said to be in.
fn missing_tests(text: &str) -> Vec<String> {
    let named = promises(text).into_iter().flat_map(|(_, named)| named);
    let source = |file: &str| fs::read_to_string(root().join("docs").join(file)).unwrap_or_default();
    named
        .filter(|(file, test)| !source(file).contains(&format!("fn {test}(")))
        .map(|(file, test)| format!("{file}: {test}"))
        .collect()
}

#[test]
fn every_promise_has_its_tests() {
    let text = fs::read_to_string(root().join("docs/promises.md")).expect("the page is there");
    assert_eq!(missing_tests(&text), Vec::<String>::new());
    let promises = promises(&text);
    let lines = [("H", 26), ("I", 10), ("M", 20), ("T", 12)];
    for name in lines.iter().flat_map(|(of, last)| (1..=*last).map(move |n| format!("{of}{n}"))) {
        let row = promises.iter().find(|(found, _)| *found == name);
        assert!(row.is_some_and(|(_, named)| !named.is_empty()), "{name} has no test");
    }
}

#[test]
fn a_promise_without_its_test_is_found() {
    let page = "| H1 | x | [docs](../crates/cli/tests/docs.rs): `every_promise_has_its_tests` `no_such_test`; [a](b.rs): `c` |";
    assert_eq!(missing_tests(page), ["../crates/cli/tests/docs.rs: no_such_test", "b.rs: c"]);
}
