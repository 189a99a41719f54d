//! What happened, counted.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        /// Counts since the engine was built.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts { $($(#[doc = $doc])* pub $name: u64,)* }

        impl Counts {
            /// Each with its name and what it counts, for whoever shows them all.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + use<> {
                [$((stringify!($name), concat!($($doc),*), self.$name),)*].into_iter()
            }
        }

        impl Counters {
            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Questions put to the store: claims.
    claims,
    /// Operations acquired, takeovers among them.
    acquired,
    /// Operations acquired after another owner's lease ended, or freed by an operator: attempt 2 and later.
    takeovers,
    /// Replies recorded.
    completed,
    /// Replies recorded though the record was gone.
    completed_anew,
    /// Replies that could not be recorded in time.
    not_recorded,
    /// Those of them that were recorded later all the same.
    recorded_late,
    /// Operations released.
    released,
    /// Operations that ended with an unknown outcome.
    unknown,
    /// Owners that found another one in their place.
    fenced,
    /// Duplicates answered from memory.
    replayed_from_memory,
    /// Duplicates answered from the store.
    replayed_from_store,
    /// Duplicates answered in progress.
    in_progress,
    /// Requests whose key belongs to another.
    mismatches,
    /// Leases renewed.
    renewals,
    /// Calls of the store that failed.
    store_errors,
    /// Expired records removed.
    purged,
    /// Operations refused because too many were in flight.
    overloaded,
}

pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
