//! The world of a test: a store, an axum server on a socket, and faults on demand.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::serve::ListenerExt;
use bytes::Bytes;
use http::{HeaderMap, Response, Uri};
use http_body_util::BodyExt;
use onlyonce_core::{
    Capabilities, ClaimOutcome, ClaimRequest, Clock, CompleteOutcome, Completion, LeaseToken, MemoryStore,
    OnLeaseEnd, Operation, PurgeRequest, Purged, ReleaseOutcome, RenewOutcome, Store, StoreAdmin, StoreError,
    StoreErrorKind, SystemClock, TestClock,
};
use onlyonce_engine::{Context, Idempotency, Limits, Policy};
use onlyonce_http::IdempotencyLayer;
use onlyonce_store_sqlite::{Options, SqliteStore};
use parking_lot::Mutex;
use tempfile::TempDir;
use testkit::{Client, ClientResponse};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Instantiates each test on each store.
macro_rules! on_every_store {
    ($($name:ident),* $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(crate::harness::TestStore::memory()).await;
            })*
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(crate::harness::TestStore::sqlite().await).await;
            })*
        }
    };
}
pub(crate) use on_every_store;

/// A store, with what keeps it alive.
#[derive(Clone)]
pub(crate) struct TestStore {
    pub(crate) admin: Arc<dyn StoreAdmin>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) folder: Option<Arc<TempDir>>,
}

impl TestStore {
    pub(crate) fn memory() -> Self {
        Self::new(Arc::new(MemoryStore::new()), None)
    }

    pub(crate) async fn sqlite() -> Self {
        Self::sqlite_with(|options| options).await
    }

    /// Both stores on a clock of the test's.
    pub(crate) async fn each_on(clock: &TestClock) -> [(&'static str, Self); 2] {
        let clock: Arc<dyn Clock> = Arc::new(clock.clone());
        let memory = Self::new(Arc::new(MemoryStore::with_clock(clock.clone())), None);
        let sqlite = Self::sqlite_with(|options| options.clock(clock).boot_id("a boot")).await;
        [("memory", memory), ("sqlite", sqlite)]
    }

    pub(crate) async fn sqlite_with(set: impl FnOnce(Options) -> Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = set(SqliteStore::options(folder.path().join("onlyonce.db"))).open().await.unwrap();
        Self::new(Arc::new(store), Some(Arc::new(folder)))
    }

    fn new(admin: Arc<dyn StoreAdmin>, folder: Option<Arc<TempDir>>) -> Self {
        Self { admin, faults: Arc::default(), folder }
    }

    /// The store with its faults in front.
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::new(FaultyStore { inner: self.admin.clone(), faults: self.faults.clone() })
    }

    /// The store as another process sees it, without the faults.
    pub(crate) fn sound(&self) -> Arc<dyn Store> {
        self.admin.clone()
    }

    pub(crate) async fn records(&self) -> usize {
        self.admin.list(&Default::default()).await.unwrap().records.len()
    }
}

/// A request as the handler got it.
#[derive(Clone, Debug)]
pub(crate) struct Hit {
    /// The how-many-th run, counted from 1.
    pub(crate) number: usize,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// What a guarded request finds in its extensions.
    pub(crate) context: Option<Context>,
}

/// A server behind the layer, with a side-effect counter.
pub(crate) struct Server {
    addr: SocketAddr,
    runs: Arc<AtomicUsize>,
    hits: Arc<Mutex<Vec<Hit>>>,
    pub(crate) idem: Idempotency,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answers of a server in one line.
pub(crate) fn reply(status: u16, body: impl Into<Body>) -> Response<Body> {
    Response::builder().status(status).body(body.into()).unwrap()
}

/// Sets one header more.
pub(crate) fn with(mut response: Response<Body>, name: &'static str, value: &str) -> Response<Body> {
    response.headers_mut().append(name, value.parse().unwrap());
    response
}

pub(crate) struct ServerOptions {
    store: Arc<dyn Store>,
    policy: Policy,
    limits: Limits,
    clock: Arc<dyn Clock>,
}

impl ServerOptions {
    pub(crate) fn new(store: &TestStore) -> Self {
        // Expired records are looked for by the tests that want it.
        // A busy machine's disk can stand still for longer than the default allows; the tests of that time set their own.
        let store_timeout = Duration::from_secs(20);
        let limits = Limits { purge_interval: Duration::ZERO, store_timeout, ..Limits::default() };
        Self { store: store.store(), policy: Policy::default(), limits, clock: Arc::new(SystemClock) }
    }

    pub(crate) fn sound(mut self, store: &TestStore) -> Self {
        self.store = store.sound();
        self
    }

    pub(crate) fn hold(mut self) -> Self {
        self.policy.on_lease_end = OnLeaseEnd::Hold;
        self
    }

    pub(crate) fn lease(mut self, lease: Duration) -> Self {
        self.policy.lease = lease;
        self
    }

    pub(crate) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(&mut self.policy);
        self
    }

    pub(crate) fn limits(mut self, change: impl FnOnce(&mut Limits)) -> Self {
        change(&mut self.limits);
        self
    }

    pub(crate) fn clock(mut self, clock: &TestClock) -> Self {
        self.clock = Arc::new(clock.clone());
        self
    }

    pub(crate) fn idem(self) -> Idempotency {
        Idempotency::builder_for(self.store).policy(self.policy).limits(self.limits).clock(self.clock).build()
    }

    /// Starts a server whose every route runs `answer`.
    pub(crate) async fn start<F, Fut>(
        self,
        set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
        answer: F,
    ) -> Server
    where
        F: Fn(Hit) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Response<Body>> + Send + 'static,
    {
        let idem = self.idem();
        let (runs, hits) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
        let layer = set(IdempotencyLayer::new(&idem));
        let (counter, log) = (runs.clone(), hits.clone());
        let handler = async move |request: Request| {
            let number = counter.fetch_add(1, Ordering::SeqCst) + 1;
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            let context = parts.extensions.get::<Context>().cloned();
            let hit = Hit { number, uri: parts.uri, headers: parts.headers, body, context };
            log.lock().push(hit.clone());
            answer(hit).await
        };
        let (addr, task) = serve(Router::new().fallback(handler).layer(layer)).await;
        Server { addr, runs, hits, idem, task }
    }
}

impl Server {
    pub(crate) async fn start<F, Fut>(
        store: &TestStore,
        set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
        answer: F,
    ) -> Self
    where
        F: Fn(Hit) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Response<Body>> + Send + 'static,
    {
        ServerOptions::new(store).start(set, answer).await
    }

    /// One that answers `run N` with N counted from 1.
    pub(crate) async fn counting(
        store: &TestStore,
        set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        Self::start(store, set, async |hit: Hit| reply(201, format!("run {}", hit.number))).await
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.addr)
    }

    /// POST /pay with this key and body.
    pub(crate) async fn pay(&self, key: &str, body: &'static str) -> ClientResponse {
        self.client().post("/pay").key(key).body(body).send().await.unwrap()
    }

    /// The side-effect counter.
    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub(crate) fn hits(&self) -> Vec<Hit> {
        self.hits.lock().clone()
    }
}

/// Serves a router on a loopback port.
pub(crate) async fn serve(router: Router) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
    let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (addr, task)
}

/// A gate that handlers wait at until the test opens it.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Semaphore>);

impl Gate {
    pub(crate) fn closed() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    pub(crate) async fn pass(&self) {
        let _ = self.0.acquire().await.expect("never closed");
    }

    pub(crate) fn open(&self) {
        self.0.add_permits(1000);
    }
}

/// What is to go wrong, by store method.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) claim: Mutex<Fault>,
    pub(crate) renew: Mutex<Fault>,
    pub(crate) complete: Mutex<Fault>,
    /// Claims that reached the store, by token.
    pub(crate) claims: Mutex<Vec<LeaseToken>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Fault {
    #[default]
    None,
    /// Fails before anything is sent.
    Refused(StoreErrorKind),
    /// Never answers; nothing is sent.
    Hangs,
    /// Applied once, its answer lost; sound from then on.
    AnswerLostOnce,
    /// Fails this many times more.
    RefusedTimes(usize),
}

impl Faults {
    pub(crate) fn set(fault: &Mutex<Fault>, what: Fault) {
        *fault.lock() = what;
    }
}

#[derive(Debug)]
struct FaultyStore {
    inner: Arc<dyn StoreAdmin>,
    faults: Arc<Faults>,
}

impl FaultyStore {
    async fn through<T>(
        &self,
        method: &'static str,
        fault: &Mutex<Fault>,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let now = *fault.lock();
        match now {
            Fault::None => call.await,
            Fault::Refused(kind) => Err(StoreError::new(kind, method)),
            Fault::Hangs => std::future::pending().await,
            Fault::AnswerLostOnce => {
                *fault.lock() = Fault::None;
                call.await?;
                Err(StoreError::new(StoreErrorKind::Timeout, method).ambiguous())
            }
            Fault::RefusedTimes(0) => call.await,
            Fault::RefusedTimes(left) => {
                *fault.lock() = Fault::RefusedTimes(left - 1);
                Err(StoreError::new(StoreErrorKind::Unavailable, method))
            }
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        self.faults.claims.lock().push(request.token);
        self.through("claim", &self.faults.claim, self.inner.claim(operation, request)).await
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        self.through("renew", &self.faults.renew, self.inner.renew(operation, token, lease)).await
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        self.through("complete", &self.faults.complete, self.inner.complete(operation, completion)).await
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        self.inner.release(operation, token).await
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        self.inner.mark_unknown(operation, token).await
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        self.inner.purge(request).await
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

#[track_caller]
pub(crate) fn assert_problem(answer: &ClientResponse, status: u16, code: &str) {
    assert_eq!((answer.status, &*answer.code()), (status, code), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    let body = answer.json();
    assert_eq!(body["type"], format!("urn:onlyonce:error:{code}"));
    assert_eq!(body["status"], status);
    assert!(body["title"].is_string() && body["detail"].is_string() && body["retryable"].is_boolean());
}

#[track_caller]
pub(crate) fn assert_replay_of(answer: &ClientResponse, first: &ClientResponse) {
    assert_eq!(answer.header("idempotency-replayed"), Some("true"), "{answer:?}");
    assert_eq!(first.header("idempotency-replayed"), None, "{first:?}");
    assert_eq!((answer.status, &answer.body), (first.status, &first.body));
}
