//! The bodies that go into and come out of a guarded service.

use std::error::Error as StdError;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::mpsc;

use crate::budget::Permit;
use crate::execute::Piece;

/// Any error of a body.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// A body in memory, with its trailers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Whole {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<Box<HeaderMap>>,
}

pin_project! {
    /// What the service behind gets: a body that was read whole, or the one of a request that is not guarded, as it
    /// comes.
    #[derive(Debug)]
    pub struct RequestBody<B> {
        #[pin]
        kind: RequestKind<B>,
    }
}

pin_project! {
    #[project = RequestProjection]
    #[derive(Debug)]
    enum RequestKind<B> {
        Whole { whole: Whole },
        Pass { #[pin] body: B },
    }
}

pin_project! {
    /// What the client gets: a body in memory, one that is passed through, or a recorded stream.
    #[derive(Debug)]
    pub struct ReplyBody<B> {
        #[pin]
        kind: ReplyKind<B>,
    }
}

pin_project! {
    #[project = ReplyProjection]
    #[derive(Debug)]
    enum ReplyKind<B> {
        Whole { whole: Whole, permit: Option<Permit> },
        Pass { #[pin] body: B },
        Stream { frames: mpsc::Receiver<Piece>, ended: bool },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn whole(whole: Whole) -> Self {
        Self { kind: RequestKind::Whole { whole } }
    }

    pub(crate) fn pass(body: B) -> Self {
        Self { kind: RequestKind::Pass { body } }
    }

    /// The bytes of a guarded request, which are in memory.
    pub fn as_bytes(&self) -> Option<&Bytes> {
        match &self.kind {
            RequestKind::Whole { whole } => Some(&whole.data),
            RequestKind::Pass { .. } => None,
        }
    }
}

impl<B> ReplyBody<B> {
    /// The permit is held until the body is sent or dropped.
    pub(crate) fn whole(whole: Whole, permit: Option<Permit>) -> Self {
        Self { kind: ReplyKind::Whole { whole, permit } }
    }

    pub(crate) fn pass(body: B) -> Self {
        Self { kind: ReplyKind::Pass { body } }
    }

    pub(crate) fn stream(frames: mpsc::Receiver<Piece>) -> Self {
        Self { kind: ReplyKind::Stream { frames, ended: false } }
    }
}

impl Whole {
    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.data.is_empty() {
            return Some(Frame::data(std::mem::take(&mut self.data)));
        }
        self.trailers.take().map(|trailers| Frame::trailers(*trailers))
    }

    fn is_over(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.trailers {
            // An exact size becomes a Content-Length, and HTTP/1.1 has trailers only after chunks.
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.data.len() as u64),
        }
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            RequestProjection::Whole { whole } => Poll::Ready(whole.next().map(Ok)),
            RequestProjection::Pass { body } => {
                Poll::Ready(ready!(body.poll_frame(cx)).map(|frame| frame.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Whole { whole } => whole.is_over(),
            RequestKind::Pass { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Whole { whole } => whole.size_hint(),
            RequestKind::Pass { body } => body.size_hint(),
        }
    }
}

impl<B> Body for ReplyBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().kind.project() {
            ReplyProjection::Whole { whole, .. } => Poll::Ready(whole.next().map(Ok)),
            ReplyProjection::Pass { body } => {
                Poll::Ready(ready!(body.poll_frame(cx)).map(|frame| frame.map_err(Into::into)))
            }
            ReplyProjection::Stream { frames, ended } => {
                if *ended {
                    return Poll::Ready(None);
                }
                let piece =
                    ready!(frames.poll_recv(cx)).unwrap_or_else(|| Err("the stream broke off".into()));
                *ended = !matches!(piece, Ok(Some(_)));
                Poll::Ready(piece.transpose())
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ReplyKind::Whole { whole, .. } => whole.is_over(),
            ReplyKind::Pass { body } => body.is_end_stream(),
            ReplyKind::Stream { ended, .. } => *ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            ReplyKind::Whole { whole, .. } => whole.size_hint(),
            ReplyKind::Pass { body } => body.size_hint(),
            ReplyKind::Stream { .. } => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{BodyExt, Empty};

    #[tokio::test]
    async fn a_stream_whose_sender_dies_does_not_end_well() {
        let (sender, frames) = mpsc::channel(2);
        let mut body = ReplyBody::<Empty<Bytes>>::stream(frames);
        sender.send(Ok(Some(Frame::data("half".into())))).await.unwrap();
        drop(sender);
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "half");
        assert!(!body.is_end_stream() && body.frame().await.unwrap().is_err());
        assert!(body.is_end_stream() && body.frame().await.is_none());

        let (sender, frames) = mpsc::channel(2);
        let mut body = ReplyBody::<Empty<Bytes>>::stream(frames);
        sender.send(Ok(None)).await.unwrap();
        assert!(body.frame().await.is_none());
    }
}
