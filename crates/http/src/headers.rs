//! Header names of ours, and which headers of a reply are stored.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// The idempotency key, from the client.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// `true` on every replay, and on nothing else.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// What [`IDEMPOTENCY_REPLAYED`] is called under the preset `stripe`.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// `omitted` on a replay whose body is not stored.
pub const IDEMPOTENCY_REPLAY: HeaderName = HeaderName::from_static("idempotency-replay");
/// What happened to the guarantee: `ignored`, `degraded`, `not-recorded`.
pub const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");
/// When the key is forgotten, as an HTTP date.
pub const IDEMPOTENCY_KEY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-key-expires");
/// From the service behind: `definitive`, `transient`, `unknown` or `no-store`. Never reaches the client.
pub const IDEMPOTENCY_OUTCOME: HeaderName = HeaderName::from_static("idempotency-outcome");
/// On replays, 409 and 422: the id (`X-Request-Id`) of the request whose run they are about.
pub const IDEMPOTENCY_ORIGINAL_REQUEST: HeaderName = HeaderName::from_static("idempotency-original-request");
/// What [`IDEMPOTENCY_ORIGINAL_REQUEST`] is called under the preset `stripe`.
pub const ORIGINAL_REQUEST: HeaderName = HeaderName::from_static("original-request");
/// On the same answers: the `traceparent` of that request, as it came.
pub const IDEMPOTENCY_ORIGINAL_TRACEPARENT: HeaderName =
    HeaderName::from_static("idempotency-original-traceparent");
/// To the service behind a gateway: 1 for the first run, one more for each takeover.
pub const IDEMPOTENCY_ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");

/// Everything that only we may say. The key itself is the client's.
const OURS: [HeaderName; 9] = [
    IDEMPOTENCY_REPLAYED,
    IDEMPOTENT_REPLAYED,
    IDEMPOTENCY_REPLAY,
    IDEMPOTENCY_STATUS,
    IDEMPOTENCY_KEY_EXPIRES,
    IDEMPOTENCY_ORIGINAL_REQUEST,
    IDEMPOTENCY_ORIGINAL_TRACEPARENT,
    IDEMPOTENCY_OUTCOME,
    IDEMPOTENCY_ATTEMPT,
];

/// Those of them whose name is a setting.
#[derive(Clone, Debug)]
pub(crate) struct OurNames {
    pub(crate) replayed: HeaderName,
    pub(crate) original_request: HeaderName,
}

impl Default for OurNames {
    fn default() -> Self {
        Self { replayed: IDEMPOTENCY_REPLAYED, original_request: IDEMPOTENCY_ORIGINAL_REQUEST }
    }
}

/// RFC 9110 §7.6.1, and `Keep-Alive` and `Proxy-Connection` of older days.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Of the moment or of the connection, not of the operation. `Content-Length` is made anew from the body.
const NEVER_STORED: [HeaderName; 6] = [
    header::SET_COOKIE,
    header::DATE,
    header::WWW_AUTHENTICATE,
    header::PROXY_AUTHENTICATE,
    header::ALT_SVC,
    header::CONTENT_LENGTH,
];

/// What describes a body that a replay does not have.
const OF_THE_BODY: [HeaderName; 9] = [
    header::CONTENT_ENCODING,
    header::ETAG,
    header::CONTENT_RANGE,
    header::CONTENT_LENGTH,
    header::TRAILER,
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("content-md5"),
];

/// Whether a header of a reply is never stored, whoever makes the reply: it belongs to one connection or to one moment.
pub fn is_never_stored(name: &HeaderName) -> bool {
    HOP_BY_HOP.contains(name) || NEVER_STORED.contains(name)
}

/// Whether it is a header that only we may put on an answer.
pub(crate) fn is_ours(name: &HeaderName, names: &OurNames) -> bool {
    OURS.contains(name) || *name == names.replayed || *name == names.original_request
}

/// Removes what only we may say, so that neither client nor service behind can forge it.
pub(crate) fn strip_ours(headers: &mut HeaderMap, names: &OurNames) {
    let OurNames { replayed, original_request } = names;
    // Most messages carry none: one look at the names is cheaper than all the removals.
    let any = headers
        .keys()
        .any(|name| name.as_str().starts_with("idempoten") || name == replayed || name == original_request);
    if any {
        OURS.iter().for_each(|name| {
            headers.remove(name);
        });
        headers.remove(replayed);
        headers.remove(original_request);
    }
}

/// The headers of a reply that are stored: values of one name in their order.
pub(crate) fn storable(headers: &HeaderMap, denied: &[HeaderName]) -> HeaderMap {
    let mut stored = headers.clone();
    for nominated in headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok()) {
        for name in nominated.split(',') {
            stored.remove(name.trim());
        }
    }
    for name in HOP_BY_HOP.iter().chain(&NEVER_STORED).chain(&OURS).chain(denied) {
        stored.remove(name);
    }
    stored
}

/// Removes what describes the body that is left out.
pub(crate) fn strip_body_headers(headers: &mut HeaderMap) {
    OF_THE_BODY.iter().for_each(|name| {
        headers.remove(name);
    });
}

/// Names the trailers that follow, unless the reply does.
pub(crate) fn announce_trailers(headers: &mut HeaderMap, trailers: &HeaderMap) {
    if headers.contains_key(header::TRAILER) {
        return;
    }
    let names: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
    if let Ok(value) = HeaderValue::from_str(&names.join(", ")) {
        headers.insert(header::TRAILER, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn what_is_of_the_moment_is_not_stored() {
        let all = headers(&[
            ("location", "/charges/1"),
            ("etag", "\"1\""),
            ("content-type", "text/plain"),
            ("content-encoding", "gzip"),
            ("x-a", "1"),
            ("x-a", "2"),
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("date", "now"),
            ("www-authenticate", "Basic"),
            ("proxy-authenticate", "Basic"),
            ("alt-svc", "clear"),
            ("content-length", "3"),
            ("idempotency-replayed", "true"),
            ("idempotency-outcome", "definitive"),
            ("x-secret", "1"),
        ]);
        let stored = storable(&all, &[HeaderName::from_static("x-secret")]);
        let kept: Vec<_> = stored.iter().map(|(n, v)| (n.as_str(), v.to_str().unwrap())).collect();
        assert_eq!(
            kept,
            [
                ("location", "/charges/1"),
                ("etag", "\"1\""),
                ("content-type", "text/plain"),
                ("content-encoding", "gzip"),
                ("x-a", "1"),
                ("x-a", "2")
            ]
        );
    }

    #[test]
    fn ours_cannot_be_forged_and_the_key_stays() {
        let mut forged = headers(&[
            ("idempotency-key", "k"),
            ("idempotency-replayed", "true"),
            ("idempotent-replayed", "true"),
            ("idempotency-replay", "omitted"),
            ("idempotency-status", "degraded"),
            ("idempotency-key-expires", "never"),
            ("idempotency-attempt", "7"),
            ("idempotency-original-request", "1"),
            ("idempotency-original-traceparent", "1"),
            ("x-original", "1"),
            ("x-replayed", "true"),
        ]);
        let names = OurNames {
            replayed: HeaderName::from_static("x-replayed"),
            original_request: HeaderName::from_static("x-original"),
        };
        strip_ours(&mut forged, &names);
        assert_eq!(forged, headers(&[("idempotency-key", "k")]));
        for name in ["x-replayed", "x-original"] {
            let mut custom = headers(&[(name, "true")]);
            strip_ours(&mut custom, &names);
            assert!(custom.is_empty());
        }
    }

    #[test]
    fn trailers_are_announced_once() {
        let mut map = HeaderMap::new();
        announce_trailers(&mut map, &headers(&[("x-sum", "1"), ("grpc-status", "0")]));
        assert_eq!(map[header::TRAILER], "x-sum, grpc-status");
        announce_trailers(&mut map, &headers(&[("other", "1")]));
        assert_eq!(map[header::TRAILER], "x-sum, grpc-status");
    }
}
