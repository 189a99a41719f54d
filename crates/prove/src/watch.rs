//! Looks at the processes of a run, again and again while it goes on.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::clients::Callers;
use crate::gauge::held;
use crate::series::{PROVER, Series};
use crate::subject::Subject;

/// So often in a run.
const LOOKS: u32 = 200;
const EVERY_MIN: Duration = Duration::from_secs(1);

pub(crate) struct Watch {
    began: Instant,
    every: Duration,
    series: Mutex<Series>,
}

impl Watch {
    pub(crate) fn new(began: Instant, planned: Duration) -> Self {
        let every = (planned / LOOKS).max(EVERY_MIN);
        Self { began, every, series: Mutex::new(Series::new(planned)) }
    }

    /// Looks until it is dropped.
    pub(crate) async fn run<D>(&self, subject: &Subject, callers: &Callers<D>) -> std::convert::Infallible {
        let mut turn = interval_at(Instant::now() + self.every, self.every);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut begun = 0;
        loop {
            turn.tick().await;
            let (now, all) = (self.began.elapsed(), callers.begun());
            let mut series = self.series.lock();
            series.answered(now, all - begun, callers.take_times());
            begun = all;
            if let Ok(held) = held(std::process::id()) {
                series.looked(PROVER, Duration::ZERO, now, held);
            }
            for (name, pid, since) in subject.processes() {
                // One that was killed just now is not there to be looked at; its successor is, next time.
                if let Ok(held) = held(pid) {
                    series.looked(&name, since.saturating_duration_since(self.began), now, held);
                }
            }
        }
    }

    pub(crate) fn finish(self) -> Series {
        let mut series = self.series.into_inner();
        series.finish();
        series
    }
}
