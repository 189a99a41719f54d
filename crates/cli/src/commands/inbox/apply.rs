//! `onlyonce inbox apply`.

use std::io::{Write, stdout};

use onlyonce_inbox::{Body, Receipt, Verdict};
use serde::Serialize;

use super::delivery::{Delivery, Message, OnConflict, ViaArg, conflict, verdict_line};
use crate::failure::Failure;
use crate::output;

/// Applies one message if it is new
///
/// Line 1 is `applied`, `duplicate` or `failed`, line 2 the response: for a duplicate the stored one, byte for byte.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce inbox apply inbox.db message.json
  onlyonce inbox apply inbox.db message.json --via retry
  onlyonce inbox apply inbox.db message.json --sql book.sql
  onlyonce inbox apply inbox.db message.json --exec ./ship.sh
  onlyonce inbox apply inbox.db - --key '{sender}/{date}/{seq}' < message.json")]
pub(super) struct Apply {
    #[command(flatten)]
    delivery: Delivery,
    /// By which path the message came; kept in the delivery log
    #[arg(long, value_name = "PATH", default_value = "manual")]
    via: ViaArg,
    /// Print JSON: `verdict`, `msg_id`, `body`, `response`
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ReceiptJson<'r> {
    verdict: &'static str,
    msg_id: &'r str,
    /// `new`, or what the body is against that of the first delivery.
    body: &'static str,
    response: String,
}

impl Apply {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Before the database is touched: bad data changes nothing.
        let message = self.delivery.read()?;
        let work = self.delivery.handling.work()?;
        let inbox = self.delivery.database.open()?;
        let receipt = message.receive(&inbox, self.via.into(), &work)?;
        self.print(&message, &receipt)?;
        self.verdict(&message, receipt.verdict)
    }

    fn print(&self, message: &Message, receipt: &Receipt) -> Result<(), Failure> {
        let verdict = verdict_line(receipt.verdict, self.delivery.reading.on_conflict);
        let mut out = stdout().lock();
        if self.json {
            let body = match receipt.verdict {
                Verdict::Applied | Verdict::Failed => "new",
                Verdict::Duplicate(body) => body.as_str(),
            };
            let response = String::from_utf8_lossy(&receipt.response).into_owned();
            let msg_id = message.envelope.key.as_str();
            output::json(&mut out, &ReceiptJson { verdict, msg_id, body, response })?;
        } else {
            out.write_all(&[verdict.as_bytes(), b"\n", &receipt.response, b"\n"].concat())?;
        }
        Ok(out.flush()?)
    }

    fn verdict(&self, message: &Message, verdict: Verdict) -> Result<(), Failure> {
        let key = message.envelope.key.as_str();
        match verdict {
            Verdict::Duplicate(Body::Different) => {
                let said = conflict(key, &message.source);
                if self.delivery.reading.on_conflict == OnConflict::Fail {
                    return Err(Failure::Data(said));
                }
                eprintln!("warning: {said}");
                Ok(())
            }
            Verdict::Failed => Err(Failure::Data(format!(
                "{}: the work failed for good; the failure is recorded, and copies get the same response",
                message.source
            ))),
            Verdict::Applied | Verdict::Duplicate(_) => Ok(()),
        }
    }
}
