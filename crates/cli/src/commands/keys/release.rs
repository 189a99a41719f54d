//! `onlyonce keys release`.

use std::io::{Write, stdout};

use super::{Which, Why, done};
use crate::failure::Failure;
use crate::output::{self, RecordJson};
use crate::store_url::StoreArg;

/// Frees a key whose outcome is unknown: the next retry runs
///
/// Only when you know that nothing happened. A returning owner is fenced. Refused on a record whose owner is at work or
/// that has a reply already, unless --force is given; a reply given up may still be replayed from the memory of other
/// processes for up to 60 seconds. Written on the audit table.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  onlyonce keys release order-7 --reason 'the bank shows no charge'")]
pub(super) struct Release {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    why: Why,
    #[command(flatten)]
    store: StoreArg,
    /// Print the record as JSON
    #[arg(long)]
    json: bool,
}

impl Release {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let store = self.store.open_existing().await?;
        let id = self.which.find(&*store).await?;
        let record = done(store.free(&id, &self.why.action()).await?, &id)?;
        let mut out = stdout().lock();
        match self.json {
            true => output::json(&mut out, &RecordJson::from(&*record))?,
            false => writeln!(
                out,
                "released {}: the next retry runs{}",
                output::visible(id.key.as_str()),
                self.why.caveat()
            )?,
        }
        Ok(())
    }
}
