//! Every reading of time in the product.
//!
//! Two clocks: the **boot clock** (`CLOCK_BOOTTIME`) never steps and counts while the machine is suspended, so
//! leases and deadlines run on it; the **wall clock** is for retention and for people.
#![allow(clippy::disallowed_methods, reason = "the home of the clocks")]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

/// A source of time.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Time since boot, suspended time included. Never goes back while the machine runs.
    fn boot(&self) -> Duration;

    /// The wall clock. May step either way at any moment.
    fn wall(&self) -> SystemTime;
}

/// The clocks of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn boot(&self) -> Duration {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let id = rustix::time::ClockId::Boottime;
        // Elsewhere the monotonic clock is the closest: a lease then stands still in suspend.
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let id = rustix::time::ClockId::Monotonic;
        let now = rustix::time::clock_gettime(id);
        Duration::new(
            u64::try_from(now.tv_sec).expect("the boot clock starts at zero"),
            u32::try_from(now.tv_nsec).expect("under a second"),
        )
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that moves only when told: for tests.
#[derive(Clone, Debug)]
pub struct TestClock(Arc<Mutex<(Duration, SystemTime)>>);

impl Default for TestClock {
    fn default() -> Self {
        Self::new()
    }
}

impl TestClock {
    /// Starts a thousand seconds after boot, on 2026-01-01 00:00:00 UTC.
    pub fn new() -> Self {
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        Self(Arc::new(Mutex::new((Duration::from_secs(1000), wall))))
    }

    /// Lets both clocks run on by `by`.
    pub fn advance(&self, by: Duration) {
        let mut now = self.0.lock();
        now.0 += by;
        now.1 += by;
    }

    /// Steps the wall clock alone forward, as a clock daemon does.
    pub fn step_wall_forward(&self, by: Duration) {
        self.0.lock().1 += by;
    }

    /// Steps the wall clock alone back.
    pub fn step_wall_back(&self, by: Duration) {
        self.0.lock().1 -= by;
    }
}

impl Clock for TestClock {
    fn boot(&self) -> Duration {
        self.0.lock().0
    }

    fn wall(&self) -> SystemTime {
        self.0.lock().1
    }
}

/// Milliseconds since the Unix epoch, as stores keep wall time. Times before the epoch are 0.
pub fn unix_ms(at: SystemTime) -> i64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

/// The inverse of [`unix_ms`]; negative values are the epoch.
pub fn from_unix_ms(ms: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}
