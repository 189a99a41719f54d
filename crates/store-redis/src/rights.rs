//! Whether the user of the store may do what its work needs, asked of each server at each connection.
//!
//! Scripts that are in the server's cache, and commands that only an incident needs, hide a missing right until an effect
//! has happened and cannot be recorded. So each command is tried by itself, on a key that nobody has, so that it changes
//! nothing; and a server checks rights before anything else, so it tells of them when it is full or a replica, too.

use onlyonce_core::{Key, OperationId, Scope, StoreErrorKind};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, Value};

use crate::error::Fault;
use crate::open::{Address, Kind, Options};
use crate::scripts;

/// What a user needs, for messages.
pub(crate) const NEEDED: &str = "+set +get +del +pttl +time +evalsha +script|load +ping +info, with min_replicas +wait \
                                 +pexpireat +pexpiretime, on a cluster +asking +cluster|slots";

/// Refuses a user who lacks a right. Costs one round trip, which others may share.
pub(crate) async fn check(
    connection: &mut MultiplexedConnection,
    options: &Options,
    address: &Address,
) -> Result<(), Fault> {
    let trials = trials(options)?;
    let mut pipeline = Pipeline::with_capacity(trials.len());
    trials.iter().for_each(|(_, command)| {
        pipeline.add_command(command.clone());
    });
    let asked = connection.req_packed_commands(&pipeline, 0, trials.len());
    let answers = asked.await.map_err(Fault::unreachable)?;
    let (mut missing, mut keys) = (Vec::new(), false);
    for ((right, _), answer) in trials.iter().zip(&answers) {
        match answer {
            Value::ServerError(error) if error.code() == "NOPERM" => {
                let of_a_command = error.details().is_none_or(|said| said.contains("to run"));
                keys |= !of_a_command;
                if of_a_command && !missing.contains(right) {
                    missing.push(*right);
                }
            }
            // Whatever else it says: it may be done.
            _ => {}
        }
    }
    let keys = keys.then(|| format!("the keys ~{}*", options.prefix));
    let missing: Vec<_> = missing.into_iter().map(str::to_owned).chain(keys).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(" ");
    Err(Fault::unfit(format!(
        "{address}: the Redis user lacks a permission that the store needs: {missing}; in all it needs {NEEDED}"
    )))
}

/// Each right, and a command that needs it and does nothing.
fn trials(options: &Options) -> Result<Vec<(&'static str, Cmd)>, Fault> {
    let key = nobodys_key(options)?;
    let command = |parts: &[&str]| {
        let mut command = redis::cmd(parts[0]);
        parts[1..].iter().for_each(|part| {
            command.arg(*part);
        });
        command
    };
    let mut trials = vec![
        ("+set", command(&["SET", &key, "", "XX", "PX", "1"])),
        ("+get", command(&["GET", &key])),
        ("+del", command(&["DEL", &key])),
        ("+pttl", command(&["PTTL", &key])),
        ("+time", command(&["TIME"])),
        ("+evalsha", command(&["EVALSHA", NO_SCRIPT, "1", &key])),
        // Without it an idle connection is taken for a broken one, and nothing is ever taken over.
        ("+ping", command(&["PING"])),
    ];
    // Loaded even where the server knows them: after a restart it does not.
    trials.extend(scripts::all().map(|code| ("+script|load", command(&["SCRIPT", "LOAD", code]))));
    if options.min_replicas > 0 {
        trials.push(("+pexpiretime", command(&["PEXPIRETIME", &key])));
        trials.push(("+pexpireat", command(&["PEXPIREAT", &key, "1"])));
        trials.push(("+wait", command(&["WAIT", "0", "1"])));
    }
    if options.kind == Kind::Cluster {
        trials.push(("+asking", command(&["ASKING"])));
        // What is asked after ASKING is this, and not the first call of somebody.
        trials.push(("+ping", command(&["PING"])));
    }
    Ok(trials)
}

/// The hash of no script.
const NO_SCRIPT: &str = "0000000000000000000000000000000000000000";

/// The name of a record that is nobody's, by chance of one in 2^128.
fn nobodys_key(options: &Options) -> Result<String, Fault> {
    let names = options.names().map_err(|error| Fault::unfit(error.to_string()))?;
    let key = Key::new(format!("onlyonce self-test {}", random_hex()?));
    let key = key.map_err(|_| Fault::strange("its own key"))?;
    Ok(names.record(&OperationId { scope: Scope::anonymous(), key }))
}

fn random_hex() -> Result<String, Fault> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(StoreErrorKind::Internal, format!("no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
