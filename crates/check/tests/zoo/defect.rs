//! What is wrong with each server of the zoo. Every one was seen in a real product.

/// An enum and the list of all its variants.
macro_rules! defects {
    ($($(#[doc = $what:literal])+ $name:ident,)+) => {
        /// The one thing that a server gets wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Defect {
            $($(#[doc = $what])+ $name,)+
        }

        impl Defect {
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name as it is given to another process.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }
        }
    };
}

defects! {
    // Claiming.
    /// Looks the key up, and inserts it a moment later.
    CheckThenInsert,
    /// Claims nothing: a copy that comes while the first one runs, runs too.
    NoClaim,
    /// As check-then-insert, with a constraint below; the violation comes out as a 500.
    LosersGet500,
    /// A refused duplicate frees the key of the request that still runs.
    RefusedDuplicateFrees,
    /// The lock ends long before the work does, and nobody renews it.
    LockTooShort,
    /// The lock stays for its own long time though the work has ended without a final result.
    LockOutlivesWork,
    /// The lock stays for a while though the result is there, and is asked first.
    LockHidesResult,
    /// Each of two workers remembers only what it did itself.
    PerWorker,
    /// Remembers the last few keys alone.
    FewKeys,
    /// One key in flight keeps all the others waiting.
    OneLockForAll,
    /// A copy in flight waits, and then gets an answer that is not the first one's.
    WaiterGetsEmpty,

    // The key.
    /// Runs what carries no key.
    MissingKeyRuns,
    /// Takes the empty key as one key of all.
    EmptyKeyIsAKey,
    /// Takes the first of two keys.
    FirstOfTwoKeys,
    /// Keeps 64 characters of a key.
    KeyTruncated,
    /// Keeps keys in lower case.
    KeyCaseFolded,
    /// Cuts blanks off the key inside its quotes.
    KeyTrimmed,
    /// Takes `"k"` and `k` for two keys.
    QuotedIsAnother,
    /// A key over 100 characters does not fit its column: 500.
    LongKeyIs500,
    /// Keys of all principals are in one place.
    GlobalScope,

    // The fingerprint.
    /// Compares nothing: any body gets the first answer.
    NoFingerprint,
    /// Compares the first 30 KB.
    FingerprintOfPrefix,
    /// Compares numbers as floating point.
    FingerprintOfDoubles,
    /// Compares all but the query.
    QueryIgnored,
    /// Compares all but the path.
    PathIgnored,
    /// Compares all but the method.
    MethodIgnored,
    /// The body is a part of the key: another body runs.
    MismatchRuns,
    /// The refusal of another body becomes the stored answer.
    MismatchPoisons,
    /// The refusal of another body frees the key.
    MismatchFrees,
    /// Refuses another body as if the key was in progress.
    MismatchIs409,
    /// While the first one runs, another body is not compared.
    InFlightFirst,

    // What is stored.
    /// Stores a 503 as the final answer.
    FivexxStored,
    /// Frees the key after a definitive refusal.
    FourxxNotStored,
    /// Does not store a big answer, and runs again.
    BigAnswerNotStored,
    /// The work dies with the connection, its lock stays.
    StuckAfterDisconnect,
    /// The connection ends after the work, before the record, and frees the key.
    RunsAgainAfterDisconnect,
    /// Claims on the head of a request; half a request holds the key for ever.
    StuckAfterHalf,
    /// Lets bodies over 1 MiB through without looking at their key.
    UnguardedBig,
    /// Half a body is taken for a whole one; its refusal is the stored answer.
    HalfBodyPoisons,

    // The replay.
    /// Runs the work again, and answers the first answer.
    ReplayRuns,
    /// Forgets the key on the first duplicate, so that every second duplicate runs.
    EverySecondRuns,
    /// Renders the answer anew from what is there now.
    ReplayOfNow,
    /// Replays any status as 200.
    ReplayIs200,
    /// Replays the content type alone.
    HeadersLost,
    /// Replays all headers but `Location`.
    LocationLost,
    /// Replays the last of several headers of one name.
    RepeatedCollapsed,
    /// Replays through a text decoder.
    TextDecoded,
    /// Replays without `Content-Encoding`.
    EncodingLost,
    /// Replays JSON written anew, its members sorted.
    JsonRewritten,
    /// Replays the first bytes of an answer, with a length that is right for them.
    ReplayTruncated,
    /// Replays the first caller's cookie.
    SetCookieReplayed,
    /// Marks the first answer as a replay.
    MarkerOnFirst,
    /// Marks nothing.
    NoMarker,
    /// Marks whatever the client says is a replay.
    MarkerForged,

    // How it refuses.
    /// Says in progress, but not when to come back.
    NoRetryAfter,
    /// Refuses in plain text.
    PlainRefusals,
    /// Refuses without a link to documentation.
    NoLinks,
    /// Does not say when a key expires.
    NoExpiry,

    // Crashes.
    /// Locks are durable, and nothing ends those of a process that died.
    StuckAfterCrash,
    /// The work is durable before the record is.
    RunsAgainAfterCrash,
    /// The work is durable, keys are in memory.
    ForgetsOnRestart,

    // No such thing as a key.
    /// Never heard of the header.
    NoKeys,
    /// One answer for everything, whatever comes.
    Constant,
    /// 404 for everything.
    NotFound,
    /// 500 for everything.
    Broken,
    /// Answers what it was sent, and does nothing.
    Echo,
}
