//! SPDX licence expressions: enough of the grammar for what crates declare.

/// Permissive licences: a user of the library takes on attribution, nothing else. The same list as in `deny.toml`.
const PERMISSIVE: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Whether the expression can be met with permissive licences alone. `/` is the old spelling of `OR`. What cannot be
/// parsed is not permissive.
pub(crate) fn is_permissive(expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = tokens.as_slice();
    any_of(&mut rest) == Some(true) && rest.is_empty()
}

fn any_of(rest: &mut &[&str]) -> Option<bool> {
    let mut fit = all_of(rest)?;
    while take(rest, "OR") {
        fit |= all_of(rest)?;
    }
    Some(fit)
}

// AND binds tighter than OR.
fn all_of(rest: &mut &[&str]) -> Option<bool> {
    let mut fit = one(rest)?;
    while take(rest, "AND") {
        fit &= one(rest)?;
    }
    Some(fit)
}

fn one(rest: &mut &[&str]) -> Option<bool> {
    if take(rest, "(") {
        let fit = any_of(rest)?;
        return take(rest, ")").then_some(fit);
    }
    let (name, tail) = rest.split_first().filter(|(name, _)| !["OR", "AND", "WITH", ")"].contains(name))?;
    *rest = tail;
    let mut name = (*name).to_owned();
    if take(rest, "WITH") {
        let (exception, tail) = rest.split_first()?;
        *rest = tail;
        name = format!("{name} WITH {exception}");
    }
    Some(PERMISSIVE.contains(&name.as_str()))
}

fn take(rest: &mut &[&str], token: &str) -> bool {
    match rest.split_first() {
        Some((first, tail)) if *first == token => {
            *rest = tail;
            true
        }
        _ => false,
    }
}

#[test]
fn expressions_are_read_as_spdx_says() {
    for good in [
        "MIT",
        "MIT/Apache-2.0",
        "Apache-2.0 / MIT",
        "GPL-3.0-only OR MIT",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
        "GPL-2.0-only AND MIT OR Zlib",
    ] {
        assert!(is_permissive(good), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0-only",
        "MIT AND GPL-3.0-only",
        "MIT AND (GPL-3.0-only OR MPL-2.0)",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        "MIT WITH something",
        "MIT OR",
        "(MIT",
        "MIT Apache-2.0",
        "SSPL-1.0 OR BUSL-1.1",
    ] {
        assert!(!is_permissive(bad), "{bad}");
    }
}

#[test]
fn the_list_is_that_of_deny_toml() {
    let deny =
        std::fs::read_to_string(crate::workspace_root().join("deny.toml")).expect("deny.toml is readable");
    let allow =
        deny.split_once("\nallow = [").and_then(|(_, rest)| rest.split_once(']')).expect("allow = […]").0;
    let listed: Vec<&str> = allow.lines().filter_map(|line| line.split('"').nth(1)).collect();
    assert_eq!(listed, PERMISSIVE);
}
