//! The rules of the house as a test: who may depend on whom, whose licence is fit, what may not appear twice, and
//! what every one of our crates declares. `graph.rs` and `tree.rs` are functions over data, so that the tests below
//! can also show them broken input and see each rule fail.

mod graph;
mod licence;
mod tree;

use std::path::Path;

use cargo_metadata::Metadata;
use serde_json::{Value, json};

use crate::tree::Tree;

fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .and_then(Path::parent)
        .expect("crates/cli is two levels deep")
}

// Only this platform's packages: the others need not be downloaded to build, so a test must not need them either.
fn real_metadata() -> Value {
    let cargo = env!("CARGO");
    let version = std::process::Command::new(cargo).arg("-vV").output().expect("cargo runs");
    let version = String::from_utf8(version.stdout).expect("cargo prints UTF-8");
    let host =
        version.lines().find_map(|line| line.strip_prefix("host: ")).expect("cargo -vV names the host");
    let output = std::process::Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--all-features", "--filter-platform", host])
        .current_dir(workspace_root())
        .output()
        .expect("cargo metadata runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

fn violations(metadata: &Value) -> Vec<String> {
    let metadata: Metadata = serde_json::from_value(metadata.clone()).expect("the shape of cargo metadata");
    graph::violations(&metadata)
}

fn package<'a>(metadata: &'a mut Value, name: &str) -> &'a mut Value {
    let packages = metadata["packages"].as_array_mut().expect("packages");
    packages.iter_mut().find(|package| package["name"] == name).expect("a package of this name")
}

fn add_dependency(metadata: &mut Value, from: &str, to: &str, kind: &str) {
    let dependency = json!({
        "name": to, "source": null, "req": "*", "kind": kind, "rename": null, "optional": false,
        "uses_default_features": true, "features": [], "target": null, "registry": null,
    });
    package(metadata, from)["dependencies"].as_array_mut().expect("dependencies").push(dependency);
}

#[test]
fn the_dependency_graph_keeps_the_rules() {
    assert_eq!(violations(&real_metadata()), Vec::<String>::new());
}

#[test]
fn each_rule_on_the_graph_can_fail() {
    type Break = fn(&mut Value);
    let cases: &[(&str, Break)] = &[
        ("onlyonce-core must not depend on onlyonce-engine", |metadata| {
            add_dependency(metadata, "onlyonce-core", "onlyonce-engine", "normal");
        }),
        ("onlyonce-store-sqlite must not depend on onlyonce-http", |metadata| {
            add_dependency(metadata, "onlyonce-store-sqlite", "onlyonce-http", "normal");
        }),
        ("onlyonce-gateway must not depend on onlyonce-store-sqlite", |metadata| {
            add_dependency(metadata, "onlyonce-gateway", "onlyonce-store-sqlite", "build");
        }),
        ("onlyonce-cli must not depend on testkit", |metadata| {
            add_dependency(metadata, "onlyonce-cli", "testkit", "normal");
        }),
        ("onlyonce-surprise has no rule", |metadata| {
            package(metadata, "onlyonce-engine")["name"] = json!("onlyonce-surprise");
        }),
        ("onlyonce-engine must not depend on the driver rusqlite", |metadata| {
            add_dependency(metadata, "onlyonce-engine", "rusqlite", "normal");
        }),
        ("onlyonce-store-sqlite must not depend on the driver tokio-postgres", |metadata| {
            add_dependency(metadata, "onlyonce-store-sqlite", "tokio-postgres", "normal");
        }),
        ("bytes: the licence GPL-3.0-only is not", |metadata| {
            package(metadata, "bytes")["license"] = json!("GPL-3.0-only");
        }),
        ("bytes: no licence", |metadata| package(metadata, "bytes")["license"] = Value::Null),
        ("onlyonce-core: our licence", |metadata| {
            package(metadata, "onlyonce-core")["license"] = json!("MIT")
        }),
        ("tokio appears 2 times", |metadata| {
            let mut twin = package(metadata, "tokio").clone();
            twin["version"] = json!("0.3.7");
            metadata["packages"].as_array_mut().expect("packages").push(twin);
        }),
    ];
    let real = real_metadata();
    for (expected, broken) in cases {
        let mut metadata = real.clone();
        broken(&mut metadata);
        let found = violations(&metadata);
        assert!(found.iter().any(|line| line.contains(expected)), "{expected:?} is not in {found:#?}");
    }
}

// `cargo run` at the root is the program, so that the first command of the README is short.
#[test]
fn the_default_member_is_the_program() {
    let metadata = real_metadata();
    let members = metadata["workspace_default_members"].as_array().expect("default members");
    assert_eq!(members.len(), 1, "{members:?}");
    assert!(members[0].as_str().expect("an id").contains("/crates/cli#"), "{members:?}");
}

#[test]
fn dev_dependencies_are_free() {
    let mut metadata = real_metadata();
    add_dependency(&mut metadata, "onlyonce-core", "testkit", "dev");
    add_dependency(&mut metadata, "onlyonce-engine", "onlyonce-store-sqlite", "dev");
    assert_eq!(violations(&metadata), Vec::<String>::new());
}

#[test]
fn manifests_and_files_keep_the_rules() {
    let tree = Tree::read(workspace_root());
    assert!(tree.manifests.len() >= 10, "found only {} manifests", tree.manifests.len());
    assert!(tree.sources.iter().any(|(path, _)| path == "crates/core/src/decide.rs"));
    assert_eq!(tree.violations(), Vec::<String>::new());
}

#[test]
fn each_rule_on_manifests_and_files_can_fail() {
    let good_root = "[workspace.lints.rust]\nunsafe_code = \"forbid\"\nmissing_docs = \"deny\"\n";
    let good = "[package]\nname = \"a\"\n[lints]\nworkspace = true\n";
    let tree = |root: &str, manifest: &str, source: &str| Tree {
        root_manifest: root.into(),
        manifests: vec![("crates/a/Cargo.toml".into(), manifest.into())],
        sources: vec![("crates/a/src/lib.rs".into(), source.into())],
    };
    assert_eq!(tree(good_root, good, "fn a() {}\n").violations(), Vec::<String>::new());
    let long = "\n".repeat(601);
    let cases = [
        (
            tree(good_root, "[package]\nname = \"a\"\n", ""),
            "crates/a/Cargo.toml: no `[lints] workspace = true`",
        ),
        (tree(good_root, "[features]\nworkspace = true\n[lints]\n", ""), "crates/a/Cargo.toml: no `[lints]"),
        (tree("[workspace.lints.rust]\n", good, ""), "unsafe_code"),
        (tree(good_root, good, &long), "crates/a/src/lib.rs: 601 lines"),
        (tree(good_root, good, "#[allow(missing_docs)]"), "crates/a/src/lib.rs:1: allows missing_docs"),
    ];
    for (broken, expected) in cases {
        let found = broken.violations();
        assert!(found.iter().any(|line| line.contains(expected)), "{expected:?} is not in {found:#?}");
    }
}
