//! Reads a body into memory, as far as it may.

use std::pin::Pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;

use crate::body::{BoxError, Whole};
use crate::budget::Permit;

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
    let mut buffer = Buffer::default();
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
            buffer.push(data);
            return Err(Cut::TooLong(buffer.into_bytes()));
        }
        let granted = match room {
            Room::Request => permit.grow_for_request(needed),
            Room::Reply(patience) => permit.grow_for_reply(needed, patience).await,
        };
        if !granted {
            buffer.push(data);
            return Err(Cut::OverBudget(buffer.into_bytes()));
        }
        buffer.push(data);
    }
    Ok(Whole { data: buffer.into_bytes(), trailers })
}

/// A body of one piece is kept as it came; of several it is copied together once.
#[derive(Default)]
struct Buffer {
    first: Bytes,
    joined: BytesMut,
}

impl Buffer {
    fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        if !self.first.is_empty() {
            self.joined.reserve(self.first.len() + data.len());
            self.joined.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&data);
    }

    fn into_bytes(self) -> Bytes {
        if self.joined.is_empty() { self.first } else { self.joined.freeze() }
    }
}
