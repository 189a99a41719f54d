//! The rules over our own manifests and source files.

use std::fs;
use std::path::Path;

const LINES_MAX: usize = 600;

/// What the rules look at, as paths from the root and texts.
pub(crate) struct Tree {
    /// The workspace's own manifest.
    pub(crate) root_manifest: String,
    /// The manifest of each member.
    pub(crate) manifests: Vec<(String, String)>,
    /// Every Rust file.
    pub(crate) sources: Vec<(String, String)>,
}

impl Tree {
    /// Reads the tree below `root`, build output and hidden folders left out.
    pub(crate) fn read(root: &Path) -> Self {
        let root_manifest =
            fs::read_to_string(root.join("Cargo.toml")).expect("the root manifest is readable");
        let mut tree = Self { root_manifest, manifests: Vec::new(), sources: Vec::new() };
        tree.walk(root, root);
        tree
    }

    /// Every breach of a rule, a line each.
    pub(crate) fn violations(&self) -> Vec<String> {
        let mut found = Vec::new();
        for lint in ["unsafe_code = \"forbid\"", "missing_docs = \"deny\""] {
            if !section(&self.root_manifest, "workspace.lints.rust").any(|line| line == lint) {
                found.push(format!("Cargo.toml: [workspace.lints.rust] has no `{lint}`"));
            }
        }
        for (path, manifest) in &self.manifests {
            // A workspace of its own has nothing to inherit.
            let stands_alone = manifest.lines().any(|line| line.trim() == "[workspace]");
            if !stands_alone && !section(manifest, "lints").any(|line| line == "workspace = true") {
                found.push(format!("{path}: no `[lints] workspace = true`"));
            }
        }
        for (path, source) in &self.sources {
            let lines = source.lines().count();
            if lines > LINES_MAX {
                found.push(format!(
                    "{path}: {lines} lines, at most {LINES_MAX}: it tells more than one story"
                ));
            }
            // A test may include an example; what others read has its documentation.
            let is_read_by_others = path.contains("/src/");
            for (number, line) in source.lines().enumerate().filter(|_| is_read_by_others) {
                let line = line.trim_start();
                if (line.starts_with("#[allow(") || line.starts_with("#![allow("))
                    && line.contains("missing_docs")
                {
                    found.push(format!("{path}:{}: allows missing_docs", number + 1));
                }
            }
        }
        found
    }

    fn walk(&mut self, root: &Path, folder: &Path) {
        for entry in fs::read_dir(folder).expect("a folder of the workspace is readable") {
            let path = entry.expect("a folder entry is readable").path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if name.starts_with('.') || name == "target" {
                continue;
            }
            if path.is_dir() {
                self.walk(root, &path);
                continue;
            }
            let is_manifest = name == "Cargo.toml" && folder != root;
            if is_manifest || name.ends_with(".rs") {
                let text = fs::read_to_string(&path).expect("a source file is readable UTF-8");
                let from_root =
                    path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
                if is_manifest { &mut self.manifests } else { &mut self.sources }.push((from_root, text));
            }
        }
    }
}

// The lines of one table of a manifest, without spaces at either end.
fn section<'a>(manifest: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let header = format!("[{name}]");
    manifest
        .lines()
        .map(str::trim)
        .skip_while(move |line| *line != header)
        .skip(1)
        .take_while(|line| !line.starts_with('['))
}
