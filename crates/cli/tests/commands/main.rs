//! The real binary, run as a process, on real files of SQLite.

mod decisions;
mod general;
mod keys;
mod refusals;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, Fingerprint, Key, LeaseToken, OnLeaseEnd,
    Operation, Reply, Scope, Store,
};
use onlyonce_store_sqlite::SqliteStore;

/// What a run of the binary gave.
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{}", self.stderr);
        serde_json::from_str(&self.stdout).expect("one JSON document on standard output")
    }

    fn ok(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        self
    }

    /// A failure is one line on standard error that has all of `parts`, and nothing on standard output.
    fn failed(&self, code: i32, parts: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{}", self.stderr);
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is not in {:?}", self.stderr);
        }
        if code != 2 {
            assert_eq!(self.stderr.trim_end().lines().count(), 1, "{}", self.stderr);
        }
    }

    /// Without arguments a command shows its help, as a mistake.
    fn failed_with_help(&self) {
        assert_eq!((self.code, self.stdout.as_str()), (2, ""));
        assert!(self.stderr.contains("Usage:") && self.stderr.contains("Examples:"), "{}", self.stderr);
    }
}

fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onlyonce"));
    command.env_clear().env("USER", "ada").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Run {
    let Output { status, stdout, stderr } = binary().args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is UTF-8");
    Run { code: status.code().expect("not killed by a signal"), stdout: text(stdout), stderr: text(stderr) }
}

/// A file of SQLite in a folder of its own, with records made by the library.
struct Fixture {
    folder: tempfile::TempDir,
    store: SqliteStore,
}

const TOKEN: LeaseToken = LeaseToken::from_bytes([7; 16]);
const HOUR: Duration = Duration::from_secs(3600);

impl Fixture {
    async fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = SqliteStore::open(folder.path().join("keys.db")).await.expect("a new store opens");
        Self { folder, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `onlyonce keys ARGS --store …`.
    fn keys(&self, args: &[&str]) -> Run {
        let store = format!("sqlite:{}", self.path("keys.db").display());
        run(&[&["keys"], args, &["--store", &store]].concat())
    }

    /// A live lease of an hour.
    async fn in_progress(&self, scope: &str, key: &str) -> Operation {
        let operation = operation(scope, key);
        let claimed = self.store.claim(&operation, &request(TOKEN)).await.expect("a claim");
        assert!(matches!(claimed, ClaimOutcome::Acquired(_)), "{claimed:?}");
        operation
    }

    async fn unknown(&self, scope: &str, key: &str) -> Operation {
        let operation = self.in_progress(scope, key).await;
        self.store.mark_unknown(&operation, TOKEN).await.expect("a mark");
        operation
    }

    async fn completed(&self, scope: &str, key: &str, reply: Reply, retention: Duration) -> Operation {
        let operation = self.in_progress(scope, key).await;
        let completed = self.complete(&operation, reply, retention).await;
        assert!(matches!(completed, CompleteOutcome::Stored(_)), "{completed:?}");
        operation
    }

    async fn complete(&self, operation: &Operation, reply: Reply, retention: Duration) -> CompleteOutcome {
        let completion = Completion { token: TOKEN, attempt: 1, reply, retention };
        self.store.complete(operation, &completion).await.expect("a completion")
    }

    /// What a retry by another process gets.
    async fn retry(&self, operation: &Operation) -> ClaimOutcome {
        self.store.claim(operation, &request(LeaseToken::from_bytes([9; 16]))).await.expect("a claim")
    }
}

fn operation(scope: &str, key: &str) -> Operation {
    let scope = Scope::new(scope).expect("a scope");
    Operation::new(scope, Key::new(key).expect("a key"), Fingerprint::of("body"))
}

fn request(token: LeaseToken) -> ClaimRequest {
    ClaimRequest {
        token,
        lease: HOUR,
        retention: 24 * HOUR,
        on_lease_end: OnLeaseEnd::Hold,
        takeover_now: true,
        max_attempts: 5,
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is UTF-8")
}
