//! Keys as clients send them: UUID-like text in no order, which touches random pages of an index.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of one key.
pub(crate) const KEY_BYTES: usize = 36;

/// A source of keys, shared by all callers of a run.
#[derive(Debug)]
pub(crate) struct Keys {
    next: AtomicU64,
    // After so many the same ones come again.
    cycle: u64,
}

impl Keys {
    /// Keys that never come again, in this process.
    pub(crate) fn unique() -> Self {
        static SOURCES: AtomicU64 = AtomicU64::new(1);
        let source = SOURCES.fetch_add(1, Ordering::Relaxed);
        Self { next: AtomicU64::new(source << 40), cycle: u64::MAX }
    }

    /// The same `count` keys over and over.
    pub(crate) fn cycle(count: u64) -> Self {
        Self { next: AtomicU64::new(0), cycle: count }
    }

    /// Writes the next key over `slot`, which is [`KEY_BYTES`] long.
    pub(crate) fn write(&self, slot: &mut [u8]) {
        let n = self.next.fetch_add(1, Ordering::Relaxed) % self.cycle;
        // Both are one-to-one in `n`: no two keys meet.
        let (high, low) = (mix(n), mix(n ^ 0x5555_5555_5555_5555));
        let digits = (u128::from(high) << 64) | u128::from(low);
        let mut shift = 128;
        for (at, byte) in slot.iter_mut().enumerate() {
            *byte = match at {
                8 | 13 | 18 | 23 => b'-',
                _ => {
                    shift -= 4;
                    b"0123456789abcdef"[(digits >> shift) as usize & 15]
                }
            };
        }
    }

    /// The next key as text.
    pub(crate) fn next(&self) -> String {
        let mut key = vec![0; KEY_BYTES];
        self.write(&mut key);
        String::from_utf8(key).expect("hexadecimal digits and dashes")
    }
}

// The finaliser of SplitMix64: a bijection.
fn mix(n: u64) -> u64 {
    let n = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn unique_keys_never_meet_and_a_cycle_comes_round() {
        let (a, b) = (Keys::unique(), Keys::unique());
        let keys: HashSet<String> = (0..1000).flat_map(|_| [a.next(), b.next()]).collect();
        assert_eq!(keys.len(), 2000);
        assert!(keys.iter().all(|key| key.len() == KEY_BYTES && key.split('-').count() == 5));
        let cycle = Keys::cycle(10);
        let keys: HashSet<String> = (0..100).map(|_| cycle.next()).collect();
        assert_eq!(keys.len(), 10);
    }
}
