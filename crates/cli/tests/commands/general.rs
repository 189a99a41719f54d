//! Help, version, completions, and output that nobody reads.

use std::process::{Command, Stdio};

use crate::{binary, run};

/// The subcommands that the help of `path` lists.
fn subcommands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

fn walk(path: &[String], seen: &mut Vec<String>) {
    let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let help = run(&args).ok().stdout;
    assert!(
        help.contains("\nExamples:\n  onlyonce "),
        "`onlyonce {}` has no examples:\n{help}",
        args.join(" ")
    );
    seen.push(path.join(" "));
    for name in subcommands(&help) {
        walk(&[path, &[name]].concat(), seen);
    }
}

#[test]
fn every_command_has_help_with_examples() {
    let mut seen = Vec::new();
    walk(&[], &mut seen);
    for expected in ["keys", "keys resolve", "keys audit", "explain", "completions"] {
        assert!(seen.iter().any(|path| path == expected), "{expected} is not in {seen:?}");
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    assert_eq!(run(&["--version"]).ok().stdout, format!("onlyonce {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn help_documents_the_exit_codes() {
    let help = run(&["--help"]).ok().stdout;
    for code in ["  0   ", "  1   ", "  2   ", "  74  "] {
        assert!(help.contains(code), "{code:?} in {help}");
    }
}

#[test]
fn completions_are_scripts_that_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]).ok().stdout;
        for word in ["keys", "resolve", "reason"] {
            assert!(script.contains(word), "{word} in the script for {shell}");
        }
        // Values too, where the shell's generator has them.
        let with_values = ["bash", "zsh"].contains(&shell);
        assert_eq!(script.contains("scope-unstable"), with_values, "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("onlyonce.bash");
    std::fs::write(&file, run(&["completions", "bash"]).ok().stdout).unwrap();
    let checked = Command::new("bash").arg("-n").arg(&file).status().expect("bash starts");
    assert!(checked.success());
}

// `onlyonce … | head -1` is not a failure.
#[test]
fn a_reader_that_has_gone_is_not_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let run = binary().args(["completions", "bash"]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!((run.status.code(), String::from_utf8(run.stderr).unwrap().as_str()), (Some(0), ""));
}

#[test]
fn output_that_cannot_be_written_is_exit_code_74() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = binary().args(["completions", "bash"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(run.status.code(), Some(74));
    assert!(String::from_utf8(run.stderr).unwrap().starts_with("error: standard output: "));
}

#[test]
fn explain_has_the_page_of_a_code() {
    let page = run(&["explain", "outcome-unknown"]).ok().stdout;
    let mut lines = page.lines();
    assert_eq!(lines.next(), Some("outcome-unknown: Nobody knows whether the operation happened"));
    assert_eq!(lines.next(), Some("status 409, not retryable"));
    for part in [
        "\nWhat the client should do:\n  - ",
        "\nWhat the operator should do:\n  - ",
        "onlyonce keys resolve",
    ] {
        assert!(page.contains(part), "{part:?} in {page}");
    }
    let json = run(&["explain", "key-reused", "--json"]).json();
    assert_eq!(
        (&json["code"], &json["status"], &json["retryable"]),
        (&"key-reused".into(), &422.into(), &false.into())
    );
}

#[test]
fn explain_lists_every_code() {
    let listed = run(&["explain", "--list", "--json"]).json();
    let listed: Vec<&str> =
        listed.as_array().unwrap().iter().map(|code| code["code"].as_str().unwrap()).collect();
    let known: Vec<&str> = onlyonce_http::Code::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(listed, known);
    let table = run(&["explain", "--list"]).ok().stdout;
    assert_eq!(
        table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect::<Vec<_>>(),
        known
    );
    for code in known {
        run(&["explain", code]).ok();
    }
    run(&["explain", "outcome-unknwon"]).failed(2, &["outcome-unknwon", "outcome-unknown"]);
}

#[test]
fn a_command_without_its_arguments_shows_its_help() {
    for command in [&[][..], &["keys"], &["explain"]] {
        run(command).failed_with_help();
    }
}
