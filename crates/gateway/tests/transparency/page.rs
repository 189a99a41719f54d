//! The page of all differences: `docs/transparency.md`.

use std::fmt::Write as _;
use std::path::PathBuf;

use testkit::Nginx;

use crate::Found;
use crate::reasons::REASONS;

/// From here on it is about a certain version of nginx.
const OTHERS: &str = "\n## Through nginx";

/// What the corpus cannot compare.
const BESIDE: &str = "
## Beside the corpus

- A service of HTTP/2 that takes no extended CONNECT gets the WebSocket of a client of HTTP/1.1 as a plain GET; a client of HTTP/2 gets 502.
  nginx offers no extended CONNECT to anybody.
- Interim answers (103) reach clients of HTTP/1.1 alone: the HTTP/2 implementation has no way to send them. The answer itself is the same. Of those that
  come faster than a client takes them 16 are kept.
- In TLS to the service behind (`https://`, `h2://`) the same bytes go over it; a connection that ends without its goodbye is not the
  end of a reply.
";

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/transparency.md")
}

/// Fails when the page does not say what was found.
pub(crate) fn check(groups: &[(&str, usize)], ours: &Found, theirs: &Found) {
    let version = Nginx::version().unwrap();
    let page = render(groups, ours, theirs, &version);
    if std::env::var_os("ONLYONCE_WRITE_DOCS").is_some() {
        std::fs::write(path(), &page).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(path()).expect("docs/transparency.md is there");
    let about = |page: &str| page.split(OTHERS).next().unwrap_or_default().to_owned();
    same(&about(&kept), &about(&page));
    // Another nginx may do otherwise, and that would be no fault of ours.
    if kept.contains(&format!("nginx {version}")) {
        same(&kept, &page);
    }
}

fn same(kept: &str, found: &str) {
    let lines = kept.lines().chain(std::iter::repeat("(nothing)")).zip(found.lines());
    let other = lines.into_iter().find(|(kept, found)| kept != found);
    assert!(
        kept == found,
        "docs/transparency.md does not say what was found, first here: {other:#?}\nONLYONCE_WRITE_DOCS=1 writes it anew"
    );
}

fn render(groups: &[(&str, usize)], ours: &Found, theirs: &Found, version: &str) -> String {
    let total: usize = groups.iter().map(|(_, len)| len).sum();
    let mut page = format!(
        "# What the gateway changes on the way

Nothing but what stands here. A corpus of {total} exchanges is sent directly to a service, through the gateway and through
nginx; both ends of each are compared byte for byte with the direct way: start lines, headers, framing, bodies, trailers, interim
answers, tunnels. Each difference has its reason; one without a reason fails the test, and so does a page that does not say
what was found.

```sh
cargo nextest run -p onlyonce-gateway --test transparency
ONLYONCE_WRITE_DOCS=1 cargo nextest run -p onlyonce-gateway --test transparency    # writes this page
```

The gateway lets requests without a key through (`--optional`). The corpus:

| exchanges | |
|---|---|
"
    );
    for (group, len) in groups {
        writeln!(page, "| {group} | {len} |").unwrap();
    }
    page.push_str("\n## Differences, each with its reason\n");
    for (reason, differences) in REASONS {
        writeln!(page, "\n{reason}\n").unwrap();
        for difference in *differences {
            let cases = ours.get(*difference).unwrap_or_else(|| panic!("explained, not found: {difference}"));
            writeln!(page, "- {difference} ({})", examples(cases)).unwrap();
        }
    }
    page.push_str(BESIDE);
    let heading = OTHERS.trim_start();
    writeln!(
        page,
        "\n{heading}\n\nThe same corpus through nginx {version}, set up to pass on all that it can (`proxy_buffering off`,
`proxy_request_buffering off`, `ignore_invalid_headers off`, upgrades and `Host` passed on). Clients that end their side after
their request are left out: it breaks off with them or not, whichever comes first. What it does and the gateway does not:\n"
    )
    .unwrap();
    for (difference, cases) in theirs.iter().filter(|(difference, _)| !ours.contains_key(*difference)) {
        writeln!(page, "- {difference} ({})", examples(cases)).unwrap();
    }
    page.push_str("\nWhat the gateway does and nginx does not:\n\n");
    for difference in ours.keys().filter(|difference| !theirs.contains_key(*difference)) {
        writeln!(page, "- {difference}").unwrap();
    }
    page
}

/// How many, and the first of them.
fn examples(cases: &[String]) -> String {
    match cases {
        [only] => only.clone(),
        [first, second] => format!("{first}; {second}"),
        [first, ..] => format!("{} exchanges, for example: {first}", cases.len()),
        [] => String::new(),
    }
}
