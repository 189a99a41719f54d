//! A stream of lines, a message each (NDJSON), cut into blocks that are read elsewhere in parallel.

use std::io::{self, Read};

use super::MESSAGE_BYTES_MAX;

/// How many bytes a block has, about.
const BLOCK_BYTES: usize = 64 << 10;

/// Whole lines of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lines {
    /// The number of the first line.
    pub(crate) first_line: u64,
    pub(crate) text: Vec<u8>,
    /// The block stands for one line that was too long to be kept.
    pub(crate) is_too_long: bool,
    /// How many bytes of the stream it stands for.
    pub(crate) bytes: u64,
}

/// One line that is not blank.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line<'l> {
    pub(crate) number: u64,
    pub(crate) text: &'l [u8],
}

impl Lines {
    /// The lines that are not blank, without their ends.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Line<'_>> {
        let lines = self.text.split(|byte| *byte == b'\n').zip(self.first_line..);
        lines
            .map(|(text, number)| Line { number, text: text.strip_suffix(b"\r").unwrap_or(text) })
            .filter(|line| !line.text.trim_ascii().is_empty())
    }
}

/// Cuts a stream into blocks of whole lines.
#[derive(Debug)]
pub(crate) struct LineReader<R> {
    from: R,
    // What was read after the last whole line.
    rest: Vec<u8>,
    next_line: u64,
    is_over: bool,
}

impl<R: Read> LineReader<R> {
    pub(crate) fn new(from: R) -> Self {
        Self { from, rest: Vec::new(), next_line: 1, is_over: false }
    }

    /// The next block, or `None` at the end.
    pub(crate) fn next(&mut self) -> io::Result<Option<Lines>> {
        let mut text = std::mem::take(&mut self.rest);
        text.reserve(BLOCK_BYTES);
        while !self.is_over {
            let had = text.len();
            // What has come is handed on, so that a slow stream is received as it comes.
            self.fill(&mut text)?;
            if let Some(end) = text[had..].iter().rposition(|byte| *byte == b'\n') {
                self.rest = text.split_off(had + end + 1);
                return Ok(Some(self.block(text)));
            }
            if text.len() > MESSAGE_BYTES_MAX {
                return self.skip_line(text.len() as u64).map(Some);
            }
        }
        Ok((!text.is_empty()).then(|| self.block(text)))
    }

    fn block(&mut self, text: Vec<u8>) -> Lines {
        let first_line = self.next_line;
        self.next_line += text.iter().filter(|byte| **byte == b'\n').count() as u64;
        Lines { first_line, bytes: text.len() as u64, text, is_too_long: false }
    }

    // One read, of up to a block.
    fn fill(&mut self, text: &mut Vec<u8>) -> io::Result<()> {
        let had = text.len();
        text.resize(had + BLOCK_BYTES, 0);
        let read = loop {
            match self.from.read(&mut text[had..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        text.truncate(had + read);
        self.is_over = read == 0;
        Ok(())
    }

    fn skip_line(&mut self, mut bytes: u64) -> io::Result<Lines> {
        let mut text = Vec::new();
        while !self.is_over {
            text.clear();
            self.fill(&mut text)?;
            bytes += text.len() as u64;
            if let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                bytes -= (text.len() - end - 1) as u64;
                self.rest = text.split_off(end + 1);
                break;
            }
        }
        let first_line = self.next_line;
        self.next_line += 1;
        Ok(Lines { first_line, text: Vec::new(), is_too_long: true, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives a few bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(into.len());
            into[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    fn all(text: &[u8], step: usize) -> Vec<(u64, String)> {
        let mut reader = LineReader::new(Slow(text, step));
        let mut found = Vec::new();
        while let Some(lines) = reader.next().unwrap() {
            assert!(!lines.is_too_long);
            found.extend(
                lines.iter().map(|line| (line.number, String::from_utf8(line.text.to_vec()).unwrap())),
            );
        }
        found
    }

    #[test]
    fn lines_are_numbered_however_they_come() {
        let text = b"\n{1}\r\n  \n{2}\n\n{3";
        let expected = [(2, "{1}".to_owned()), (4, "{2}".to_owned()), (6, "{3".to_owned())];
        for step in [1, 2, 3, 5, 100] {
            assert_eq!(all(text, step), expected, "{step}");
        }
        assert_eq!(all(b"", 10), []);
        assert_eq!(all(b"\n\n", 10), []);
    }

    #[test]
    fn a_line_that_is_too_long_is_one_block_and_the_next_line_is_read() {
        let mut text = b"{1}\n".to_vec();
        text.extend(std::iter::repeat_n(b'x', MESSAGE_BYTES_MAX + BLOCK_BYTES));
        text.extend(b"\n{3}\n");
        let mut reader = LineReader::new(text.as_slice());
        let mut seen = Vec::new();
        let mut bytes = 0;
        while let Some(lines) = reader.next().unwrap() {
            bytes += lines.bytes;
            match lines.is_too_long {
                true => seen.push((lines.first_line, "too long".to_owned())),
                false => {
                    seen.extend(lines.iter().map(|l| (l.number, String::from_utf8(l.text.to_vec()).unwrap())))
                }
            }
        }
        assert_eq!(seen, [(1, "{1}".to_owned()), (2, "too long".to_owned()), (3, "{3}".to_owned())]);
        assert_eq!(bytes, text.len() as u64);
    }
}
