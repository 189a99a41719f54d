//! What several properties ask about JSON, read by another reader or in another way.

use onlyonce_core::fingerprint::{Document, JsonErrorKind};
use serde_json::Value;

/// What we take, others take; what others take and we do not has one of the reasons for which we are stricter.
pub(crate) fn agrees_with_another_reader(text: &[u8]) {
    use serde::de::IgnoredAny;
    let theirs = std::str::from_utf8(text).ok().map(serde_json::from_str::<IgnoredAny>);
    match (Document::parse(text), theirs) {
        (Ok(_), theirs) => assert!(matches!(theirs, Some(Ok(_))), "{theirs:?}"),
        (Err(error), Some(Ok(_))) => assert!(
            matches!(
                error.kind(),
                JsonErrorKind::DuplicateMember | JsonErrorKind::LoneSurrogate | JsonErrorKind::TooDeep
            ),
            "{error}"
        ),
        (Err(_), _) => {}
    }
}

/// The same text with spaces wherever they mean nothing.
pub(crate) fn respaced(text: &[u8]) -> Vec<u8> {
    let mut out = b" \n".to_vec();
    let (mut in_string, mut escaped) = (false, false);
    for byte in text {
        let is_mark = !in_string && matches!(byte, b'{' | b'}' | b'[' | b']' | b',' | b':');
        if is_mark {
            out.push(b'\t');
        }
        out.push(*byte);
        if is_mark {
            out.extend_from_slice(b" \r\n");
        }
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ => {}
        }
    }
    out
}

/// Everything but the numbers.
pub(crate) fn shape(value: &Value) -> Value {
    match value {
        Value::Number(_) => Value::Number(0.into()),
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::Object(members) => members.iter().map(|(name, value)| (name.clone(), shape(value))).collect(),
        other => other.clone(),
    }
}
