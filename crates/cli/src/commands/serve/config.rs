//! `--config FILE`: a file of options. Each line is an option by its long name; it becomes what the command line would
//! say, so that there is one list of options, one check and one default of each.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::failure::Failure;
use crate::visible::visible;

/// A file longer than this is not one of options.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Those that belong on a command line alone.
const NOT_IN_FILES: [&str; 2] = ["config", "explain-route"];

/// The arguments of the program with those of the file that they name, where they name one. What the command line or the
/// environment says goes before the file.
pub(crate) fn with_file(args: Vec<OsString>, program: &Command) -> Result<Vec<OsString>, Failure> {
    if args.get(1).is_none_or(|command| command != "serve") {
        return Ok(args);
    }
    // What is wrong with the command line is said when it is read in earnest.
    let Ok(matches) = program.clone().ignore_errors(true).try_get_matches_from(&args) else {
        return Ok(args);
    };
    let Some(said) = matches.subcommand_matches("serve") else { return Ok(args) };
    let Ok(Some(path)) = said.try_get_one::<PathBuf>("config") else { return Ok(args) };
    let Some(serve) = program.find_subcommand("serve") else { return Ok(args) };
    let file = File { name: path.display().to_string(), text: read(path)? };
    let (head, rest) = args.split_at(2);
    Ok([head, &file.options(serve, said)?, rest].concat())
}

fn read(path: &PathBuf) -> Result<String, Failure> {
    let doing = format!("--config {}", path.display());
    let length = std::fs::metadata(path).map_err(|error| Failure::io(&doing, &error))?.len();
    if length > FILE_BYTES_MAX {
        return Err(Failure::Usage(format!("{doing}: over {FILE_BYTES_MAX} bytes long")));
    }
    std::fs::read_to_string(path).map_err(|error| Failure::io(&doing, &error))
}

/// A file of options.
pub(crate) struct File {
    /// As it is named in what is wrong with it.
    pub(crate) name: String,
    /// What it says.
    pub(crate) text: String,
}

impl File {
    /// What the file says, as arguments, in its order.
    pub(crate) fn options(&self, serve: &Command, said: &ArgMatches) -> Result<Vec<OsString>, Failure> {
        let table = DeTable::parse(&self.text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            self.wrong(at, None, error.message())
        })?;
        let mut lines: Vec<_> = table.get_ref().iter().collect();
        lines.sort_by_key(|(key, _)| key.span().start);
        let mut options = Vec::new();
        for (key, value) in lines {
            let (name, at) = (key.get_ref().as_ref(), key.span().start);
            let Some(arg) = known(serve, name) else {
                return Err(self.wrong(at, Some(name), &unknown(serve, name, value.get_ref())));
            };
            let arguments = self.arguments(arg, name, value)?;
            for argument in &arguments {
                check(serve, argument).map_err(|why| self.wrong(at, Some(name), &why))?;
            }
            let source = said.value_source(arg.get_id().as_str());
            if source == Some(ValueSource::EnvVariable)
                && let Some(variable) = arg.get_env()
            {
                let (file, variable) = (&self.name, variable.to_string_lossy());
                eprintln!("note: {variable} is set, and goes before `{name}` of {file}");
            }
            if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
                options.extend(arguments.into_iter().map(OsString::from));
            }
        }
        Ok(options)
    }

    fn arguments(&self, arg: &Arg, name: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, Failure> {
        let wrong = |value: &Spanned<DeValue<'_>>, why: &str| self.wrong(value.span().start, Some(name), why);
        match (arg.get_action(), value.get_ref()) {
            (ArgAction::SetTrue, DeValue::Boolean(true)) => Ok(vec![format!("--{name}")]),
            (ArgAction::SetTrue, DeValue::Boolean(false)) => Ok(Vec::new()),
            (ArgAction::SetTrue, _) => Err(wrong(value, "write true or false")),
            (ArgAction::Append, DeValue::Array(items)) => items
                .iter()
                .map(|item| match plain(item.get_ref()) {
                    Some(text) => Ok(format!("--{name}={text}")),
                    None => Err(wrong(item, "write a list of texts")),
                })
                .collect(),
            (_, given) => match plain(given) {
                Some(text) => Ok(vec![format!("--{name}={text}")]),
                None => Err(wrong(value, "write a text or a whole number")),
            },
        }
    }

    /// `FILE:LINE: KEY: what is wrong`. What it quotes of the file may hold anything.
    fn wrong(&self, at: usize, key: Option<&str>, why: &str) -> Failure {
        let line = 1 + self.text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
        let mut message = format!("{}:{line}: ", self.name);
        if let Some(key) = key {
            write!(message, "{}: ", visible(key)).expect("a String takes any text");
        }
        Failure::Usage(message + &visible(why))
    }
}

fn known<'a>(serve: &'a Command, name: &str) -> Option<&'a Arg> {
    let found = serve.get_arguments().find(|arg| arg.get_long() == Some(name));
    found.filter(|_| !NOT_IN_FILES.contains(&name))
}

fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        _ => None,
    }
}

/// What is wrong with one option, taken for itself; what is wrong with several together is found when all are there.
fn check(serve: &Command, argument: &str) -> Result<(), String> {
    use clap::error::ErrorKind::{
        InvalidValue, TooManyValues, UnknownArgument, ValueValidation, WrongNumberOfValues,
    };
    let alone = serve.clone().try_get_matches_from(["serve", argument]);
    match alone {
        Err(error)
            if matches!(
                error.kind(),
                InvalidValue | TooManyValues | UnknownArgument | ValueValidation | WrongNumberOfValues
            ) =>
        {
            let text = error.to_string();
            let said = text.lines().next().unwrap_or_default();
            Err(said.strip_prefix("error: ").unwrap_or(said).to_owned())
        }
        _ => Ok(()),
    }
}

fn unknown(serve: &Command, name: &str, value: &DeValue<'_>) -> String {
    if value.is_table() {
        return "there are no sections: options stand at the top, by their long names".into();
    }
    if NOT_IN_FILES.contains(&name) {
        return "it is for the command line alone".into();
    }
    // The parser of the command line knows what is near to it.
    let error = serve.clone().try_get_matches_from(["serve", &format!("--{name}")]).err();
    let near = error.as_ref().and_then(|error| error.get(clap::error::ContextKind::SuggestedArg));
    match near {
        Some(near) => format!("no such option; is it {}?", near.to_string().trim_start_matches("--")),
        None => "no such option; `onlyonce serve --help` lists them all".into(),
    }
}

#[cfg(test)]
#[path = "../../../../../fuzz/properties/mutation.rs"]
mod mutation;

#[cfg(test)]
#[path = "../../../../../fuzz/properties/config.rs"]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    /// The arguments that a file and a command line make, or what is wrong.
    fn expand(text: &str, command_line: &[&str]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("onlyonce.toml");
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let args = [&["onlyonce", "serve", "--config", path], command_line].concat();
        let args = args.into_iter().map(OsString::from).collect();
        match with_file(args, &crate::command_line()) {
            Ok(args) => {
                Ok(args.into_iter().map(|arg| arg.into_string().unwrap().replace(path, "FILE")).collect())
            }
            Err(Failure::Usage(why)) => Err(why.replace(path, "FILE")),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_is_what_the_command_line_would_say() {
        let text = r#"
            # where to
            upstream = "http://127.0.0.1:3000"
            wait = "2s"
            max-in-flight = 5_000
            expires = true
            quoted-only = false
            guard = ["POST /v1/*", 'PUT /v1/*']
        "#;
        let expected = [
            "onlyonce",
            "serve",
            "--upstream=http://127.0.0.1:3000",
            "--wait=2s",
            "--max-in-flight=5000",
            "--expires",
            "--guard=POST /v1/*",
            "--guard=PUT /v1/*",
            "--config",
            "FILE",
            "--wait",
            "3s",
        ];
        let without: Vec<_> = expected.iter().filter(|arg| **arg != "--wait=2s").copied().collect();
        assert_eq!(expand(text, &["--wait", "3s"]).unwrap(), without, "the command line goes first");
        assert_eq!(expand(text, &[]).unwrap(), expected[..10]);
        let replaced = expand(text, &["--guard", "POST /x"]).unwrap();
        assert!(!replaced.contains(&"--guard=POST /v1/*".to_owned()), "lists are not mixed: {replaced:?}");
    }

    #[test]
    fn what_is_wrong_names_file_line_and_key() {
        for (text, why) in [
            ("upstream = ", "FILE:1: "),
            ("\nwait = 5\n", "FILE:2: wait: invalid value '5' for '--wait <TIME>': "),
            ("lease = \"30s\"\nlease = \"40s\"", "FILE:2: "),
            ("max-inflight = 5", "FILE:1: max-inflight: no such option; is it max-in-flight?"),
            ("guard = [\n\"POST /a\",\n7.5]", "FILE:3: guard: write a list of texts"),
            ("guard = \"POST a\"", "FILE:1: guard: invalid value"),
            ("expires = \"yes\"", "FILE:1: expires: write true or false"),
            ("on-unknown = \"panic\"", "FILE:1: on-unknown: invalid value 'panic'"),
            ("on-unknown = \"pan\tc\"", "FILE:1: on-unknown: invalid value 'pan\\u{9}c'"),
            ("\"\\u001b[2J\" = 1", "FILE:1: \\u{1b}[2J: no such option"),
            ("wait = 2026-01-01", "FILE:1: wait: write a text"),
            ("[limits]\nwait = \"1s\"", "FILE:1: limits: there are no sections"),
            ("config = \"other.toml\"", "FILE:1: config: it is for the command line alone"),
            ("zzz = 1", "FILE:1: zzz: no such option; `onlyonce serve --help`"),
        ] {
            let said = expand(text, &[]).unwrap_err();
            assert!(said.starts_with(why), "{text:?}: {said}");
        }
    }

    #[test]
    fn mutated_files_are_read_or_refused_with_the_place() {
        let program = crate::command_line();
        let serve = program.find_subcommand("serve").unwrap();
        let options = |text: &str, command_line: &[&str]| {
            let said =
                serve.clone().get_matches_from([&["serve", "--upstream", "http://x"], command_line].concat());
            match (File { name: "FILE".into(), text: text.into() }).options(serve, &said) {
                Ok(options) => Ok(options.into_iter().map(|option| option.into_string().unwrap()).collect()),
                Err(wrong) => Err(wrong.to_string()),
            }
        };
        let pieces: &[&[u8]] = &[
            b"wait = \"1s\"\n",
            b"expires = true\n",
            b"guard = [\"POST /a\"]\n",
            b"max-in-flight = ",
            b"[",
            b"]",
            b"\"",
            b"'",
            b"\"\"\"",
            b"\\",
            b"\x1b",
            b"\\u001b",
            b"\n",
            b"#",
            b"=",
            b".",
            b"{",
            b"}",
            b"_",
            b"0x",
            b"-",
            "\u{202e}".as_bytes(),
        ];
        mutation::play("config", pieces, 2000, |data| properties::check(data, options));
    }

    #[test]
    fn other_command_lines_are_left_alone() {
        let program = crate::command_line();
        for args in [
            &["onlyonce"][..],
            &["onlyonce", "keys", "list"],
            &["onlyonce", "serve", "--upstream", "http://x"],
        ] {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            assert_eq!(with_file(args.clone(), &program).unwrap(), args);
        }
    }
}
