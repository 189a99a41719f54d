//! What the checker says of each server: of a wrong one the one thing that is wrong with it, of a right one nothing.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_check::{EffectSource, Options, Profile, Report, Target, Verdict, check};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::defect::Defect::{self, *};
use crate::door::Door;
use crate::killed::Killable;
use crate::nature::{Breed, Nature};
use crate::serve::Server;

/// Servers that are checked side by side; they wait most of the time.
const AT_ONCE: usize = 24;
const NOT_HELD: [Verdict; 2] = [Verdict::Fail, Verdict::Warn];

fn target(addr: SocketAddr, path: &str) -> Target {
    Target::parse(&format!("http://{addr}{path}")).unwrap()
}

fn options(addr: SocketAddr, profile: Profile) -> Options {
    let bearer = |who: &str| vec![("Authorization".into(), format!("Bearer {who}"))];
    let mut options = Options::new(target(addr, "/pay"));
    options.body = r#"{"amount":100}"#.into();
    options.other_body = Some(r#"{"amount":200}"#.into());
    options.slow_body = Some(r#"{"amount":100,"slow":1000}"#.into());
    options.failing_body = Some(r#"{"amount":2000000}"#.into());
    options.transient_body = Some(r#"{"amount":100,"flaky":true}"#.into());
    options.headers = bearer("alice");
    options.other_headers = bearer("bob");
    options.other_path = Some("/pay/other".into());
    let (url, pointer) = (target(addr, "/effects"), Some("/count".into()));
    options.effect = Some(EffectSource::Url { url, pointer, headers: Vec::new() });
    options.profile = profile;
    options.concurrency = 10;
    options.rounds = 3;
    options.patience = Duration::from_secs(2);
    options.settle = Duration::from_millis(20);
    options
}

/// The body that shows a defect, where the plain one does not.
fn body(nature: Nature) -> &'static str {
    match nature.defect {
        Some(TextDecoded) => r#"{"amount":100,"receipt":"binary"}"#,
        Some(EncodingLost) => r#"{"amount":100,"receipt":"gzip"}"#,
        Some(BigAnswerNotStored) => r#"{"amount":100,"receipt":"big"}"#,
        _ => r#"{"amount":100}"#,
    }
}

async fn report(nature: Nature, profile: Profile) -> Report {
    let server = Server::start(nature).await;
    let mut options = options(server.addr, profile);
    options.body = body(nature).into();
    match nature.defect {
        // The lock must hold for the first copy, and not for the late one.
        Some(LockTooShort) => options.slow_body = Some(r#"{"amount":100,"slow":2000}"#.into()),
        // Each round waits for it.
        Some(LockHidesResult) => options.rounds = 1,
        _ => {}
    }
    match nature.breed {
        Breed::UniqueOrders => number_orders(&mut options),
        // Its work comes after its answer, by as much as the machine is late: whoever has such an API says how long.
        Breed::Accepts => options.settle = Duration::from_millis(120),
        _ => {}
    }
    run(&options).await
}

/// Gives every body an order number that may be used once.
fn number_orders(options: &mut Options) {
    let bodies = [
        &mut options.other_body,
        &mut options.slow_body,
        &mut options.failing_body,
        &mut options.transient_body,
    ];
    for body in bodies.into_iter().flatten().chain([&mut options.body]) {
        body.insert_str(1, r#""order":"{{unique}}","#);
    }
}

async fn run(options: &Options) -> Report {
    check(options, &mut |_| {}).await.unwrap()
}

/// The ids of the scenarios with one of these verdicts.
fn ids<'a>(report: &'a Report, verdicts: &[Verdict]) -> BTreeSet<&'a str> {
    let found = report.results.iter().filter(|result| verdicts.contains(&result.verdict));
    found.map(|result| result.id.as_str()).collect()
}

/// A line that says what is other than `expected`, if anything.
fn differs(name: &str, report: &Report, expected: &[&str]) -> Option<String> {
    let (not_held, unseen) = (ids(report, &NOT_HELD), ids(report, &[Verdict::NotObservable]));
    let expected = BTreeSet::from_iter(expected.iter().copied());
    if not_held == expected && unseen.is_empty() {
        return None;
    }
    let told = report.results.iter().filter(|result| {
        let id = result.id.as_str();
        not_held.contains(id) != expected.contains(id) || unseen.contains(id)
    });
    let lines = told.map(|result| {
        let first = result.got.lines().next().unwrap_or_default();
        format!("\n    {}: {}: {first}", result.id, result.verdict.as_str())
    });
    Some(format!("{name}, expected {expected:?}:{}", lines.collect::<String>()))
}

/// Runs them side by side, and fails with all that they found.
async fn all<F>(checks: impl IntoIterator<Item = F>)
where
    F: Future<Output = Option<String>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = JoinSet::new();
    for check in checks {
        let places = places.clone();
        running.spawn(async move {
            let _place = places.acquire().await;
            Box::pin(check).await
        });
    }
    let wrong: Vec<_> = running.join_all().await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The scenarios that name a defect. More than one only where the defect itself shows in more than one way.
fn named(defect: Defect) -> &'static [&'static str] {
    match defect {
        CheckThenInsert => &["race-once"],
        NoClaim => &["race-once", "in-flight"],
        RefusedDuplicateFrees => &["race-once", "in-flight-settles"],
        LosersGet500 => &["race-losers"],
        LockTooShort => &["in-flight-long"],
        LockOutlivesWork | FivexxStored => &["failure-transient"],
        LockHidesResult => &["retry-answered"],
        PerWorker | ReplayRuns | BigAnswerNotStored => &["once-of-two"],
        FewKeys => &["remembered"],
        OneLockForAll => &["others-go-on"],
        WaiterGetsEmpty => &["race-losers", "in-flight"],
        MissingKeyRuns => &["missing-key"],
        EmptyKeyIsAKey => &["empty-key-bare", "empty-key-quoted"],
        FirstOfTwoKeys => &["malformed-two-lines", "malformed-list"],
        KeyTruncated | LongKeyIs500 => &["key-255"],
        KeyCaseFolded => &["key-case"],
        KeyTrimmed => &["key-space"],
        QuotedIsAnother => &["quoted-is-bare"],
        GlobalScope => &["principals"],
        NoFingerprint | MismatchRuns => &["mismatch-body"],
        FingerprintOfPrefix => &["mismatch-body-end"],
        FingerprintOfDoubles => &["mismatch-big-number"],
        QueryIgnored => &["mismatch-query"],
        PathIgnored => &["mismatch-path"],
        MethodIgnored => &["mismatch-method"],
        MismatchPoisons | MismatchFrees => &["mismatch-harmless"],
        MismatchIs409 => &[
            "mismatch-body",
            "mismatch-body-end",
            "mismatch-big-number",
            "mismatch-query",
            "mismatch-path",
            "mismatch-method",
            "mismatch-in-flight",
        ],
        InFlightFirst => &["mismatch-in-flight"],
        FourxxNotStored => &["failure-definitive"],
        StuckAfterDisconnect => &["disconnect-answered"],
        RunsAgainAfterDisconnect => &["disconnect-once"],
        StuckAfterHalf | HalfBodyPoisons => &["half-sent"],
        UnguardedBig => &["big-body"],
        EverySecondRuns => &["once-of-ten"],
        ReplayOfNow | JsonRewritten | ReplayTruncated => &["replay-body"],
        ReplayIs200 => &["replay-status"],
        HeadersLost | LocationLost => &["replay-headers"],
        RepeatedCollapsed => &["replay-repeated-headers"],
        TextDecoded => &["replay-binary"],
        EncodingLost => &["replay-encoding"],
        SetCookieReplayed => &["replay-set-cookie"],
        MarkerOnFirst => &["first-unmarked"],
        NoMarker => &["replay-marker"],
        MarkerForged => &["forged-marker"],
        NoRetryAfter => &["in-flight-retry-after"],
        PlainRefusals => &["problem-json"],
        NoLinks => &["error-links"],
        NoExpiry => &["replay-expiry"],
        StuckAfterCrash => &["crash-answered"],
        RunsAgainAfterCrash => &["crash-once"],
        ForgetsOnRestart => &["restart-replay"],
        NoKeys => &["missing-key", "once-of-two"],
        Constant | NotFound | Broken | Echo => &["two-keys"],
    }
}

/// Needs a process that can be killed.
fn is_of_crashes(defect: Defect) -> bool {
    matches!(defect, StuckAfterCrash | RunsAgainAfterCrash | ForgetsOnRestart)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wrong_server_is_named_by_its_defect_and_by_nothing_else() {
    // The one that takes longest begins first.
    let others =
        Defect::ALL.iter().copied().filter(|defect| !is_of_crashes(*defect) && *defect != LockHidesResult);
    all([LockHidesResult].into_iter().chain(others).map(|defect| async move {
        // Links to documentation are what the draft asks for, and nobody else.
        let profile = if defect == NoLinks { Profile::Draft } else { Profile::Strict };
        differs(defect.name(), &report(defect.into(), profile).await, named(defect))
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_loses_things_in_a_crash_is_named_by_that_and_by_nothing_else() {
    let defects = Defect::ALL.iter().copied().filter(|defect| is_of_crashes(*defect)).map(Nature::from);
    let right = [Nature::default(), Breed::UnknownAfterCrash.into()];
    all(defects.chain(right).map(|nature| async move {
        let server = Killable::start(nature).await;
        let mut options = options(server.addr, Profile::Strict);
        options.restart_command = Some(server.restart_command());
        let expected = nature.defect.map_or(&[][..], named);
        differs(&nature.name(), &run(&options).await, expected)
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_server_holds_everything_under_every_profile() {
    all(Profile::ALL.map(|profile| async move {
        let nature = if profile == Profile::Stripe { Breed::Stripe.into() } else { Nature::default() };
        let report = report(nature, profile).await;
        assert!(report.holds());
        // What does not apply is little, so that it holds because it was seen to.
        let passed = ids(&report, &[Verdict::Pass]).len();
        let least = match profile {
            Profile::Draft | Profile::Stripe => 25,
            Profile::Practice | Profile::Strict => 45,
        };
        assert!(passed >= least, "{profile}: only {passed} passed");
        differs(profile.as_str(), &report, &[])
    }))
    .await;
}

/// What a right server is advised under the default profile, of its design.
fn advised(breed: Breed) -> &'static [&'static str] {
    match breed {
        Breed::OptionalKey => &["missing-key"],
        Breed::Terse => &["replay-marker", "in-flight-retry-after", "problem-json"],
        Breed::TooEarly => &["race-losers", "in-flight"],
        Breed::QuotesInKey => &["malformed-unclosed", "malformed-list", "quoted-is-bare"],
        _ => &[],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_right_design_fails() {
    all(Breed::ALL.iter().copied().map(|breed| async move {
        let profile = if breed == Breed::Stripe { Profile::Stripe } else { Profile::Practice };
        let report = report(breed.into(), profile).await;
        let failed = ids(&report, &[Verdict::Fail]);
        if !failed.is_empty() {
            return differs(&format!("{breed:?}"), &report, &[]);
        }
        let advised = BTreeSet::from_iter(advised(breed).iter().copied());
        (ids(&report, &[Verdict::Warn]) != advised).then(|| {
            format!("{breed:?} is advised {:?}, expected {advised:?}", ids(&report, &[Verdict::Warn]))
        })
    }))
    .await;
}

/// Where bodies have order numbers, keys that are taken for one are found out by a refusal: 422, or 400 as Stripe's.
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_are_taken_for_one_are_named_where_no_two_bodies_are_the_same() {
    let natures = [Breed::Plain, Breed::Stripe].into_iter().flat_map(|breed| {
        [KeyCaseFolded, KeyTruncated, GlobalScope].map(|defect| Nature { defect: Some(defect), breed })
    });
    all(natures.map(|nature| async move {
        let server = Server::start(nature).await;
        let profile = if nature.breed == Breed::Stripe { Profile::Stripe } else { Profile::Practice };
        let mut options = options(server.addr, profile);
        number_orders(&mut options);
        options.only = ["key-case", "key-space", "key-255", "principals"].map(String::from).into();
        differs(&nature.name(), &run(&options).await, named(nature.defect.unwrap()))
    }))
    .await;
}

/// A proxy is up again before its server is: what it says, and that it hangs up, is not the server's answer.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_proxy_says_while_its_server_starts_is_not_the_servers_answer() {
    let server = Killable::start(Nature::default()).await;
    let door = Door::start(server.addr, &server.restart_command()).await;
    let mut options = options(door.addr, Profile::Strict);
    options.restart_command = Some(door.restart_command());
    let (url, pointer) = (target(server.addr, "/effects"), Some("/count".into()));
    options.effect = Some(EffectSource::Url { url, pointer, headers: Vec::new() });
    options.only = ["restart-replay", "crash-answered", "crash-once"].map(String::from).into();
    let report = run(&options).await;
    assert!(door.turned_away() >= 2 * Door::TURNS_AWAY, "the proxy was asked while the server was away");
    let passed = ids(&report, &[Verdict::Pass]);
    let expected = BTreeSet::from(["two-keys", "restart-replay", "crash-answered", "crash-once"]);
    assert_eq!(passed, expected, "{}", report.json());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_nothing_passes_nothing() {
    all([Constant, NotFound, Broken, Echo].into_iter().flat_map(|defect| {
        [true, false].map(|has_probe| async move {
            let server = Server::start(defect).await;
            let mut options = options(server.addr, Profile::Practice);
            if !has_probe {
                options.effect = None;
            }
            let report = run(&options).await;
            let passed = ids(&report, &[Verdict::Pass]);
            (!passed.is_empty()).then(|| format!("{} (probe: {has_probe}) passes {passed:?}", defect.name()))
        })
    }))
    .await;
}
