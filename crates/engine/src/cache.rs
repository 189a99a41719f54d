//! Replays from memory: completed records only, for they never change.

use std::time::Duration;

use onlyonce_core::{Fingerprint, OperationId, StoredReply};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

#[derive(Debug)]
pub(crate) struct ReplayCache {
    entries: Option<Cache<OperationId, Entry, ByBytes>>,
    ttl: Duration,
}

#[derive(Clone, Debug)]
struct Entry {
    fingerprint: Fingerprint,
    stored: StoredReply,
    // On the boot clock: an entry is served until the one, and its record expires at the other.
    served_until: Duration,
    expires: Duration,
    // The cache asks more than once.
    weight_bytes: u64,
}

/// A hit: the fingerprint is the caller's to compare, before anything else.
pub(crate) struct Hit {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) stored: StoredReply,
}

#[derive(Clone, Debug)]
struct ByBytes;

impl Weighter<OperationId, Entry> for ByBytes {
    fn weight(&self, _: &OperationId, entry: &Entry) -> u64 {
        entry.weight_bytes
    }
}

impl ReplayCache {
    pub(crate) fn new(bytes: u64, ttl: Duration) -> Self {
        // The estimate sizes the table: replies of about 1 KiB.
        let entries =
            (bytes > 0).then(|| Cache::with_weighter((bytes / 1024).max(16) as usize, bytes, ByBytes));
        Self { entries, ttl }
    }

    pub(crate) fn find(&self, id: &OperationId, now: Duration) -> Option<Hit> {
        let entries = self.entries.as_ref()?;
        let entry = entries.get(id)?;
        if entry.served_until <= now {
            entries.remove(id);
            return None;
        }
        let stored = StoredReply { remaining: entry.expires.saturating_sub(now), ..entry.stored };
        Some(Hit { fingerprint: entry.fingerprint, stored })
    }

    pub(crate) fn put(
        &self,
        id: &OperationId,
        fingerprint: &Fingerprint,
        stored: &StoredReply,
        now: Duration,
    ) {
        let Some(entries) = &self.entries else { return };
        let origin = stored.origin.as_ref().map_or(0, |origin| origin.as_str().len());
        let names = id.scope.as_str().len() + id.key.as_str().len() + origin;
        let overhead = size_of::<(OperationId, Entry)>() + 96;
        let entry = Entry {
            fingerprint: *fingerprint,
            // In memory of its own, or the weight would not be the truth: a small body may pin a connection's buffer.
            stored: StoredReply { reply: stored.reply.detached(), ..stored.clone() },
            served_until: now + self.ttl.min(stored.remaining),
            expires: now + stored.remaining,
            weight_bytes: (overhead + names + stored.reply.weight_bytes()) as u64,
        };
        entries.insert(id.clone(), entry);
    }

    /// How many replies there are, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        self.entries.as_ref().map_or((0, 0), |entries| (entries.len(), entries.weight()))
    }

    pub(crate) fn forget(&self, id: &OperationId) {
        if let Some(entries) = &self.entries {
            entries.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use onlyonce_core::{Key, Reply, Scope};

    fn id(key: usize) -> OperationId {
        OperationId { scope: Scope::anonymous(), key: Key::new(key.to_string()).unwrap() }
    }

    fn stored(bytes: usize, remaining: u64) -> StoredReply {
        let at = std::time::SystemTime::UNIX_EPOCH;
        let remaining = Duration::from_secs(remaining);
        StoredReply {
            reply: Reply::ok(vec![0; bytes]),
            completed_at: at,
            expires_at: at + remaining,
            remaining,
            origin: None,
        }
    }

    #[test]
    fn an_entry_pins_no_buffer_of_a_connection() {
        let buffer = bytes::Bytes::from(vec![b'x'; 8192]);
        let cache = ReplayCache::new(1 << 20, Duration::from_secs(60));
        let reply = Reply::ok(buffer.slice(0..10));
        let kept = StoredReply { reply, ..stored(0, 60) };
        cache.put(&id(1), &Fingerprint::of(b""), &kept, Duration::ZERO);
        let hit = cache.find(&id(1), Duration::ZERO).unwrap();
        assert_eq!(hit.stored.reply, kept.reply);
        drop(kept);
        assert!(buffer.is_unique());
    }

    #[test]
    fn an_entry_is_served_for_its_time_and_never_past_the_record() {
        let cache = ReplayCache::new(1 << 20, Duration::from_secs(60));
        let (secs, print) = (Duration::from_secs, Fingerprint::of("a"));
        cache.put(&id(1), &print, &stored(1, 3600), secs(100));
        cache.put(&id(2), &print, &stored(1, 5), secs(100));
        assert_eq!(cache.find(&id(1), secs(159)).unwrap().stored.remaining, secs(3541));
        assert!(cache.find(&id(1), secs(160)).is_none());
        assert!(cache.find(&id(2), secs(104)).is_some());
        assert!(cache.find(&id(2), secs(105)).is_none());
    }

    #[test]
    fn it_is_bounded_in_bytes() {
        let cache = ReplayCache::new(1 << 20, Duration::from_secs(60));
        for key in 0..10_000 {
            cache.put(&id(key), &Fingerprint::of("a"), &stored(1000, 3600), Duration::ZERO);
        }
        assert!(cache.entries.as_ref().unwrap().weight() <= 1 << 20);
        let kept = (0..10_000).filter(|key| cache.find(&id(*key), Duration::ZERO).is_some()).count();
        assert!((100..1100).contains(&kept), "{kept}");
        assert!(ReplayCache::new(0, Duration::from_secs(60)).find(&id(1), Duration::ZERO).is_none());
    }
}
