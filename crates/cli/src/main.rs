//! The command-line program `onlyonce`: wiring and printing, a file for each subcommand.

mod commands;
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
  1   refused or not found: nothing was changed
  2   the command line is wrong
  74  the store, a file or the terminal failed

Examples:
  onlyonce keys list --state unknown --store sqlite:onlyonce.db
  onlyonce explain outcome-unknown
  onlyonce completions bash > /etc/bash_completion.d/onlyonce")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Keys(commands::keys::Keys),
    Explain(commands::explain::Explain),
    Completions(commands::completions::Completions),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
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
