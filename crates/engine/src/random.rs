//! Randomness, at the edge.

use std::sync::atomic::{AtomicU64, Ordering};

use onlyonce_core::{LeaseToken, Mutant, mutant};

/// A fresh lease token from the operating system's generator.
pub(crate) fn token() -> LeaseToken {
    let mut bytes = [0; 16];
    if mutant(Mutant::TokenIsACounter) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        return LeaseToken::from_bytes(bytes);
    }
    getrandom::fill(&mut bytes).expect("the operating system has random bytes");
    LeaseToken::from_bytes(bytes)
}

/// A number in `0..below`, for jitter; not for secrets, but the source is there.
pub(crate) fn jitter(below: u64) -> u64 {
    getrandom::u64().expect("the operating system has random bytes") % below.max(1)
}
