//! What must hold for any bytes as the value of the key header.

use http::{HeaderMap, HeaderValue};
use onlyonce_http::{KeyRule, MalformedKey, parse_key};

/// Takes a header value.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(value: &[u8]) {
    let lenient = parse_key(value, false);
    let strict = parse_key(value, true);
    let trimmed = value.trim_ascii();
    let is_quoted = trimmed.first() == Some(&b'"');
    match &lenient {
        Ok(key) => {
            let key = key.as_str();
            assert!((1..=255).contains(&key.len()) && key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            if is_quoted {
                assert_eq!(by_hand(trimmed).as_deref(), Some(key));
            } else {
                assert_eq!(key.as_bytes(), trimmed, "a bare key is what it is");
            }
            // Written as the standard has it, it is the same key by either rule.
            let written = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            for quoted_only in [false, true] {
                assert_eq!(parse_key(written.as_bytes(), quoted_only).as_ref(), lenient.as_ref());
            }
        }
        Err(why) => {
            assert!(!why.to_string().contains(char::is_control), "{why:?}");
            match why {
                MalformedKey::Character { at, byte } => assert_eq!(trimmed[at - 1], *byte),
                MalformedKey::NeedsQuotes { at, character } => {
                    assert_eq!(char::from(trimmed[at - 1]), *character);
                }
                MalformedKey::Escape { at } => assert_eq!(trimmed[at - 1], b'\\'),
                MalformedKey::TooLong { len } => assert!((256..=trimmed.len()).contains(len)),
                _ => {}
            }
        }
    }
    // The strict rule differs in this alone, that a bare key is none.
    match (&lenient, &strict) {
        (Ok(_), Err(MalformedKey::NotQuoted)) => assert!(!is_quoted),
        _ if is_quoted => assert_eq!(lenient, strict),
        _ => assert!(strict.is_err()),
    }
    let mut padded = b" \t".to_vec();
    padded.extend_from_slice(value);
    padded.push(b' ');
    assert_eq!(parse_key(&padded, false).ok(), lenient.clone().ok(), "spaces around it are nothing");
    if let Ok(line) = HeaderValue::from_bytes(value) {
        let mut headers = HeaderMap::new();
        headers.append("idempotency-key", line.clone());
        assert_eq!(KeyRule::default().read(&headers), lenient.map(Some));
        headers.append("idempotency-key", line);
        assert_eq!(KeyRule::default().read(&headers), Err(MalformedKey::SeveralLines { lines: 2 }));
    }
}

/// The content of a quoted string (RFC 9651 §4.2.5), read in another way.
fn by_hand(value: &[u8]) -> Option<String> {
    let (mut key, mut rest) = (String::new(), value.iter().skip(1));
    loop {
        match rest.next()? {
            b'"' => return Some(key),
            b'\\' => key.push(char::from(*rest.next().filter(|byte| matches!(byte, b'"' | b'\\'))?)),
            byte => key.push(char::from(*byte)),
        }
    }
}
