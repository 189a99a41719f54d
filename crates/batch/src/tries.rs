//! How often, and how soon, a transaction that others went before is run again.

use std::time::Duration;

use onlyonce_core::{StoreError, StoreErrorKind};
use tokio::time::sleep;

/// The tries of one transaction.
#[derive(Debug)]
pub struct Tries {
    made: u32,
    pause: Duration,
}

const TRIES_MAX: u32 = 10;
const PAUSE_MAX: Duration = Duration::from_millis(200);

impl Default for Tries {
    fn default() -> Self {
        Self { made: 0, pause: Duration::from_millis(2) }
    }
}

impl Tries {
    /// Whether to try; the first time at once, then after a pause. False when all are used up.
    pub async fn next(&mut self) -> bool {
        if self.made > 0 && self.made < TRIES_MAX {
            // Those that met once do not meet again at the same moment.
            let mut part = [0];
            let _ = getrandom::fill(&mut part);
            sleep(self.pause.mul_f64(f64::from(part[0]) / 255.0 + 0.5)).await;
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        self.made += 1;
        self.made <= TRIES_MAX
    }

    /// The error of a transaction whose tries are used up.
    pub fn used_up(operation: &'static str) -> StoreError {
        StoreError::new(StoreErrorKind::Conflict, operation)
            .with_detail(format!("other transactions went first {TRIES_MAX} times"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn there_are_ten() {
        let mut tries = Tries::default();
        let mut made = 0;
        while tries.next().await {
            made += 1;
        }
        assert_eq!(made, 10);
        assert!(!tries.next().await);
        assert!(Tries::used_up("once").to_string().contains("10 times"));
    }
}
