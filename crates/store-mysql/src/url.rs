//! The URL of a store: `mysql://user:password@host:port/database?option=value&…`.

use std::net::IpAddr;
use std::path::PathBuf;

use mysql_async::{ClientIdentity, Opts, OptsBuilder, SslOpts};

use crate::error::Fault;

/// How a connection is guarded, in the words of MySQL's own clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SslMode {
    /// Plain text.
    Disabled,
    /// TLS where the server offers it; nobody is checked.
    Preferred,
    /// TLS; nobody is checked.
    Required,
    /// TLS, and the certificate must be of a known authority and name the host of the URL.
    VerifyIdentity,
}

/// A URL, read. Holds a password, so it has no `Debug`.
#[derive(Clone)]
pub(crate) struct Url {
    pub(crate) opts: Opts,
    /// The same without TLS, for a server that offers none where TLS is only preferred.
    pub(crate) plain: Option<Opts>,
    pub(crate) database: String,
    /// Without user and password: for banners and logs.
    pub(crate) location: String,
    pub(crate) prepare: bool,
    pub(crate) connections: Option<usize>,
}

/// What is read after the `?`.
#[derive(Default)]
struct Query {
    ssl_mode: Option<SslMode>,
    ssl_ca: Option<PathBuf>,
    ssl_cert: Option<PathBuf>,
    ssl_key: Option<PathBuf>,
    socket: Option<String>,
    prepare: Option<bool>,
    connections: Option<usize>,
}

impl Url {
    /// Reads a URL. No message repeats it: it may hold a password.
    ///
    /// # Errors
    /// `Unfit` with what to write instead.
    pub(crate) fn parse(text: &str) -> Result<Self, Fault> {
        const FORM: &str = "write mysql://user:password@host:3306/database";
        let rest = text.strip_prefix("mysql://").or_else(|| text.strip_prefix("mariadb://"));
        let Some(rest) = rest else {
            return Err(Fault::unfit(format!("the URL does not begin with mysql:// or mariadb://; {FORM}")));
        };
        let (base, query) = rest.split_once('?').unwrap_or((rest, ""));
        // The source is left out: it may repeat a part of the URL.
        let opts = Opts::from_url(&format!("mysql://{base}")).map_err(|_| {
            Fault::unfit(format!("the URL cannot be read; {FORM}, with special characters as %xx"))
        })?;
        let query = Query::parse(query)?;
        let database = opts.db_name().filter(|name| !name.is_empty()).map(str::to_owned);
        let Some(database) = database else {
            return Err(Fault::unfit(format!("the URL names no database; {FORM}")));
        };
        let place = match &query.socket {
            Some(socket) => socket.clone(),
            None => format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port()),
        };
        let location = format!("mysql://{place}/{database}");
        let mode = query.mode(is_here(opts.ip_or_hostname()));
        let plain = OptsBuilder::from_opts(opts)
            // The driver would go around whatever stands between, and prefer what it finds on this machine.
            .prefer_socket(false)
            .socket(query.socket.clone())
            .tcp_nodelay(true)
            .client_found_rows(false)
            .stmt_cache_size(STATEMENTS_MAX);
        let opts = match mode {
            SslMode::Disabled => plain.clone(),
            _ => plain.clone().ssl_opts(query.ssl(mode)?),
        };
        Ok(Self {
            opts: opts.into(),
            plain: (mode == SslMode::Preferred).then(|| plain.into()),
            database,
            location,
            prepare: query.prepare.unwrap_or(true),
            connections: query.connections,
        })
    }
}

impl Url {
    /// For tests: as where a proxy asks the server for it.
    pub(crate) fn count_found_rows(&mut self) {
        for opts in self.plain.iter_mut().chain([&mut self.opts]) {
            *opts = OptsBuilder::from_opts(opts.clone()).client_found_rows(true).into();
        }
    }
}

/// Prepared statements that a connection keeps.
const STATEMENTS_MAX: usize = 64;

impl Query {
    fn parse(query: &str) -> Result<Self, Fault> {
        let mut read = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let wrong =
                |expected: &str| Err(Fault::unfit(format!("after `{name}=` in the URL comes {expected}")));
            let Some(value) = percent_decoded(value) else {
                return wrong("UTF-8 with special characters as %xx");
            };
            match name {
                "ssl-mode" => {
                    read.ssl_mode = Some(match value.to_ascii_lowercase().replace('-', "_").as_str() {
                        "disabled" => SslMode::Disabled,
                        "preferred" => SslMode::Preferred,
                        "required" => SslMode::Required,
                        "verify_identity" => SslMode::VerifyIdentity,
                        "verify_ca" => {
                            return wrong("verify_identity in place of verify_ca, which is not supported");
                        }
                        _ => return wrong("disabled, preferred, required or verify_identity"),
                    });
                }
                "ssl-ca" => read.ssl_ca = Some(value.into()),
                "ssl-cert" => read.ssl_cert = Some(value.into()),
                "ssl-key" => read.ssl_key = Some(value.into()),
                "socket" => read.socket = Some(value),
                "prepare" => {
                    read.prepare = Some(match value.as_str() {
                        "on" => true,
                        "off" => false,
                        _ => return wrong("on or off"),
                    });
                }
                "connections" => match value.parse() {
                    Ok(count @ 1..=1000) => read.connections = Some(count),
                    _ => return wrong("a number from 1 to 1000"),
                },
                _ => {
                    const KNOWN: &str = "ssl-mode, ssl-ca, ssl-cert, ssl-key, socket, prepare, connections";
                    return Err(Fault::unfit(format!(
                        "an option of the URL is not known; known are {KNOWN}"
                    )));
                }
            }
        }
        Ok(read)
    }

    // An authority is only named to be asked. On this machine there is nobody between.
    fn mode(&self, loopback: bool) -> SslMode {
        let default = match (self.ssl_ca.is_some(), loopback || self.socket.is_some()) {
            (true, _) => SslMode::VerifyIdentity,
            (false, true) => SslMode::Disabled,
            (false, false) => SslMode::Preferred,
        };
        self.ssl_mode.unwrap_or(default)
    }

    fn ssl(&self, mode: SslMode) -> Result<SslOpts, Fault> {
        let checked = mode == SslMode::VerifyIdentity;
        if self.ssl_ca.is_some() && !checked {
            return Err(Fault::unfit(
                "ssl-ca is of use with ssl-mode=verify_identity alone; add it to the URL",
            ));
        }
        for path in [&self.ssl_ca, &self.ssl_cert, &self.ssl_key].into_iter().flatten() {
            std::fs::File::open(path).map_err(|error| {
                Fault::unfit(format!("{} cannot be read", path.display())).with_source(error)
            })?;
        }
        let identity = match (&self.ssl_cert, &self.ssl_key) {
            (Some(cert), Some(key)) => Some(ClientIdentity::new(cert.clone().into(), key.clone().into())),
            (None, None) => None,
            _ => return Err(Fault::unfit("ssl-cert and ssl-key of the URL go together")),
        };
        let ssl = SslOpts::default()
            .with_client_identity(identity)
            // Of no use where nobody is checked; but the driver wants some.
            .with_disable_built_in_roots(checked)
            .with_danger_accept_invalid_certs(!checked);
        Ok(match (&self.ssl_ca, checked) {
            (Some(path), _) => ssl.with_root_certs(vec![path.clone().into()]),
            (None, true) => ssl.with_root_certs(system_roots()?.into_iter().map(Into::into).collect()),
            (None, false) => ssl,
        })
    }
}

/// The authorities that this machine trusts.
fn system_roots() -> Result<Vec<Vec<u8>>, Fault> {
    let found = rustls_native_certs::load_native_certs();
    let mut usable = rustls::RootCertStore::empty();
    // One that cannot be read would fail every connection.
    let certs = found.certs.into_iter().filter(|cert| usable.add(cert.clone()).is_ok());
    let roots: Vec<_> = certs.map(|cert| cert.to_vec()).collect();
    match roots.is_empty() {
        true => Err(Fault::unfit("this machine trusts no authority; name one by ssl-ca in the URL")),
        false => Ok(roots),
    }
}

fn is_here(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16);
                bytes.push(u8::try_from(digit(high)? * 16 + digit(low)?).ok()?);
                rest = tail;
            }
            (b'%', _) => return None,
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        match Url::parse(text) {
            Ok(_) => panic!("{text} is not refused"),
            Err(fault) => fault.into_error("open").to_string(),
        }
    }

    #[test]
    fn a_url_is_read() {
        let url = Url::parse("mysql://me:s%40cret@db.example:3307/shop?prepare=off&connections=3")
            .unwrap_or_else(|_| panic!());
        assert_eq!(url.location, "mysql://db.example:3307/shop");
        assert_eq!((url.opts.user(), url.opts.pass()), (Some("me"), Some("s@cret")));
        assert_eq!((url.prepare, url.connections), (false, Some(3)));
        assert!(url.opts.ssl_opts().is_some() && url.plain.is_some(), "preferred over a network");
        let here = Url::parse("mariadb://root@127.0.0.1/shop").unwrap_or_else(|_| panic!());
        assert!(here.opts.ssl_opts().is_none() && here.plain.is_none() && here.prepare);
        let socket =
            Url::parse("mysql://root@localhost/shop?socket=/run/my%20sql.sock").unwrap_or_else(|_| panic!());
        assert_eq!(socket.opts.socket(), Some("/run/my sql.sock"));
        let checked = Url::parse("mysql://db.example/shop?ssl-mode=VERIFY_IDENTITY&ssl-ca=/dev/null")
            .unwrap_or_else(|_| panic!());
        assert!(checked.plain.is_none());
        assert!(!checked.opts.ssl_opts().is_some_and(|ssl| ssl.accept_invalid_certs()));
    }

    #[test]
    fn a_wrong_url_is_told_what_to_write_and_is_not_repeated() {
        for (url, advice) in [
            ("postgres://u:hunter2@h/d", "does not begin with mysql://"),
            ("mysql://u:hunter2@h", "names no database"),
            ("mysql://u:hunter2@h/", "names no database"),
            ("mysql://u:hunter2@h:port/d", "cannot be read"),
            ("mysql://u:hunter2@h/d?sslmode=hunter2", "known are ssl-mode"),
            ("mysql://u:hunter2@h/d?ssl-mode=hunter2", "comes disabled, preferred"),
            ("mysql://u:hunter2@h/d?ssl-mode=verify_ca", "verify_identity in place"),
            ("mysql://u:hunter2@h/d?ssl-mode=required&ssl-ca=/dev/null", "verify_identity alone"),
            ("mysql://u:hunter2@h/d?ssl-ca=/no/such/file", "/no/such/file cannot be read"),
            ("mysql://u:hunter2@h/d?ssl-mode=required&ssl-cert=/dev/null", "go together"),
            ("mysql://u:hunter2@h/d?connections=0", "from 1 to 1000"),
            ("mysql://u:hunter2@h/d?prepare=%zz", "as %xx"),
        ] {
            let said = refused(url);
            assert!(said.contains(advice), "{url}: {said}");
            assert!(!said.contains("hunter2"), "{said}");
        }
    }
}
