//! The body of a client's request, and what is done with what nobody reads of it.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::EXPECT;
use http::{Version, request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, sleep};

use crate::exchange::Unread;
use crate::server::Peer;

/// A rest that is longer has not come yet: it fits no buffer of the connection.
const READ_OVER_BYTES_MAX: u64 = 64 * 1024;

/// How much of a refused body is read and thrown away, and for how long.
pub(crate) const DISCARD_BYTES_MAX: u64 = 64 << 20;
pub(crate) const DISCARD_TIME_MAX: Duration = Duration::from_secs(30);

/// How long a client may be silent meanwhile: a busy one does not come to its sockets for seconds.
pub(crate) const DISCARD_SILENCE_MAX: Duration = Duration::from_secs(10);

const STOPPING_SILENCE_MAX: Duration = Duration::from_secs(1);

/// The body of a client's request, as it comes.
///
/// Dropped before its end over HTTP/2, it is read on and thrown away, within bounds: a stream that is reset while its client
/// writes on can take the answer with it, and those of the connection's other streams. Over HTTP/1.1 the socket does that.
#[derive(Debug)]
pub struct ClientBody {
    // `None` only while it is dropped.
    incoming: Option<Incoming>,
    peer: Peer,
    discards: bool,
    expects: bool,
}

impl ClientBody {
    pub(crate) fn new(head: &request::Parts, incoming: Incoming, peer: Peer) -> Self {
        // Who waits for a 100 (Continue) sends nothing, and is not asked to.
        let expects = head.headers.contains_key(EXPECT);
        let discards = head.version == Version::HTTP_2 && !expects;
        Self { incoming: Some(incoming), peer, discards, expects }
    }
}

impl Drop for ClientBody {
    fn drop(&mut self) {
        let Some(incoming) = self.incoming.take() else { return };
        if incoming.is_end_stream() {
            return;
        }
        let rest = incoming.size_hint().lower();
        let waits = self.expects || rest > READ_OVER_BYTES_MAX;
        self.peer.exchange().leave(if waits { Unread::TooMuch } else { Unread::Some });
        if self.discards && rest <= DISCARD_BYTES_MAX {
            let peer = self.peer.clone();
            self.peer.spawn(async move { discard(incoming, &peer).await });
        }
    }
}

async fn discard(mut incoming: Incoming, peer: &Peer) {
    let until = Instant::now() + DISCARD_TIME_MAX;
    let mut bytes = 0;
    while bytes < DISCARD_BYTES_MAX && Instant::now() < until {
        let frame = tokio::select! {
            biased;
            frame = incoming.frame() => frame,
            () = silence(peer) => return,
        };
        let Some(Ok(frame)) = frame else { return };
        bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
    }
}

/// Until nobody waits any longer for a client that says nothing; in a shutdown that is soon.
async fn silence(peer: &Peer) {
    tokio::select! {
        () = sleep(DISCARD_SILENCE_MAX) => {}
        () = peer.stopping() => sleep(STOPPING_SILENCE_MAX).await,
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.incoming {
            Some(incoming) => Pin::new(incoming).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}
