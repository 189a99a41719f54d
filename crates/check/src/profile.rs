//! Profiles: how much of the catalogue an API is held to.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What an API is held to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// What draft-ietf-httpapi-idempotency-key-header-07 says.
    Draft,
    /// And what well-kept APIs share: once under races and crashes, replies whole, tenants apart.
    #[default]
    Practice,
    /// Practice as Stripe documents it: server errors are stored, a mismatch is a 400.
    Stripe,
    /// And what makes clients simple: the marker, Retry-After, problem documents.
    Strict,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Draft, Self::Practice, Self::Stripe, Self::Strict];

    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Practice => "practice",
            Self::Stripe => "stripe",
            Self::Strict => "strict",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|profile| profile.as_str() == text)
            .ok_or_else(|| "a profile is draft, practice, stripe or strict".into())
    }
}

/// What follows when a promise is not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// A failure.
    Must,
    /// A warning.
    Should,
    /// Nothing: not part of the profile.
    #[default]
    Off,
}

/// A level for each profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Levels {
    /// Under [`Profile::Draft`].
    pub draft: Level,
    /// Under [`Profile::Practice`].
    pub practice: Level,
    /// Under [`Profile::Stripe`].
    pub stripe: Level,
    /// Under [`Profile::Strict`].
    pub strict: Level,
}

impl Levels {
    /// The level under a profile.
    pub fn under(&self, profile: Profile) -> Level {
        match profile {
            Profile::Draft => self.draft,
            Profile::Practice => self.practice,
            Profile::Stripe => self.stripe,
            Profile::Strict => self.strict,
        }
    }
}
