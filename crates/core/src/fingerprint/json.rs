//! A strict JSON reader for fingerprints: it keeps numerals as text and refuses what two readers could take
//! for different things.
//!
//! Beyond RFC 8259 it refuses, as I-JSON (RFC 7493) asks: duplicate members, lone surrogates, bytes that are not
//! UTF-8, a byte order mark. Depth is bounded by [`DEPTH_MAX`]; memory by about 16 times the length of the text.

use std::borrow::Cow;
use std::cmp::Ordering;

/// How deep arrays and objects may be nested.
pub const DEPTH_MAX: usize = 128;

/// Why a text has no canonical form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} at byte {at}")]
pub struct JsonError {
    kind: JsonErrorKind,
    at: usize,
    expected: &'static str,
}

/// The kinds of [`JsonError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonErrorKind {
    /// The text ends in the middle.
    #[error("the JSON text ends too early,")]
    EndsEarly,
    /// A byte that cannot stand here.
    #[error("not JSON: unexpected byte")]
    Unexpected,
    /// Something follows the value.
    #[error("not JSON: something follows the value,")]
    Trailing,
    /// Not UTF-8.
    #[error("not UTF-8")]
    NotUtf8,
    /// A byte order mark before the text.
    #[error("a byte order mark")]
    ByteOrderMark,
    /// Half of a surrogate pair.
    #[error("half of a surrogate pair")]
    LoneSurrogate,
    /// An object names a member twice.
    #[error("a member that the object has already,")]
    DuplicateMember,
    /// Nested deeper than [`DEPTH_MAX`].
    #[error("nested deeper than {DEPTH_MAX} levels")]
    TooDeep,
    /// An exponent of more than 15 digits.
    #[error("an exponent of more than 15 digits")]
    ExponentTooLong,
}

impl JsonError {
    pub(super) fn new(kind: JsonErrorKind, at: usize) -> Self {
        let expected = match kind {
            JsonErrorKind::EndsEarly | JsonErrorKind::Unexpected => "JSON",
            JsonErrorKind::Trailing => "the end of the text",
            JsonErrorKind::NotUtf8 => "UTF-8",
            JsonErrorKind::ByteOrderMark => "no byte order mark",
            JsonErrorKind::LoneSurrogate => "both halves of a surrogate pair",
            JsonErrorKind::DuplicateMember => "each member once",
            JsonErrorKind::TooDeep => "at most 128 levels",
            JsonErrorKind::ExponentTooLong => "an exponent of at most 15 digits",
        };
        Self { kind, at, expected }
    }

    /// What is wrong.
    pub fn kind(&self) -> JsonErrorKind {
        self.kind
    }

    /// Where, as an offset in bytes from the start of the text.
    pub fn at(&self) -> usize {
        self.at
    }

    /// What could have stood there, in words.
    pub fn expected(&self) -> &'static str {
        self.expected
    }
}

/// A JSON value; names and strings are unescaped, numerals are as written.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Null,
    Bool(bool),
    Number(Numeral<'a>),
    String(Cow<'a, str>),
    Array(Vec<Value<'a>>),
    /// Sorted by name in UTF-16 code units, no name twice.
    Object(Vec<Member<'a>>),
}

/// A numeral as written, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numeral<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
}

#[derive(Debug)]
pub(super) struct Member<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) value: Value<'a>,
    /// Where its name stands.
    pub(super) at: usize,
}

/// Reads one JSON text.
pub(super) fn parse(text: &[u8]) -> Result<Value<'_>, JsonError> {
    if text.starts_with(b"\xef\xbb\xbf") {
        return Err(JsonError::new(JsonErrorKind::ByteOrderMark, 0));
    }
    let text =
        std::str::from_utf8(text).map_err(|e| JsonError::new(JsonErrorKind::NotUtf8, e.valid_up_to()))?;
    let mut reader = Reader { text, at: 0 };
    reader.space();
    let value = reader.value(0)?;
    reader.space();
    match reader.at == text.len() {
        true => Ok(value),
        false => Err(reader.error(JsonErrorKind::Trailing)),
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        match self.peek() {
            Some(b'{' | b'[') if depth >= DEPTH_MAX => Err(self.error(JsonErrorKind::TooDeep)),
            Some(b'{') => self.object(depth + 1),
            Some(b'[') => self.array(depth + 1),
            Some(b'"') => Ok(Value::String(self.string()?)),
            Some(b'-' | b'0'..=b'9') => Ok(Value::Number(self.number()?)),
            Some(b't') => self.word("true", Value::Bool(true)),
            Some(b'f') => self.word("false", Value::Bool(false)),
            Some(b'n') => self.word("null", Value::Null),
            _ => Err(self.unexpected("a value")),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        self.at += 1;
        let mut members = Vec::new();
        self.space();
        if self.eat(b'}') {
            return Ok(Value::Object(members));
        }
        loop {
            self.space();
            let at = self.at;
            if self.peek() != Some(b'"') {
                let or_end = if members.is_empty() {
                    "a member name in double quotes, or }"
                } else {
                    "a member name in double quotes"
                };
                return Err(self.unexpected(or_end));
            }
            let name = self.string()?;
            self.space();
            self.expect(b':', "a colon")?;
            self.space();
            members.push(Member { name, value: self.value(depth)?, at });
            self.space();
            if self.eat(b'}') {
                break;
            }
            self.expect(b',', "a comma or }")?;
        }
        // Stable: of two equal names the later one comes second, and is the one to report.
        members.sort_by(|a, b| utf16_order(&a.name, &b.name));
        match members.windows(2).filter(|pair| pair[0].name == pair[1].name).map(|pair| pair[1].at).min() {
            Some(at) => Err(JsonError::new(JsonErrorKind::DuplicateMember, at)),
            None => Ok(Value::Object(members)),
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.eat(b']') {
            return Ok(Value::Array(items));
        }
        loop {
            self.space();
            items.push(self.value(depth)?);
            self.space();
            if self.eat(b']') {
                return Ok(Value::Array(items));
            }
            self.expect(b',', "a comma or ]")?;
        }
    }

    fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.at += 1;
        let start = self.at;
        let plain = self.plain_run();
        if self.eat(b'"') {
            return Ok(Cow::Borrowed(&self.text[start..start + plain]));
        }
        let mut out = String::from(&self.text[start..start + plain]);
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(out));
                }
                Some(b'\\') => out.push(self.escape()?),
                Some(_) => return Err(self.unexpected("no bare control character in a string")),
                None => return Err(self.unexpected("the closing quote of a string")),
            }
            let from = self.at;
            let plain = self.plain_run();
            out.push_str(&self.text[from..from + plain]);
        }
    }

    /// Goes on to the next quote, backslash or control character; how many bytes that was.
    fn plain_run(&mut self) -> usize {
        let rest = &self.text.as_bytes()[self.at..];
        let run = rest.iter().position(|b| matches!(b, b'"' | b'\\' | 0..0x20)).unwrap_or(rest.len());
        self.at += run;
        run
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let at = self.at;
        self.at += 1;
        let c = match self.peek() {
            Some(b'u') => {
                self.at += 1;
                return self.unicode_escape(at);
            }
            Some(c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            _ => return Err(self.unexpected("an escape such as \\n or \\u00e9")),
        };
        self.at += 1;
        Ok(c)
    }

    fn unicode_escape(&mut self, at: usize) -> Result<char, JsonError> {
        let lone = JsonError::new(JsonErrorKind::LoneSurrogate, at);
        let high = self.hex4()?;
        if !(0xd800..0xe000).contains(&high) {
            return char::from_u32(high).ok_or(lone);
        }
        if high >= 0xdc00 || !(self.eat(b'\\') && self.eat(b'u')) {
            return Err(lone);
        }
        match self.hex4()? {
            low @ 0xdc00..0xe000 => {
                char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)).ok_or(lone)
            }
            _ => Err(lone),
        }
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self
                .peek()
                .and_then(|b| char::from(b).to_digit(16))
                .ok_or_else(|| self.unexpected("four hexadecimal digits"))?;
            code = code * 16 + digit;
            self.at += 1;
        }
        Ok(code)
    }

    fn number(&mut self) -> Result<Numeral<'a>, JsonError> {
        let at = self.at;
        self.eat(b'-');
        // A leading zero stands alone.
        if !self.eat(b'0') {
            self.digits()?;
        }
        if self.eat(b'.') {
            self.digits()?;
        }
        if self.eat(b'e') || self.eat(b'E') {
            let _sign = self.eat(b'+') || self.eat(b'-');
            self.digits()?;
        }
        Ok(Numeral { text: &self.text[at..self.at], at })
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let rest = &self.text.as_bytes()[self.at..];
        let run = rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len());
        self.at += run;
        if run == 0 { Err(self.unexpected("a digit")) } else { Ok(()) }
    }

    fn word(&mut self, word: &'static str, value: Value<'a>) -> Result<Value<'a>, JsonError> {
        for byte in word.bytes() {
            self.expect(byte, word)?;
        }
        Ok(value)
    }

    fn space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().position(|b| !matches!(b, b' ' | b'\t' | b'\n' | b'\r')).unwrap_or(rest.len());
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), JsonError> {
        if self.eat(byte) { Ok(()) } else { Err(self.unexpected(expected)) }
    }

    fn unexpected(&self, expected: &'static str) -> JsonError {
        let kind = match self.at < self.text.len() {
            true => JsonErrorKind::Unexpected,
            false => JsonErrorKind::EndsEarly,
        };
        JsonError { expected, ..self.error(kind) }
    }

    fn error(&self, kind: JsonErrorKind) -> JsonError {
        JsonError::new(kind, self.at)
    }
}

/// The order of UTF-16 code units. It is that of the bytes, but for characters past U+FFFF, which come before those from
/// U+E000 on.
fn utf16_order(a: &str, b: &str) -> Ordering {
    match a.bytes().zip(b.bytes()).find(|(a, b)| a != b) {
        // The first byte of U+E000.
        Some((a, b)) if a < 0xee && b < 0xee => a.cmp(&b),
        Some(_) => a.encode_utf16().cmp(b.encode_utf16()),
        None => a.len().cmp(&b.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use JsonErrorKind::*;

    fn refused(text: impl AsRef<[u8]>) -> (JsonErrorKind, usize) {
        let error = parse(text.as_ref()).expect_err("refused");
        (error.kind(), error.at())
    }

    #[test]
    fn errors_say_what_and_where() {
        for (text, expected) in [
            ("", (EndsEarly, 0)),
            ("{\"a\":", (EndsEarly, 5)),
            ("\"abc", (EndsEarly, 4)),
            ("[1,]", (Unexpected, 3)),
            ("{\"a\" 1}", (Unexpected, 5)),
            ("{a:1}", (Unexpected, 1)),
            ("01", (Trailing, 1)),
            ("1 2", (Trailing, 2)),
            ("+1", (Unexpected, 0)),
            ("1.", (EndsEarly, 2)),
            (".5", (Unexpected, 0)),
            ("1e", (EndsEarly, 2)),
            ("NaN", (Unexpected, 0)),
            ("nul", (EndsEarly, 3)),
            ("\"\\x\"", (Unexpected, 2)),
            ("\"\\u12g4\"", (Unexpected, 5)),
            ("\"a\nb\"", (Unexpected, 2)),
            ("\"\\ud800\"", (LoneSurrogate, 1)),
            ("\"\\ud800\\u0041\"", (LoneSurrogate, 1)),
            ("\"\\udc00\\ud800\"", (LoneSurrogate, 1)),
            ("\u{feff}1", (ByteOrderMark, 0)),
            ("{\"a\":1,\"b\":2,\"a\":1}", (DuplicateMember, 13)),
            // The same name, once escaped.
            ("{\"a\":1,\"\\u0061\":1}", (DuplicateMember, 7)),
            ("[{\"x\":{\"\":1,\"\":2}}]", (DuplicateMember, 12)),
        ] {
            assert_eq!(refused(text), expected, "{text:?}");
        }
        assert_eq!(refused(b"\"a\xff\""), (NotUtf8, 2));
        let error = parse(b"[1,]").unwrap_err();
        assert_eq!(error.to_string(), "not JSON: unexpected byte at byte 3");
        assert_eq!(error.expected(), "a value");
        for (text, expected) in [
            ("{\"a\" 1}", "a colon"),
            ("{\"a\":1 \"b\"", "a comma or }"),
            ("[1 2]", "a comma or ]"),
            ("{\"a\":1,}", "a member name in double quotes"),
            ("{a:1}", "a member name in double quotes, or }"),
            ("\"a\nb\"", "no bare control character in a string"),
            ("\"a", "the closing quote of a string"),
            ("1 2", "the end of the text"),
            ("trou", "true"),
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap_err().expected(), expected, "{text:?}");
        }
    }

    #[test]
    fn names_are_in_the_order_of_their_utf_16_code_units() {
        let names = [
            "",
            "a",
            "a\u{7f}",
            "ab",
            "\u{80}",
            "é",
            "\u{d7ff}",
            "\u{e000}",
            "\u{ffff}",
            "\u{10000}",
            "\u{10ffff}",
        ];
        let names: Vec<String> =
            names.iter().flat_map(|a| names.iter().map(move |b| format!("{a}{b}"))).collect();
        for a in &names {
            for b in &names {
                assert_eq!(utf16_order(a, b), a.encode_utf16().cmp(b.encode_utf16()), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse(nested(DEPTH_MAX).as_bytes()).is_ok());
        assert_eq!(refused(nested(DEPTH_MAX + 1)), (TooDeep, DEPTH_MAX));
        // Depth costs nothing before it is refused: no recursion that input could drive into the stack's end.
        assert_eq!(refused("[".repeat(1_000_000)), (TooDeep, DEPTH_MAX));
        assert_eq!(refused("{\"a\":".repeat(1_000_000)), (TooDeep, DEPTH_MAX * 5));
    }
}
