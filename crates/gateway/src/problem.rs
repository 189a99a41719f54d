//! What the gateway itself refuses.

use bytes::{BufMut, Bytes};
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, HeaderValue};
use http::{Response, StatusCode};
use onlyonce_core::{Clock, SystemClock};
use onlyonce_http::{Code, Cors, DocsUrl, Problem};

use crate::exchange;

/// A request that two readers could read in two ways.
pub(crate) fn malformed(detail: &'static str) -> Problem {
    Problem::new(Code::RequestMalformed).detail(detail)
}

/// A request for a tunnel.
pub(crate) fn connect() -> Problem {
    malformed("CONNECT is not served: this is a reverse proxy.").status(StatusCode::METHOD_NOT_ALLOWED)
}

/// The answer after which the connection is closed: what follows on it cannot be trusted, or will not come.
pub(crate) fn closing(problem: Problem, docs: Option<&DocsUrl>) -> Response<Bytes> {
    let mut response = problem.into_response(docs);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The same as it goes over an HTTP/1.1 connection, to a request whose head was not read.
pub(crate) fn wire(problem: Problem, docs: Option<&DocsUrl>, cors: Option<&Cors>) -> Bytes {
    let (mut head, body) = closing(problem, docs).into_parts();
    if let Some(cors) = cors {
        cors.fit_refusal(None, &mut head.headers);
    }
    head.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    if let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(SystemClock.wall())) {
        head.headers.insert(DATE, date);
    }
    let mut bytes = exchange::head(head.status, &head.headers);
    bytes.put(body);
    bytes.freeze()
}

/// What stands behind a refusal that hyper makes by itself: a head without a body, with one of its three statuses.
pub(crate) fn of_bare_refusal(bytes: &[u8]) -> Option<Problem> {
    let rest = bytes.strip_prefix(b"HTTP/1.1 ").or_else(|| bytes.strip_prefix(b"HTTP/1.0 "))?;
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    match rest.get(..3)? {
        b"431" => Some(Problem::new(Code::HeadTooLarge)),
        b"414" => Some(
            Problem::new(Code::HeadTooLarge)
                .detail("The request target is too long.")
                .status(StatusCode::URI_TOO_LONG),
        ),
        b"400" => Some(malformed("The request head or its framing is not what RFC 9112 allows.")),
        _ => None,
    }
}
