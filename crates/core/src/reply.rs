//! What every retry is answered with, and the form in which a store keeps it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::operation::Origin;

/// The longest body that [`Reply::detached`] copies: no connection's buffer is longer.
const DETACHED_BODY_BYTES_MAX: usize = 64 << 10;

/// The answer of an operation: status, headers, body, trailers. Cheap to clone, never changed once made.
///
/// Outside HTTP the status is 200 for success and 422 for a definitive failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply(Arc<Parts>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
    trailers: HeaderMap,
    omitted: bool,
}

/// A reply as a store keeps it, with its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredReply {
    /// What to answer.
    pub reply: Reply,
    /// Wall time of completion.
    pub completed_at: SystemTime,
    /// Wall time after which the record is absent.
    pub expires_at: SystemTime,
    /// How long it still lives by the store's own clock. Zero is over.
    pub remaining: Duration,
    /// The request whose reply it is.
    pub origin: Option<Origin>,
}

/// Why stored headers could not be read back.
#[derive(Debug, thiserror::Error)]
#[error("stored reply headers are unreadable: {0}")]
pub struct UnreadableReply(&'static str);

impl Reply {
    /// A reply with this status (100–999) and body.
    ///
    /// # Panics
    /// On a status outside 100–999: that is a mistake in the program, not in its input.
    pub fn new(status: u16, body: impl Into<Bytes>) -> Self {
        assert!((100..1000).contains(&status), "HTTP status {status} is not in 100..=999");
        let (headers, trailers) = (HeaderMap::new(), HeaderMap::new());
        Self(Arc::new(Parts { status, headers, body: body.into(), trailers, omitted: false }))
    }

    /// Success outside HTTP: status 200.
    pub fn ok(body: impl Into<Bytes>) -> Self {
        Self::new(200, body)
    }

    /// A definitive failure outside HTTP: status 422.
    pub fn failed(body: impl Into<Bytes>) -> Self {
        Self::new(422, body)
    }

    /// A JSON reply with `Content-Type: application/json`.
    ///
    /// # Errors
    /// When the value cannot be written as JSON (a map with keys that are not strings, a failing `Serialize`).
    pub fn json(status: u16, value: &impl serde::Serialize) -> Result<Self, serde_json::Error> {
        let body = serde_json::to_vec(value)?;
        Ok(Self::new(status, body)
            .with_header(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json")))
    }

    /// Adds one header line, after those of the same name.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        Arc::make_mut(&mut self.0).headers.append(name, value);
        self
    }

    /// Replaces all headers.
    #[must_use]
    pub fn with_headers(mut self, headers: HeaderMap) -> Self {
        Arc::make_mut(&mut self.0).headers = headers;
        self
    }

    /// Replaces the trailers.
    #[must_use]
    pub fn with_trailers(mut self, trailers: HeaderMap) -> Self {
        Arc::make_mut(&mut self.0).trailers = trailers;
        self
    }

    /// The same reply with its body left out: a retry is told so, and is never run again.
    #[must_use]
    pub fn omitting_body(mut self) -> Self {
        let parts = Arc::make_mut(&mut self.0);
        (parts.body, parts.trailers, parts.omitted) = (Bytes::new(), HeaderMap::new(), true);
        self
    }

    /// The status, 100–999.
    pub fn status(&self) -> u16 {
        self.0.status
    }

    /// The headers; values of one name keep their order.
    pub fn headers(&self) -> &HeaderMap {
        &self.0.headers
    }

    /// The body, byte for byte.
    pub fn body(&self) -> &Bytes {
        &self.0.body
    }

    /// The trailers.
    pub fn trailers(&self) -> &HeaderMap {
        &self.0.trailers
    }

    /// Whether the body was left out on purpose.
    pub fn is_omitted(&self) -> bool {
        self.0.omitted
    }

    /// Whether the operation took effect, as far as the status tells (under 400).
    pub fn is_success(&self) -> bool {
        self.0.status < 400
    }

    /// About how much memory it holds, in bytes: for budgets, not exact.
    pub fn weight_bytes(&self) -> usize {
        // A place in the map and its index are about 112 bytes.
        let fields =
            |map: &HeaderMap| map.iter().map(|(n, v)| n.as_str().len() + v.len() + 112).sum::<usize>();
        std::mem::size_of::<Parts>() + self.0.body.len() + fields(&self.0.headers) + fields(&self.0.trailers)
    }

    /// The same reply in memory of its own, for those who keep it: header values, and bodies up to 64 KiB, are copied
    /// into one piece. As it came it may hold on to the whole buffer of a connection.
    #[must_use]
    pub fn detached(&self) -> Self {
        let Parts { status, headers, body, trailers, omitted } = &*self.0;
        let short = if body.len() <= DETACHED_BODY_BYTES_MAX { &body[..] } else { &[] };
        let values = headers.values().chain(trailers.values()).map(HeaderValue::as_bytes);
        let all: Vec<u8> = values.chain([short]).collect::<Vec<_>>().concat();
        let mut rest = Bytes::from(all);
        let headers = fields_from(headers, &mut rest);
        let trailers = fields_from(trailers, &mut rest);
        let body = if short.is_empty() { body.clone() } else { rest };
        Self(Arc::new(Parts { status: *status, headers, body, trailers, omitted: *omitted }))
    }

    /// The stored form of everything but status and body: a header block as on the wire, readable by people,
    /// safe for any bytes since a header value has no line breaks. Lines that start with `:` are ours.
    ///
    /// ```text
    /// :onlyonce 1
    /// content-type: application/json
    /// location: /charges/1
    /// :trailers
    /// checksum: 9f…
    /// ```
    pub fn encode_head(&self) -> Vec<u8> {
        let mut out = b":onlyonce 1\n".to_vec();
        if self.0.omitted {
            out.extend_from_slice(b":omitted\n");
        }
        encode_fields(&mut out, &self.0.headers);
        if !self.0.trailers.is_empty() {
            out.extend_from_slice(b":trailers\n");
            encode_fields(&mut out, &self.0.trailers);
        }
        out
    }

    /// Reads back what [`Reply::encode_head`] wrote.
    ///
    /// # Errors
    /// [`UnreadableReply`] on anything else, a newer version among it. Such a record is never taken for absent.
    pub fn decode(status: u16, head: &[u8], body: Bytes) -> Result<Self, UnreadableReply> {
        if !(100..1000).contains(&status) {
            return Err(UnreadableReply("the status is not in 100..=999"));
        }
        let mut lines = head.split_inclusive(|b| *b == b'\n').map(|line| line.strip_suffix(b"\n"));
        if lines.next() != Some(Some(b":onlyonce 1")) {
            return Err(UnreadableReply("not written by a release that this one can read"));
        }
        let mut parts =
            Parts { status, headers: HeaderMap::new(), body, trailers: HeaderMap::new(), omitted: false };
        let mut in_trailers = false;
        for line in lines {
            match line.ok_or(UnreadableReply("the last line is cut short"))? {
                b":omitted" => parts.omitted = true,
                b":trailers" => in_trailers = true,
                line => {
                    let (name, value) = decode_field(line)?;
                    let map = if in_trailers { &mut parts.trailers } else { &mut parts.headers };
                    map.try_append(name, value).map_err(|_| UnreadableReply("too many headers"))?;
                }
            }
        }
        Ok(Self(Arc::new(parts)))
    }
}

/// The same fields with values cut off the front of `values`, which holds them in this order.
fn fields_from(fields: &HeaderMap, values: &mut Bytes) -> HeaderMap {
    let mut own = HeaderMap::with_capacity(fields.keys_len());
    for (name, value) in fields {
        let mut copy = HeaderValue::from_maybe_shared(values.split_to(value.len()))
            .expect("the bytes of a header value are one");
        copy.set_sensitive(value.is_sensitive());
        own.append(name.clone(), copy);
    }
    own
}

fn encode_fields(out: &mut Vec<u8>, map: &HeaderMap) {
    for (name, value) in map {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.push(b'\n');
    }
}

fn decode_field(line: &[u8]) -> Result<(HeaderName, HeaderValue), UnreadableReply> {
    let colon = line.iter().position(|b| *b == b':').ok_or(UnreadableReply("a line without a colon"))?;
    let value = line[colon..].strip_prefix(b": ").ok_or(UnreadableReply("no space after the colon"))?;
    Ok((
        HeaderName::from_bytes(&line[..colon]).map_err(|_| UnreadableReply("not a header name"))?,
        HeaderValue::from_bytes(value).map_err(|_| UnreadableReply("not a header value"))?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn head_is_readable_and_comes_back() {
        let mut trailers = HeaderMap::new();
        trailers.append("checksum", HeaderValue::from_static("9f"));
        let reply = Reply::json(201, &serde_json::json!({"a": 1}))
            .unwrap()
            .with_header(HeaderName::from_static("x-a"), HeaderValue::from_static("1"))
            .with_header(HeaderName::from_static("x-a"), HeaderValue::from_bytes(b"\xe9 2").unwrap())
            .with_trailers(trailers);
        let head = reply.encode_head();
        assert!(
            head.starts_with(
                b":onlyonce 1\ncontent-type: application/json\nx-a: 1\nx-a: \xe9 2\n:trailers\n"
            )
        );
        assert_eq!(Reply::decode(201, &head, reply.body().clone()).unwrap(), reply);
        let omitted = reply.omitting_body();
        assert_eq!(Reply::decode(201, &omitted.encode_head(), Bytes::new()).unwrap(), omitted);
    }

    #[test]
    fn detached_it_holds_on_to_no_buffer_and_is_the_same() {
        for body_bytes in [0, 3, DETACHED_BODY_BYTES_MAX] {
            let buffer = Bytes::from(vec![b'a'; 2 * DETACHED_BODY_BYTES_MAX]);
            let value = |range| HeaderValue::from_maybe_shared(buffer.slice(range)).unwrap();
            let mut secret = value(9..11);
            secret.set_sensitive(true);
            let mut trailers = HeaderMap::new();
            trailers.append("checksum", value(5..9));
            let reply = Reply::new(201, buffer.slice(11..11 + body_bytes))
                .with_header(HeaderName::from_static("x-a"), value(0..2))
                .with_header(HeaderName::from_static("x-b"), HeaderValue::from_static(""))
                .with_header(HeaderName::from_static("x-a"), value(2..5))
                .with_header(HeaderName::from_static("x-b"), secret)
                .with_trailers(trailers);
            let detached = reply.detached();
            assert_eq!(detached, reply);
            assert!(detached.headers().get_all("x-b").iter().next_back().unwrap().is_sensitive());
            assert_eq!(detached.encode_head(), reply.encode_head());
            drop(reply);
            assert!(buffer.is_unique(), "{body_bytes}");
        }
        let omitted = Reply::new(200, Bytes::new()).omitting_body();
        assert_eq!(omitted.detached(), omitted);
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        for head in [&b""[..], b":onlyonce 2\n", b":onlyonce 1", b":onlyonce 1\nx\n", b":onlyonce 1\na: b"] {
            assert!(Reply::decode(200, head, Bytes::new()).is_err(), "{head:?}");
        }
        assert!(Reply::decode(99, b":onlyonce 1\n", Bytes::new()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused_and_decoding_is_stable(head in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut framed = b":onlyonce 1\n".to_vec();
            framed.extend(head);
            if let Ok(reply) = Reply::decode(200, &framed, Bytes::new()) {
                prop_assert_eq!(Reply::decode(200, &reply.encode_head(), Bytes::new()).unwrap(), reply);
            }
        }

        #[test]
        fn any_header_value_survives(values in prop::collection::vec(prop::collection::vec(32u8..=255, 0..20), 0..8)) {
            let mut reply = Reply::new(200, "x");
            for value in values.iter().filter_map(|v| HeaderValue::from_bytes(v).ok()) {
                reply = reply.with_header(HeaderName::from_static("x-v"), value);
            }
            prop_assert_eq!(Reply::decode(200, &reply.encode_head(), reply.body().clone()).unwrap(), reply);
        }
    }
}
