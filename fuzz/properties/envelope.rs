//! What must hold for any bytes as a message: for the fuzz target, and for the bounded test in the tree.

use onlyonce_core::fingerprint::Document;
use onlyonce_inbox::{Envelope, KeyExpression, Keys, Place};

use super::json::agrees_with_another_reader;

/// Takes `EXPRESSION\0TEXT`, or a text alone.
///
/// # Panics
/// When something does not hold.
pub(crate) fn check(data: &[u8]) {
    let (expression, text) = match data.iter().position(|byte| *byte == 0) {
        Some(end) => (&data[..end], &data[end + 1..]),
        None => (&b"msg_id"[..], data),
    };
    agrees_with_another_reader(text);
    let Some(key) = std::str::from_utf8(expression).ok().and_then(|text| text.parse::<KeyExpression>().ok())
    else {
        return;
    };
    let keys = Keys { key, ..Keys::default() };
    let place = Place { source_name: "m.json", first_line: 7 };
    match Envelope::read(text, &keys, place) {
        Ok(envelope) => sound(&envelope, text, &keys, place),
        Err(bad) => {
            let lines = text.iter().filter(|byte| **byte == b'\n').count() as u64;
            assert!((7..=7 + lines).contains(&bad.line), "{bad}");
            assert!((1..=text.len() as u64 + 1).contains(&bad.column), "{bad}");
            assert!(bad.reason.starts_with("expected "), "{bad}");
            assert!(!bad.to_string().contains(char::is_control), "{bad:?}");
        }
    }
}

fn sound(envelope: &Envelope, text: &[u8], keys: &Keys, place: Place<'_>) {
    let key = envelope.key.as_str();
    assert!((1..=255).contains(&key.len()) && !key.contains(char::is_control), "{key:?}");

    let response = envelope.default_response();
    assert!(!response.contains(['\n', '\r']), "{response:?}");
    let response: serde_json::Value = serde_json::from_str(&response).expect("the response is JSON");
    assert_eq!(response["msg_id"], key);
    assert_eq!(response["biz_key"].as_str(), envelope.biz_key.as_deref());

    // Laid out anew it is the same message. A numeral as its key may be written otherwise, so that the body alone is compared,
    // and may be longer than a key can be.
    let bare = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let document = Document::parse(bare).expect("it was read");
    if let Ok(canonical) = document.canonical() {
        match Envelope::read(&canonical, keys, place) {
            Ok(again) => assert_eq!(again.digest, envelope.digest),
            Err(bad) => assert!(bad.reason.contains("the limit is 255"), "{bad}"),
        }
        let mut marked = b"\xef\xbb\xbf \r\n\t".to_vec();
        marked.extend_from_slice(bare);
        marked.extend_from_slice(b"\r\n");
        assert_eq!(&Envelope::read(&marked, keys, place).expect("spaces change nothing"), envelope);
    }
}
