//! Whose keys: by the scope as it is stored, or by what the caller's requests have.

use std::fs;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};

use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::Scope;
use onlyonce_http::{ScopeSecret, ScopeSource, scope_of};

use super::parse_scope;
use crate::failure::Failure;

/// Whose keys.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Whose {
    /// Only what is in this scope, as it is stored; a key that several scopes have needs it. '' is the anonymous scope
    #[arg(long)]
    pub(super) scope: Option<String>,
    /// The same, by what the caller's requests have: 'Bearer TOKEN' of Authorization; 'Cookie: NAME=VALUE' of a gateway with
    /// --scope-cookie; 'NAME: VALUE' of one with --scope-header, as often as there are. @FILE reads it from a file, - from
    /// standard input: the command line is for all to see
    // Text until the command runs: a refusal by clap would print the value.
    #[arg(long, value_name = "CREDENTIAL", conflicts_with = "scope")]
    pub(super) scope_of: Vec<String>,
    /// The file that the gateway is given as --scope-secret-file
    #[arg(long, value_name = "FILE", requires = "scope_of")]
    pub(super) scope_secret_file: Option<PathBuf>,
}

const CREDENTIAL_BYTES_MAX: u64 = 64 * 1024;

impl Whose {
    /// The scope, where one is named.
    pub(super) fn scope(&self) -> Result<Option<Scope>, Failure> {
        if let Some(scope) = &self.scope {
            return parse_scope(scope).map(Some);
        }
        if self.scope_of.is_empty() {
            return Ok(None);
        }
        let (source, headers) = self.source()?;
        let secret = self.scope_secret_file.as_deref().map(scope_secret).transpose()?;
        let scope = scope_of(&source, secret.as_ref(), &headers);
        scope.map(Some).map_err(|problem| {
            Failure::Usage(format!("--scope-of: a gateway refuses such a request: {}", problem.detail_text()))
        })
    }

    /// What a gateway has to look at to see these, and a request that has them.
    fn source(&self) -> Result<(ScopeSource, HeaderMap), Failure> {
        let mut headers = HeaderMap::new();
        let mut names = Vec::new();
        for given in &self.scope_of {
            let text = credential(given)?;
            let (name, value) = split(&text)?;
            let value = HeaderValue::from_str(value)
                .map_err(|_| Failure::Usage("--scope-of: what is given is no value of a header".into()))?;
            headers.append(&name, value);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        if headers.values().all(HeaderValue::is_empty) {
            return Err(Failure::Usage("--scope-of: the value is empty, and no caller has it".into()));
        }
        let source = match &names[..] {
            [name] if name == AUTHORIZATION => ScopeSource::Authorization,
            [name] if name == COOKIE => {
                let value = headers[COOKIE].as_bytes();
                let end = value.iter().position(|byte| *byte == b'=').filter(|end| *end > 0);
                let is_one = self.scope_of.len() == 1 && !value.contains(&b';');
                let Some(end) = end.filter(|end| is_one && *end + 1 < value.len()) else {
                    return Err(Failure::Usage(
                        "--scope-of: write the one cookie that the gateway's --scope-cookie names, as \
                         'Cookie: NAME=VALUE'"
                            .into(),
                    ));
                };
                ScopeSource::Cookie(String::from_utf8_lossy(value[..end].trim_ascii()).into_owned())
            }
            _ => ScopeSource::Headers(names),
        };
        Ok((source, headers))
    }
}

/// The bytes of the gateway's secret.
pub(crate) fn scope_secret(path: &Path) -> Result<ScopeSecret, Failure> {
    let doing = format!("--scope-secret-file {}", path.display());
    let secret = fs::read(path).map_err(|error| Failure::io(&doing, &error))?;
    ScopeSecret::new(secret.trim_ascii()).map_err(|error| Failure::Usage(format!("{doing}: {error}")))
}

/// What is meant: given, or where it is read from.
fn credential(given: &str) -> Result<String, Failure> {
    let mut text = String::new();
    let read = match given.strip_prefix('@') {
        _ if given == "-" => stdin().lock().take(CREDENTIAL_BYTES_MAX).read_to_string(&mut text),
        Some(path) => {
            fs::File::open(path).and_then(|file| file.take(CREDENTIAL_BYTES_MAX).read_to_string(&mut text))
        }
        None => return Ok(given.into()),
    };
    read.map_err(|error| Failure::io("--scope-of", &error))?;
    match text.trim() {
        "" => Err(Failure::Usage("--scope-of: there is nothing to read".into())),
        text => Ok(text.into()),
    }
}

/// A header line, or the value of Authorization alone: no scheme is followed by a colon.
fn split(text: &str) -> Result<(HeaderName, &str), Failure> {
    let line = text.split_once(':').filter(|(_, value)| value.is_empty() || value.starts_with([' ', '\t']));
    let named = line.and_then(|(name, value)| Some((HeaderName::try_from(name).ok()?, value.trim())));
    if let Some(named) = named {
        return Ok(named);
    }
    // A token alone is no value of Authorization that a client of a gateway sends, but for those that say so.
    let text = text.trim();
    let is_scheme =
        |scheme: &str| scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
    match text.split_once(' ') {
        Some((scheme, credential)) if is_scheme(scheme) && !credential.trim().is_empty() => {
            Ok((AUTHORIZATION, text))
        }
        _ => Err(Failure::Usage(
            "--scope-of: write 'Bearer TOKEN' (a scheme and its credential), or a header with its name: \
             'Authorization: VALUE', 'Cookie: NAME=VALUE', 'NAME: VALUE'"
                .into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(of: &[&str]) -> String {
        let scope_of = of.iter().map(|text| (*text).to_owned()).collect();
        Whose { scope_of, ..Whose::default() }.scope().unwrap().unwrap().to_string()
    }

    #[test]
    fn a_value_of_authorization_may_be_written_with_its_name_or_without() {
        assert_eq!(scope(&["Bearer a:b"]), scope(&["authorization: Bearer a:b"]));
        assert_ne!(scope(&["Bearer a"]), scope(&["Bearer A"]));
        assert_ne!(scope(&["X-Account: a"]), scope(&["Authorization: a"]));
        assert_ne!(scope(&["A: 1", "B: 2"]), scope(&["B: 2", "A: 1"]), "as the gateway has them in order");
        assert_eq!(scope(&["Cookie: sid=1"]), scope(&["cookie:  sid=1"]));
    }

    #[test]
    fn what_cannot_be_read_is_told_without_its_value() {
        for wrong in [
            "Cookie: hunter2",
            "Cookie: sid=hunter2; theme=dark",
            "Cookie: hunter2=",
            "Bearer \u{1}hunter2",
            "Digest hunter2",
            "hunter2",
            "Bearer ",
            "X-hunter2:",
            "",
            "@/nonexistent/file",
        ] {
            let whose = Whose { scope_of: vec![wrong.into()], ..Whose::default() };
            let error = whose.scope().unwrap_err().to_string();
            assert!(error.contains("--scope-of") && !error.contains("hunter2"), "{error}");
        }
    }
}
