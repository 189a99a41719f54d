//! Who may work on an operation, and for how long.

use std::fmt;
use std::time::Duration;

/// 128 random bits that name one owner of one operation. Never shared, never reused.
///
/// A token is not a counter: a stale owner must not be able to meet the token of a later one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeaseToken([u8; 16]);

impl LeaseToken {
    /// Takes 16 bytes from a cryptographic random source; the engine does this at its edge.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, for a store to keep.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

// The first four bytes are enough to tell owners apart in a log, and not enough to act as one.
impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "LeaseToken({a:02x}{b:02x}{c:02x}{d:02x}…)")
    }
}

/// The right to work on one operation, as the store granted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Names the owner; renew, complete and release need it.
    pub token: LeaseToken,
    /// 1 for the first run, one more for each takeover.
    pub attempt: u32,
    /// How long it runs, counted by the owner from the instant before it SENT the claim.
    pub duration: Duration,
}

/// What may happen when a lease ends without completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnLeaseEnd {
    /// A retry takes the operation over and runs it again (mission S3.4): the work can tell a second attempt
    /// by its `attempt` and its downstream keys.
    TakeOver,
    /// Nobody runs it again: the outcome is unknown until an operator, or the late owner itself, says what it was.
    Hold,
}
