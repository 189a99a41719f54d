//! The catalogue: what is promised, where the promise comes from, and which trial shows it. Data, not code:
//! `catalogue.json` is read by the same rules as a file of `--vectors` (see `docs/check.md`).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::profile::Levels;
use crate::trials::Trial;

/// The version of the format that this release reads.
pub const FORMAT: u32 = 1;

const BUILT_IN: &str = include_str!("catalogue.json");
const SCENARIOS_MAX: usize = 500;

/// One promise and the trial that shows whether it holds.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name, in reports and for `--only` and `--skip`: lower-case letters, digits and dashes.
    pub id: String,
    /// What is promised, in a sentence.
    pub promise: String,
    /// Where the promise comes from, such as `draft §2.6` or `practice`.
    pub source: String,
    /// What follows when the promise is broken.
    #[serde(default)]
    pub level: Levels,
    /// What follows when it is kept in substance but not in form, such as another status.
    #[serde(default)]
    pub form: Levels,
    /// Scenarios that must not have failed: otherwise this one would only repeat them.
    #[serde(default)]
    pub after: Vec<String>,
    /// What to do when it fails.
    pub advice: String,
    /// How it is tried.
    pub trial: Trial,
}

/// A catalogue that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// Not JSON, or not of this shape.
    #[error("not a catalogue of scenarios: {0}")]
    Shape(#[from] serde_json::Error),
    /// Of another release.
    #[error("the format is {0}, this release reads {FORMAT}")]
    Format(u32),
    /// Of the right shape, and yet wrong.
    #[error("scenario {id:?}: {reason}")]
    Scenario {
        /// The scenario.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    scenarios: Vec<Scenario>,
}

/// The scenarios of this release, in the order in which they run.
pub fn built_in() -> Vec<Scenario> {
    parse(BUILT_IN, &[]).expect("a test reads the embedded catalogue")
}

/// Reads a file of scenarios that come after the `known` ones.
///
/// # Errors
/// When it is not of this format, repeats an id, or would send to another host.
pub fn parse(text: &str, known: &[Scenario]) -> Result<Vec<Scenario>, CatalogueError> {
    let file: File = serde_json::from_str(text)?;
    if file.format != FORMAT {
        return Err(CatalogueError::Format(file.format));
    }
    let mut ids: BTreeSet<&str> = known.iter().map(|scenario| scenario.id.as_str()).collect();
    for (index, scenario) in file.scenarios.iter().enumerate() {
        let wrong = |reason: String| CatalogueError::Scenario { id: scenario.id.clone(), reason };
        if known.len() + index >= SCENARIOS_MAX {
            return Err(wrong(format!("more than {SCENARIOS_MAX} scenarios")));
        }
        if !is_id(&scenario.id) {
            return Err(wrong("an id has 1 to 64 lower-case letters, digits and dashes".into()));
        }
        if let Some(missing) = scenario.after.iter().find(|id| !ids.contains(id.as_str())) {
            return Err(wrong(format!("it comes after {missing:?}, which is not before it")));
        }
        if !ids.insert(&scenario.id) {
            return Err(wrong("the id is taken".into()));
        }
        scenario.trial.validate().map_err(wrong)?;
    }
    Ok(file.scenarios)
}

fn is_id(id: &str) -> bool {
    (1..=64).contains(&id.len())
        && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Level, Profile};

    #[test]
    fn the_built_in_catalogue_is_in_order() {
        let scenarios = parse(BUILT_IN, &[]).unwrap();
        assert_eq!(scenarios[0].id, "two-keys", "what everything rests on comes first");
        for scenario in &scenarios {
            let id = &scenario.id;
            assert!(scenario.promise.ends_with('.') && scenario.advice.ends_with('.'), "{id}");
            assert!(!scenario.source.is_empty(), "{id}");
            assert!(id == "two-keys" || scenario.after.contains(&"two-keys".into()), "{id}");
            // What the strict profile leaves out is what the draft alone wants.
            let strict = scenario.level.under(Profile::Strict);
            assert!(strict != Level::Off || scenario.level.under(Profile::Draft) != Level::Off, "{id}");
        }
    }

    #[test]
    fn a_file_of_vectors_that_is_wrong_is_refused_with_the_reason() {
        let with = |change: &str| {
            format!(
                r#"{{"format":1,"scenarios":[{{"id":"mine","promise":"p.","source":"s","advice":"a.",{change}}}]}}"#
            )
        };
        let known = built_in();
        let good = r#""level":{"strict":"must"},"after":["two-keys"],"trial":{"kind":"keys-apart","first":"{{unique}}a","second":"{{unique}}b"}"#;
        assert_eq!(parse(&with(good), &known).unwrap().len(), 1);
        for (text, reason) in [
            ("{".to_owned(), "EOF"),
            (r#"{"format":2,"scenarios":[]}"#.to_owned(), "the format is 2"),
            (with(r#""trial":{"kind":"no-such"}"#), "unknown variant"),
            (with(r#""levels":{},"trial":{"kind":"missing-key"}"#), "unknown field `levels`"),
            (with(r#""level":{"lax":"must"},"trial":{"kind":"missing-key"}"#), "unknown field `lax`"),
            (with(r#""after":["later"],"trial":{"kind":"missing-key"}"#), "comes after \"later\""),
            (with(&good.replace("{{unique}}a", "a")), "{{unique}}"),
            (with(&good.replace("{{unique}}a", "{{unique}}\\u0100")), "a character is a byte"),
            (with(&good.replace("{{unique}}a", "{{unique}}\\r\\nHost: x")), "a line break ends it"),
            (
                with(r#""trial":{"kind":"replay","aspect":"status","request":{"path":"//elsewhere@x y"}}"#),
                "bytes that",
            ),
            (
                with(r#""trial":{"kind":"replay","aspect":"status","request":{"path":"http://elsewhere/"}}"#),
                "slash",
            ),
            (
                with(
                    r#""trial":{"kind":"replay","aspect":"status","request":{"headers":{"Host":"elsewhere"}}}"#,
                ),
                "own",
            ),
            (with(r#""trial":{"kind":"once","sends":1}"#), "2 to 100"),
            (
                with(&good.replace("keys-apart", "keys-same").replace("{{unique}}b", "{{unique}}a")),
                "the same",
            ),
            (with(good).replace("\"mine\"", "\"two-keys\""), "taken"),
            (with(good).replace("\"mine\"", "\"Mine\""), "lower-case"),
        ] {
            let error = parse(&text, &known).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
