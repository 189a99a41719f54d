//! The reports of `onlyonce check`: each is read by what it is made for.

use std::path::Path;

use super::*;

/// Runs a check of an API without keys that writes all reports; its answers try to break out of them.
async fn reported(folder: &Path) -> Run {
    let runs = AtomicI64::new(0);
    let hostile = Upstream::start(move |_| {
        let run = runs.fetch_add(1, Ordering::SeqCst);
        Answer::new(
            201,
            format!("</td><script>document.title='owned'</script>]]>\u{1b}[31m &amp; {{{{headline}}}} {run}"),
        )
    })
    .await;
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    check(
        &hostile.url(),
        &["--body", "{}", "--rounds", "1", "--html", &file("r.html"), "--junit", &file("r.xml"), "--verbose"],
    )
    .await
}

/// Runs the browser on a file, without a window.
async fn chromium(args: &[&str], page: &Path) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(args)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), output).await.expect("the browser ends");
    let output = output.expect("chromium is installed: the report is looked at in a real browser");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_html_report_is_one_page_that_a_browser_shows_in_light_and_dark() {
    let folder = tempfile::tempdir().unwrap();
    let run = reported(folder.path()).await;
    assert_eq!(run.code, 1, "{}", run.stderr);
    let page = folder.path().join("r.html");
    let text = std::fs::read_to_string(&page).unwrap();
    for loaded in ["src=", "href=", "url(", "@import", "<script"] {
        assert!(!text.contains(loaded), "nothing is loaded and nothing runs: {loaded}");
    }

    let dom = chromium(&["--dump-dom"], &page).await;
    assert!(dom.contains("<title>onlyonce check POST"), "no script ran: {}", &dom[..300]);
    let scenarios = onlyonce_check::catalogue::built_in();
    for scenario in &scenarios {
        assert!(dom.contains(&format!("id=\"{}\"", scenario.id)), "{}", scenario.id);
    }
    assert_eq!(dom.matches("<details").count(), scenarios.len());

    let mut pictures = Vec::new();
    for scheme in ["1", "0"] {
        let picture = folder.path().join(format!("{scheme}.png"));
        let (to, scheme) = (
            format!("--screenshot={}", picture.display()),
            format!("--blink-settings=preferredColorScheme={scheme}"),
        );
        chromium(&["--window-size=1000,900", &to, &scheme], &page).await;
        pictures.push(std::fs::read(picture).unwrap());
    }
    assert!(pictures.iter().all(|picture| picture.starts_with(b"\x89PNG") && picture.len() > 20_000));
    assert_ne!(pictures[0], pictures[1], "light is not dark");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_junit_report_is_well_formed_and_has_every_scenario() {
    let folder = tempfile::tempdir().unwrap();
    let run = reported(folder.path()).await;
    assert!(!run.stdout.contains('\u{1b}'), "what a server says does not reach the terminal: {}", run.stdout);
    // The browser has the strictest XML reader at hand: it shows where a document is broken.
    let dom = chromium(&["--dump-dom"], &folder.path().join("r.xml")).await;
    assert!(!dom.contains("parsererror"), "{dom}");
    assert!(dom.contains("once-of-two") && dom.contains("failures="), "{dom}");
    let text = std::fs::read_to_string(folder.path().join("r.xml")).unwrap();
    assert_eq!(text.matches("<testcase ").count(), onlyonce_check::catalogue::built_in().len());
    assert_eq!(
        text.matches("<failure ").count().to_string(),
        text.split("failures=\"").nth(1).unwrap().split('"').next().unwrap()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_that_cannot_be_written_is_known_before_anything_is_sent() {
    let upstream = payments().await;
    let run = check(&upstream.url(), &["--body", "{}", "--html", "/no/such/folder/r.html"]).await;
    assert_eq!((run.code, run.stdout.as_str()), (74, ""), "{}", run.stderr);
    assert!(run.stderr.contains("/no/such/folder/r.html"), "{}", run.stderr);
    assert_eq!(upstream.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn json_has_its_members_and_vectors_join_in() {
    let upstream = payments().await;
    let folder = tempfile::tempdir().unwrap();
    let vectors = folder.path().join("mine.json");
    let mine = json!({"format": 1, "scenarios": [{
        "id": "key-colon", "promise": "A colon is part of a key.", "source": "us", "level": {"practice": "must"},
        "advice": "Mind the colon.",
        "trial": {"kind": "keys-apart", "first": "\"{{unique}}:a\"", "second": "\"{{unique}}:b\""}
    }]});
    std::fs::write(&vectors, mine.to_string()).unwrap();
    let args = [
        "--body",
        r#"{"amount":1}"#,
        "--json",
        "--vectors",
        vectors.to_str().unwrap(),
        "--only",
        "key-colon,missing-key",
        "--skip",
        "missing-key",
    ];
    let run = check(&upstream.url(), &args).await;
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.with("pass"), ["key-colon", "two-keys"]);
    let results: Vec<BTreeMap<String, String>> =
        serde_json::from_str(&run.stdout).expect("all members are texts");
    let members = ["advice", "got", "id", "promise", "sent", "source", "verdict"];
    assert!(results.iter().all(|result| result.keys().eq(members)), "{}", run.stdout);
    let mine = results.iter().find(|result| result["id"] == "key-colon").unwrap();
    assert!(mine["sent"].contains("POST /pay") && mine["got"].contains("201"), "{mine:?}");

    std::fs::write(&vectors, "{}").unwrap();
    let run = check(&upstream.url(), &args).await;
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("mine.json") && run.stderr.contains("format"), "{}", run.stderr);
}
