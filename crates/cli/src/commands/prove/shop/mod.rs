//! A shop as users build it: an order and its record in one transaction of its own database. `--door transaction` starts
//! several of it, breaks them, and reads from their table what was done.

mod mysql;
mod postgres;
mod sqlite;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use onlyonce_core::{OnceOutcome, Reply, Store, StoreError};
use onlyonce_engine::Idempotency;
use onlyonce_http::{IdempotencyLayer, Keyed, Transactional};
use onlyonce_prove::Order;
use onlyonce_prove::plan::LEDGER_PAGE;
use tokio::net::TcpListener;

use crate::failure::Failure;
use crate::store_url::StoreUrl;

/// Longer than a copy may wait before it is told that the first is under way.
const WAIT: Duration = Duration::from_secs(2);

/// Of the work: most of it is short, and some holds its transaction open for a while.
const WORK_MAX: Duration = Duration::from_millis(30);
const LONG_WORK_MAX: Duration = Duration::from_millis(800);

/// What went wrong, for people alone.
type Trouble = Box<dyn std::error::Error + Send + Sync>;

type Answer = Response<UnsyncBoxBody<Bytes, Trouble>>;

/// Serves `POST /orders` and `GET /executions?after=ID` until it is killed.
pub(super) async fn serve(listen: SocketAddr, store: &str, ledger: &str) -> Result<(), Failure> {
    let database = Database::open(&StoreUrl::parse(store)?, ledger).await?;
    let engine = database.engine();
    let rules = IdempotencyLayer::new(&engine).wait(WAIT).transactional();
    let listener =
        TcpListener::bind(listen).await.map_err(|error| Failure::io(&listen.to_string(), &error))?;
    let shop = Arc::new(Shop { database, rules });
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let shop = Arc::clone(&shop);
        // A client that goes away takes its request with it, and the transaction is rolled back: as in most servers.
        let service = service_fn(move |request| {
            let shop = Arc::clone(&shop);
            async move { Ok::<_, Infallible>(shop.answer(request).await) }
        });
        tokio::spawn(async move {
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

struct Shop {
    database: Database,
    rules: Transactional,
}

impl Shop {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        match (request.method(), request.uri().path()) {
            (&Method::POST, "/orders") => self.order(request).await,
            (&Method::GET, "/executions") => {
                let after =
                    request.uri().query().and_then(|query| query.strip_prefix("after=")?.parse().ok());
                match self.database.executions(after.unwrap_or_default()).await {
                    Ok(rows) => plain(200, serde_json::to_vec(&rows).unwrap_or_default()),
                    Err(error) => plain(500, error.to_string()),
                }
            }
            (&Method::DELETE, "/executions") => match self.database.forget().await {
                Ok(()) => plain(204, ""),
                Err(error) => plain(500, error.to_string()),
            },
            _ => plain(404, ""),
        }
    }

    async fn order(&self, request: Request<Incoming>) -> Answer {
        let request = match self.rules.read(request).await {
            Ok(request) => request,
            Err(refusal) => return refusal.map(boxed),
        };
        let Ok(order) = serde_json::from_slice::<Order>(request.body()) else { return plain(400, "") };
        let outcome = self.database.once(&request, order).await;
        request.answer(outcome).map(boxed)
    }
}

/// Where orders and records are.
enum Database {
    Sqlite(sqlite::Shop),
    Postgres(postgres::Shop),
    Mysql(mysql::Shop),
}

/// One row: its number, its operation, its amount.
type Row = (i64, i64, i64);

impl Database {
    async fn open(url: &StoreUrl, ledger: &str) -> Result<Self, Failure> {
        let trouble = |error: Trouble| Failure::io("the database of the shop", &*error);
        match url {
            StoreUrl::Sqlite(path, _) => sqlite::Shop::open(path.clone(), ledger).await.map(Self::Sqlite),
            StoreUrl::Postgres(url) => postgres::Shop::open(url.as_str(), ledger).await.map(Self::Postgres),
            StoreUrl::Mysql(url) => mysql::Shop::open(url.as_str(), ledger).await.map(Self::Mysql),
            StoreUrl::Redis(_) | StoreUrl::Memory => {
                return Err(Failure::Usage("a shop needs a database with transactions".into()));
            }
        }
        .map_err(trouble)
    }

    /// Purges the records, as in any program.
    fn engine(&self) -> Idempotency {
        fn over(store: impl Store + 'static) -> Idempotency {
            Idempotency::builder(store).build()
        }
        match self {
            Self::Sqlite(shop) => over(shop.store.clone()),
            Self::Postgres(shop) => over(shop.store.clone()),
            Self::Mysql(shop) => over(shop.store.clone()),
        }
    }

    async fn once(&self, request: &Keyed, order: Order) -> Result<OnceOutcome, StoreError> {
        let fate = Fate::draw();
        match self {
            Self::Sqlite(shop) => shop.once(request, order, fate).await,
            Self::Postgres(shop) => shop.once(request, order, fate).await,
            Self::Mysql(shop) => shop.once(request, order, fate).await,
        }
    }

    async fn executions(&self, after: i64) -> Result<Vec<Row>, Trouble> {
        match self {
            Self::Sqlite(shop) => shop.executions(after),
            Self::Postgres(shop) => shop.executions(after).await,
            Self::Mysql(shop) => shop.executions(after).await,
        }
    }

    async fn forget(&self) -> Result<(), Trouble> {
        match self {
            Self::Sqlite(shop) => shop.forget(),
            Self::Postgres(shop) => shop.forget().await,
            Self::Mysql(shop) => shop.forget().await,
        }
    }
}

/// What becomes of one run of the work: another each time, whatever the seed. What came of it is in the table.
#[derive(Clone, Copy)]
struct Fate {
    before: Duration,
    after: Duration,
    fails: bool,
}

impl Fate {
    fn draw() -> Self {
        let mut bytes = [0; 8];
        // Without randomness every work is short.
        let _ = getrandom::fill(&mut bytes);
        let mut random = onlyonce_prove::Random::new(u64::from_le_bytes(bytes));
        let most = if random.percent(3) { LONG_WORK_MAX } else { WORK_MAX };
        let before = random.between(Duration::ZERO, most / 2);
        Self { before, after: random.between(Duration::ZERO, most / 2), fails: random.percent(5) }
    }
}

/// The page of `ledger` after this row.
fn page(ledger: &str, after: i64) -> String {
    format!("SELECT id, operation, amount FROM {ledger} WHERE id > {after} ORDER BY id LIMIT {LEDGER_PAGE}")
}

fn reply(order: Order, id: i64) -> Reply {
    let body = format!("{{\"operation\":{},\"execution\":{id}}}", order.operation);
    Reply::new(201, body).with_header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
}

/// Why the work failed for the moment.
const OUT_OF_LUCK: &str = "it fails now and then, after its row was written";

fn plain(status: u16, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(boxed(Full::new(body.into())));
    *answer.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    answer
}

fn boxed<B>(body: B) -> UnsyncBoxBody<Bytes, Trouble>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Trouble>,
{
    body.map_err(Into::into).boxed_unsync()
}
