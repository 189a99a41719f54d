//! WebSocket, the one tunnel that is let through: asked for by `Upgrade` over HTTP/1.1 (RFC 6455), by an extended CONNECT
//! over HTTP/2 (RFC 8441), and passed on in the words of the other side.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{
    CONNECTION, CONTENT_LENGTH, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE,
};
use http::{HeaderMap, Method, StatusCode, Version, request};
use hyper::ext::Protocol;
use sha1::{Digest, Sha1};

use crate::forward;

const WEBSOCKET: &str = "websocket";

/// RFC 6455 §1.3.
const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// How the client asks for it.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    /// By `Upgrade`, with its key.
    Upgrade(HeaderValue),
    /// By an extended CONNECT.
    Connect,
}

/// Whether it is an extended CONNECT for a WebSocket.
pub(crate) fn is_connect(head: &request::Parts) -> bool {
    let protocol = head.extensions.get::<Protocol>().map(Protocol::as_str);
    head.method == Method::CONNECT && head.version == Version::HTTP_2 && protocol == Some(WEBSOCKET)
}

/// What a client asks for, if it does. Every other upgrade would tunnel past the guards.
pub(crate) fn asked(head: &request::Parts) -> Option<Asked> {
    if is_connect(head) {
        return Some(Asked::Connect);
    }
    if head.method != Method::GET || head.version != Version::HTTP_11 {
        return None;
    }
    let mut upgrades = head.headers.get_all(UPGRADE).iter();
    let only = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(WEBSOCKET.as_bytes());
    let asks = upgrades.next().is_some_and(only) && upgrades.next().is_none();
    if !asks || !forward::names(&head.headers, "upgrade") {
        return None;
    }
    // Without a key it is no handshake; the service behind says so.
    let key = head.headers.get(SEC_WEBSOCKET_KEY).cloned();
    Some(Asked::Upgrade(key.unwrap_or(HeaderValue::from_static(""))))
}

/// Makes a head that is ready to be sent one that asks for a WebSocket; returns the key that it is asked with.
pub(crate) fn ask(head: &mut request::Parts, asked: &Asked, h2c: bool) -> HeaderValue {
    head.headers.remove(CONTENT_LENGTH);
    if h2c {
        head.method = Method::CONNECT;
        head.headers.remove(SEC_WEBSOCKET_KEY);
        head.extensions.insert(Protocol::from_static(WEBSOCKET));
        return HeaderValue::from_static("");
    }
    head.method = Method::GET;
    head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    head.headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    match asked {
        Asked::Upgrade(key) => key.clone(),
        Asked::Connect => {
            let mut random = [0; 16];
            getrandom::fill(&mut random).expect("the operating system has random bytes");
            let key = HeaderValue::from_str(&STANDARD.encode(random)).expect("base64 is a header value");
            head.headers.insert(SEC_WEBSOCKET_KEY, key.clone());
            key
        }
    }
}

/// Whether the service behind says yes to what it was asked.
pub(crate) fn is_granted(status: StatusCode, h2c: bool) -> bool {
    if h2c { status.is_success() } else { status == StatusCode::SWITCHING_PROTOCOLS }
}

/// Makes a yes of the service behind the answer to what the client asked; false when it is no yes to `key`.
pub(crate) fn answer(
    asked: &Asked,
    key: &HeaderValue,
    status: &mut StatusCode,
    headers: &mut HeaderMap,
    h2c: bool,
) -> bool {
    match asked {
        Asked::Upgrade(theirs) => {
            *status = StatusCode::SWITCHING_PROTOCOLS;
            if h2c {
                headers.insert(SEC_WEBSOCKET_ACCEPT, accept(theirs));
            }
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
            true
        }
        Asked::Connect => {
            *status = StatusCode::OK;
            h2c || headers.remove(SEC_WEBSOCKET_ACCEPT).is_some_and(|said| said == accept(key))
        }
    }
}

/// RFC 6455 §4.2.2.
fn accept(key: &HeaderValue) -> HeaderValue {
    let hash = Sha1::new().chain_update(key.as_bytes().trim_ascii()).chain_update(GUID).finalize();
    HeaderValue::from_str(&STANDARD.encode(hash)).expect("base64 is a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_the_standard_has_the_answer_of_the_standard() {
        let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
        assert_eq!(accept(&key), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }
}
