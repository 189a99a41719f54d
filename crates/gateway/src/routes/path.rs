//! The ways in which a path may be read.

/// How often an upstream, or what stands before it, may decode a path at most.
const DECODINGS_MAX: usize = 3;

/// One reading: segments, without the slashes between them.
pub(super) type Reading = Vec<Vec<u8>>;

/// Every reading of one path, the literal one first.
#[derive(Debug)]
pub(super) struct Readings(Vec<Reading>);

impl Readings {
    pub(super) fn of(path: &str) -> Self {
        let mut readings = vec![segments(path.as_bytes())];
        if is_plain(path) {
            return Self(readings);
        }
        let mut bytes = path.as_bytes().to_vec();
        for _ in 0..=DECODINGS_MAX {
            for slashes_alike in [false, true] {
                let read = if slashes_alike { backslashes_as_slashes(&bytes) } else { bytes.clone() };
                let whole: Reading =
                    segments(&read).iter().map(|segment| without_parameters(segment)).collect();
                let short: Reading = whole.iter().filter(|segment| !segment.is_empty()).cloned().collect();
                let resolved = without_dots(&short);
                for reading in [segments(&read), whole, short, resolved] {
                    if !readings.contains(&reading) {
                        readings.push(reading);
                    }
                }
            }
            let decoded = decoded(&bytes);
            if decoded == bytes {
                break;
            }
            bytes = decoded;
        }
        Self(readings)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Reading> {
        self.0.iter()
    }
}

/// Whether there is one reading alone.
fn is_plain(path: &str) -> bool {
    let odd = |byte| matches!(byte, b'%' | b'\\' | b';' | b'?' | b'#' | 0);
    if path == "/" {
        return true;
    }
    !path.bytes().any(odd)
        && path.split('/').skip(1).all(|segment| !segment.is_empty() && segment != "." && segment != "..")
}

fn segments(path: &[u8]) -> Reading {
    path.strip_prefix(b"/").unwrap_or(path).split(|b| *b == b'/').map(<[u8]>::to_vec).collect()
}

fn backslashes_as_slashes(path: &[u8]) -> Vec<u8> {
    path.iter().map(|b| if *b == b'\\' { b'/' } else { *b }).collect()
}

/// Path parameters, and what a decoded query, fragment or NUL would cut off.
fn without_parameters(segment: &[u8]) -> Vec<u8> {
    segment.split(|b| matches!(b, b';' | b'?' | b'#' | 0)).next().unwrap_or_default().to_vec()
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
    }

    #[test]
    fn the_number_of_readings_is_bounded() {
        let path = format!("/{}", "%25".repeat(100) + "2e/..\\;//");
        assert!(Readings::of(&path).iter().count() <= 1 + (DECODINGS_MAX + 1) * 8);
    }
}
