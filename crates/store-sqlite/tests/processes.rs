//! Several real processes on one file: races, SIGKILL, another user, and the order of system calls.
//!
//! The other processes are this test binary, asked by an environment variable to play a role.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::*;
use onlyonce_core::{ClaimOutcome, ClaimRequest, CompleteOutcome, Store, StoreAdmin, StoreErrorKind};
use onlyonce_store_sqlite::{Durability, SqliteStore};

const ROLE: &str = "ONLYONCE_SQLITE_TEST_ROLE";
const FILE: &str = "ONLYONCE_SQLITE_TEST_FILE";
const PATIENCE: Duration = Duration::from_secs(120);

/// Plays the role that another test of this file asks for; by itself, it plays each of them in this process.
#[tokio::test(flavor = "multi_thread")]
async fn role() {
    match std::env::var(ROLE) {
        Ok(role) => play(&role, Path::new(&std::env::var_os(FILE).unwrap())).await,
        Err(_) => {
            let (_folder, path) = place();
            for role in ["open", "race", "pair", "pair-unsafe"] {
                play(role, &path).await;
            }
            let store = SqliteStore::open_existing(&path).await.unwrap();
            completed(store.claim(&op("pair"), &take_over()).await.unwrap());
        }
    }
}

async fn play(role: &str, path: &Path) {
    if role == "open" {
        match SqliteStore::open(path).await {
            Ok(_) => println!("\nopened"),
            Err(error) => println!("\n{:?} {error}", error.kind()),
        }
        return;
    }
    if role == "look" {
        match SqliteStore::options(path).reading().open().await {
            Ok(store) => println!("\n{} completed", store.stats().await.unwrap().completed),
            Err(error) => println!("\n{:?} {error}", error.kind()),
        }
        return;
    }
    let durability = if role == "pair-unsafe" { Durability::Off } else { Durability::Full };
    // By a path that holds only until the folder is changed.
    let relative = role == "race" && std::env::var_os(ROLE).is_some();
    let name = if relative {
        std::env::set_current_dir(path.parent().unwrap()).unwrap();
        Path::new(path.file_name().unwrap())
    } else {
        path
    };
    let options = SqliteStore::options(name).busy_timeout(PATIENCE).durability(durability);
    let store = options.open().await.unwrap();
    if relative {
        std::env::set_current_dir("/").unwrap();
    }
    match role {
        "race" => race(&store).await,
        "load" => load(&store).await,
        "pair" | "pair-unsafe" => pair(&store).await,
        "claim-hold" => claim(&store, hold()).await,
        "claim-take-over" => claim(&store, take_over()).await,
        other => panic!("no role {other}"),
    }
}

// The same hundred keys as everybody else; says which it won.
async fn race(store: &SqliteStore) {
    for n in 0..100 {
        let (op, request) = (op(&format!("k{n}")), hold());
        if let ClaimOutcome::Acquired(_) = store.claim(&op, &request).await.unwrap() {
            let stored = store.complete(&op, &done(request.token, format!("{n}"))).await.unwrap();
            assert!(matches!(stored, CompleteOutcome::Stored(_)));
            println!("\nwon k{n}");
        }
    }
}

// New keys without end, from many callers; says which are acknowledged.
async fn load(store: &SqliteStore) {
    let run = std::process::id();
    let callers = (0..16).map(|caller| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0.. {
                let key = format!("{run}-{caller}-{n}");
                let request = take_over();
                acquired(store.claim(&op(&key), &request).await.unwrap());
                store.complete(&op(&key), &done(request.token, key.clone())).await.unwrap();
                println!("\nacked {key}");
            }
        })
    });
    futures_util::future::join_all(callers).await;
}

async fn pair(store: &SqliteStore) {
    let request = take_over();
    match store.claim(&op("pair"), &request).await.unwrap() {
        ClaimOutcome::Acquired(_) => {
            store.complete(&op("pair"), &done(request.token, "x")).await.unwrap();
            println!("\nacked pair");
        }
        other => println!("\n{other:?}"),
    }
}

// A claim alone.
async fn claim(store: &SqliteStore, request: ClaimRequest) {
    acquired(store.claim(&op("claim"), &request).await.unwrap());
    println!("\nacked pair");
}

fn command(program: &Path, role: &str, path: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, role).env(FILE, path);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn spawn(role: &str, path: &Path) -> Child {
    command(&std::env::current_exe().unwrap(), role, path).spawn().unwrap()
}

// The rest of each line that starts with `word`.
fn lines(child: &mut Child, word: &'static str) -> impl Iterator<Item = String> + use<> {
    let output = BufReader::new(child.stdout.take().unwrap());
    output
        .lines()
        .map_while(Result::ok)
        .filter_map(move |line| Some(line.strip_prefix(word)?.trim().to_owned()))
}

#[test]
fn ten_processes_that_start_at_once_run_each_key_once() {
    let (_folder, path) = place();
    let mut children: Vec<_> = (0..10).map(|_| spawn("race", &path)).collect();
    let mut won = Vec::new();
    for child in &mut children {
        won.extend(lines(child, "won "));
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(won.len(), 100, "each key is won once");
    assert_eq!(won.iter().collect::<HashSet<_>>().len(), 100);
}

#[tokio::test]
async fn what_was_acknowledged_outlives_sigkill() {
    let (_folder, path) = place();
    for round in 0..5 {
        let mut child = spawn("load", &path);
        let acked = lines(&mut child, "acked ");
        let mut keys: Vec<String> = Vec::new();
        for key in acked {
            keys.push(key);
            if keys.len() == 50 {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(keys.len() >= 50, "round {round}: {} acknowledged", keys.len());
        let store = SqliteStore::open_existing(&path).await.unwrap();
        for key in keys {
            let reply = completed(store.claim(&op(&key), &take_over()).await.unwrap());
            assert_eq!(reply.body(), key.as_bytes());
        }
    }
}

#[tokio::test]
async fn a_database_that_another_program_holds_is_a_retryable_timeout() {
    let (_folder, path) = place();
    let store = SqliteStore::options(&path).busy_timeout(Duration::from_millis(100)).open().await.unwrap();
    let other = beside(&path);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let request = hold();
    let error = store.claim(&op("k"), &request).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
    assert!(error.retryable() && !error.may_have_applied());
    let opening = SqliteStore::options(&path).busy_timeout(Duration::from_millis(100)).open().await;
    assert!(opening.unwrap_err().retryable());
    other.execute_batch("ROLLBACK").unwrap();
    acquired(store.claim(&op("k"), &request).await.unwrap());
}

// Permission bits do not bind root, so the process runs as nobody when these tests run as root.
#[test]
fn a_file_that_this_user_may_not_write_is_refused() {
    let (folder, _) = place();
    let program = program_for_all(folder.path());
    let opens = |path: &Path| {
        let mut command = command(&program, "open", path);
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        let mut child = command.spawn().unwrap();
        let said: Vec<_> = lines(&mut child, "").collect();
        assert!(child.wait().unwrap().success(), "{said:?}");
        said.join("\n")
    };
    let private = folder.path().join("folder");
    fs::create_dir(&private).unwrap();
    let file = private.join("onlyonce.db");
    rusqlite::Connection::open(&file).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    // File and folder, then what is said.
    let cases = [
        (0o444, 0o777, "read-only"),
        (0o000, 0o777, "Permission denied"),
        (0o666, 0o555, "write to its folder"),
    ];
    for (file_mode, folder_mode, reason) in cases {
        set(&file, file_mode);
        set(&private, folder_mode);
        let said = opens(&file);
        set(&private, 0o777);
        assert!(said.contains("Unfit") && said.contains(reason), "{reason}: {said}");
        assert!(said.contains(file.to_str().unwrap()), "{said}");
    }
    set(&private, 0o555);
    let said = opens(&private.join("new.db"));
    set(&private, 0o777);
    assert!(said.contains("Unfit") && said.contains("the new file cannot be used"), "{said}");
    set(&file, 0o666);
    let said = opens(&file);
    assert!(said.contains("opened"), "{said}");
}

#[tokio::test]
async fn a_held_lock_is_told_by_a_probe_and_hinders_no_look() {
    let (_folder, path) = place();
    let store = SqliteStore::options(&path).busy_timeout(Duration::from_millis(50)).open().await.unwrap();
    acquired(store.claim(&op("k"), &hold()).await.unwrap());
    // It is written in earnest, or a full disk would not be met.
    let wal = || fs::metadata(format!("{}-wal", path.display())).unwrap().len();
    let before = wal();
    store.probe().await.unwrap();
    assert!(wal() > before, "a page goes to the disk");
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert_eq!(store.probe().await.unwrap_err().kind(), StoreErrorKind::Timeout);
    let reading = SqliteStore::options(&path).reading().open().await.unwrap();
    assert_eq!(reading.stats().await.unwrap().in_progress, 1);
    let refused = reading.claim(&op("other"), &hold()).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    other.execute_batch("ROLLBACK").unwrap();
    store.probe().await.unwrap();
    assert_eq!(reading.stats().await.unwrap().in_progress, 1, "each look is of the file as it is");
    let missing = SqliteStore::options(path.with_extension("none")).reading().open().await.unwrap_err();
    assert_eq!(missing.kind(), StoreErrorKind::Unfit);
}

#[test]
fn who_may_not_write_can_look() {
    let (folder, _) = place();
    let program = program_for_all(folder.path());
    let private = folder.path().join("folder");
    fs::create_dir(&private).unwrap();
    let file = private.join("a%3f #b.db");
    let play = |role: &str, as_nobody: bool| {
        let mut command = command(&program, role, &file);
        if as_nobody && rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        let mut child = command.spawn().unwrap();
        let said: Vec<_> = lines(&mut child, "").collect();
        assert!(child.wait().unwrap().success(), "{said:?}");
        said.join("\n")
    };
    play("pair", false);
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    // No -wal: the file is all there is. And where one may be made, it is the usual way.
    for folder_mode in [0o555, 0o777] {
        set(&file, 0o444);
        set(&private, folder_mode);
        let said = play("look", true);
        set(&private, 0o777);
        assert!(said.contains("1 completed"), "{folder_mode:o}: {said}");
    }
    // What is in the -wal alone is not passed over.
    set(&file, 0o644);
    let writer = rusqlite::Connection::open(&file).unwrap();
    writer.execute_batch("PRAGMA wal_autocheckpoint = 0; CREATE TABLE t (x)").unwrap();
    let _ = fs::remove_file(private.join("a%3f #b.db-shm"));
    set(&private, 0o555);
    let said = play("look", true);
    set(&private, 0o777);
    assert!(said.contains("Unfit") && said.contains("-wal"), "{said}");
}

// A copy where every user may run it.
fn program_for_all(folder: &Path) -> PathBuf {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program
}

// The page cache outlives a kill, so only the order of system calls shows what would survive a power cut.
#[test]
fn a_completion_is_synced_before_it_is_answered() {
    assert!(synced_before_the_answer("pair"));
    assert!(!synced_before_the_answer("pair-unsafe"), "this test must be able to fail");
}

/// A held claim that a power cut took back would be run twice; one that may be taken over costs what an ended lease costs.
#[test]
fn a_claim_is_synced_before_it_is_answered_where_nobody_may_take_over() {
    assert!(synced_before_the_answer("claim-hold"));
    assert!(!synced_before_the_answer("claim-take-over"), "a sync that nobody needs");
}

fn synced_before_the_answer(role: &str) -> bool {
    let (folder, path) = place();
    // The file is there, so that the syncs of its creation are not taken for those of the completion.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { drop(SqliteStore::open(&path).await.unwrap()) });
    let trace = folder.path().join("trace");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-y", "-s", "64", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o"]).arg(&trace);
    strace.arg(std::env::current_exe().unwrap()).args(["--exact", "role", "--nocapture"]);
    strace.env(ROLE, role).env(FILE, &path).stdout(Stdio::null()).stderr(Stdio::null());
    let ended = strace.status().expect("strace must be installed: it shows the order of system calls");
    assert!(ended.success());
    let trace = fs::read_to_string(&trace).unwrap();
    let calls: Vec<&str> = trace.lines().collect();
    let answered = calls.iter().position(|call| call.contains("acked pair")).expect("the answer is traced");
    let wal = |call: &&str| call.contains("onlyonce.db-wal");
    let written = calls[..answered].iter().rposition(|call| wal(call) && call.contains("pwrite64(")).unwrap();
    calls[written..answered].iter().any(|call| wal(call) && call.contains("sync("))
}

#[tokio::test]
async fn two_stores_in_one_process_take_turns() {
    let (_folder, path) = place();
    let open = || async { SqliteStore::options(&path).busy_timeout(PATIENCE).open().await.unwrap() };
    let stores = [Arc::new(open().await), Arc::new(open().await)];
    let claims = (0..200).map(|n| {
        let store = Arc::clone(&stores[n % 2]);
        async move { store.claim(&op(&format!("k{}", n / 2)), &take_over()).await.unwrap() }
    });
    let outcomes = futures_util::future::join_all(claims).await;
    assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, ClaimOutcome::Acquired(_))).count(), 100);
}
