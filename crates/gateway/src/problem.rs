//! Refusals as RFC 9457 problem documents.

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};

/// A refusal of the gateway itself; each `code` has a page in `docs/errors/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) title: &'static str,
    pub(crate) detail: &'static str,
    /// Whether sending the same request again is safe and may succeed.
    pub(crate) retryable: bool,
    /// Whether the connection is closed after it.
    pub(crate) close: bool,
}

impl Problem {
    pub(crate) const fn malformed(detail: &'static str) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            code: "request-malformed",
            title: "The request is malformed",
            detail,
            retryable: false,
            close: true,
        }
    }

    pub(crate) const CONNECT: Self = Self {
        status: StatusCode::METHOD_NOT_ALLOWED,
        code: "method-not-allowed",
        title: "The method is not allowed",
        detail: "CONNECT is not served: this is a reverse proxy.",
        retryable: false,
        close: true,
    };

    pub(crate) const REQUEST_TIMEOUT: Self = Self {
        status: StatusCode::REQUEST_TIMEOUT,
        code: "request-timeout",
        title: "The request did not arrive in time",
        detail: "The rest of the request body did not come.",
        retryable: false,
        close: true,
    };

    pub(crate) const REQUEST_CUT_SHORT: Self = Self::malformed("The request body ended before its end.");

    pub(crate) const UNREACHABLE: Self = Self {
        status: StatusCode::BAD_GATEWAY,
        code: "upstream-unreachable",
        title: "The upstream cannot be reached",
        detail: "Nothing was sent to the upstream. Sending the request again is safe.",
        retryable: true,
        close: false,
    };

    pub(crate) const fn timeout(repeatable: bool) -> Self {
        Self {
            status: StatusCode::GATEWAY_TIMEOUT,
            code: "upstream-timeout",
            title: "The upstream did not answer in time",
            detail: "The request was sent and no answer came in time. It may have taken effect.",
            retryable: repeatable,
            close: false,
        }
    }

    pub(crate) const fn reset(repeatable: bool) -> Self {
        Self {
            status: StatusCode::BAD_GATEWAY,
            code: "upstream-reset",
            title: "The upstream broke off",
            detail: "The request was sent and no valid answer came back. It may have taken effect.",
            retryable: repeatable,
            close: false,
        }
    }

    pub(crate) fn body(&self) -> Bytes {
        let Self { status, code, title, detail, retryable, .. } = self;
        // Every part is a literal of ours without quotes or backslashes.
        let status = status.as_u16();
        Bytes::from(format!(
            "{{\"type\":\"urn:onlyonce:error:{code}\",\"title\":\"{title}\",\"status\":{status},\
             \"detail\":\"{detail}\",\"code\":\"{code}\",\"retryable\":{retryable}}}"
        ))
    }

    pub(crate) fn into_response<B>(self, body: impl FnOnce(Bytes) -> B) -> Response<B> {
        let mut response = Response::new(body(self.body()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
