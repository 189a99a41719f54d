//! Where a run may send to.

use std::fmt;

use http::Uri;

/// A URL that cannot be checked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url}: {reason}")]
pub struct InvalidUrl {
    url: String,
    reason: &'static str,
}

/// An absolute `http` or `https` URL, without credentials and fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub(crate) endpoint: Endpoint,
    /// Path and query.
    pub(crate) path: String,
}

/// Scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) https: bool,
    /// As in the URL: an IPv6 address in brackets.
    host: String,
    pub(crate) port: u16,
}

impl Target {
    /// Reads a URL.
    ///
    /// # Errors
    /// When it is not an absolute `http` or `https` URL, or has a user name in it: that belongs into a header.
    pub fn parse(url: &str) -> Result<Self, InvalidUrl> {
        // A password must not come back in an error.
        let shown = url.rsplit_once('@').map_or_else(|| url.to_owned(), |(_, rest)| format!("…@{rest}"));
        let invalid = |reason| InvalidUrl { url: shown.clone(), reason };
        let uri: Uri = url.parse().map_err(|_| invalid("not a URL"))?;
        let https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(invalid("not an absolute URL that begins with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| invalid("no host"))?;
        if authority.as_str().contains('@') {
            return Err(invalid(
                "a user name in the URL; give a header instead: --header 'Authorization: …'",
            ));
        }
        let host = authority.host().to_owned();
        if host.is_empty() {
            return Err(invalid("no host"));
        }
        let port = match authority.as_str()[host.len()..].strip_prefix(':') {
            None if https => 443,
            None => 80,
            Some(port) => port.parse().map_err(|_| invalid("not a port after the colon"))?,
        };
        let path = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
        Ok(Self { endpoint: Endpoint { https, host, port }, path })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.endpoint, self.path)
    }
}

impl Endpoint {
    /// For the Host header: without the port where it is the scheme's own.
    pub(crate) fn authority(&self) -> String {
        match (self.https, self.port) {
            (false, 80) | (true, 443) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }

    /// For the resolver: without brackets.
    pub(crate) fn dial_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.https { "https" } else { "http" }, self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_shown() {
        for (url, shown, host, port) in [
            ("http://127.0.0.1:8130/pay?x=1", "http://127.0.0.1:8130/pay?x=1", "127.0.0.1", 8130),
            ("https://api.example.com", "https://api.example.com/", "api.example.com", 443),
            ("http://[::1]:80/a", "http://[::1]/a", "::1", 80),
        ] {
            let target = Target::parse(url).unwrap();
            assert_eq!((target.to_string().as_str(), target.endpoint.dial_host()), (shown, host));
            assert_eq!(target.endpoint.port, port);
        }
    }

    #[test]
    fn what_cannot_be_checked_is_refused_and_a_password_is_not_repeated() {
        for url in [
            "",
            "/pay",
            "ftp://a/b",
            "localhost:80",
            "http://",
            "http://a:/x",
            "http://a:99999/",
            "http://a b/",
        ] {
            assert!(Target::parse(url).is_err(), "{url:?}");
        }
        let error = Target::parse("http://me:hush@a/x").unwrap_err().to_string();
        assert!(error.contains("--header") && !error.contains("hush"), "{error}");
    }
}
