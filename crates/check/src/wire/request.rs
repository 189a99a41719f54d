//! A request as the bytes that go on the wire: the checker must be able to send what no client library would.

use bytes::Bytes;
use http::Method;

/// One request. Header values are raw bytes; the caller answers for what they do to the message.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) method: Method,
    /// Path and query, as they are sent.
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Bytes,
}

impl Call {
    /// Adds a header line.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// The head as bytes, with Host and Content-Length.
    pub(crate) fn head(&self, authority: &str) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        let mut line = |name: &str, value: &[u8]| {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value);
            head.extend_from_slice(b"\r\n");
        };
        if !self.has("host") {
            line("Host", authority.as_bytes());
        }
        for (name, value) in &self.headers {
            line(name, value);
        }
        if !self.has("user-agent") {
            line("User-Agent", concat!("onlyonce-check/", env!("CARGO_PKG_VERSION")).as_bytes());
        }
        if !self.has("accept") {
            line("Accept", b"*/*");
        }
        if !self.body.is_empty() || !matches!(self.method, Method::GET | Method::HEAD | Method::OPTIONS) {
            line("Content-Length", self.body.len().to_string().as_bytes());
        }
        // A connection serves one request, so that no keep-alive race can spoil an answer.
        line("Connection", b"close");
        head.extend_from_slice(b"\r\n");
        head
    }

    fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name))
    }
}
