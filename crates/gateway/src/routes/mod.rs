//! Which requests are guarded: rules of method and path, and why one applies.
//!
//! A rule that guards catches every spelling of a path that some upstream may read as the one it names: any case of
//! letters, percent-encoding, `.`, doubled and trailing slashes, `\`, path parameters, white space, a host or the
//! name of a script before it, a dot or a format after it. A rule that takes the guard off, or makes the key optional,
//! applies only where every such reading is covered by it. A path with `..` in it may lead anywhere: every rule that guards
//! its method catches it, and no other applies.
//!
//! A request that asks to be taken for another method (`X-HTTP-Method-Override` and its kin) is judged by both. A
//! preflight of CORS carries no key, so that only a rule that says OPTIONS guards it.

mod path;
mod pattern;

use http::header::{ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HeaderMap, HeaderName, ORIGIN};
use http::request::Parts;
use http::{Method, Version};
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
    /// It is a preflight of CORS, which no browser sends with a key.
    Preflight,
    /// It is `application/grpc` over HTTP/2, which says how a call ended after its reply, where a status has no meaning.
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
        self.decide(head).guarded
    }

    /// What applies, and why.
    pub fn decide(&self, head: &Parts) -> Decision<'_> {
        let methods = Methods { said: &head.method, asked: method_overrides(&head.headers) };
        let preflight = is_preflight(head) && methods.asked.is_empty();
        let best = if self.rules.is_empty() { None } else { self.best(&methods, head.uri.path(), preflight) };
        let (guarded, because) = match best {
            Some(rule) => (rule.guarded, Because::Rule(&rule.pattern, rule.guarded)),
            None if preflight => (Guarded::No, Because::Preflight),
            None if is_grpc(head) => (Guarded::No, Because::Grpc),
            None if self.has_guards => (Guarded::No, Because::NoRule),
            None if methods.any(is_guarded_by_default) => (Guarded::Required, Because::Method),
            None => (Guarded::No, Because::Method),
        };
        let guarded = match guarded {
            Guarded::Required if self.keys_are_optional => Guarded::Optional,
            guarded => guarded,
        };
        Decision { guarded, because }
    }

    fn best(&self, methods: &Methods<'_>, path: &str, preflight: bool) -> Option<&Rule> {
        let readings = Readings::of(path);
        let applies = |rule: &&Rule| match rule.guarded {
            Guarded::Required => methods.any(|method| rule.pattern.catches(method, &readings)),
            Guarded::Optional | Guarded::No => methods.all(|method| rule.pattern.covers(method, &readings)),
        };
        let strictness = |guarded| match guarded {
            Guarded::No => 0,
            Guarded::Optional => 1,
            Guarded::Required => 2,
        };
        let rules = self.rules.iter().filter(|rule| !preflight || rule.pattern.says_method(methods.said));
        let rules = rules.filter(applies);
        rules.max_by_key(|rule| (rule.pattern.specificity(), strictness(rule.guarded)))
    }
}

/// Methods are case-sensitive, but many a service takes `post` for POST.
fn is_guarded_by_default(method: &str) -> bool {
    ["POST", "PATCH"].iter().any(|guarded| method.eq_ignore_ascii_case(guarded))
}

/// What an upstream may take for the method.
struct Methods<'a> {
    said: &'a Method,
    asked: Vec<&'a str>,
}

impl Methods<'_> {
    fn any(&self, holds: impl Fn(&str) -> bool) -> bool {
        holds(self.said.as_str()) || self.asked.iter().any(|method| holds(method))
    }

    fn all(&self, holds: impl Fn(&str) -> bool) -> bool {
        !self.any(|method| !holds(method))
    }
}

/// With several in one line each may be the one.
fn method_overrides(headers: &HeaderMap) -> Vec<&str> {
    let said = headers.iter().filter(|(name, _)| is_method_override(name));
    said.filter_map(|(_, value)| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|method| !method.is_empty())
        .collect()
}

/// CGI, WSGI and Rack make one name of `X-A` and `X_A`.
fn is_method_override(name: &HeaderName) -> bool {
    let name = name.as_str().as_bytes();
    name.starts_with(b"x")
        && METHOD_OVERRIDES.iter().any(|known| {
            let same = |(a, b): (&u8, &u8)| a == b || (*a == b'_' && *b == b'-');
            name.len() == known.len() && name.iter().zip(known.as_bytes()).all(same)
        })
}

const METHOD_OVERRIDES: [&str; 3] = ["x-http-method-override", "x-http-method", "x-method-override"];

/// As a browser asks whether a page may send a request (Fetch §4.8).
fn is_preflight(head: &Parts) -> bool {
    head.method == Method::OPTIONS
        && head.headers.contains_key(ORIGIN)
        && head.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// There is no gRPC over HTTP/1.1: who says so there, or names other types beside it, wants the guard off.
fn is_grpc(head: &Parts) -> bool {
    let mut types = head.headers.get_all(CONTENT_TYPE).iter();
    let (Some(value), None) = (types.next(), types.next()) else { return false };
    let essence = value.as_bytes().split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
    let rest = essence.len().checked_sub(GRPC.len()).map(|_| essence.split_at(GRPC.len()));
    head.version == Version::HTTP_2
        && rest.is_some_and(|(name, rest)| {
            name.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+'))
        })
}

const GRPC: &[u8] = b"application/grpc";

#[cfg(test)]
mod tests {
    use http::{Request, request};

    use super::*;

    fn patterns(texts: &[&str]) -> Vec<RoutePattern> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn head(method: &str, path: &str, headers: &[(&str, &str)]) -> Parts {
        let request = Request::builder().method(method).uri(path).version(Version::HTTP_2);
        let add = |request: request::Builder, (name, value): &(&str, &str)| request.header(*name, *value);
        headers.iter().fold(request, add).body(()).unwrap().into_parts().0
    }

    fn decide<'a>(routes: &'a Routes, method: &str, path: &str) -> Decision<'a> {
        routes.decide(&head(method, path, &[]))
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
    const SPELLINGS: [&str; 44] = [
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
        // Resolved against a base URL, the first segment is a host.
        "//host/v1/charges",
        "//user@host:80/v1/charges",
        "///host/v1/charges",
        "/\\host/v1/charges",
        "/%5chost%5cv1/charges",
        "/%2fhost/v1/charges",
        "/%09/host/v1/charges",
        // A regular expression's `$` stands before a last newline, too; file systems drop blanks and dots at the end.
        "/v1/charges%0a",
        "/v1/charges%20",
        "/v1/charges%09",
        "/v1/%20charges",
        "/v1/charges.",
        "/v1/charges%20.",
        "/v1/x/..%20/charges",
        "/v1/charge%C5%BF",
        // Segments that go up: what is taken off first decides where to.
        "/v1/..;/../charges",
        "/v1//../charges",
        "/v1/x//../../charges",
        "/../v1//../charges",
        "/v1/a%2fb/%2e%2e/charges",
        "/v1/a%2fb/.%2E;x/charges",
        "/v1/a%252fb/%252e./charges",
        "/v1/x/%09..%00/charges",
        "/v1\\\\..\\charges",
        "/v1/a/.../charges",
        // The format, and the script in front.
        "/v1/charges.json",
        "/index.php/v1/charges",
        "//host/APP.CGI/v1./charges.json%0a",
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
        for path in
            ["/v1/charge", "/v1/charges2", "/v2/charges", "/", "/v1/charges.something", "/x/v1/charges"]
        {
            assert_eq!(guarded(&named, "POST", path), Guarded::No, "{path}");
        }
    }

    #[test]
    fn no_spelling_borrows_an_exemption() {
        let routes = Routes::default().exempt(patterns(&["POST /public/*", "POST /login"]));
        for path in ["/public/a", "/public/a%20b", "/public/a/b.c", "/public/b.php/c", "/public/a/", "/login"]
        {
            assert_eq!(guarded(&routes, "POST", path), Guarded::No, "{path}");
        }
        let script = Routes::default().exempt(patterns(&["POST /upload.php", "POST /feed.json"]));
        for path in ["/upload.php", "/feed.json"] {
            assert_eq!(guarded(&script, "POST", path), Guarded::No, "{path}");
        }
        for path in [
            "/public/../v1/charges",
            "/public/%2e%2e/v1/charges",
            "/public/..%2fv1/charges",
            "/public/%252e%252e/v1/charges",
            "/public\\..\\v1/charges",
            "/public/..;/v1/charges",
            "/public/a%2fb/../%2e%2e/v1/charges",
            "/public//../../v1/charges",
            "/PUBLIC/a",
            "/public",
            "/public/",
            "/login/",
            "//login",
            "/login;x",
            "/%6cogin",
            "//public/v1/charges",
            "/\\public/v1/charges",
            "/public/%20",
        ] {
            assert_eq!(guarded(&routes, "POST", path), Guarded::Required, "{path}");
        }
        assert_eq!(guarded(&routes, "post", "/login"), Guarded::Required, "another method, to the rule");
    }

    #[test]
    fn a_preflight_is_guarded_only_by_a_rule_that_says_options() {
        let ask = [("origin", "https://app.example"), ("access-control-request-method", "POST")];
        let disguised = [&ask[..], &[("x-http-method-override", "POST")]].concat();
        for (rule, expected) in [
            ("/v1/charges", Guarded::No),
            ("* /v1/*", Guarded::No),
            ("OPTIONS /v1/charges", Guarded::Required),
        ] {
            let routes = Routes::default().guard(patterns(&[rule]));
            assert_eq!(routes.guarded(&head("OPTIONS", "/v1/charges", &ask)), expected, "{rule}");
            assert_eq!(
                routes.guarded(&head("OPTIONS", "/v1/charges", &ask[..1])),
                Guarded::Required,
                "{rule}"
            );
            assert_eq!(
                routes.guarded(&head("OPTIONS", "/v1/charges", &disguised)),
                Guarded::Required,
                "{rule}"
            );
        }
        // The rule that says so counts, also where one of any method is the more specific.
        let routes = Routes::default().guard(patterns(&["/v1/charges", "OPTIONS /v1/*"]));
        assert_eq!(routes.guarded(&head("OPTIONS", "/v1/charges", &ask)), Guarded::Required);
        assert_eq!(guarded(&Routes::default(), "OPTIONS", "/v1/charges"), Guarded::No);
    }

    #[test]
    fn whoever_asks_for_another_method_is_judged_by_both() {
        let deletes = Routes::default().guard(patterns(&["DELETE /orders/*"]));
        let exempt = Routes::default().exempt(patterns(&["POST /orders/*"]));
        for name in ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "x_http_method-override"]
        {
            let asks = |method, asked| head(method, "/orders/7", &[(name, asked)]);
            for (method, asked, expected) in [
                ("POST", "DELETE", Guarded::Required),
                ("POST", " delete", Guarded::Required),
                ("POST", "PUT, DELETE", Guarded::Required),
                ("DELETE", "GET", Guarded::Required),
                ("POST", "PUT", Guarded::No),
            ] {
                assert_eq!(deletes.guarded(&asks(method, asked)), expected, "{name}: {asked} on {method}");
            }
            assert_eq!(exempt.guarded(&asks("POST", "PATCH")), Guarded::Required, "{name}");
            assert_eq!(exempt.guarded(&asks("POST", "")), Guarded::No, "{name}");
            assert_eq!(Routes::default().guarded(&asks("GET", "POST")), Guarded::Required, "{name}");
        }
    }

    #[test]
    fn grpc_passes_unless_a_rule_names_it() {
        let routes = Routes::default();
        let named = Routes::default().guard(patterns(&["POST /pkg.Service/*"]));
        let call = |types: &[&str]| {
            let types: Vec<_> = types.iter().map(|value| ("content-type", *value)).collect();
            head("POST", "/pkg.Service/Pay", &types)
        };
        for (types, grpc) in [
            (&["application/grpc"][..], true),
            (&["Application/gRPC+proto; charset=x"], true),
            (&["application/grpc-web"], false),
            (&["application/grpcs"], false),
            (&["application/json"], false),
            (&["application/grpc", "application/json"], false),
        ] {
            let expected = if grpc { Guarded::No } else { Guarded::Required };
            assert_eq!(routes.guarded(&call(types)), expected, "{types:?}");
            assert_eq!(named.guarded(&call(types)), Guarded::Required, "{types:?}");
            let mut http1 = call(types);
            http1.version = Version::HTTP_11;
            assert_eq!(routes.guarded(&http1), Guarded::Required, "{types:?} over HTTP/1.1");
        }
    }
}
