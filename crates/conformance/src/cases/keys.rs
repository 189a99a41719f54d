//! Scope and key are compared byte for byte.

use std::collections::HashSet;

use onlyonce_core::{ClaimOutcome, LeaseToken, Operation, Reply};

use crate::Harness;
use crate::harness::{fresh_token, operation};

/// No case folding, padding, normalisation, collation, quoting or pattern: names that differ in a byte are different
/// operations, as keys and as scopes.
pub async fn names_are_compared_byte_for_byte(h: &Harness) {
    let names = [
        "a",
        "A",
        "a ",
        " a",
        "a  ",
        "a\u{a0}",
        "a\u{200b}",
        "\u{feff}a",
        "aa",
        // One letter composed and decomposed, accented and not; sharp s and its unfolded form; dotless i.
        "\u{e9}",
        "e\u{301}",
        "e",
        "\u{df}",
        "ss",
        "SS",
        "\u{1e9e}",
        "i",
        "\u{131}",
        "\u{130}",
        "I",
        // Full width, ligature, kana of both kinds, another alphabet that looks the same.
        "\u{ff41}",
        "\u{fb01}",
        "fi",
        "\u{3042}",
        "\u{30a2}",
        "\u{430}",
        // Beyond the basic plane, where collations have no weights.
        "\u{1f363}",
        "\u{1f37a}",
        "\u{1f600}",
        "\u{1f468}\u{200d}\u{1f469}",
        "\u{1f468}\u{1f469}",
        "\u{10ffff}",
        // What queries, patterns, key separators and glob characters are made of.
        "'",
        "''",
        "\"",
        "\\",
        "\\'",
        "%",
        "_",
        "%%",
        "*",
        "?",
        "[a]",
        ";",
        "--",
        "{a}",
        "a:b",
        "a|b",
        "a/b",
        "a,b",
        "null",
        "NULL",
        "0",
        "00",
        "0.0",
        "1e0",
        "1",
        "-1",
        "x'00'",
        "0x61",
    ];
    let mut operations = Vec::new();
    for name in names {
        operations.push(operation("scope", name));
        operations.push(operation(name, "key"));
    }
    all_are_different(h, &operations).await;
}

/// Names of 255 bytes that differ in the last byte alone are kept whole.
pub async fn names_of_full_length_are_kept_whole(h: &Harness) {
    let ascii = |last: &str| format!("{}{last}", "k".repeat(254));
    // 255 bytes in 63 characters of four bytes and one of three: lengths in characters and in UTF-16 differ.
    let wide = |last: &str| format!("{}{last}", "\u{1f363}".repeat(63));
    let mut operations = Vec::new();
    for name in
        [ascii("a"), ascii("b"), ascii("A"), ascii(" "), "k".repeat(254), wide("\u{3042}"), wide("\u{3044}")]
    {
        operations.push(operation("scope", &name));
        operations.push(operation(&name, "key"));
        operations.push(operation(&name, &name));
    }
    all_are_different(h, &operations).await;
}

/// Where scope ends and key starts is part of the name; the empty scope is a scope like any other.
pub async fn scope_and_key_never_run_together(h: &Harness) {
    let pairs = [
        ("a", "bc"),
        ("ab", "c"),
        ("", "abc"),
        ("abc", "a"),
        ("", "a"),
        ("a", "a"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("a\u{a0}b", "c"),
        ("a", "\u{a0}b\u{a0}c"),
        ("1", "11"),
        ("11", "1"),
        ("", "111"),
        (" ", "abc"),
        ("'", "'"),
        ("", "'"),
        ("}", "{a}"),
        ("{a}", "}"),
    ];
    let operations: Vec<_> = pairs.iter().map(|(scope, key)| operation(scope, key)).collect();
    all_are_different(h, &operations).await;
}

async fn all_are_different(h: &Harness, operations: &[Operation]) {
    let ids: HashSet<_> = operations.iter().map(Operation::id).collect();
    assert_eq!(ids.len(), operations.len(), "the case itself names one twice");
    let mut owners: Vec<LeaseToken> = Vec::new();
    let request = |token| onlyonce_core::ClaimRequest {
        // Real time runs while hundreds are claimed.
        lease: std::time::Duration::from_secs(300),
        ..h.request(token)
    };
    for operation in operations {
        let owner = fresh_token();
        match h.claim_as(operation, &request(owner)).await {
            ClaimOutcome::Acquired(_) => owners.push(owner),
            other => panic!("{:?} met another name: {other:?}", operation.id()),
        }
    }
    let reply = |n: usize| Reply::ok(format!("reply {n}"));
    for (n, (operation, owner)) in operations.iter().zip(owners).enumerate() {
        let completion = onlyonce_core::Completion {
            retention: std::time::Duration::from_secs(3600),
            ..h.completion(owner, reply(n))
        };
        let end = h.store().complete(operation, &completion).await;
        assert!(
            matches!(end, Ok(onlyonce_core::CompleteOutcome::Stored(_))),
            "{:?} was ended by another name: {end:?}",
            operation.id()
        );
    }
    if h.survives_restart() {
        h.restart().await;
    }
    for (n, operation) in operations.iter().enumerate() {
        assert_eq!(h.replay(operation).await.reply, reply(n), "{:?}", operation.id());
    }
}
