//! `onlyonce inbox`: the real binary on real files.

mod apply;
mod bad_data;
mod crash;
mod failures;
mod load;
mod race;
mod records;
mod retention;
mod tables;
mod work;
mod work_crash;
mod work_https;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use onlyonce_store_sqlite::rusqlite::{Connection, types::FromSql};

/// What a run of the binary gave.
#[derive(Debug)]
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("the output is UTF-8");
        let Output { status, stdout, stderr } = output;
        Self {
            code: status.code().expect("not killed by a signal"),
            stdout: text(stdout),
            stderr: text(stderr),
        }
    }

    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        self
    }

    /// Done, with something to say on standard error.
    #[track_caller]
    fn warned(self, part: &str) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        assert!(self.stderr.contains(part), "{part:?} is not in {:?}", self.stderr);
        self
    }

    #[track_caller]
    fn failed(self, code: i32, part: &str) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.stderr.contains(part), "{part:?} is not in {:?}", self.stderr);
        assert!(self.stderr.contains("error: "), "{:?}", self.stderr);
        assert!(!self.stderr.contains("database is locked"), "{:?}", self.stderr);
        self
    }

    fn line(&self, number: usize) -> &str {
        self.stdout.lines().nth(number).unwrap_or_default()
    }

    fn last(&self) -> &str {
        self.stdout.lines().last().unwrap_or_default()
    }

    #[track_caller]
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).expect("one JSON document on standard output")
    }
}

/// A folder with an inbox and messages.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file, its folders too.
    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
        fs::write(&path, text).expect("a file");
        name.into()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onlyonce"));
        command.env_clear().env("USER", "ada").env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.current_dir(self.folder.path()).arg("inbox").args(args).stdin(Stdio::null());
        command
    }

    /// Runs `onlyonce inbox ARGS` in the folder.
    fn run(&self, args: &[&str]) -> Run {
        Run::of(self.command(args).output().expect("the binary starts"))
    }

    /// Applies a message that is written to a file first.
    fn apply(&self, message: &str, more: &[&str]) -> Run {
        self.write("message.json", message);
        self.run(&[&["apply", "inbox.db", "message.json"], more].concat())
    }

    fn db(&self) -> Connection {
        Connection::open(self.path("inbox.db")).expect("the database opens")
    }

    #[track_caller]
    fn sql<T: FromSql>(&self, sql: &str) -> T {
        self.db().query_row(sql, [], |row| row.get(0)).expect(sql)
    }

    fn execute(&self, sql: &str) {
        self.db().execute_batch(sql).expect(sql);
    }

    /// Every row of `inbox_log`, its date left out.
    fn log(&self) -> Vec<(String, Option<String>, String, String)> {
        let db = self.db();
        let mut query = db
            .prepare("SELECT msg_id, biz_key, status, response FROM inbox_log ORDER BY msg_id")
            .expect("the table is there");
        let row = query
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
            .expect("rows");
        row.collect::<Result<_, _>>().expect("text")
    }
}

fn message(key: &str, amount: u32) -> String {
    format!(r#"{{"msg_id":"{key}","order_no":"O-1","amount":{amount}}}"#)
}

fn exists(path: &Path) -> bool {
    path.exists()
}
