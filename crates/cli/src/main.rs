//! The command-line program `onlyonce`: wiring and printing, a file for each subcommand.

mod commands;
mod demo;
mod failure;
mod output;
mod store_url;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Send it twice, it happens only once.
#[derive(Debug, Parser)]
#[command(name = "onlyonce", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes:
  0   done
  1   refused or not found: nothing was changed; or a check found a promise that does not hold
  2   the command line is wrong
  3   the API that was to be checked cannot be reached
  74  the store, a file or the terminal failed

Examples:
  onlyonce demo
  onlyonce serve --listen 127.0.0.1:8080 --upstream http://127.0.0.1:3000
  onlyonce keys list --state unknown --store sqlite:onlyonce.db
  onlyonce check http://127.0.0.1:8130/pay --body '{\"amount\":100}'
  onlyonce explain outcome-unknown
  onlyonce completions bash > /etc/bash_completion.d/onlyonce")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<commands::serve::Serve>),
    Check(Box<commands::check::Check>),
    Demo(commands::demo::Demo),
    Keys(commands::keys::Keys),
    Explain(commands::explain::Explain),
    Completions(commands::completions::Completions),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(command) => command.run(),
        Command::Check(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Keys(command) => command.run(),
        Command::Explain(command) => command.run(),
        Command::Completions(command) => command.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// The whole command line, for generators.
fn command_line() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

#[test]
fn the_command_line_is_consistent() {
    command_line().debug_assert();
}
