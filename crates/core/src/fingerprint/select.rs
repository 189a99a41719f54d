//! Parts of a JSON value, named by JSON pointers (RFC 6901).

use std::fmt;
use std::str::FromStr;

use super::canonical::{write_list, write_string, write_value};
use super::json::{JsonError, Value};

/// The longest pointer, in bytes.
pub const POINTER_BYTES_MAX: usize = 1024;

/// A JSON pointer such as `/customer/id` or `/items/0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pointer {
    text: Box<str>,
    tokens: Box<[Box<str>]>,
}

/// Why a JSON pointer was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidPointer {
    /// Only the whole document (the empty pointer) has no slash in front.
    #[error("a JSON pointer starts with a slash")]
    NoSlash,
    /// `~` is followed by neither `0` nor `1`.
    #[error("in a JSON pointer ~ is written ~0 and / is written ~1")]
    Escape,
    /// Longer than [`POINTER_BYTES_MAX`].
    #[error("a JSON pointer has at most {POINTER_BYTES_MAX} bytes")]
    TooLong,
}

impl Pointer {
    /// The pointer as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it names the whole document.
    pub fn is_root(&self) -> bool {
        self.tokens.is_empty()
    }

    /// To a member of the document itself, whatever is in its name.
    ///
    /// # Errors
    /// [`InvalidPointer::TooLong`].
    pub fn to_member(name: &str) -> Result<Self, InvalidPointer> {
        format!("/{}", name.replace('~', "~0").replace('/', "~1")).parse()
    }

    pub(super) fn find<'v, 'a>(&self, root: &'v Value<'a>) -> Option<&'v Value<'a>> {
        self.locate(root).map(|(value, _)| value)
    }

    /// The value, and where the name of the innermost member on the way to it stands.
    pub(super) fn locate<'v, 'a>(&self, root: &'v Value<'a>) -> Option<(&'v Value<'a>, Option<usize>)> {
        self.tokens.iter().try_fold((root, None), |(value, at), token| match value {
            Value::Object(members) => {
                members.iter().find(|m| m.name == **token).map(|m| (&m.value, Some(m.at)))
            }
            Value::Array(items) => Some((items.get(array_index(token)?)?, at)),
            _ => None,
        })
    }
}

impl FromStr for Pointer {
    type Err = InvalidPointer;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > POINTER_BYTES_MAX {
            return Err(InvalidPointer::TooLong);
        }
        let tokens = match text.strip_prefix('/') {
            Some(rest) => rest.split('/').map(unescape).collect::<Result<_, _>>()?,
            None if text.is_empty() => Box::default(),
            None => return Err(InvalidPointer::NoSlash),
        };
        Ok(Self { text: text.into(), tokens })
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn unescape(token: &str) -> Result<Box<str>, InvalidPointer> {
    let mut parts = token.split('~');
    let mut out = String::from(parts.next().unwrap_or_default());
    for part in parts {
        match part.as_bytes().first() {
            Some(b'0') => out.push('~'),
            Some(b'1') => out.push('/'),
            _ => return Err(InvalidPointer::Escape),
        }
        out.push_str(&part[1..]);
    }
    Ok(out.into())
}

fn array_index(token: &str) -> Option<usize> {
    let canonical = token == "0" || (!token.starts_with('0') && token.bytes().all(|b| b.is_ascii_digit()));
    if canonical { token.parse().ok() } else { None }
}

/// Writes the canonical form of everything that none of the pointers names.
pub(super) fn write_except(
    out: &mut Vec<u8>,
    root: &Value<'_>,
    pointers: &[Pointer],
) -> Result<(), JsonError> {
    let paths: Vec<&[Box<str>]> = pointers.iter().map(|pointer| &*pointer.tokens).collect();
    write_rest(out, root, &paths)
}

/// `paths` are the excluded ones below this value; none is empty.
fn write_rest(out: &mut Vec<u8>, value: &Value<'_>, paths: &[&[Box<str>]]) -> Result<(), JsonError> {
    if paths.is_empty() {
        return write_value(out, value);
    }
    match value {
        Value::Object(members) => {
            let kept = members.iter().filter_map(|m| Some((m, below(paths, |token| *token == m.name)?)));
            write_list(out, b"{}", kept, |out, (member, paths)| {
                write_string(out, &member.name);
                out.push(b':');
                write_rest(out, &member.value, &paths)
            })
        }
        Value::Array(items) => {
            let kept = items
                .iter()
                .enumerate()
                .filter_map(|(i, item)| Some((item, below(paths, |token| array_index(token) == Some(i))?)));
            write_list(out, b"[]", kept, |out, (item, paths)| write_rest(out, item, &paths))
        }
        _ => write_value(out, value),
    }
}

/// The paths that go on below a child; `None` when one ends there, so that the child is left out.
fn below<'p>(paths: &[&'p [Box<str>]], is_child: impl Fn(&str) -> bool) -> Option<Vec<&'p [Box<str>]>> {
    let through = paths.iter().filter(|path| is_child(&path[0])).map(|path| &path[1..]);
    through.map(|rest| if rest.is_empty() { None } else { Some(rest) }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::json::parse;
    use super::*;

    fn found(text: &str, pointer: &str) -> Option<String> {
        let value = parse(text.as_bytes()).unwrap();
        let pointer: Pointer = pointer.parse().unwrap();
        pointer.find(&value).map(|value| {
            let mut out = Vec::new();
            write_value(&mut out, value).unwrap();
            String::from_utf8(out).unwrap()
        })
    }

    fn except(text: &str, pointers: &[&str]) -> String {
        let pointers: Vec<Pointer> = pointers.iter().map(|p| p.parse().unwrap()).collect();
        let mut out = Vec::new();
        write_except(&mut out, &parse(text.as_bytes()).unwrap(), &pointers).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// RFC 6901, section 5.
    #[test]
    fn rfc_6901_samples() {
        let document =
            r#"{"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8}"#;
        for (pointer, value) in [
            ("/foo", r#"["bar","baz"]"#),
            ("/foo/0", r#""bar""#),
            ("/", "0"),
            ("/a~1b", "1"),
            ("/c%d", "2"),
            ("/e^f", "3"),
            ("/g|h", "4"),
            ("/i\\j", "5"),
            ("/k\"l", "6"),
            ("/ ", "7"),
            ("/m~0n", "8"),
        ] {
            assert_eq!(found(document, pointer).as_deref(), Some(value), "{pointer}");
        }
        for absent in ["/foo/2", "/foo/-", "/foo/00", "/foo/+1", "/foo/bar", "/fo", "/foo/0/x"] {
            assert_eq!(found(document, absent), None, "{absent}");
        }
        assert_eq!("foo".parse::<Pointer>(), Err(InvalidPointer::NoSlash));
        let longest = format!("/{}", "a".repeat(POINTER_BYTES_MAX - 1));
        assert_eq!(longest.parse::<Pointer>().unwrap().to_string(), longest);
        assert_eq!(format!("{longest}a").parse::<Pointer>(), Err(InvalidPointer::TooLong));
        assert_eq!("/a~2".parse::<Pointer>(), Err(InvalidPointer::Escape));
        assert_eq!("/a~".parse::<Pointer>(), Err(InvalidPointer::Escape));
        assert_eq!(format!("/{}", "a".repeat(1024)).parse::<Pointer>(), Err(InvalidPointer::TooLong));
        assert_eq!(found("{\"~1\":1}", "/~01").as_deref(), Some("1"));
    }

    #[test]
    fn the_rest_is_what_no_pointer_names() {
        let document = r#"{"sent_at":1,"a":{"id":7,"sent_at":2},"items":[{"id":1,"x":0},{"id":2,"x":0}]}"#;
        assert_eq!(
            except(document, &["/sent_at", "/a/sent_at", "/items/1", "/items/0/x", "/nowhere/x"]),
            r#"{"a":{"id":7},"items":[{"id":1}]}"#
        );
        // A pointer below another one changes nothing.
        assert_eq!(except(document, &["/a", "/a/id", "/items"]), r#"{"sent_at":1}"#);
        assert_eq!(except("3", &["/a"]), "3");
        assert_eq!(except("[1,2,3]", &["/0", "/1"]), "[3]");
    }
}
