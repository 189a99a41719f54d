//! Refusals: RFC 9457 problem details, each code in one table.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use onlyonce_core::Origin;

macro_rules! codes {
    ($($variant:ident $code:literal $status:literal $retryable:literal $title:literal $advice:literal)*) => {
        /// Why a request was refused. The table of all codes is [`Code::ALL`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = concat!("`", $code, "`, ", stringify!($status), ". ", $title, ".")] $variant,)*
        }

        impl Code {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// What is known about it.
            pub fn entry(self) -> &'static Entry {
                match self {
                    $(Code::$variant => &Entry {
                        code: $code, status: $status, retryable: $retryable, title: $title, advice: $advice,
                    },)*
                }
            }
        }
    };
}

codes! {
    KeyMissing "key-missing" 400 false
        "An idempotency key is required"
        "Send an Idempotency-Key header: one fresh value for each logical operation, the same on each of its retries."
    KeyMalformed "key-malformed" 400 false
        "The idempotency key is malformed"
        "Send one Idempotency-Key header line with 1 to 255 visible ASCII characters, best as a quoted string with a UUID in it."
    ScopeMissing "scope-missing" 400 false
        "Nothing says whose idempotency key this is"
        "Send the credentials that the service scopes keys by; the operator names the session with the options scope-header or scope-cookie."
    ScopeUnstable "scope-unstable" 400 false
        "The credentials change with every request"
        "Credentials that sign each request cannot scope a key, since a retry would be another caller: the operator configures a scope source."
    BodyMalformed "body-malformed" 400 false
        "The body cannot be compared with a retry"
        "Send valid JSON in UTF-8, without duplicate members and at most 128 levels deep, or another media type."
    BodyIncomplete "body-incomplete" 400 true
        "The request body did not arrive"
        "Nothing was run. Send the whole request again with the same key."
    BodyTimeout "body-timeout" 408 true
        "The request body took too long"
        "Nothing was run. Send the whole request again with the same key."
    BodyTooLarge "body-too-large" 413 false
        "The request body is too large to be guarded"
        "Nothing was run. Send less, or let the operator raise max-request-body."
    KeyReused "key-reused" 422 false
        "The key belongs to another request"
        "A key names one operation: use a fresh key for a new one, and exactly the first request for a retry."
    InProgress "in-progress" 409 true
        "The operation is in progress"
        "Another copy of this request is being worked on: wait for Retry-After, then send the same request again."
    Superseded "superseded" 409 true
        "Another attempt took the operation over"
        "This attempt lost its lease while it worked: send the same request again to get the result of the other one."
    OutcomeUnknown "outcome-unknown" 409 false
        "Nobody knows whether the operation happened"
        "Find out at the service behind, then resolve it with `onlyonce keys resolve`, or free it with `onlyonce keys release`. The first answer has status 504."
    FingerprintUnknown "fingerprint-unknown" 409 false
        "The stored request cannot be compared with this one"
        "The record was made under a fingerprint definition that this service does not know any more: the operator adds it to the known ones."
    HandlerPanicked "handler-panicked" 500 false
        "The service failed in the middle of the operation"
        "It may have happened. Ask the service what became of it before you use a fresh key."
    StoreUnavailable "store-unavailable" 503 true
        "The store of idempotency keys does not answer"
        "Nothing was run. Send the same request again after Retry-After."
    RecordUnreadable "record-unreadable" 503 true
        "The record of this key cannot be read by this release"
        "Nothing was run. A newer release wrote the record, or it is damaged; the log of the service says more. Send the same request again when that is mended."
    Overloaded "overloaded" 503 true
        "Too much is in flight"
        "Nothing was run. Send the same request again after Retry-After."
    ShuttingDown "shutting-down" 503 true
        "The service is shutting down"
        "Nothing was run. Send the same request again."
    UpstreamUnreachable "upstream-unreachable" 502 true
        "The service behind cannot be reached"
        "Nothing was sent to it. Send the same request again."
    UpstreamFailed "upstream-failed" 502 false
        "The service behind broke off its answer"
        "The request was not guarded by a key: find out what became of it before you send it again."
    UpstreamTimeout "upstream-timeout" 504 false
        "The service behind did not answer in time"
        "The request was not guarded by a key: find out what became of it before you send it again."
    HeadTooLarge "head-too-large" 431 false
        "The request head is too large"
        "Nothing was run. Send fewer or shorter headers and a shorter target, or let the operator raise max-header-bytes."
    HeadTimeout "head-timeout" 408 true
        "The request head took too long"
        "Nothing was run. Send the whole request again with the same key."
    RequestMalformed "request-malformed" 400 false
        "The request has no single meaning"
        "Frame the body in one way, by Content-Length or by chunks, and keep to RFC 9112."
}

/// One line of the table of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// As in `code` and at the end of `type`.
    pub code: &'static str,
    /// The status it is answered with.
    pub status: u16,
    /// Whether the same request may succeed later without anybody changing anything.
    pub retryable: bool,
    /// What it means.
    pub title: &'static str,
    /// What to do about it.
    pub advice: &'static str,
}

/// No such code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such error code")]
pub struct UnknownCode;

impl Code {
    /// As in `code`.
    pub fn as_str(self) -> &'static str {
        self.entry().code
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Code {
    type Err = UnknownCode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().copied().find(|code| code.as_str() == text).ok_or(UnknownCode)
    }
}

/// Among the extensions of an answer: it is ours, such as a refusal, and no reply of the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ours;

/// One refusal: a code, and what is special about this case.
#[derive(Clone, Debug)]
pub struct Problem {
    code: Code,
    status: u16,
    retryable: bool,
    detail: Cow<'static, str>,
    retry_after: Option<Duration>,
    original: Option<Origin>,
}

impl Problem {
    /// What is wrong with this request, and what to do.
    pub fn detail_text(&self) -> &str {
        &self.detail
    }

    /// A refusal with the status of the table and its advice as detail.
    pub fn new(code: Code) -> Self {
        let Entry { status, retryable, advice, .. } = *code.entry();
        Self { code, status, retryable, detail: advice.into(), retry_after: None, original: None }
    }

    /// Says what is wrong in this case.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.detail = detail.into();
        self
    }

    /// Another status than the table's.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = status.as_u16();
        self
    }

    /// Whether the same request may succeed later, where this case differs from the table.
    #[must_use]
    pub fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    /// Adds `Retry-After`, rounded up to whole seconds, at least one.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Says which request's run it is about.
    #[must_use]
    pub(crate) fn of_request(mut self, original: Option<Origin>) -> Self {
        self.original = original;
        self
    }

    pub(crate) fn original(&self) -> Option<&Origin> {
        self.original.as_ref()
    }

    /// The code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The answer: `application/problem+json`, never cached; `docs` becomes a `Link` with relation `describedby`.
    pub fn into_response(self, docs: Option<&DocsUrl>) -> Response<Bytes> {
        let body = serde_json::json!({
            "type": format!("urn:onlyonce:error:{}", self.code),
            "title": self.code.entry().title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code.as_str(),
            "retryable": self.retryable,
        });
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response.extensions_mut().insert(Ours);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, retry_after_value(after));
        }
        if let Some(link) = docs.and_then(|docs| docs.link(self.code)) {
            headers.insert(header::LINK, link);
        }
        response
    }
}

pub(crate) fn retry_after_value(after: Duration) -> HeaderValue {
    let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    HeaderValue::from(seconds.max(1))
}

/// Where the codes are documented. `{code}` in it stands for the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocsUrl(String);

/// Not a URL that fits between the angle brackets of a `Link` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a documentation URL is visible ASCII without < > and quotes")]
pub struct InvalidDocsUrl;

impl DocsUrl {
    /// Takes a URL as it is.
    ///
    /// # Errors
    /// [`InvalidDocsUrl`] when it would break out of the header.
    pub fn new(url: impl Into<String>) -> Result<Self, InvalidDocsUrl> {
        let url = url.into();
        let fits = |b: u8| b.is_ascii_graphic() && !matches!(b, b'<' | b'>' | b'"');
        if !url.is_empty() && url.bytes().all(fits) { Ok(Self(url)) } else { Err(InvalidDocsUrl) }
    }

    fn link(&self, code: Code) -> Option<HeaderValue> {
        let url = self.0.replace("{code}", code.as_str());
        HeaderValue::from_str(&format!("<{url}>; rel=\"describedby\"")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_is_there_once_and_comes_back() {
        let mut seen = std::collections::HashSet::new();
        for code in Code::ALL {
            let entry = code.entry();
            assert!(seen.insert(entry.code), "{code} twice");
            assert_eq!(entry.code.parse(), Ok(*code));
            assert!(entry.code.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{code}");
            assert!((400..600).contains(&entry.status), "{code}");
            assert!(!entry.title.ends_with('.') && entry.advice.ends_with('.'), "{code}");
            // What the client sent wrongly stays wrong; what is ours to mend can be tried again.
            assert!(entry.status != 503 || entry.retryable, "{code}");
        }
        assert_eq!("no-such-code".parse::<Code>(), Err(UnknownCode));
    }

    #[test]
    fn the_body_is_problem_details() {
        let docs = DocsUrl::new("https://example.com/errors/{code}").unwrap();
        for code in Code::ALL {
            let problem = Problem::new(*code).detail("\"quoted\"\n").retry_after(Duration::from_millis(1500));
            let response = problem.into_response(Some(&docs));
            assert_eq!(response.status().as_u16(), code.entry().status);
            let headers = response.headers();
            assert_eq!(headers["content-type"], "application/problem+json");
            assert_eq!(headers["retry-after"], "2");
            assert_eq!(headers["link"], format!("<https://example.com/errors/{code}>; rel=\"describedby\""));
            let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body["type"], format!("urn:onlyonce:error:{code}"));
            assert_eq!(body["title"], code.entry().title);
            assert_eq!(body["status"], code.entry().status);
            assert_eq!(body["detail"], "\"quoted\"\n");
            assert_eq!(body["code"], code.as_str());
            assert_eq!(body["retryable"], code.entry().retryable);
        }
        assert!(!Problem::new(Code::KeyMissing).into_response(None).headers().contains_key("link"));
    }

    #[test]
    fn a_docs_url_cannot_break_out_of_its_header() {
        for bad in ["", "https://a/>; rel=x", "https://a/\r\nX: y", "https://a/ b", "\"", "é"] {
            assert_eq!(DocsUrl::new(bad), Err(InvalidDocsUrl), "{bad:?}");
        }
    }
}
