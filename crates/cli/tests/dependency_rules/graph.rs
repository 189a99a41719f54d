//! The rules over `cargo metadata`.

use std::collections::BTreeMap;

use cargo_metadata::{DependencyKind, Metadata, Package};

use crate::licence;

const OUR_LICENCE: &str = "MIT OR Apache-2.0";

/// Which of our crates each of our crates may depend on, dev-dependencies aside. A crate without a line has no
/// place in the house yet: give it one here, and in ARCHITECTURE.md.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("onlyonce-core", &[]),
    ("onlyonce-engine", &["onlyonce-core"]),
    ("onlyonce-conformance", &["onlyonce-core"]),
    ("onlyonce-store-sqlite", &["onlyonce-core"]),
    ("onlyonce-batch", &["onlyonce-core"]),
    ("onlyonce-store-postgres", &["onlyonce-core", "onlyonce-batch"]),
    ("onlyonce-store-mysql", &["onlyonce-core", "onlyonce-batch"]),
    ("onlyonce-store-redis", &["onlyonce-core"]),
    ("onlyonce-http", &["onlyonce-core", "onlyonce-engine"]),
    ("onlyonce-tls", &[]),
    // Its tables live in a file of SQLite: it has the driver from the store, and the store's checks of the place.
    ("onlyonce-inbox", &["onlyonce-core", "onlyonce-store-sqlite", "onlyonce-tls"]),
    ("onlyonce-gateway", &["onlyonce-core", "onlyonce-engine", "onlyonce-http", "onlyonce-tls"]),
    // Strangers to the product that they test.
    ("onlyonce-check", &[]),
    // The driver alone, from the store: it reads what an inbox left in its file.
    ("onlyonce-prove", &["onlyonce-store-sqlite"]),
    ("onlyonce", &["onlyonce-core", "onlyonce-engine", "onlyonce-http", STORES]),
    (
        "onlyonce-cli",
        &[
            "onlyonce-core",
            "onlyonce-engine",
            "onlyonce-http",
            "onlyonce-gateway",
            "onlyonce-inbox",
            "onlyonce-check",
            "onlyonce-prove",
            "onlyonce",
            STORES,
        ],
    ),
];

/// Any `onlyonce-store-…`.
const STORES: &str = "onlyonce-store-*";

/// Never published, so free: they may use whatever helps to test or to measure.
const FREE: &[&str] = &["testkit", "onlyonce-benches", "onlyonce-fuzz"];

/// Drivers, each in its own store crate alone.
const DRIVERS: &[(&str, &str)] = &[
    ("rusqlite", "onlyonce-store-sqlite"),
    ("libsqlite3-sys", "onlyonce-store-sqlite"),
    ("tokio-postgres", "onlyonce-store-postgres"),
    ("deadpool-postgres", "onlyonce-store-postgres"),
    ("tokio-postgres-rustls", "onlyonce-store-postgres"),
    ("mysql_async", "onlyonce-store-mysql"),
    ("redis", "onlyonce-store-redis"),
];

/// Crates that are too big to build twice, or whose types meet in our interfaces, with the number of versions allowed.
const BIG: &[(&str, usize)] = &[
    ("aws-lc-sys", 1),
    ("axum", 1),
    ("axum-core", 1),
    ("bytes", 1),
    ("clap", 1),
    ("clap_builder", 1),
    ("h2", 1),
    ("http", 1),
    ("http-body", 1),
    ("hyper", 1),
    ("hyper-util", 1),
    ("libsqlite3-sys", 1),
    ("proptest", 1),
    ("regex-automata", 1),
    ("regex-syntax", 1),
    ("rusqlite", 1),
    ("rustix", 1),
    ("rustls", 1),
    ("serde", 1),
    ("serde_core", 1),
    ("serde_json", 1),
    // Build time only, none of it is in a binary: derive crates move from 2 to 3 one by one.
    ("syn", 2),
    ("tokio", 1),
    ("tokio-util", 1),
    ("tower", 1),
    ("tower-service", 1),
    ("tracing", 1),
    ("tracing-core", 1),
    ("tracing-subscriber", 1),
];

/// Every breach of a rule, a line each.
pub(crate) fn violations(metadata: &Metadata) -> Vec<String> {
    let mut found = Vec::new();
    for package in metadata.packages.iter() {
        match package.source.is_none() {
            true => ours(package, metadata, &mut found),
            false => theirs(package, &mut found),
        }
    }
    doubles(metadata, &mut found);
    found
}

fn ours(package: &Package, metadata: &Metadata, found: &mut Vec<String>) {
    let name = package.name.as_str();
    if package.license.as_deref() != Some(OUR_LICENCE) {
        found.push(format!("{name}: our licence is {OUR_LICENCE}: inherit it from the workspace"));
    }
    let is_example = package.manifest_path.starts_with(metadata.workspace_root.join("examples"));
    if FREE.contains(&name) || is_example {
        return;
    }
    let Some((_, allowed)) = MAY_DEPEND_ON.iter().find(|(ours, _)| *ours == name) else {
        found.push(format!("{name} has no rule on whom it may depend on; add one"));
        return;
    };
    let is_ours =
        |name: &str| metadata.packages.iter().any(|p| p.source.is_none() && p.name.as_str() == name);
    let allows = |to: &str| {
        allowed.iter().any(|rule| match rule.strip_suffix('*') {
            Some(prefix) => to.starts_with(prefix),
            None => *rule == to,
        })
    };
    for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
        let to = dependency.name.as_str();
        if is_ours(to) && !allows(to) {
            found.push(format!("{name} must not depend on {to}"));
        }
        if DRIVERS.iter().any(|(driver, store)| *driver == to && *store != name) {
            found.push(format!("{name} must not depend on the driver {to}"));
        }
    }
}

fn theirs(package: &Package, found: &mut Vec<String>) {
    let name = &package.name;
    match &package.license {
        None => found.push(format!("{name}: no licence expression in its manifest")),
        Some(expression) if !licence::is_permissive(expression) => {
            found.push(format!("{name}: the licence {expression} is not on the list of permissive ones"));
        }
        Some(_) => {}
    }
}

fn doubles(metadata: &Metadata, found: &mut Vec<String>) {
    let mut versions: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for package in metadata.packages.iter() {
        versions.entry(package.name.as_str()).or_default().push(package.version.to_string());
    }
    for (name, allowed) in BIG {
        if let Some(versions) = versions.get(name).filter(|versions| versions.len() > *allowed) {
            found.push(format!("{name} appears {} times: {}", versions.len(), versions.join(", ")));
        }
    }
}
