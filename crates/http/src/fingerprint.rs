//! The fingerprint of a request: method, path, query and body, and the headers that were chosen.

use http::header::{self, HeaderMap};
use http::request::Parts;
use onlyonce_core::Fingerprint;
use onlyonce_core::fingerprint::{Definition, JsonError, Material};

/// The definitions in use: the one for new records, and those whose records are still understood.
#[derive(Clone, Debug)]
pub(crate) struct FingerprintRule {
    current: Definition,
    known: Vec<Definition>,
}

/// What a stored fingerprint says about this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// The same request, under the definition of the record: ask again with this fingerprint.
    Same(Fingerprint),
    /// Another request.
    Other,
    /// The record's definition is not known here.
    UnknownDefinition,
}

impl Default for FingerprintRule {
    fn default() -> Self {
        Self::new(Definition::raw())
    }
}

impl FingerprintRule {
    pub(crate) fn new(current: Definition) -> Self {
        // These two need no configuration, so they are always understood.
        Self { current, known: vec![Definition::raw(), Definition::canonical_json()] }
    }

    pub(crate) fn also_known(&mut self, definition: Definition) {
        self.known.push(definition);
    }

    pub(crate) fn set_current(&mut self, definition: Definition) {
        self.current = definition;
    }

    /// The fingerprint under the current definition.
    pub(crate) fn of(&self, parts: &Parts, body: &[u8]) -> Result<Fingerprint, JsonError> {
        by_definition(&self.current, parts, body)
    }

    /// Compares with a stored fingerprint that is not equal to ours.
    pub(crate) fn compare(&self, stored: &Fingerprint, parts: &Parts, body: &[u8]) -> Comparison {
        if stored.definition() == self.current.id() {
            return Comparison::Other;
        }
        let Some(theirs) = self.known.iter().find(|definition| definition.id() == stored.definition()) else {
            return Comparison::UnknownDefinition;
        };
        match by_definition(theirs, parts, body) {
            Ok(fingerprint) if fingerprint == *stored => Comparison::Same(fingerprint),
            // A body that has no canonical form is not the one that had one.
            Ok(_) | Err(_) => Comparison::Other,
        }
    }
}

fn by_definition(definition: &Definition, parts: &Parts, body: &[u8]) -> Result<Fingerprint, JsonError> {
    let target = original_target(parts);
    definition.fingerprint(&Material {
        leading: &[parts.method.as_str().as_bytes(), target.as_bytes()],
        headers: &parts.headers,
        body,
        body_is_json: is_json(&parts.headers),
    })
}

/// Path and query as received, before any router took a prefix off.
fn original_target(parts: &Parts) -> &str {
    original_uri(parts).path_and_query().map_or("/", |target| target.as_str())
}

/// The URI as received.
pub(crate) fn original_uri(parts: &Parts) -> &http::Uri {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::OriginalUri(uri)) = parts.extensions.get() {
        return uri;
    }
    &parts.uri
}

/// `application/json`, `text/json` or a `+json` type, in plain bytes.
fn is_json(headers: &HeaderMap) -> bool {
    if headers.contains_key(header::CONTENT_ENCODING) {
        return false;
    }
    let mut types = headers.get_all(header::CONTENT_TYPE).iter();
    let (Some(value), None) = (types.next(), types.next()) else { return false };
    let essence = value.as_bytes().split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
    let ends = |suffix: &[u8]| {
        essence.len() > suffix.len() && essence[essence.len() - suffix.len()..].eq_ignore_ascii_case(suffix)
    };
    essence.eq_ignore_ascii_case(b"application/json")
        || essence.eq_ignore_ascii_case(b"text/json")
        || (ends(b"+json") && essence.contains(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderValue, Request};

    fn parts(method: &str, target: &str, content_type: &'static str) -> Parts {
        let request = Request::builder().method(method).uri(target).header("content-type", content_type);
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn method_path_query_and_body_join() {
        let rule = FingerprintRule::default();
        let of =
            |method, target, body: &str| rule.of(&parts(method, target, "a/b"), body.as_bytes()).unwrap();
        let distinct = [
            of("POST", "/pay", "1"),
            of("PATCH", "/pay", "1"),
            of("POST", "/pay2", "1"),
            of("POST", "/pay?dry_run=1", "1"),
            of("POST", "/pay?dry_run=2", "1"),
            of("POST", "/pay", "2"),
            of("POST", "/pay", ""),
            // As received, never decoded.
            of("POST", "/p%61y", "1"),
            of("POST", "/pay/", "1"),
        ];
        for (i, a) in distinct.iter().enumerate() {
            assert!(distinct[i + 1..].iter().all(|b| a != b), "{i}");
        }
        // The form of the target does not matter, only path and query.
        assert_eq!(of("POST", "http://example.com/pay", "1"), distinct[0]);
    }

    #[test]
    fn json_is_what_is_said_to_be_json_in_plain_bytes() {
        for (content_type, expected) in [
            ("application/json", true),
            ("Application/JSON ; charset=utf-8", true),
            ("application/vnd.api+json", true),
            ("text/json", true),
            ("application/jsonp", false),
            ("application/x-ndjson", false),
            ("+json", false),
            ("text/plain", false),
            ("", false),
        ] {
            let mut parts = parts("POST", "/", content_type);
            assert_eq!(is_json(&parts.headers), expected, "{content_type:?}");
            parts.headers.insert("content-encoding", HeaderValue::from_static("gzip"));
            assert!(!is_json(&parts.headers));
        }
    }

    #[test]
    fn a_record_is_compared_by_its_own_definition() {
        let parts = parts("POST", "/pay", "application/json");
        let (body, other) = (br#"{"a":1}"#, br#"{"a":2}"#);
        let old = Definition::members(["/a"]).unwrap();
        let stored = FingerprintRule::new(old.clone()).of(&parts, body).unwrap();
        let mut rule = FingerprintRule::new(Definition::canonical_json());
        assert_eq!(rule.compare(&stored, &parts, body), Comparison::UnknownDefinition);
        rule.also_known(old);
        assert_eq!(rule.compare(&stored, &parts, body), Comparison::Same(stored));
        assert_eq!(rule.compare(&stored, &parts, other), Comparison::Other);
        assert_eq!(rule.compare(&stored, &parts, b"{"), Comparison::Other);
        let raw = FingerprintRule::default().of(&parts, body).unwrap();
        assert_eq!(rule.compare(&raw, &parts, body), Comparison::Same(raw));
        let mine = rule.of(&parts, other).unwrap();
        assert_eq!(rule.compare(&mine, &parts, body), Comparison::Other);
    }
}
