//! What a gateway holds in memory stays within its bounds, whatever its clients do.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testkit::{Answer, Client, Upstream};

use crate::common::Gateway;

const MIB: u64 = 1 << 20;
const CLIENTS: usize = 1000;

/// A thousand clients with a mebibyte each, over both protocols, while the service behind takes its time: those for whom the
/// budget has no room are refused, and memory stays under the budget and 64 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_clients_with_a_mebibyte_each_stay_within_the_budget() {
    const BUDGET: u64 = 64 * MIB;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let upstream = Upstream::options().forget();
    let upstream = upstream.start(|_| Answer::new(201, "paid").delay(Duration::from_millis(300))).await;
    let folder = tempfile::tempdir().unwrap();
    let budget = (BUDGET / MIB).to_string() + "MiB";
    let options = ["--buffer-budget", &budget, "--cache-bytes", "0", "--upstream-timeout", "2m"];
    let gateway = Gateway::start(&upstream.url(), folder.path(), &options).await;
    // What is allocated once.
    assert_eq!(pay(gateway.client(), 0, Bytes::from_static(b"x")).await, Some(201));
    let at_rest = gateway.process.rss_bytes();

    let body = Bytes::from(vec![b'7'; MIB as usize]);
    let clients = (1..=CLIENTS).map(|number| {
        let client = if number % 2 == 0 { gateway.client() } else { Client::h2c(gateway.addr) };
        tokio::spawn(pay(client, number, body.clone()))
    });
    let answers: Vec<Option<u16>> = join_all(clients).await.into_iter().map(Result::unwrap).collect();
    let count = |status| answers.iter().filter(|answer| **answer == status).count();
    let (paid, refused, cut) = (count(Some(201)), count(Some(503)), count(None));
    let peak = gateway.process.peak_rss_bytes();
    println!(
        "paid={paid} refused={refused} cut={cut} at_rest={at_rest} peak={peak} over_rest={}",
        peak - at_rest
    );
    assert_eq!(paid + refused + cut, CLIENTS, "{answers:?}");
    // Some have room, and there is not room for all.
    assert!(paid > 0 && refused > 0, "{paid} paid, {refused} refused");
    assert_eq!(cut, 0, "got no answer");
    assert!(peak <= BUDGET + 64 * MIB, "{peak} bytes at the peak");
    let ran = upstream.count();
    assert_eq!(ran, paid + 1, "those that were told so, and the first one");
}

/// The status; none where the connection broke before it came.
async fn pay(client: Client, number: usize, body: Bytes) -> Option<u16> {
    let request = client.post("/pay").key(&format!("k-{number}")).body(body);
    let answer = request.send().await.inspect_err(|error| println!("client {number}: {error:#}"));
    answer.ok().map(|answer| answer.status)
}
