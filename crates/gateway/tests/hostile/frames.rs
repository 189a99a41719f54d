//! Frames of HTTP/2 by hand: for what a well-behaved client never sends. RFC 9113, RFC 7541.

use std::net::SocketAddr;
use std::time::Duration;

use testkit::RawConnection;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// One frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = len[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A header block of literals that join no table, in plain text.
pub(crate) fn block(headers: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers {
        bytes.push(0);
        for text in [name, value] {
            integer(text.len(), &mut bytes);
            bytes.extend(*text);
        }
    }
    bytes
}

// With a prefix of seven bits.
fn integer(value: usize, bytes: &mut Vec<u8>) {
    if value < 127 {
        bytes.push(u8::try_from(value).unwrap());
        return;
    }
    bytes.push(127);
    let mut rest = value - 127;
    while rest >= 128 {
        bytes.push(u8::try_from(rest % 128).unwrap() | 128);
        rest /= 128;
    }
    bytes.push(u8::try_from(rest).unwrap());
}

/// What came back on a stream, or on the connection.
#[derive(Debug, Default)]
pub(crate) struct Came {
    /// Of answers whose status is in HPACK's static table, in their order; 0 for any other.
    pub(crate) statuses: Vec<u16>,
    pub(crate) resets: usize,
    pub(crate) gone_away: bool,
    pub(crate) data: Vec<u8>,
    pub(crate) closed: bool,
}

/// A client that has shaken hands.
#[derive(Debug)]
pub(crate) struct Frames {
    pub(crate) connection: RawConnection,
}

impl Frames {
    pub(crate) async fn open(addr: SocketAddr) -> Self {
        let mut connection = RawConnection::open(addr).await;
        connection.write([PREFACE, &frame(SETTINGS, 0, 0, &[]), &frame(SETTINGS, 1, 0, &[])].concat()).await;
        Self { connection }
    }

    /// A request head, and that the stream ends with it or not.
    pub(crate) async fn head(&mut self, stream: u32, headers: &[(&[u8], &[u8])], end: bool) -> bool {
        let flags = END_HEADERS | if end { END_STREAM } else { 0 };
        self.connection.write(frame(HEADERS, flags, stream, &block(headers))).await
    }

    pub(crate) async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> bool {
        self.connection.write(frame(kind, flags, stream, payload)).await
    }

    /// Reads until the gateway closes or is silent for `quiet`.
    pub(crate) async fn read(&mut self, quiet: Duration) -> Came {
        let (bytes, closed) = self.connection.read_until_quiet(quiet).await;
        let mut came = Came { closed, ..Came::default() };
        let mut rest = &bytes[..];
        while rest.len() >= 9 {
            let len = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
            let (kind, payload) = (rest[3], rest.get(9..9 + len).unwrap_or_default());
            match kind {
                HEADERS => came.statuses.extend(payload.first().map(|byte| status(*byte))),
                RST_STREAM => came.resets += 1,
                GOAWAY => came.gone_away = true,
                DATA => came.data.extend(payload),
                _ => {}
            }
            rest = rest.get(9 + len..).unwrap_or_default();
        }
        came
    }
}

// The static table of HPACK from 8 on.
fn status(first: u8) -> u16 {
    match first {
        0x88 => 200,
        0x89 => 204,
        0x8a => 206,
        0x8b => 304,
        0x8c => 400,
        0x8d => 404,
        0x8e => 500,
        _ => 0,
    }
}
