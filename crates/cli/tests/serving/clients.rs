//! The clients of `docs/clients.md`, as they stand there, against a gateway whose service behind is busy at first.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use testkit::{Answer, Upstream, wait_until};
use tokio::process::Command;

use crate::common::Gateway;

/// The text of the one block of the page that is marked so.
fn snippet(mark: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/clients.md");
    let page = std::fs::read_to_string(page).unwrap();
    let start = format!("\n```{mark}\n");
    let mut blocks = page.split(&start).skip(1);
    let block = blocks.next().unwrap_or_else(|| panic!("no block {mark:?}")).split("\n```\n").next().unwrap();
    assert!(blocks.next().is_none(), "more than one block {mark:?}");
    format!("{block}\n")
}

/// Busy for the first payment, then charges.
async fn service() -> (Upstream, Arc<AtomicUsize>) {
    let charges = Arc::new(AtomicUsize::new(0));
    let (payments, charged) = (AtomicUsize::new(0), charges.clone());
    let upstream = Upstream::start(move |seen| match seen.path() {
        "/pay" if payments.fetch_add(1, Ordering::SeqCst) == 0 => {
            Answer::new(503, "busy").header("retry-after", "1")
        }
        "/pay" => Answer::new(201, format!("charge {}", charged.fetch_add(1, Ordering::SeqCst) + 1)),
        _ => Answer::ok(page()).header("content-type", "text/html"),
    })
    .await;
    (upstream, charges)
}

async fn run(program: &str, args: &[&str], gateway: &Gateway, key: &str) -> String {
    let mut command = Command::new(program);
    command.args(args).env("PAY_URL", format!("http://{}/pay", gateway.addr)).env("PAY_KEY", key);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = testkit::within(program, output).await.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_of_the_page_charge_once_however_often_they_run() {
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str, mark: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, snippet(mark)).unwrap();
        path.display().to_string()
    };
    let programs = [("sh", written("pay.sh", "sh curl")), ("python3", written("pay.py", "python"))];
    for (program, script) in &programs {
        let (upstream, charges) = service().await;
        let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
        for _ in 0..2 {
            let said = run(program, &[script], &gateway, program).await;
            assert!(said.contains("charge 1"), "{program}: {said}");
        }
        assert_eq!((charges.load(Ordering::SeqCst), upstream.count()), (1, 2), "{program}");
        let again = run(program, &[script], &gateway, &format!("{program}-2")).await;
        assert!(again.contains("charge 2"), "{program}: another key is another operation: {again}");
    }
}

/// The script in a page of the same origin; what it prints comes back as a request.
fn page() -> String {
    let script = snippet("javascript");
    format!(
        "<!doctype html><script>globalThis.process = {{ env: {{ PAY_URL: `${{location.origin}}/pay`, PAY_KEY: \"js\" }} }};\n\
         console.log = (...said) => fetch(\"/said/\" + encodeURIComponent(said.join(\" \")));</script>\n\
         <script type=module>\n{script}</script>\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_javascript_of_the_page_charges_once_in_a_real_browser() {
    let (upstream, charges) = service().await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(&upstream.url(), folder.path(), &[]).await;
    for round in 1..=2 {
        let profile = tempfile::tempdir().unwrap();
        let mut browser = Command::new("chromium");
        browser.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-port=0",
        ]);
        browser.arg(format!("--user-data-dir={}", profile.path().display()));
        browser.arg(format!("http://{}/page", gateway.addr)).stdin(Stdio::null());
        browser.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let mut browser = browser.spawn().expect("chromium is installed: the script runs in a real browser");
        let said = || upstream.seen().iter().filter(|seen| seen.path() == "/said/201%20charge%201").count();
        wait_until("the script says what it got", || said() == round).await;
        browser.kill().await.unwrap();
    }
    assert_eq!(charges.load(Ordering::SeqCst), 1);
}
