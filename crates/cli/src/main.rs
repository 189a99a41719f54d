//! The command-line program `onlyonce`: wiring and printing, a file for each subcommand.

mod commands;
mod demo;
mod failure;
mod output;
mod store_url;
mod visible;

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};

use crate::failure::Failure;

/// Send it twice, it happens only once.
#[derive(Debug, Parser)]
#[command(name = "onlyonce", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes:
  0   done
  1   refused or not found: nothing was changed; a check or a proof found a promise that does not hold; some messages of a load failed
  2   the command line is wrong
  3   the API that was to be checked cannot be reached
  65  a message, a table or a file is not what it must be
  74  the store, a file or the terminal failed
  75  busy, or a failure that passes: nothing was changed, run it again

Examples:
  onlyonce demo
  onlyonce serve --listen 127.0.0.1:8080 --upstream http://127.0.0.1:3000
  onlyonce keys list --state unknown --store sqlite:onlyonce.db
  onlyonce check http://127.0.0.1:8130/pay --body '{\"amount\":100}'
  onlyonce prove --for 30s
  onlyonce inbox load inbox.db messages/
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
    Prove(Box<commands::prove::Prove>),
    Demo(commands::demo::Demo),
    Keys(Box<commands::keys::Keys>),
    Inbox(Box<commands::inbox::InboxCommand>),
    Explain(commands::explain::Explain),
    Completions(commands::completions::Completions),
}

fn main() -> ExitCode {
    // Past a limit on the size of files a write fails, as on a full disk, and is told as one; unheeded, the signal kills.
    let heeded = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    if let Err(error) = heeded {
        return Failure::io("signals", &error).report();
    }
    let args = match commands::serve::with_file(std::env::args_os().collect(), &command_line()) {
        Ok(args) => args,
        Err(failure) => return failure.report(),
    };
    let result = match Cli::parse_from(args).command {
        Command::Serve(command) => command.run(),
        Command::Check(command) => command.run(),
        Command::Prove(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Keys(command) => command.run(),
        Command::Inbox(command) => command.run(),
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
