//! Readers of different habits. What the gateway sends must be the same to all of them.

/// How one reader takes what has no single meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habits {
    /// A bare LF ends a line.
    bare_lf: bool,
    /// A length wins over chunks.
    length_first: bool,
    /// Whatever has `chunked` somewhere in it is chunks.
    loose_coding: bool,
    /// A name ends before white space and underscores are hyphens.
    loose_names: bool,
    /// Bodies of GET, HEAD and DELETE are not read.
    bodiless: bool,
}

impl Habits {
    /// All combinations.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..32u8).map(|bits| Self {
            bare_lf: bits & 1 != 0,
            length_first: bits & 2 != 0,
            loose_coding: bits & 4 != 0,
            loose_names: bits & 8 != 0,
            bodiless: bits & 16 != 0,
        })
    }
}

/// The request lines that such a reader finds; the last may be the beginning of one.
pub(crate) fn requests(mut bytes: &[u8], habits: Habits) -> Vec<String> {
    let mut found = Vec::new();
    loop {
        let empty = bytes.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
        bytes = &bytes[empty..];
        let Some((head, rest)) = split_head(bytes, habits) else {
            if !bytes.is_empty() {
                found.push(format!("begun: {}", String::from_utf8_lossy(bytes)));
            }
            return found;
        };
        let lines = lines(head, habits);
        let first = String::from_utf8_lossy(lines.first().copied().unwrap_or_default()).into_owned();
        let bodiless = habits.bodiless && ["GET ", "HEAD ", "DELETE "].iter().any(|m| first.starts_with(m));
        found.push(first);
        // After it nothing is read.
        if lines.iter().any(|line| line.eq_ignore_ascii_case(b"connection: close")) && bodiless {
            return found;
        }
        let Some(rest) = (if bodiless { Some(rest) } else { skip_body(&lines, rest, habits) }) else {
            return found;
        };
        bytes = rest;
    }
}

fn split_head(bytes: &[u8], habits: Habits) -> Option<(&[u8], &[u8])> {
    let strict = find(bytes, b"\r\n\r\n").map(|at| (at, at + 4));
    let loose = [&b"\n\n"[..], b"\n\r\n"].into_iter().filter_map(|end| Some((find(bytes, end)?, end.len())));
    let loose = loose.map(|(at, len)| (at, at + len)).min();
    let (end, next) = if habits.bare_lf { strict.into_iter().chain(loose).min()? } else { strict? };
    Some((&bytes[..end], &bytes[next..]))
}

fn lines(head: &[u8], habits: Habits) -> Vec<&[u8]> {
    if habits.bare_lf {
        return head.split(|b| *b == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line)).collect();
    }
    let (mut lines, mut rest) = (Vec::new(), head);
    while let Some(at) = find(rest, b"\r\n") {
        lines.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    lines.push(rest);
    lines
}

/// What follows the body; `None` when it is not all there.
fn skip_body<'a>(lines: &[&[u8]], rest: &'a [u8], habits: Habits) -> Option<&'a [u8]> {
    let (mut length, mut chunks) = (None, false);
    for line in &lines[1..] {
        let text = String::from_utf8_lossy(line).to_lowercase();
        let Some((name, value)) = text.split_once(':') else { continue };
        let loose = name.trim().replace('_', "-");
        let name = if habits.loose_names { loose.as_str() } else { name };
        match name {
            "content-length" => length = value.trim().parse::<usize>().ok().or(length),
            "transfer-encoding" if habits.loose_coding => chunks |= value.contains("chunked"),
            "transfer-encoding" => chunks |= value.trim() == "chunked",
            _ => {}
        }
    }
    if chunks && !(habits.length_first && length.is_some()) {
        return skip_chunks(rest);
    }
    rest.get(length.unwrap_or(0)..)
}

fn skip_chunks(mut rest: &[u8]) -> Option<&[u8]> {
    loop {
        let at = find(rest, b"\r\n")?;
        let line = String::from_utf8_lossy(&rest[..at]).into_owned();
        let size = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        rest = &rest[at + 2..];
        if size == 0 {
            // No trailers, or up to the empty line.
            return match rest.strip_prefix(b"\r\n") {
                Some(rest) => Some(rest),
                None => find(rest, b"\r\n\r\n").map(|at| &rest[at + 4..]),
            };
        }
        rest = rest.get(size + 2..)?;
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

#[test]
fn readers_of_different_habits_see_different_requests_in_what_is_ambiguous() {
    let both = b"POST /a HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /b HTTP/1.1\r\n\r\n";
    let counts: Vec<usize> = Habits::all().map(|habits| requests(both, habits).len()).collect();
    assert!(counts.iter().any(|count| *count != counts[0]) || counts[0] == 2, "{counts:?}");
    let plain = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\n\r\n";
    for habits in Habits::all() {
        assert_eq!(requests(plain, habits), ["POST /a HTTP/1.1", "GET /b HTTP/1.1"], "{habits:?}");
    }
    let spaced = b"POST /a HTTP/1.1\r\nTransfer-Encoding : chunked\r\nContent-Length: 24\r\n\r\n0\r\n\r\nGET /b HTTP/1.1\r\n\r\n";
    let counts: Vec<usize> = Habits::all().map(|habits| requests(spaced, habits).len()).collect();
    assert!(counts.contains(&1) && counts.contains(&2), "{counts:?}");
}
