//! Callers that each work by hand on a connection of their own.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use onlyonce_core::{Fingerprint, Key, OnceOutcome, Operation, Scope};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::keys::Keys;
use crate::measure::{Sample, Stretch, Subject, now};
use crate::store::{REPLY_BODY, SCOPE};

/// As many callers, each with a connection where it works by hand.
pub(crate) const CALLERS: usize = 64;

/// What a caller does again and again.
pub(crate) trait Caller: Send + 'static {
    fn once(&mut self, key: String) -> impl Future<Output = Result<()>> + Send;
}

/// All of `idle` at once, each for itself.
pub(crate) fn on_connections<'a, C: Caller>(
    runtime: &'a Runtime,
    name: &str,
    mut idle: Vec<C>,
) -> Subject<'a> {
    let keys = Arc::new(Keys::unique());
    let name = name.to_owned();
    Subject::new(name, move |time| {
        let callers = std::mem::take(&mut idle);
        let (sample, callers) = runtime.block_on(all(callers, &keys, time))?;
        idle = callers;
        Ok(sample)
    })
}

async fn all<C: Caller>(callers: Vec<C>, keys: &Arc<Keys>, time: Duration) -> Result<(Sample, Vec<C>)> {
    let stretch = Stretch::start();
    let end = now() + time;
    let mut tasks = JoinSet::new();
    for mut caller in callers {
        let keys = keys.clone();
        tasks.spawn(async move {
            let mut times = Vec::new();
            let mut begun = now();
            while begun < end {
                caller.once(keys.next()).await?;
                let ended = now();
                times.push(ended - begun);
                begun = ended;
            }
            anyhow::Ok((caller, times))
        });
    }
    let (mut callers, mut times) = (Vec::new(), Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (caller, its) = done??;
        callers.push(caller);
        times.extend(its);
    }
    Ok((Sample::new(times, &stretch)?, callers))
}

/// The operation of a key.
pub(crate) fn operation(key: String) -> Result<Operation> {
    Ok(Operation::new(Scope::new(SCOPE)?, Key::new(key)?, Fingerprint::of(REPLY_BODY)))
}

/// # Errors
/// When a new key did not run.
pub(crate) fn ran(outcome: &OnceOutcome) -> Result<()> {
    anyhow::ensure!(matches!(outcome, OnceOutcome::Ran(_)), "a new key did not run: {outcome:?}");
    Ok(())
}
