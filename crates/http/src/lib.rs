//! Idempotency keys for HTTP services: a tower layer for axum, hyper and whatever speaks [`tower_service::Service`].
//!
//! It keeps to draft-ietf-httpapi-idempotency-key-header-07: a client names each operation in an `Idempotency-Key`
//! header and sends the same key with each retry; the operation runs once, and every retry gets its reply.
//!
//! | module or type | what it holds |
//! |---|---|
//! | [`IdempotencyLayer`] | the layer and its settings |
//! | [`Transactional`], [`Keyed`] | for handlers that claim in a transaction of their own |
//! | [`Ending`], [`Preset`] | how a call ended: stored, released, unknown |
//! | [`ScopeSource`], [`KeyRule`] | whose key, and how it is read |
//! | [`RequestOrigin`] | which request a record is of |
//! | [`problem`] | every refusal: code, status, advice |
//! | [`headers`] | the names of our headers |
//! | [`testing`] | for the tests of services behind the layer |
//!
//! With the feature `axum` the path of a nested router joins the fingerprint whole, by `OriginalUri`; without it the
//! layer sees what the router left of it, and belongs outside of any nesting.

mod answer;
mod body;
mod budget;
mod classify;
mod collect;
mod cors;
mod detached;
mod execute;
mod fingerprint;
pub mod headers;
mod joined;
mod key;
mod keyed;
mod layer;
mod lookup;
mod origin;
pub mod problem;
mod report;
mod reporter;
mod scope;
mod service;
mod settings;
pub mod testing;

pub use body::{BoxError, ReplyBody, RequestBody};
pub use classify::{Ending, EndingFn, Preset, UnknownPreset};
pub use collect::is_malformed;
pub use cors::{Cors, InvalidCors};
pub use key::{KeyRule, MalformedKey, parse_key};
pub use keyed::{Keyed, Transactional};
pub use layer::IdempotencyLayer;
pub use lookup::LOOKUP_PREFIX;
pub use origin::{InvalidTraceContext, RequestOrigin, SpanId, TRACEPARENT, TraceContext, X_REQUEST_ID};
pub use problem::{Code, DocsUrl, InvalidDocsUrl, Problem};
pub use report::{KeyHash, Report, ReportFn, Verdict};
pub use scope::{PrincipalFn, ScopeSecret, ScopeSecretTooShort, ScopeSource, scope_of};
pub use service::{IdempotencyService, ResponseFuture};
pub use settings::{GuardFn, Guarded, OnStoreFailure};
