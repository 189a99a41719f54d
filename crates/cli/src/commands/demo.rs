//! `onlyonce demo`: a double charge, and its end.

use std::net::SocketAddr;

use clap::Args;

use crate::demo;
use crate::failure::Failure;

/// Watch a double charge happen, and then not happen.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  onlyonce demo          tell the story, then stay up to try it with curl, until Ctrl-C
  onlyonce demo --once   tell the story and exit: 0 if every figure is as it must be, else 1
  onlyonce demo --once --unguarded
                         the same with the guard off: it must fail")]
pub(crate) struct Demo {
    /// Where the gateway listens
    #[arg(long, default_value = "127.0.0.1:8130", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Exit after the story instead of staying up
    #[arg(long)]
    once: bool,
    /// Start the gateway with its guard off, to see that the figures can be wrong
    #[arg(long)]
    unguarded: bool,
}

impl Demo {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let runtime = super::runtime(tokio::runtime::Builder::new_multi_thread())?;
        let told = runtime.block_on(demo::run(self.listen, self.once, self.unguarded));
        match told {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::Refused("a figure of the demo is not as it must be".into())),
            Err(error) => Err(Failure::Io(format!("{error:#}"))),
        }
    }
}
