//! Randomness, at the edge.

use onlyonce_core::LeaseToken;

/// A fresh lease token from the operating system's generator.
pub(crate) fn token() -> LeaseToken {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random bytes");
    LeaseToken::from_bytes(bytes)
}

/// A number in `0..below`, for jitter; not for secrets, but the source is there.
pub(crate) fn jitter(below: u64) -> u64 {
    getrandom::u64().expect("the operating system has random bytes") % below.max(1)
}
