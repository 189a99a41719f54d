//! As much of HTTP/1.1 as both ends of a benchmark need: one message with a `Content-Length` at a time.

use anyhow::{Context, Result, bail, ensure};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

const MESSAGE_BYTES_MAX: usize = 64 * 1024;

/// Reads messages from a connection on which one is answered before the next is sent.
pub(crate) struct Reader {
    buffer: Box<[u8]>,
    filled: usize,
}

/// One message, valid until the next is read.
pub(crate) struct Message<'a> {
    /// Start line and headers, without the empty line.
    pub(crate) head: &'a [u8],
    pub(crate) body: &'a [u8],
}

impl Reader {
    pub(crate) fn new() -> Self {
        Self { buffer: vec![0; MESSAGE_BYTES_MAX].into(), filled: 0 }
    }

    /// Reads one message; `None` when the other side closed instead.
    pub(crate) async fn read(&mut self, stream: &mut TcpStream) -> Result<Option<Message<'_>>> {
        self.filled = 0;
        let mut searched = 0;
        let head_end = loop {
            if self.fill(stream).await? == 0 {
                ensure!(self.filled == 0, "closed in the middle of a message");
                return Ok(None);
            }
            match find(&self.buffer[searched..self.filled], b"\r\n\r\n") {
                Some(at) => break searched + at,
                None => searched = self.filled.saturating_sub(3),
            }
        };
        let body_start = head_end + 4;
        let body_end = body_start + content_length(&self.buffer[..head_end])?;
        ensure!(body_end <= MESSAGE_BYTES_MAX, "a message of more than {MESSAGE_BYTES_MAX} bytes");
        while self.filled < body_end {
            ensure!(self.fill(stream).await? > 0, "closed in the middle of a body");
        }
        ensure!(self.filled == body_end, "more than one message was sent");
        Ok(Some(Message { head: &self.buffer[..head_end], body: &self.buffer[body_start..body_end] }))
    }

    async fn fill(&mut self, stream: &mut TcpStream) -> Result<usize> {
        ensure!(self.filled < self.buffer.len(), "a message of more than {MESSAGE_BYTES_MAX} bytes");
        let read = stream.read(&mut self.buffer[self.filled..]).await.context("read")?;
        self.filled += read;
        Ok(read)
    }
}

impl Message<'_> {
    /// Of a response: whether its status is 2xx.
    pub(crate) fn is_success(&self) -> bool {
        self.head.starts_with(b"HTTP/1.1 2")
    }

    /// For error messages.
    pub(crate) fn text(&self) -> String {
        [self.head, self.body].map(String::from_utf8_lossy).join(" | ").replace("\r\n", " | ")
    }
}

// No such field: no body, as in a request without one.
fn content_length(head: &[u8]) -> Result<usize> {
    for line in head.split(|byte| *byte == b'\n').skip(1) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"content-length") {
            return std::str::from_utf8(value)?.parse().context("Content-Length");
        }
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            bail!("chunked messages are not read here");
        }
    }
    Ok(0)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_found_in_any_case() {
        assert_eq!(content_length(b"HTTP/1.1 200 OK\r\na: b\r\ncontent-LENGTH:  17 \r\nc: d").unwrap(), 17);
        assert_eq!(content_length(b"GET / HTTP/1.1\r\nhost: a").unwrap(), 0);
        assert!(content_length(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked").is_err());
    }
}
