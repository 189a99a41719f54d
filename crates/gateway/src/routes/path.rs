//! The ways in which a path may be read.

/// How often an upstream, or what stands before it, may decode a path at most.
const DECODINGS_MAX: usize = 3;

/// One reading: segments, without the slashes between them.
pub(super) type Reading = Vec<Vec<u8>>;

/// Every reading of one path, the literal one first.
#[derive(Debug)]
pub(super) struct Readings {
    readings: Vec<Reading>,
    /// Of an upstream that takes the first part of the path for the name of a script: what comes after it. The path
    /// of a script is one too, so that these say nothing against a rule that names the script.
    behind_scripts: Vec<Reading>,
    climbs: bool,
}

impl Readings {
    pub(super) fn of(path: &str) -> Self {
        let mut of =
            Self { readings: vec![segments(path.as_bytes())], behind_scripts: Vec::new(), climbs: false };
        if is_plain(path) {
            return of;
        }
        let mut bytes = path.as_bytes().to_vec();
        for _ in 0..=DECODINGS_MAX {
            let loosely = as_a_url_parser_reads(&bytes);
            of.add(&bytes);
            of.add(&loosely);
            if let Some(rest) = without_authority(&loosely) {
                of.add(rest);
            }
            let decoded = decoded(&bytes);
            if decoded == bytes {
                break;
            }
            bytes = decoded;
        }
        for reading in &of.readings {
            if let Some(script) = reading.iter().position(|segment| is_script(segment)) {
                of.behind_scripts.push(reading[script + 1..].to_vec());
            }
        }
        of
    }

    /// What becomes of these bytes, the more is taken off them.
    fn add(&mut self, bytes: &[u8]) {
        let literal = segments(bytes);
        self.climbs |= literal.iter().any(|segment| goes_up(segment));
        let whole: Reading = literal.iter().map(|segment| bare(segment)).collect();
        let short: Reading = whole.iter().filter(|segment| !segment.is_empty()).cloned().collect();
        let resolved = without_dots(&short);
        for reading in [literal, whole, short, resolved] {
            if !self.readings.contains(&reading) {
                self.readings.push(reading);
            }
        }
    }

    /// Whether some reading has a segment that goes up. Where that leads depends on what else the upstream takes off and
    /// when: whether empty segments count, whether `..;` and `%2e%2e` are such segments beside a `%2f` that is none. So it
    /// may lead anywhere. Clients resolve such segments before they send.
    pub(super) fn climbs(&self) -> bool {
        self.climbs
    }

    /// What any upstream may read.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Reading> {
        self.readings.iter()
    }

    /// What else one behind a script may read.
    pub(super) fn behind_scripts(&self) -> impl Iterator<Item = &Reading> {
        self.behind_scripts.iter()
    }
}

/// Whether there is one reading alone.
fn is_plain(path: &str) -> bool {
    let odd = |byte: u8| matches!(byte, b'%' | b'\\' | b';' | b'?' | b'#') || byte.is_ascii_control();
    if path == "/" {
        return true;
    }
    let is_plain =
        |segment: &str| !segment.is_empty() && !segment.ends_with('.') && !is_script(segment.as_bytes());
    !path.bytes().any(odd) && path.split('/').skip(1).all(is_plain)
}

/// The names of scripts that get what follows them in a path (CGI's `PATH_INFO`, RFC 3875 §4.1.5).
fn is_script(segment: &[u8]) -> bool {
    let Some(dot) = segment.iter().rposition(|b| *b == b'.') else { return false };
    let suffix = &segment[dot + 1..];
    [&b"php"[..], b"cgi", b"fcgi", b"pl", b"py"].iter().any(|script| suffix.eq_ignore_ascii_case(script))
}

fn segments(path: &[u8]) -> Reading {
    path.strip_prefix(b"/").unwrap_or(path).split(|b| *b == b'/').map(<[u8]>::to_vec).collect()
}

/// URL parsers of browsers and what is built like them take `\` for `/`, and tabs and newlines for nothing.
fn as_a_url_parser_reads(path: &[u8]) -> Vec<u8> {
    let read = |b: &u8| match b {
        b'\\' => Some(b'/'),
        b if b.is_ascii_control() => None,
        b => Some(*b),
    };
    path.iter().filter_map(read).collect()
}

/// What is left for who resolves the path as a reference to a URL: two slashes begin a host (RFC 3986 §4.2), and some let
/// any number of them do so.
fn without_authority(path: &[u8]) -> Option<&[u8]> {
    let rest = path.strip_prefix(b"//")?;
    let rest = rest.split_at(rest.iter().take_while(|b| **b == b'/').count()).1;
    Some(rest.split_at(rest.iter().position(|b| *b == b'/').unwrap_or(rest.len())).1)
}

/// Without path parameters, what a decoded query, fragment or NUL would cut off, white space at its ends and dots after
/// it, which file systems drop; a `$` of many a regular expression stands before a last newline too.
fn bare(segment: &[u8]) -> Vec<u8> {
    let segment = segment.split(|b| matches!(b, b';' | b'?' | b'#' | 0)).next().unwrap_or_default();
    let white = |b: &u8| *b == b' ' || b.is_ascii_control();
    let start = segment.iter().take_while(|b| white(b)).count();
    let white_at_end = |text: &[u8]| text.iter().rev().take_while(|b| white(b)).count();
    let segment = &segment[start..];
    let segment = &segment[..segment.len() - white_at_end(segment)];
    if segment.iter().all(|b| *b == b'.') {
        return segment.to_vec();
    }
    let end = segment.iter().rposition(|b| *b != b'.' && !white(b)).map_or(0, |last| last + 1);
    segment[..end].to_vec()
}

/// `..`, with what an upstream may take off it; more dots, or dots apart, are that to some file systems.
fn goes_up(segment: &[u8]) -> bool {
    let name = segment.split(|b| matches!(b, b';' | b'?' | b'#' | 0)).next().unwrap_or_default();
    let dots = name.iter().filter(|b| **b == b'.').count();
    dots > 1 && name.iter().all(|b| *b == b'.' || *b == b' ' || b.is_ascii_control())
}

fn without_dots(segments: &Reading) -> Reading {
    let mut resolved = Reading::new();
    for segment in segments {
        match &segment[..] {
            b"." => {}
            b".." => drop(resolved.pop()),
            _ => resolved.push(segment.clone()),
        }
    }
    resolved
}

/// Percent-decoded once; a `%` that stands alone stays.
fn decoded(path: &[u8]) -> Vec<u8> {
    let digit = |at: usize| path.get(at).and_then(|b| char::from(*b).to_digit(16));
    let mut decoded = Vec::with_capacity(path.len());
    let mut at = 0;
    while let Some(byte) = path.get(at) {
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high << 4 | low) as u8);
                at += 3;
            }
            _ => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(path: &str) -> Vec<String> {
        let show = |reading: &Reading| {
            reading.iter().map(|segment| String::from_utf8_lossy(segment)).collect::<Vec<_>>().join("|")
        };
        Readings::of(path).iter().map(show).collect()
    }

    #[test]
    fn a_plain_path_has_one_reading() {
        assert_eq!(shown("/v1/charges"), ["v1|charges"]);
        assert_eq!(shown("/a.b/c..d"), ["a.b|c..d"]);
        assert_eq!(shown("/"), [""]);
    }

    #[test]
    fn an_odd_one_has_several() {
        assert_eq!(shown("/a//b"), ["a||b", "a|b"]);
        assert_eq!(shown("/a/../b;c"), ["a|..|b;c", "a|..|b", "b"]);
        assert!(shown("/%2e%2e%2fb").contains(&"b".to_owned()));
        assert_eq!(shown("/100%"), ["100%"]);
        assert_eq!(shown("//host/b"), ["|host|b", "host|b", "b"]);
        assert_eq!(shown("/a%0a"), ["a%0a", "a\n", "a"]);
    }

    #[test]
    fn the_number_of_readings_is_bounded() {
        let path = format!("/{}", "%25".repeat(100) + "2e/..\\;//");
        let readings = Readings::of(&path);
        assert!(readings.iter().count() <= 1 + (DECODINGS_MAX + 1) * 12);
        assert!(readings.behind_scripts().count() <= readings.iter().count());
    }
}
