//! Whether the store answers and takes writes, asked rarely however often it is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::{ListQuery, StateName, StoreAdmin};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// How long an answer is as good as a fresh one.
const FRESH: Duration = Duration::from_secs(1);

/// The same of the number of unknown outcomes, which costs more to count.
const COUNT_FRESH: Duration = Duration::from_secs(15);

/// More are not counted.
const UNKNOWN_MAX: u32 = 1000;

#[derive(Clone, Debug)]
pub(super) struct Health(Arc<State>);

#[derive(Debug)]
struct State {
    store: Arc<dyn StoreAdmin>,
    patience: Duration,
    // Held while asking, so that there is one question at a time.
    last: Mutex<Option<(Instant, Result<(), String>)>>,
    counted: Mutex<Option<Instant>>,
    unknown: AtomicU64,
    up: AtomicU64,
}

impl Health {
    pub(super) fn new(store: Arc<dyn StoreAdmin>, patience: Duration) -> Self {
        Self(Arc::new(State {
            store,
            patience,
            last: Mutex::default(),
            counted: Mutex::default(),
            unknown: AtomicU64::new(0),
            up: AtomicU64::new(0),
        }))
    }

    /// Whether the store answers and takes a write; else why not.
    pub(super) async fn store(&self) -> Result<(), String> {
        let state = &*self.0;
        let mut last = state.last.lock().await;
        if let Some((at, answer)) = &*last
            && at.elapsed() < FRESH
        {
            return answer.clone();
        }
        let answer = match timeout(state.patience, state.store.probe()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {:?}", state.patience)),
        };
        state.up.store(answer.is_ok().into(), Ordering::Relaxed);
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    /// Looks for outcomes that wait for an operator, if that was not done just now.
    pub(super) async fn count_unknown(&self) {
        let state = &*self.0;
        let mut counted = state.counted.lock().await;
        if counted.is_some_and(|at| at.elapsed() < COUNT_FRESH) {
            return;
        }
        let query = ListQuery { state: Some(StateName::Unknown), limit: UNKNOWN_MAX, ..ListQuery::default() };
        if let Ok(Ok(page)) = timeout(state.patience, state.store.list(&query)).await {
            state.unknown.store(page.records.len() as u64, Ordering::Relaxed);
        }
        *counted = Some(Instant::now());
    }

    /// As of the last count, at most 1000.
    pub(super) fn unknown(&self) -> u64 {
        self.0.unknown.load(Ordering::Relaxed)
    }

    /// As of the last question.
    pub(super) fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Relaxed) == 1
    }
}
