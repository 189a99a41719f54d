//! The documentation holds together: each relative link leads to a file.

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
