//! `[METHODS] PATH`.

use std::fmt;
use std::str::FromStr;

use http::Method;

use super::path::{Reading, Readings};

/// A method, or several, and a path: `POST /v1/charges/*`, `PUT,PATCH /orders`, `* /v1/*`, `/v1/charges` (any method),
/// `POST *` (any path).
///
/// In the path `*` stands for any characters but a slash; at the end, after a slash, for everything below, at any depth.
/// The query plays no part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutePattern {
    text: String,
    // Empty: any.
    methods: Vec<String>,
    segments: Vec<String>,
    and_below: bool,
}

/// Why a pattern was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?}: {reason}; write for example 'POST /v1/charges/*'")]
pub struct InvalidRoute {
    given: String,
    reason: &'static str,
}

impl FromStr for RoutePattern {
    type Err = InvalidRoute;

    fn from_str(given: &str) -> Result<Self, InvalidRoute> {
        let refuse = |reason| InvalidRoute { given: given.to_owned(), reason };
        let mut words = given.split_ascii_whitespace();
        let (methods, path) = match (words.next(), words.next(), words.next()) {
            (Some(path), None, None) => ("*", path),
            (Some(methods), Some(path), None) => (methods, path),
            (None, ..) => return Err(refuse("it is empty")),
            _ => return Err(refuse("it has more than a method and a path")),
        };
        let methods = match methods {
            "*" => Vec::new(),
            list => list
                .split(',')
                .map(|method| read_method(method).ok_or_else(|| refuse("not a method")))
                .collect::<Result<_, _>>()?,
        };
        let Some(path_text) = path.strip_prefix('/') else {
            return match path {
                "*" => Ok(Self { text: shown(given), methods, segments: Vec::new(), and_below: true }),
                _ => Err(refuse("a path begins with a slash")),
            };
        };
        if path.contains(['?', '#']) {
            return Err(refuse("a path has no query; requests are matched without theirs"));
        }
        if path.contains(['%', '\\', ';'])
            || path_text.split('/').any(|segment| matches!(segment, "." | ".."))
        {
            return Err(refuse(
                "write the path plainly, without %, \\, ; and dot segments: other spellings of it are known",
            ));
        }
        if path.contains("**") {
            return Err(refuse("one * is enough: at the end, after a slash, it stands for everything below"));
        }
        let is_parameter = |segment: &str| segment.starts_with(':') && segment.len() > 1;
        if path.contains(['{', '}', '<', '>', '[', ']', '|', '^', '"', '`'])
            || path_text.split('/').any(is_parameter)
        {
            return Err(refuse("write * for what may differ: there are no parameters, sets or expressions"));
        }
        let mut segments: Vec<String> = path_text.split('/').map(str::to_owned).collect();
        let and_below = segments.last().is_some_and(|last| last == "*");
        if and_below {
            segments.pop();
        }
        if segments.iter().rev().skip(1).any(String::is_empty)
            || (and_below && segments.last().is_some_and(String::is_empty))
        {
            return Err(refuse("it has an empty segment"));
        }
        Ok(Self { text: shown(given), methods, segments, and_below })
    }
}

fn shown(given: &str) -> String {
    given.split_ascii_whitespace().collect::<Vec<_>>().join(" ")
}

fn read_method(text: &str) -> Option<String> {
    let upper = text.to_ascii_uppercase();
    Method::from_bytes(upper.as_bytes()).ok().filter(|_| !text.contains('*')).map(|_| upper)
}

impl RoutePattern {
    /// Whether some reading of the request is named by the pattern: for a rule that guards.
    pub(super) fn catches(&self, method: &str, readings: &Readings) -> bool {
        (self.methods.is_empty() || self.methods.iter().any(|named| named.eq_ignore_ascii_case(method)))
            && (readings.climbs()
                || readings.iter().chain(readings.behind_scripts()).any(|reading| self.may_name(reading)))
    }

    /// Whether an upstream may take the reading for what is named: `.json` at the end is the format to many a framework.
    fn may_name(&self, reading: &Reading) -> bool {
        if self.names(reading, Case::Any) {
            return true;
        }
        let without_slash = reading.strip_suffix(&[Vec::new()][..]).unwrap_or(reading);
        let Some((last, rest)) = without_slash.split_last() else { return false };
        let Some(stem) = without_format(last) else { return false };
        let reading: Reading = rest.iter().cloned().chain([stem.to_vec()]).collect();
        self.names(&reading, Case::Any)
    }

    /// Whether every reading of the request is: for a rule that takes something off.
    pub(super) fn covers(&self, method: &str, readings: &Readings) -> bool {
        (self.methods.is_empty() || self.methods.iter().any(|named| named == method))
            && !readings.climbs()
            && readings.iter().all(|reading| self.names(reading, Case::Exact))
    }

    /// Whether it names this method by itself.
    pub(super) fn says_method(&self, method: &Method) -> bool {
        self.methods.iter().any(|named| named.eq_ignore_ascii_case(method.as_str()))
    }

    fn names(&self, reading: &Reading, case: Case) -> bool {
        let mut given = &reading[..];
        let mut named = &self.segments[..];
        if matches!(case, Case::Any) {
            // A slash at the end is often no difference.
            given = given.strip_suffix(&[Vec::new()][..]).unwrap_or(given);
            named = named.strip_suffix(&[String::new()][..]).unwrap_or(named);
        }
        if given.len() < named.len() {
            return false;
        }
        let (head, below) = given.split_at(named.len());
        let fits = match (self.and_below, case) {
            // `/a/*` is about what is below `/a`, and for a guard about `/a/` and `/a` too.
            (true, Case::Exact) => !below.is_empty(),
            (true, Case::Any) => true,
            (false, _) => below.is_empty(),
        };
        fits && head.iter().zip(named).all(|(given, named)| matches(named.as_bytes(), given, case))
    }

    /// How much it says: more is more specific.
    pub(super) fn specificity(&self) -> (bool, usize, bool) {
        let literals = self.segments.iter().map(|segment| 1 + segment.bytes().filter(|b| *b != b'*').count());
        let is_exact = !self.and_below && !self.segments.iter().any(|segment| segment.contains('*'));
        (is_exact, literals.sum(), !self.methods.is_empty())
    }
}

fn without_format(segment: &[u8]) -> Option<&[u8]> {
    let dot = segment.iter().rposition(|b| *b == b'.')?;
    let format = &segment[dot + 1..];
    if format.len() > FORMAT_LEN_MAX || !format.iter().all(u8::is_ascii_alphanumeric) {
        return None;
    }
    Some(&segment[..dot]).filter(|stem| !stem.is_empty())
}

/// `msgpack`, and one more.
const FORMAT_LEN_MAX: usize = 8;

#[derive(Clone, Copy)]
enum Case {
    Any,
    Exact,
}

/// Whether a segment is named by one with `*` in it. Linear but for the pattern's own stars.
fn matches(pattern: &[u8], segment: &[u8], case: Case) -> bool {
    if matches!(case, Case::Any) && !(pattern.is_ascii() && segment.is_ascii()) {
        let folded = |text: &[u8]| folded(&String::from_utf8_lossy(text)).into_bytes();
        return matches_alike(&folded(pattern), &folded(segment), Case::Exact);
    }
    matches_alike(pattern, segment, case)
}

/// Letters of any alphabet whose cases are one: `ſ` is a `S`, the sign of kelvin a `k`.
fn folded(text: &str) -> String {
    text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
}

fn matches_alike(pattern: &[u8], segment: &[u8], case: Case) -> bool {
    let same = |a: &[u8], b: &[u8]| match case {
        Case::Any => a.eq_ignore_ascii_case(b),
        Case::Exact => a == b,
    };
    let mut parts = pattern.split(|b| *b == b'*');
    let first = parts.next().unwrap_or_default();
    if segment.len() < first.len() || !same(first, &segment[..first.len()]) {
        return false;
    }
    let mut rest = &segment[first.len()..];
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.len() >= part.len() && same(part, &rest[rest.len() - part.len()..]);
        }
        match rest.windows(part.len().max(1)).position(|window| same(part, &window[..part.len()])) {
            Some(at) => rest = &rest[at + part.len()..],
            None if part.is_empty() => {}
            None => return false,
        }
    }
    true
}

impl fmt::Display for RoutePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pattern: &str, method: &str, path: &str) -> bool {
        let pattern: RoutePattern = pattern.parse().unwrap();
        pattern.covers(method, &Readings::of(path))
    }

    #[test]
    fn patterns_name_what_they_say() {
        for (pattern, method, path, expected) in [
            ("POST /v1/charges", "POST", "/v1/charges", true),
            ("POST /v1/charges", "PUT", "/v1/charges", false),
            ("post  /v1/charges", "POST", "/v1/charges", true),
            ("PUT,PATCH /x", "PATCH", "/x", true),
            ("/x", "DELETE", "/x", true),
            ("* /x", "DELETE", "/x", true),
            ("POST /v1/charges/*", "POST", "/v1/charges/1", true),
            ("POST /v1/charges/*", "POST", "/v1/charges/1/refund", true),
            ("POST /v1/charges/*", "POST", "/v1/charges", false),
            ("POST /v1/*/refund", "POST", "/v1/1/refund", true),
            ("POST /v1/*/refund", "POST", "/v1/1/2/refund", false),
            ("POST /v1/a*b*/x", "POST", "/v1/aXbY/x", true),
            ("POST /v1/a*b*/x", "POST", "/v1/aXY/x", false),
            ("POST /a*b", "POST", "/ab", true),
            ("POST /v1/charges:batch", "POST", "/v1/charges:batch", true),
            ("POST /Orders(5)/$batch", "POST", "/Orders(5)/$batch", true),
            ("POST *", "POST", "/anything/at/all", true),
            ("POST /*", "POST", "/", true),
            ("POST /", "POST", "/", true),
            ("POST /", "POST", "/x", false),
            ("POST /pkg.Service/Pay", "POST", "/pkg.Service/Pay", true),
        ] {
            assert_eq!(names(pattern, method, path), expected, "{pattern:?} on {method} {path}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_reason() {
        for (given, reason) in [
            ("", "empty"),
            ("POST", "begins with a slash"),
            ("POST v1", "begins with a slash"),
            ("POST /a /b", "more than a method and a path"),
            ("PO(ST /a", "not a method"),
            ("P*ST /a", "not a method"),
            ("POST, /a", "not a method"),
            ("POST /a?b", "no query"),
            ("POST /a%20b", "plainly"),
            ("POST /a/../b", "plainly"),
            ("POST //a", "empty segment"),
            ("POST /a/**", "one * is enough"),
            ("POST /a**b", "one * is enough"),
            ("POST /a/{id}", "write * for what may differ"),
            ("POST /a/:id/b", "write * for what may differ"),
            ("POST /a/<id>", "write * for what may differ"),
            ("POST /a/[0-9]", "write * for what may differ"),
            ("POST /(a|b)", "write * for what may differ"),
        ] {
            let error = given.parse::<RoutePattern>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("POST /v1/charges/*"), "{given}: {error}");
        }
    }
}
