//! How a gateway starts: its banner, what it refuses, and the file that it makes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use testkit::{Process, free_addr};

use crate::common::{Gateway, PROGRAM, pay};
use crate::numbered;

/// The banner of a gateway with these options, and nothing else.
async fn banner(options: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&format!("http://{}", free_addr()), folder.path(), options).await;
    gateway.process.stderr()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_banner_tells_upstream_store_guard_and_policy() {
    let said = banner(&[]).await;
    for part in [
        concat!("onlyonce ", env!("CARGO_PKG_VERSION"), "\n"),
        "upstream  http://127.0.0.1:",
        "store     sqlite ",
        "onlyonce.db (durable)\n",
        "guarded   POST, PATCH; key required; scope Authorization; callers without credentials share one\n",
        "preset default; on unknown hold; lease 30s, retention 1day, wait 0s\n",
        "listening on http://127.0.0.1:",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    assert!(!said.contains("hazard"), "the defaults have none:\n{said}");
    let other =
        ["--optional", "--scope-header", "X-Account", "--scope-header", "X-User", "--preset", "strict"];
    let said = banner(&[&other[..], &["--wait", "2s", "--lease", "10s", "--retention", "7d"]].concat()).await;
    for part in [
        "key optional; scope x-account + x-user\n",
        "preset strict; on unknown hold; lease 10s, retention 7days, wait 2s\n",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
}

/// A wrong path may be another program's database.
#[tokio::test(flavor = "multi_thread")]
async fn tables_that_are_added_to_a_file_of_others_are_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let shop =
        ["onlyonce.db", "CREATE TABLE orders (id INTEGER PRIMARY KEY); CREATE TABLE customers (id INTEGER)"];
    assert!(
        std::process::Command::new("sqlite3")
            .args(shop)
            .current_dir(folder.path())
            .status()
            .unwrap()
            .success()
    );
    let upstream = format!("http://{}", free_addr());
    let first = Gateway::start(&upstream, folder.path(), &[]).await;
    let said = first.process.stderr();
    assert!(said.contains("hazard    the file had 2 other table(s) and no records"), "{said}");
    let again = Gateway::start(&upstream, folder.path(), &[]).await;
    assert!(!again.process.stderr().contains("hazard"), "they are there by now");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_banner_names_each_hazard() {
    for (options, store, hazard) in [
        (&["--store", "memory:"][..], "(NOT durable)", "gone with the process"),
        (&["--store", "sqlite:onlyonce.db?synchronous=off"], "(NOT durable)", "power"),
        (&["--on-unknown", "retry"], "(durable)", "runs again after its lease"),
        (&["--scope-header", "X-Account"], "(durable)", "only behind a proxy that sets it"),
        (&["--scope-none"], "(durable)", "all callers share one scope"),
        (&["--fail-open"], "(durable)", "while the store is down requests run unguarded"),
        (&["--listen", "0.0.0.0:0"], "(durable)", "without TLS"),
        (&["--unguarded"], "(durable)", "nothing is guarded"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut args = vec!["serve", "--upstream", "http://127.0.0.1:9"];
        for (name, value) in [("--listen", "127.0.0.1:0"), ("--store", "sqlite:onlyonce.db")] {
            if !options.contains(&name) {
                args.extend([name, value]);
            }
        }
        args.extend(options);
        let mut process = Process::spawn(PROGRAM, args, folder.path()).unwrap();
        process.wait_output("listening on http://").await.unwrap();
        let said = process.stderr();
        let hazards: Vec<&str> =
            said.lines().filter(|line| line.trim_start().starts_with("hazard ")).collect();
        assert!(hazards.len() == 1 && hazards[0].contains(hazard), "{options:?}: {hazards:?}\n{said}");
        assert!(said.contains(store), "{options:?}\n{said}");
    }
}

/// A start that must fail: its exit code, and what it wrote.
async fn refused(folder: &Path, store: &str, more: &[&str]) -> (Option<i32>, String) {
    let args = ["serve", "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:9", "--store", store];
    let mut process = Process::spawn(PROGRAM, args.iter().chain(more), folder).unwrap();
    let status = process.wait_exit().await.unwrap();
    testkit::wait_until("the reason", || process.stderr().contains("error: ")).await;
    (status.code(), process.stderr())
}

#[tokio::test(flavor = "multi_thread")]
async fn require_durable_refuses_a_store_that_is_not() {
    let folder = tempfile::tempdir().unwrap();
    for store in ["memory:", "sqlite:onlyonce.db?synchronous=off"] {
        let (code, said) = refused(folder.path(), store, &["--require-durable"]).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("the store is not durable, and --require-durable is given"), "{said}");
        assert!(!said.contains("listening"), "{said}");
    }
    Gateway::start("http://127.0.0.1:9", folder.path(), &["--require-durable"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_in_json_holds_hazards_and_the_reason_of_a_failed_start_too() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |said: &str| -> Vec<serde_json::Value> {
        said.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    };
    let options = ["--log", "json", "--store", "memory:", "--exempt", "/a", "--exempt", "/b", "--fail-open"];
    let gateway = Gateway::start("http://127.0.0.1:9", folder.path(), &options).await;
    let said = lines(&gateway.process.stderr());
    assert_eq!(said[0]["exempt"], serde_json::json!(["/a", "/b"]), "{}", said[0]);
    let hazards = said.iter().filter(|line| line["level"] == "WARN");
    assert!(hazards.clone().all(|line| line["message"].as_str().unwrap().starts_with("hazard: ")));
    assert_eq!(hazards.count(), 2, "{said:?}");

    let args = ["serve", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", "--store", "memory:"];
    let args = args.iter().chain(&["--require-durable", "--log", "json"]);
    let mut process = Process::spawn(PROGRAM, args, folder.path()).unwrap();
    assert_eq!(process.wait_exit().await.unwrap().code(), Some(1));
    testkit::wait_until("the reason", || process.stderr().contains("--require-durable")).await;
    let said = lines(&process.stderr());
    assert_eq!((said.len(), &said[0]["level"]), (1, &"ERROR".into()), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_not_fit_is_named_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = refused(folder.path(), "sqlite:no/such/onlyonce.db", &[]).await;
    assert_eq!(code, Some(74), "{said}");
    assert!(said.contains("no/such/onlyonce.db") && said.contains("folders are not created"), "{said}");
    assert!(!folder.path().join("no").exists());
    std::fs::write(folder.path().join("notes.txt"), "my notes").unwrap();
    let (code, said) = refused(folder.path(), "sqlite:notes.txt", &[]).await;
    assert_eq!(code, Some(74), "{said}");
    assert!(said.contains("notes.txt") && said.contains("not an SQLite database"), "{said}");
    assert_eq!(std::fs::read(folder.path().join("notes.txt")).unwrap(), b"my notes");
    let (code, said) = refused(folder.path(), "oracle://u:hunter2@h", &[]).await;
    assert!(code == Some(2) && said.contains("not supported") && !said.contains("hunter2"), "{said}");
    let (code, said) = refused(folder.path(), "sqlite:a.db", &["--retention", "10s"]).await;
    assert!(code == Some(2) && said.contains("--retention 10s is too short"), "{said}");
    assert!(said.contains("at least twice the lease (--lease 30s)"), "{said}");
    for (option, value, reason) in [
        ("--max-headers", "4294967296", "is not in 1..=4096"),
        ("--max-connections", "0", "is not in 1..=10000000"),
        ("--max-header-bytes", "1KiB", "at least 8KiB"),
        ("--max-header-bytes", "1GiB", "at most 16MiB"),
        ("--header-timeout", "1ns", "at least 1ms"),
        ("--guard", "POST /v1/charges/{id}", "write * for what may differ"),
    ] {
        let (code, said) = refused(folder.path(), "sqlite:a.db", &[option, value]).await;
        assert_eq!(code, Some(2), "{option} {value}: {said}");
        assert!(said.contains(option) && said.contains(reason), "{option} {value}: {said}");
    }
    let (code, said) = refused(folder.path(), "sqlite:a.db", &["--lease", "0s"]).await;
    assert!(code == Some(2) && said.contains("--lease 0s is too short: it must be at least 100ms"), "{said}");
    let budget = ["--buffer-budget", "1MiB"];
    let (code, said) = refused(folder.path(), "sqlite:a.db", &budget).await;
    assert!(
        code == Some(2) && said.contains("--max-request-body") && said.contains("never find room"),
        "{said}"
    );
    let (code, said) = refused(folder.path(), "sqlite:a.db", &["--max-stored-body", "65MiB"]).await;
    assert!(
        code == Some(2) && said.contains("--max-stored-body") && said.contains("never find room"),
        "{said}"
    );
    assert!(!folder.path().join("a.db").exists(), "what is wrong is found before a file is made");
    Gateway::start(
        "http://127.0.0.1:9",
        folder.path(),
        &[&budget[..], &["--max-request-body", "64KiB"]].concat(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let started = Gateway::start_on(&address, "http://127.0.0.1:9", folder.path(), &[]).await;
    let said = started.err().expect("nobody else can listen there").to_string();
    assert!(said.contains(&format!("cannot listen on {address}")) && said.contains("in use"), "{said}");
}

/// By default `onlyonce.db` in the working folder, for its owner's eyes alone, readable with the sqlite3 shell.
#[tokio::test(flavor = "multi_thread")]
async fn the_default_file_is_private_and_the_sqlite3_shell_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = numbered(Duration::ZERO).await;
    let args = ["serve", "--listen", "127.0.0.1:0", "--upstream", &upstream.url()];
    let process = Process::spawn(PROGRAM, args, folder.path()).unwrap();
    let gateway = Gateway::ready(process, folder.path()).await.unwrap();
    let answer = pay(gateway.client(), "order-7").await.unwrap();
    assert_eq!((answer.status, answer.text()), (201, "run 1"));
    for name in ["onlyonce.db", "onlyonce.db-wal", "onlyonce.db-shm"] {
        let mode = std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let columns = "scope, key, request_hash, status, response_code, response_body, locked_until, created_at";
    let row = sqlite3(folder.path(), &format!("select {columns} from idempotency_keys"));
    let row: Vec<&str> = row.trim_end().split('|').collect();
    assert_eq!((row[0], row[1], row[3], row[4], row[5]), ("", "order-7", "completed", "201", "run 1"));
    assert!(row[2].starts_with("sha256:"), "{row:?}");
    let times = "datetime(locked_until / 1000, 'unixepoch') >= datetime(created_at / 1000, 'unixepoch'),
        abs(created_at / 1000 - unixepoch()) < 600, abs(expires_at / 1000 - unixepoch() - 86400) < 600";
    assert_eq!(sqlite3(folder.path(), &format!("select {times} from idempotency_keys")), "1|1|1\n");
    let headers = "select instr(response_headers, 'content-length') = 0, instr(response_body, 'via') from idempotency_keys";
    assert_eq!(sqlite3(folder.path(), headers), "1|0\n", "headers have a column of their own");
    let primary =
        "select group_concat(name) from pragma_table_info('idempotency_keys') where pk > 0 order by pk";
    assert_eq!(sqlite3(folder.path(), primary), "scope,key\n");
}

fn sqlite3(folder: &Path, sql: &str) -> String {
    let output = std::process::Command::new("sqlite3")
        .args(["onlyonce.db", sql])
        .current_dir(folder)
        .output()
        .expect("sqlite3 is installed");
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
