//! How operations are treated, and how much of anything there may be.

use std::time::Duration;

use onlyonce_core::OnLeaseEnd;

/// How an operation is treated. Several policies may share one engine and one store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long a claim holds without renewal. 30 s. The heartbeat renews at a third of it.
    pub lease: Duration,
    /// How long a reply is kept after completion. 24 h; at least twice the lease.
    pub retention: Duration,
    /// How long a duplicate waits for the result of the one in flight. Zero: not at all.
    pub wait: Duration,
    /// What may happen when a lease ends without completion. Take over, by default.
    pub on_lease_end: OnLeaseEnd,
    /// No takeover past this many attempts: the outcome is unknown instead. 5.
    pub max_attempts: u32,
    /// How long the work may take. After it renewal stops and the outcome is unknown. 10 min.
    pub work_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(24 * 3600),
            wait: Duration::ZERO,
            on_lease_end: OnLeaseEnd::TakeOver,
            max_attempts: 5,
            work_timeout: Duration::from_secs(600),
        }
    }
}

/// Why a policy was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidPolicy {
    /// A lease must leave time for three renewals.
    #[error("the lease is {lease:?}; it must be at least 100 ms")]
    LeaseTooShort {
        /// What was given.
        lease: Duration,
    },
    /// A reply must outlive the lease of a duplicate that is still under way.
    #[error("the retention is {retention:?}; it must be at least twice the lease ({lease:?})")]
    RetentionTooShort {
        /// What was given.
        retention: Duration,
        /// The lease.
        lease: Duration,
    },
    /// Durations are kept in milliseconds in 64 bits, and a typing error must not make a record immortal.
    #[error("{what} is {value:?}; the limit is ten years")]
    TooLong {
        /// Which member.
        what: &'static str,
        /// What was given.
        value: Duration,
    },
    /// There is always a first attempt.
    #[error("max_attempts must be at least 1")]
    NoAttempts,
}

impl Policy {
    /// Checks the members against each other.
    ///
    /// # Errors
    /// [`InvalidPolicy`], the first that is wrong.
    pub fn check(&self) -> Result<(), InvalidPolicy> {
        const MAX: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
        let (lease, retention) = (self.lease, self.retention);
        let spans = [
            ("lease", lease),
            ("retention", retention),
            ("wait", self.wait),
            ("work_timeout", self.work_timeout),
        ];
        if let Some((what, value)) = spans.into_iter().find(|(_, value)| *value > MAX) {
            return Err(InvalidPolicy::TooLong { what, value });
        }
        if lease < Duration::from_millis(100) {
            return Err(InvalidPolicy::LeaseTooShort { lease });
        }
        if retention < lease * 2 {
            return Err(InvalidPolicy::RetentionTooShort { retention, lease });
        }
        if self.max_attempts == 0 {
            return Err(InvalidPolicy::NoAttempts);
        }
        Ok(())
    }
}

/// How much of anything one engine may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Operations claimed or running at once. Past it: [`EngineError::Overloaded`](crate::EngineError::Overloaded),
    /// before anything is claimed. 10 000.
    pub max_in_flight: usize,
    /// Duplicates that wait at once. Past it they are answered in progress at once. 65 536.
    pub max_waiters: usize,
    /// Replies kept in memory for replays, in bytes. 8 MiB. Zero: no cache.
    pub cache_bytes: u64,
    /// How long a reply may be served from memory: the bound on how late an operator's change elsewhere is seen. 60 s.
    pub cache_ttl: Duration,
    /// How long one question to the store may take, asking again included. 2 s.
    pub store_timeout: Duration,
    /// How often expired records are looked for, jittered by a quarter. 60 s. Zero: never.
    pub purge_interval: Duration,
    /// How long records without a reply are kept after their lease. 7 days.
    pub hold_retention: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_in_flight: 10_000,
            max_waiters: 65_536,
            cache_bytes: 8 << 20,
            cache_ttl: Duration::from_secs(60),
            store_timeout: Duration::from_secs(2),
            purge_interval: Duration::from_secs(60),
            hold_retention: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_checked_as_a_whole() {
        let ok = Policy::default();
        assert_eq!(ok.check(), Ok(()));
        let secs = Duration::from_secs;
        let lease = Duration::from_millis(99);
        assert_eq!(Policy { lease, ..ok.clone() }.check(), Err(InvalidPolicy::LeaseTooShort { lease }));
        let retention = secs(59);
        assert_eq!(
            Policy { retention, ..ok.clone() }.check(),
            Err(InvalidPolicy::RetentionTooShort { retention, lease: secs(30) })
        );
        assert_eq!(Policy { retention: secs(60), ..ok.clone() }.check(), Ok(()));
        let value = Duration::MAX;
        assert_eq!(
            Policy { wait: value, ..ok.clone() }.check(),
            Err(InvalidPolicy::TooLong { what: "wait", value })
        );
        assert_eq!(Policy { max_attempts: 0, ..ok }.check(), Err(InvalidPolicy::NoAttempts));
    }
}
