//! Places at which a process can be made to die, so that it is shown what holds then.
//!
//! In builds with the feature `mutants` and with debug assertions alone, and there only in a process whose environment names
//! a place: `ONLYONCE_CRASH=complete-after` dies there the first time, `complete-after@2` the second time. The crate `fail`
//! does more (sleeps, errors, panics, at run time) by a registry that every place asks; here nothing but a death is wanted,
//! and the release build is to have nothing of it.

/// One place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashPoint {
    /// A claim is asked for, and not committed yet.
    ClaimBefore,
    /// A claim is committed, and nobody was told.
    ClaimAfter,
    /// The claim took over from a dead owner, and nobody was told.
    TakeOverAfter,
    /// A renewal is asked for, and not committed yet.
    RenewBefore,
    /// A renewal is committed.
    RenewAfter,
    /// A reply is to be recorded, and is not committed yet.
    CompleteBefore,
    /// A reply is recorded, and nobody was told.
    CompleteAfter,
    /// A claim is to be given back, and is not yet.
    ReleaseBefore,
    /// A claim is given back.
    ReleaseAfter,
    /// An outcome is to be marked as unknown, and is not yet.
    UnknownBefore,
    /// An outcome is marked as unknown.
    UnknownAfter,
    /// A piece of a purge is to be removed.
    PurgeBefore,
    /// A piece of a purge is removed, and the next is not.
    PurgeAfter,
    /// In a guarded service: before the service behind is asked.
    WorkBefore,
    /// In a guarded service: the head of its reply is here.
    WorkAfter,
    /// In a guarded service: its whole reply is here, and not recorded.
    RecordBefore,
    /// In a guarded service: its reply is recorded, and the client was not answered.
    RecordAfter,
    /// In a transaction of the caller's: claimed, before the work.
    TxClaimed,
    /// In a transaction of the caller's: after the work, before its reply is written.
    TxWorked,
    /// In a transaction of the caller's: before COMMIT is sent.
    TxCommitBefore,
    /// In a transaction of the caller's: committed, and nobody was told.
    TxCommitAfter,
    /// In an inbox: the row of a message is written, before its work in the transaction.
    InboxRow,
    /// In an inbox: after its work in the transaction.
    InboxWork,
    /// In an inbox: its lease is taken, before a handler is asked.
    InboxHandlerBefore,
    /// In an inbox: a handler has done it, and nothing is recorded.
    InboxHandlerAfter,
    /// In an inbox: before a COMMIT.
    InboxCommitBefore,
    /// In an inbox: after a COMMIT.
    InboxCommitAfter,
}

impl CrashPoint {
    /// Those of every store.
    pub const OF_STORES: [Self; 13] = [
        Self::ClaimBefore,
        Self::ClaimAfter,
        Self::TakeOverAfter,
        Self::RenewBefore,
        Self::RenewAfter,
        Self::CompleteBefore,
        Self::CompleteAfter,
        Self::ReleaseBefore,
        Self::ReleaseAfter,
        Self::UnknownBefore,
        Self::UnknownAfter,
        Self::PurgeBefore,
        Self::PurgeAfter,
    ];

    /// Those of a guarded service, a gateway for example.
    pub const OF_SERVICES: [Self; 4] =
        [Self::WorkBefore, Self::WorkAfter, Self::RecordBefore, Self::RecordAfter];

    /// Those of a transaction of the caller's.
    pub const OF_TRANSACTIONS: [Self; 4] =
        [Self::TxClaimed, Self::TxWorked, Self::TxCommitBefore, Self::TxCommitAfter];

    /// Those of an inbox.
    pub const OF_INBOXES: [Self; 6] = [
        Self::InboxRow,
        Self::InboxWork,
        Self::InboxHandlerBefore,
        Self::InboxHandlerAfter,
        Self::InboxCommitBefore,
        Self::InboxCommitAfter,
    ];

    /// The environment variable that names one.
    pub const VARIABLE: &str = "ONLYONCE_CRASH";

    /// As it is named there.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClaimBefore => "claim-before",
            Self::ClaimAfter => "claim-after",
            Self::TakeOverAfter => "take-over-after",
            Self::RenewBefore => "renew-before",
            Self::RenewAfter => "renew-after",
            Self::CompleteBefore => "complete-before",
            Self::CompleteAfter => "complete-after",
            Self::ReleaseBefore => "release-before",
            Self::ReleaseAfter => "release-after",
            Self::UnknownBefore => "unknown-before",
            Self::UnknownAfter => "unknown-after",
            Self::PurgeBefore => "purge-before",
            Self::PurgeAfter => "purge-after",
            Self::WorkBefore => "work-before",
            Self::WorkAfter => "work-after",
            Self::RecordBefore => "record-before",
            Self::RecordAfter => "record-after",
            Self::TxClaimed => "tx-claimed",
            Self::TxWorked => "tx-worked",
            Self::TxCommitBefore => "tx-commit-before",
            Self::TxCommitAfter => "tx-commit-after",
            Self::InboxRow => "inbox-row",
            Self::InboxWork => "inbox-work",
            Self::InboxHandlerBefore => "inbox-handler-before",
            Self::InboxHandlerAfter => "inbox-handler-after",
            Self::InboxCommitBefore => "inbox-commit-before",
            Self::InboxCommitAfter => "inbox-commit-after",
        }
    }
}

/// Ends the process here, if this is the place and the time.
#[cfg(all(feature = "mutants", debug_assertions))]
pub fn crash_point(here: CrashPoint) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static REACHED: AtomicUsize = AtomicUsize::new(0);
    let Some((place, time)) = chosen().filter(|(place, _)| *place == here) else { return };
    if REACHED.fetch_add(1, Ordering::SeqCst) + 1 == time {
        #[allow(clippy::print_stderr, reason = "its last words")]
        {
            eprintln!("dies at {}", place.name());
        }
        std::process::abort();
    }
}

/// Ends the process here, if this is the place and the time: never.
#[cfg(not(all(feature = "mutants", debug_assertions)))]
pub const fn crash_point(_here: CrashPoint) {}

/// Whether the process is to die at one of these places: so that what comes seldom comes soon, and what would come there by the
/// way does not.
#[cfg(all(feature = "mutants", debug_assertions))]
pub fn dies_at(places: &[CrashPoint]) -> bool {
    chosen().is_some_and(|(place, _)| places.contains(&place))
}

/// Whether the process is to die at one of these places: never.
#[cfg(not(all(feature = "mutants", debug_assertions)))]
pub const fn dies_at(_places: &[CrashPoint]) -> bool {
    false
}

#[cfg(all(feature = "mutants", debug_assertions))]
fn chosen() -> Option<(CrashPoint, usize)> {
    use std::sync::LazyLock;
    static CHOSEN: LazyLock<Option<(CrashPoint, usize)>> = LazyLock::new(|| {
        let text = std::env::var(CrashPoint::VARIABLE).ok()?;
        let (name, time) = text.split_once('@').unwrap_or((&text, "1"));
        let all = [
            &CrashPoint::OF_STORES[..],
            &CrashPoint::OF_SERVICES,
            &CrashPoint::OF_TRANSACTIONS,
            &CrashPoint::OF_INBOXES,
        ];
        let place = all.into_iter().flatten().find(|place| place.name() == name);
        let known = place.copied().zip(time.parse().ok());
        Some(known.unwrap_or_else(|| panic!("{}={text} names no place", CrashPoint::VARIABLE)))
    });
    *CHOSEN
}
