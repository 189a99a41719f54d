//! Messages of HTTP/1.1 as they are on the wire, read with as little judgement as can be.

use testkit::RawConnection;

/// One message. Text is Latin-1: one character a byte, so that nothing is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) start: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) framing: Framing,
    pub(crate) body: Vec<u8>,
    pub(crate) extensions: bool,
    pub(crate) trailers: Vec<(String, String)>,
    pub(crate) complete: bool,
}

/// How the end of the body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    None,
    Length,
    Chunks,
    Close,
}

impl Message {
    /// The parts of the start line; a reason may hold spaces.
    pub(crate) fn start_parts(&self) -> [&str; 3] {
        let mut parts = self.start.splitn(3, ' ');
        [(); 3].map(|()| parts.next().unwrap_or_default())
    }

    pub(crate) fn status(&self) -> u16 {
        self.start_parts()[1].parse().unwrap_or_default()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// A member of a problem document, or nothing.
    pub(crate) fn code(&self) -> Option<String> {
        let body: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        Some(body["code"].as_str()?.to_owned())
    }
}

pub(crate) fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

/// A request as the upstream reads it; `None` when the other side closes.
pub(crate) async fn read_request(connection: &mut RawConnection) -> Option<Message> {
    let bytes = connection.read_head().await?;
    // RFC 9112 §2.2: empty lines before a request are skipped.
    let empty = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    let mut message = head(&bytes[empty..]);
    message.framing = if message.header("transfer-encoding").is_some() {
        Framing::Chunks
    } else if message.header("content-length").is_some_and(|len| len != "0") {
        Framing::Length
    } else {
        Framing::None
    };
    Some(message)
}

/// An answer to a request of this method, interim ones too; `None` when the other side closes.
pub(crate) async fn read_answer(connection: &mut RawConnection, method: &str) -> Option<Message> {
    let mut message = head(&connection.read_head().await?);
    let status = message.status();
    message.framing = if status < 200 || matches!(status, 204 | 304) || method == "HEAD" {
        Framing::None
    } else if message.header("transfer-encoding").is_some_and(|coding| coding.ends_with("chunked")) {
        Framing::Chunks
    } else if message.header("transfer-encoding").is_none() && message.header("content-length").is_some() {
        Framing::Length
    } else {
        Framing::Close
    };
    read_body(connection, &mut message).await;
    Some(message)
}

/// Reads the body as the head says.
pub(crate) async fn read_body(connection: &mut RawConnection, message: &mut Message) {
    let complete = match message.framing {
        Framing::None => true,
        Framing::Length => {
            let len = message.header("content-length").and_then(|len| len.parse().ok()).unwrap_or_default();
            match connection.read_exact(len).await {
                Some(body) => {
                    message.body = body;
                    true
                }
                None => false,
            }
        }
        Framing::Close => {
            message.body = connection.read_to_end().await;
            true
        }
        Framing::Chunks => read_chunks(connection, message).await.is_some(),
    };
    if !complete {
        message.complete = false;
        message.body.extend(connection.read_to_end().await);
    }
}

async fn read_chunks(connection: &mut RawConnection, message: &mut Message) -> Option<()> {
    loop {
        let line = latin1(&connection.read_until(b"\r\n").await?);
        let size = line.trim_end().split(';').next().unwrap_or_default();
        message.extensions |= line.contains(';');
        let size = usize::from_str_radix(size.trim(), 16).ok()?;
        if size == 0 {
            break;
        }
        message.body.extend(connection.read_exact(size).await?);
        connection.read_exact(2).await?;
    }
    loop {
        let line = latin1(&connection.read_until(b"\r\n").await?);
        if line == "\r\n" {
            return Some(());
        }
        message.trailers.push(field(line.trim_end()));
    }
}

fn head(bytes: &[u8]) -> Message {
    let text = latin1(bytes);
    let mut lines = text.trim_end_matches("\r\n").split("\r\n");
    let start = lines.next().unwrap_or_default().to_owned();
    let mut headers: Vec<(String, String)> = Vec::new();
    for line in lines {
        match headers.last_mut() {
            // A folded line belongs to the one before.
            Some((_, value)) if line.starts_with([' ', '\t']) => value.push_str(&format!("\r\n{line}")),
            _ => headers.push(field(line)),
        }
    }
    Message {
        start,
        headers,
        framing: Framing::None,
        body: Vec::new(),
        extensions: false,
        trailers: Vec::new(),
        complete: true,
    }
}

fn field(line: &str) -> (String, String) {
    let (name, value) = line.split_once(':').unwrap_or((line, ""));
    (name.to_owned(), value.trim_matches([' ', '\t']).to_owned())
}
