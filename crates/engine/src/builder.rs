//! Builds an engine and starts its background tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;

use onlyonce_core::{Clock, OnLeaseEnd, Store, SystemClock};
use parking_lot::Mutex;

use crate::background;
use crate::cache::ReplayCache;
use crate::counters::Counters;
use crate::flight::Flights;
use crate::idempotency::{Idempotency, Shared};
use crate::policy::{InvalidPolicy, Limits, Policy};
use crate::random::{Draws, Random, SystemRandom};
use crate::slots::Slots;
use crate::store_calls::{BACKGROUND_RELEASES_MAX, Contact, LATE_COMPLETIONS_MAX};

const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Collects policy and limits; see [`Policy`] and [`Limits`] for the defaults.
#[must_use = "nothing is built before `build`"]
#[derive(Debug)]
pub struct Builder {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    policy: Policy,
    limits: Limits,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident).+;)*) => {
        $($(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$($field).+ = $name;
            self
        })*
    };
}

impl Builder {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            clock: Arc::new(SystemClock),
            random: Arc::new(SystemRandom),
            policy: Policy::default(),
            limits: Limits::default(),
        }
    }

    setters! {
        /// Sets the whole policy.
        policy: Policy => policy;
        /// See [`Policy::lease`].
        lease: Duration => policy.lease;
        /// See [`Policy::retention`].
        retention: Duration => policy.retention;
        /// See [`Policy::wait`].
        wait: Duration => policy.wait;
        /// See [`Policy::on_lease_end`].
        on_lease_end: OnLeaseEnd => policy.on_lease_end;
        /// See [`Policy::max_attempts`].
        max_attempts: u32 => policy.max_attempts;
        /// See [`Policy::work_timeout`].
        work_timeout: Duration => policy.work_timeout;
        /// Sets all limits.
        limits: Limits => limits;
        /// See [`Limits::max_in_flight`].
        max_in_flight: usize => limits.max_in_flight;
        /// See [`Limits::cache_bytes`].
        cache_bytes: u64 => limits.cache_bytes;
        /// See [`Limits::store_timeout`].
        store_timeout: Duration => limits.store_timeout;
        /// See [`Limits::purge_interval`].
        purge_interval: Duration => limits.purge_interval;
        /// The clock of deadlines; the system's by default.
        clock: Arc<dyn Clock> => clock;
        /// The source of lease tokens and jitter; the operating system's by default. Another is for simulations alone.
        random: Arc<dyn Random> => random;
    }

    /// After a lease nobody takes over: the outcome is unknown until it is resolved.
    pub fn hold(self) -> Self {
        self.on_lease_end(OnLeaseEnd::Hold)
    }

    /// Builds the engine and starts heartbeat and purge on the current tokio runtime. They end with the last handle.
    ///
    /// # Panics
    /// Outside a tokio runtime, and on a policy that [`Policy::check`] refuses: for settings that come from outside use
    /// [`try_build`](Self::try_build).
    pub fn build(self) -> Idempotency {
        match self.try_build() {
            Ok(idempotency) => idempotency,
            Err(error) => panic!("invalid policy: {error}"),
        }
    }

    /// Like [`build`](Self::build), with the policy's error returned.
    ///
    /// # Errors
    /// [`InvalidPolicy`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn try_build(self) -> Result<Idempotency, InvalidPolicy> {
        self.policy.check()?;
        let mut limits = self.limits;
        limits.max_in_flight = limits.max_in_flight.max(1);
        // Longer is for ever, and sums with it must not overflow.
        limits.store_timeout = limits.store_timeout.min(LONGEST);
        limits.purge_interval = limits.purge_interval.min(LONGEST);
        let started_ms = self.clock.boot().as_millis() as u64;
        let shared = Arc::new(Shared {
            network: self.store.capabilities().network,
            store: self.store,
            clock: self.clock,
            random: Draws::new(self.random),
            flights: Flights::new(),
            cache: ReplayCache::new(limits.cache_bytes, limits.cache_ttl),
            counters: Counters::default(),
            slots: Slots::new(limits.max_in_flight),
            waiting: AtomicUsize::new(0),
            background_releases: Slots::new(BACKGROUND_RELEASES_MAX),
            unanswered_releases: Slots::new(BACKGROUND_RELEASES_MAX),
            late_completions: Slots::new(LATE_COMPLETIONS_MAX),
            contact: Mutex::new(Contact::new()),
            shortest_lease_ms: AtomicU64::new(self.policy.lease.as_millis() as u64),
            purged_through_ms: AtomicU64::new(started_ms),
            heartbeat_wake: Arc::default(),
            closing: AtomicBool::new(false),
            limits,
        });
        background::start(&shared);
        Ok(Idempotency { shared, policy: Arc::new(self.policy) })
    }
}
