//! What must hold for any bytes as a stored reply.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::Reply;

/// Takes `STATUS(2 bytes) HEAD\0BODY`.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(data: &[u8]) {
    let Some((status, rest)) = data.split_first_chunk::<2>() else { return };
    let status = u16::from_be_bytes(*status) % 1100;
    let (head, body) = match rest.iter().position(|byte| *byte == 0) {
        Some(end) => (&rest[..end], Bytes::copy_from_slice(&rest[end + 1..])),
        None => (rest, Bytes::new()),
    };
    if let Ok(reply) = Reply::decode(status, head, body.clone()) {
        assert!((100..1000).contains(&status));
        assert_eq!((reply.status(), reply.body()), (status, &body));
        survives(&reply);
    }
    if !(100..1000).contains(&status) {
        return;
    }
    // What a service can say, whatever it is, comes back; and each field is in the stored form.
    let lines = head.split(|byte| *byte == b'\n');
    let mut reply = Reply::new(status, body);
    let mut trailers = HeaderMap::new();
    for (at, line) in lines.enumerate() {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b'=').unwrap_or(line.len()));
        let value = value.strip_prefix(b"=").unwrap_or(value);
        let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) else {
            continue;
        };
        let before = reply.encode_head();
        match at % 5 {
            4 => drop(trailers.append(name, value)),
            _ => {
                reply = reply.with_header(name, value);
                assert_ne!(before, reply.encode_head(), "a field more is another reply");
            }
        }
    }
    survives(&reply);
    let with_trailers = reply.clone().with_trailers(trailers);
    assert_eq!(with_trailers == reply, with_trailers.encode_head() == reply.encode_head());
    survives(&with_trailers);
    survives(&with_trailers.omitting_body());
}

fn survives(reply: &Reply) {
    let head = reply.encode_head();
    let again = Reply::decode(reply.status(), &head, reply.body().clone()).expect("it was written by us");
    assert_eq!(&again, reply);
    assert_eq!(again.encode_head(), head, "one reply, one form");
    assert_eq!(&reply.detached(), reply);
    // Cut short anywhere it is an error, or ends with a whole line.
    for cut in [head.len() / 3, head.len().saturating_sub(1)] {
        if let Ok(shorter) = Reply::decode(reply.status(), &head[..cut], reply.body().clone()) {
            assert_eq!(head[cut - 1], b'\n');
            assert!(cut == head.len() || &shorter != reply || head[cut..] == *b":trailers\n");
        }
    }
}
