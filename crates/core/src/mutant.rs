//! Faults that can be put in on purpose, so that the proof is shown to find them.
//!
//! Each is a mistake that idempotency layers of the world have made. They exist in builds with the feature `mutants` and
//! with debug assertions alone, and there only in a process whose environment names one.

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A stale owner may complete over another's reply.
    FencingOff,
    /// The token of a claim is a number that every process counts for itself.
    TokenIsACounter,
    /// A claim looks first and inserts then; who looked in the same 50 ms inserts too.
    CheckThenInsert,
    /// The client gets its answer before the record has it.
    AnswerBeforeRecord,
    /// A client that goes away takes its claim back, whatever was sent on.
    ReleaseOnDisconnect,
    /// A reply in memory is given before the fingerprint is compared.
    CacheBeforeFingerprint,
    /// The purge goes by age, whatever the state.
    PurgeByAge,
    /// The table has no unique constraint: every insert succeeds.
    UniqueDropped,
    /// A transactional claim is committed before the work's own transaction begins.
    ClaimBeforeTransaction,
    /// The work of a transaction is committed before its reply is recorded.
    RecordAfterCommit,
}

impl Mutant {
    /// Each of the leased mode.
    pub const LEASED: [Self; 8] = [
        Self::FencingOff,
        Self::TokenIsACounter,
        Self::CheckThenInsert,
        Self::AnswerBeforeRecord,
        Self::ReleaseOnDisconnect,
        Self::CacheBeforeFingerprint,
        Self::PurgeByAge,
        Self::UniqueDropped,
    ];

    /// Each of the transactional mode.
    pub const TRANSACTIONAL: [Self; 2] = [Self::ClaimBeforeTransaction, Self::RecordAfterCommit];

    /// The environment variable that names one.
    pub const VARIABLE: &str = "ONLYONCE_MUTANT";

    /// As it is named there.
    pub fn name(self) -> &'static str {
        match self {
            Self::FencingOff => "fencing-off",
            Self::TokenIsACounter => "token-is-a-counter",
            Self::CheckThenInsert => "check-then-insert",
            Self::AnswerBeforeRecord => "answer-before-record",
            Self::ReleaseOnDisconnect => "release-on-disconnect",
            Self::CacheBeforeFingerprint => "cache-before-fingerprint",
            Self::PurgeByAge => "purge-by-age",
            Self::UniqueDropped => "unique-dropped",
            Self::ClaimBeforeTransaction => "claim-before-transaction",
            Self::RecordAfterCommit => "record-after-commit",
        }
    }
}

/// Whether this process has this fault.
#[cfg(all(feature = "mutants", debug_assertions))]
pub fn mutant(which: Mutant) -> bool {
    use std::sync::LazyLock;
    static CHOSEN: LazyLock<Option<Mutant>> = LazyLock::new(|| {
        let name = std::env::var(Mutant::VARIABLE).ok()?;
        let mut all = Mutant::LEASED.into_iter().chain(Mutant::TRANSACTIONAL);
        let found = all.find(|mutant| mutant.name() == name);
        Some(found.unwrap_or_else(|| panic!("{}={name} names no mutant", Mutant::VARIABLE)))
    });
    *CHOSEN == Some(which)
}

/// Whether this process has this fault: never.
#[cfg(not(all(feature = "mutants", debug_assertions)))]
pub const fn mutant(_which: Mutant) -> bool {
    false
}
