//! The options, the URL they can be read from, and what must hold before a store is handed out.

use std::path::PathBuf;
use std::time::Duration;

use onlyonce_core::{StoreError, StoreErrorKind};
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates,
};

use crate::error::Fault;
use crate::names::Names;
use crate::store::RedisStore;

/// How to open a store.
#[derive(Clone)]
pub struct Options {
    pub(crate) kind: Kind,
    pub(crate) servers: Vec<Address>,
    user: Option<String>,
    password: Option<String>,
    sentinel_user: Option<String>,
    sentinel_password: Option<String>,
    pub(crate) db: i64,
    tls: Option<Tls>,
    pub(crate) prefix: String,
    pub(crate) hash_tag: Option<String>,
    pub(crate) allow_eviction: bool,
    pub(crate) min_replicas: u32,
    pub(crate) replica_timeout: Duration,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) hold_retention: Option<Duration>,
    pub(crate) purpose: Purpose,
}

/// What a store is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Claims and their owners: whatever they need is tried out first.
    Work,
    /// An operator's changes.
    Operate,
    /// Looking alone.
    Look,
}

/// What the servers are to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One server.
    Single,
    /// Sentinels that know which server of this name is the master.
    Sentinel(String),
    /// Some nodes of a cluster.
    Cluster,
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Address {
    Tcp(String, u16),
    Unix(PathBuf),
}

#[derive(Clone, Debug, Default)]
struct Tls {
    ca: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Options {
    /// Reads a URL:
    ///
    /// | form | what |
    /// |---|---|
    /// | `redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]` | one server |
    /// | `redis+unix://[USER[:PASSWORD]@]/SOCKET` | one server, by its socket |
    /// | `redis+cluster://[…@]HOST[:PORT],HOST[:PORT]…` | a cluster; any of its nodes will do, more make it sure |
    /// | `redis+sentinel://[…@]HOST[:PORT],…/NAME[/DB]` | the master of this name, as these Sentinels know it |
    ///
    /// `rediss` in place of `redis` is TLS. A password with `@`, `/`, `?` or `%` in it is percent-encoded. After `?` may
    /// come, joined by `&`: `prefix`, `hash_tag`, `min_replicas`, `replica_timeout_ms`, `timeout_ms`,
    /// `connect_timeout_ms`, `hold_retention_s`, `allow_eviction` (`true`), `db`, `ca` (a PEM file; without it the
    /// system's), `cert` and `key` (PEM files of a client certificate), `sentinel_user`, `sentinel_password`. Each is
    /// the method of its name here.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] with what to write instead. The URL is not repeated, for it can hold a password.
    pub fn from_url(url: &str) -> Result<Self, StoreError> {
        crate::url::parse(url).map_err(|why| StoreError::new(StoreErrorKind::Unfit, "open").with_detail(why))
    }

    pub(crate) fn new(kind: Kind, servers: Vec<Address>) -> Self {
        Self {
            kind,
            servers,
            user: None,
            password: None,
            sentinel_user: None,
            sentinel_password: None,
            db: 0,
            tls: None,
            prefix: "idem".into(),
            hash_tag: None,
            allow_eviction: false,
            min_replicas: 0,
            replica_timeout: Duration::from_millis(500),
            timeout: Duration::from_millis(900),
            connect_timeout: Duration::from_secs(1),
            hold_retention: None,
            purpose: Purpose::Work,
        }
    }

    /// The user to log in as; `None` is Redis's default user.
    #[must_use]
    pub fn user(mut self, user: Option<&str>, password: &str) -> Self {
        (self.user, self.password) = (user.map(Into::into), Some(password.into()));
        self
    }

    /// The user to log in to the Sentinels as, where they want one.
    #[must_use]
    pub fn sentinel_user(mut self, user: Option<&str>, password: &str) -> Self {
        (self.sentinel_user, self.sentinel_password) = (user.map(Into::into), Some(password.into()));
        self
    }

    /// The number of the database; a cluster has only 0.
    #[must_use]
    pub fn db(mut self, db: u16) -> Self {
        self.db = db.into();
        self
    }

    /// Speaks TLS. `ca` holds certificates in PEM form that are trusted in place of the system's.
    #[must_use]
    pub fn tls(mut self, ca: Option<&[u8]>) -> Self {
        self.tls.get_or_insert_default().ca = ca.map(Into::into);
        self
    }

    /// Shows a certificate of its own, in PEM form; speaks TLS.
    #[must_use]
    pub fn tls_client(mut self, cert: &[u8], key: &[u8]) -> Self {
        self.tls.get_or_insert_default().client = Some((cert.into(), key.into()));
        self
    }

    /// What the names of all keys begin with; `idem` by default. Stores with different prefixes do not meet.
    #[must_use]
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Puts every record into the slot of this hash tag; see [`RedisStore::with_hash_tag`].
    #[must_use]
    pub fn hash_tag(mut self, tag: &str) -> Self {
        self.hash_tag = Some(tag.into());
        self
    }

    /// Works with a server that may throw records away when its memory is full, or that does not say whether it may:
    /// an evicted record is a second run. Refused by default.
    #[must_use]
    pub fn allow_eviction(mut self, allow: bool) -> Self {
        self.allow_eviction = allow;
        self
    }

    /// How many replicas must have a claim or a reply before it is answered; 0 by default. With too few in time a claim
    /// is taken back and fails with [`StoreErrorKind::Unavailable`].
    #[must_use]
    pub fn min_replicas(mut self, replicas: u32) -> Self {
        self.min_replicas = replicas;
        self
    }

    /// How long to wait for the replicas; 500 ms by default.
    #[must_use]
    pub fn replica_timeout(mut self, timeout: Duration) -> Self {
        self.replica_timeout = timeout.clamp(Duration::from_millis(1), Duration::from_secs(60));
        self
    }

    /// How long one call of the store may take, asking again after a lost connection included; 900 ms by default, less
    /// than half of what the engine waits, so that it hears the reason. With
    /// [`min_replicas`](Self::min_replicas), [`replica_timeout`](Self::replica_timeout) comes on top.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.clamp(Duration::from_millis(10), Duration::from_secs(3600));
        self
    }

    /// How long connecting to one server may take, logging in and the checks included; 1 s by default.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout.clamp(Duration::from_millis(10), Duration::from_secs(3600));
        self
    }

    /// How long a record without a reply is kept after its lease, if that is longer than the retention. By default 7 days
    /// where it waits for somebody (held, unknown, freed), and the retention alone where any retry may take it over.
    #[must_use]
    pub fn hold_retention(mut self, retention: Duration) -> Self {
        self.hold_retention = Some(retention);
        self
    }

    /// For an operator: nothing is written by opening it, so that a full server, or one with too few replicas, is no hindrance
    /// to a decision about what is there.
    #[must_use]
    pub fn operating(mut self) -> Self {
        self.purpose = Purpose::Operate;
        self
    }

    /// For looking alone: nothing is written by opening it, and a server that may throw records away is looked at too. What would
    /// claim or change a record fails with [`StoreErrorKind::Unfit`].
    #[must_use]
    pub fn reading(mut self) -> Self {
        self.purpose = Purpose::Look;
        self
    }

    /// Connects, checks the servers, and tries out every command that the store needs.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] when a server is older than 7.0, may evict records, lacks a command, or is not what the
    /// URL says; [`StoreErrorKind::Unavailable`] when none answers.
    pub async fn open(self) -> Result<RedisStore, StoreError> {
        RedisStore::start(self).await
    }

    pub(crate) fn names(&self) -> Result<Names, StoreError> {
        let names = Names::new(&self.prefix)?;
        self.hash_tag.as_ref().map_or(Ok(names.clone()), |tag| names.with_tag(tag))
    }

    /// Where the records are, without secrets.
    pub(crate) fn location(&self) -> String {
        let s = if self.tls.is_some() { "s" } else { "" };
        let servers: Vec<String> = self.servers.iter().map(ToString::to_string).collect();
        let servers = servers.join(",");
        let db = if self.db == 0 { String::new() } else { format!("/{}", self.db) };
        match &self.kind {
            Kind::Single if matches!(self.servers.first(), Some(Address::Unix(_))) => {
                format!("redis+unix://{servers}")
            }
            Kind::Single => format!("redis{s}://{servers}{db}"),
            Kind::Cluster => format!("redis{s}+cluster://{servers}"),
            Kind::Sentinel(name) => format!("redis{s}+sentinel://{servers}/{name}{db}"),
        }
    }

    /// A client of the server at this address.
    pub(crate) fn client(&self, address: &Address) -> Result<Client, Fault> {
        self.client_as(address, self.user.as_deref(), self.password.as_deref(), self.db)
    }

    /// A client of the Sentinel at this address.
    pub(crate) fn sentinel_client(&self, address: &Address) -> Result<Client, Fault> {
        self.client_as(address, self.sentinel_user.as_deref(), self.sentinel_password.as_deref(), 0)
    }

    fn client_as(
        &self,
        address: &Address,
        user: Option<&str>,
        password: Option<&str>,
        db: i64,
    ) -> Result<Client, Fault> {
        let address = match (address, &self.tls) {
            (Address::Unix(path), _) => ConnectionAddr::Unix(path.clone()),
            (Address::Tcp(host, port), None) => ConnectionAddr::Tcp(host.clone(), *port),
            (Address::Tcp(host, port), Some(_)) => {
                ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
            }
        };
        let mut settings =
            RedisConnectionInfo::default().set_db(db).set_lib_name("onlyonce", env!("CARGO_PKG_VERSION"));
        if let Some(user) = user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password);
        }
        let info = address.into_connection_info().map_err(Fault::unreachable)?;
        let info = info
            .set_redis_settings(settings)
            // The driver's default delays small commands.
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = match &self.tls {
            None => Client::open(info),
            Some(tls) => {
                let client_tls = tls.client.as_ref().map(|(cert, key)| ClientTlsConfig {
                    client_cert: cert.clone(),
                    client_key: key.clone(),
                });
                Client::build_with_tls(info, TlsCertificates { client_tls, root_cert: tls.ca.clone() })
            }
        };
        client.map_err(Fault::unreachable)
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

// Passwords and keys stay out of logs.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("location", &self.location())
            .field("prefix", &self.prefix)
            .field("min_replicas", &self.min_replicas)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
