//! Where an exchange on an HTTP/1.1 connection stands: told by the service, needed by the socket.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, StatusCode, Version};
use parking_lot::Mutex;

/// Interim answers that may wait for a socket at once; more are dropped.
const INTERIM_MAX: usize = 16;

/// Shared by a connection's service and its socket, which run in one task; only interim answers may come from elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    phase: AtomicU8,
    /// Exchanges begun.
    number: AtomicU32,
    /// Each with its exchange.
    interim: Mutex<Vec<(u32, Bytes)>>,
    unread: AtomicU8,
}

/// What nobody read of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Unread {
    Nothing,
    /// A rest that may have come already, and is then read over.
    Some,
    /// So much, or so uncertain to come, that the connection ends with the answer.
    TooMuch,
}

/// What is going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// A request head is waited for; no answer is on its way.
    Head,
    /// A request was read and its answer has not begun; the client understands interim answers.
    Serving,
    /// The same for a client of HTTP/1.0, which does not.
    Serving10,
    /// The answer was given to the connection, its body may go on.
    Answering,
    /// All of the answer was given to the connection, which may not have written all of it.
    Answered,
    /// Not HTTP/1.1, or no longer: bytes are passed on and nothing is said.
    Opaque,
}

impl Exchange {
    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Head,
            1 => Phase::Serving,
            2 => Phase::Serving10,
            3 => Phase::Answering,
            4 => Phase::Answered,
            _ => Phase::Opaque,
        }
    }

    /// Nothing follows the opaque phase.
    pub(crate) fn enter(&self, phase: Phase) {
        if self.phase() != Phase::Opaque {
            self.phase.store(phase as u8, Ordering::Relaxed);
        }
    }

    /// A request was read.
    pub(crate) fn begin(&self, version: Version) {
        self.number.fetch_add(1, Ordering::Relaxed);
        self.leave(Unread::Nothing);
        self.enter(if version == Version::HTTP_10 { Phase::Serving10 } else { Phase::Serving });
    }

    /// Nobody reads any further in the body of the request.
    pub(crate) fn leave(&self, unread: Unread) {
        self.unread.store(unread as u8, Ordering::Relaxed);
    }

    /// What was left so. Over HTTP/2 it is nothing: the other streams of the connection go on.
    pub(crate) fn unread(&self) -> Unread {
        match self.unread.load(Ordering::Relaxed) {
            _ if self.phase() == Phase::Opaque => Unread::Nothing,
            0 => Unread::Nothing,
            1 => Unread::Some,
            _ => Unread::TooMuch,
        }
    }

    /// The number of the exchange that goes on, or did last.
    pub(crate) fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// Whether the client may be sent interim answers now.
    pub(crate) fn takes_interim(&self) -> bool {
        self.phase() == Phase::Serving
    }

    /// Queues an interim answer to be written before the answer.
    pub(crate) fn interim(&self, status: StatusCode, headers: &HeaderMap) {
        let mut interim = self.interim.lock();
        if self.takes_interim() && interim.len() < INTERIM_MAX {
            interim.push((self.number(), head(status, headers).freeze()));
        }
    }

    /// The interim answers of an exchange; what is left of others is dropped.
    pub(crate) fn take_interim(&self, number: u32) -> Bytes {
        let interim = std::mem::take(&mut *self.interim.lock());
        let own: Vec<Bytes> =
            interim.into_iter().filter(|(of, _)| *of == number).map(|(_, head)| head).collect();
        own.concat().into()
    }
}

/// A response head as it goes over an HTTP/1.1 connection.
pub(crate) fn head(status: StatusCode, headers: &HeaderMap) -> BytesMut {
    let mut bytes = BytesMut::with_capacity(512);
    let reason = status.canonical_reason().unwrap_or_default();
    bytes.put_slice(format!("HTTP/1.1 {} {reason}\r\n", status.as_str()).as_bytes());
    for (name, value) in headers {
        bytes.put_slice(name.as_str().as_bytes());
        bytes.put_slice(b": ");
        bytes.put_slice(value.as_bytes());
        bytes.put_slice(b"\r\n");
    }
    bytes.put_slice(b"\r\n");
    bytes
}
