//! A JSON text that was read once, for callers that look at some of its values and want its canonical form too.

use super::canonical::write_value;
use super::json::{self, JsonError, Value};
use super::select::Pointer;

/// A JSON text with one meaning: see [`super::canonical_json`] for what is refused.
#[derive(Debug)]
pub struct Document<'a> {
    root: Value<'a>,
    bytes: usize,
}

/// A value of a [`Document`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node<'d> {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A numeral, as it was written.
    Number(&'d str),
    /// A string, its escapes resolved.
    String(&'d str),
    /// An array
    Array,
    /// An object
    Object,
}

/// A value, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'d> {
    /// The value.
    pub node: Node<'d>,
    /// Where the name of its member stands, as an offset in bytes; 0 for a value that is no member's.
    pub at: usize,
}

impl<'a> Document<'a> {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// [`JsonError`], as for [`super::canonical_json`].
    pub fn parse(text: &'a [u8]) -> Result<Self, JsonError> {
        Ok(Self { root: json::parse(text)?, bytes: text.len() })
    }

    /// The document itself.
    pub fn root(&self) -> Node<'_> {
        node(&self.root)
    }

    /// What the pointer leads to.
    pub fn find(&self, pointer: &Pointer) -> Option<Found<'_>> {
        pointer.locate(&self.root).map(|(value, at)| Found { node: node(value), at: at.unwrap_or_default() })
    }

    /// Its canonical form.
    ///
    /// # Errors
    /// An exponent of more than 15 digits.
    pub fn canonical(&self) -> Result<Vec<u8>, JsonError> {
        let mut out = Vec::with_capacity(self.bytes);
        write_value(&mut out, &self.root)?;
        Ok(out)
    }
}

fn node<'d>(value: &'d Value<'_>) -> Node<'d> {
    match value {
        Value::Null => Node::Null,
        Value::Bool(value) => Node::Bool(*value),
        Value::Number(numeral) => Node::Number(numeral.text),
        Value::String(text) => Node::String(text),
        Value::Array(_) => Node::Array,
        Value::Object(_) => Node::Object,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_with_their_places_and_numerals_as_written() {
        let text = br#"{"h":{"id":653247040368672768},"s":"\u00e9","a":[{"x":null},[]],"b":true}"#;
        let document = Document::parse(text).unwrap();
        let find = |pointer: &str| document.find(&pointer.parse().unwrap());
        assert_eq!(find("/h/id"), Some(Found { node: Node::Number("653247040368672768"), at: 6 }));
        assert_eq!(find("/s").unwrap().node, Node::String("\u{e9}"));
        assert_eq!(find("/a/0/x"), Some(Found { node: Node::Null, at: 50 }));
        assert_eq!(find("/a/1"), Some(Found { node: Node::Array, at: 44 }));
        assert_eq!(find("/b").unwrap().node, Node::Bool(true));
        assert_eq!(find("/c"), None);
        assert_eq!(find("/b/c"), None);
        assert_eq!((find("").unwrap().node, document.root()), (Node::Object, Node::Object));
        assert_eq!(document.canonical().unwrap(), super::super::canonical_json(text).unwrap());
        assert_eq!(Pointer::to_member("a/b~c").unwrap().as_str(), "/a~1b~0c");
    }
}
