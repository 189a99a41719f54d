//! A service that is called by HTTP.

use std::fmt::{self, Write as _};
use std::io;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use onlyonce_tls::{ClientTls, Connector, InvalidTls};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::response::{self, RESPONSE_BYTES_MAX};
use crate::envelope;
use crate::error::InboxError;
use crate::work::{Call, Ending, Handler, Stop};

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Posts the message to a URL with its key in the header `Idempotency-Key`; the body of the answer is the response.
///
/// 2xx is done; a 4xx other than 408, 425 and 429 a failure for good; every other answer, and none, leaves no record.
/// Redirects are not followed. Each message has a connection of its own.
#[derive(Clone)]
pub struct Http {
    url: HttpUrl,
    timeout: Duration,
    // `None` for http.
    tls: Option<Connector>,
}

/// An `http` or `https` URL of a service.
#[derive(Clone)]
pub struct HttpUrl {
    is_tls: bool,
    // As in the URL, and without the brackets of an IPv6 address.
    authority: String,
    host: String,
    port: u16,
    path: String,
}

/// A URL that cannot be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct InvalidUrl {
    reason: String,
}

impl Http {
    /// To that URL; where it is `https`, the service is trusted as `tls` says.
    ///
    /// # Errors
    /// [`InvalidTls`].
    pub fn new(url: HttpUrl, tls: &ClientTls) -> Result<Self, InvalidTls> {
        let tls = url.is_tls.then(|| tls.connector(&url.host, b"http/1.1")).transpose()?;
        Ok(Self { url, timeout: Duration::from_secs(30), tls })
    }

    /// How long an answer may take, its last byte included. 30 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    async fn call(&self, call: &Call<'_>) -> Result<(StatusCode, Option<Vec<u8>>), String> {
        let HttpUrl { authority, host, port, .. } = &self.url;
        let no_connection = |error: io::Error| format!("no connection to {authority}: {error}");
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(no_connection)?;
        stream.set_nodelay(true).map_err(no_connection)?;
        match &self.tls {
            None => self.exchange(call, stream).await,
            Some(connector) => {
                let stream = connector
                    .connect(stream)
                    .await
                    .map_err(|error| format!("no TLS with {authority}: {error}; the message was not sent"))?;
                self.exchange(call, stream).await
            }
        }
    }

    async fn exchange(
        &self,
        call: &Call<'_>,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<(StatusCode, Option<Vec<u8>>), String> {
        let no_answer = |error: hyper::Error| format!("{} gave no answer: {error}", self.url.authority);
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(no_answer)?;
        // Ends with the sender.
        tokio::spawn(connection);
        let body = Bytes::copy_from_slice(envelope::without_bom(call.message.body));
        let request = Request::post(&self.url.path)
            .header(header::HOST, &self.url.authority)
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", key_value(call.message.envelope.key.as_str()))
            .header(header::USER_AGENT, concat!("onlyonce-inbox/", env!("CARGO_PKG_VERSION")))
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let answer = sender.send_request(request).await.map_err(no_answer)?;
        let status = answer.status();
        let (mut body, mut kept, mut is_too_long) = (answer.into_body(), Vec::new(), false);
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(no_answer)?.into_data() else { continue };
            is_too_long |= kept.len() + data.len() > RESPONSE_BYTES_MAX;
            if is_too_long {
                break;
            }
            kept.extend_from_slice(&data);
        }
        Ok((status, (!is_too_long).then_some(kept)))
    }
}

impl Handler for Http {
    fn handle(&self, call: &Call<'_>) -> Result<Ending, InboxError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
                InboxError::file(std::path::Path::new("the runtime"), "cannot be started", error)
            })?;
        let answered = runtime.block_on(async {
            tokio::select! {
                answered = self.call(call) => answered,
                reason = stopped(&call.stop) => Err(format!("the call was given up: {reason}")),
                () = tokio::time::sleep(self.timeout) => Err(format!(
                    "{} gave no answer within {} s", self.url.authority, self.timeout.as_secs_f64()
                )),
            }
        });
        // A name that is still being looked up is not waited for.
        runtime.shutdown_background();
        let (status, body) = match answered {
            Ok(answered) => answered,
            Err(reason) => return Ok(Ending::Transient(reason)),
        };
        let response =
            || body.as_deref().map_or_else(|| response::omitted(call.message.envelope), response::line);
        Ok(match status.as_u16() {
            200..=299 => Ending::Done(response()),
            408 | 425 | 429 => transient(&self.url, status),
            400..=499 => Ending::Failed(response()),
            _ => transient(&self.url, status),
        })
    }
}

impl FromStr for HttpUrl {
    type Err = InvalidUrl;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        let invalid = |reason: &str| InvalidUrl { reason: reason.into() };
        let uri: Uri = url.parse().map_err(|_| invalid("it is no URL"))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(invalid("it must begin with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| invalid("it has no host"))?;
        // Neither the name nor the password is repeated.
        if authority.as_str().contains('@') {
            return Err(invalid("a user name in a URL would be seen by everybody who lists processes"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str().len() > authority.host().len() => {
                return Err(invalid("what follows the colon is no port"));
            }
            None if is_tls => 443,
            None => 80,
        };
        if host.is_empty() {
            return Err(invalid("it has no host"));
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok(Self { is_tls, authority: authority.as_str().into(), host, port, path })
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("url", &self.url).finish_non_exhaustive()
    }
}

impl fmt::Debug for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The path and the query may hold a secret.
        f.debug_struct("HttpUrl").field("authority", &self.authority).finish_non_exhaustive()
    }
}

fn transient(url: &HttpUrl, status: StatusCode) -> Ending {
    Ending::Transient(format!("{} answered {status}; nothing is recorded", url.authority))
}

async fn stopped(stop: &Stop<'_>) -> &'static str {
    loop {
        if let Some(reason) = stop.reason() {
            return reason;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

// A String of structured fields (RFC 9651), or a Display String for what is not ASCII: two keys never look alike.
fn key_value(key: &str) -> String {
    let mut value = String::with_capacity(key.len() + 2);
    if key.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        value.push('"');
        for c in key.chars() {
            if matches!(c, '"' | '\\') {
                value.push('\\');
            }
            value.push(c);
        }
    } else {
        value.push_str("%\"");
        for byte in key.bytes() {
            match byte {
                b'%' | b'"' | ..0x20 | 0x7f.. => {
                    write!(value, "%{byte:02x}").expect("a String takes any text")
                }
                byte => value.push(byte.into()),
            }
        }
    }
    value.push('"');
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_strings_of_structured_fields() {
        assert_eq!(key_value("WMS%2F1/42"), r#""WMS%2F1/42""#);
        assert_eq!(key_value(r#"a"b\c"#), r#""a\"b\\c""#);
        assert_eq!(key_value("주%"), r#"%"%ec%a3%bc%25""#);
    }

    #[test]
    fn urls_are_read_and_a_password_is_not_repeated() {
        for url in
            ["", "/x", "ftp://a/b", "http://", "http://a:/x", "http://a:99999/", "http://ada:secret@host/"]
        {
            let error = url.parse::<HttpUrl>().expect_err(url).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let url: HttpUrl = "http://[::1]:8080/a?b=c".parse().expect("a URL");
        assert_eq!((url.host.as_str(), url.port, url.path.as_str()), ("::1", 8080, "/a?b=c"));
    }
}
