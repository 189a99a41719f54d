//! `--store`: which store, and where.

use std::path::PathBuf;
use std::sync::Arc;

use onlyonce_core::{MemoryStore, StoreAdmin};
use onlyonce_store_mysql::MysqlStore;
use onlyonce_store_postgres::{Options as PostgresOptions, PostgresStore};
use onlyonce_store_redis::{Options as RedisOptions, RedisStore};
use onlyonce_store_sqlite::{Durability, SqliteStore};

use crate::failure::Failure;

const SUPPORTED: &str = "sqlite:FILE, postgres://HOST/DATABASE, mysql://HOST/DATABASE, redis://HOST, redis+cluster://HOST, \
                         redis+sentinel://HOST/NAME, and memory: for the gateway alone";

/// Where the records live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    /// A file of SQLite.
    Sqlite(PathBuf, Durability),
    /// A database of MySQL or MariaDB.
    Mysql(SecretUrl),
    /// A PostgreSQL database.
    Postgres(SecretUrl),
    /// A Redis server, a cluster, or a master that Sentinels know.
    Redis(SecretUrl),
    /// The memory of one gateway: gone with it.
    Memory,
}

/// A URL that can hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct SecretUrl(String);

impl std::fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretUrl(…)")
    }
}

impl SecretUrl {
    /// As it was written, with its password.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The option that every command with a store takes.
#[derive(Debug, clap::Args)]
pub(crate) struct StoreArg {
    /// The store: sqlite:FILE, or sqlite:///absolute/path; postgres://[USER:PASSWORD@]HOST[:PORT]/DATABASE;
    /// mysql://USER:PASSWORD@HOST[:PORT]/DATABASE; redis://[USER:PASSWORD@]HOST[:PORT], redis+cluster://HOST,HOST,
    /// redis+sentinel://HOST,HOST/NAME (rediss for TLS); for `serve` also memory: (gone with the process)
    // Text until the command runs: a refusal by clap would print the value, and a URL can hold a password.
    #[arg(long, value_name = "URL", env = "ONLYONCE_STORE", hide_env_values = true)]
    #[arg(default_value = "sqlite:onlyonce.db")]
    pub(crate) store: String,
}

impl StoreUrl {
    /// Reads the value of `--store`.
    ///
    /// # Errors
    /// [`Failure::Usage`] that says what to write instead; of an unknown URL it repeats the scheme alone.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let usage = |message: String| Err(Failure::Usage(format!("--store: {message}")));
        let Some((scheme, rest)) = text.split_once(':').filter(|(scheme, _)| is_scheme(scheme)) else {
            // What looks like a URL may hold a password.
            if text.is_empty() || text.contains('@') || text.contains("//") {
                return usage(format!(
                    "a store needs a scheme before its file or host; supported: {SUPPORTED}"
                ));
            }
            let text = text.escape_debug();
            return usage(format!("a store needs a scheme before its file: write `sqlite:{text}`"));
        };
        // A scheme has no case (RFC 3986 §3.1).
        let text = &format!("{}:{rest}", scheme.to_ascii_lowercase());
        let scheme = &text[..scheme.len()];
        if scheme == "memory" {
            return match rest {
                "" => Ok(Self::Memory),
                _ => usage("nothing comes after `memory:`".into()),
            };
        }
        if matches!(scheme, "mysql" | "mariadb") {
            // Read again when it is opened: here for what is wrong with it, which repeats nothing of the URL.
            return match MysqlStore::options(text) {
                Ok(_) => Ok(Self::Mysql(SecretUrl(text.into()))),
                Err(error) => usage(error.to_string()),
            };
        }
        if matches!(scheme, "postgres" | "postgresql") {
            // Read again when it is opened: here for what is wrong with it, said without any of it.
            return match PostgresOptions::new(text) {
                Ok(_) => Ok(Self::Postgres(SecretUrl(text.into()))),
                Err(invalid) => usage(invalid.to_string()),
            };
        }
        if scheme.starts_with("redis") {
            // Its own errors repeat nothing of the URL but names of options.
            return match RedisOptions::from_url(text) {
                Ok(_) => Ok(Self::Redis(SecretUrl(text.into()))),
                Err(error) => usage(error.to_string()),
            };
        }
        if scheme != "sqlite" {
            return usage(format!("`{scheme}:` is not supported by this release; supported: {SUPPORTED}"));
        }
        let path = match rest.strip_prefix("//") {
            None => rest,
            Some(path) if path.starts_with('/') => path,
            Some(_) => {
                return usage(
                    "after `sqlite://` comes an absolute path: `sqlite:///path`, or `sqlite:FILE`".into(),
                );
            }
        };
        if path.is_empty() {
            return usage("no file after `sqlite:`; write `sqlite:onlyonce.db`".into());
        }
        if path.starts_with(":memory:") {
            return usage("records in memory are gone with the process; write `sqlite:FILE`".into());
        }
        match path.split_once('?') {
            None | Some((_, "synchronous=full")) => Ok(Self::Sqlite(before_options(path), Durability::Full)),
            Some((_, "synchronous=off")) => Ok(Self::Sqlite(before_options(path), Durability::Off)),
            Some(_) => {
                usage("after `?` comes synchronous=full or synchronous=off; write `sqlite:FILE`".into())
            }
        }
    }
}

fn before_options(path: &str) -> PathBuf {
    path.split_once('?').map_or(path, |(path, _)| path).into()
}

impl StoreArg {
    /// Opens a store that is there already: an operator's command never creates one.
    ///
    /// # Errors
    /// [`Failure::Usage`] on a wrong URL, [`Failure::Io`] on a store that is missing or not fit.
    pub(crate) async fn open_existing(&self) -> Result<Arc<dyn StoreAdmin>, Failure> {
        match StoreUrl::parse(&self.store)? {
            StoreUrl::Sqlite(path, _) => Ok(Arc::new(SqliteStore::open_existing(path).await?)),
            StoreUrl::Mysql(url) => Ok(Arc::new(MysqlStore::open_existing(&url.0).await?)),
            StoreUrl::Postgres(url) => Ok(Arc::new(PostgresStore::open_existing(&url.0).await?)),
            StoreUrl::Redis(url) => Ok(Arc::new(RedisOptions::from_url(&url.0)?.operating().open().await?)),
            StoreUrl::Memory => Err(Failure::Usage(
                "--store: records in memory belong to the process that holds them; write `sqlite:FILE`"
                    .into(),
            )),
        }
    }

    /// The same for a command that only looks: a file of SQLite that cannot be written will do, and one whose disk is full;
    /// a Redis that is full, has too few replicas, or may throw records away.
    ///
    /// # Errors
    /// Those of [`StoreArg::open_existing`].
    pub(crate) async fn open_reading(&self) -> Result<Arc<dyn StoreAdmin>, Failure> {
        match StoreUrl::parse(&self.store)? {
            StoreUrl::Sqlite(path, _) => Ok(Arc::new(SqliteStore::options(path).reading().open().await?)),
            StoreUrl::Redis(url) => Ok(Arc::new(RedisOptions::from_url(&url.0)?.reading().open().await?)),
            _ => self.open_existing().await,
        }
    }

    /// Opens a store for work, creating its file where there is none; with what its operator should know of that.
    ///
    /// # Errors
    /// [`Failure::Usage`] on a wrong URL, [`Failure::Io`] on a store that is not fit.
    pub(crate) async fn open(&self) -> Result<(Arc<dyn StoreAdmin>, Option<String>), Failure> {
        let store: Arc<dyn StoreAdmin> = match StoreUrl::parse(&self.store)? {
            StoreUrl::Sqlite(path, durability) => {
                let store = SqliteStore::options(path).durability(durability).open().await?;
                let note = added_beside(store.added_beside());
                return Ok((Arc::new(store), note));
            }
            StoreUrl::Mysql(url) => Arc::new(MysqlStore::open(&url.0).await?),
            StoreUrl::Postgres(url) => Arc::new(PostgresStore::open(&url.0).await?),
            StoreUrl::Redis(url) => Arc::new(RedisStore::open(&url.0).await?),
            StoreUrl::Memory => Arc::new(MemoryStore::new()),
        };
        Ok((store, None))
    }
}

/// The database of an application is a fine place for its records, and a wrong path is another's.
fn added_beside(others: u64) -> Option<String> {
    (others > 0).then(|| {
        format!(
            "the file had {others} other table(s) and no records: the tables idempotency_* were added to it just \
             now; if that is not meant, name another file and drop them"
        )
    })
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.len() > 1
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_written() {
        for (text, path) in [
            ("sqlite:onlyonce.db", "onlyonce.db"),
            ("sqlite:data/a b.db", "data/a b.db"),
            ("sqlite:/var/lib/a.db", "/var/lib/a.db"),
            ("sqlite:///var/lib/a.db", "/var/lib/a.db"),
            ("sqlite:ü:1.db", "ü:1.db"),
            ("SQLite:Data/A.db", "Data/A.db"),
            ("SQLITE:///var/lib/A.db", "/var/lib/A.db"),
        ] {
            assert_eq!(
                StoreUrl::parse(text).unwrap(),
                StoreUrl::Sqlite(path.into(), Durability::Full),
                "{text}"
            );
        }
        let off = StoreUrl::parse("sqlite:a.db?synchronous=off").unwrap();
        assert_eq!(off, StoreUrl::Sqlite("a.db".into(), Durability::Off));
        assert_eq!(StoreUrl::parse("memory:").unwrap(), StoreUrl::Memory);
        assert_eq!(StoreUrl::parse("Memory:").unwrap(), StoreUrl::Memory);
        for url in ["Redis://localhost", "POSTGRES://localhost/Shop", "MySQL://u:P@localhost/Shop"] {
            let (scheme, rest) = url.split_once(':').unwrap();
            let usual = format!("{}:{rest}", scheme.to_ascii_lowercase());
            assert_eq!(
                StoreUrl::parse(url).unwrap(),
                StoreUrl::parse(&usual).unwrap(),
                "the rest keeps its case"
            );
        }
    }

    #[test]
    fn anything_else_is_told_what_to_write() {
        for (text, advice) in [
            ("onlyonce.db", "write `sqlite:onlyonce.db`"),
            ("/var/lib/a.db", "write `sqlite:/var/lib/a.db`"),
            ("", "supported: sqlite:FILE"),
            ("sqlite:", "write `sqlite:onlyonce.db`"),
            ("sqlite://a.db", "`sqlite:///path`"),
            ("sqlite::memory:", "gone with the process"),
            ("sqlite:a.db?mode=ro", "after `?` comes synchronous"),
            ("memory:x", "nothing comes after"),
            ("mysql:localhost/shop", "write mysql://user:password@host:3306/database"),
            ("mysql://localhost", "names no database"),
            ("mysql://localhost/shop?sslmode=x", "known are ssl-mode"),
            ("oracle://localhost", "`oracle:` is not supported by this release; supported: sqlite:FILE"),
            ("postgres:localhost", "begins with postgres://"),
            ("postgres://localhost/shop?sslmode=full", "verify-full"),
            ("redis:localhost", "write `redis://HOST:PORT`"),
            ("redis+cluster://a/1", "no numbered databases"),
            ("redis+flock://a", "the scheme is one of redis"),
        ] {
            match StoreUrl::parse(text) {
                Err(Failure::Usage(message)) => assert!(message.contains(advice), "{text}: {message}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_password_is_not_repeated() {
        for url in [
            "postgres://user:hunter2@host/db",
            "redis://user:hunter2@host",
            "redis://user:hunter2@host/x",
            "mysql:hunter2",
            "mysql://user:hunter2@host/db",
            "mariadb://user:hunter2@host/db?ssl-mode=hunter2",
            "oracle://user:hunter2@host/db",
            "postgresql://user:hunter2@host/db?sslmode=hunter2",
            "POSTGRES://user:hunter2@host/db?sslmode=hunter2",
        ] {
            assert!(!format!("{:?}", StoreUrl::parse(url)).contains("hunter2"), "{url}");
        }
    }
}
