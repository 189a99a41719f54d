//! The memory of a body that came in pieces.

use bytes::Bytes;
use memmap2::MmapMut;

/// From this size on memory is asked of the system, and goes back to it with the body. An allocator that keeps it, cut up by
/// what is small and lives longer, would hold a multiple of what the budget says.
const MAPPED_BYTES_MIN: usize = 128 << 10;

/// Memory of a chosen size that is filled from its start.
pub(crate) enum Joined {
    Heap(Vec<u8>),
    Mapped { map: MmapMut, len: usize },
}

impl Default for Joined {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl Joined {
    pub(crate) fn len(&self) -> usize {
        self.bytes().len()
    }

    pub(crate) fn capacity(&self) -> usize {
        match self {
            Self::Heap(bytes) => bytes.capacity(),
            Self::Mapped { map, .. } => map.len(),
        }
    }

    /// Makes it this large.
    pub(crate) fn grow_to(&mut self, capacity: usize) {
        // Where the system has no mapping left the allocator may have room.
        let mapped = (capacity >= MAPPED_BYTES_MIN).then(|| MmapMut::map_anon(capacity).ok()).flatten();
        let mut larger = match mapped {
            Some(map) => Self::Mapped { map, len: 0 },
            None => {
                let mut bytes = Vec::new();
                bytes.reserve_exact(capacity);
                Self::Heap(bytes)
            }
        };
        larger.push(self.bytes());
        *self = larger;
    }

    /// Fills it further.
    ///
    /// # Panics
    /// When there is no room.
    pub(crate) fn push(&mut self, data: &[u8]) {
        match self {
            Self::Heap(bytes) => bytes.extend_from_slice(data),
            Self::Mapped { map, len } => {
                map[*len..*len + data.len()].copy_from_slice(data);
                *len += data.len();
            }
        }
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        match self {
            Self::Heap(bytes) => bytes.into(),
            Self::Mapped { map, len } => Bytes::from_owner(map).slice(..len),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Mapped { map, len } => &map[..*len],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_what_it_has_as_it_grows_out_of_the_heap() {
        let mut joined = Joined::default();
        let mut all = Vec::new();
        for (round, capacity) in
            [10, 1000, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN, 3 * MAPPED_BYTES_MIN].into_iter().enumerate()
        {
            joined.grow_to(capacity);
            assert_eq!(joined.capacity(), capacity);
            assert_eq!(matches!(joined, Joined::Mapped { .. }), capacity >= MAPPED_BYTES_MIN);
            let more = vec![u8::try_from(round).unwrap(); capacity - joined.len() - 1];
            joined.push(&more);
            all.extend(more);
            assert_eq!(joined.len(), all.len());
        }
        assert_eq!(joined.into_bytes(), all);
    }
}
