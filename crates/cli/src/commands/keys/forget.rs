//! `onlyonce keys forget`.

use std::io::{Write, stdout};

use onlyonce_core::{OperatorAction, OperatorOutcome, StateName, Target};

use super::{Which, done};
use crate::commands::operator::{one_line, user_name};
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Gives up the stored reply of a key: the next request with it runs again
///
/// For a completed record alone: what is in progress or unknown is left as it is. Whoever sends the key and had the
/// reply will charge, order or send again. Gone from the store at once, and from the memory of running gateways within
/// 60 seconds. Written on the audit table.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys forget order-7 --reason 'the charge was reversed by hand'")]
pub(super) struct Forget {
    #[command(flatten)]
    which: Which,
    /// Why; kept on the audit table
    #[arg(long, value_parser = one_line)]
    reason: String,
    /// Who; kept on the audit table [default: the user's name]
    #[arg(long, value_parser = one_line)]
    actor: Option<String>,
    #[command(flatten)]
    store: StoreArg,
    /// Print the record as JSON
    #[arg(long)]
    json: bool,
}

impl Forget {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let store = self.store.open_existing().await?;
        let id = self.which.find(&*store).await?;
        let actor = self.actor.unwrap_or_else(user_name);
        let action = OperatorAction { actor, reason: self.reason, target: Target::Completed };
        let outcome = store.free(&id, &action).await?;
        if outcome == OperatorOutcome::NoReply
            && store.show(&id).await?.is_some_and(|record| record.state == StateName::Freed)
        {
            return Err(Failure::Refused(format!(
                "{:?} is free already, and nothing was changed: the next request with it runs",
                id.key.as_str()
            )));
        }
        let record = done(outcome, &id)?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &RecordJson::from(&*record))?,
            false => writeln!(
                out,
                "forgot {}: the next request with it runs again. A gateway that has the reply in its memory may replay it \
                 for up to 60 seconds from now",
                output::visible(id.key.as_str())
            )?,
        }
        Ok(())
    }
}
