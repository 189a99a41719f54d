//! Answers, and the bytes of them.

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::header::{HeaderName, HeaderValue};
use serde_json::{Value, json};

/// An answer as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Bytes>) -> Self {
        Self { status, headers: Vec::new(), body: body.into() }
    }

    /// A refusal (RFC 9457).
    pub(crate) fn problem(status: u16, code: &str, detail: &str) -> Self {
        let body = json!({"type": format!("urn:zoo:{code}"), "title": code, "status": status, "detail": detail, "code": code});
        Self::new(status, body.to_string())
            .header("content-type", "application/problem+json")
            .header("link", "<https://zoo.example/errors>; rel=\"describedby\"")
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(have, _)| have != name);
        self
    }

    pub(crate) fn is(&self, content_type: &str) -> bool {
        self.headers.iter().any(|(name, value)| name == "content-type" && value == content_type)
    }

    /// As a line of the journal.
    pub(crate) fn to_json(&self) -> Value {
        json!({"status": self.status, "headers": self.headers, "body": self.body.to_vec()})
    }

    /// Back from a line of the journal.
    pub(crate) fn from_json(line: &Value) -> Self {
        let body: Vec<u8> = serde_json::from_value(line["body"].clone()).expect("bytes");
        let mut reply = Self::new(line["status"].as_u64().expect("a status") as u16, body);
        reply.headers = serde_json::from_value(line["headers"].clone()).expect("headers");
        reply
    }
}

impl From<Reply> for Response<Full<Bytes>> {
    fn from(reply: Reply) -> Self {
        let mut response = Response::new(Full::new(reply.body));
        *response.status_mut() = reply.status.try_into().expect("a status");
        for (name, value) in reply.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
            response.headers_mut().append(name, HeaderValue::from_str(&value).expect("a header value"));
        }
        response
    }
}
