//! The URL of a store. Errors never repeat it: it can hold a password.

use std::path::PathBuf;
use std::time::Duration;

use redis::{ConnectionAddr, IntoConnectionInfo};

use crate::open::{Address, Kind, Options};

const DEFAULT_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

pub(crate) fn parse(url: &str) -> Result<Options, String> {
    parse_parts(url).map_err(|why| match hides_a_login(url) {
        true => format!("{why}; in a password `/`, `?` and `#` are written `%2F`, `%3F` and `%23`"),
        false => why,
    })
}

/// Whether what comes before an `@` was ended early by a `/`, `?` or `#` in it.
fn hides_a_login(url: &str) -> bool {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    rest.split_once(['/', '?', '#']).is_some_and(|(authority, rest)| {
        !authority.is_empty() && !authority.contains('@') && rest.contains('@')
    })
}

fn parse_parts(url: &str) -> Result<Options, String> {
    let (scheme, rest) =
        url.split_once("://").ok_or("after the scheme comes `//`: write `redis://HOST:PORT`")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    if rest.contains('#') {
        return Err("`#` has no meaning here; in a password it is written `%23`".into());
    }
    let (tls, kind) =
        match scheme {
            "redis" => (false, "single"),
            "rediss" => (true, "single"),
            "redis+unix" => (false, "unix"),
            "redis+cluster" => (false, "cluster"),
            "rediss+cluster" => (true, "cluster"),
            "redis+sentinel" => (false, "sentinel"),
            "rediss+sentinel" => (true, "sentinel"),
            _ => return Err(
                "the scheme is one of redis, redis+unix, redis+cluster, redis+sentinel, and rediss… for TLS"
                    .into(),
            ),
        };
    let mut options = match kind {
        "unix" => unix(rest)?,
        _ => network(kind, rest)?,
    };
    if tls {
        options = options.tls(None);
    }
    let options = with_query(options, query)?;
    if options.kind == Kind::Cluster && options.db != 0 {
        return Err("a cluster has no numbered databases: leave `db` out".into());
    }
    Ok(options)
}

fn unix(rest: &str) -> Result<Options, String> {
    let bad = "after `redis+unix://`, or after USER:PASSWORD@, comes the absolute path of a socket";
    let at = rest.find('/').ok_or(bad)?;
    let (login, path) = rest.split_at(at);
    let options = Options::new(Kind::Single, vec![Address::Unix(PathBuf::from(path))]);
    match login.strip_suffix('@') {
        Some(login) => logged_in(options, login),
        None if login.is_empty() => Ok(options),
        None => Err(bad.into()),
    }
}

fn network(kind: &str, rest: &str) -> Result<Options, String> {
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, authority),
    };
    let port = if kind == "sentinel" { SENTINEL_PORT } else { DEFAULT_PORT };
    let servers = hosts.split(',').map(|host| address(host, port)).collect::<Result<Vec<_>, _>>()?;
    if kind == "single" && servers.len() > 1 {
        return Err(
            "several servers are a cluster (`redis+cluster://`) or Sentinels (`redis+sentinel://`)".into()
        );
    }
    let (kind, db) = match kind {
        "cluster" if path.is_empty() => (Kind::Cluster, ""),
        "cluster" => return Err("a cluster has no numbered databases: nothing comes after the nodes".into()),
        "sentinel" => {
            let (name, db) = path.split_once('/').unwrap_or((path, ""));
            if name.is_empty() {
                return Err("after the Sentinels comes the name of the master: `/mymaster`".into());
            }
            (Kind::Sentinel(name.into()), db)
        }
        _ => (Kind::Single, path),
    };
    let mut options = Options::new(kind, servers);
    if !db.is_empty() {
        options = options.db(number("the database after `/`", db)?);
    }
    match login {
        Some(login) => logged_in(options, login),
        None => Ok(options),
    }
}

/// With user and password as they stand before the `@`.
fn logged_in(options: Options, login: &str) -> Result<Options, String> {
    // The driver's own reading of user and password, percent signs and all.
    let bad = "user and password cannot be read; in them `@`, `/`, `?`, `#` and `%` are percent-encoded";
    let info = format!("redis://{login}@localhost").into_connection_info().map_err(|_| bad)?;
    let (user, password) = (info.redis_settings().username(), info.redis_settings().password());
    match (user, password) {
        (user, Some(password)) => Ok(options.user(user, password)),
        (Some(_), None) => Err("a user comes with a password: `USER:PASSWORD@`, or `:PASSWORD@`".into()),
        (None, None) => Ok(options),
    }
}

fn address(host: &str, port: u16) -> Result<Address, String> {
    let bad = || "a server is written HOST or HOST:PORT".to_owned();
    let named = host.rsplit_once(':').is_some_and(|(before, port)| {
        !port.contains(']') && (!before.contains(':') || before.ends_with(']'))
    });
    if host.is_empty() {
        return Err(bad());
    }
    let url = if named { format!("redis://{host}") } else { format!("redis://{host}:{port}") };
    let info = url.into_connection_info().map_err(|_| bad())?;
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            Ok(Address::Tcp(host.into(), *port))
        }
        _ => Err(bad()),
    }
}

fn with_query(mut options: Options, query: &str) -> Result<Options, String> {
    let (mut cert, mut key) = (None, None);
    let (mut sentinel_user, mut sentinel_password) = (None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or("after `?` come NAME=VALUE, joined by `&`")?;
        let value = decode(value).ok_or_else(|| format!("the value of `{}` cannot be read", known(name)))?;
        let ms = || number::<u64>(name, &value).map(Duration::from_millis);
        options = match name {
            "prefix" => options.prefix(&value),
            "hash_tag" => options.hash_tag(&value),
            "db" => options.db(number(name, &value)?),
            "min_replicas" => options.min_replicas(number(name, &value)?),
            "replica_timeout_ms" => options.replica_timeout(ms()?),
            "timeout_ms" => options.timeout(ms()?),
            "connect_timeout_ms" => options.connect_timeout(ms()?),
            "hold_retention_s" => options.hold_retention(Duration::from_secs(number(name, &value)?)),
            "allow_eviction" => match value.as_str() {
                "true" => options.allow_eviction(true),
                "false" => options.allow_eviction(false),
                _ => return Err("`allow_eviction` is true or false".into()),
            },
            "ca" => options.tls(Some(&file(name, &value)?)),
            "cert" => {
                cert = Some(file(name, &value)?);
                options
            }
            "key" => {
                key = Some(file(name, &value)?);
                options
            }
            "sentinel_user" => {
                sentinel_user = Some(value);
                options
            }
            "sentinel_password" => {
                sentinel_password = Some(value);
                options
            }
            _ => return Err(format!("there is no option `{}`", known(name))),
        };
    }
    match (cert, key) {
        (None, None) => {}
        (Some(cert), Some(key)) => options = options.tls_client(&cert, &key),
        _ => return Err("`cert` and `key` go together".into()),
    }
    match (sentinel_user, sentinel_password) {
        (None, None) => {}
        (user, Some(password)) => options = options.sentinel_user(user.as_deref(), &password),
        (Some(_), None) => return Err("`sentinel_user` goes with `sentinel_password`".into()),
    }
    Ok(options)
}

// What is no name of an option may be half of a password.
fn known(name: &str) -> &str {
    let plain =
        !name.is_empty() && name.len() <= 24 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    if plain { name } else { "…" }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("`{name}` is a number"))
}

fn file(name: &str, path: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("`{name}`: {path}: {error}"))
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next()?, rest.next()?].map(|digit| char::from(digit).to_digit(16));
        bytes.push(u8::try_from(digits[0]? * 16 + digits[1]?).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(url: &str) -> String {
        parse(url).unwrap_or_else(|why| panic!("{url}: {why}")).location()
    }

    #[test]
    fn every_form_is_read() {
        for (url, location_of) in [
            ("redis://localhost", "redis://localhost:6379"),
            ("redis://127.0.0.1:7000/3", "redis://127.0.0.1:7000/3"),
            ("redis://[::1]:7000", "redis://[::1]:7000"),
            ("redis://[::1]", "redis://[::1]:6379"),
            ("rediss://user:p%40ss@host:6380", "rediss://host:6380"),
            ("redis://:secret@host?db=2&prefix=shop", "redis://host:6379/2"),
            ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock"),
            ("redis+unix://:p%40w@/run/redis.sock?db=1", "redis+unix:///run/redis.sock"),
            ("redis+unix://app:p%2Fw@/run/a@b.sock", "redis+unix:///run/a@b.sock"),
            ("redis+cluster://a?db=0", "redis+cluster://a:6379"),
            ("redis://a?prefix=shop", "redis://a:6379"),
            ("redis+cluster://a:1,b,c:3", "redis+cluster://a:1,b:6379,c:3"),
            ("rediss+cluster://u:p@a", "rediss+cluster://a:6379"),
            ("redis+sentinel://a,b:1/mymaster", "redis+sentinel://a:26379,b:1/mymaster"),
            ("redis+sentinel://u:p@a/mymaster/4", "redis+sentinel://a:26379/mymaster/4"),
        ] {
            assert_eq!(location(url), location_of, "{url}");
        }
        let options = parse("redis://h?min_replicas=2&replica_timeout_ms=250&allow_eviction=true").unwrap();
        assert_eq!((options.min_replicas, options.allow_eviction), (2, true));
        assert_eq!(options.replica_timeout, Duration::from_millis(250));
    }

    #[test]
    fn anything_else_is_told_what_to_write() {
        for (url, advice) in [
            ("redis:localhost", "redis://HOST:PORT"),
            ("valkey://h", "the scheme is one of"),
            ("redis://", "HOST or HOST:PORT"),
            ("redis://a,b", "redis+cluster"),
            ("redis://h:99999", "HOST or HOST:PORT"),
            ("redis://h/x", "is a number"),
            ("redis+cluster://h/3", "no numbered databases"),
            ("redis+sentinel://h", "the name of the master"),
            ("redis://user@h", "USER:PASSWORD@"),
            ("redis://h?colour=red", "no option `colour`"),
            ("redis://h?min_replicas=many", "`min_replicas` is a number"),
            ("redis://h?cert=/dev/null", "go together"),
            ("redis://h?ca=/nowhere/ca.pem", "`ca`: /nowhere/ca.pem"),
            ("redis+unix://run/redis.sock", "absolute path"),
            ("redis+unix://app@/run/redis.sock", "USER:PASSWORD@"),
            ("redis+unix://:pw@", "absolute path"),
            ("redis+cluster://h?db=2", "no numbered databases"),
            ("redis://app:p/w@h", "`%2F`"),
            ("redis://app:1/w@h", "`%2F`"),
            ("redis://app:p?w@h", "`%3F`"),
            ("redis://app:1?w@h", "`%3F`"),
            ("redis://app:p#w@h", "`%23`"),
            ("redis+cluster://app:p/w@h,i", "`%2F`"),
        ] {
            let why = parse(url).unwrap_err();
            assert!(why.contains(advice), "{url}: {why}");
        }
    }

    #[test]
    fn a_password_is_not_repeated() {
        for url in [
            "redis://user:hunter2@h:99999",
            "redis://user:hunter2@",
            "redis+cluster://user:hunter2@h/1",
            "redis://user:hun#hunter2@h",
            "redis://user:hun?hunter2@h",
            "redis://user:hunter2%zz@h?x",
            "redis://user:hunter2/hunter2@h",
            "redis+unix://user:hunter2@run.sock",
            "redis+unix://user:hunter2%zz@/run.sock",
            "hunter2://h",
        ] {
            if let Err(why) = parse(url) {
                assert!(!why.contains("hunter2"), "{url}: {why}");
            }
        }
        let options = parse("redis://user:hunter2@h?sentinel_password=hunter2").unwrap();
        assert!(!format!("{options:?}").contains("hunter2"));
    }
}
