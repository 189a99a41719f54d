//! `onlyonce completions`: a completion script for a shell.

use std::io::Write;

use clap_complete::Shell;

use crate::failure::Failure;

/// Prints a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce completions bash > /etc/bash_completion.d/onlyonce
  onlyonce completions zsh > \"${fpath[1]}/_onlyonce\"
  onlyonce completions fish > ~/.config/fish/completions/onlyonce.fish")]
pub(crate) struct Completions {
    /// For which shell
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Result<(), Failure> {
        // Into memory first: the generator panics where a pipe is closed.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::command_line(), "onlyonce", &mut script);
        Ok(std::io::stdout().write_all(&script)?)
    }
}
