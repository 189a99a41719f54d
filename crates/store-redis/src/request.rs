//! What is asked of one server, with one answer for each command.

use std::sync::Arc;

use redis::Cmd;

use crate::scripts::Text;

/// Commands that are sent together.
pub(crate) struct Request<'a> {
    pub(crate) what: Arc<What>,
    /// The code, where the commands run a script: a server that does not know it is told.
    pub(crate) script: Option<&'a str>,
}

/// Commands by themselves, and the two that every operation takes: these are made up in the batch.
pub(crate) enum What {
    Commands(Vec<Cmd>),
    /// `SET NX GET`, and `PTTL`.
    Claim(Claim),
    /// Goes into one script with the other completions of the batch. Its answer is the time if it is stored; nil if the
    /// record is not simply its own, and then nothing was done.
    Completion(Ending),
}

/// A claim of what is most likely free.
pub(crate) struct Claim {
    pub(crate) name: String,
    pub(crate) value: Vec<u8>,
    pub(crate) ttl_ms: i64,
}

/// A completion of a record that is most likely as its claim left it.
pub(crate) struct Ending {
    pub(crate) name: String,
    /// Attempt, token and fingerprint.
    pub(crate) owner: [u8; 61],
    /// Lengths of scope, key and origin, and the three.
    pub(crate) names: Vec<u8>,
    pub(crate) status: [u8; 2],
    /// Length of its head, head, body.
    pub(crate) reply: Vec<u8>,
    pub(crate) retention_ms: i64,
}

impl<'a> Request<'a> {
    pub(crate) fn of(commands: impl IntoIterator<Item = Cmd>) -> Self {
        Self { what: Arc::new(What::Commands(commands.into_iter().collect())), script: None }
    }

    pub(crate) fn claim(claim: Claim) -> Self {
        Self { what: Arc::new(What::Claim(claim)), script: None }
    }

    pub(crate) fn completion(ending: Ending) -> Self {
        let script = Some(crate::scripts::COMPLETE_MANY.code);
        Self { what: Arc::new(What::Completion(ending)), script }
    }

    /// A script with its keys and arguments.
    pub(crate) fn script(text: &'static Text, keys: &[&[u8]], args: &[&[u8]]) -> Self {
        Self::code(text.hash(), text.code, keys, args)
    }

    /// A script by its hash and code.
    pub(crate) fn code(hash: &str, code: &'a str, keys: &[&[u8]], args: &[&[u8]]) -> Self {
        let mut command = redis::cmd("EVALSHA");
        command.arg(hash).arg(keys.len()).arg(keys).arg(args);
        Self { script: Some(code), ..Self::of([command]) }
    }
}

impl What {
    /// How many answers it gets.
    pub(crate) fn answers(&self) -> usize {
        match self {
            Self::Commands(commands) => commands.len(),
            Self::Claim(_) => 2,
            Self::Completion(_) => 1,
        }
    }

    /// About how long it is.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Commands(commands) => commands
                .iter()
                .flat_map(Cmd::args_iter)
                .map(|arg| match arg {
                    redis::Arg::Simple(bytes) => bytes.len(),
                    _ => 0,
                })
                .sum(),
            Self::Claim(claim) => claim.name.len() + claim.value.len(),
            Self::Completion(ending) => ending.name.len() + ending.names.len() + ending.reply.len(),
        }
    }

    pub(crate) fn is_claim(&self) -> bool {
        matches!(self, Self::Claim(_))
    }
}

impl Claim {
    pub(crate) fn commands(&self) -> [Cmd; 2] {
        let mut set = Cmd::with_capacity(7, self.name.len() + self.value.len() + 32);
        set.arg("SET").arg(&self.name).arg(&self.value).arg("NX").arg("GET").arg("PX").arg(self.ttl_ms);
        let mut pttl = Cmd::with_capacity(2, self.name.len() + 4);
        pttl.arg("PTTL").arg(&self.name);
        [set, pttl]
    }
}

/// One script for all these completions, which are kept for the same time.
pub(crate) fn complete_all<'e>(retention_ms: i64, endings: impl Iterator<Item = &'e Ending> + Clone) -> Cmd {
    let script = &*crate::scripts::COMPLETE_MANY;
    let (mut count, mut bytes) = (0, 64);
    for ending in endings.clone() {
        count += 1;
        bytes += 63 + ending.name.len() + ending.names.len() + ending.reply.len();
    }
    let mut command = Cmd::with_capacity(4 + 5 * count, bytes);
    command.arg("EVALSHA").arg(script.hash()).arg(count);
    for ending in endings.clone() {
        command.arg(&ending.name);
    }
    command.arg(retention_ms);
    for ending in endings {
        command.arg(&ending.owner[..]).arg(&ending.names).arg(&ending.status[..]).arg(&ending.reply);
    }
    command
}
