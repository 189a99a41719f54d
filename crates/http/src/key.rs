//! The `Idempotency-Key` header.

use http::{HeaderMap, HeaderName};
use onlyonce_core::operation::NAME_BYTES_MAX;
use onlyonce_core::{InvalidName, Key};
use sfv::{BareItem, Item, Parser};

use crate::headers::IDEMPOTENCY_KEY;

/// How the key is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    header: HeaderName,
    quoted_only: bool,
}

/// Why a key was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MalformedKey {
    /// No character at all.
    #[error("the key is empty")]
    Empty,
    /// Over 255 characters, after unescaping.
    #[error("the key has {len} characters, the limit is {NAME_BYTES_MAX}")]
    TooLong {
        /// How many there are.
        len: usize,
    },
    /// More than one header line.
    #[error("there are {lines} header lines with a key, one is allowed")]
    SeveralLines {
        /// How many there are.
        lines: usize,
    },
    /// A list where one key is allowed.
    #[error("the header holds a list, one key is allowed")]
    List,
    /// A quoted string without its end.
    #[error("the quoted string is not closed")]
    Unclosed,
    /// A backslash before anything but a quote or a backslash.
    #[error("at character {at}: a backslash may stand only before a quote or a backslash")]
    Escape {
        /// Counted from 1.
        at: usize,
    },
    /// A control or non-ASCII byte.
    #[error("at character {at}: byte 0x{byte:02x} is not allowed, a key is visible ASCII")]
    Character {
        /// Counted from 1.
        at: usize,
        /// The byte.
        byte: u8,
    },
    /// A character that a key may hold only inside quotes.
    #[error("at character {at}: {character:?} is allowed only inside a quoted string")]
    NeedsQuotes {
        /// Counted from 1.
        at: usize,
        /// The character.
        character: char,
    },
    /// Something follows the quoted string that is not a parameter.
    #[error("only parameters may follow the quoted string")]
    AfterQuotes,
    /// A bare key where only quoted ones are allowed.
    #[error("the key must be a quoted string, such as \"8e03978e-40d5-43dd-bc93-6894a57f9324\"")]
    NotQuoted,
}

impl Default for KeyRule {
    /// `Idempotency-Key`, quoted or bare.
    fn default() -> Self {
        Self { header: IDEMPOTENCY_KEY, quoted_only: false }
    }
}

impl KeyRule {
    /// Reads another header.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.header = name;
        self
    }

    /// Refuses bare keys, as draft-ietf-httpapi-idempotency-key-header §2.1 has it.
    #[must_use]
    pub fn quoted_only(mut self) -> Self {
        self.quoted_only = true;
        self
    }

    /// The header that is read.
    pub fn name(&self) -> &HeaderName {
        &self.header
    }

    /// The key of a request, or `None` when there is no header line.
    ///
    /// # Errors
    /// [`MalformedKey`], with the reason.
    pub fn read(&self, headers: &HeaderMap) -> Result<Option<Key>, MalformedKey> {
        let mut lines = headers.get_all(&self.header).iter();
        let Some(line) = lines.next() else { return Ok(None) };
        match lines.count() {
            0 => parse_key(line.as_bytes(), self.quoted_only).map(Some),
            more => Err(MalformedKey::SeveralLines { lines: more + 1 }),
        }
    }
}

/// Reads a header value: a Structured Field string (RFC 9651 §3.3.3) whose parameters are ignored, or a bare key of
/// visible ASCII without `"`, `,`, `;` and `\`. Quoted and bare `abc` are the same key.
///
/// # Errors
/// [`MalformedKey`], with the reason.
pub fn parse_key(value: &[u8], quoted_only: bool) -> Result<Key, MalformedKey> {
    let value = value.trim_ascii();
    if value.first() == Some(&b'"') {
        return parse_quoted(value);
    }
    if let Some(at) = value.iter().position(|b| !b.is_ascii_graphic() && *b != b' ') {
        return Err(MalformedKey::Character { at: at + 1, byte: value[at] });
    }
    match value.iter().position(|b| matches!(b, b' ' | b'"' | b',' | b';' | b'\\')) {
        Some(at) if value[at] == b',' => return Err(MalformedKey::List),
        Some(at) => return Err(MalformedKey::NeedsQuotes { at: at + 1, character: value[at].into() }),
        None => {}
    }
    if quoted_only && !value.is_empty() {
        return Err(MalformedKey::NotQuoted);
    }
    named(std::str::from_utf8(value).expect("visible ASCII was checked"))
}

fn parse_quoted(value: &[u8]) -> Result<Key, MalformedKey> {
    match Parser::new(value).parse::<Item>() {
        Ok(Item { bare_item: BareItem::String(key), .. }) => named(key.as_str()),
        _ => Err(diagnose(value)),
    }
}

/// What is wrong with a value that starts with a quote and is not a string.
fn diagnose(value: &[u8]) -> MalformedKey {
    let mut at = 1;
    while let Some(byte) = value.get(at) {
        match byte {
            b'"' => {
                let rest = value[at + 1..].trim_ascii_start();
                return if rest.starts_with(b",") { MalformedKey::List } else { MalformedKey::AfterQuotes };
            }
            b'\\' => match value.get(at + 1) {
                Some(b'"' | b'\\') => at += 1,
                Some(_) => return MalformedKey::Escape { at: at + 1 },
                None => return MalformedKey::Unclosed,
            },
            b' '..=b'~' => {}
            byte => return MalformedKey::Character { at: at + 1, byte: *byte },
        }
        at += 1;
    }
    MalformedKey::Unclosed
}

/// A key that is given as its own bytes, not as a header value: visible ASCII and spaces.
pub(crate) fn check_key(key: &[u8]) -> Result<Key, MalformedKey> {
    if let Some(at) = key.iter().position(|b| !(b' '..=b'~').contains(b)) {
        return Err(MalformedKey::Character { at: at + 1, byte: key[at] });
    }
    named(std::str::from_utf8(key).expect("visible ASCII was checked"))
}

fn named(key: &str) -> Result<Key, MalformedKey> {
    Key::new(key).map_err(|error| match error {
        InvalidName::TooLong { bytes } => MalformedKey::TooLong { len: bytes },
        _ => MalformedKey::Empty,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn key(value: &str) -> Result<String, MalformedKey> {
        parse_key(value.as_bytes(), false).map(|key| key.as_str().to_owned())
    }

    #[test]
    fn quoted_and_bare_are_one_key() {
        for same in ["abc", "\"abc\"", "  abc ", "\"abc\";v=1", "\"abc\"; v=1;w", "\t\"abc\""] {
            assert_eq!(key(same).as_deref(), Ok("abc"), "{same}");
        }
        assert_eq!(key(r#""a\"b\\c""#).as_deref(), Ok(r#"a"b\c"#));
        // Never trimmed inside quotes, never folded.
        assert_eq!(key("\" Abc \"").as_deref(), Ok(" Abc "));
        for bare in ["123", ":YWJj:", "?1", "@1659578233", "a/b=c", "8e03978e-40d5-43dd-bc93-6894a57f9324"] {
            assert_eq!(key(bare).as_deref(), Ok(bare));
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        use MalformedKey::*;
        for (value, expected) in [
            ("", Empty),
            ("   ", Empty),
            ("\"\"", Empty),
            ("\"abc", Unclosed),
            ("\"", Unclosed),
            ("\"abc\\\"", Unclosed),
            ("\"abc\\", Unclosed),
            ("\"a\\b\"", Escape { at: 3 }),
            ("\"a\", \"b\"", List),
            ("\"a\",", List),
            ("a,b", List),
            ("\"a\" b", AfterQuotes),
            ("\"a\"b", AfterQuotes),
            ("\"a\";V=1", AfterQuotes),
            ("a b", NeedsQuotes { at: 2, character: ' ' }),
            ("a;v=1", NeedsQuotes { at: 2, character: ';' }),
            ("a\"b", NeedsQuotes { at: 2, character: '"' }),
            ("a\\b", NeedsQuotes { at: 2, character: '\\' }),
            ("aé", Character { at: 2, byte: 0xc3 }),
            ("a\tb", Character { at: 2, byte: 9 }),
            ("\"a\tb\"", Character { at: 3, byte: 9 }),
            ("\"é\"", Character { at: 2, byte: 0xc3 }),
            ("a\u{7f}", Character { at: 2, byte: 0x7f }),
        ] {
            assert_eq!(key(value), Err(expected), "{value:?}");
        }
    }

    #[test]
    fn length_counts_after_unescaping() {
        let escaped = |n: usize| format!("\"{}\"", "\\\"".repeat(n));
        assert_eq!(key(&escaped(255)), Ok("\"".repeat(255)));
        assert_eq!(key(&escaped(256)), Err(MalformedKey::TooLong { len: 256 }));
        assert!(key(&"k".repeat(255)).is_ok());
        assert_eq!(key(&"k".repeat(256)), Err(MalformedKey::TooLong { len: 256 }));
    }

    #[test]
    fn one_line_and_quotes_where_asked() {
        let mut headers = HeaderMap::new();
        let rule = KeyRule::default().quoted_only();
        assert_eq!(rule.read(&headers), Ok(None));
        headers.append("idempotency-key", HeaderValue::from_static("abc"));
        assert_eq!(rule.read(&headers), Err(MalformedKey::NotQuoted));
        assert!(KeyRule::default().read(&headers).unwrap().is_some());
        headers.append("idempotency-key", HeaderValue::from_static("abc"));
        assert_eq!(KeyRule::default().read(&headers), Err(MalformedKey::SeveralLines { lines: 2 }));
        let other = KeyRule::default().header(HeaderName::from_static("x-request-id"));
        assert_eq!(other.read(&headers), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_key_or_refused(value in prop::collection::vec(any::<u8>(), 0..300), quoted in any::<bool>()) {
            if let Ok(key) = parse_key(&value, quoted) {
                prop_assert!((1..=255).contains(&key.as_str().len()));
            }
            let mut in_quotes = vec![b'"'];
            in_quotes.extend(&value);
            let _ = parse_key(&in_quotes, quoted);
        }

        #[test]
        fn any_bare_key_equals_its_quoted_form(bare in "[!#-+\\--:<-\\[\\]-~]{1,255}") {
            let key = parse_key(bare.as_bytes(), false).unwrap();
            prop_assert_eq!(key.as_str(), &bare);
            prop_assert_eq!(parse_key(format!("\"{bare}\"").as_bytes(), true), Ok(key));
        }

        #[test]
        fn any_text_survives_quoting(text in "[ -~]{1,255}") {
            let quoted = format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
            let key = parse_key(quoted.as_bytes(), true).unwrap();
            prop_assert_eq!(key.as_str(), text);
        }
    }
}
