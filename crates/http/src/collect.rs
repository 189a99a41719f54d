//! Reads a body into memory, as far as it may.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;

use crate::body::{BoxError, Whole};
use crate::budget::Permit;
use crate::joined::Joined;

/// Why a body is not in memory.
#[derive(Debug)]
pub(crate) enum Cut {
    /// Longer than it may be; this much was read, and the body goes on.
    TooLong(Bytes),
    /// No room in the budget for more; this much was read, and the body goes on.
    OverBudget(Bytes),
    /// It broke off.
    Failed(BoxError),
}

/// Whether a body that failed so is not what its framing says, such as a bad chunk, rather than cut short: an
/// [`std::io::Error`] of invalid data or input is among the error's sources, as hyper has it.
pub fn is_malformed(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut sources = std::iter::successors(Some(error), |error| error.source());
    sources.any(|error| {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        matches!(kind, Some(io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput))
    })
}

/// Whose room in the budget is used.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Room {
    /// A request is refused when there is none.
    Request,
    /// A reply waits this long for it.
    Reply(Duration),
}

/// Reads `body` to its end, up to `bytes_max`. The permit grows with it.
pub(crate) async fn collect<B>(
    mut body: Pin<&mut B>,
    bytes_max: usize,
    permit: &mut Permit,
    room: Room,
) -> Result<Whole, Cut>
where
    B: Body<Data = Bytes, Error = BoxError>,
{
    let announced = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    let mut buffer = Buffer::new(announced, bytes_max);
    let mut trailers = None;
    while let Some(frame) = body.frame().await {
        let data = match frame.map_err(Cut::Failed)?.into_data() {
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok().map(Box::new);
                continue;
            }
        };
        let needed = buffer.len().saturating_add(data.len());
        if needed > bytes_max {
            buffer.push_last(data);
            return Err(Cut::TooLong(buffer.into_bytes()));
        }
        // Taken is what is held, not what of it is filled.
        let held = buffer.held_with(data.len());
        let granted = match room {
            Room::Request => permit.grow_for_request(held),
            Room::Reply(patience) => permit.grow_for_reply(held, patience).await,
        };
        if !granted {
            buffer.push_last(data);
            return Err(Cut::OverBudget(buffer.into_bytes()));
        }
        buffer.push(data);
    }
    Ok(Whole { data: buffer.into_bytes(), trailers })
}

/// A body of one piece is kept as it came; of several it is copied together, in a buffer as long as the body says it is, or
/// one that doubles as it fills; never larger than the body may be.
struct Buffer {
    first: Bytes,
    joined: Joined,
    announced: Option<usize>,
    bytes_max: usize,
}

impl Buffer {
    fn new(announced: Option<usize>, bytes_max: usize) -> Self {
        let bytes_max = announced.unwrap_or(usize::MAX).min(bytes_max);
        Self { first: Bytes::new(), joined: Joined::default(), announced, bytes_max }
    }

    fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    /// Bytes of memory that it takes when so many are pushed.
    fn held_with(&self, more: usize) -> usize {
        let needed = self.len().saturating_add(more);
        match self.len() {
            0 => needed,
            _ if needed <= self.joined.capacity() => self.joined.capacity(),
            _ => needed.max(self.announced.unwrap_or(self.len().saturating_mul(2)).min(self.bytes_max)),
        }
    }

    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        let held = self.held_with(data.len());
        if held > self.joined.capacity() {
            self.joined.grow_to(held);
        }
        self.joined.push(&std::mem::take(&mut self.first));
        self.joined.push(&data);
    }

    /// Makes no room for more.
    fn push_last(&mut self, data: Bytes) {
        self.bytes_max = self.len() + data.len();
        self.push(data);
    }

    fn into_bytes(self) -> Bytes {
        if self.joined.len() == 0 { self.first } else { self.joined.into_bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_holds_what_it_says_and_no_more_than_the_body_may_have() {
        for (announced, bytes_max, piece) in [
            (None, 1 << 20, 16_384),
            (None, 1 << 20, 1),
            (None, 100_000, 30_000),
            (Some(100_000), 1 << 20, 30_000),
            (Some(10), 1 << 20, 10),
            (Some(200_000), 1 << 20, 50_000),
            (Some(1 << 30), 100_000, 7),
        ] {
            let mut buffer = Buffer::new(announced, bytes_max);
            let bytes_max = announced.unwrap_or(bytes_max).min(bytes_max);
            while buffer.len() + piece <= bytes_max.min(200_000) {
                let held = buffer.held_with(piece);
                buffer.push(Bytes::from(vec![7; piece]));
                assert!(held <= bytes_max, "{held} of {bytes_max}");
                assert!(buffer.joined.capacity() <= held && buffer.len() <= held);
            }
            let len = buffer.len();
            assert_eq!(buffer.into_bytes(), vec![7; len]);
        }
    }
}
