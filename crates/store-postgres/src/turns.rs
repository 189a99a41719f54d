//! Of each process at most one transaction waits at the server for each operation.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

/// Whose turn it is to wait at the server, by the number of the operation's lock.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<i64, Arc<tokio::sync::Mutex<()>>>>);

/// A turn; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'t> {
    turns: &'t Turns,
    lock: i64,
    held: Option<OwnedMutexGuard<()>>,
}

impl Turns {
    /// None when others had it all the time.
    pub(crate) async fn take(&self, lock: i64, wait: Duration) -> Option<Turn<'_>> {
        let line = Arc::clone(self.0.lock().entry(lock).or_default());
        let mut turn = Turn { turns: self, lock, held: None };
        turn.held = match Arc::clone(&line).try_lock_owned() {
            Ok(held) => Some(held),
            Err(_) => timeout(wait, line.lock_owned()).await.ok(),
        };
        turn.held.is_some().then_some(turn)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.held = None;
        let mut lines = self.turns.0.lock();
        // Nobody but the map knows it: nobody waits.
        if lines.get(&self.lock).is_some_and(|line| Arc::strong_count(line) == 1) {
            lines.remove(&self.lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_has_the_turn_of_an_operation_and_none_is_left_behind() {
        let turns = Turns::default();
        let first = turns.take(1, Duration::ZERO).await.unwrap();
        assert!(turns.take(1, Duration::from_millis(5)).await.is_none());
        let other = turns.take(2, Duration::ZERO).await.unwrap();
        let (second, ()) = tokio::join!(turns.take(1, Duration::from_secs(30)), async {
            tokio::task::yield_now().await;
            drop(first);
        });
        drop((second.unwrap(), other));
        assert!(turns.0.lock().is_empty());
    }
}
