//! Browsers: which pages may read the answers that are ours, and that they may read our headers.
//!
//! The service behind answers preflights, but for the look-up of a key, and puts its own CORS headers on its own replies; they pass. What it cannot do
//! is done here: a refusal gets the headers that its replies would have, a replay those for the page that asks now and
//! not for the one that asked first, and the headers that say what happened are exposed.

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderName, HeaderValue, LINK, ORIGIN, RETRY_AFTER, VARY,
};
use http::request::Parts;
use http::{Method, Uri, response};

use crate::headers::is_ours;
use crate::problem::Ours;
use crate::settings::Settings;

/// Which pages may read our answers: what the service behind would say of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    // `None`: any page, by `*`.
    origins: Option<Vec<HeaderValue>>,
    credentials: bool,
}

/// Why origins were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCors {
    /// Not what a browser sends in `Origin`.
    #[error(
        "{given:?} is not an origin: write scheme, host and port alone, such as https://app.example, or *"
    )]
    Origin {
        /// What was given.
        given: String,
    },
    /// Any page could act with its visitor's cookies.
    #[error("credentials need origins by name, not *")]
    AnyWithCredentials,
    /// No page could read anything.
    #[error("name at least one origin")]
    NoOrigin,
}

impl Cors {
    /// These origins; `*` is any.
    ///
    /// # Errors
    /// [`InvalidCors`].
    pub fn new(origins: impl IntoIterator<Item: AsRef<str>>, credentials: bool) -> Result<Self, InvalidCors> {
        let mut named = Vec::new();
        let mut any = false;
        for origin in origins {
            match origin.as_ref() {
                "*" => any = true,
                origin => named.push(read_origin(origin)?),
            }
        }
        if any && credentials {
            return Err(InvalidCors::AnyWithCredentials);
        }
        if !any && named.is_empty() {
            return Err(InvalidCors::NoOrigin);
        }
        Ok(Self { origins: (!any).then_some(named), credentials })
    }

    /// Fits a refusal that was made before the layer saw the request: by a server that had no place for it, or could not
    /// read it. `origin` is the request's `Origin`, where there is one and it could be read.
    pub fn fit_refusal(&self, origin: Option<&HeaderValue>, refusal: &mut HeaderMap) {
        match (origin, &self.origins) {
            (Some(origin), _) => self.allow(origin, refusal),
            (None, None) => self.allow(&HeaderValue::from_static("null"), refusal),
            (None, Some(_)) => return,
        }
        if refusal.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
            expose_those(refusal, is_ours_in_a_refusal);
        }
    }

    /// Puts the policy for this page in place of whatever is there.
    fn allow(&self, origin: &HeaderValue, headers: &mut HeaderMap) {
        headers.remove(ACCESS_CONTROL_ALLOW_ORIGIN);
        headers.remove(ACCESS_CONTROL_ALLOW_CREDENTIALS);
        let Some(named) = &self.origins else {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
            return;
        };
        vary_by_origin(headers);
        if named.contains(origin) {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            if self.credentials {
                headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            }
        }
    }
}

/// As a browser writes it: `scheme://host[:port]` in lower case, without a path.
fn read_origin(given: &str) -> Result<HeaderValue, InvalidCors> {
    let refuse = || InvalidCors::Origin { given: given.to_owned() };
    let lower = given.strip_suffix('/').unwrap_or(given).to_ascii_lowercase();
    let uri: Uri = lower.parse().map_err(|_| refuse())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(refuse()) };
    let exact = format!("{scheme}://{authority}");
    if exact != lower || authority.as_str().contains('@') || authority.host().is_empty() {
        return Err(refuse());
    }
    HeaderValue::from_str(&exact).map_err(|_| refuse())
}

/// What a request says that its answer's CORS headers depend on. Only requests of pages have one.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    origin: HeaderValue,
    // A preflight that asks whether the key may be sent.
    asks_for_key: bool,
}

impl Page {
    pub(crate) fn of(parts: &Parts, settings: &Settings) -> Option<Self> {
        let origin = parts.headers.get(ORIGIN)?.clone();
        let key = settings.key.name();
        let asks_for_key = is_preflight(parts) && names(&parts.headers, &ACCESS_CONTROL_REQUEST_HEADERS, key);
        Some(Self { origin, asks_for_key })
    }

    /// Fits an answer to the page that gets it.
    pub(crate) fn fit(&self, answer: &mut response::Parts, settings: &Settings) {
        let ours = answer.extensions.remove::<Ours>().is_some();
        let headers = &mut answer.headers;
        let replayed = headers.contains_key(&settings.names.replayed);
        match &settings.cors {
            Some(cors) if ours || replayed => cors.allow(&self.origin, headers),
            Some(_) if self.asks_for_key => return self.allow_key(headers, settings),
            _ if replayed => self.disown(headers),
            _ => {}
        }
        if headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
            expose(headers, settings, ours);
        }
    }

    /// A stored permission was given to the first page: another one does not get it.
    fn disown(&self, headers: &mut HeaderMap) {
        let Some(allowed) = headers.get(ACCESS_CONTROL_ALLOW_ORIGIN) else { return };
        if allowed == "*" {
            return;
        }
        if allowed != self.origin {
            headers.remove(ACCESS_CONTROL_ALLOW_ORIGIN);
            headers.remove(ACCESS_CONTROL_ALLOW_CREDENTIALS);
        }
        vary_by_origin(headers);
    }

    /// The service behind need not know of the key to let pages send it.
    fn allow_key(&self, headers: &mut HeaderMap, settings: &Settings) {
        let key = settings.key.name();
        let allows_all = || {
            let star = headers.get(ACCESS_CONTROL_ALLOW_HEADERS).is_some_and(|names| names == "*");
            star && !headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS)
        };
        if headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN)
            && !names(headers, &ACCESS_CONTROL_ALLOW_HEADERS, key)
            && !allows_all()
            && let Ok(key) = HeaderValue::from_str(key.as_str())
        {
            headers.append(ACCESS_CONTROL_ALLOW_HEADERS, key);
        }
    }
}

/// Whether a page asks beforehand what it may send.
pub(crate) fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(ORIGIN)
        && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// Answers a preflight for what is read here alone, with whatever headers name its caller.
pub(crate) fn allow_to_read(parts: &Parts, answer: &mut HeaderMap) {
    answer.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD"));
    for asked in parts.headers.get_all(ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.append(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
}

/// A reply to a request that no page sent: what the first page was allowed is not for a shared cache to keep.
pub(crate) fn fit_for_nobody(answer: &mut response::Parts, settings: &Settings) {
    let headers = &mut answer.headers;
    if !headers.contains_key(&settings.names.replayed) {
        return;
    }
    if headers.get(ACCESS_CONTROL_ALLOW_ORIGIN).is_some_and(|allowed| allowed != "*") {
        headers.remove(ACCESS_CONTROL_ALLOW_ORIGIN);
        headers.remove(ACCESS_CONTROL_ALLOW_CREDENTIALS);
        vary_by_origin(headers);
    }
}

/// Lets the page read what is ours in this answer, the whole of it or a part, besides what it may read already.
fn expose(headers: &mut HeaderMap, settings: &Settings, whole: bool) {
    expose_those(headers, |name| is_ours(name, &settings.names) || (whole && is_ours_in_a_refusal(name)));
}

fn is_ours_in_a_refusal(name: &HeaderName) -> bool {
    *name == RETRY_AFTER || *name == LINK
}

fn expose_those(headers: &mut HeaderMap, ours: impl Fn(&HeaderName) -> bool) {
    let hidden: Vec<&str> = headers
        .keys()
        .filter(|name| ours(name) && !names(headers, &ACCESS_CONTROL_EXPOSE_HEADERS, name))
        .map(HeaderName::as_str)
        .collect();
    if let (false, Ok(value)) = (hidden.is_empty(), HeaderValue::from_str(&hidden.join(", "))) {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, value);
    }
}

fn vary_by_origin(headers: &mut HeaderMap) {
    if !names(headers, &VARY, &ORIGIN) && headers.get(VARY).is_none_or(|vary| vary != "*") {
        headers.append(VARY, HeaderValue::from_static("Origin"));
    }
}

/// Whether a list header holds this name.
fn names(headers: &HeaderMap, list: &HeaderName, name: &HeaderName) -> bool {
    let lines = headers.get_all(list).iter();
    lines
        .flat_map(|line| line.as_bytes().split(|b| *b == b','))
        .any(|item| item.trim_ascii().eq_ignore_ascii_case(name.as_str().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        for (given, sent) in [
            ("https://app.example", "https://app.example"),
            ("https://App.Example/", "https://app.example"),
            ("http://localhost:5173", "http://localhost:5173"),
            ("http://[::1]:80", "http://[::1]:80"),
            ("chrome-extension://abc", "chrome-extension://abc"),
        ] {
            assert_eq!(read_origin(given).unwrap(), sent, "{given}");
        }
        for wrong in
            ["", "app.example", "https://", "https://a/b", "https://a?b", "https://u@a", "null", "a b"]
        {
            let error = Cors::new([wrong], false).unwrap_err();
            assert_eq!(error, InvalidCors::Origin { given: wrong.into() });
        }
        assert_eq!(Cors::new(["*"], true), Err(InvalidCors::AnyWithCredentials));
        let none: [&str; 0] = [];
        assert_eq!(Cors::new(none, false), Err(InvalidCors::NoOrigin));
    }
}
