//! The envelope of a message: its key, its business key and the digest of its body, read from its JSON text.

use onlyonce_core::Key;
use onlyonce_core::fingerprint::{Document, JsonError, JsonErrorKind};
use onlyonce_core::operation::NAME_BYTES_MAX;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::error::BadData;
use crate::expression::{KeyExpression, Missing, Unfit};

/// What is taken from each message.
#[derive(Clone, Debug)]
pub struct Keys {
    /// What the message is known by. `msg_id` by default.
    pub key: KeyExpression,
    /// What it is about: NULL in the table where the message has none. `order_no` by default.
    pub biz_key: KeyExpression,
}

impl Default for Keys {
    fn default() -> Self {
        let name = |name: &str| name.parse().expect("a name of a member");
        Self { key: name("msg_id"), biz_key: name("order_no") }
    }
}

/// What a message says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The idempotency key, byte for byte: 1 to 255 bytes without control characters.
    pub key: Key,
    /// What it is about.
    pub biz_key: Option<String>,
    /// Tells bodies apart.
    pub digest: BodyDigest,
}

/// Tells the bodies of messages apart: a byte for its kind, and SHA-256.
///
/// Kind 1 is over the canonical form, so that spaces, line ends, a byte order mark and the order of members make no other
/// body; numerals are compared exactly. Kind 2 is over the bytes, where there is no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyDigest([u8; 33]);

const BOM: &[u8] = b"\xef\xbb\xbf";

/// The text of a message without the byte order mark that may stand before it.
pub(crate) fn without_bom(text: &[u8]) -> &[u8] {
    text.strip_prefix(BOM).unwrap_or(text)
}

/// Where the text of a message stands.
#[derive(Clone, Copy, Debug)]
pub struct Place<'p> {
    /// The file, or `stdin`.
    pub source_name: &'p str,
    /// The line that the text starts on, from 1.
    pub first_line: u64,
}

impl<'p> Place<'p> {
    /// The start of a file.
    pub fn start_of(source_name: &'p str) -> Self {
        Self { source_name, first_line: 1 }
    }

    /// What is wrong with the text at the offset `at`.
    pub(crate) fn bad(self, text: &[u8], at: usize, reason: String) -> BadData {
        let before = &text[..at.min(text.len())];
        let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines = before.iter().filter(|byte| **byte == b'\n').count();
        // Of a character the first byte alone counts.
        let column = before[line_start..].iter().filter(|byte| !(0x80..0xc0).contains(*byte)).count();
        BadData {
            source_name: self.source_name.into(),
            line: self.first_line + lines as u64,
            column: column as u64 + 1,
            reason,
        }
    }
}

impl Envelope {
    /// Reads a message. A byte order mark before it is skipped.
    ///
    /// # Errors
    /// [`BadData`]: not JSON, not UTF-8, a duplicate member, or no key.
    pub fn read(text: &[u8], keys: &Keys, place: Place<'_>) -> Result<Self, BadData> {
        let text = without_bom(text);
        let document = Document::parse(text).map_err(|error| not_json(text, place, &error))?;
        let key = keys.key.evaluate(&document).map_err(|missing| {
            let reason = format!(
                "expected a string or a number as the key {:?}, found {}",
                missing.part,
                missing.found.as_str()
            );
            place.bad(text, missing.at, reason)
        })?;
        let key = Key::new(&key.text).map_err(|error| {
            let reason = format!(
                "expected a key of 1 to {NAME_BYTES_MAX} bytes without control characters, found {error}"
            );
            place.bad(text, key.at, reason)
        })?;
        let biz_key = match keys.biz_key.evaluate(&document) {
            Ok(evaluated) => Some(evaluated.text.into_owned()),
            Err(Missing { found: Unfit::Absent | Unfit::Null, .. }) => None,
            Err(Missing { found: Unfit::Empty, .. }) => Some(String::new()),
            Err(Missing { part, found, at }) => {
                let found = found.as_str();
                let reason = format!(
                    "expected a string or a number as the business key {part:?}, found {found}; choose another with --biz-key"
                );
                return Err(place.bad(text, at, reason));
            }
        };
        Ok(Self { key, biz_key, digest: BodyDigest::of(&document, text) })
    }

    /// What is stored and answered where no work is done: one line of JSON.
    pub fn default_response(&self) -> String {
        #[derive(Serialize)]
        struct Response<'e> {
            msg_id: &'e str,
            biz_key: Option<&'e str>,
            result: &'static str,
        }
        let response =
            Response { msg_id: self.key.as_str(), biz_key: self.biz_key.as_deref(), result: "applied" };
        serde_json::to_string(&response).expect("text is JSON")
    }
}

impl BodyDigest {
    fn of(document: &Document<'_>, text: &[u8]) -> Self {
        match document.canonical() {
            Ok(canonical) => Self::new(1, &canonical),
            Err(_) => Self::new(2, text),
        }
    }

    fn new(kind: u8, bytes: &[u8]) -> Self {
        let mut digest = [kind; 33];
        digest[1..].copy_from_slice(&Sha256::digest(bytes));
        Self(digest)
    }

    /// As it is stored.
    pub fn as_bytes(&self) -> &[u8; 33] {
        &self.0
    }
}

fn not_json(text: &[u8], place: Place<'_>, error: &JsonError) -> BadData {
    let at = error.at();
    let found = match error.kind() {
        JsonErrorKind::DuplicateMember => "one again: which of the two is meant?".into(),
        JsonErrorKind::TooDeep => "more".into(),
        _ => found(&text[at.min(text.len())..]),
    };
    place.bad(text, at, format!("expected {}, found {found}", error.expected()))
}

// The character there, fit for a terminal.
fn found(rest: &[u8]) -> String {
    let Some(first) = rest.first() else { return "the end of the message".into() };
    let character = rest.utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
    match character {
        Some(c) => format!("{c:?}"),
        None => format!("the byte 0x{first:02X}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: impl AsRef<[u8]>) -> Result<Envelope, BadData> {
        Envelope::read(text.as_ref(), &Keys::default(), Place::start_of("m.json"))
    }

    fn refused(text: impl AsRef<[u8]>) -> String {
        read(text).expect_err("refused").to_string()
    }

    #[test]
    fn a_message_is_read() {
        let envelope = read(r#"{"msg_id":"M1","order_no":653247040368672768,"x":[]}"#).unwrap();
        assert_eq!(envelope.key.as_str(), "M1");
        assert_eq!(envelope.biz_key.as_deref(), Some("653247040368672768"));
        assert_eq!(
            envelope.default_response(),
            r#"{"msg_id":"M1","biz_key":"653247040368672768","result":"applied"}"#
        );
        let bare = read("\u{feff}\r\n{ \"msg_id\" :\r\n \"주문-1\" , \"order_no\":null}\r\n").unwrap();
        assert_eq!(bare.default_response(), r#"{"msg_id":"주문-1","biz_key":null,"result":"applied"}"#);
    }

    #[test]
    fn bodies_differ_by_what_they_say_and_not_by_how_they_are_laid_out() {
        let digest = |text: &str| read(text).unwrap().digest;
        let plain = digest(r#"{"msg_id":"M1","amount":653247040368672768,"s":"é"}"#);
        for same in [
            "\u{feff}{\"msg_id\":\"M1\",\"amount\":653247040368672768,\"s\":\"é\"}",
            "{\r\n  \"amount\": 653247040368672768,\r\n  \"s\": \"\\u00e9\",\r\n  \"msg_id\": \"M1\"\r\n}\r\n",
        ] {
            assert_eq!(digest(same), plain, "{same}");
        }
        for other in [
            r#"{"msg_id":"M1","amount":653247040368672769,"s":"é"}"#,
            r#"{"msg_id":"M1","amount":653247040368672800,"s":"é"}"#,
            r#"{"msg_id":"M1","amount":"653247040368672768","s":"é"}"#,
        ] {
            assert_ne!(digest(other), plain, "{other}");
        }
        assert_eq!(digest(r#"{"msg_id":1,"x":1e9999999999999999}"#).as_bytes()[0], 2);
    }

    #[test]
    fn bad_data_is_named_by_file_line_and_column_with_what_was_expected() {
        for (text, expected) in [
            ("", "m.json:1:1: expected a value, found the end of the message"),
            (
                "{\"msg_id\":\"M1\",\n \"a\":1",
                "m.json:2:7: expected a comma or }, found the end of the message",
            ),
            ("{\"msg_id\":\"M1\"\r\n \"a\":1}", "m.json:2:2: expected a comma or }, found '\"'"),
            ("{\"주문\":1 2}", "m.json:1:9: expected a comma or }, found '2'"),
            (
                "{\"msg_id\":\"M1\",\"msg_id\":\"M2\"}",
                "m.json:1:16: expected each member once, found one again",
            ),
            ("{\"msg_id\":\"M1\"}{}", "m.json:1:16: expected the end of the text, found '{'"),
            ("\u{feff}{x", "m.json:1:2: expected a member name in double quotes, or }, found 'x'"),
            ("{}", "m.json:1:1: expected a string or a number as the key \"msg_id\", found no such member"),
            ("[]", "m.json:1:1: expected a string or a number as the key \"msg_id\", found no such member"),
            (
                "{\"a\":1,\n\"msg_id\":null}",
                "m.json:2:1: expected a string or a number as the key \"msg_id\", found null",
            ),
            (
                "{\"msg_id\":\"\"}",
                "m.json:1:2: expected a string or a number as the key \"msg_id\", found an empty string",
            ),
            ("{\"msg_id\":[1]}", "found an array"),
            ("{\"msg_id\":{}}", "found an object"),
            ("{\"msg_id\":\"a\\u0000b\"}", "found a control character at byte 1"),
            (
                "{\"msg_id\":\"M1\",\"order_no\":{}}",
                "m.json:1:16: expected a string or a number as the business key",
            ),
        ] {
            let said = refused(text);
            assert!(said.contains(expected), "{text:?}: {said}");
        }
        let long = "é".repeat(128);
        assert!(refused(format!("{{\"msg_id\":\"{long}\"}}")).contains("256 bytes long, the limit is 255"));
        assert!(read(format!("{{\"msg_id\":\"{}\"}}", &long[..254])).is_ok());
        assert!(read(format!("{{\"msg_id\":\"{}\"}}", "k".repeat(255))).is_ok());
        assert!(
            refused(b"{\"msg_id\":\"a\xff\"}").contains("m.json:1:13: expected UTF-8, found the byte 0xFF")
        );
    }
}
