//! Gateways on each store.

use std::time::Duration;

use onlyonce_core::CrashPoint;
use testkit::{Answer, Client, ClientResponse, Mariadb, Postgres, Process, Redis, Upstream, wait_for};

use crate::common::Gateway;
use crate::{Death, Runs, died, each, program};

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    each(places(&[]), |death| case(death, "sqlite:onlyonce.db".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    let server = Postgres::shared().await;
    let url = format!("postgres://postgres@{}/{}", server.addr(), server.database().await);
    each(places(&[]), |death| case(death, url.clone())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mysql() {
    let server = Mariadb::shared().await;
    let url = server.url(&server.database().await);
    each(places(&[]), |death| case(death, url.clone())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis() {
    let server = Redis::options().durable().start().await;
    // Redis removes what is over by itself.
    let without = [CrashPoint::PurgeBefore, CrashPoint::PurgeAfter];
    each(places(&without), |death| case(death, server.url())).await;
}

fn places(without: &[CrashPoint]) -> Vec<CrashPoint> {
    let all = CrashPoint::OF_STORES.into_iter().chain(CrashPoint::OF_SERVICES);
    all.filter(|place| !without.contains(place)).collect()
}

/// What the client of the request that met the death gets of the next gateway, and how often it ran in all.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// A reply of its own or a replay, so often run.
    Reply(usize),
    /// Nobody knows; so often run.
    Unknown(usize),
    /// "Not now", each time from the service.
    NotNow,
}

/// What is asked at a place, and what must become of it. Held is what nobody saw the end of.
fn asks(place: CrashPoint) -> (&'static str, End) {
    match place {
        CrashPoint::ClaimBefore => ("/pay", End::Reply(1)),
        CrashPoint::ClaimAfter | CrashPoint::WorkBefore => ("/pay", End::Unknown(0)),
        CrashPoint::WorkAfter | CrashPoint::RecordBefore | CrashPoint::CompleteBefore => {
            ("/pay", End::Unknown(1))
        }
        CrashPoint::CompleteAfter | CrashPoint::RecordAfter => ("/pay", End::Reply(1)),
        CrashPoint::RenewBefore | CrashPoint::RenewAfter => ("/slow", End::Unknown(1)),
        CrashPoint::ReleaseBefore => ("/later", End::Unknown(1)),
        CrashPoint::ReleaseAfter => ("/later", End::NotNow),
        CrashPoint::UnknownBefore | CrashPoint::UnknownAfter => ("/lost", End::Unknown(1)),
        other => panic!("{} has a case of its own", other.name()),
    }
}

async fn case(death: Death, store: String) {
    let bench = Bench::new(death, store).await;
    match death.place {
        CrashPoint::TakeOverAfter => bench.dies_taking_over().await,
        CrashPoint::PurgeBefore | CrashPoint::PurgeAfter => bench.dies_purging().await,
        _ => bench.dies_at_work().await,
    }
}

/// One case: a service behind that counts, and gateways in turn.
struct Bench {
    death: Death,
    store: String,
    folder: tempfile::TempDir,
    upstream: Upstream,
    runs: Runs,
}

impl Bench {
    async fn new(death: Death, store: String) -> Self {
        let (runs, folder) = (Runs::default(), tempfile::tempdir().unwrap());
        let counted = runs.clone();
        let upstream = Upstream::start(move |seen| {
            let run = counted.add(seen.header("idempotency-key").unwrap_or_default().trim_matches('"'));
            let answer = |status| Answer::json(status, &serde_json::json!({ "run": run }));
            match seen.path() {
                "/slow" => answer(201).delay(Duration::from_millis(1800)),
                "/later" => answer(503),
                "/lost" => answer(502),
                _ => answer(201),
            }
        })
        .await;
        Self { death, store, folder, upstream, runs }
    }

    /// Of this case alone: stores are shared.
    fn key(&self, name: &str) -> String {
        format!("{}-{name}", self.death.name())
    }

    async fn gateway(&self, death: Option<Death>, options: &[&str]) -> Gateway {
        let url = self.upstream.url();
        let mut args = vec!["serve", "--listen", "127.0.0.1:0", "--upstream", &url, "--lease", "4s"];
        args.extend(["--log", "quiet", "--scope-none"]);
        args.extend(options);
        let process: Process = program(self.folder.path(), &args, death, &[("ONLYONCE_STORE", &self.store)]);
        let started = Gateway::ready(process, self.folder.path()).await;
        started.unwrap_or_else(|error| panic!("{}: {error:#}", self.death.name()))
    }

    /// Asks under one key after the other until the gateway dies; answers those that were answered, and the one that was not.
    async fn ask_until_death(
        &self,
        gateway: &Gateway,
        path: &str,
    ) -> (Vec<(String, ClientResponse)>, String) {
        let mut answered = Vec::new();
        for number in 0..10 {
            let key = self.key(&number.to_string());
            match ask(gateway.client(), path, &key).await {
                Ok(answer) => answered.push((key, answer)),
                Err(_) => return (answered, key),
            }
        }
        panic!("{}: never reached: {answered:?}", self.death.name());
    }

    async fn dies_at_work(&self) {
        let name = self.death.name();
        let (path, end) = asks(self.death.place);
        let mut gateway = self.gateway(Some(self.death), &[]).await;
        let (answered, unanswered) = self.ask_until_death(&gateway, path).await;
        died(&mut gateway.process, self.death).await;

        let gateway = self.gateway(None, &[]).await;
        for (key, first) in answered {
            let again = gateway.settled(async |client| ask(client, path, &key).await).await;
            match path {
                "/later" => assert_eq!(again.status, 503, "{name}: it was given back, and ran again"),
                "/lost" => self.is(&key, &again, End::Unknown(1)),
                _ => {
                    assert_eq!((again.status, again.text()), (first.status, first.text()), "{name}: {key}");
                    self.is(&key, &again, End::Reply(1));
                }
            }
        }
        let retry = gateway.settled(async |client| ask(client, path, &unanswered).await).await;
        // An owner renews beside its work, which may be on record by then.
        let renewed = matches!(self.death.place, CrashPoint::RenewBefore | CrashPoint::RenewAfter);
        let end = if renewed && retry.status == 201 { End::Reply(1) } else { end };
        self.is(&unanswered, &retry, end);
        // And it stays so.
        let once_more = gateway.settled(async |client| ask(client, path, &unanswered).await).await;
        self.is(&unanswered, &once_more, end);
    }

    /// Owners die over their work, so often as there are to be takeovers; who takes over dies too.
    async fn dies_taking_over(&self) {
        let name = self.death.name();
        let retry = ["--on-unknown", "retry"];
        let keys: Vec<_> = (0..self.death.time).map(|number| self.key(&number.to_string())).collect();
        for key in &keys {
            let owners = Death { place: CrashPoint::RecordBefore, time: 1 };
            let mut owner = self.gateway(Some(owners), &retry).await;
            ask(owner.client(), "/pay", key).await.unwrap_err();
            died(&mut owner.process, owners).await;
        }
        let mut second = self.gateway(Some(self.death), &retry).await;
        let mut answered = Vec::new();
        for key in &keys {
            // Until it is answered or nobody is there any more.
            let answer =
                wait_for("the lease is over", async || match ask(second.client(), "/pay", key).await {
                    Ok(answer) if answer.code() == "in-progress" => None,
                    answer => Some(answer.ok()),
                });
            answered.push(answer.await);
        }
        died(&mut second.process, self.death).await;
        let third = self.gateway(None, &retry).await;
        for (key, answered) in keys.iter().zip(answered) {
            let settled = third.settled(async |client| ask(client, "/pay", key).await).await;
            // Its dead owner ran it, and one of those after it.
            self.is(key, &settled, End::Reply(2));
            if let Some(answered) = answered {
                assert_eq!(settled.text(), answered.text(), "{name}: {key}");
            }
        }
    }

    /// What is over goes, in whatever piece; what is held or still needed stays.
    async fn dies_purging(&self) {
        let [kept, over, lost] = ["kept", "over", "lost"].map(|name| self.key(name));
        let gateway = self.gateway(None, &[]).await;
        let first = ask(gateway.client(), "/pay", &kept).await.unwrap();
        let unknown = ask(gateway.client(), "/lost", &lost).await.unwrap();
        assert_eq!((first.status, unknown.status), (201, 502));
        drop(gateway);
        let gateway = self.gateway(None, &["--retention", "8s"]).await;
        assert_eq!(ask(gateway.client(), "/pay", &over).await.unwrap().status, 201);
        drop(gateway);
        tokio::time::sleep(Duration::from_millis(8200)).await;
        let mut purging = self.gateway(Some(self.death), &[]).await;
        died(&mut purging.process, self.death).await;

        let gateway = self.gateway(None, &[]).await;
        let again = ask(gateway.client(), "/pay", &kept).await.unwrap();
        assert_eq!(again.text(), first.text());
        self.is(&kept, &again, End::Reply(1));
        self.is(&lost, &ask(gateway.client(), "/lost", &lost).await.unwrap(), End::Unknown(1));
        // A new operation by now.
        self.is(&over, &ask(gateway.client(), "/pay", &over).await.unwrap(), End::Reply(2));
    }

    fn is(&self, key: &str, answer: &ClientResponse, end: End) {
        let runs = self.runs.of(key);
        let found = match (answer.status, &*answer.code()) {
            (201, _) => End::Reply(runs),
            (409, "outcome-unknown") => End::Unknown(runs),
            (503, "") => End::NotNow,
            _ => panic!("{}: {key}: {answer:?}", self.death.name()),
        };
        assert_eq!(found, end, "{}: {key}: {answer:?}", self.death.name());
    }
}

/// Asks, and again while the store is busy: nothing was run then.
async fn ask(client: Client, path: &str, key: &str) -> anyhow::Result<ClientResponse> {
    wait_for("the store", async || {
        let request = client.post(path).key(key).header("content-type", "application/json").body("{}");
        match request.send().await {
            Ok(answer) if answer.code() == "store-unavailable" => None,
            answer => Some(answer),
        }
    })
    .await
}
