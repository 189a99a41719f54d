//! Key expressions: which parts of a message make up its key.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use onlyonce_core::fingerprint::{Document, Found, InvalidPointer, Node, Pointer};

/// Which parts of a message make up a text: its key, or its business key.
///
/// | written | means |
/// |---|---|
/// | `msg_id` | the member of that name, whatever is in it |
/// | `/header/id` | a JSON pointer (RFC 6901) |
/// | `{sender}/{date}/{/header/seq}` | several parts and the text between them; `{{` and `}}` are braces |
///
/// Parts cannot run into each other: where there are several, a `%` in a value and every character of the text between
/// them is written `%XX`, and `%;` stands between two parts that have no text between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyExpression {
    text: String,
    pieces: Vec<Piece>,
    // What is escaped in values. Empty where there is one part alone.
    escaped: BTreeSet<char>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    Part(Part),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    name: String,
    pointer: Pointer,
}

/// Why a key expression was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidExpression {
    /// It names nothing.
    #[error("it names no member of the message")]
    NoPart,
    /// `{` without `}`, the other way round, or `{}`.
    #[error("its braces are not balanced: write {{name}}, and {{{{ or }}}} for a brace")]
    Braces,
    /// A control character between the parts.
    #[error("it holds a control character")]
    Control,
    /// Not a JSON pointer.
    #[error(transparent)]
    Pointer(#[from] InvalidPointer),
}

/// The text that an expression makes of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evaluated<'d> {
    pub(crate) text: Cow<'d, str>,
    /// Where its first part is, as an offset in bytes.
    pub(crate) at: usize,
}

/// Why a message has no text for an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    /// The part, as it is written in the expression.
    pub(crate) part: String,
    pub(crate) found: Unfit,
    /// Where, as an offset in bytes.
    pub(crate) at: usize,
}

/// What was found in the place of a string, a number or a boolean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    Absent,
    Null,
    Empty,
    Array,
    Object,
}

impl KeyExpression {
    /// The text that it makes of a message; numerals as they are written. No part of it is empty.
    pub(crate) fn evaluate<'d>(&self, document: &'d Document<'_>) -> Result<Evaluated<'d>, Missing> {
        if let [Piece::Part(part)] = self.pieces.as_slice() {
            return part.value(document);
        }
        let mut out = String::new();
        let (mut first_at, mut after_part) = (None, false);
        for piece in &self.pieces {
            match piece {
                Piece::Literal(text) => out.push_str(text),
                Piece::Part(part) => {
                    if after_part {
                        out.push_str("%;");
                    }
                    let value = part.value(document)?;
                    first_at.get_or_insert(value.at);
                    self.escape(&mut out, &value.text);
                }
            }
            after_part = matches!(piece, Piece::Part(_));
        }
        Ok(Evaluated { text: Cow::Owned(out), at: first_at.unwrap_or_default() })
    }

    fn escape(&self, out: &mut String, value: &str) {
        for c in value.chars() {
            if self.escaped.contains(&c) {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    write!(out, "%{byte:02X}").expect("a String takes any text");
                }
            } else {
                out.push(c);
            }
        }
    }
}

impl Part {
    fn new(name: &str) -> Result<Self, InvalidExpression> {
        let pointer = match name {
            "" => return Err(InvalidExpression::Braces),
            name if name.starts_with('/') => name.parse()?,
            name => Pointer::to_member(name)?,
        };
        Ok(Self { name: name.into(), pointer })
    }

    fn value<'d>(&self, document: &'d Document<'_>) -> Result<Evaluated<'d>, Missing> {
        let Some(Found { node, at }) = document.find(&self.pointer) else {
            return Err(Missing { part: self.name.clone(), found: Unfit::Absent, at: 0 });
        };
        let text = match node {
            Node::String("") => Err(Unfit::Empty),
            Node::String(text) | Node::Number(text) => Ok(text),
            Node::Bool(value) => Ok(if value { "true" } else { "false" }),
            Node::Null => Err(Unfit::Null),
            Node::Array => Err(Unfit::Array),
            Node::Object => Err(Unfit::Object),
        };
        match text {
            Ok(text) => Ok(Evaluated { text: Cow::Borrowed(text), at }),
            Err(found) => Err(Missing { part: self.name.clone(), found, at }),
        }
    }
}

impl Unfit {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "no such member",
            Self::Null => "null",
            Self::Empty => "an empty string",
            Self::Array => "an array",
            Self::Object => "an object",
        }
    }
}

impl FromStr for KeyExpression {
    type Err = InvalidExpression;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let pieces = match text {
            "" => return Err(InvalidExpression::NoPart),
            _ if text.contains(['{', '}']) => pieces(text)?,
            name => vec![Piece::Part(Part::new(name)?)],
        };
        let literals = || {
            pieces.iter().filter_map(|piece| match piece {
                Piece::Literal(text) => Some(text.as_str()),
                Piece::Part(_) => None,
            })
        };
        let parts = pieces.len() - literals().count();
        if parts == 0 {
            return Err(InvalidExpression::NoPart);
        }
        if literals().any(|text| text.contains(char::is_control)) {
            return Err(InvalidExpression::Control);
        }
        let escaped =
            if parts > 1 { literals().flat_map(str::chars).chain(['%']).collect() } else { BTreeSet::new() };
        Ok(Self { text: text.into(), pieces, escaped })
    }
}

impl fmt::Display for KeyExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn pieces(text: &str) -> Result<Vec<Piece>, InvalidExpression> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let doubled = rest.starts_with("{{") || rest.starts_with("}}");
        match c {
            '{' | '}' if doubled => {
                literal.push(c);
                rest = &rest[2..];
            }
            '{' => {
                let (name, after) = rest[1..].split_once('}').ok_or(InvalidExpression::Braces)?;
                if name.contains('{') {
                    return Err(InvalidExpression::Braces);
                }
                if !literal.is_empty() {
                    pieces.push(Piece::Literal(std::mem::take(&mut literal)));
                }
                pieces.push(Piece::Part(Part::new(name)?));
                rest = after;
            }
            '}' => return Err(InvalidExpression::Braces),
            c => {
                literal.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    if !literal.is_empty() {
        pieces.push(Piece::Literal(literal));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(expression: &str, text: &str) -> Result<String, Missing> {
        let document = Document::parse(text.as_bytes()).expect("JSON");
        let expression: KeyExpression = expression.parse().expect("an expression");
        expression.evaluate(&document).map(|evaluated| evaluated.text.into_owned())
    }

    #[test]
    fn members_pointers_and_templates_are_read() {
        let text = r#"{"msg_id":"M1","a.b":"dot","h":{"id":653247040368672768,"x/y":"slash"},"list":["p","q"],
            "n":-0.50e+10,"t":true,"{odd}":"brace"}"#;
        for (expression, expected) in [
            ("msg_id", "M1"),
            ("a.b", "dot"),
            ("/h/id", "653247040368672768"),
            ("/h/x~1y", "slash"),
            ("/list/1", "q"),
            ("n", "-0.50e+10"),
            ("{msg_id}", "M1"),
            ("x-{msg_id}", "x-M1"),
            ("{msg_id}/{/h/id}", "M1/653247040368672768"),
            ("{{{msg_id}}}", "{M1}"),
            ("{msg_id}{a.b}", "M1%;dot"),
            ("{t}:{msg_id}", "true:M1"),
        ] {
            assert_eq!(key(expression, text).as_deref(), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn wrong_expressions_are_refused() {
        use InvalidExpression::*;
        for (expression, expected) in [
            ("", NoPart),
            ("{{x}}", NoPart),
            ("{", Braces),
            ("a}", Braces),
            ("{}", Braces),
            ("{a{b}}", Braces),
            ("{a}\n{b}", Control),
            ("/a~2", Pointer(InvalidPointer::Escape)),
        ] {
            assert_eq!(expression.parse::<KeyExpression>(), Err(expected), "{expression:?}");
        }
    }

    #[test]
    fn what_is_missing_says_where_and_what_was_found() {
        let text = r#"{"a":null,"b":[],"c":{},"d":""}"#;
        for (expression, found, at) in [
            ("a", Unfit::Null, 1),
            ("b", Unfit::Array, 10),
            ("c", Unfit::Object, 17),
            ("d", Unfit::Empty, 24),
            ("x", Unfit::Absent, 0),
            ("{d}-{a}", Unfit::Empty, 24),
        ] {
            let missing = key(expression, text).expect_err("missing");
            assert_eq!((missing.found, missing.at), (found, at), "{expression}");
        }
    }

    proptest::proptest! {
        /// Two messages have one key only when every part is the same.
        #[test]
        fn parts_never_run_into_each_other(
            a in "[ab/%;2F-]{1,4}", b in "[ab/%;2F-]{1,4}", c in "[ab/%;2F-]{1,4}", d in "[ab/%;2F-]{1,4}",
        ) {
            let text = |x: &str, y: &str| serde_json::json!({"x": x, "y": y}).to_string();
            for expression in ["{x}/{y}", "{x}{y}", "{x}%{y}", "{x}a%{y}-", "%2F{x};{y}", "{x}%;{y}"] {
                let same = key(expression, &text(&a, &b)) == key(expression, &text(&c, &d));
                proptest::prop_assert_eq!(same, (&a, &b) == (&c, &d), "{}", expression);
            }
        }
    }
}
