//! Which requests are guarded: rules of method and path, and why one applies.
//!
//! A rule that guards catches every spelling of a path that some upstream may read as the one it names: any case of
//! letters, percent-encoding, `.` and `..`, doubled and trailing slashes, `\`, path parameters. A rule that takes the
//! guard off, or makes the key optional, applies only where every such reading is covered by it. So no spelling passes a
//! guard by.

mod path;
mod pattern;

use http::header::{CONTENT_TYPE, HeaderMap};
use http::request::Parts;
use http::{Method, Uri};
use onlyonce_http::Guarded;

use path::Readings;
pub use pattern::{InvalidRoute, RoutePattern};

/// The rules of a gateway. Without any: each POST and PATCH is guarded and needs a key.
///
/// Of the rules that apply the one with the most specific path decides; of two alike the stricter one. A request that none
/// applies to is judged by its method, or not guarded where there are rules that say what is.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    rules: Vec<Rule>,
    has_guards: bool,
    keys_are_optional: bool,
}

#[derive(Clone, Debug)]
struct Rule {
    guarded: Guarded,
    pattern: RoutePattern,
}

/// What applies to a request, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    /// Whether it is guarded.
    pub guarded: Guarded,
    /// By what.
    pub because: Because<'a>,
}

/// Why a request is guarded, or is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Because<'a> {
    /// This rule, and what it says.
    Rule(&'a RoutePattern, Guarded),
    /// Its method, without a rule.
    Method,
    /// There are rules that say what is guarded, and none of them applies.
    NoRule,
    /// It is `application/grpc`, which says how a call ended after its reply, where a status has no meaning.
    Grpc,
}

impl Routes {
    /// Guards what these patterns name, and nothing else but what other patterns name.
    #[must_use]
    pub fn guard(mut self, patterns: impl IntoIterator<Item = RoutePattern>) -> Self {
        let before = self.rules.len();
        self.add(Guarded::Required, patterns);
        self.has_guards |= self.rules.len() > before;
        self
    }

    /// Takes the guard off what these patterns name.
    #[must_use]
    pub fn exempt(mut self, patterns: impl IntoIterator<Item = RoutePattern>) -> Self {
        self.add(Guarded::No, patterns);
        self
    }

    /// Guards what these patterns name when it has a key.
    #[must_use]
    pub fn optional_for(mut self, patterns: impl IntoIterator<Item = RoutePattern>) -> Self {
        self.add(Guarded::Optional, patterns);
        self
    }

    /// Requires a key of no request.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.keys_are_optional = true;
        self
    }

    fn add(&mut self, guarded: Guarded, patterns: impl IntoIterator<Item = RoutePattern>) {
        self.rules.extend(patterns.into_iter().map(|pattern| Rule { guarded, pattern }));
    }

    /// What applies to a request with this head.
    pub fn guarded(&self, head: &Parts) -> Guarded {
        self.decide(&head.method, &head.uri, &head.headers).guarded
    }

    /// What applies, and why.
    pub fn decide(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Decision<'_> {
        let best = if self.rules.is_empty() { None } else { self.best(method, uri.path()) };
        let (guarded, because) = match best {
            Some(rule) => (rule.guarded, Because::Rule(&rule.pattern, rule.guarded)),
            None if is_grpc(headers) => (Guarded::No, Because::Grpc),
            None if self.has_guards => (Guarded::No, Because::NoRule),
            None if is_guarded_by_default(method) => (Guarded::Required, Because::Method),
            None => (Guarded::No, Because::Method),
        };
        let guarded = match guarded {
            Guarded::Required if self.keys_are_optional => Guarded::Optional,
            guarded => guarded,
        };
        Decision { guarded, because }
    }

    fn best(&self, method: &Method, path: &str) -> Option<&Rule> {
        let readings = Readings::of(path);
        let applies = |rule: &&Rule| match rule.guarded {
            Guarded::Required => rule.pattern.catches(method, &readings),
            Guarded::Optional | Guarded::No => rule.pattern.covers(method, &readings),
        };
        let strictness = |guarded| match guarded {
            Guarded::No => 0,
            Guarded::Optional => 1,
            Guarded::Required => 2,
        };
        let rules = self.rules.iter().filter(applies);
        rules.max_by_key(|rule| (rule.pattern.specificity(), strictness(rule.guarded)))
    }
}

/// Methods are case-sensitive, but many a service takes `post` for POST.
fn is_guarded_by_default(method: &Method) -> bool {
    ["POST", "PATCH"].iter().any(|guarded| method.as_str().eq_ignore_ascii_case(guarded))
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE) else { return false };
    let essence = value.as_bytes().split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
    let rest = essence.len().checked_sub(GRPC.len()).map(|_| essence.split_at(GRPC.len()));
    rest.is_some_and(|(name, rest)| {
        name.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+'))
    })
}

const GRPC: &[u8] = b"application/grpc";

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(texts: &[&str]) -> Vec<RoutePattern> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn decide<'a>(routes: &'a Routes, method: &str, path: &str) -> Decision<'a> {
        routes.decide(&method.parse().unwrap(), &path.parse().unwrap(), &HeaderMap::new())
    }

    fn guarded(routes: &Routes, method: &str, path: &str) -> Guarded {
        decide(routes, method, path).guarded
    }

    #[test]
    fn without_rules_post_and_patch_are_guarded_in_any_case_of_letters() {
        let routes = Routes::default();
        for (method, expected) in [
            ("POST", Guarded::Required),
            ("post", Guarded::Required),
            ("pAtCh", Guarded::Required),
            ("PUT", Guarded::No),
            ("POSTS", Guarded::No),
        ] {
            let decision = decide(&routes, method, "/x?y");
            assert_eq!(decision, Decision { guarded: expected, because: Because::Method }, "{method}");
        }
        assert_eq!(guarded(&routes.optional(), "POST", "/x"), Guarded::Optional);
    }

    #[test]
    fn the_most_specific_rule_decides_and_of_two_alike_the_stricter() {
        let routes = Routes::default()
            .guard(patterns(&["POST /v1/*", "PUT /v1/orders/*", "* /both"]))
            .exempt(patterns(&["POST /v1/login", "POST /v1/charges/*", "POST /same", "* /both"]))
            .optional_for(patterns(&["POST /v1/charges/*/notes", "POST /same"]));
        for (method, path, expected) in [
            ("POST", "/v1/orders", Guarded::Required),
            ("POST", "/v1/login", Guarded::No),
            ("POST", "/v1/login/again", Guarded::Required),
            ("POST", "/v1/charges/7", Guarded::No),
            ("POST", "/v1/charges/7/notes", Guarded::Optional),
            ("PUT", "/v1/orders/7", Guarded::Required),
            ("PUT", "/v1/login", Guarded::No),
            ("POST", "/elsewhere", Guarded::No),
            ("POST", "/same", Guarded::Optional),
            ("POST", "/both", Guarded::Required),
        ] {
            assert_eq!(guarded(&routes, method, path), expected, "{method} {path}");
        }
        assert_eq!(decide(&routes, "POST", "/elsewhere").because, Because::NoRule);
        let by = decide(&routes, "POST", "/v1/login").because;
        assert!(
            matches!(by, Because::Rule(pattern, Guarded::No) if pattern.to_string() == "POST /v1/login"),
            "{by:?}"
        );
        // Exemptions alone leave the default as it is.
        let exempt = Routes::default().exempt(patterns(&["POST /login"]));
        assert_eq!(guarded(&exempt, "POST", "/login"), Guarded::No);
        assert_eq!(guarded(&exempt, "POST", "/pay"), Guarded::Required);
    }

    /// Spellings that this or that upstream takes for `/v1/charges`.
    const SPELLINGS: [&str; 16] = [
        "/v1/charges",
        "/V1/Charges",
        "/v1/charges/",
        "//v1//charges",
        "/v1/./charges",
        "/v1/x/../charges",
        "/v1/%63harges",
        "/v1/%2563harges",
        "/v1%2fcharges",
        "/v1/x/%2e%2e/charges",
        "/v1/x%2f..%2fcharges",
        "/v1/charges;jsessionid=1",
        "/v1;a=b/charges",
        "/v1\\charges",
        "/v1/charges%3fa=b",
        "/v1/charges%00",
    ];

    #[test]
    fn no_spelling_passes_a_guard_by() {
        let named = Routes::default().guard(patterns(&["POST /v1/charges"]));
        let below = Routes::default().guard(patterns(&["POST /v1/charges/*"]));
        for path in SPELLINGS {
            assert_eq!(guarded(&named, "POST", path), Guarded::Required, "{path}");
            assert_eq!(guarded(&named, "post", path), Guarded::Required, "{path}");
            assert_eq!(guarded(&below, "POST", path), Guarded::Required, "{path}");
        }
        for path in ["/v1/charge", "/v1/charges2", "/v2/charges", "/"] {
            assert_eq!(guarded(&named, "POST", path), Guarded::No, "{path}");
        }
    }

    #[test]
    fn no_spelling_borrows_an_exemption() {
        let routes = Routes::default().exempt(patterns(&["POST /public/*", "POST /login"]));
        for path in ["/public/a", "/public/a%20b", "/public/a/b.c", "/public/a/", "/login"] {
            assert_eq!(guarded(&routes, "POST", path), Guarded::No, "{path}");
        }
        for path in [
            "/public/../v1/charges",
            "/public/%2e%2e/v1/charges",
            "/public/..%2fv1/charges",
            "/public/%252e%252e/v1/charges",
            "/public\\..\\v1/charges",
            "/public/..;/v1/charges",
            "/PUBLIC/a",
            "/public",
            "/public/",
            "/login/",
            "//login",
            "/login;x",
            "/%6cogin",
        ] {
            assert_eq!(guarded(&routes, "POST", path), Guarded::Required, "{path}");
        }
        assert_eq!(guarded(&routes, "post", "/login"), Guarded::Required, "another method, to the rule");
    }

    #[test]
    fn grpc_passes_unless_a_rule_names_it() {
        let mut headers = HeaderMap::new();
        let routes = Routes::default();
        let named = Routes::default().guard(patterns(&["POST /pkg.Service/*"]));
        for (content_type, grpc) in [
            ("application/grpc", true),
            ("Application/gRPC+proto; charset=x", true),
            ("application/grpc-web", false),
            ("application/grpcs", false),
            ("application/json", false),
        ] {
            headers.insert(CONTENT_TYPE, content_type.parse().unwrap());
            let decide = |routes: &Routes| {
                let uri = "/pkg.Service/Pay".parse().unwrap();
                routes.decide(&Method::POST, &uri, &headers).guarded
            };
            let expected = if grpc { Guarded::No } else { Guarded::Required };
            assert_eq!(decide(&routes), expected, "{content_type}");
            assert_eq!(decide(&named), Guarded::Required, "{content_type}");
        }
    }
}
