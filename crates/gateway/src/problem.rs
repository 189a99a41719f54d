//! What the gateway itself refuses.

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Response, StatusCode};
use onlyonce_http::{Code, DocsUrl, Problem};

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
