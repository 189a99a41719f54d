//! What is to happen once: a scope, a key, and the fingerprint of the request.

use std::fmt;
use std::sync::Arc;

use crate::fingerprint::Fingerprint;

/// The longest scope and key, in bytes. Every store keeps this many, byte for byte.
pub const NAME_BYTES_MAX: usize = 255;

/// Whose keys these are: an account, a merchant, a tenant. Keys of two scopes never meet.
///
/// 0–255 bytes of UTF-8 without control characters, compared byte for byte: no case folding, no trimming,
/// no Unicode normalisation. The empty scope is the anonymous one.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(Arc<str>);

/// The idempotency key: the caller's name for one logical operation, reused by each of its retries.
///
/// 1–255 bytes of UTF-8 without control characters, compared byte for byte.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

/// Which request made a record, in the words of its caller's logs: a request id, a trace, a message id. Opaque to stores,
/// no part of the identity and never compared.
///
/// 1–255 bytes of UTF-8 without control characters.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Origin(Arc<str>);

/// The identity of a record: scope and key, without the fingerprint.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct OperationId {
    /// Whose key it is.
    pub scope: Scope,
    /// The key.
    pub key: Key,
}

/// One logical operation: its identity and the fingerprint of the request that asks for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Operation {
    id: OperationId,
    fingerprint: Fingerprint,
    origin: Option<Origin>,
}

/// Why a scope or a key was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidName {
    /// A key has at least one byte.
    #[error("an idempotency key must not be empty")]
    Empty,
    /// Longer than [`NAME_BYTES_MAX`].
    #[error("{bytes} bytes long, the limit is {NAME_BYTES_MAX}")]
    TooLong {
        /// The length that was given, in bytes.
        bytes: usize,
    },
    /// A control character (Unicode category Cc) at this byte.
    #[error("a control character at byte {at}")]
    Control {
        /// Offset of the character, in bytes.
        at: usize,
    },
}

impl Scope {
    /// Takes a scope as it is.
    ///
    /// # Errors
    /// [`InvalidName`] when it is over 255 bytes or holds a control character.
    pub fn new(scope: impl AsRef<str>) -> Result<Self, InvalidName> {
        check(scope.as_ref())?;
        Ok(Self(scope.as_ref().into()))
    }

    /// The empty scope: callers that name no principal share it.
    pub fn anonymous() -> Self {
        Self("".into())
    }

    /// The scope as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Key {
    /// Takes a key as it is.
    ///
    /// # Errors
    /// [`InvalidName`] when it is empty, over 255 bytes, or holds a control character.
    pub fn new(key: impl AsRef<str>) -> Result<Self, InvalidName> {
        let key = key.as_ref();
        if key.is_empty() {
            return Err(InvalidName::Empty);
        }
        check(key)?;
        Ok(Self(key.into()))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Origin {
    /// Takes an origin as it is.
    ///
    /// # Errors
    /// [`InvalidName`] when it is empty, over 255 bytes, or holds a control character.
    pub fn new(origin: impl AsRef<str>) -> Result<Self, InvalidName> {
        let origin = origin.as_ref();
        if origin.is_empty() {
            return Err(InvalidName::Empty);
        }
        check(origin)?;
        Ok(Self(origin.into()))
    }

    /// The origin as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Operation {
    /// Names one logical operation.
    pub fn new(scope: Scope, key: Key, fingerprint: Fingerprint) -> Self {
        Self { id: OperationId { scope, key }, fingerprint, origin: None }
    }

    /// Says which request asks for it. Whoever acquires the operation leaves its origin in the record.
    #[must_use]
    pub fn with_origin(self, origin: Option<Origin>) -> Self {
        Self { origin, ..self }
    }

    /// Its identity, without the fingerprint.
    pub fn id(&self) -> &OperationId {
        &self.id
    }

    /// Whose key it is.
    pub fn scope(&self) -> &Scope {
        &self.id.scope
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.id.key
    }

    /// The fingerprint of the request.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// The request that asks for it.
    pub fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// The same operation under another fingerprint, for one that was recomputed by an older definition.
    #[must_use]
    pub fn with_fingerprint(&self, fingerprint: Fingerprint) -> Self {
        Self { fingerprint, ..self.clone() }
    }
}

fn check(name: &str) -> Result<(), InvalidName> {
    if name.len() > NAME_BYTES_MAX {
        return Err(InvalidName::TooLong { bytes: name.len() });
    }
    match name.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, _)) => Err(InvalidName::Control { at }),
        None => Ok(()),
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", &*self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:?})", &*self.0)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Origin({:?})", &*self.0)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_exact() {
        assert_eq!(Key::new(""), Err(InvalidName::Empty));
        assert!(Scope::new("").is_ok());
        assert!(Key::new("k".repeat(255)).is_ok());
        assert_eq!(Key::new("k".repeat(256)), Err(InvalidName::TooLong { bytes: 256 }));
        // The limit counts bytes, not characters.
        assert_eq!(Scope::new("é".repeat(128)), Err(InvalidName::TooLong { bytes: 256 }));
    }

    #[test]
    fn control_characters_are_refused_and_nothing_is_folded() {
        for (text, at) in [("a\nb", 1), ("\0", 0), ("ab\u{7f}", 2), ("é\u{85}", 2)] {
            assert_eq!(Key::new(text), Err(InvalidName::Control { at }), "{text:?}");
        }
        for (a, b) in [("a", "A"), ("a", "a "), ("é", "e\u{301}"), ("ß", "ss")] {
            assert_ne!(Key::new(a).unwrap(), Key::new(b).unwrap());
        }
    }
}
