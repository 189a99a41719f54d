//! Which request a record is of, as logs and traces name it: `X-Request-Id` and `traceparent` (W3C Trace Context).

use std::fmt;
use std::str::FromStr;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::Origin;

/// The header with the caller's id of a request, unless the layer is told another.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Where in which trace a request stands.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The longest request id that is kept; a longer one is as good as none.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// A request as its caller's logs and traces name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestOrigin {
    request_id: Option<String>,
    trace: Option<TraceContext>,
    span: Option<SpanId>,
}

/// A `traceparent` header: the trace, the caller's span, and the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    trace_id: [u8; 16],
    span: SpanId,
    flags: u8,
}

/// A span within a trace. Never zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SpanId([u8; 8]);

/// Not a `traceparent` that names a trace and a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent")]
pub struct InvalidTraceContext;

impl RequestOrigin {
    /// What the headers of a request say; `id_header` is the name of the one with its id.
    pub(crate) fn of(headers: &HeaderMap, id_header: &HeaderName) -> Self {
        let visible = |value: &&HeaderValue| {
            let bytes = value.as_bytes();
            (1..=REQUEST_ID_BYTES_MAX).contains(&bytes.len())
                && bytes.iter().all(|b| (b' '..=b'~').contains(b))
        };
        let request_id = headers.get(id_header).filter(visible).and_then(|value| value.to_str().ok());
        let mut parents = headers.get_all(TRACEPARENT).iter();
        let trace = match (parents.next(), parents.next()) {
            (Some(value), None) => value.to_str().ok().and_then(|text| text.parse().ok()),
            _ => None,
        };
        Self { request_id: request_id.map(str::to_owned), trace, span: None }
    }

    /// Reads back what a layer left in a record; `None` for what another door left there.
    pub fn decode(origin: &Origin) -> Option<Self> {
        let text = origin.as_str();
        let (place, request_id) = match text.split_once(' ') {
            Some((place, id)) => (place, Some(id.to_owned())),
            None => (text, None),
        };
        let (parent, span) = match place.split_once('/') {
            Some((parent, span)) => (parent, Some(span.parse().ok()?)),
            None => (place, None),
        };
        let trace = if parent == "-" { None } else { Some(parent.parse().ok()?) };
        Some(Self { request_id, trace, span })
    }

    /// The form in a record: `TRACEPARENT/OUR-SPAN REQUEST-ID`, a `-` where there is no trace.
    pub(crate) fn encode(&self) -> Option<Origin> {
        let mut text = match (self.trace, &self.request_id) {
            (None, None) => return None,
            (None, Some(_)) => "-".to_owned(),
            (Some(trace), _) => trace.to_string(),
        };
        if let Some(span) = self.span {
            text.push('/');
            text.push_str(&span.to_string());
        }
        if let Some(id) = &self.request_id {
            text.push(' ');
            text.push_str(id);
        }
        Origin::new(text).ok()
    }

    /// The caller's id of the request.
    pub fn request_id(&self) -> Option<&str> {
        self.request_id.as_deref()
    }

    /// Where the request stood in its trace when it came.
    pub fn trace(&self) -> Option<&TraceContext> {
        self.trace.as_ref()
    }

    /// The span that a gateway gave it in that trace.
    pub fn span(&self) -> Option<SpanId> {
        self.span
    }

    /// Begins a span in the request's trace, if it is in one.
    pub(crate) fn begin_span(&mut self) {
        self.span = self.trace.and_then(|_| SpanId::random());
    }

    /// What goes on with the request: the same trace, our span in place of the caller's.
    pub(crate) fn onward(&self) -> Option<TraceContext> {
        self.trace.zip(self.span).map(|(trace, span)| TraceContext { span, ..trace })
    }
}

impl TraceContext {
    /// The trace, 32 hex digits.
    pub fn trace_id(&self) -> String {
        hex(&self.trace_id)
    }

    /// The span of whoever sent the header.
    pub fn span(&self) -> SpanId {
        self.span
    }
}

impl SpanId {
    /// A fresh one. `None` when the system has no randomness: a request is not refused for want of a span.
    fn random() -> Option<Self> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).ok()?;
        (bytes != [0; 8]).then_some(Self(bytes))
    }
}

impl FromStr for TraceContext {
    type Err = InvalidTraceContext;

    /// Version 00, and of later ones what they share with it (§2.2.5 of the recommendation).
    fn from_str(text: &str) -> Result<Self, InvalidTraceContext> {
        let mut parts = text.splitn(5, '-');
        let mut part = || parts.next().ok_or(InvalidTraceContext);
        let version: [u8; 1] = unhex(part()?)?;
        let trace_id: [u8; 16] = unhex(part()?)?;
        let span = part()?.parse()?;
        let [flags]: [u8; 1] = unhex(part()?)?;
        let more = parts.next().is_some();
        if version == [0xff] || (version == [0] && more) || trace_id == [0; 16] {
            return Err(InvalidTraceContext);
        }
        // Flags that this version does not know are not passed on.
        Ok(Self { trace_id, span, flags: flags & 0b11 })
    }
}

impl FromStr for SpanId {
    type Err = InvalidTraceContext;

    fn from_str(text: &str) -> Result<Self, InvalidTraceContext> {
        let bytes = unhex(text)?;
        if bytes == [0; 8] { Err(InvalidTraceContext) } else { Ok(Self(bytes)) }
    }
}

/// The header value, version 00.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", hex(&self.trace_id), self.span, self.flags)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpanId({self})")
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from(b"0123456789abcdef"[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn unhex<const N: usize>(text: &str) -> Result<[u8; N], InvalidTraceContext> {
    let text = text.as_bytes();
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        _ => Err(InvalidTraceContext),
    };
    if text.len() != 2 * N {
        return Err(InvalidTraceContext);
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(lines: &[(&'static str, &str)]) -> RequestOrigin {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        RequestOrigin::of(&headers, &X_REQUEST_ID)
    }

    #[test]
    fn what_is_kept_comes_back() {
        for lines in [
            &[("x-request-id", "req 1/2")][..],
            &[("traceparent", PARENT)],
            &[("traceparent", PARENT), ("x-request-id", "-")],
        ] {
            let mut origin = of(lines);
            for _ in 0..2 {
                let kept = origin.encode().unwrap();
                assert_eq!(RequestOrigin::decode(&kept), Some(origin.clone()), "{kept}");
                origin.begin_span();
            }
        }
        assert_eq!(of(&[]).encode(), None);
        let longest = "x".repeat(REQUEST_ID_BYTES_MAX);
        let mut both = of(&[("traceparent", PARENT), ("x-request-id", &longest)]);
        both.begin_span();
        assert!(both.encode().is_some(), "the longest fits");
    }

    #[test]
    fn what_is_no_id_is_none() {
        for id in ["", "é", "a\tb", &"x".repeat(REQUEST_ID_BYTES_MAX + 1)] {
            assert_eq!(of(&[("x-request-id", id)]), RequestOrigin::default(), "{id:?}");
        }
        assert_eq!(of(&[("traceparent", PARENT), ("traceparent", PARENT)]), RequestOrigin::default());
        for foreign in ["message 7", "00-x", "-/0", "é"] {
            assert_eq!(RequestOrigin::decode(&Origin::new(foreign).unwrap()), None, "{foreign}");
        }
    }

    #[test]
    fn trace_contexts_are_read_as_the_recommendation_says() {
        let context: TraceContext = PARENT.parse().unwrap();
        assert_eq!(context.to_string(), PARENT);
        let later = format!("cc{}-what-the-future-holds", &PARENT[2..]);
        assert_eq!(later.parse(), Ok(context));
        assert_eq!(
            PARENT.replace("-01", "-ff").parse::<TraceContext>().unwrap().to_string(),
            PARENT.replace("-01", "-03")
        );
        for wrong in [
            "",
            "00",
            &PARENT[..54],
            &format!("{PARENT}-more"),
            &format!("ff{}", &PARENT[2..]),
            &PARENT.to_uppercase(),
            &PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &PARENT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &PARENT.replace("00f0", "00é"),
        ] {
            assert_eq!(wrong.parse::<TraceContext>(), Err(InvalidTraceContext), "{wrong}");
        }
    }

    #[test]
    fn our_span_goes_on_in_place_of_the_callers() {
        let mut origin = of(&[("traceparent", PARENT)]);
        assert_eq!(origin.onward(), None);
        origin.begin_span();
        let onward = origin.onward().unwrap();
        assert_eq!(onward.trace_id(), origin.trace().unwrap().trace_id());
        assert_ne!(onward.span(), origin.trace().unwrap().span());
        assert_eq!(Some(onward.span()), origin.span());
        let mut outside = of(&[("x-request-id", "1")]);
        outside.begin_span();
        assert_eq!((outside.onward(), outside.span()), (None, None), "no trace is begun for the caller");
    }

    proptest! {
        #[test]
        fn any_origin_is_read_or_left(text in "\\PC{1,80}") {
            let read = Origin::new(&text).ok().and_then(|origin| RequestOrigin::decode(&origin));
            if let Some(again) = read.as_ref().and_then(RequestOrigin::encode) {
                prop_assert_eq!(RequestOrigin::decode(&again), read);
            }
        }
    }
}
