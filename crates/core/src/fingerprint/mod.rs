//! What tells a retry from another request under the same key.
//!
//! A fingerprint is a SHA-256 over length-prefixed parts, so that no two lists of parts hash alike by running
//! into each other. It carries the algorithm and the id of its definition: which parts, in which form. Two
//! fingerprints compare only under one definition; a stored one of another definition is recomputed by ITS own.
//!
//! | body form | a retry may differ in |
//! |---|---|
//! | [`Definition::raw`] | nothing |
//! | [`Definition::canonical_json`] | spaces, order of members, how a number is written |
//! | [`Definition::members`] | everything that is not named |
//! | [`Definition::all_except`] | what is named |

mod canonical;
mod definition;
mod document;
mod json;
mod select;

use std::fmt;
use std::str::FromStr;

pub use canonical::canonical_json;
pub use definition::{Definition, InvalidDefinition, Material, NAMES_MAX};
pub use document::{Document, Found, Node};
pub use json::{DEPTH_MAX, JsonError, JsonErrorKind};
pub use select::{InvalidPointer, POINTER_BYTES_MAX, Pointer};

use sha2::{Digest, Sha256};

/// The fingerprint of a request: algorithm, definition and digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    definition: DefinitionId,
    digest: [u8; 32],
}

/// Names how a fingerprint is made: which parts of a request join it and in which form. 0 is raw bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DefinitionId(pub u64);

impl DefinitionId {
    /// The parts as they are, byte for byte.
    pub const RAW: Self = Self(0);
}

/// Hashes parts, each with its length before it.
#[derive(Clone, Debug)]
pub struct FingerprintBuilder {
    definition: DefinitionId,
    hasher: Sha256,
}

impl Fingerprint {
    /// The fingerprint of one body, raw.
    pub fn of(body: impl AsRef<[u8]>) -> Self {
        Self::builder(DefinitionId::RAW).part(body).finish()
    }

    /// Starts a fingerprint of several parts.
    pub fn builder(definition: DefinitionId) -> FingerprintBuilder {
        FingerprintBuilder { definition, hasher: Sha256::new() }
    }

    /// A fingerprint from its parts, for a store that keeps them apart.
    pub const fn from_digest(definition: DefinitionId, digest: [u8; 32]) -> Self {
        Self { definition, digest }
    }

    /// How it was made.
    pub fn definition(&self) -> DefinitionId {
        self.definition
    }

    /// The SHA-256 digest.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

impl FingerprintBuilder {
    /// Adds one part.
    #[must_use]
    pub fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        let part = part.as_ref();
        self.hasher.update((part.len() as u64).to_be_bytes());
        self.hasher.update(part);
        self
    }

    /// Ends it.
    pub fn finish(self) -> Fingerprint {
        Fingerprint { definition: self.definition, digest: self.hasher.finalize().into() }
    }
}

/// The stored form: `sha256:<definition, 16 hex>:<digest, 64 hex>`.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{:016x}:", self.definition.0)?;
        self.digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// A stored fingerprint that this release cannot read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fingerprint that this release can read")]
pub struct UnreadableFingerprint;

impl FromStr for Fingerprint {
    type Err = UnreadableFingerprint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(':');
        let (Some("sha256"), Some(definition), Some(digest), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(UnreadableFingerprint);
        };
        let lower_hex =
            |s: &str, len| s.len() == len && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !lower_hex(definition, 16) || !lower_hex(digest, 64) {
            return Err(UnreadableFingerprint);
        }
        let definition = u64::from_str_radix(definition, 16).map_err(|_| UnreadableFingerprint)?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(0..) {
            *byte =
                u8::from_str_radix(&digest[pair * 2..pair * 2 + 2], 16).map_err(|_| UnreadableFingerprint)?;
        }
        Ok(Self { definition: DefinitionId(definition), digest: bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cannot_run_into_each_other() {
        let raw = || Fingerprint::builder(DefinitionId::RAW);
        assert_ne!(raw().part("ab").part("c").finish(), raw().part("a").part("bc").finish());
        assert_ne!(raw().part("").finish(), raw().finish());
        assert_ne!(Fingerprint::builder(DefinitionId(1)).finish(), raw().finish());
    }

    #[test]
    fn the_stored_form_comes_back_and_nothing_else_is_read() {
        let print = Fingerprint::builder(DefinitionId(0xabc)).part("x").finish();
        let text = print.to_string();
        assert_eq!(text.parse(), Ok(print));
        assert_eq!(format!("{print:?}"), format!("Fingerprint({text})"));
        assert_eq!(Fingerprint::from_digest(print.definition(), *print.digest()), print);
        let (definition, digest) = (&text[7..23], &text[24..]);
        for bad in [
            "",
            "sha256",
            "sha512:0000000000000000:00",
            "sha256:0:00",
            &text.to_uppercase(),
            &format!("sha512:{definition}:{digest}"),
            &format!("sha256:{definition}0:{digest}"),
            &format!("sha256:{}:{digest}", definition.to_uppercase()),
            &format!("sha256:{definition}:{digest}0"),
            &format!("sha256:{definition}:{}", digest.to_uppercase()),
            &format!("{text}:"),
        ] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(UnreadableFingerprint), "{bad}");
        }
    }

    // Frozen: a changed byte here would make every stored record a mismatch.
    #[test]
    fn the_digest_is_frozen() {
        assert_eq!(
            Fingerprint::of("hello").to_string(),
            "sha256:0000000000000000:c6402d15196824a049ad87c371a5047a673535c2ac8607e2bfa483f7591cc27a"
        );
    }
}
