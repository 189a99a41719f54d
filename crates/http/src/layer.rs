//! The layer: collects settings and wraps services.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, Method};
use onlyonce_core::StoreAdmin;
use onlyonce_core::fingerprint::Definition;
use onlyonce_engine::{Idempotency, Policy};
use tower_layer::Layer;

use crate::budget::Budget;
use crate::classify::{Ending, Preset};
use crate::cors::Cors;
use crate::fingerprint::original_uri;
use crate::headers::{IDEMPOTENT_REPLAYED, ORIGINAL_REQUEST};
use crate::key::KeyRule;
use crate::keyed::Transactional;
use crate::lookup::Lookup;
use crate::problem::DocsUrl;
use crate::report::{Report, ReportFn};
use crate::scope::{ScopeSecret, ScopeSource};
use crate::service::IdempotencyService;
use crate::settings::{Guard, Guarded, OnStoreFailure, Settings};

/// How long a duplicate may be told to wait, at most.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// Gives the services behind it idempotency keys.
///
/// By default POST and PATCH need an `Idempotency-Key`; the first request with a key runs, and every retry gets its
/// reply. Two requests are one operation when they have the same scope (the `Authorization`), the same key, and the
/// same method, path, query and body.
///
/// # Guarantees
/// A guarded request's body is read before anything runs. Claim, work and record are one task of their own: when the
/// client goes away the work runs to its end and its reply is recorded. The reply is recorded, as durably as the
/// store is, before its first byte leaves.
///
/// # Limits
/// Request bodies 1 MiB, stored replies 1 MiB, all buffers of one layer and its clones 64 MiB; each is a setting. A
/// reply body that is to be stored and does not end within twice the policy's `work_timeout` is given up: the outcome
/// is unknown.
///
/// One layer for each policy: clones share their settings and their buffer budget.
///
/// ```
/// # use axum::{Router, routing::post};
/// use onlyonce_engine::Idempotency;
/// use onlyonce_http::IdempotencyLayer;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let idem = Idempotency::in_memory();
/// let router: Router = Router::new()
///     .route("/charges", post(async || "charged"))
///     .layer(IdempotencyLayer::new(&idem).wait(std::time::Duration::from_secs(2)));
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing before it wraps a service"]
pub struct IdempotencyLayer {
    idem: Idempotency,
    settings: Arc<Settings>,
}

impl IdempotencyLayer {
    /// A layer on this engine with all defaults. The policy of the handle is the layer's.
    pub fn new(idem: &Idempotency) -> Self {
        Self { idem: idem.clone(), settings: Arc::default() }
    }

    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }

    /// Guards these methods, in any case of letters, instead of POST and PATCH.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.set(|settings| {
            let guarded = match settings.guard {
                Guard::Methods { guarded, .. } => guarded,
                Guard::Function(_) => Guarded::Required,
            };
            settings.guard = Guard::Methods { methods: methods.into_iter().collect(), guarded };
        })
    }

    /// Lets requests without a key run unguarded; the answer says so (`Idempotency-Status: ignored`). With a
    /// [`guard`](Self::guard) of your own, that function decides.
    pub fn optional(self) -> Self {
        self.set(|settings| {
            if let Guard::Methods { guarded, .. } = &mut settings.guard {
                *guarded = Guarded::Optional;
            }
        })
    }

    /// Lets a function say which requests are guarded, by method and path as received.
    pub fn guard(self, guard: impl Fn(&Method, &str) -> Guarded + Send + Sync + 'static) -> Self {
        self.guard_by(move |parts| guard(&parts.method, original_uri(parts).path()))
    }

    /// Lets a function say which requests are guarded, by the whole head.
    pub fn guard_by(self, guard: impl Fn(&Parts) -> Guarded + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.guard = Guard::Function(Arc::new(guard)))
    }

    /// How the key is read.
    pub fn key(self, rule: KeyRule) -> Self {
        self.set(|settings| settings.key = rule)
    }

    /// Lets a function name the principal whose keys these are: an account, a merchant. `None` refuses the request
    /// with `scope-missing`. Only a hash of the name is kept.
    pub fn scope(self, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.scope_source(ScopeSource::Function(Arc::new(principal)))
    }

    /// What names the principal. `Authorization` by default.
    pub fn scope_source(self, source: ScopeSource) -> Self {
        self.set(|settings| settings.scope.source = source)
    }

    /// Makes scopes an HMAC under this secret, so that who reads the store cannot try credentials against them.
    pub fn scope_secret(self, secret: ScopeSecret) -> Self {
        self.set(|settings| settings.scope.secret = Some(secret))
    }

    /// Which parts of a request make it the same request. Records made under the definition before stay understood
    /// when it is named by [`known_fingerprint`](Self::known_fingerprint).
    pub fn fingerprint(self, definition: Definition) -> Self {
        self.set(|settings| settings.fingerprint.set_current(definition))
    }

    /// A definition that records were made under earlier. Raw bodies and canonical JSON, without headers, are always known.
    pub fn known_fingerprint(self, definition: Definition) -> Self {
        self.set(|settings| settings.fingerprint.also_known(definition))
    }

    /// Lets a duplicate wait this long for the result of the copy in flight, instead of an immediate 409. At most an hour.
    pub fn wait(mut self, wait: Duration) -> Self {
        let policy = Policy { wait: wait.min(WAIT_MAX), ..self.idem.policy().clone() };
        // The rest of the policy was checked when the engine was built.
        if let Ok(idem) = self.idem.with_policy(policy) {
            self.idem = idem;
        }
        self
    }

    /// The same settings for handlers that claim in a transaction of their own database: see [`Transactional`]. What a status
    /// says, reports and pages of other origins do not apply there.
    pub fn transactional(&self) -> Transactional {
        Transactional::new(Arc::clone(&self.settings), self.idem.policy().clone())
    }

    /// What a status says about the operation; `Stripe` also names the replay marker `Idempotent-Replayed`, and the id of
    /// the first request `Original-Request`.
    pub fn preset(self, preset: Preset) -> Self {
        self.set(|settings| {
            settings.classifier.preset = preset;
            if preset == Preset::Stripe {
                settings.names.replayed = IDEMPOTENT_REPLAYED;
                settings.names.original_request = ORIGINAL_REQUEST;
            }
        })
    }

    /// Lets a function say how a call ended, before its reply's header and the preset are asked. The second argument is
    /// the attempt.
    pub fn classify(
        self,
        ending: impl Fn(&http::response::Parts, u32) -> Option<Ending> + Send + Sync + 'static,
    ) -> Self {
        self.set(|settings| settings.classifier.function = Some(Arc::new(ending)))
    }

    /// The longest body of a guarded request, in bytes. 1 MiB. Past it: 413, nothing runs.
    pub fn max_request_body(self, bytes: usize) -> Self {
        self.set(|settings| settings.request_bytes_max = bytes)
    }

    /// The longest body that is stored, in bytes. 1 MiB. A longer reply streams through, and its replays have no body.
    pub fn max_stored_body(self, bytes: usize) -> Self {
        self.set(|settings| settings.stored_bytes_max = bytes)
    }

    /// How many bytes of requests and replies may be in memory at once, a quarter of it for replies alone. 64 MiB. Past
    /// it requests are refused (503 `overloaded`), and a reply that finds no room is treated like one that is too long to
    /// be stored. Only requests that are being read, run or waited for count.
    pub fn max_buffered(self, bytes: usize) -> Self {
        self.set(|settings| settings.budget = Budget::new(bytes))
    }

    /// How long the body of a guarded request may take to arrive. 60 s. Past it: 408, nothing runs.
    pub fn body_timeout(self, timeout: Duration) -> Self {
        self.set(|settings| settings.body_timeout = timeout)
    }

    /// What to do when the store cannot be asked. Refuse, by default.
    pub fn on_store_failure(self, what: OnStoreFailure) -> Self {
        self.set(|settings| settings.on_store_failure = what)
    }

    /// Adds a `Link` to the documentation to every refusal.
    pub fn docs_url(self, docs: DocsUrl) -> Self {
        self.set(|settings| settings.docs = Some(docs))
    }

    /// Adds `Idempotency-Key-Expires` to first answers and replays.
    pub fn advertise_expiry(self) -> Self {
        self.set(|settings| settings.advertise_expiry = true)
    }

    /// Names the header that marks replays.
    pub fn replayed_header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.names.replayed = name)
    }

    /// The header with the caller's id of a request, `X-Request-Id` by default. The id of the request that ran, with its
    /// `traceparent`, is kept in the record and told on replays, 409 and 422 (`Idempotency-Original-Request`,
    /// `Idempotency-Original-Traceparent`). An id has at most 128 visible ASCII characters; a longer one is not kept.
    pub fn request_id_header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.request_id = name)
    }

    /// Takes part in traces as a proxy does: a guarded request with a `traceparent` goes on with a span of ours in it. For a
    /// layer in front of another process; inside one the program's own tracing does this. No trace is begun where the
    /// caller has none.
    pub fn join_traces(self) -> Self {
        self.set(|settings| settings.joins_traces = true)
    }

    /// Headers of a reply that are not stored, besides those that never are.
    pub fn not_stored(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.set(|settings| settings.not_stored = names.into_iter().collect())
    }

    /// Which pages of browsers may read refusals and replays: say what the service behind says of its own replies, which
    /// pass as they are. Without it refusals have no CORS headers, and a replay keeps the stored ones for the page that
    /// they name, or for all where they say `*`. Our headers are exposed to pages that may read the answer. With it a
    /// preflight's answer from the service behind also allows the key header.
    pub fn cors(self, cors: Cors) -> Self {
        self.set(|settings| settings.cors = Some(cors))
    }

    /// Answers `GET /.well-known/idempotency/KEY` with the status of that key in the caller's scope: `absent`,
    /// `in-progress`, `completed` or `unknown`. Nothing is run or claimed. `store` must be the engine's own.
    pub fn status_lookup(self, store: Arc<dyn StoreAdmin>) -> Self {
        self.set(|settings| settings.lookup = Some(Lookup::new(store)))
    }

    /// Bytes of requests and replies in memory now, out of [`max_buffered`](Self::max_buffered).
    pub fn buffered_bytes(&self) -> usize {
        self.settings.budget.used_bytes()
    }

    /// Calls a function with a report on each request on a guarded route. It must not block.
    pub fn report(self, function: impl Fn(&Report) + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.report = Some(ReportFn::new(function)))
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(inner, self.idem.clone(), self.settings.clone())
    }
}
