//! Of each process at most one transaction waits at the server for each operation.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

/// Whose turn it is to wait at the server, by what tells operations apart there.
pub struct Turns<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

/// A turn; given back when it is dropped.
#[must_use = "dropped, it is given back"]
#[derive(Debug)]
pub struct Turn<'t, K: Hash + Eq> {
    turns: &'t Turns<K>,
    of: K,
    held: Option<OwnedMutexGuard<()>>,
}

impl<K: Hash + Eq + Clone> Turns<K> {
    /// None when others had it all the time.
    pub async fn take(&self, of: K, wait: Duration) -> Option<Turn<'_, K>> {
        let line = Arc::clone(self.0.lock().entry(of.clone()).or_default());
        let mut turn = Turn { turns: self, of, held: None };
        turn.held = match Arc::clone(&line).try_lock_owned() {
            Ok(held) => Some(held),
            Err(_) => timeout(wait, line.lock_owned()).await.ok(),
        };
        turn.held.is_some().then_some(turn)
    }
}

impl<K: Hash + Eq> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        self.held = None;
        let mut lines = self.turns.0.lock();
        // Nobody but the map knows it: nobody waits.
        if lines.get(&self.of).is_some_and(|line| Arc::strong_count(line) == 1) {
            lines.remove(&self.of);
        }
    }
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K> fmt::Debug for Turns<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Turns({})", self.0.lock().len())
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
