//! Randomness, at the edge.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onlyonce_core::{LeaseToken, Mutant, mutant};

/// A source of lease tokens and jitter.
///
/// The operating system's generator is the right one. Another is for simulations, which must be the same again: whoever can
/// foresee a token can act as its owner.
pub trait Random: Debug + Send + Sync + 'static {
    /// Fills `bytes` with random ones.
    fn fill(&self, bytes: &mut [u8]);
}

/// The generator of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        getrandom::fill(bytes).expect("the operating system has random bytes");
    }
}

/// What an engine draws from its source.
#[derive(Debug)]
pub(crate) struct Draws {
    source: Arc<dyn Random>,
    // Of a mutant.
    counted: AtomicU64,
}

impl Draws {
    pub(crate) fn new(source: Arc<dyn Random>) -> Self {
        Self { source, counted: AtomicU64::new(1) }
    }

    /// A fresh lease token.
    pub(crate) fn token(&self) -> LeaseToken {
        let mut bytes = [0; 16];
        if mutant(Mutant::TokenIsACounter) {
            bytes[..8].copy_from_slice(&self.counted.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        } else {
            self.source.fill(&mut bytes);
        }
        LeaseToken::from_bytes(bytes)
    }

    /// A number in `0..below`, for jitter.
    pub(crate) fn jitter(&self, below: u64) -> u64 {
        let mut bytes = [0; 8];
        self.source.fill(&mut bytes);
        u64::from_le_bytes(bytes) % below.max(1)
    }
}
