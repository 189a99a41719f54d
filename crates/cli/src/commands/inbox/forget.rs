//! `onlyonce inbox forget`.

use std::io::{Write, stdout};

use onlyonce_inbox::{Forgotten, LeaseView, RowView};
use serde::Serialize;

use super::Database;
use super::show::not_found;
use crate::commands::operator::{one_line, user_name};
use crate::failure::Failure;
use crate::output;

/// Removes the row of one message, and a lease that is over, so that it is applied again when it comes again
///
/// The row as it was, who removed it and why are kept on the table `inbox_audit`; the delivery log stays.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox forget inbox.db M-1 --reason 'applied from the wrong file, the sender repeats it'")]
pub(super) struct Forget {
    #[command(flatten)]
    database: Database,
    /// The key, byte for byte
    msg_id: String,
    /// Why; kept on the audit table
    #[arg(long, value_parser = one_line)]
    reason: String,
    /// Who; kept on the audit table [default: the user's name]
    #[arg(long, value_parser = one_line)]
    actor: Option<String>,
    /// Print JSON: `forgotten`, the row as it was, and `lease`
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ForgottenJson {
    /// `null` where work was begun and never recorded.
    forgotten: Option<RowView>,
    lease: Option<LeaseView>,
}

impl Forget {
    pub(super) fn run(self) -> Result<(), Failure> {
        let actor = self.actor.unwrap_or_else(user_name);
        // Not `existing`: the audit table may have to be made.
        self.database.open_existing()?;
        let found = self.database.open()?.forget(&self.msg_id, &actor, &self.reason)?;
        let (row, lease) = match found {
            Forgotten::Removed { row, lease } => (row, lease),
            Forgotten::Absent => return Err(not_found(&self.msg_id)),
            Forgotten::InProgress(lease) => {
                return Err(Failure::Refused(format!(
                    "a handler works on the message {:?}, for {} s at least; nothing was changed",
                    self.msg_id,
                    lease.left_ms.div_ceil(1000)
                )));
            }
        };
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &ForgottenJson { forgotten: row, lease })?,
            false => writeln!(out, "forgotten {}", output::visible(&self.msg_id))?,
        }
        Ok(())
    }
}
