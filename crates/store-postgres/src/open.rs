//! Opening a database: the options, and every check that is better made at start than met later.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use deadpool_postgres::{Hook, HookError, Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use onlyonce_batch::Limits;
use onlyonce_core::{StoreError, StoreErrorKind};
use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};
use tokio_postgres::types::Type;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::Fault;
use crate::schema::{self, Place};
use crate::session::{Call, Connections, Part, Session, Sql};
use crate::store::PostgresStore;
use crate::tls::{Mode, Tls};

/// The oldest server that is known to do.
const SERVER_VERSION_MIN: i32 = 130_000;

/// Connections beside the lanes: for jobs that run alone, the operator and the purge.
const CONNECTIONS_BESIDE: usize = 6;

/// How to open a store. [`Options::open`] creates the tables where there are none; never a database.
#[derive(Clone)]
pub struct Options {
    config: Config,
    tls: Tls,
    pub(crate) prepare: bool,
    schema: Option<String>,
    create: bool,
    pub(crate) patience: Duration,
    pub(crate) limits: Limits,
}

impl Options {
    /// Reads a URL: `postgres://user:password@host:port/database?name=value&…`.
    ///
    /// Names and values are those of libpq (`sslmode` with all its modes but `allow`, `sslrootcert`, `sslcert`,
    /// `sslkey`, `application_name`, `connect_timeout`, `target_session_attrs`, `options`, …). Ours on top:
    ///
    /// - `schema=NAME`: where the tables are. By default where `search_path` finds or would create them.
    /// - `prepare=off`: keeps nothing on a connection between transactions, for a pooler that lends its connections
    ///   by transaction (PgBouncer and its kin).
    ///
    /// # Errors
    /// [`InvalidUrl`] with what is wrong; nothing of the URL is repeated, for it can hold a password.
    pub fn new(url: &str) -> Result<Self, InvalidUrl> {
        // As the driver reads it: what comes before an @ is user and password, whatever is in them.
        let after_password = url.find('@').unwrap_or(0);
        let mark = url[after_password..].find('?').map(|at| after_password + at);
        let (address, query) = mark.map_or((url, ""), |at| (&url[..at], &url[at + 1..]));
        if !address.starts_with("postgres://") && !address.starts_with("postgresql://") {
            return Err(InvalidUrl("the URL of a PostgreSQL database begins with postgres://"));
        }
        let mut tls = Tls::default();
        let (mut prepare, mut schema, mut passed_on) = (true, None, Vec::new());
        let (mut certificate, mut key, mut has_attributes) = (None, None, false);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, raw) = pair.split_once('=').ok_or(MALFORMED)?;
            let value = percent_decode_str(raw).decode_utf8().map_err(|_| MALFORMED)?;
            match name {
                "sslmode" => {
                    const MODES: InvalidUrl =
                        InvalidUrl("sslmode is disable, prefer, require, verify-ca or verify-full");
                    tls.mode = Mode::parse(&value).ok_or(MODES)?;
                }
                "sslrootcert" if value == "system" => tls.roots = None,
                "sslrootcert" => tls.roots = Some(PathBuf::from(&*value)),
                "sslcert" => certificate = Some(PathBuf::from(&*value)),
                "sslkey" => key = Some(PathBuf::from(&*value)),
                "schema" if !value.is_empty() && !value.contains('\0') => schema = Some(value.into_owned()),
                "schema" => return Err(InvalidUrl("after schema= comes the name of a schema")),
                "prepare" => {
                    prepare = match &*value {
                        "on" => true,
                        "off" => false,
                        _ => return Err(InvalidUrl("prepare is on or off")),
                    };
                }
                _ => {
                    has_attributes |= name == "target_session_attrs";
                    passed_on.push(pair);
                }
            }
        }
        tls.identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(InvalidUrl("sslcert and sslkey come together")),
        };
        // The driver's own words could repeat a part of a password.
        let mut config: Config =
            format!("{address}?{}", passed_on.join("&")).parse().map_err(|_| MALFORMED)?;
        config.ssl_mode(tls.mode.for_driver());
        if config.get_hosts().len() > 1 && !has_attributes {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if config.get_application_name().is_none() {
            config.application_name("onlyonce");
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(3));
        }
        config.keepalives_idle(Duration::from_secs(30));
        Ok(Self {
            config,
            tls,
            prepare,
            schema,
            create: true,
            patience: Duration::from_secs(3),
            limits: Limits::default(),
        })
    }

    /// Opens only what is there already, and creates nothing.
    #[must_use]
    pub fn existing(mut self) -> Self {
        self.create = false;
        self
    }

    /// How long one exchange with the server may take before its connection is given up. 3 s by default.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience.max(Duration::from_millis(100));
        self
    }

    /// How many batches may be under way at once. 2 by default.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.limits.lanes = lanes.clamp(1, 64);
        self
    }

    /// How many operations one batch takes at most. 256 by default.
    #[must_use]
    pub fn batch_max(mut self, operations: usize) -> Self {
        self.limits.batch_max = operations.max(1);
        self
    }

    /// How many claims may wait, and how many operations of owners. Past it: [`StoreErrorKind::Overloaded`].
    #[must_use]
    pub fn queue_max(mut self, operations: usize) -> Self {
        self.limits.queue_max = operations.max(1);
        self
    }

    /// Connects, prepares the tables, and proves that they keep records as they must.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] with the reason: a wrong table, a server that is too old or read-only, a refused user, no
    /// TLS as asked. [`StoreErrorKind::Unavailable`] when the server cannot be reached.
    ///
    /// # Panics
    /// Outside a tokio runtime. The store belongs to the runtime that it was opened in.
    pub async fn open(self) -> Result<PostgresStore, StoreError> {
        let location = self.location();
        let opened = self.connect_and_prove().await;
        opened.map_err(|fault| fault.at(&location).into_error("open"))
    }

    async fn connect_and_prove(self) -> Result<PostgresStore, Fault> {
        let connections = self.connections()?;
        let mut session = connections.lend().await?;
        let server = Server::ask(&mut session).await?;
        server.check()?;
        let schema = self.schema.clone().or_else(|| server.schema.clone()).ok_or_else(|| {
            unfit("search_path names no schema that is there; say where by `schema=` in the URL".into())
        })?;
        let place = Place { schema };
        if !self.create && !schema::exists(&mut session, &place).await? {
            return Err(unfit("there are no records: no table idempotency_keys".into()));
        }
        let store_id = schema::prepare(session, &place).await?;
        let mut location = self.location();
        if self.schema.is_some() {
            location = format!("{location}?schema={}", place.schema);
        }
        Ok(PostgresStore::start(connections, self.limits, place, store_id, location, server.hazard()))
    }

    fn connections(&self) -> Result<Connections, Fault> {
        let tls = MakeRustlsConnect::new(self.tls.config()?);
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(self.config.clone(), tls, recycling);
        let mut builder = Pool::builder(manager)
            .max_size(self.limits.lanes + CONNECTIONS_BESIDE)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(self.patience))
            .create_timeout(Some(self.patience.saturating_mul(2)));
        if self.prepare {
            let settings = crate::session::settings(false, self.patience);
            builder = builder.post_create(Hook::async_fn(move |client, _| {
                let settings = settings.clone();
                Box::pin(async move { client.batch_execute(&settings).await.map_err(HookError::Backend) })
            }));
        }
        let pool =
            builder.build().map_err(|error| unfit("the pool cannot be made".into()).with_source(error))?;
        Ok(Connections { pool, prepare: self.prepare, patience: self.patience })
    }

    /// Where it is, without user and password.
    fn location(&self) -> String {
        let ports = self.config.get_ports();
        let hosts = self.config.get_hosts().iter().enumerate().map(|(n, host)| {
            let port = ports.get(n).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) if name.contains(':') => format!("[{name}]:{port}"),
                Host::Tcp(name) => format!("{name}:{port}"),
                #[cfg(unix)]
                Host::Unix(folder) => format!("{}:{port}", folder.display()),
            }
        });
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or_default();
        format!("postgres://{}/{database}", hosts.collect::<Vec<_>>().join(","))
    }
}

/// What is wrong with the URL of a database.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidUrl(&'static str);

const MALFORMED: InvalidUrl = InvalidUrl(
    "the URL cannot be read; it is postgres://user:password@host:port/database?name=value, and what is special in a \
     password or a name is written in percent, such as %40 for @",
);

impl From<InvalidUrl> for StoreError {
    fn from(invalid: InvalidUrl) -> Self {
        Self::new(StoreErrorKind::Unfit, "open").with_detail(invalid.0)
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("location", &self.location())
            .field("tls", &self.tls)
            .field("prepare", &self.prepare)
            .field("schema", &self.schema)
            .field("create", &self.create)
            .field("patience", &self.patience)
            .field("limits", &self.limits)
            .finish()
    }
}

/// What the server says of itself.
struct Server {
    version: i32,
    encoding: String,
    standby: bool,
    fsync: bool,
    full_page_writes: bool,
    schema: Option<String>,
}

impl Server {
    async fn ask(session: &mut Session<'_>) -> Result<Self, Fault> {
        const ASK: Sql = Sql {
            text: std::borrow::Cow::Borrowed(
                "SELECT current_setting('server_version_num')::int4, current_setting('server_encoding'),
                    pg_is_in_recovery(), current_setting('fsync')::bool, current_setting('full_page_writes')::bool,
                    coalesce(
                        (SELECT n.nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n
                            ON n.oid = c.relnamespace WHERE c.oid = to_regclass('idempotency_keys')),
                        current_schema()
                    )::text",
            ),
            types: &[] as &[Type],
        };
        let rows = session.run(&[Call::new(&ASK, Vec::new())], Part::Whole).await?;
        let row = rows
            .first()
            .and_then(|rows| rows.first())
            .ok_or_else(|| Fault::internal("the server says nothing of itself"))?;
        Ok(Self {
            version: row.try_get(0)?,
            encoding: row.try_get(1)?,
            standby: row.try_get(2)?,
            fsync: row.try_get(3)?,
            full_page_writes: row.try_get(4)?,
            schema: row.try_get(5)?,
        })
    }

    fn check(&self) -> Result<(), Fault> {
        if self.version < SERVER_VERSION_MIN {
            let (found, needed) = (self.version / 10_000, SERVER_VERSION_MIN / 10_000);
            return Err(unfit(format!("PostgreSQL {found} is too old: {needed} or later is needed")));
        }
        if self.encoding != "UTF8" {
            let encoding = &self.encoding;
            return Err(unfit(format!(
                "the database is encoded in {encoding}, which does not keep every key: make one in UTF8"
            )));
        }
        if self.standby {
            return Err(unfit("this server is a standby and takes no writes; name the primary".into()));
        }
        Ok(())
    }

    fn hazard(&self) -> Option<String> {
        if !self.fsync {
            return Some(
                "fsync is off on the server: a crash of its machine loses acknowledged completions, and their operations \
                 run again"
                    .into(),
            );
        }
        (!self.full_page_writes).then(|| {
            "full_page_writes is off on the server: a crash of its machine may damage records".into()
        })
    }
}

fn unfit(detail: String) -> Fault {
    Fault::new(StoreErrorKind::Unfit, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str) -> String {
        Options::new(url).expect_err(url).to_string()
    }

    #[test]
    fn urls_are_read_as_libpq_does() {
        let options = Options::new("postgres://ann:s3cret@db.example:6432/shop?sslmode=verify-full").unwrap();
        assert_eq!(options.location(), "postgres://db.example:6432/shop");
        assert_eq!(options.tls.mode, Mode::VerifyFull);
        assert!(options.prepare);
        let options = Options::new(
            "postgresql://db/shop?prepare=off&schema=my%20keys&sslrootcert=/a%2Fb.pem&connect_timeout=7",
        )
        .unwrap();
        assert!(!options.prepare);
        assert_eq!(options.schema.as_deref(), Some("my keys"));
        assert_eq!(options.tls.roots, Some("/a/b.pem".into()));
        assert_eq!(options.config.get_connect_timeout(), Some(&Duration::from_secs(7)));
        let options = Options::new("postgres://ann:pre?sslmode=disable@db/shop?prepare=off").unwrap();
        assert_eq!(options.config.get_password(), Some(&b"pre?sslmode=disable"[..]));
        assert_eq!((options.tls.mode, options.prepare), (Mode::Prefer, false));
        let options = Options::new("postgres:///shop?host=/run/postgresql&user=ann").unwrap();
        assert_eq!(options.location(), "postgres:///run/postgresql:5432/shop");
        let options = Options::new("postgres://a:1,b:2/shop").unwrap();
        assert_eq!(options.location(), "postgres://a:1,b:2/shop");
        assert_eq!(options.config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    }

    #[test]
    fn what_is_wrong_is_said_without_the_password() {
        for (url, reason) in [
            ("mysql://db/shop", "postgres://"),
            ("postgres://u:hunter2@db/shop?sslmode=allow", "sslmode is"),
            ("postgres://u:hunter2@db/shop?prepare=maybe", "on or off"),
            ("postgres://u:hunter2@db/shop?sslcert=a.pem", "come together"),
            ("postgres://u:hunter2@db/shop?schema=", "name of a schema"),
            ("postgres://u:hun?ter2/shop", "cannot be read"),
            ("postgres://u:hunter2@db/shop?unknown_option=hunter2", "cannot be read"),
        ] {
            let said = refused(url);
            assert!(said.contains(reason), "{url}: {said}");
            assert!(!said.contains("hunter2") && !said.contains("ter2"), "{said}");
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let options = Options::new("postgres://ann:hunter2@db/shop?password=hunter3").unwrap();
        let shown = format!("{options:?}");
        assert!(shown.contains("db:5432/shop") && !shown.contains("hunter"), "{shown}");
    }
}
