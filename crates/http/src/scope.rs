//! Whose keys: the scope of a request.
//!
//! A scope is the SHA-256 of the principal's parts, each with its length before it, as 64 hex digits; with a secret
//! it is an HMAC, so that who reads the store cannot try credentials against it. No credential is kept or logged.
//!
//! A replay is served on the scope alone: whoever sends the same credentials, key and request gets the stored reply,
//! and the service behind does not check them again.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hmac::{Hmac, KeyInit, Mac};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use onlyonce_core::Scope;
use sha2::{Digest, Sha256};

use crate::problem::{Code, Problem};

/// What names the principal of a request.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum ScopeSource {
    /// The `Authorization` header. Without it, and without any other credential that we know, the anonymous scope.
    ///
    /// With `Bearer` a refreshed token is a new scope: a retry after the refresh runs again. Where tokens are refreshed
    /// name the account itself.
    #[default]
    Authorization,
    /// These headers, all of them. Only to be trusted behind a proxy that sets them and removes the client's own.
    Headers(Vec<HeaderName>),
    /// The cookie of this name.
    Cookie(String),
    /// Nothing: all callers share one scope.
    None,
    /// What a function says; `None` refuses the request.
    Function(PrincipalFn),
}

/// Names the principal of a request.
pub type PrincipalFn = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// A secret for scopes. Never shown.
#[derive(Clone)]
pub struct ScopeSecret(Hmac<Sha256>);

/// Too short to be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a scope secret has at least 16 bytes, this one has {bytes}")]
pub struct ScopeSecretTooShort {
    /// How many there are.
    pub bytes: usize,
}

impl ScopeSecret {
    /// Takes the secret's bytes. All instances on one store need the same one; another secret is another scope for everybody.
    ///
    /// # Errors
    /// [`ScopeSecretTooShort`] under 16 bytes.
    pub fn new(secret: &[u8]) -> Result<Self, ScopeSecretTooShort> {
        if secret.len() < 16 {
            return Err(ScopeSecretTooShort { bytes: secret.len() });
        }
        Ok(Self(Hmac::new_from_slice(secret).expect("HMAC takes a key of any length")))
    }
}

impl fmt::Debug for ScopeSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScopeSecret(…)")
    }
}

impl fmt::Debug for ScopeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authorization => f.write_str("Authorization"),
            Self::Headers(names) => f.debug_tuple("Headers").field(names).finish(),
            Self::Cookie(name) => f.debug_tuple("Cookie").field(name).finish(),
            Self::None => f.write_str("None"),
            Self::Function(_) => f.write_str("Function(…)"),
        }
    }
}

/// The scope of a request with these headers, as the layer makes it: for those who look into a store by what a caller sends.
///
/// # Errors
/// The refusal that such a request gets.
pub fn scope_of(
    source: &ScopeSource,
    secret: Option<&ScopeSecret>,
    headers: &HeaderMap,
) -> Result<Scope, Problem> {
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.headers = headers.clone();
    // Nobody is told of Bearer here.
    let bearer_warned = Arc::new(AtomicBool::new(true));
    ScopeRule { source: source.clone(), secret: secret.cloned(), bearer_warned }.scope(&parts)
}

/// A source with what makes its scopes secret.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScopeRule {
    pub(crate) source: ScopeSource,
    pub(crate) secret: Option<ScopeSecret>,
    // One warning a layer, not one a request.
    bearer_warned: Arc<AtomicBool>,
}

/// Credentials besides `Authorization`, and what a proxy that checked them says of the caller: a request that carries
/// one is not anonymous, and must not share a scope with others.
const CREDENTIALS: [HeaderName; 27] = [
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("apikey"),
    HeaderName::from_static("x-apikey"),
    HeaderName::from_static("x-api-token"),
    HeaderName::from_static("x-auth-token"),
    HeaderName::from_static("x-access-token"),
    HeaderName::from_static("x-session-token"),
    HeaderName::from_static("private-token"),
    HeaderName::from_static("x-amz-security-token"),
    HeaderName::from_static("x-goog-api-key"),
    HeaderName::from_static("x-rapidapi-key"),
    HeaderName::from_static("x-functions-key"),
    HeaderName::from_static("ocp-apim-subscription-key"),
    HeaderName::from_static("x-shopify-access-token"),
    HeaderName::from_static("x-vault-token"),
    HeaderName::from_static("x-forwarded-client-cert"),
    HeaderName::from_static("client-cert"),
    HeaderName::from_static("x-forwarded-access-token"),
    HeaderName::from_static("x-forwarded-user"),
    HeaderName::from_static("x-auth-request-user"),
    HeaderName::from_static("remote-user"),
    HeaderName::from_static("x-amzn-oidc-data"),
    HeaderName::from_static("x-goog-iap-jwt-assertion"),
    HeaderName::from_static("x-ms-client-principal"),
    HeaderName::from_static("cf-access-jwt-assertion"),
];

/// Schemes whose credentials differ from request to request, in lower case.
const UNSTABLE: [&str; 8] = ["digest", "dpop", "signature", "hawk", "oauth", "negotiate", "ntlm", "gnap"];
const UNSTABLE_PREFIXES: [&str; 2] = ["aws4-", "scram-"];

impl ScopeRule {
    /// The scope of a request.
    pub(crate) fn scope(&self, parts: &Parts) -> Result<Scope, Problem> {
        let headers = &parts.headers;
        match &self.source {
            ScopeSource::None => Ok(Scope::anonymous()),
            ScopeSource::Authorization => self.of_authorization(headers),
            ScopeSource::Headers(names) => {
                let mut hash = self.start("headers");
                for name in names {
                    if !is_said(headers, name) {
                        return Err(missing(format!(
                            "The request has no {name} header, or an empty one, which says whose key this is."
                        )));
                    }
                    hash.part(name.as_str());
                    hash.values(headers, name);
                }
                Ok(hash.finish())
            }
            ScopeSource::Cookie(name) => {
                let values: Vec<&[u8]> =
                    cookies(headers).filter(|(n, _)| *n == name.as_bytes()).map(|(_, v)| v).collect();
                if values.iter().all(|value| [&b""[..], b"\"\""].contains(value)) {
                    return Err(missing(format!(
                        "The request has no cookie {name:?}, or an empty one, which says whose key this is."
                    )));
                }
                let mut hash = self.start("cookie");
                hash.part(name);
                values.iter().for_each(|value| hash.part(value));
                Ok(hash.finish())
            }
            ScopeSource::Function(principal) => match principal(parts) {
                None => Err(Problem::new(Code::ScopeMissing)),
                Some(principal) if principal.is_empty() => Err(Problem::new(Code::ScopeMissing)),
                Some(principal) => {
                    let mut hash = self.start("function");
                    hash.part(principal);
                    Ok(hash.finish())
                }
            },
        }
    }

    fn of_authorization(&self, headers: &HeaderMap) -> Result<Scope, Problem> {
        let mut said = headers.get_all(header::AUTHORIZATION).iter().filter(|value| has_credentials(value));
        let Some(authorization) = said.next() else {
            return match CREDENTIALS.iter().find(|name| headers.contains_key(*name)) {
                None => Ok(Scope::anonymous()),
                Some(name) => Err(missing(format!(
                    "The request has a {name} header and no Authorization, so nothing says whose key this is: \
                     the operator names the session with the option scope-cookie or scope-header."
                ))),
            };
        };
        let scheme = scheme(authorization);
        if UNSTABLE.contains(&&*scheme) || UNSTABLE_PREFIXES.iter().any(|prefix| scheme.starts_with(prefix)) {
            return Err(Problem::new(Code::ScopeUnstable).detail(format!(
                "Credentials of the scheme {scheme} change with every request, so a retry would be another caller: \
                 the operator names the account with the option scope-header or scope-cookie."
            )));
        }
        if scheme == "bearer" && !self.bearer_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "idempotency keys are scoped by Bearer tokens: a refreshed token is a new scope, and a retry after the \
                 refresh runs again; name the account with a scope source"
            );
        }
        let mut hash = self.start("authorization");
        let values = headers.get_all(header::AUTHORIZATION);
        hash.part((values.iter().count() as u64).to_be_bytes());
        values.iter().for_each(|value| hash.part(usual_scheme(value.as_bytes())));
        Ok(hash.finish())
    }

    fn start(&self, kind: &str) -> Hash {
        let mut hash = match &self.secret {
            None => Hash::Plain(Sha256::new()),
            Some(secret) => Hash::Keyed(secret.0.clone()),
        };
        hash.part(kind);
        hash
    }
}

/// Who sends an empty value is nobody: all who have no session or account yet would be one.
fn is_said(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(name).iter().any(|value| !value.as_bytes().trim_ascii().is_empty())
}

/// A page that is not logged in sends `Bearer ` and nothing, or nothing at all.
fn has_credentials(authorization: &HeaderValue) -> bool {
    let value = authorization.as_bytes().trim_ascii();
    ![&b""[..], b"bearer", b"basic"].iter().any(|empty| value.eq_ignore_ascii_case(empty))
}

fn missing(detail: String) -> Problem {
    Problem::new(Code::ScopeMissing).detail(detail)
}

/// The scheme in lower case, at most 32 characters of it: the rest may be a secret.
fn scheme(authorization: &HeaderValue) -> String {
    let value = authorization.as_bytes().trim_ascii_start();
    let name = value.iter().take(32).take_while(|b| b.is_ascii_alphanumeric() || **b == b'-');
    name.map(|b| char::from(b.to_ascii_lowercase())).collect()
}

/// The value with its scheme as it is mostly written: a scheme has no case (RFC 9110 §11.1), and `bearer x` is the caller of
/// `Bearer x`. Of other schemes there is no one usual form, and they stay as they are.
fn usual_scheme(value: &[u8]) -> Cow<'_, [u8]> {
    const USUAL: [&[u8]; 2] = [b"Bearer", b"Basic"];
    let is_of =
        |name: &[u8]| value.get(name.len()) == Some(&b' ') && value[..name.len()].eq_ignore_ascii_case(name);
    match USUAL.into_iter().find(|name| is_of(name)) {
        Some(name) if !value.starts_with(name) => [name, &value[name.len()..]].concat().into(),
        _ => value.into(),
    }
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    headers.get_all(header::COOKIE).iter().flat_map(|line| line.as_bytes().split(|b| *b == b';')).filter_map(
        |pair| {
            let equals = pair.iter().position(|b| *b == b'=')?;
            Some((pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii()))
        },
    )
}

enum Hash {
    Plain(Sha256),
    Keyed(Hmac<Sha256>),
}

impl Hash {
    fn part(&mut self, part: impl AsRef<[u8]>) {
        let part = part.as_ref();
        let length = (part.len() as u64).to_be_bytes();
        match self {
            Self::Plain(hash) => {
                hash.update(length);
                hash.update(part);
            }
            Self::Keyed(hash) => {
                Mac::update(hash, &length);
                Mac::update(hash, part);
            }
        }
    }

    fn values(&mut self, headers: &HeaderMap, name: &HeaderName) {
        let values = headers.get_all(name);
        self.part((values.iter().count() as u64).to_be_bytes());
        values.iter().for_each(|value| self.part(value.as_bytes()));
    }

    fn finish(self) -> Scope {
        let digest: [u8; 32] = match self {
            Self::Plain(hash) => hash.finalize().into(),
            Self::Keyed(hash) => hash.finalize().into_bytes().into(),
        };
        let mut hex = [0; 64];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(digest) {
            const DIGITS: &[u8; 16] = b"0123456789abcdef";
            pair.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        let hex = std::str::from_utf8(&hex).expect("hex digits are ASCII");
        Scope::new(hex).expect("64 hex digits are a scope")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(lines: &[(&'static str, &'static str)]) -> Parts {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        for (name, value) in lines {
            parts.headers.append(*name, HeaderValue::from_static(value));
        }
        parts
    }

    fn rule(source: ScopeSource) -> ScopeRule {
        ScopeRule { source, ..ScopeRule::default() }
    }

    fn code(result: Result<Scope, Problem>) -> Code {
        result.expect_err("refused").code()
    }

    // Frozen: another digest would be another scope for every caller.
    #[test]
    fn the_scope_is_frozen() {
        let alice = parts(&[("authorization", "Bearer alice")]);
        let plain = rule(ScopeSource::Authorization).scope(&alice).unwrap();
        assert_eq!(plain.as_str(), "f8bc1a1feb459a2c17c616815236fb555b5622732e29050d18870b3b76871815");
        let secret = Some(ScopeSecret::new(b"0123456789abcdef").unwrap());
        let keyed = ScopeRule { secret, ..ScopeRule::default() }.scope(&alice).unwrap();
        assert_eq!(keyed.as_str(), "7d7c65d8b59d6c723b95c5dbe8b60bfd3288db3c6444c5f55117f3e0328630c7");
    }

    #[test]
    fn a_scheme_has_no_case_and_a_credential_has() {
        let scope =
            |value| rule(ScopeSource::Authorization).scope(&parts(&[("authorization", value)])).unwrap();
        for (usual, others) in
            [("Bearer aB=", ["bearer aB=", "BEARER aB="]), ("Basic aB=", ["basic aB=", "bASIC aB="])]
        {
            for other in others {
                assert_eq!(scope(other), scope(usual), "{other}");
            }
        }
        assert_ne!(scope("Bearer a"), scope("Bearer A"));
        assert_ne!(scope("Bearera"), scope("bearera"), "no scheme");
        assert_ne!(scope("Token a"), scope("token a"), "no one usual form");
    }

    #[test]
    fn callers_never_meet() {
        let header = |name| HeaderName::from_static(name);
        let default = rule(ScopeSource::Authorization);
        let account = rule(ScopeSource::Headers(vec![header("x-account")]));
        let both = rule(ScopeSource::Headers(vec![header("x-account"), header("x-user")]));
        let cookie = rule(ScopeSource::Cookie("sid".into()));
        let function = rule(ScopeSource::Function(Arc::new(|parts| {
            Some(parts.headers.get("x-account")?.to_str().ok()?.to_owned())
        })));
        let scopes = [
            default.scope(&parts(&[])),
            default.scope(&parts(&[("authorization", "Bearer a")])),
            default.scope(&parts(&[("authorization", "Bearer b")])),
            default.scope(&parts(&[("authorization", "Bearer a"), ("authorization", "Bearer b")])),
            default.scope(&parts(&[("authorization", "Basic a"), ("cookie", "sid=1")])),
            account.scope(&parts(&[("x-account", "a")])),
            account.scope(&parts(&[("x-account", "b")])),
            both.scope(&parts(&[("x-account", "a"), ("x-user", "bc")])),
            both.scope(&parts(&[("x-account", "ab"), ("x-user", "c")])),
            cookie.scope(&parts(&[("cookie", "sid=a")])),
            cookie.scope(&parts(&[("cookie", "sid=b")])),
            function.scope(&parts(&[("x-account", "a")])),
        ]
        .map(Result::unwrap);
        for (i, a) in scopes.iter().enumerate() {
            assert!(scopes[i + 1..].iter().all(|b| a != b), "{i}");
            assert!(i == 0 || a.as_str().len() == 64);
        }
        // What else a request carries does not matter.
        let again =
            parts(&[("x-account", "a"), ("cookie", "theme=dark; sid = a; x"), ("authorization", "Bearer a")]);
        assert_eq!(default.scope(&again).unwrap(), scopes[1]);
        assert_eq!(account.scope(&again).unwrap(), scopes[5]);
        assert_eq!(cookie.scope(&again).unwrap(), scopes[9]);
        assert_eq!(rule(ScopeSource::None).scope(&again).unwrap(), Scope::anonymous());
    }

    #[test]
    fn a_request_without_its_principal_is_refused() {
        let default = rule(ScopeSource::Authorization);
        for credential in ["cookie", "x-api-key", "x-auth-token", "x-forwarded-client-cert", "remote-user"] {
            let problem = default.scope(&parts(&[(credential, "SECRET")])).unwrap_err();
            assert_eq!(problem.code(), Code::ScopeMissing);
            let shown = format!("{problem:?}");
            assert!(shown.contains("scope-cookie") && !shown.contains("SECRET"), "{shown}");
        }
        let account = rule(ScopeSource::Headers(vec![HeaderName::from_static("x-account")]));
        assert_eq!(code(account.scope(&parts(&[("authorization", "Bearer a")]))), Code::ScopeMissing);
        let cookie = rule(ScopeSource::Cookie("sid".into()));
        assert_eq!(code(cookie.scope(&parts(&[("cookie", "sid2=a; asid=b; SID=c")]))), Code::ScopeMissing);
        for nobody in [None, Some(String::new())] {
            let nobody = rule(ScopeSource::Function(Arc::new(move |_| nobody.clone())));
            assert_eq!(code(nobody.scope(&parts(&[]))), Code::ScopeMissing);
        }
    }

    #[test]
    fn an_empty_principal_is_none() {
        let default = rule(ScopeSource::Authorization);
        for value in ["", " ", "Bearer", "bearer ", "Basic "] {
            assert_eq!(
                default.scope(&parts(&[("authorization", value)])).unwrap(),
                Scope::anonymous(),
                "{value}"
            );
            let session = parts(&[("authorization", value), ("cookie", "s=1")]);
            assert_eq!(code(default.scope(&session)), Code::ScopeMissing, "{value}");
        }
        let account = rule(ScopeSource::Headers(vec![HeaderName::from_static("x-account")]));
        let cookie = rule(ScopeSource::Cookie("sid".into()));
        for value in ["", " "] {
            assert_eq!(code(account.scope(&parts(&[("x-account", value)]))), Code::ScopeMissing);
        }
        for value in ["sid=", "sid=\"\"", "a=b; sid= ; sid="] {
            assert_eq!(code(cookie.scope(&parts(&[("cookie", value)]))), Code::ScopeMissing, "{value}");
        }
    }

    #[test]
    fn schemes_that_sign_each_request_are_refused() {
        let default = rule(ScopeSource::Authorization);
        for value in [
            "Digest username=x",
            "DPoP abc",
            "dpop abc",
            "AWS4-HMAC-SHA256 Credential=x",
            "AWS4-ECDSA-P256-SHA256 x",
            "Signature keyId=x",
            "Hawk id=x",
            "OAuth oauth_nonce=x",
            "Negotiate abc",
        ] {
            let request = parts(&[("authorization", value), ("x-account", "a")]);
            assert_eq!(code(default.scope(&request)), Code::ScopeUnstable, "{value}");
            let account = rule(ScopeSource::Headers(vec![HeaderName::from_static("x-account")]));
            assert!(account.scope(&request).is_ok());
        }
        for value in ["Basic abc", "Bearer abc", "Token abc", "oauthish abc", "abc"] {
            assert!(default.scope(&parts(&[("authorization", value)])).is_ok(), "{value}");
        }
    }

    /// Counts what is logged.
    #[derive(Clone, Default)]
    struct Events(Arc<std::sync::atomic::AtomicUsize>);

    impl tracing::Subscriber for Events {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn bearer_with_the_default_source_is_warned_of_once() {
        let events = Events::default();
        let rule = rule(ScopeSource::Authorization);
        let logged = |credential| {
            tracing::subscriber::with_default(events.clone(), || {
                rule.scope(&parts(&[("authorization", credential)])).unwrap();
            });
            events.0.load(Ordering::Relaxed)
        };
        assert_eq!(logged("Basic abc"), 0);
        assert_eq!(logged("Bearer abc"), 1);
        assert_eq!(logged("bearer def"), 1);
    }

    #[test]
    fn nothing_secret_is_shown() {
        let rule = ScopeRule {
            secret: Some(ScopeSecret::new(b"a very secret secret").unwrap()),
            source: ScopeSource::Function(Arc::new(|_| Some("SECRET".into()))),
            ..ScopeRule::default()
        };
        let shown = format!("{rule:?} {:?}", rule.scope(&parts(&[])).unwrap());
        assert!(!shown.to_lowercase().contains("a very") && !shown.contains("SECRET"), "{shown}");
        assert_eq!(ScopeSecret::new(b"short").unwrap_err(), ScopeSecretTooShort { bytes: 5 });
    }
}
