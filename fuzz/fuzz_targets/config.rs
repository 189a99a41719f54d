//! A file of options, read by the program's own reader for a command with options of each kind.
//!
//! `cargo fuzz run --sanitizer none config -- -max_total_time=600 -max_len=4096`
#![no_main]

#[allow(dead_code, reason = "a target uses its part of the program")]
#[path = "../../crates/cli/src/commands/serve/config.rs"]
mod config;
#[allow(dead_code, reason = "a target uses its part of the program")]
#[path = "../../crates/cli/src/failure.rs"]
mod failure;
#[path = "../properties/config.rs"]
mod properties;
#[path = "../../crates/cli/src/visible.rs"]
mod visible;

use std::sync::LazyLock;

use clap::{Arg, ArgAction, Command, value_parser};

static SERVE: LazyLock<Command> = LazyLock::new(|| {
    let wait = |text: &str| humantime::parse_duration(text);
    Command::new("serve").args([
        Arg::new("config").long("config"),
        Arg::new("wait").long("wait").value_parser(wait),
        Arg::new("upstream").long("upstream"),
        Arg::new("max-in-flight").long("max-in-flight").value_parser(value_parser!(u32)),
        Arg::new("expires").long("expires").action(ArgAction::SetTrue),
        Arg::new("guard").long("guard").action(ArgAction::Append),
        Arg::new("on-unknown").long("on-unknown").value_parser(["hold", "retry"]),
    ])
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::check(data, |text, command_line| {
    let said = SERVE.clone().get_matches_from([&["serve"], command_line].concat());
    let file = config::File { name: "FILE".into(), text: text.into() };
    match file.options(&SERVE, &said) {
        Ok(options) => Ok(options.into_iter().map(|option| option.into_string().expect("UTF-8")).collect()),
        Err(wrong) => Err(wrong.to_string()),
    }
}));
