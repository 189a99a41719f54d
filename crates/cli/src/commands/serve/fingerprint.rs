//! `--fingerprint` and `--known-fingerprint`: `raw`, `json`, `members=/a,/b`, `except=/a`, with `;headers=x-a,x-b`.

use http::HeaderName;
use onlyonce_core::fingerprint::{Definition, InvalidDefinition};

/// What of the body joins.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    text: String,
    definition: Definition,
}

impl Form {
    /// As it was given.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn with_headers(&self, names: Vec<HeaderName>) -> Result<Definition, InvalidDefinition> {
        if names.is_empty() {
            return Ok(self.definition.clone());
        }
        self.definition.clone().with_headers(names)
    }
}

/// A form of the body alone.
pub(super) fn form(text: &str) -> Result<Form, String> {
    let definition = match text.split_once('=') {
        None if text == "raw" => Ok(Definition::raw()),
        None if text == "json" => Ok(Definition::canonical_json()),
        Some(("members", pointers)) => Definition::members(pointers.split(',')),
        Some(("except", pointers)) => Definition::all_except(pointers.split(',')),
        _ => return Err("write raw, json, members=/amount,/to or except=/sent_at".into()),
    };
    let definition = definition.map_err(|error| error.to_string())?;
    Ok(Form { text: text.to_owned(), definition })
}

/// A form with the headers that join.
pub(super) fn definition(text: &str) -> Result<Definition, String> {
    let Some((body, names)) = text.split_once(";headers=") else { return Ok(form(text)?.definition) };
    let names = names.split(',').map(|name| {
        HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| format!("{name:?} is not a header name"))
    });
    let names = names.collect::<Result<Vec<_>, _>>()?;
    form(body)?.with_headers(names).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_or_refused_with_the_reason() {
        let id = |text: &str| definition(text).unwrap().id();
        assert_eq!(id("raw"), Definition::raw().id());
        assert_eq!(id("json"), Definition::canonical_json().id());
        assert_eq!(id("members=/a,/b"), Definition::members(["/b", "/a"]).unwrap().id());
        assert_eq!(id("except=/a"), Definition::all_except(["/a"]).unwrap().id());
        let with = Definition::raw().with_headers([HeaderName::from_static("x-a")]).unwrap();
        assert_eq!(id("raw;headers=X-A"), with.id());
        for (wrong, reason) in [
            ("", "write raw"),
            ("xml", "write raw"),
            ("members", "write raw"),
            ("members=a", "starts with a slash"),
            ("except=", "leaves nothing"),
            ("raw;headers=a b", "not a header name"),
        ] {
            let error = definition(wrong).unwrap_err();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}
