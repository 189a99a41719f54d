//! Which operation a request belongs to: its key, its scope and its fingerprint.

use hyper::http::request::Parts;
use serde_json::Value;

use crate::defect::Defect;
use crate::nature::{Breed, Nature};
use crate::wire::Reply;

/// What a key is kept under.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Id {
    pub(crate) scope: String,
    pub(crate) key: String,
}

/// Reads the key. `None`: there is none, and the server does not mind.
pub(crate) fn read(head: &Parts, nature: Nature) -> Result<Option<Id>, Reply> {
    let lines: Vec<_> = head.headers.get_all("idempotency-key").iter().collect();
    let line = match lines[..] {
        [] if nature.has(Defect::MissingKeyRuns)
            || nature.is(Breed::OptionalKey)
            || nature.is(Breed::Stripe) =>
        {
            return Ok(None);
        }
        [] => return Err(Reply::problem(400, "key-missing", "Send an Idempotency-Key.")),
        [first, _, ..] if nature.has(Defect::FirstOfTwoKeys) => first,
        [line] => line,
        _ => return Err(malformed("Send one Idempotency-Key.")),
    };
    let line = line.to_str().map_err(|_| malformed("A key is ASCII."))?;
    let key = unquote(line, nature)?;
    if key.is_empty() && !nature.has(Defect::EmptyKeyIsAKey) {
        return Err(malformed("The key is empty."));
    }
    if key.len() > 255 {
        return Err(malformed("The key is longer than 255 characters."));
    }
    if key.len() > 100 && nature.has(Defect::LongKeyIs500) {
        return Err(Reply::new(500, "value too long for type character varying(100)"));
    }
    if nature.is(Breed::UuidKeys) && !is_uuid(&key) {
        return Err(malformed("A key is a UUID."));
    }
    let key = match nature.defect {
        Some(Defect::KeyTruncated) => key[..key.len().min(64)].to_owned(),
        Some(Defect::KeyCaseFolded) => key.to_lowercase(),
        Some(Defect::QuotedIsAnother) => line.to_owned(),
        Some(Defect::KeyTrimmed) => key.trim().to_owned(),
        _ => key,
    };
    let mut scope = match nature.defect {
        Some(Defect::GlobalScope) => String::new(),
        _ => head.headers.get("authorization").map(|v| hex(v.as_bytes())).unwrap_or_default(),
    };
    if nature.is(Breed::PerPlace) {
        scope += &format!(" {} {}", head.method, head.uri.path());
    }
    Ok(Some(Id { scope, key }))
}

/// A string of RFC 9651, or a bare word.
fn unquote(line: &str, nature: Nature) -> Result<String, Reply> {
    if nature.is(Breed::Stripe) || nature.is(Breed::QuotesInKey) {
        return Ok(line.to_owned());
    }
    let Some(inner) = line.strip_prefix('"') else {
        let bare = |c: char| c.is_ascii_graphic() && !"\",;\\".contains(c);
        // An empty header value is the empty key, which is refused by its length.
        return match line.chars().all(bare) {
            true => Ok(line.to_owned()),
            false => Err(malformed("A bare key is one word of visible ASCII without \" , ; and \\.")),
        };
    };
    let (mut key, mut rest) = (String::new(), inner.chars());
    loop {
        match rest.next() {
            Some('"') => break,
            Some('\\') => match rest.next() {
                Some(c @ ('"' | '\\')) => key.push(c),
                _ => return Err(malformed("Only \\\" and \\\\ may follow a backslash.")),
            },
            Some(c @ ' '..='~') => key.push(c),
            _ => return Err(malformed("The quoted key has no end.")),
        }
    }
    let after = rest.as_str();
    let parameters = after.is_empty() || after.trim_start().starts_with(';');
    if !parameters && !nature.has(Defect::FirstOfTwoKeys) {
        return Err(malformed("Send one key, not a list."));
    }
    Ok(key)
}

fn is_uuid(key: &str) -> bool {
    key.len() == 36
        && key.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

fn malformed(what: &str) -> Reply {
    Reply::problem(400, "key-malformed", what)
}

/// What must be the same when a key comes again: the request itself, so that no hash is in doubt.
pub(crate) fn fingerprint(head: &Parts, body: &[u8], nature: Nature) -> Vec<u8> {
    let mut request = Vec::new();
    let mut part = |bytes: &[u8]| {
        request.extend((bytes.len() as u64).to_be_bytes());
        request.extend_from_slice(bytes);
    };
    if nature.has(Defect::NoFingerprint) {
        return Vec::new();
    }
    if !nature.has(Defect::MethodIgnored) {
        part(head.method.as_str().as_bytes());
    }
    if !nature.has(Defect::PathIgnored) {
        part(head.uri.path().as_bytes());
    }
    if !nature.has(Defect::QueryIgnored) {
        part(head.uri.query().unwrap_or_default().as_bytes());
    }
    match nature.defect {
        Some(Defect::FingerprintOfPrefix) => part(&body[..body.len().min(30 << 10)]),
        Some(Defect::FingerprintOfDoubles) => match serde_json::from_slice::<Value>(body) {
            Ok(json) => part(doubles(json).to_string().as_bytes()),
            Err(_) => part(body),
        },
        _ => part(body),
    }
    request
}

/// As a language sees it whose only numbers are floating point.
fn doubles(json: Value) -> Value {
    match json {
        Value::Number(number) => number.as_f64().map_or(Value::Null, Value::from),
        Value::Array(items) => items.into_iter().map(doubles).collect(),
        Value::Object(members) => members.into_iter().map(|(name, value)| (name, doubles(value))).collect(),
        other => other,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
