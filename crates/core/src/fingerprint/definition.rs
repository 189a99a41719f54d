//! How the fingerprint of a request is made.

use http::{HeaderMap, HeaderName};
use sha2::{Digest, Sha256};

use super::canonical::write_value;
use super::json::{self, JsonError};
use super::select::{InvalidPointer, Pointer, write_except};
use super::{DefinitionId, Fingerprint, FingerprintBuilder};

/// How many pointers or headers a definition may name.
pub const NAMES_MAX: usize = 64;

/// Which parts of a request join its fingerprint, and in which form.
///
/// Two definitions with the same parts and form have the same [`DefinitionId`], whatever the order in which
/// they were named. The id is stored with each fingerprint, so that a record outlives a change of configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    form: BodyForm,
    headers: Vec<HeaderName>,
    id: DefinitionId,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum BodyForm {
    Raw,
    CanonicalJson,
    Members(Vec<Pointer>),
    AllExcept(Vec<Pointer>),
}

/// Why a definition was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidDefinition {
    /// A list of members without a member.
    #[error("name at least one member")]
    NoMembers,
    /// Everything would be left out, and any body would be a retry of any other.
    #[error("the pointer to the whole document leaves nothing to compare")]
    NothingLeft,
    /// More than [`NAMES_MAX`].
    #[error("{count} names, the limit is {NAMES_MAX}")]
    TooMany {
        /// How many there were.
        count: usize,
    },
    /// Not a JSON pointer.
    #[error("{text:?}: {source}")]
    Pointer {
        /// What was given.
        text: String,
        /// What is wrong with it.
        source: InvalidPointer,
    },
}

/// A request, as far as its fingerprint goes.
#[derive(Clone, Copy, Debug)]
pub struct Material<'a> {
    /// What joins in any case, in this order: for HTTP the method, and the path with its query, as received.
    pub leading: &'a [&'a [u8]],
    /// Where the chosen headers are looked up.
    pub headers: &'a HeaderMap,
    /// The body as received.
    pub body: &'a [u8],
    /// Whether the body is said to be JSON; otherwise it joins raw under any definition.
    pub body_is_json: bool,
}

impl Default for Definition {
    fn default() -> Self {
        Self::raw()
    }
}

impl Definition {
    /// The body as it is, byte for byte. The default.
    pub fn raw() -> Self {
        Self::new(BodyForm::Raw)
    }

    /// The canonical form of a JSON body: spaces and the order of members do not matter, numbers are exact.
    pub fn canonical_json() -> Self {
        Self::new(BodyForm::CanonicalJson)
    }

    /// Only these members of a JSON body, by JSON pointers. A member that is absent differs from one that is null.
    ///
    /// # Errors
    /// [`InvalidDefinition`]: no pointer, a wrong one, or over 64 of them.
    pub fn members(pointers: impl IntoIterator<Item: AsRef<str>>) -> Result<Self, InvalidDefinition> {
        let pointers = read_pointers(pointers)?;
        if pointers.is_empty() {
            return Err(InvalidDefinition::NoMembers);
        }
        Ok(Self::new(BodyForm::Members(pointers)))
    }

    /// A JSON body without these members, by JSON pointers: for a time of sending and the like.
    ///
    /// # Errors
    /// [`InvalidDefinition`]: no pointer, a wrong one, the one to the whole document, or over 64 of them.
    pub fn all_except(pointers: impl IntoIterator<Item: AsRef<str>>) -> Result<Self, InvalidDefinition> {
        let pointers = read_pointers(pointers)?;
        if pointers.is_empty() {
            return Err(InvalidDefinition::NoMembers);
        }
        if pointers.iter().any(Pointer::is_root) {
            return Err(InvalidDefinition::NothingLeft);
        }
        Ok(Self::new(BodyForm::AllExcept(pointers)))
    }

    /// Lets these headers join: each value of a name, in order. Replaces an earlier choice.
    ///
    /// # Errors
    /// [`InvalidDefinition::TooMany`] past 64 names.
    pub fn with_headers(
        mut self,
        names: impl IntoIterator<Item = HeaderName>,
    ) -> Result<Self, InvalidDefinition> {
        self.headers = names.into_iter().collect();
        self.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        self.headers.dedup();
        if self.headers.len() > NAMES_MAX {
            return Err(InvalidDefinition::TooMany { count: self.headers.len() });
        }
        self.id = definition_id(&self.form, &self.headers);
        Ok(self)
    }

    /// Its name: 0 for the raw body without headers, 1 for canonical JSON without headers, else a hash of what it
    /// says, with the top bit set. Stable across releases.
    pub fn id(&self) -> DefinitionId {
        self.id
    }

    /// The headers that join, in the order in which they do.
    pub fn headers(&self) -> &[HeaderName] {
        &self.headers
    }

    /// Makes the fingerprint of one request. Costs one pass over the body, and for JSON forms its tree.
    ///
    /// # Errors
    /// [`JsonError`] under a JSON form, when a body that is said to be JSON has no canonical form.
    pub fn fingerprint(&self, material: &Material<'_>) -> Result<Fingerprint, JsonError> {
        let mut builder = Fingerprint::builder(self.id);
        for part in material.leading {
            builder = builder.part(part);
        }
        builder = self.add_body(builder, material)?;
        for name in &self.headers {
            let values = material.headers.get_all(name);
            builder = builder.part(name.as_str()).part((values.iter().count() as u64).to_be_bytes());
            for value in values {
                builder = builder.part(value.as_bytes());
            }
        }
        Ok(builder.finish())
    }

    fn add_body(
        &self,
        builder: FingerprintBuilder,
        material: &Material<'_>,
    ) -> Result<FingerprintBuilder, JsonError> {
        // The form is a part of its own: a raw body can never pass for the canonical form of a JSON one.
        if matches!(self.form, BodyForm::Raw) || !material.body_is_json {
            return Ok(builder.part("raw").part(material.body));
        }
        let value = json::parse(material.body)?;
        let mut out = Vec::with_capacity(material.body.len());
        let mut builder = builder.part("json");
        match &self.form {
            BodyForm::Raw | BodyForm::CanonicalJson => write_value(&mut out, &value)?,
            BodyForm::AllExcept(pointers) => write_except(&mut out, &value, pointers)?,
            BodyForm::Members(pointers) => {
                for pointer in pointers {
                    out.clear();
                    if let Some(member) = pointer.find(&value) {
                        write_value(&mut out, member)?;
                    }
                    // An absent member is the empty part, which no JSON value is.
                    builder = builder.part(&out);
                }
                return Ok(builder);
            }
        }
        Ok(builder.part(&out))
    }

    fn new(form: BodyForm) -> Self {
        let id = definition_id(&form, &[]);
        Self { form, headers: Vec::new(), id }
    }
}

fn read_pointers(pointers: impl IntoIterator<Item: AsRef<str>>) -> Result<Vec<Pointer>, InvalidDefinition> {
    let mut read = Vec::new();
    for pointer in pointers {
        let text = pointer.as_ref();
        read.push(
            text.parse().map_err(|source| InvalidDefinition::Pointer { text: text.to_owned(), source })?,
        );
    }
    read.sort();
    read.dedup();
    match read.len() {
        count if count > NAMES_MAX => Err(InvalidDefinition::TooMany { count }),
        _ => Ok(read),
    }
}

fn definition_id(form: &BodyForm, headers: &[HeaderName]) -> DefinitionId {
    let (name, pointers): (_, &[Pointer]) = match form {
        BodyForm::Raw if headers.is_empty() => return DefinitionId::RAW,
        BodyForm::CanonicalJson if headers.is_empty() => return DefinitionId(1),
        BodyForm::Raw => ("raw", &[]),
        BodyForm::CanonicalJson => ("canonical-json", &[]),
        BodyForm::Members(pointers) => ("members", pointers),
        BodyForm::AllExcept(pointers) => ("all-except", pointers),
    };
    let mut hasher = Sha256::new();
    let mut part = |text: &str| {
        hasher.update((text.len() as u64).to_be_bytes());
        hasher.update(text);
    };
    part("onlyonce fingerprint definition 1");
    part(name);
    pointers.iter().for_each(|pointer| part(pointer.as_str()));
    part("headers");
    headers.iter().for_each(|header| part(header.as_str()));
    let digest = hasher.finalize();
    let head = digest[..8].iter().fold(0, |id, byte| id << 8 | u64::from(*byte));
    DefinitionId(head | 1 << 63)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn print(definition: &Definition, body: &str) -> Fingerprint {
        let headers = HeaderMap::new();
        definition
            .fingerprint(&Material {
                leading: &[b"POST", b"/pay"],
                headers: &headers,
                body: body.as_bytes(),
                body_is_json: true,
            })
            .expect(body)
    }

    fn names(names: &[&'static str]) -> Vec<HeaderName> {
        names.iter().map(|name| HeaderName::from_static(name)).collect()
    }

    // Frozen: a changed id would make every stored record of that definition unknown.
    #[test]
    fn ids_are_frozen() {
        let members = Definition::members(["/amount", "/account/id"]).unwrap();
        for (definition, id) in [
            (Definition::raw(), 0),
            (Definition::canonical_json(), 1),
            (Definition::raw().with_headers(names(&["x-b", "x-a"])).unwrap(), IDS[0]),
            (Definition::canonical_json().with_headers(names(&["x-a"])).unwrap(), IDS[1]),
            (members.clone(), IDS[2]),
            (Definition::all_except(["/sent_at"]).unwrap(), IDS[3]),
            (members.with_headers(names(&["x-a"])).unwrap(), IDS[4]),
        ] {
            assert_eq!(format!("{:016x}", definition.id().0), format!("{id:016x}"), "{definition:?}");
        }
    }

    const IDS: [u64; 5] = [
        0x9158_d211_f7e7_0278,
        0xdd3d_6231_2f63_0f65,
        0x9dfd_19ec_0e1b_6a6d,
        0xe12f_f3b8_4bb2_738f,
        0xa837_9b8a_9cfa_8031,
    ];

    // Frozen: a changed digest would make every stored record of that definition a mismatch.
    #[test]
    fn fingerprints_are_frozen() {
        let body = r#"{"amount": 1.0, "account": {"id": "a"}, "sent_at": 5}"#;
        let shown = [
            Definition::raw(),
            Definition::canonical_json(),
            Definition::members(["/amount", "/account/id", "/absent"]).unwrap(),
            Definition::all_except(["/sent_at"]).unwrap(),
            Definition::raw().with_headers(names(&["x-a"])).unwrap(),
        ]
        .map(|definition| print(&definition, body).to_string());
        assert_eq!(shown, PRINTS);
    }

    const PRINTS: [&str; 5] = [
        "sha256:0000000000000000:5da41be709c60f06a4ed701ac0cc3545ad200c19a06e9fafec52e3c52ee984bb",
        "sha256:0000000000000001:38c73977389e2d9a558669d9258cb9ecca69af0a0deeedd61866fe8d35451be4",
        "sha256:cfdc6972adc92207:bf9477f90d514d7ddf315c29fcaec2a8368871111fe8b0b82bc89f5e756da135",
        "sha256:e12ff3b84bb2738f:0a10fb1a8790a5f68fc157ebc666dae9e0adbf062d9ef0846ab605868aa04aca",
        "sha256:f22ddbf793ffdaab:63bae3a5fec084b450d77cd0fb12e7e97c27c29c0386e45219054368f8b790df",
    ];

    #[test]
    fn order_of_names_does_not_matter_and_what_is_named_does() {
        let id = |d: Result<Definition, InvalidDefinition>| d.unwrap().id();
        assert_eq!(id(Definition::members(["/b", "/a", "/b"])), id(Definition::members(["/a", "/b"])));
        assert_ne!(id(Definition::members(["/a", "/b"])), id(Definition::members(["/a/b"])));
        assert_ne!(id(Definition::members(["/a"])), id(Definition::all_except(["/a"])));
        // A pointer cannot pass for the headers that follow it.
        assert_ne!(
            id(Definition::members(["/a"]).unwrap().with_headers(names(&["x-a"]))),
            id(Definition::members(["/a", "/x-a"]))
        );
        assert_eq!(
            id(Definition::raw().with_headers(names(&["x-a", "x-b", "x-a"]))),
            id(Definition::raw().with_headers(names(&["x-b", "x-a"])))
        );
        assert_eq!(id(Definition::canonical_json().with_headers([])), DefinitionId(1));
    }

    #[test]
    fn wrong_definitions_are_refused() {
        let none: [&str; 0] = [];
        assert_eq!(Definition::members(none), Err(InvalidDefinition::NoMembers));
        assert_eq!(Definition::all_except(none), Err(InvalidDefinition::NoMembers));
        assert_eq!(Definition::all_except(["/a", ""]), Err(InvalidDefinition::NothingLeft));
        assert_eq!(
            Definition::members((0..65).map(|i| format!("/{i}"))),
            Err(InvalidDefinition::TooMany { count: 65 })
        );
        assert!(Definition::members((0..64).map(|i| format!("/{i}"))).is_ok());
        let headers =
            |count: usize| (0..count).map(|i| HeaderName::try_from(format!("x-{i:03}")).expect("a name"));
        let most = Definition::raw().with_headers(headers(64)).unwrap();
        assert_eq!(most.headers(), headers(64).collect::<Vec<_>>());
        for count in [65, 66] {
            let refused = Definition::raw().with_headers(headers(count));
            assert_eq!(refused, Err(InvalidDefinition::TooMany { count }));
        }
        assert_eq!(
            Definition::members(["amount"]).unwrap_err().to_string(),
            "\"amount\": a JSON pointer starts with a slash"
        );
    }

    #[test]
    fn each_form_compares_what_it_says() {
        let a = r#"{"amount":100,"to":"x","sent_at":1}"#;
        let spaced = r#"{ "to": "x", "amount": 1e2, "sent_at": 1 }"#;
        let later = r#"{"amount":100,"to":"x","sent_at":2}"#;
        let dearer = r#"{"amount":101,"to":"x","sent_at":1}"#;
        let same = |d: &Definition, x, y| print(d, x) == print(d, y);
        let raw = Definition::raw();
        assert!(same(&raw, a, a) && !same(&raw, a, spaced));
        let canonical = Definition::canonical_json();
        assert!(same(&canonical, a, spaced) && !same(&canonical, a, later));
        let members = Definition::members(["/amount", "/to"]).unwrap();
        assert!(same(&members, spaced, later) && !same(&members, a, dearer));
        let except = Definition::all_except(["/sent_at"]).unwrap();
        assert!(same(&except, spaced, later) && !same(&except, a, dearer));
        // Absent is not null, and one member's value is not another's.
        assert!(!same(&members, r#"{"amount":1}"#, r#"{"amount":1,"to":null}"#));
        assert!(!same(&members, r#"{"amount":1}"#, r#"{"to":1}"#));
    }

    #[test]
    fn a_body_that_is_not_said_to_be_json_is_raw() {
        let headers = HeaderMap::new();
        let canonical = Definition::canonical_json();
        let print = |body: &str, body_is_json| {
            let material = Material { leading: &[], headers: &headers, body: body.as_bytes(), body_is_json };
            canonical.fingerprint(&material)
        };
        assert_ne!(print("1", true), print("1", false));
        assert_ne!(print("1.0", false), print("1", false));
        assert!(print("not json", false).is_ok());
        assert_eq!(print("{\"a\":1,\"a\":1}", true).unwrap_err().at(), 7);
    }

    #[test]
    fn headers_join_with_each_of_their_values() {
        let definition = Definition::raw().with_headers(names(&["x-a", "x-b"])).unwrap();
        let print = |values: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in values {
                headers.append(*name, HeaderValue::from_static(value));
            }
            let material = Material { leading: &[], headers: &headers, body: b"", body_is_json: false };
            definition.fingerprint(&material).unwrap()
        };
        assert_eq!(print(&[("x-a", "1"), ("x-c", "1")]), print(&[("x-a", "1"), ("x-c", "2")]));
        let distinct = [
            print(&[]),
            print(&[("x-a", "")]),
            print(&[("x-a", "1")]),
            print(&[("x-b", "1")]),
            print(&[("x-a", "1"), ("x-a", "2")]),
            print(&[("x-a", "2"), ("x-a", "1")]),
            print(&[("x-a", "1"), ("x-b", "2")]),
        ];
        for (i, a) in distinct.iter().enumerate() {
            assert!(distinct[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }
}
