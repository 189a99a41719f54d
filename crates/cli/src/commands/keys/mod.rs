//! `onlyonce keys`: what an operator may look at and decide.

mod audit;
mod bulk;
mod find;
mod forget;
mod list;
mod purge;
mod release;
mod resolve;
mod scope;
mod show;
mod stats;
mod watch;

use clap::Subcommand;
use onlyonce_core::{
    Key, ListQuery, OperationId, OperatorAction, OperatorOutcome, RecordView, Scope, StoreAdmin, Target,
};

use super::operator::{one_line, user_name};
use crate::failure::Failure;
use crate::output;
use scope::Whose;
pub(super) use scope::scope_secret;

/// Looks at records, and decides those whose outcome is unknown
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  onlyonce keys list --state unknown --older-than 10m
  onlyonce keys find order-7 --scope-of 'Bearer sk_live_…'
  onlyonce keys resolve order-7 --status 201 --body @reply.json --reason 'the bank shows the charge'
  onlyonce keys release order-7 --reason 'the bank shows no charge'")]
pub(crate) struct Keys {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(list::List),
    Find(find::Find),
    Show(show::Show),
    Resolve(resolve::Resolve),
    Release(release::Release),
    Forget(forget::Forget),
    Watch(watch::Watch),
    Purge(purge::Purge),
    Stats(stats::Stats),
    Audit(audit::Audit),
}

impl Keys {
    pub(crate) fn run(self) -> Result<(), Failure> {
        warnings_to_stderr();
        let runtime = super::runtime(tokio::runtime::Builder::new_current_thread())?;
        runtime.block_on(async {
            match self.command {
                Command::List(command) => command.run().await,
                Command::Find(command) => command.run().await,
                Command::Show(command) => command.run().await,
                Command::Resolve(command) => command.run().await,
                Command::Release(command) => command.run().await,
                Command::Forget(command) => command.run().await,
                Command::Watch(command) => command.run().await,
                Command::Purge(command) => command.run().await,
                Command::Stats(command) => command.run().await,
                Command::Audit(command) => command.run().await,
            }
        })
    }
}

/// What a store has to say beside its answer, such as which records it cannot read.
fn warnings_to_stderr() {
    let lines = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(false);
    let stores = tracing_subscriber::EnvFilter::new("off,onlyonce_store_redis=warn");
    // Where there is one already it has them.
    let _ = lines.with_writer(std::io::stderr).with_env_filter(stores).try_init();
}

/// Which record.
#[derive(Debug, clap::Args)]
struct Which {
    /// The idempotency key, byte for byte
    key: String,
    #[command(flatten)]
    whose: Whose,
}

/// Who changes something, and why.
#[derive(Debug, clap::Args)]
struct Why {
    /// Why; kept on the audit table
    #[arg(long, value_parser = one_line)]
    reason: String,
    /// Who; kept on the audit table [default: the user's name]
    #[arg(long, value_parser = one_line)]
    actor: Option<String>,
    /// Also on a record whose owner is at work, or that has a reply already
    #[arg(long)]
    force: bool,
}

/// Scopes named in a refusal, at most.
const SCOPES_SHOWN: usize = 10;

impl Which {
    /// The record's identity; without `--scope` the store is asked which scopes have the key.
    async fn find(&self, store: &dyn StoreAdmin) -> Result<OperationId, Failure> {
        let key = Key::new(&self.key).map_err(|error| Failure::Usage(format!("KEY: {error}")))?;
        match self.whose.scope()? {
            Some(scope) => Ok(OperationId { scope, key }),
            None => alone(store, key).await,
        }
    }
}

/// The one record with this key, whatever its scope.
async fn alone(store: &dyn StoreAdmin, key: Key) -> Result<OperationId, Failure> {
    let query = ListQuery { key: Some(key.clone()), limit: SCOPES_SHOWN as u32 + 1, ..ListQuery::default() };
    let mut found: Vec<OperationId> = store.list(&query).await?.records.into_iter().map(|r| r.id).collect();
    match found.len() {
        0 => Err(Failure::Refused(format!(
            "no record has the key {key:?}; `onlyonce keys list` shows those there are",
            key = key.as_str()
        ))),
        1 => Ok(found.remove(0)),
        _ => {
            let more = if found.len() > SCOPES_SHOWN { ", …" } else { "" };
            let scopes: Vec<String> =
                found.iter().take(SCOPES_SHOWN).map(|id| format!("{:?}", id.scope.as_str())).collect();
            Err(Failure::Refused(format!(
                "several scopes have the key {:?}; name its scope (--scope, or \"scope\" in a line of --file), one of: {}{more}",
                key.as_str(),
                scopes.join(", ")
            )))
        }
    }
}

/// What is added where a key is not in the scope that was named: where else it is.
async fn elsewhere(store: &dyn StoreAdmin, key: &Key) -> Result<String, Failure> {
    let query = ListQuery { key: Some(key.clone()), limit: SCOPES_SHOWN as u32 + 1, ..ListQuery::default() };
    let found = store.list(&query).await?.records;
    if found.is_empty() {
        return Ok(String::new());
    }
    let more = if found.len() > SCOPES_SHOWN { ", …" } else { "" };
    let scopes: Vec<String> =
        found.iter().take(SCOPES_SHOWN).map(|record| format!("{:?}", record.id.scope.as_str())).collect();
    Ok(format!(
        "; other scopes have the key: {}{more}. A scope is made of all of the credential, of the option that names it \
         (--scope-header, --scope-cookie) and of the gateway's --scope-secret-file",
        scopes.join(", ")
    ))
}

impl Why {
    fn action(&self) -> OperatorAction {
        let actor = self.actor.clone().unwrap_or_else(user_name);
        let target = if self.force { Target::Any } else { Target::Undecided };
        OperatorAction { actor, reason: self.reason.clone(), target }
    }

    /// What is said after a change that may have replaced a reply.
    fn caveat(&self) -> &'static str {
        if self.force {
            "; an earlier reply may still be replayed from the memory of a running gateway, for up to 60 seconds"
        } else {
            ""
        }
    }
}

/// The record after a change, or why there was none.
fn done(outcome: OperatorOutcome, id: &OperationId) -> Result<Box<RecordView>, Failure> {
    let key = id.key.as_str();
    match outcome {
        OperatorOutcome::Done(record) => Ok(record),
        OperatorOutcome::Absent => Err(Failure::Refused(format!(
            "no record has the key {key:?} in the scope {:?}, or it has expired; `onlyonce keys list --key` shows the scopes \
             it is in",
            id.scope.as_str()
        ))),
        OperatorOutcome::LiveLease { left } => Err(Failure::Refused(format!(
            "{key:?} is being worked on, its lease has {} left and may be renewed; wait, or fence its owner: \
             `onlyonce keys release` and `resolve` take --force",
            output::duration(left)
        ))),
        OperatorOutcome::Completed => Err(Failure::Refused(format!(
            "{key:?} has a reply already (`onlyonce keys show`); add --force to give it up"
        ))),
        OperatorOutcome::NoReply => Err(Failure::Refused(format!(
            "{key:?} has no reply that could be forgotten (`onlyonce keys show`); `onlyonce keys release` frees a key whose \
             outcome is unknown, and a freed one runs again by itself"
        ))),
    }
}

fn parse_scope(scope: &str) -> Result<Scope, Failure> {
    Scope::new(scope).map_err(|error| Failure::Usage(format!("--scope: {error}")))
}
